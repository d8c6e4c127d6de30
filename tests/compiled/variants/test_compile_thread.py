"""A compile has its own thread, its own state and a time limit; one that hangs takes nothing with it."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from multigraph_backend import _compat
from multigraph_backend.lower import compile_thread
from multigraph_backend.lower.compile_thread import CompileTimeout, compile_within, describe
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.process import frames

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


def here() -> contextvars.Context:
    return contextvars.copy_context()


def test_the_result_and_the_errors_of_a_compile_reach_the_caller() -> None:
    assert compile_within(None, lambda process_wide: 42, here()) == 42

    def fails(process_wide: contextlib.ExitStack) -> None:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        compile_within(10, fails, here())


def test_a_compile_runs_in_another_thread_under_the_compile_lock_and_in_the_given_context() -> None:
    caller = threading.get_ident()

    def compile(process_wide: contextlib.ExitStack) -> tuple[bool, bool, str]:
        return threading.get_ident() != caller, _compat.owns_compile_lock(), seen.get()

    context = here()
    context.run(seen.set, "the first compile's")
    assert compile_within(10, compile, context) == (True, True, "the first compile's")
    assert seen.get() == "nothing"


def test_inside_a_compile_of_dynamo_no_other_thread_is_waited_for() -> None:
    caller = threading.get_ident()
    with _compat.compile_lock:
        assert compile_within(10, lambda process_wide: threading.get_ident(), here()) == caller


@pytest.mark.parametrize("hang", [lambda: time.sleep(30), threading.Event().wait], ids=["sleep", "wait"])
def test_a_compile_that_never_ends_is_given_up_and_its_lock_and_changes_with_it(hang: object) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def change() -> Iterator[None]:
        events.append("changed")
        yield
        events.append("undone")

    def compile(process_wide: contextlib.ExitStack) -> None:
        process_wide.enter_context(change())
        hang()  # type: ignore[operator]

    started = time.monotonic()
    with pytest.raises(CompileTimeout, match=r"longer than 0\.2 s"):
        compile_within(0.2, compile, here())
    assert time.monotonic() - started < 10
    assert events == ["changed", "undone"]
    assert compile_within(10, lambda process_wide: "next", here()) == "next"
    torch._dynamo.reset()  # takes the compile lock itself


def test_a_compile_in_python_is_stopped_for_good() -> None:
    stopped = threading.Event()

    def compile(process_wide: contextlib.ExitStack) -> None:
        try:
            while True:
                time.sleep(0.001)
        finally:
            stopped.set()

    with pytest.raises(CompileTimeout):
        compile_within(0.1, compile, here())
    assert stopped.wait(5)


def test_a_compile_that_comes_back_after_it_was_given_up_undoes_nothing_any_more() -> None:
    came_back = threading.Event()

    def compile(process_wide: contextlib.ExitStack) -> None:
        state = torch.random.get_rng_state()
        try:
            time.sleep(2)  # in C code, where no exception can reach it
        finally:
            torch.random.set_rng_state(state)  # what torch does around its tracing
            came_back.set()

    torch.manual_seed(0)
    with pytest.raises(CompileTimeout):
        compile_within(0.1, compile, here())
    first = torch.rand(4)
    (thread,) = [thread for thread in threading.enumerate() if _sleeps_in(thread, "compile")]
    assert not came_back.wait(3)
    assert thread.is_alive()
    second = torch.rand(4)
    torch.manual_seed(0)
    torch.testing.assert_close((torch.rand(4), torch.rand(4)), (first, second), rtol=0, atol=0)


def test_a_compile_that_drops_what_should_end_it_is_parked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a weak reference's callback does, in which the exception happens to arrive."""
    monkeypatch.setattr(compile_thread, "_UNWINDING", 0.5)
    dropped: list[str] = []

    def compile(process_wide: contextlib.ExitStack) -> None:
        while True:
            try:
                while True:
                    time.sleep(0.001)
            except BaseException as error:
                dropped.append(type(error).__name__)

    with pytest.raises(CompileTimeout):
        compile_within(0.1, compile, here())
    assert dropped == ["_Overdue"]
    deadline = time.monotonic() + 30
    while not _parked() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _parked()
    assert dropped == ["_Overdue"]
    assert compile_within(10, lambda process_wide: 42, here()) == 42


PROFILED = """
import contextvars, cProfile, threading
from multigraph_backend.lower import compile_thread

in_c_code = threading.Lock()
in_c_code.acquire()
try:
    compile_thread.compile_within(0.2, lambda process_wide: in_c_code.acquire(), contextvars.copy_context())
except compile_thread.CompileTimeout:
    profile = cProfile.Profile()
    print(profile.runcall(lambda: (lambda: "profiled")()), sum(entry.callcount for entry in profile.getstats()))
"""


def test_a_program_can_be_profiled_while_a_compile_that_was_given_up_is_in_c_code() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("profiled "), done.stderr


def _parked() -> bool:
    """Whether a thread of this test's compile waits for good."""
    return any(
        [place.code.co_name for place in stack[2:5]] == ["noticed", "__init__", "compile"]
        for stack in frames.stacks().values()
    )


def _sleeps_in(thread: threading.Thread, function: str) -> bool:
    place = frames.innermost().get(thread.ident or 0)
    return place is not None and place.code.co_name == function and place.code.co_filename == __file__


def test_waiting_for_another_compile_does_not_count_against_the_limit() -> None:
    begun, results = threading.Event(), []

    def slow(process_wide: contextlib.ExitStack) -> str:
        begun.set()
        time.sleep(0.6)
        return "slow"

    first = threading.Thread(target=lambda: results.append(compile_within(10, slow, here())))
    first.start()
    begun.wait()
    results.append(compile_within(0.3, lambda process_wide: "quick", here()))
    first.join()
    assert sorted(results) == ["quick", "slow"]


def test_an_error_is_described_in_one_line() -> None:
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(KeyError()) == "KeyError"


def test_a_compile_that_is_left_inside_of_inductor_leaves_nothing_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    bundler = _compat.TritonBundler
    monkeypatch.setattr(bundler, "is_enabled", classmethod(lambda cls: True))
    process_wide = contextlib.ExitStack()
    with CompileState.take().restored(process_wide, "", autograd_cache=False):
        bundler.begin_compile()
        with pytest.raises(AssertionError):
            bundler.begin_compile()
        process_wide.close()  # as the caller does whose compile hangs
        bundler.begin_compile()
        bundler.end_compile()


def test_nothing_is_collected_while_frames_are_asked_for() -> None:
    found = []
    with frames.without_collections():
        found.append(gc.isenabled())
    assert [*found, gc.isenabled()] == [False, True]
    gc.disable()
    try:
        with frames.without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
