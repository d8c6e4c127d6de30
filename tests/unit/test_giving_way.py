"""A thread that gives way: it works in slices, rests in between while calls come, and leaves nothing behind."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from multigraph_backend.lower import compile_thread
from multigraph_backend.process import giving_way
from multigraph_backend.process.giving_way import REST, SLICE, GivesWay, also, of_this_thread

BY_MONITORING = sys.version_info >= (3, 12)


@pytest.fixture(autouse=True)
def nothing_traces() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(None)
    yield
    left = sys.gettrace()
    sys.settrace(before)
    assert left is None
    assert not giving_way._inside
    assert not BY_MONITORING or mine() is None


def mine() -> int | None:
    """The number of a tool of ours that is left."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    names = {number: monitoring.get_tool(number) for number in range(6)}
    return next((number for number, name in names.items() if name == "multigraph"), None)


class Time:
    """A clock that goes on by so much at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step, self.slept = 0.0, step, 0.0

    def clock(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def small() -> None:
    """What a thread calls while it works."""


def work(times: int) -> None:
    for _ in range(times):
        small()


class Calls:
    """One more at each look."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def test_while_calls_come_a_tenth_of_the_time_is_its_own() -> None:
    time = Time(SLICE / 20)
    way = GivesWay(Calls(), clock=time.clock, sleep=time.sleep)
    with way.inside():
        work(4000)
    assert way.slices
    assert way.rested == pytest.approx(time.slept)
    worked = time.now - time.slept
    assert time.slept == pytest.approx(worked * REST / SLICE, rel=0.15)


def test_it_goes_on_where_none_came() -> None:
    time = Time(SLICE / 20)
    way = GivesWay(lambda: 7, clock=time.clock, sleep=time.sleep)
    with way.inside():
        work(4000)
    assert way.slices
    assert not way.rested


def test_it_rests_no_longer_than_it_may() -> None:
    time = Time(SLICE / 2)
    way = GivesWay(Calls(), most=10 * REST, clock=time.clock, sleep=time.sleep)
    with way.inside():
        work(4000)
    assert way.rested == pytest.approx(10 * REST, abs=1.01 * REST)


def test_code_that_others_have_called_is_looked_at_the_next_time() -> None:
    """By monitoring, what was of no interest once is told no more, in any thread, until all is asked for anew."""
    with GivesWay(lambda: 0).inside():
        other = threading.Thread(target=work, args=(3,))
        other.start()
        other.join()
    time = Time(SLICE / 20)
    way = GivesWay(Calls(), clock=time.clock, sleep=time.sleep)
    with way.inside():
        work(1000)
    assert time.now > 40 * SLICE


def test_other_threads_are_not_slowed_down() -> None:
    time = Time(SLICE)
    way = GivesWay(Calls(), clock=time.clock, sleep=time.sleep)
    with way.inside():
        looked = time.now
        other = threading.Thread(target=work, args=(500,))
        other.start()
        other.join()
        rested = way.rested
    assert time.now - looked - rested < 100 * SLICE  # the starting thread's own functions


def test_a_real_thread_leaves_the_interpreter_to_calls() -> None:
    calls = Calls()
    over = threading.Event()
    rested: list[float] = []

    def load() -> None:
        way = GivesWay(calls)
        began = time.thread_time()
        with way.inside():
            while time.thread_time() - began < 0.02:
                work(10)
        rested.append(way.rested)
        over.set()

    began = time.perf_counter()
    thread = threading.Thread(target=load)
    thread.start()
    assert over.wait(60)
    thread.join()
    assert rested[0] >= 5 * REST
    assert time.perf_counter() - began >= rested[0]


def test_who_works_on_its_behalf_gives_way_too() -> None:
    clock = Time(SLICE)
    way = GivesWay(Calls(), clock=clock.clock, sleep=clock.sleep)
    seen: list[Any] = []

    def helps(taken: GivesWay | None) -> None:
        with also(taken):
            before = way.rested
            work(50)
            seen.append((of_this_thread(), way.rested - before))

    with way.inside():
        assert of_this_thread() is way
        thread = threading.Thread(target=helps, args=(of_this_thread(),))
        thread.start()
        thread.join()
    assert of_this_thread() is None
    ((helper, rested),) = seen
    assert helper is way
    assert rested > 0
    helps(None)
    assert seen[-1] == (None, 0)


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_the_compiling_thread_gives_way_with_its_caller(seconds: float | None) -> None:
    way = GivesWay(lambda: 0)
    with way.inside():
        assert compile_thread.compile_within(seconds, lambda _: of_this_thread(), contextvars.copy_context()) is way
        assert of_this_thread() is way
    assert compile_thread.compile_within(seconds, lambda _: of_this_thread(), contextvars.copy_context()) is None


def other_work() -> None:
    small()


@pytest.mark.parametrize("beside", [False, True])
def test_it_looks_only_at_what_it_is_told(beside: bool) -> None:
    """`beside`: another thread gives way at all functions meanwhile."""
    clock = Time(SLICE)
    rests: list[float] = []
    way = GivesWay(
        Calls(), clock=clock.clock, sleep=rests.append, work=0.0, rest=0.25, only=frozenset({other_work.__code__})
    )
    entered, over = threading.Event(), threading.Event()
    looked: list[float] = []

    def elsewhere() -> None:
        own = GivesWay(lambda: 0, clock=lambda: looked.append(0.0) or 0.0)  # type: ignore[func-returns-value]
        with own.inside():
            entered.set()
            while not over.is_set():
                time.sleep(0.001)
                work(3)

    thread = threading.Thread(target=elsewhere)
    if beside:
        thread.start()
        entered.wait()
    with way.inside():
        for _ in range(5):
            work(20)
            other_work()
    assert rests == [0.25] * 5
    if beside:
        over.set()
        thread.join()
        assert len(looked) > 3
    other_work()
    assert len(rests) == 5


def test_what_fails_leaves_nothing_behind() -> None:
    def fails() -> None:
        with GivesWay(lambda: 0).inside():
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert of_this_thread() is None


def test_threads_that_come_and_go_at_random() -> None:
    wrong: list[object] = []

    def come_and_go(seed: int) -> None:
        for turn in range(40):
            way = GivesWay(Calls(), most=0.003)
            with way.inside():
                work((seed * turn) % 37)
                if of_this_thread() is not way:
                    wrong.append((seed, turn))
            if of_this_thread() is not None:
                wrong.append((seed, turn))

    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def forked(inside_in_child: bool) -> bool:
    """Whether a child that is forked now gives way or not, and counts what it should."""
    child = os.fork()
    if not child:
        try:
            own = of_this_thread()
            fine = (own is not None) == inside_in_child and len(giving_way._inside) == inside_in_child
            fine = fine and (not BY_MONITORING or (mine() is not None) == inside_in_child)
            with GivesWay(lambda: 0).inside():
                small()
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_a_forked_process_takes_over_what_its_own_thread_has() -> None:
    inside, over = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with GivesWay(lambda: 0).inside():
            inside.set()
            over.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    inside.wait()
    of_a_thread = forked(False)
    over.set()
    thread.join()
    assert of_a_thread
    with GivesWay(lambda: 0).inside():
        assert forked(True)


def test_where_a_debugger_looks_nothing_is_sliced() -> None:
    """Up to 3.11 there is one trace function; later, a number of a tool is free or not."""
    way = GivesWay(Calls(), clock=Time(SLICE).clock, sleep=lambda _: None)

    def debugger(*_: object) -> None: ...

    if BY_MONITORING:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        for number in (3, 4):
            monitoring.use_tool_id(number, "another")
        try:
            with way.inside():
                work(50)
            assert [monitoring.get_tool(number) for number in (3, 4)] == ["another"] * 2
        finally:
            for number in (3, 4):
                monitoring.free_tool_id(number)
    else:
        sys.settrace(debugger)
        try:
            with way.inside():
                work(50)
            assert sys.gettrace() is debugger
        finally:
            sys.settrace(None)
    assert not way.slices
    assert not way.rested


def test_a_debugger_that_comes_meanwhile_stays() -> None:
    def debugger(*_: object) -> None: ...

    try:
        with GivesWay(lambda: 0).inside():
            sys.settrace(debugger)
            work(5)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
