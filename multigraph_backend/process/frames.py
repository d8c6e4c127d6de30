"""Asking where other threads are without holding up the program, or keeping anything of theirs alive.

A frame that is held outlives its function, with all its locals: tensors that a recording takes for dead, a guard of
torch's whose end changes the state of the thread that it ends in.  Between two instructions of ours another thread may
run, for as long as the system likes, so no instruction of ours ever holds a frame: each question is one chain of
iterators of Python's own, which another thread cannot come between.  What comes out is numbers and code.

On Python 3.11 `sys._current_frames` makes objects while it holds a lock of the interpreter, and so may collect garbage
there.  A tensor that is collected lets Python's own lock go; whoever has that next and asks for frames too waits for
the other lock, and both wait forever.

Invariants: inside `without_collections` nothing is collected, and one thread at a time is there.  Nothing here holds a
frame when another thread runs, unless the program has audit hooks in Python, which are called in the midst of it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, repeat, starmap, takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple

from multigraph_backend.process import garbage

_lock = threading.Lock()


class Place(NamedTuple):
    """Where a frame is.  frame: its number, which another has once it is gone; at: its last instruction."""

    frame: int
    at: int
    line: int
    code: CodeType


def innermost() -> dict[int, Place]:
    """Of each thread, by its number, where it is."""
    with without_collections():
        found = list(
            zip(_asked(dict.keys), map(id, _asked(dict.values)), map(_facts, _asked(dict.values)), strict=True)
        )
    return {thread: Place(frame, *facts) for thread, frame, facts in found}


def stacks() -> dict[int, list[Place]]:
    """Of each thread, by its number, where it is and from where that was called, innermost first.  Each stack is of one
    moment, and not all are of the same."""
    found: dict[int, list[tuple[int, tuple[int, int, CodeType]]]] = {}
    with without_collections():
        for thread in list(_asked(dict.keys)):
            found[thread] = list(zip(map(id, _stack(thread)), map(_facts, _stack(thread)), strict=True))
    return {thread: [Place(frame, *facts) for frame, facts in stack] for thread, stack in found.items()}


_facts: Callable[[FrameType], tuple[int, int, CodeType]] = operator.attrgetter("f_lasti", "f_lineno", "f_code")
_is_frame: Callable[[object], bool] = functools.partial(operator.is_not, None)


def _asked(part: Callable[[dict[int, FrameType]], Any]) -> Iterator[Any]:
    """`part` of what `sys._current_frames()` answers when the first of it is taken."""
    return chain.from_iterable(map(part, starmap(sys._current_frames, ((),))))


def _stack(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, from when the first of them is taken."""
    top = map(operator.methodcaller("get", thread), starmap(sys._current_frames, ((),)))
    names: Iterator[Any] = chain(top, repeat("f_back"))
    return takewhile(_is_frame, accumulate(names, getattr))


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Around `sys._current_frames()` and what is done with its answer."""
    with _lock, garbage.paused():
        yield


def _begin_anew() -> None:
    """In a forked process: whoever was inside is not there."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
