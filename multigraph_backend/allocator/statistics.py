"""What the allocator holds, under torch's names: from the extension where it is installed, from torch where it is not.

`memory_stats` has the keys of `torch.cuda.memory_stats` that are about all pools together ("….all.…"), and the
extension's own counts under "multigraph.…".  `memory_snapshot` is what PyTorch's memory_viz page reads, once pickled.
Numbers are bytes unless a name says otherwise.  A device on which nothing was allocated has no numbers.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.allocator import installing, stacks
from multigraph_backend.allocator.library import Library

# the extension's levels, in its order, by torch's names
_LEVELS = ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes", "allocation", "segment")
_NUMBERS = ("current", "peak", "allocated", "freed")

_COUNTS = ("ooms", "retries", "freed_in_captures", "proven", "parked", "moved", "verified", "verify_failures")


class _Stats(ctypes.Structure):
    """mg_stats, with room for what a later library has at its end."""

    _fields_ = (
        *((f"{level}.all.{number}", ctypes.c_int64) for level in _LEVELS for number in ("current", "peak")),
        *((name, ctypes.c_uint64) for name in _COUNTS),
        *((f"{level}.all.{number}", ctypes.c_int64) for level in _LEVELS for number in ("allocated", "freed")),
        ("stitched", ctypes.c_uint64),
        ("later", ctypes.c_uint64 * 63),
    )


def memory_stats(device: torch.device | int | None = None) -> dict[str, int]:
    """Statistics of a device, the current one by default; keys as in `torch.cuda.memory_stats`.

    Where the extension is installed: `{allocated_bytes, requested_bytes, reserved_bytes, active_bytes, allocation,
    segment}.all.{current, peak, allocated, freed}`, `num_alloc_retries`, `num_ooms`, and `multigraph.*`: blocks
    `freed_in_captures`, of these `proven` reusable before the capture's end, `parked` until it, `moved` to another
    stream, and `stitched`: allocations made of pieces of several pages.
    """
    installed = installing.installed()
    if installed is None:
        return dict(torch.cuda.memory_stats(device)) if torch.cuda.is_initialized() else {}
    handle = _handle(installed.library, device)
    return {} if handle is None else stats_of(installed.library, handle)


def stats_of(loaded: Library, handle: int) -> dict[str, int]:
    """`memory_stats` of one of the extension's allocators."""
    stats = _Stats()
    loaded.call("mg_read_stats", handle, ctypes.byref(stats))
    names = [f"{level}.all.{number}" for level in _LEVELS for number in _NUMBERS]
    found: dict[str, int] = {name: getattr(stats, name) for name in names}
    found["num_alloc_retries"], found["num_ooms"] = stats.retries, stats.ooms
    found.update({f"multigraph.{name}": getattr(stats, name) for name in (*_COUNTS[2:], "stitched")})
    return dict(sorted(found.items()))


def _one(name: str, device: torch.device | int | None) -> int:
    return memory_stats(device).get(name, 0)


def memory_allocated(device: torch.device | int | None = None) -> int:
    """Bytes that tensors hold now."""
    return _one("allocated_bytes.all.current", device)


def max_memory_allocated(device: torch.device | int | None = None) -> int:
    """The most that tensors have held since the last `reset_peak_memory_stats`."""
    return _one("allocated_bytes.all.peak", device)


def memory_reserved(device: torch.device | int | None = None) -> int:
    """Bytes that the allocator holds of the device."""
    return _one("reserved_bytes.all.current", device)


def max_memory_reserved(device: torch.device | int | None = None) -> int:
    """The most that it has held since the last `reset_peak_memory_stats`."""
    return _one("reserved_bytes.all.peak", device)


def reset_peak_memory_stats(device: torch.device | int | None = None) -> None:
    """Let every peak be what is now."""
    installed = installing.installed()
    if installed is None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(device)
        return
    handle = _handle(installed.library, device)
    if handle is not None:
        installed.library.call("mg_reset_peaks", handle)


def empty_cache() -> int:
    """Give cached segments back to the driver, on all devices; bytes.  Does nothing while a capture is under way, and
    leaves the segments of pools that somebody holds.  Pinned memory of the host that is kept for the next sleep goes
    too.  Where torch's allocator is current: torch's, and 0."""
    installed = installing.installed()
    if installed is None:
        torch.cuda.empty_cache()
        return 0
    total = 0
    for handle in _handles(installed.library):
        given = ctypes.c_size_t()
        installed.library.call("mg_empty_cache", handle, ctypes.byref(given))
        total += given.value
        installed.library.call("mg_empty_host", handle, ctypes.byref(given))
    return total


# ---------------------------------------------------------------- snapshots


def memory_snapshot() -> dict[str, Any]:
    """Segments, blocks and history of all devices, as PyTorch's memory_viz page reads it from a pickle.

    `pickle.dump(memory_snapshot(), file)`, then drop the file on pytorch.org/memory_viz.  The history is as long as
    `install(history=...)` or `record_memory_history` said, which also keeps stacks.
    """
    installed = installing.installed()
    if installed is None:
        if not torch.cuda.is_initialized():
            return {"segments": [], "device_traces": []}
        snapshot: dict[str, Any] = _compat.memory_snapshot()
        return snapshot
    loaded = installed.library
    handles = [loaded.call("mg_torch_device", index) for index in range(installing._gpus())]
    live = stacks.of_live_blocks(loaded)
    made = merged([{} if handle is None else snapshot_of(loaded, handle) for handle in handles])
    stacks.put_into(made, loaded, live)
    return made


def snapshot_of(loaded: Library, handle: int) -> dict[str, Any]:
    """The extension's own snapshot of one device, with torch's words and types."""
    length = ctypes.c_size_t()
    loaded.call("mg_snapshot", handle, None, 0, ctypes.byref(length))
    while True:
        room = length.value + 4096  # other threads allocate meanwhile
        text = ctypes.create_string_buffer(room)
        loaded.call("mg_snapshot", handle, text, room, ctypes.byref(length))
        if length.value <= room:
            break
    found: dict[str, Any] = json.loads(text.value)
    for segment in found["segments"]:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        for block in segment["blocks"]:
            if block["state"] == "active_pending_free":
                block["state"] = "active_awaiting_free"
    return found


def merged(snapshots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The snapshots of all devices as one, in which history stands at its device's place; an empty one has nothing."""
    segments = [segment for snapshot in snapshots for segment in snapshot.get("segments", ())]
    return {"segments": segments, "device_traces": [each.get("device_traces", [[]])[-1] for each in snapshots]}


def segments_of(loaded: Library, handle: int, pool: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of one pool."""
    return [entry for entry in snapshot_of(loaded, handle)["segments"] if entry["segment_pool_id"] == pool]


def memory_summary(device: torch.device | int | None = None) -> str:
    """The statistics of a device as a table to read."""
    installed = installing.installed()
    if installed is None:
        return torch.cuda.memory_summary(device) if torch.cuda.is_initialized() else "CUDA has not started"
    return table(memory_stats(device))


def table(stats: dict[str, int]) -> str:
    """`memory_stats` as lines."""
    if not stats:
        return "nothing was allocated on this device"
    lines = [f"{'':<16} {'now':>12} {'most':>12} {'added':>12} {'taken away':>12}"]
    for level in _LEVELS:
        numbers = [stats[f"{level}.all.{number}"] for number in _NUMBERS]
        shown = [readable(number) if level.endswith("_bytes") else str(number) for number in numbers]
        name = level.removesuffix("_bytes")
        lines.append(f"{name:<16} " + " ".join(f"{text:>12}" for text in shown))
    others = [name for name in stats if ".all." not in name]
    lines += [f"{name.removeprefix('multigraph.'):<20} {stats[name]}" for name in others]
    return "\n".join(lines)


def readable(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


# ---------------------------------------------------------------- the extension's allocators


def _handle(loaded: Library, device: torch.device | int | None) -> int | None:
    """The allocator of a device, None where nothing was allocated."""
    if not torch.cuda.is_initialized():
        return None
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    handle: int | None = loaded.call("mg_torch_device", torch.cuda.current_device() if index is None else index)
    return handle


def _handles(loaded: Library) -> list[int]:
    found = (loaded.call("mg_torch_device", index) for index in range(installing._gpus()))
    return [handle for handle in found if handle is not None]
