"""Python's stacks in the extension's snapshots: who allocated what is live, and who made each call of the history.

In:  `record_memory_history`, with torch's words.  Out: `frames` in `memory_snapshot`, as memory_viz reads them.

The extension asks for the number of the calling thread's stack before each allocation, under no lock of its own, and
keeps it by address.  Its history knows no stacks, so calls are kept beside it with the time before and after each; an
entry of the history belongs to the call of its kind at its address in whose time it lies.

Invariant: what cannot be told has no frames; none are guessed.  Off, nothing of Python runs in an allocation, and it is
off before the interpreter ends.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import itertools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args

import torch

from multigraph_backend import _compat
from multigraph_backend.allocator import installing
from multigraph_backend.allocator.library import Library
from multigraph_backend.spelling import did_you_mean

Enabled = Literal["state", "all"]
Context = Literal["state", "alloc", "all"]
Stack = tuple[tuple[str, int, str], ...]

_MOST = 1_500_000

# of each stack, innermost frame first, its number; a number is never used again, so an old one means nothing
_numbers: dict[Stack, int] = {}
_next = itertools.count(1)


def _number() -> int:
    """The number of the stack of the calling thread; 0 where no Python runs in it.

    The extension calls it, in any thread and also under compiled code, so it calls nothing of Python in its turn.
    """
    try:
        frames = []
        frame: FrameType | None = sys._getframe().f_back
        while frame is not None:
            code = frame.f_code
            frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
            frame = frame.f_back
        return _numbers.setdefault(tuple(frames), next(_next)) if frames else 0
    except KeyboardInterrupt:  # nothing can be raised from here: it is raised once more, in the program
        _thread.interrupt_main()
        return 0


_called = ctypes.CFUNCTYPE(ctypes.c_uint64)(_number)


class _Recording(NamedTuple):
    library: Library
    context: Context | None


_lock = threading.Lock()
_recording: _Recording | None = None


def record_memory_history(
    enabled: Enabled | None = "all",
    context: Context | None = "all",
    stacks: Literal["python"] = "python",
    max_entries: int = 100_000,
) -> None:
    """Keep a history of what happens to device memory, and the Python stacks of those who make it; anew at each call.

    enabled: "all" keeps the latest `max_entries` events, up to 1,500,000; "state" none, only what is said of live
    blocks; None stops.  context: whose stacks are kept: "state" of the allocations that are live, "alloc" also of those
    in the history, "all" also of frees; None of nobody.  stacks: "python", there are no others here.
    `memory_snapshot()` shows all of it.

    An allocation takes some microseconds more while stacks are kept, and each different stack stays in memory until the
    next call.  Where the extension is not installed, torch's own `_record_memory_history` is called, where CUDA can be
    used.  Raises ValueError for a wrong argument.
    """
    for name, value, known in (("enabled", enabled, Enabled), ("context", context, Context)):
        if value is not None and value not in get_args(known):
            choices = get_args(known)
            raise ValueError(
                f"record_memory_history: {name} is one of {', '.join(choices)} or None"
                f"{did_you_mean(str(value), choices)}"
            )
    if stacks != "python":
        raise ValueError(f"record_memory_history: stacks is 'python', got {stacks!r}")
    if not 1 <= max_entries <= _MOST:
        raise ValueError(f"record_memory_history: max_entries is a number from 1 to {_MOST}, got {max_entries!r}")
    installed = installing.installed()
    if installed is not None:
        _record(installed, enabled, context, max_entries if enabled == "all" else 0)
    elif torch.version.cuda is not None and installing._gpus() > 0:
        torch.cuda.init()
        _compat.record_memory_history(enabled, context=context, stacks=stacks, max_entries=max_entries)


def _record(installed: installing.Installed, enabled: Enabled | None, context: Context | None, entries: int) -> None:
    global _recording
    loaded = installed.library
    with _lock:
        _stop(loaded)
        installing.keep_history(installed, entries)
        if enabled is None or context is None:
            return
        _compat.skip_code(_number.__code__)  # Dynamo would compile it
        _recording = _Recording(loaded, context)
        loaded.call("mg_torch_record_stacks", _called, context == "all", 0 if context == "state" else entries)


def _stop(loaded: Library) -> None:
    global _recording
    _recording = None
    loaded.call("mg_torch_record_stacks", None, 0, 0)  # without Python's lock, for which a thread in it may wait
    _numbers.clear()


@atexit.register
def _end() -> None:
    if _recording is not None:
        _stop(_recording.library)


# ---------------------------------------------------------------- into snapshots


class Call(NamedTuple):
    """A call of torch, as the extension keeps it; times in microseconds."""

    kind: int
    address: int
    nbytes: int
    stack: int
    began: int
    ended: int
    device: int


_ALLOCATED, _FREED, _OUT_OF_MEMORY = range(3)


def of_live_blocks(loaded: Library) -> dict[int, int]:
    """The number of the stack of each live block, by address, as far as stacks are kept."""
    return {} if _recording is None else _pairs(loaded)


def put_into(snapshot: dict[str, Any], loaded: Library, live: Mapping[int, int]) -> None:
    """Give the blocks and the history of `snapshot`, just read, their frames; `live`: as of before it was read."""
    if _recording is None:
        return
    after, calls = _pairs(loaded), _calls(loaded)
    known = {number: _as_torch_has_them(stack) for stack, number in list(_numbers.items())}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            address = block["address"]
            if block["state"] == "active_allocated" and live.get(address) == after.get(address):
                block["frames"] = known.get(live.get(address, 0), [])
    for device, trace in enumerate(snapshot["device_traces"]):
        stacks = stacks_of(trace, [call for call in calls if call.device == device])
        for entry, stack in zip(trace, stacks, strict=True):
            entry["frames"] = known.get(stack, [])


def _as_torch_has_them(stack: Stack) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in stack]


def stacks_of(trace: Sequence[Mapping[str, Any]], calls: Iterable[Call]) -> list[int]:
    """The number of the stack of each entry of a history, 0 where it cannot be told.

    A free has its own stack, or else the one of what it frees, as in torch; new segments have the one of the
    allocation that they were made for, which is the next.
    """
    waiting: defaultdict[tuple[int, int], deque[Call]] = defaultdict(deque)
    for call in sorted(calls, key=lambda call: call.ended):
        waiting[call.kind, call.nbytes if call.kind == _OUT_OF_MEMORY else call.address].append(call)

    def within(kind: int, key: int, time: int) -> int:
        candidates = waiting[kind, key]
        while candidates and candidates[0].ended < time:
            candidates.popleft()
        for call in candidates:
            if call.began <= time:
                candidates.remove(call)
                return call.stack
        return 0

    found: list[int] = []
    owner: dict[int, int] = {}
    segments: list[int] = []
    for entry in trace:
        action, time = entry["action"], entry["time_us"]
        stack = 0
        if action in ("alloc", "oom"):
            oom = action == "oom"
            stack = within(_OUT_OF_MEMORY if oom else _ALLOCATED, entry["size" if oom else "addr"], time)
            if not oom:
                owner[entry["addr"]] = stack
            for index in segments:
                found[index] = stack
            segments.clear()
        elif action == "free_requested":
            stack = within(_FREED, entry["addr"], time) or owner.get(entry["addr"], 0)
        elif action == "free_completed":
            stack = owner.pop(entry["addr"], 0)
        elif action in ("segment_alloc", "segment_map"):
            segments.append(len(found))
        found.append(stack)
    return found


def _pairs(loaded: Library) -> dict[int, int]:
    count = ctypes.c_size_t()
    loaded.call("mg_torch_stacks_live", None, 0, ctypes.byref(count))
    room = count.value + 1024  # other threads allocate meanwhile; what finds no room has no frames
    numbers = (ctypes.c_uint64 * (2 * room))()
    loaded.call("mg_torch_stacks_live", numbers, room, ctypes.byref(count))
    some = numbers[: 2 * min(count.value, room)]
    return dict(zip(some[::2], some[1::2], strict=True))


def _calls(loaded: Library) -> list[Call]:
    count = ctypes.c_size_t()
    loaded.call("mg_torch_stacks_log", None, 0, ctypes.byref(count))
    room = count.value + 1024
    numbers = (ctypes.c_int64 * (7 * room))()
    loaded.call("mg_torch_stacks_log", numbers, room, ctypes.byref(count))
    flat = numbers[: 7 * min(count.value, room)]
    return [Call(*flat[start : start + 7]) for start in range(0, len(flat), 7)]
