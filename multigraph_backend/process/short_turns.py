"""Short turns of Python's threads, for a moment at which one of them must not wait long for its own.

Whoever lets go of the interpreter in a C call waits, on the way back, until another thread gives it up: up to
`sys.getswitchinterval()`, 5 ms by default, for each thread that is before it.  Where the process is meanwhile in a
state that others must not meet, that is long.  Like the garbage collector, the interval is the whole process's, so
those who have it short are counted.

Invariant: the interval is short while anybody is inside; when the last one has left, it is as the first one found it,
unless the program has itself set it meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading

SECONDS = 1e-5

_lock = threading.RLock()
_inside: dict[ShortTurns, int] = {}  # whoever is inside, and its thread
_before = 0.0


class ShortTurns:
    """Turns are short from its making until `end`, which may be called more than once."""

    def __init__(self) -> None:
        global _before
        with _lock:
            if not _inside:
                _before = sys.getswitchinterval()
            _inside[self] = threading.get_ident()
            sys.setswitchinterval(SECONDS)

    def end(self) -> None:
        with _lock:
            if _inside.pop(self, None) is not None and not _inside and abs(sys.getswitchinterval() - SECONDS) < SECONDS:
                sys.setswitchinterval(_before + 5e-7)  # Python cuts off parts of microseconds: it would become less


def _begin_anew() -> None:
    """In a forked process: only the thread that forked is there."""
    global _lock
    _lock = threading.RLock()
    own = threading.get_ident()
    for entry in [entry for entry, thread in _inside.items() if thread != own]:
        entry.end()


os.register_at_fork(after_in_child=_begin_anew)
