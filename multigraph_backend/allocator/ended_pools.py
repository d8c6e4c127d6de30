"""Objects of torch's memory pools that are over: they go when torch bears it.

When a `torch.cuda.MemPool` goes, torch gives the pool's cached memory back to the device.  Before that it asserts that
no thread allocates into any pool of the device: no capture is on, and no pool is open (`torch.cuda.use_mem_pool`).
Where one is, the process is aborted, and torch has no way to ask.  Recordings begin new pools in the midst of a call,
and a caller may have a pool of his own open around that.

In:  pools that are over.  Out: their memory, at once or as soon as one of these functions is called while nothing is
open.  In between it is cached: what was allocated there may die, and nothing else is allocated there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from multigraph_backend import _compat

_lock = threading.RLock()  # a pool may be collected while another one is ended
_over: dict[int, list[torch.cuda.MemPool]] = {}  # by device
_LOOKS = 3  # for an event that is over as soon as the device has seen it
_PENDING = "active_pending_free"  # torch's word for a block that waits for events


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
        with _compat.disable_current_modes(), torch.cuda.device(index):
            used = torch.empty(1, dtype=torch.uint8, device="cuda")
            address, other = used.data_ptr(), torch.cuda.Stream()
            while other == torch.cuda.current_stream():  # torch hands out a few streams in turn
                other = torch.cuda.Stream()
            used.record_stream(other)
            del used
            for _ in range(_LOOKS):
                torch.empty(1, dtype=torch.uint8, device="cuda")
                if address not in _pending(_compat.raw_snapshot(None)["segments"]):
                    return False
    except RuntimeError:  # out of memory; another thread captures; a forked process, which has no device
        pass
    return True


def _pending(segments: Iterable[dict[str, object]]) -> set[object]:
    """Addresses of blocks that wait for events."""
    blocks: Iterable[dict[str, object]]
    found: set[object] = set()
    for segment in segments:
        blocks = segment["blocks"]  # type: ignore[assignment]
        found.update(block["address"] for block in blocks if block["state"] == _PENDING)
    return found
