"""Short turns of Python's threads, while one of them must not wait long for its own.

Whoever lets go of the interpreter in a C call waits, on the way back, until another thread gives it up: up to
`sys.getswitchinterval()`, 5 ms by default, for each thread that is before it.  That is long where the process is
meanwhile in a state that others must not meet; and where a thread loads code in the background, for a call that lets go
of the interpreter at each operator.  Like the garbage collector, the interval is the whole process's, so those who have
it short are counted.

Invariant: the interval is the shortest that anybody inside has asked for; when the last one has left, it is as the
first one found it, unless the program has itself set it meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Self

#: for what is over in microseconds
MOMENT = 1e-5
#: for what takes a second: more often would cost both threads more than it gains
WHILE = 1e-4

_HALF = 5e-7  # microseconds are cut off when an interval is set: what is read and set again would become less each time

_lock = threading.RLock()
_inside: dict[ShortTurns, int] = {}  # whoever is inside, and its thread
_before = _set = 0.0


class ShortTurns:
    """Turns are of at most `seconds` from its making until `end`, which may be called more than once, or a `with`'s."""

    def __init__(self, seconds: float = MOMENT) -> None:
        self._seconds = seconds
        global _before
        with _lock:
            if not _inside:
                _before = sys.getswitchinterval()
            _inside[self] = threading.get_ident()
            _change(min(_before, *(entry._seconds for entry in _inside)))

    def end(self) -> None:
        with _lock:
            if _inside.pop(self, None) is not None and abs(sys.getswitchinterval() - _set) < 2 * _HALF:
                _change(min(_before, *(entry._seconds for entry in _inside)) if _inside else _before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _change(seconds: float) -> None:
    global _set
    _set = seconds
    sys.setswitchinterval(seconds + _HALF)


def _begin_anew() -> None:
    """In a forked process: only the thread that forked is there."""
    global _lock
    _lock = threading.RLock()
    own = threading.get_ident()
    for entry in [entry for entry, thread in _inside.items() if thread != own]:
        entry.end()


os.register_at_fork(after_in_child=_begin_anew)
