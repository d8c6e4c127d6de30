"""The allocator extension (`allocator_ext/`): found, checked, given to torch; what torch then loses, given back.

Two ways in.

    from multigraph_backend import allocator

    with allocator.pool(limit=8 << 30):      # torch's allocator stays; the segments come from the extension
        model = Model().cuda()

    allocator.install()                      # before CUDA starts: the extension is the process's allocator

`install()` gives reuse of memory inside CUDA graph captures and takes torch's own statistics, so these are here:
`memory_stats`, `memory_snapshot`, `memory_summary` and the rest have torch's names, and answer from torch where the
extension is not installed.  `MULTIGRAPH_ALLOCATOR=1` in the environment installs it when torch is imported.

The extension is a package of its own (`multigraph-allocator`). It may be missing, of another version, or too late: then
one line says so, `status()` has the reason, and torch's own allocator serves.  Nothing here raises at import.

    library.py      the shared library: found, loaded, its version checked, its functions typed
    installing.py   install, status
    ended_pools.py  torch's pools that are over: their memory goes back when torch bears it
    sleeping.py     sleep, wake: of the whole process; what sleeps, for whoever reads it
    pools.py        pool, and sleep and wake of one
    relief.py       what is asked to give memory up before an allocation fails
    statistics.py   memory_stats and the rest
    stacks.py       record_memory_history: Python's stacks in snapshots

Where recordings live while it is the process's allocator is `cudagraphs/devices/extension_pool.py`.

Origin: PyTorch pull requests 158352 and 162186 (reuse within a capture), 151487 (pools that serve at out-of-memory).
"""

from __future__ import annotations

from multigraph_backend.allocator.installing import REUSE_RULES, Status, install, status
from multigraph_backend.allocator.pools import Pool, pool
from multigraph_backend.allocator.sleeping import Asleep, sleep, wake
from multigraph_backend.allocator.stacks import record_memory_history
from multigraph_backend.allocator.statistics import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
)

__all__ = [
    "REUSE_RULES",
    "Asleep",
    "Pool",
    "Status",
    "empty_cache",
    "install",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "pool",
    "record_memory_history",
    "reset_peak_memory_stats",
    "sleep",
    "status",
    "wake",
]
