"""The extension as the allocator of the whole process: put in before CUDA starts, or not at all.

In: the library, and a torch whose CUDA has not started.  Out: torch's pluggable allocator with every function that the
library has for it, made the current one.  It cannot be taken out again: torch allows no second change.
Invariant: what fails leaves torch's own allocator in its place, and its reason in `status()`.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from multigraph_backend import events
from multigraph_backend.allocator import library
from multigraph_backend.allocator.library import Library, Options, Refused
from multigraph_backend.spelling import did_you_mean

Rule = Literal["strict", "own_stream", "graph_wide", "any_stream"]
REUSE_RULES: tuple[Rule, ...] = get_args(Rule)

SUGGESTION = "PYTORCH_CUDA_ALLOC_CONF=graph_capture_record_stream_reuse:True lets torch's own reuse memory in captures"
OPTIONS_VARIABLE = "MULTIGRAPH_ALLOCATOR_OPTIONS"

NOT_ASKED = "nobody asked for it: call multigraph_backend.allocator.install() or set MULTIGRAPH_ALLOCATOR=1"

# torch releases whose setters, and whose way to a torch.OutOfMemoryError, were seen to be the same: from the first,
# before the second. A setter takes an address: one that has come to mean another function would call it wrongly.
_KNOWN_TORCH = ((2, 11), (2, 16))

# what torch calls of its current allocator and a pluggable one refuses
LOST = (
    "torch.cuda.memory_stats, memory_allocated, memory_snapshot (use those of multigraph_backend.allocator)",
    "torch.cuda.MemPool (use multigraph_backend.allocator.pool)",
    'mode="reduce-overhead"; multigraph\'s recordings and torch.cuda.graph work',
    "torch.backends.cudnn.benchmark",
    "sharing CUDA tensors between processes (IPC)",
)

_SETTERS = {
    "set_init_fn": "mg_torch_init",
    "set_reset_fn": "mg_torch_reset",
    "set_memory_fraction_fn": "mg_torch_memory_fraction",
    "set_base_alloc_fn": "mg_torch_base_alloc",
    "set_record_stream_fn": "mg_torch_record_stream",
    "set_begin_allocate_to_pool": "mg_torch_begin_pool",
    "set_end_allocate_to_pool_fn": "mg_torch_end_pool",
    "set_release_pool": "mg_torch_release_pool",
}


@dataclass(frozen=True)
class Status:
    """Whether the extension serves this process; true where it is installed.

    installed: it is the process's allocator.  usable: its library is there and can be used, so `pool()` draws on it.
    reason: why it is not installed.  reuse: the rule of reuse in captures.  expandable: segments are ranges of
    addresses where the driver can map memory.  stitch: free pieces of several pages may be one block.  out_of_memory:
    the type of error that is raised.  lost: what torch cannot do while it is installed.
    """

    installed: bool
    usable: bool
    reason: str | None = None
    library: Path | None = None
    abi: int | None = None
    reuse: Rule | None = None
    expandable: bool | None = None
    out_of_memory: str = "torch.OutOfMemoryError"
    lost: tuple[str, ...] = ()
    stitch: bool | None = None

    def __bool__(self) -> bool:
        return self.installed

    def __str__(self) -> str:
        if self.installed:
            kind = ("expandable, stitched" if self.stitch else "expandable") if self.expandable else "plain"
            said = f"installed: reuse in captures is {self.reuse!r}, segments are {kind}"
            said = f"{said}, out of memory is a {self.out_of_memory}"
            return f"{said}; torch cannot do meanwhile: {'; '.join(self.lost)}"
        return f"not installed: {self.reason}"


@dataclass(frozen=True)
class Installed:
    """What must live as long as the process."""

    library: Library
    allocator: Any
    reuse: Rule
    expandable: bool
    out_of_memory: str
    options: Options
    lends: bool = False


_lock = threading.Lock()
_installed: Installed | None = None
_failure: str | None = None


def installed() -> Installed | None:
    """The installed extension, if it is."""
    return _installed


def status() -> Status:
    """What is installed, and why not where nothing is.  Raises nothing, and starts nothing of CUDA."""
    found = library.load()
    if _installed is not None:
        reuse, expandable = _installed.reuse, _installed.expandable
        stitch = _installed.options.expandable == 2
        oom = _installed.out_of_memory
        return Status(True, True, None, found.path, found.abi, reuse, expandable, oom, LOST, stitch)
    reason = found.reason or unusable(found.library)
    return Status(False, reason is None, _failure or reason or NOT_ASKED, found.path, found.abi)


def unusable(loaded: Library | None) -> str | None:
    """Why not even a pool can draw on the library, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.version.__version__} is built without CUDA"
    try:
        if loaded is not None:
            loaded.call("mg_torch_ready")
    except Refused as error:
        return str(error)
    return "there is no GPU that torch may use" if _gpus() == 0 else None


def _gpus() -> int:
    return torch.cuda.device_count()  # of the management library: CUDA does not start


def install(
    *,
    reuse: Rule = "any_stream",
    expandable: bool = True,
    stitch: bool = False,
    history: int = 0,
    snapshot_at_oom: str | os.PathLike[str] | None = None,
    garbage_threshold: float = 0.0,
    lend: bool = True,
) -> Status:
    """Make the extension the allocator of this process, before CUDA starts in it.

    reuse: which blocks a capture gives back before it ends: "strict" none that another stream used, "own_stream" those
    whose uses are proven over, to their own stream; "graph_wide" the same, asked of all capturing streams;
    "any_stream" also to other streams.  expandable: segments are ranges of addresses that grow, which leaves fewer
    holes; with "any_stream", the streams of a pool's captures share one.  Plain ones serve where the driver cannot map
    memory.  stitch: in that one, pages are mapped one by one, and may be a second time, so that free pieces of several
    are one block: for captures over several streams with blocks of many sizes from 1 to 10 MiB.  history: how many
    events `memory_snapshot` shows, at most 1,500,000.  snapshot_at_oom: a file for a snapshot, as JSON, whenever device
    0 is out of memory; device N writes to the same name with ".N".  garbage_threshold: part of the memory limit above
    which cached segments are given back, 0 (never) to below 1.  lend: before an allocation fails, memory that
    recordings use in replays alone serves it, instead of being given up with them; until that is free again they are
    not replayed.  False gives recordings up at once.

    Where it cannot be done, one line is logged, torch's own allocator goes on, and the result is false with the reason.
    A second call changes nothing.  Raises ValueError for a wrong argument, TypeError for a flag that is no bool.
    """
    global _installed, _failure
    if reuse not in REUSE_RULES:
        raise ValueError(f"install: reuse is one of {', '.join(REUSE_RULES)}{did_you_mean(str(reuse), REUSE_RULES)}")
    for name, flag in (("expandable", expandable), ("stitch", stitch), ("lend", lend)):
        if not isinstance(flag, bool):
            raise TypeError(f"install: {name} is True or False, got {flag!r}")
    if not 0 <= history <= 1_500_000:
        raise ValueError(f"install: history is a number of events from 0 to 1500000, got {history!r}")
    if not 0 <= garbage_threshold < 1:
        raise ValueError(f"install: garbage_threshold lies between 0 and 1, got {garbage_threshold!r}")
    options = Options(
        reuse=REUSE_RULES.index(reuse),
        expandable=(2 if stitch else 1) if expandable else 0,  # as mg_options counts
        garbage_threshold=garbage_threshold,
        history=history,
    )
    path = None if snapshot_at_oom is None else os.path.abspath(snapshot_at_oom)
    with _lock:
        if _installed is None:
            made = _install(reuse, options, path, lend)
            if isinstance(made, Installed):
                _installed, _failure = made, None
                events.log.info("the allocator extension is installed; %s", status())
            else:
                _failure = made
                events.warn_once("allocator", "the allocator extension is not in use, torch's own is: %s", made)
    return status()


def install_as_asked(environ: Mapping[str, str]) -> Status:
    """`install` with the arguments that MULTIGRAPH_ALLOCATOR_OPTIONS names, a JSON object.

    Raises ValueError where it is none, or names what `install` does not take.
    """
    said = environ.get(OPTIONS_VARIABLE, "").strip()
    try:
        options = json.loads(said) if said else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{OPTIONS_VARIABLE} is no JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{OPTIONS_VARIABLE} is a JSON object of install's arguments, not {said}")
    known = tuple(inspect.signature(install).parameters)
    for name in options:
        if name not in known:
            raise ValueError(f"{OPTIONS_VARIABLE}: install takes no {name!r}{did_you_mean(name, known)}")
    return install(**options)


def _install(reuse: Rule, options: Options, snapshot_at_oom: str | None, lends: bool) -> Installed | str:
    """The whole way; a text is why it ended."""
    found = library.load()
    if found.library is None:
        return f"{found.reason}; {SUGGESTION}"
    if torch.version.cuda is not None and torch.cuda.is_initialized():
        return f"too late: CUDA has started in this process, install it first; {SUGGESTION}"
    reason = unusable(found.library) or _unchecked()
    if reason is not None:
        return reason
    try:
        found.library.call("mg_set_options", ctypes.byref(options))
        found.library.call(
            "mg_torch_snapshot_at_oom", None if snapshot_at_oom is None else os.fsencode(snapshot_at_oom)
        )
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(found.library.path), "mg_torch_alloc", "mg_torch_free")
        pluggable: Any = allocator.allocator()
        for setter, function in _SETTERS.items():
            getattr(pluggable, setter)(found.library.address(function))
        out_of_memory = _torch_errors(found.library)
        torch.cuda.memory.change_current_allocator(allocator)
    except AttributeError as error:
        return f"this torch differs: {error}"
    except RuntimeError as error:  # torch's, where its allocator is in use although CUDA looks as if it had not started
        return f"too late: torch says: {str(error).splitlines()[0]}; {SUGGESTION}"
    return Installed(found.library, allocator, reuse, bool(options.expandable), out_of_memory, options, lends)


def keep_history(installed: Installed, entries: int) -> None:
    """From now on keep the latest `entries` events of each device; what was kept is forgotten."""
    installed.options.history = entries
    installed.library.call("mg_set_options", ctypes.byref(installed.options))  # of devices that come later
    for index in range(_gpus()):
        device = installed.library.call("mg_torch_device", index)
        if device is not None:
            installed.library.call("mg_record_history", device, entries)


def _unchecked() -> str | None:
    """Why this torch's functions for an allocator cannot be relied on, or None."""
    said = torch.version.__version__
    version = tuple(int(part) for part in re.findall(r"\d+", said)[:2])
    if _KNOWN_TORCH[0] <= version < _KNOWN_TORCH[1]:
        return None
    known = f"{'.'.join(map(str, _KNOWN_TORCH[0]))} to before {'.'.join(map(str, _KNOWN_TORCH[1]))}"
    return (
        f"torch {said} was not checked: its functions for an allocator are known from {known}; "
        f"use such a torch or a newer multigraph, and allocator.pool() meanwhile; {SUGGESTION}"
    )


def _torch_errors(loaded: Library) -> str:
    """The type of error that out-of-memory is from now on."""
    try:
        loaded.call("mg_torch_errors")
    except Refused as error:
        return f"RuntimeError ({error})"
    return "torch.OutOfMemoryError"
