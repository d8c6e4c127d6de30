"""The library under torch's pluggable allocator, over the simulated driver; where torch is built for CUDA.

torch asks the CUDA runtime for the current device alone on these ways; a small library in front of it answers.  The
rest is as on a GPU: torch's own code calls the functions that `install` hands over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.allocator.extension import MIB

RUNTIME = """
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device; }
int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
"""

SCRIPT = """
import ctypes, json, logging, os, sys
import torch
from multigraph_backend import allocator
from multigraph_backend.allocator import library, process, statistics

process._gpus = lambda: 1  # the simulated driver's
facts = {"first": str(allocator.status())}
loaded = library.load().library
simulated = ctypes.CDLL(str(loaded.path))
simulated.sim_new.restype, simulated.sim_new.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
simulated.sim_enter.argtypes = [ctypes.c_void_p]
simulated.sim_enter(simulated.sim_new(1 << 30))

status = allocator.install(reuse="any_stream", history=100)
facts["installed"], facts["again"] = str(status), allocator.install() == status
facts["backend"] = torch.cuda.get_allocator_backend()

allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
plain = allocate(3 << 20, 0)
torch._C._cuda_beginAllocateCurrentThreadToPool(0, (7, 0))
pooled = allocate(3 << 20, 0)
torch._C._cuda_endAllocateToPool(0, (7, 0))
after = allocate(3 << 20, 0)
torch._C._cuda_releasePool(0, (7, 0))
handle = loaded.call("mg_torch_device", 0)
snapshot = statistics.merged([statistics.snapshot_of(loaded, handle)])
facts["snapshot"] = snapshot
facts["pool of"] = {
    name: segment["segment_pool_id"]
    for segment in snapshot["segments"]
    for block in segment["blocks"]
    for name, address in (("plain", plain), ("pooled", pooled), ("after", after))
    if block["address"] == address
}
torch._C._cuda_setMemoryFraction(0.5, 0)
try:
    allocate(600 << 20, 0)
except torch.OutOfMemoryError as error:
    facts["out of memory"] = str(error)
for address in (plain, pooled, after):
    free(address)
facts["stats"] = statistics.stats_of(loaded, handle)
facts["table"] = statistics.table(facts["stats"])
torch._C._cuda_emptyCache()
facts["emptied"] = statistics.stats_of(loaded, handle)["reserved_bytes.all.current"]
from torch.cuda import _memory_viz
facts["drawn"] = len(_memory_viz.trace_plot(snapshot)) + len(_memory_viz.segments(snapshot, lambda lines: lines))
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.c").write_text(RUNTIME)
    build = ["gcc", "-shared", "-fPIC", "-o", str(folder / "runtime.so"), str(folder / "runtime.c")]
    subprocess.run(build, check=True, timeout=60)
    environ = os.environ | {
        "LD_PRELOAD": str(folder / "runtime.so"),
        "MULTIGRAPH_ALLOCATOR_LIBRARY": str(simulated / "libmultigraph_allocator_sim.so"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_becomes_the_allocator_of_the_process(facts: dict[str, Any]) -> None:
    assert facts["first"].startswith("not installed: nobody asked for it")
    said = "installed: reuse in captures is 'any_stream', out of memory is a torch.OutOfMemoryError; torch cannot"
    assert facts["installed"].startswith(said)
    assert facts["again"]
    assert facts["backend"] == "pluggable"


def test_torch_s_pools_reach_it_with_their_filters(facts: dict[str, Any]) -> None:
    assert facts["pool of"] == {"plain": [0, 0], "pooled": [7, 0], "after": [0, 0]}


def test_out_of_memory_under_torch_s_memory_fraction(facts: dict[str, Any]) -> None:
    text = facts["out of memory"]
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 600.00 MiB on device 0; this process may use 512.00 MiB"
    )


def test_statistics_have_torch_s_names(facts: dict[str, Any]) -> None:
    stats = facts["stats"]
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.allocated"] == 9 * MIB
    assert stats["allocated_bytes.all.freed"] == 9 * MIB
    assert stats["allocation.all.peak"] == 3
    assert stats["segment.all.current"] == 2
    assert stats["reserved_bytes.all.current"] == 40 * MIB
    assert stats["num_ooms"] == 1
    assert "allocated                 0 B      9.0 MiB      9.0 MiB      9.0 MiB" in facts["table"]


def test_what_empty_cache_gives_back(facts: dict[str, Any]) -> None:
    assert facts["emptied"] == 0  # the pool's too: nobody holds it any more


def test_the_snapshot_is_drawn_by_torch_s_own_code(facts: dict[str, Any]) -> None:
    assert facts["drawn"] > 1000
    actions = [entry["action"] for entry in facts["snapshot"]["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "segment_alloc", "alloc", "alloc"]
