"""A thread that gives way to calls: it works in slices, and rests in between while calls come.

Python's threads share one interpreter, and it knows no priorities: beside a thread that loads code, a step of a server
takes several times as long, for as long as that thread works, however short its turns are (`short_turns`).  So the
thread itself looks at the clock each time it calls a Python function, and after `SLICE` seconds of work it sleeps for
`REST` seconds if any call came meanwhile.  Torch's code that it runs need not know.

A worker that tunes kernels gives way, too: a GPU serves processes by turns, so a step that meets a benchmark of another
one waits for it at each kernel that it waits for.  It looks only where `only` says: at the functions that
benchmark, and rests before each.

How it looks: up to Python 3.11 by a trace function of its own thread; from 3.12 on by `sys.monitoring`, where events
are the whole process's, so whatever other threads call is told once to be of no interest.  Where a debugger traces the
thread, or no tool's number is free, nothing is sliced; `slices` tells.

Guarantees: where no call came since the last slice, it goes on; it rests at most so many seconds in all, so what waits
for it waits no longer than that; what it does is the same as without.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

SLICE = 0.001  # seconds of work; a step that meets them is longer by as much at most
REST = 0.009  # seconds
MOST = 10.0  # seconds of rests in all

_NAME = "multigraph"
_NUMBERS = (4, 3)  # of tools; the others have a meaning


class GivesWay:
    """Around work, in its thread; `also` takes in a thread that works on its behalf.

    `calls`: how many there were so far.  `work`, `rest`: seconds; `most`: of rests in all.  `only`: the code of the
    functions at which it looks; none: all.
    """

    def __init__(
        self,
        calls: Callable[[], int],
        most: float = MOST,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        *,
        work: float = SLICE,
        rest: float = REST,
        only: frozenset[CodeType] = frozenset(),
    ) -> None:
        self._calls, self._left, self._clock, self._sleep = calls, most, clock, sleep
        self._work, self._length, self.only = work, rest, only
        self._seen = calls()
        self._until = clock() + work
        self.slices = False
        self.rested = 0.0

    def look(self) -> None:
        """At each Python function that is called."""
        if self._clock() >= self._until:
            self._rest()

    def _rest(self) -> None:
        seen = self._calls()
        if seen != self._seen and self._left > 0:
            self._sleep(self._length)
            self._left -= self._length
            self.rested += self._length
        self._seen, self._until = seen, self._clock() + self._work

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In the thread that works.  Not nested."""
        thread = threading.get_ident()
        watched = _watch(thread, self)
        self.slices = self.slices or watched
        try:
            yield
        finally:
            if watched:
                _watch_no_more(thread)


def of_this_thread() -> GivesWay | None:
    """What the calling thread gives way by, None where it does not."""
    return _inside.get(threading.get_ident())


def also(way: GivesWay | None) -> contextlib.AbstractContextManager[None]:
    """Around what a thread does on behalf of another one that gives way by `way`."""
    return contextlib.nullcontext() if way is None else way.inside()


_inside: dict[int, GivesWay] = {}  # by thread
_lock = threading.RLock()

if sys.version_info >= (3, 12):
    _number: int | None = None  # the tool's, while anybody is inside
    _STARTS = sys.monitoring.events.PY_START

    def _watch(thread: int, way: GivesWay) -> bool:
        global _number
        with _lock:
            if _number is None:
                _number = _free_number()
                if _number is None:
                    return False
                sys.monitoring.register_callback(_number, _STARTS, _started)
            _inside[thread] = way  # before the first event: what is of no interest stays so
            for code in way.only:
                sys.monitoring.set_local_events(_number, code, _STARTS)
            if not way.only and not sys.monitoring.get_events(_number):
                sys.monitoring.set_events(_number, _STARTS)
            sys.monitoring.restart_events()  # what was of no interest before may be
            return True

    def _watch_no_more(thread: int) -> None:
        global _number
        with _lock:
            left = _inside.pop(thread, None)
            if left is None or _number is None:
                return
            for code in left.only.difference(*(way.only for way in _inside.values())):
                sys.monitoring.set_local_events(_number, code, 0)
            if all(way.only for way in _inside.values()):
                sys.monitoring.set_events(_number, 0)
            if not _inside:
                sys.monitoring.register_callback(_number, _STARTS, None)
                sys.monitoring.free_tool_id(_number)
                _number = None

    def _free_number() -> int | None:
        for number in _NUMBERS:
            if sys.monitoring.get_tool(number) is None:
                with contextlib.suppress(ValueError):
                    sys.monitoring.use_tool_id(number, _NAME)
                    return number
        return None

    def _started(code: object, offset: int, find: Any = _inside.get, thread: Any = threading.get_ident) -> Any:
        way = find(thread())
        if way is None or (way.only and code not in way.only):
            return sys.monitoring.DISABLE
        way.look()
        return None

else:

    def _watch(thread: int, way: GivesWay) -> bool:
        if sys.gettrace() is not None:
            return False
        _inside[thread] = way
        sys.settrace(_called)
        return True

    def _watch_no_more(thread: int) -> None:
        _inside.pop(thread, None)
        if sys.gettrace() is _called:  # a debugger may have come
            sys.settrace(None)

    def _called(frame: FrameType, *_: object, find: Any = _inside.get, thread: Any = threading.get_ident) -> None:
        way = find(thread())
        if way is not None and (not way.only or frame.f_code in way.only):
            way.look()


def _begin_anew() -> None:
    """In a forked process: threads that gave way are the parent's."""
    global _lock
    _lock = threading.RLock()
    own = threading.get_ident()
    for thread in [thread for thread in _inside if thread != own]:
        if sys.version_info >= (3, 12):
            _watch_no_more(thread)
        else:
            _inside.pop(thread)


os.register_at_fork(after_in_child=_begin_anew)

__all__ = ["MOST", "REST", "SLICE", "GivesWay", "also", "of_this_thread"]
