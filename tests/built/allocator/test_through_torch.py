"""The library under torch, over the simulated driver; where torch is built for CUDA, without a GPU.

torch's own code calls the library as it does on a GPU: as its current allocator, and behind a MemPool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.allocator.extension import MIB
from tests.support.allocator.under_torch import run

INSTALLED = """
facts["first"] = str(allocator.status())
status = allocator.install(reuse="any_stream", history=100, snapshot_at_oom="oom.json")
facts["installed"], facts["again"] = str(status), allocator.install() == status
facts["backend"] = torch.cuda.get_allocator_backend()
facts["nothing yet"] = [allocator.memory_stats(), allocator.memory_snapshot()["segments"], allocator.memory_summary()]
torch.cuda.init()

plain = allocate(3 * MIB, 0)
torch._C._cuda_beginAllocateCurrentThreadToPool(0, (7, 0))
pooled = allocate(3 * MIB, 0)
torch._C._cuda_endAllocateToPool(0, (7, 0))
after = allocate(3 * MIB, 0)
torch._C._cuda_releasePool(0, (7, 0))
snapshot = allocator.memory_snapshot()
facts["snapshot"] = snapshot
facts["pool of"] = {
    name: segment["segment_pool_id"]
    for segment in snapshot["segments"]
    for block in segment["blocks"]
    for name, address in (("plain", plain), ("pooled", pooled), ("after", after))
    if block["address"] == address
}
torch.cuda.set_per_process_memory_fraction(0.5)
facts["out of memory"] = out_of_memory(600 * MIB)
with open("oom.json") as file:
    facts["written"] = json.load(file)["device_traces"][0][-1]["action"]
for address in (plain, pooled, after):
    free(address)
facts["stats"], facts["summary"] = allocator.memory_stats(), allocator.memory_summary()
facts["peak"] = [allocator.max_memory_allocated(), allocator.max_memory_reserved()]
torch.cuda.reset_peak_memory_stats = None  # torch's own would raise
allocator.reset_peak_memory_stats()
facts["peak after reset"] = [allocator.max_memory_allocated(), allocator.max_memory_reserved()]
facts["given back"], facts["left"] = allocator.empty_cache(), allocator.memory_reserved()
torch.cuda.set_per_process_memory_fraction(1.0)

pool, other = allocator.pool(limit=64 * MIB), allocator.pool(use_on_oom=True)
with pool:
    inside = allocate(30 * MIB, 0)
    with pool, other:
        deeper = allocate(100 * MIB, 0)
    facts["limit"] = out_of_memory(60 * MIB)
outside = allocate(20 * MIB, 0)
facts["pools"] = [pool.id, pool.reserved_bytes, pool.max_reserved_bytes, other.reserved_bytes]
facts["all pools"] = allocator.memory_reserved()
free(deeper)
torch.cuda.set_per_process_memory_fraction(160 / 1024)
torch.cuda.empty_cache()
facts["kept while held"] = other.reserved_bytes
lent = allocate(90 * MIB, 0)
facts["lent"] = lent == deeper
for address in (inside, outside, lent):
    free(address)
facts["given back by the pool"] = pool.empty_cache()
pool.close()
other.close()
allocator.empty_cache()
facts["end"] = [allocator.memory_reserved(), pool.reserved_bytes, simulated.sim_used(driver)]
from torch.cuda import _memory_viz
facts["drawn"] = len(_memory_viz.trace_plot(snapshot)) + len(_memory_viz.segments(snapshot, lambda lines: lines))
print(json.dumps(facts))
"""

POOLS = """
from multigraph_backend.allocator import ended_pools
torch.cuda.init()
status = allocator.install()
facts["too late"] = [status.installed, status.usable, status.reason]
before = torch.cuda.memory_reserved()
pool, plain = allocator.pool(limit=64 * MIB), allocator.pool()
facts["reasons"] = [pool.reason, plain.reason]
with pool:
    first, second = allocate(30 * MIB, 0), allocate(3 * MIB, 0)
    facts["limit"] = out_of_memory(20 * MIB)
    with plain:
        third = allocate(200 * MIB, 0)
outside = allocate(40 * MIB, 0)
facts["reserved"] = [pool.reserved_bytes, plain.reserved_bytes, simulated.sim_used(driver)]
facts["torch's"] = [torch.cuda.memory_reserved() - before, torch.cuda.memory_allocated()]
facts["ours are torch's"] = [allocator.memory_reserved() - before, allocator.memory_allocated()]
pools = {entry["total_size"]: entry["segment_pool_id"] for entry in allocator.memory_snapshot()["segments"]}
facts["pool of 30"] = pools[30 * MIB] == pool.id == pool.mem_pool.id
for address in (first, second, third, outside):
    free(address)
pool.close()
with plain:
    facts["one goes on"] = allocate(200 * MIB, 0) == third
free(third)
plain.close()
ended_pools._spare.clear()  # the least that can be allocated, kept to ask by
torch.cuda.empty_cache()
facts["end"] = [pool.reserved_bytes, torch.cuda.memory_reserved() - before, simulated.sim_used(driver)]
many = [allocator.pool() for _ in range(66)]
facts["many"] = [entry.reason for entry in many].count(None)
facts["last"] = many[-1].reason
print(json.dumps(facts))
"""


# ---------------------------------------------------------------- as the process's allocator


@pytest.fixture(scope="module")
def facts(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(INSTALLED, simulated, tmp_path_factory.mktemp("installed"))


def test_it_becomes_the_allocator_of_the_process(facts: dict[str, Any]) -> None:
    assert facts["first"].startswith("not installed: nobody asked for it")
    said = "installed: reuse in captures is 'any_stream', segments are expandable, out of memory is a "
    assert facts["installed"].startswith(said + "torch.OutOfMemoryError; torch cannot")
    assert facts["again"]
    assert facts["backend"] == "pluggable"
    assert facts["nothing yet"] == [{}, [], "nothing was allocated on this device"]


def test_torch_s_pools_reach_it_with_their_filters(facts: dict[str, Any]) -> None:
    assert facts["pool of"] == {"plain": [0, 0], "pooled": [7, 0], "after": [0, 0]}


def test_out_of_memory_under_torch_s_memory_fraction(facts: dict[str, Any]) -> None:
    said = "CUDA out of memory. Tried to allocate 600.00 MiB on device 0; this process may use 512.00 MiB"
    assert facts["out of memory"].startswith(said)
    assert facts["written"] == "oom"


def test_statistics_have_torch_s_names(facts: dict[str, Any]) -> None:
    stats = facts["stats"]
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.allocated"] == 9 * MIB
    assert stats["allocated_bytes.all.freed"] == 9 * MIB
    assert stats["allocation.all.peak"] == 3
    assert stats["segment.all.current"] == 2
    assert stats["reserved_bytes.all.current"] == 40 * MIB
    assert stats["num_ooms"] == 1
    assert "allocated                 0 B      9.0 MiB      9.0 MiB      9.0 MiB" in facts["summary"]
    assert facts["peak"] == [9 * MIB, 40 * MIB]
    assert facts["peak after reset"] == [0, 40 * MIB]


def test_what_empty_cache_gives_back(facts: dict[str, Any]) -> None:
    assert (facts["given back"], facts["left"]) == (40 * MIB, 0)  # the pool's too: nobody holds it any more


def test_a_pool_of_the_extension(facts: dict[str, Any]) -> None:
    own, reserved, peak, others = facts["pools"]
    assert own == [(1 << 62) + 1, 0]
    assert (reserved, peak, others, facts["all pools"]) == (30 * MIB, 30 * MIB, 100 * MIB, 150 * MIB)
    assert "this pool may use 64.00 MiB" in facts["limit"]
    assert facts["kept while held"] == 100 * MIB
    assert facts["lent"]
    assert facts["given back by the pool"] == 30 * MIB
    assert facts["end"] == [0, 0, 0]


def test_the_snapshot_is_drawn_by_torch_s_own_code(facts: dict[str, Any]) -> None:
    assert facts["drawn"] > 1000
    actions = [entry["action"] for entry in facts["snapshot"]["device_traces"][0]]
    assert actions == ["segment_map", "alloc", "segment_map", "alloc", "alloc"]


# ---------------------------------------------------------------- behind pools of torch's allocator


@pytest.fixture(scope="module")
def beside(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(POOLS, simulated, tmp_path_factory.mktemp("pools"))


def test_when_cuda_has_started_it_is_too_late_to_install(beside: dict[str, Any]) -> None:
    installed, usable, reason = beside["too late"]
    assert (installed, usable) == (False, True)
    assert reason.startswith("too late: CUDA has started in this process, install it first; PYTORCH_CUDA_ALLOC_CONF=")


def test_torch_s_pools_draw_segments_from_it(beside: dict[str, Any]) -> None:
    assert beside["reasons"] == [None, None]
    assert beside["reserved"] == [50 * MIB, 200 * MIB, 250 * MIB]  # what is outside comes from the runtime
    assert beside["torch's"] == beside["ours are torch's"] == [290 * MIB, 273 * MIB]
    assert beside["pool of 30"]


def test_a_pool_s_limit_is_torch_s_out_of_memory(beside: dict[str, Any]) -> None:
    assert beside["limit"].startswith("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")


def test_a_pool_that_is_closed_gives_its_segments_back_and_others_go_on(beside: dict[str, Any]) -> None:
    assert beside["one goes on"]
    assert beside["end"] == [0, 0, 0]


def test_pools_past_the_last_slot_are_torch_s_alone(beside: dict[str, Any]) -> None:
    assert beside["many"] == 64
    assert beside["last"] == "more pools than the extension can supply at a time"
