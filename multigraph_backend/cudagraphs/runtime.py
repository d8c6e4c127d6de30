"""One tree of recordings per device of this process, made when the first piece needs it."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from multigraph_backend import _compat, events, native
from multigraph_backend.allocator import installing, relief, sleeping, statistics
from multigraph_backend.cudagraphs.devices.device import Device
from multigraph_backend.cudagraphs.limits import AMOUNTS, LEAST, MOST_SECONDS, SECONDS, Limits, accepts, by_field
from multigraph_backend.cudagraphs.recordings import memory, native_calls, poison
from multigraph_backend.cudagraphs.recordings.tree import Tree

log = logging.getLogger(__name__)

_LEAST_PAUSE, _MOST_PAUSE = 0.01, 1.0  # seconds until a tree that was busy is asked again
_PATIENCE = 1.0  # seconds that who asks for numbers waits for a call
_lock = threading.Lock()
_trees: dict[int, Tree] = {}
_limits = Limits()
_measured: dict[int, dict[events.Gauge, int]] = {}  # by device, when they were last read


def unavailable() -> str | None:
    """Why nothing can be recorded with this torch, said once in the log too; None if it can."""
    lacking = _compat.missing("cudagraphs") + _compat.missing("cudagraphs on CUDA")
    if lacking:
        reason = f"this torch differs: {lacking[0]}"
    elif torch.cuda.get_allocator_backend() != "pluggable":
        return None
    elif installing.installed() is None:
        reason = "the process's allocator is a pluggable one, whose pools torch cannot save and restore"
    elif lacking := _compat.missing("recordings in the extension on CUDA"):
        reason = f"the allocator extension is installed, and this torch differs: {lacking[0]}"
    else:
        return None
    events.warn_once("recordings", "nothing is recorded in CUDA graphs: %s", reason)
    return reason


def tree(index: int, make: Callable[[int], Device] | None = None) -> Tree:
    """The tree of CUDA device `index`.  Raises what the driver raises when it cannot be set up."""
    with _lock:
        if index not in _trees:
            if make is None:
                from multigraph_backend.cudagraphs.devices.cuda import CudaDevice

                make = CudaDevice
            # asked for inside a compile, under its modes
            with _compat.disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                _trees[index] = Tree(make(index), _limits, _compat.step_marks(), poison.asked(os.environ))
                _trees[index].memory_sleeps(sleeping.asleep(index))
                relief.ask(_give_way)
            begin_native_calls()
            native.when_ready(functools.partial(_native, _trees[index]))
        return _trees[index]


def begin_native_calls() -> None:
    """Have calls become native, where they can, for all trees of this process.  Returns at once."""
    native.begin(native_calls.checked)


def _native(tree: Tree, calls: native.Calls) -> None:
    """Let calls of `tree` be native: now, or as soon as none is under way and nothing of it sleeps.  Waits for
    nothing."""
    if not tree.take(calls):
        threading.Thread(target=_native_later, args=(tree, calls), name="multigraph-native", daemon=True).start()


def _native_later(tree: Tree, calls: native.Calls) -> None:
    pause = _LEAST_PAUSE
    while not tree.take(calls):
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


def trees() -> list[Tree]:
    """All trees there are."""
    with _lock:
        return list(_trees.values())


def bytes_now() -> dict[events.Gauge, int]:
    """What all pools and graphs take, for `events.stats`; of a device whose recordings are busy, what was read last."""
    total: Counter[events.Gauge] = Counter()
    for entry in trees():
        if entry.lock.acquire(timeout=_PATIENCE):
            try:
                pools = memory.of_pools(entry)
                _measured[entry.device.index] = {
                    "pool_held_bytes": sum(pool.held for pool in pools),
                    "pool_live_bytes": sum(pool.live for pool in pools),
                    "pool_lent_bytes": sum(pool.lent for pool in pools),
                    "pool_dead_bytes": sum(pool.dead for pool in pools),
                    "graph_bytes": entry.device.graph_bytes(),
                }
            finally:
                entry.lock.release()
        total.update(_measured.get(entry.device.index, {}))
    return dict(total)


events.gauge(bytes_now)


def limit_recordings(
    count: int | None = None,
    pool_bytes: float | None = None,
    *,
    depth: int | None = None,
    failures: int | None = None,
    copied_bytes: int | None = None,
    small_bytes: int | None = None,
    unreplayed: int | None = None,
    idle: float | None = None,
    patience: float | None = None,
    keep_free: float | None = None,
) -> None:
    """Limit what recordings of this process may cost on each device, from the next recording on.

    count: recordings (1024).  pool_bytes: memory for their pools; no limit.  Beyond `count` the least recently used are
    given up; each is made again when it is needed again.  What does not fit into `pool_bytes` beside what is there runs
    unrecorded, until it is worth more than those that would have to go for it.  depth: recordings that follow one
    another in a step (64).  failures: failed recordings of one function before it is not tried again (2).
    copied_bytes: bytes of inputs from which on their copies are measured with care (16 MiB).
    small_bytes: of an input that is copied although it came at the same address twice, where such are few (256 KiB).
    unreplayed: recordings of one piece, hardly replayed, before only what comes again is recorded (32).
    idle: seconds without a call of other threads after which outputs are no copies any more (10).
    patience: seconds that a call waits for one of another thread, before it runs unrecorded beside it (1).
    keep_free: memory of the device that recordings leave to others: where one would leave less, its call runs
    unrecorded (0.05).

    `pool_bytes` and `keep_free` are bytes, or a fraction of the device as a float (0.5 is half of it).
    What is None, or not named, has its default.  `options={"limits": {...}}` says the same of one model.
    Raises ValueError for a number below what makes sense.
    """
    global _limits
    given = {
        "count": count, "pool_bytes": pool_bytes, "depth": depth, "failures": failures,
        "copied_bytes": copied_bytes, "small_bytes": small_bytes, "unreplayed": unreplayed,
        "idle": idle, "patience": patience, "keep_free": keep_free,
    }  # fmt: skip
    for name, value in given.items():
        if name in AMOUNTS:
            if value is not None and not accepts(name, value):
                raise ValueError(f"limit_recordings: {name} must be {AMOUNTS[name]}, got {value!r}")
        elif value is not None and (not value >= LEAST[name] or (name not in SECONDS and not isinstance(value, int))):
            kind = "a number" if name in SECONDS else "a whole number"
            raise ValueError(f"limit_recordings: {name} must be {kind} from {LEAST[name]} on or None, got {value!r}")
        elif name in SECONDS and value is not None and value > MOST_SECONDS:
            raise ValueError(f"limit_recordings: {name} is at most {MOST_SECONDS} seconds, got {value!r}")
    with _lock:
        _limits = Limits(**by_field({name: value for name, value in given.items() if value is not None}))
        for entry in _trees.values():
            entry.limits = _limits


def forget() -> None:
    """Give up all recordings; outputs that are alive stay valid."""
    for entry in trees():
        entry.forget()


def release() -> int:
    """Give up all recordings, and give their memory back to the device; bytes.  The next calls record again.

    Outputs that are alive are moved to memory of their own first, where that can be done: not while the device is busy,
    or another thread is in the midst of a call.  Then their pool stays until they are gone, which is logged; recordings
    of a device on which a call is under way are given up at the end of that call.
    Raises `allocator.Asleep` while all memory of a device sleeps.
    """
    for entry in trees():
        if entry.sleepers.all:
            raise sleeping.Asleep("recordings whose memory sleeps have none to give back; wake it first")
    before = sum(entry.device.reserved_bytes() for entry in trees())
    forget()
    if torch.cuda.is_initialized():
        gc.collect()  # what is left of failed calls may hold graphs
        statistics.empty_cache()
    for entry in trees():
        alive = sum(node.alive() for node in entry.path)
        if entry.forgets:
            log.info("recordings of device %d are given up when the call that is under way ends", entry.device.index)
        elif alive:
            log.info("outputs of %d recordings of device %d are alive: their pool stays", alive, entry.device.index)
    return max(0, before - sum(entry.device.reserved_bytes() for entry in trees()))


def _memory_sleeps(index: int, now: Sequence[sleeping.Sleeper]) -> None:
    entry = _trees.get(index)
    if entry is not None:
        entry.memory_sleeps(now)


def _give_way(index: int, lacking: int) -> bool:
    """Before an allocation of `lacking` bytes fails; once more, where what was lent does not suffice."""
    entry, installed = _trees.get(index), installing.installed()
    if entry is None:
        return False
    return (installed is not None and installed.lends and entry.lend()) or entry.give_way()


sleeping.listeners.append(_memory_sleeps)
