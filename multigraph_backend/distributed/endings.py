"""Recordings that hold collectives end before their communicators do, in whatever order a program ends.

NCCL counts the CUDA graphs that hold work of a communicator, and waits in the communicator's destruction until the
last of them is gone; aborting it waits too.  Graphs live as long as compiled code does, so a program that destroys its
process group first, or never, would wait forever, in `destroy_process_group()` or when the process ends.

What torch offers no hook for is watched, and nothing of torch is replaced:

- At the end of the process (normal, `sys.exit`, an exception, Ctrl-C) a function of `atexit` destroys the recordings.
  It runs before the process groups are destructed.
- While such recordings are there, a thread looks some times a second whether any thread is inside of torch's
  `destroy_process_group` or `_abort_process_group`.  That one waits in C++, without Python's lock, for the graphs
  to go; this thread destroys them.  Their code stays, and runs unrecorded.

Not seen: `ProcessGroup.shutdown()` and `abort()` that a program calls itself.  `release()` before them does the same.

In:  the recordings of a device, as soon as one of them holds collectives.
Out: nothing; effects on these.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from types import CodeType

import torch.distributed as dist

from multigraph_backend import _compat
from multigraph_backend.distributed import communicating
from multigraph_backend.distributed.communicating import Recordings
from multigraph_backend.process import frames

log = logging.getLogger(__name__)

PERIOD = 0.05  # seconds between two looks
_REST = 20  # looks after which it asks whether there is anything left to look for
_PATIENCE = 5.0  # seconds that a call of compiled code may still take when the process ends

DESTROYED = "its process group is being destroyed"
EXITING = "the process ends"


_lock = threading.Lock()
_thread: threading.Thread | None = None
_watched = 0  # calls of `watch`
_ended = threading.Event()


def watch(recordings: Recordings) -> None:
    """Called when one of `recordings` holds collectives now, under the lock of their tree."""
    global _thread, _watched
    communicating.add_recordings(recordings)
    with _lock:
        _watched += 1
        if _ended.is_set():
            return
        if _thread is None:
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_watch, name="multigraph-endings", daemon=True)
            _thread.start()


def release(why: str = DESTROYED) -> int:
    """Destroy all recordings of this process that hold collectives.  Calls of their code run unrecorded until it is
    recorded again, after the next process group was made.  Returns how many there were."""
    return sum(recordings.release(why, _PATIENCE) for recordings in communicating.recordings())


def _at_exit() -> None:
    _ended.set()
    with contextlib.suppress(Exception):
        release(EXITING)


def _watch() -> None:
    """Until no recordings hold any; `watch` begins anew."""
    global _thread
    codes = destroying()
    resting, looks = True, 0
    while not _ended.wait(PERIOD):
        if _inside(codes):
            resting = False
            for recordings in communicating.recordings():
                destroyed = recordings.release(DESTROYED, PERIOD)
                if destroyed:
                    log.info("%d recordings with collectives destroyed: %s", destroyed, DESTROYED)
            continue
        if not resting:
            resting = True
            for recordings in communicating.recordings():
                recordings.resume()
        looks += 1
        if looks % _REST:  # asking takes the lock of a tree, which calls want
            continue
        seen = _watched
        # not under `_lock`, which `watch` takes under the lock of a tree
        if any(recordings.held() for recordings in communicating.recordings()):
            continue
        with _lock:
            if _watched == seen:
                _thread = None
                return


def destroying() -> frozenset[CodeType]:
    """The code of torch's functions that end process groups."""
    functions = [dist.destroy_process_group]
    if not _compat.missing("endings"):
        functions.append(_compat.abort_process_group)
    return frozenset(code for code in (getattr(function, "__code__", None) for function in functions) if code)


def _inside(codes: frozenset[CodeType]) -> bool:
    """Whether any thread runs one of them."""
    return any(place.code in codes for stack in frames.stacks().values() for place in stack)
