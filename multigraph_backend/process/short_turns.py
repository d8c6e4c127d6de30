"""Short turns of Python's threads, while one of them loads code in the background.

Whoever lets go of the interpreter in a C call waits, on the way back, until another thread gives it up: up to
`sys.getswitchinterval()`, 5 ms by default, for each thread that is before it.  That is long where a call, which lets go
of the interpreter at each operator, meets a thread that loads code.  Like the garbage collector, the interval is the
whole process's, so those who have it short are counted.

Invariant: the interval is short while anybody is inside, or as the program has it where that is shorter; when the last
one has left, it is as the first one found it, unless the program has itself set it meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Self

#: seconds; beside a load, the median step of a decoder took 8 ms with this and 12 ms with ten times as much (2 ms
#: alone, on two cores); whether the load itself takes longer was within the noise
SHORT = 1e-5

_HALF = 5e-7  # microseconds are cut off when an interval is set: what is read and set again would become less each time

_lock = threading.RLock()
_inside: dict[ShortTurns, int] = {}  # whoever is inside, and its thread
_before = _set = 0.0


class ShortTurns:
    """Inside, turns are of at most `SHORT` seconds."""

    def __enter__(self) -> Self:
        global _before
        with _lock:
            if not _inside:
                _before = sys.getswitchinterval()
                _change(min(_before, SHORT))
            _inside[self] = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            mine = _inside.pop(self, None) is not None
            if mine and not _inside and abs(sys.getswitchinterval() - _set) < 2 * _HALF:
                _change(_before)


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
        entry.__exit__()


os.register_at_fork(after_in_child=_begin_anew)
