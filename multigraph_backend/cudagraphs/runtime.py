"""One tree of recordings per device of this process, made when the first piece needs it."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable

import torch

from multigraph_backend import _compat, trace
from multigraph_backend.allocator import process
from multigraph_backend.cudagraphs.device import Device
from multigraph_backend.cudagraphs.tree import Limits, Tree
from multigraph_backend.options import debugging_aids

_lock = threading.Lock()
_trees: dict[int, Tree] = {}
_limits = Limits()


def unavailable() -> str | None:
    """Why nothing can be recorded with this torch, said once in the log too; None if it can."""
    lacking = _compat.missing("cudagraphs") + _compat.missing("cudagraphs on CUDA")
    if lacking:
        reason = f"this torch differs: {lacking[0]}"
    elif torch.cuda.get_allocator_backend() != "pluggable":
        return None
    elif process.installed() is None:
        reason = "the process's allocator is a pluggable one, whose pools torch cannot save and restore"
    elif lacking := _compat.missing("recordings in the extension on CUDA"):
        reason = f"the allocator extension is installed, and this torch differs: {lacking[0]}"
    else:
        return None
    trace.warn_once("recordings", "nothing is recorded in CUDA graphs: %s", reason)
    return reason


def tree(index: int, make: Callable[[int], Device] | None = None) -> Tree:
    """The tree of CUDA device `index`.  Raises what the driver raises when it cannot be set up."""
    with _lock:
        if index not in _trees:
            if make is None:
                from multigraph_backend.cudagraphs.cuda_device import CudaDevice

                make = CudaDevice
            # asked for inside a compile, under its modes
            with _compat.disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                poisons = "poison" in debugging_aids(os.environ)
                _trees[index] = Tree(make(index), _limits, _marks(), poisons)
        return _trees[index]


def trees() -> list[Tree]:
    """All trees there are."""
    with _lock:
        return list(_trees.values())


def limit_recordings(count: int | None = None, pool_bytes: int | None = None) -> None:
    """Limit what recordings of this process may hold on each device, from the next recording on.

    count: recordings, None for the default of 1024.  pool_bytes: bytes of device memory for their pool, None for no
    limit.  Beyond `count` the least recently used are given up; each is made again when it is needed again.  What does
    not fit into `pool_bytes` beside what is there runs unrecorded.

    Raises ValueError for a number below 1.
    """
    global _limits
    for name, value in (("count", count), ("pool_bytes", pool_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"limit_recordings: {name} must be a number from 1 on or None, got {value!r}")
    with _lock:
        _limits = dataclasses.replace(
            _limits, per_device=Limits.per_device if count is None else count, pool_bytes=pool_bytes
        )
        for entry in _trees.values():
            entry.limits = _limits


def forget() -> None:
    """Give up all recordings; outputs that are alive stay valid."""
    for entry in trees():
        entry.forget()


def _marks() -> Callable[[], int]:
    """How often the user has said that a step begins; torch counts it, downwards."""
    box = _compat.step_marks
    return lambda: box.mark_step_counter  # hot
