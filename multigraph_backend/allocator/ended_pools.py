"""Objects of torch's memory pools, and when they go: as torch bears it.

When a `torch.cuda.MemPool` goes, torch gives the pool's cached memory back to the device.  Before that it asserts that
no thread allocates into any pool of the device: no capture is on, and no pool is open (`torch.cuda.use_mem_pool`).
Where one is, the process is aborted, and torch has no way to ask.  Recordings begin new pools in the midst of a call,
and a caller may have a pool of his own open around that.

In:  pools that are over.  Out: their memory, at once or as soon as one of these functions is called while nothing is
open.  In between it is cached: what was allocated there may die, and nothing else is allocated there.  What is there
when the interpreter ends goes with the process, and is not ended before: a thread may still be in the midst of things.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.process.captures import beside_captures

_lock = threading.RLock()  # a pool may be collected while another one is ended
_over: dict[int, list[torch.cuda.MemPool]] = {}  # by device
_spare: dict[int, tuple[torch.Tensor, torch.cuda.Stream]] = {}  # by device: for the next question
_all: weakref.WeakSet[torch.cuda.MemPool] = weakref.WeakSet()
_LOOKS, _BETWEEN = 4, 1e-4  # and seconds, for an event on a stream that has nothing to do
_STREAMS = 32  # that torch hands out in turn
_PENDING = "active_pending_free"  # torch's word for a block that waits for events


def begin(index: int) -> torch.cuda.MemPool:
    """A new one, for device `index`, which has to be the current one."""
    with _lock:
        if index not in _spare:
            allocates_into_a_pool(index)  # takes what a later question needs, which may come when memory has run out
    sweep(index)
    return noted(torch.cuda.MemPool())


def noted(pool: torch.cuda.MemPool) -> torch.cuda.MemPool:
    """This one, which stays when the interpreter ends."""
    _all.add(pool)
    return pool


def end(pools: list[torch.cuda.MemPool], index: int) -> None:
    """Take these pools of device `index` out of the list, and let them go as soon as that can be done."""
    with _lock:
        _over.setdefault(index, []).extend(pools)
        pools.clear()
    sweep(index)


def sweep(index: int) -> None:
    """Let pools of a device go that are over, if that can be done now."""
    with _lock:
        if _over.get(index) and not allocates_into_a_pool(index):
            _over.pop(index)


def allocates_into_a_pool(index: int) -> bool:
    """Whether any thread does so on the device, in a capture or otherwise; true also where that cannot be told.

    A block that another stream has used is free again when torch has seen an event there, and torch looks for events
    at each allocation, but at none while anything allocates into a pool.
    """
    try:
        if _compat.is_capturing():
            return True
        with _compat.disable_current_modes(), torch.cuda.device(index), beside_captures():
            used, own = _spare.get(index) or _block()
            other = _idle_stream(own)
            if other is None:
                return True
            _spare.pop(index, None)
            address = used.data_ptr()
            used.record_stream(other)
            del used
            for _ in range(_LOOKS):
                with contextlib.suppress(torch.OutOfMemoryError):  # it has looked before it found no memory
                    torch.empty(1, dtype=torch.uint8, device="cuda")
                if address not in _pending(_compat.raw_snapshot(None)["segments"]):
                    with contextlib.suppress(torch.OutOfMemoryError):
                        _spare[index] = _block()  # in no pool of the user's, for none is open
                    return False
                time.sleep(_BETWEEN)
    except (RuntimeError, OSError):  # out of memory; another thread captures; a forked process, which has no device
        pass
    return True


def _block() -> tuple[torch.Tensor, torch.cuda.Stream]:
    """The least that can be allocated, and the stream that it belongs to."""
    return torch.empty(1, dtype=torch.uint8, device="cuda"), torch.cuda.current_stream()


def _idle_stream(own: torch.cuda.Stream) -> torch.cuda.Stream | None:
    """One that is not `own`, and has nothing to do, among those that torch hands out in turn; the last where all of
    them are busy.  None where one captures: to ask that one whether it is busy would spoil the capture."""
    found = None
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream()
        if stream == own:
            continue
        with torch.cuda.stream(stream):
            if _compat.is_capturing():
                return None
        found = stream
        if stream.query():
            break
    return found


def _pending(segments: Iterable[dict[str, Any]]) -> set[int]:
    """Addresses of blocks that wait for events."""
    return {block["address"] for segment in segments for block in segment["blocks"] if block["state"] == _PENDING}


@atexit.register
def _leave_to_the_process() -> None:
    """Nothing takes the interpreter's last reference to a pool's object."""
    for pool in list(_all):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
