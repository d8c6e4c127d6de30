"""Asking for other threads' frames without holding up the program.

On Python 3.11 `sys._current_frames` makes objects while it holds a lock of the interpreter, and so may collect garbage
there.  A tensor that is collected lets Python's own lock go; whoever has that next and asks for frames too waits for
the other lock, and both wait forever.

Invariant: inside `without_collections` nothing is collected, and one thread at a time is there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from multigraph_backend.process import garbage

_lock = threading.Lock()


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
