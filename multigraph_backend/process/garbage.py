"""One switch for Python's garbage collector, for all who need it off for a while.

A capture of CUDA's must not free what was made outside of it, and whoever asks for other threads' frames must not
collect there.  A thread that loads code makes enough objects for a collection of all that is alive, which holds the
interpreter, and with it every call, for some tenths of a second.  Each of these on its own would switch the collector
back to what it found: of two whose times overlap, one would switch it on inside of the other, or leave it off for ever.
So they are counted here.

Invariant: nothing is collected on its own while anybody is inside of `paused`; when the last one has left, the
collector is as the first one found it, unless the program has itself switched it on meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()  # what is collected while it is taken may come here again
_inside: dict[object, int] = {}  # whoever is inside, and its thread
_was_on = False  # before the first one entered


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing is collected inside, but by a call of `gc.collect`.  From any thread, in any order, nested too."""
    entry = object()
    try:
        _enter(entry)
        yield
    finally:
        _leave(entry)


def _enter(entry: object) -> None:
    global _was_on
    with _lock:
        if not _inside:
            _was_on = gc.isenabled()
        _inside[entry] = threading.get_ident()
        gc.disable()


def _leave(entry: object) -> None:
    with _lock:
        if _inside.pop(entry, None) is not None and not _inside and _was_on:
            gc.enable()


def _begin_anew() -> None:
    """In a forked process: only the thread that forked is there."""
    global _lock
    _lock = threading.RLock()
    own = threading.get_ident()
    for entry in [entry for entry, thread in _inside.items() if thread != own]:
        _leave(entry)


os.register_at_fork(after_in_child=_begin_anew)
