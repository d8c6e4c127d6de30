"""Other threads are asked where they are, and nothing of theirs lives longer for that."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from multigraph_backend.process import frames


class Held:
    """What a function has in a local variable."""


def inner() -> weakref.ref[Held]:
    local = Held()
    return weakref.ref(local)


def outer() -> weakref.ref[Held]:
    return inner()


def held_on(stacks: Callable[[], object], calls: int) -> int:
    """After how many calls of a function its variables were still there, while another thread looks."""
    stop, interval = threading.Event(), sys.getswitchinterval()

    def look() -> None:
        while not stop.is_set():
            stacks()

    thread = threading.Thread(target=look)
    sys.setswitchinterval(1e-6)  # so that threads take turns between any two instructions
    thread.start()
    try:
        return sum([outer()() is not None for _ in range(calls)])
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("look", [frames.stacks, frames.innermost])
def test_what_a_function_had_is_gone_when_it_returns(look: Callable[[], object]) -> None:
    assert held_on(look, 300_000) == 0


def test_where_a_thread_is_and_from_where_it_was_called() -> None:
    inside, leave = threading.Event(), threading.Event()

    def waits() -> None:
        inside.set()
        leave.wait()

    def calls() -> None:
        waits()

    thread = threading.Thread(target=calls)
    thread.start()
    assert inside.wait(60)
    try:
        assert thread.ident is not None
        stack = frames.stacks()[thread.ident]
        names = [place.code.co_name for place in stack]
        at = names.index("waits")
        assert names[at : at + 2] == ["waits", "calls"]
        assert stack[at].code is waits.__code__
        assert stack[at].line - waits.__code__.co_firstlineno in (1, 2)
        assert [place.frame for place in frames.stacks()[thread.ident][at:]] == [place.frame for place in stack[at:]]
        assert frames.innermost()[threading.get_ident()].code is frames.innermost.__code__
    finally:
        leave.set()
        thread.join()


def test_threads_that_end_meanwhile_have_no_stack() -> None:
    for _ in range(200):
        threads = [threading.Thread(target=frames.stacks) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert frames.stacks()[threading.get_ident()][0].code is frames.stacks.__code__
        for thread in threads:
            thread.join()
