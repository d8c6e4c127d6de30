"""Who has Dynamo's compile lock, and what a compiling thread leaves behind, when compiles end in bad order."""

from __future__ import annotations

import contextlib
import contextvars
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from multigraph_backend import _compat
from multigraph_backend.lower import compile_thread
from multigraph_backend.lower.compile_thread import CompileTimeout, compile_within


def here() -> contextvars.Context:
    return contextvars.copy_context()


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Owner:
    """A thread that has Dynamo's compile lock from `start` to `end`, as one that compiles with Dynamo does."""

    def __init__(self) -> None:
        self._has, self._may_end = threading.Event(), threading.Event()
        self.kept_it: bool | None = None
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with contextlib.suppress(RuntimeError), _compat.compile_lock:  # released by another thread: an error
            self._has.set()
            self._may_end.wait()
            self.kept_it = _compat.owns_compile_lock()

    def start(self) -> None:
        self._thread.start()
        assert self._has.wait(10)

    def end(self) -> bool:
        """Whether it had the lock to the end."""
        self._may_end.set()
        self._thread.join(10)
        return bool(self.kept_it)


def test_ctrl_c_while_another_thread_compiles_leaves_it_the_lock() -> None:
    owner = Owner()
    owner.start()
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.2):
        compile_within(30, lambda process_wide: ran.append("after all"), here())
    time.sleep(0.1)
    assert owner.end()
    assert compile_within(10, lambda process_wide: 42, here()) == 42
    assert ran == []


def test_the_lock_is_not_taken_over_once_the_overdue_compile_has_given_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends just when it is abandoned, and another thread has its turn."""
    monkeypatch.setattr(compile_thread, "_GRACE", 0.1)
    monkeypatch.setattr(compile_thread, "_UNWINDING", 0.1)
    owner, unwinding, may_end = Owner(), threading.Event(), threading.Event()

    def undo() -> None:  # in the caller's thread, which goes on without the compile
        may_end.set()
        owner.start()

    def compile(process_wide: contextlib.ExitStack) -> None:
        process_wide.callback(undo)
        try:
            while True:
                time.sleep(0.001)
        finally:
            unwinding.set()
            may_end.wait(10)

    with pytest.raises(CompileTimeout):
        compile_within(0.1, compile, here())
    assert unwinding.is_set()
    assert owner.end()


def test_ctrl_c_while_an_overdue_compile_unwinds_frees_the_lock_at_once() -> None:
    def compile(process_wide: contextlib.ExitStack) -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            time.sleep(5)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.5):
        compile_within(0.1, compile, here())
    assert time.monotonic() - started < 4
    assert _compat.compile_lock.acquire(timeout=1)
    _compat.compile_lock.release()


def test_ctrl_c_while_the_compiles_thread_is_started_gives_that_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    start = threading.Thread.start

    def compile(process_wide: contextlib.ExitStack) -> None:
        begun.set()
        try:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                time.sleep(0.001)
        finally:
            ended.set()

    def interrupted(self: threading.Thread) -> None:
        start(self)
        assert begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_within(30, compile, here())
    assert ended.is_set()
    monkeypatch.undo()
    assert compile_within(10, lambda process_wide: 42, here()) == 42


def test_a_thread_that_compiles_with_dynamo_may_wait_for_a_call_that_has_to_compile() -> None:
    results: list[str] = []

    def call() -> None:
        try:
            compile_within(0.5, lambda process_wide: None, here())
        except CompileTimeout as error:
            results.append(str(error))

    caller = threading.Thread(target=call, daemon=True)
    with _compat.compile_lock:
        caller.start()
        caller.join(10)
    (said,) = results
    assert "another compile has held Dynamo's compile lock for 0.5 s" in said
    assert compile_within(10, lambda process_wide: 42, here()) == 42


# ---------------------------------------------------------------- at random


def ends(stop: float) -> None:
    while time.monotonic() < stop:
        time.sleep(0.0005)


def sleeps(stop: float) -> None:
    time.sleep(max(0.0, stop - time.monotonic()))


def fails(stop: float) -> None:
    ends(stop)
    raise ValueError("no such kernel")


def unwinds_slowly(stop: float) -> None:
    try:
        ends(stop)
    finally:
        time.sleep(random.random() * 0.02)


def drops(stop: float) -> None:
    with contextlib.suppress(BaseException):
        ends(stop)
    ends(stop)


ENDINGS: tuple[Callable[[float], None], ...] = (ends, sleeps, fails, unwinds_slowly, drops)


def holds_briefly(draw: random.Random) -> None:
    time.sleep(draw.random() * 0.01)


def disturbed(seed: int, seconds: float, hold: Callable[[random.Random], None] = holds_briefly) -> list[str]:
    """What goes wrong while threads compile up to their limits and past them, beside threads that own the lock."""
    wrong: list[str] = []
    stop = time.monotonic() + seconds

    def owning(draw: random.Random) -> None:
        while time.monotonic() < stop:
            try:
                with _compat.compile_lock:
                    hold(draw)
                    if not _compat.owns_compile_lock():
                        wrong.append("the lock was taken from its owner")
            except RuntimeError:
                wrong.append("the lock was gone when its owner released it")
            time.sleep(draw.random() * 0.005)

    def compiling(draw: random.Random) -> None:
        while time.monotonic() < stop:
            ending, limit = draw.choice(ENDINGS), draw.choice((0.005, 0.01, 0.02))
            length = limit + draw.choice((-0.004, 0.0, 0.004, 0.01, 0.03))
            undone: list[int] = []

            def compile(
                process_wide: contextlib.ExitStack,
                ending: Any = ending,
                length: float = length,
                undone: list[int] = undone,
            ) -> int:
                process_wide.callback(undone.append, 1)
                ending(time.monotonic() + length)
                return 42

            with contextlib.suppress(CompileTimeout, ValueError):
                if compile_within(limit, compile, here()) != 42:
                    wrong.append("a compile returned something else")
            if len(undone) > 1:
                wrong.append(f"a change was undone {len(undone)} times")

    works = (owning, owning, compiling, compiling, compiling)
    threads = [
        threading.Thread(target=work, args=(random.Random(f"{seed} {index}"),)) for index, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 20)
        if thread.is_alive():
            wrong.append("a thread waits for good")
    if _compat.compile_lock.acquire(timeout=5):
        _compat.compile_lock.release()
    else:
        wrong.append("the lock is never given back")
    return wrong


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_thread, "_GRACE", 0.005)
    monkeypatch.setattr(compile_thread, "_UNWINDING", 0.01)
    monkeypatch.setattr(compile_thread, "_LOOK", 0.002)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("seed", range(2))
def test_whatever_becomes_of_compiles_the_lock_stays_with_its_owner(seed: int) -> None:
    assert disturbed(seed, 1.5) == []


@pytest.mark.usefixtures("hasty")
def test_the_random_programs_notice_when_the_lock_is_taken_from_whoever_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old mistake: whoever abandons a compile takes the lock over, whether that still has it or not."""
    live_without = compile_thread._Job._live_without
    wanted, owned, taken = threading.Event(), threading.Event(), threading.Event()

    def takes_it(self: compile_thread._Job[Any], thread: threading.Thread) -> None:
        live_without(self, thread)
        wanted.set()
        if owned.wait(2):
            _compat.take_over_compile_lock()
            taken.set()
        else:  # the owners are done
            wanted.clear()

    def hold(draw: random.Random) -> None:
        holds_briefly(draw)
        if wanted.is_set():
            owned.set()
            taken.wait(10)

    monkeypatch.setattr(compile_thread._Job, "_live_without", takes_it)
    # on a machine with other work it may take a while until a compile is abandoned at all
    found = (disturbed(seed, 1.5, hold) for seed in range(20))
    assert any("the lock was taken from its owner" in wrong for wrong in found)
