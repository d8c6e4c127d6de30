"""Asking for other threads' frames without holding up the program.

On Python 3.11 `sys._current_frames` makes objects while it holds a lock of the interpreter, and so may collect garbage
there.  A tensor that is collected lets Python's own lock go; whoever has that next and asks for frames too waits for
the other lock, and both wait forever.

Invariant: inside `without_collections` nothing is collected, and one thread at a time is there.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_PATIENCE = 5.0  # seconds: in a forked process the thread that has the lock may not be there


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Around `sys._current_frames()` and what is done with its answer."""
    alone = _lock.acquire(timeout=_PATIENCE)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if alone:
            _lock.release()
