"""One tree of recordings per device of this process, made when the first piece needs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from multigraph_backend import _compat, trace
from multigraph_backend.cudagraphs.device import Device
from multigraph_backend.cudagraphs.tree import Limits, Tree

log = logging.getLogger(__name__)

_lock = threading.Lock()
_trees: dict[int, Tree] = {}


def unavailable() -> str | None:
    """Why nothing can be recorded with this torch, None if it can."""
    lacking = _compat.missing("cudagraphs") + _compat.missing("cudagraphs on CUDA")
    return f"this torch differs: {lacking[0]}" if lacking else None


def tree(index: int, make: Callable[[int], Device] | None = None) -> Tree:
    """The tree of CUDA device `index`.  Raises what the driver raises when it cannot be set up."""
    with _lock:
        if index not in _trees:
            if make is None:
                from multigraph_backend.cudagraphs.cuda_device import CudaDevice

                make = CudaDevice
            # asked for inside a compile, under its modes
            with _compat.disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                _trees[index] = Tree(make(index), Limits(), marks=_marks())
        return _trees[index]


def trees() -> list[Tree]:
    """All trees there are."""
    with _lock:
        return list(_trees.values())


def forget() -> None:
    """Give up all recordings; outputs that are alive stay valid."""
    for entry in trees():
        entry.forget()


def _marks() -> Callable[[], int]:
    """How often the user has said that a step begins; torch counts it, downwards."""
    box = _compat.step_marks
    return lambda: box.mark_step_counter  # hot


def say_unavailable() -> str | None:
    """Like `unavailable`, and says so once."""
    reason = unavailable()
    if reason is not None:
        trace.warn_once("recordings", "nothing is recorded in CUDA graphs: %s", reason)
    return reason
