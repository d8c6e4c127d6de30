"""The process groups of this process, and what their collectives can do.

In:  torch.distributed, as the program has set it up; nothing is set up here.
Out: the backend behind a group, why its collectives cannot be in a recording.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from multigraph_backend import _compat
from multigraph_backend.allocator import installing
from multigraph_backend.process.rank import current, live

#: backends whose collectives a CUDA graph can hold
RECORDABLE = frozenset(("nccl",))
REGISTERED = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
#: NCCL registers the buffers of what is captured, unless this is 0
REGISTERS_CAPTURED = "NCCL_GRAPH_REGISTER"


def backend_of(group: str, device_type: str) -> str | None:
    """The backend that serves tensors of `device_type` in the group of that name; None where there is none."""
    if current() is None or _compat.missing("distributed"):
        return None
    try:
        config = dist.get_backend_config(_compat.resolve_process_group(group))
    except Exception:  # no group of that name, any more or yet
        return None
    backends = dict(entry.split(":", 1) for entry in str(config).split(",") if ":" in entry)
    return backends.get(device_type)


def backends() -> str:
    """The backends of the default group, as text, for keys of caches."""
    if current() is None:
        return ""
    return str(dist.get_backend_config())


def gathers_parameters() -> bool:
    """Whether FSDP2 may be at work in this process: parameters are then freed after their use and gathered again."""
    return live() and "torch.distributed.fsdp" in sys.modules


def registered_buffers() -> str | None:
    """What registers memory with all ranks of a group, where that is on; None where nothing does."""
    on = os.environ.get(REGISTERED, "0").strip().lower() in ("1", "y", "yes", "true", "t", "on")
    return REGISTERED if on and torch.cuda.is_available() else None


def growing_ranges() -> str | None:
    """Why the memory of this process is not for NCCL to register when it is captured; None where it may be, or where
    NCCL is told not to.

    NCCL takes a buffer for one allocation.  In a range that grows it is several, and ranks were seen to hang (PyTorch
    issue 158029, with torch's own expandable segments).
    """
    installed = installing.installed()
    if installed is None or not installed.expandable or os.environ.get(REGISTERS_CAPTURED, "").strip() == "0":
        return None
    return f"a collective over memory of the allocator extension's expandable segments ({REGISTERS_CAPTURED}=0 lets it)"
