"""What is remembered and told: counters, the ring of events, snapshots, the account at out-of-memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.allocator.extension import INVALID, MIB, OUT_OF_MEMORY, Allocator, Refused

Make = Callable[..., Allocator]


def actions(allocator: Allocator) -> list[str]:
    return [entry["action"] for entry in allocator.snapshot()["device_traces"][-1]]


def test_history_is_off_by_default_and_a_ring_when_on(make: Make) -> None:
    allocator = make()
    stream = allocator.stream()
    allocator.free(allocator.allocate(MIB, stream))
    assert actions(allocator) == []
    allocator.record_history(4)
    sizes = []
    for mebibytes in range(1, 8):
        sizes.append(mebibytes * MIB)
        allocator.free(allocator.allocate(sizes[-1], stream))
    assert actions(allocator) == ["free_completed", "alloc", "free_requested", "free_completed"]
    trace = allocator.snapshot()["device_traces"][0]
    assert [entry["size"] for entry in trace] == [sizes[-2], *[sizes[-1]] * 3]
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(times)
    assert times[0] > 1_600_000_000_000_000
    allocator.record_history(0)
    assert actions(allocator) == []
    with pytest.raises(Refused, match="1500000"):
        allocator.record_history(1_500_001)


def test_a_free_completes_when_the_block_may_be_used_again(make: Make) -> None:
    allocator = make(history=100)
    one, two = allocator.stream(), allocator.stream()
    block = allocator.allocate(20 * MIB, one)
    allocator.kernel(two)
    allocator.record_stream(block, two)
    allocator.free(block)
    assert actions(allocator) == ["segment_alloc", "alloc", "free_requested"]
    state = allocator.snapshot()["segments"][0]["blocks"][0]["state"]
    assert state == "active_pending_free"
    allocator.run_all()
    allocator.allocate(1, one)
    assert "free_completed" in actions(allocator)


def test_expandable_segments_tell_what_was_mapped(make: Make) -> None:
    allocator = make(history=100, expandable=True)
    allocator.free(allocator.allocate(20 * MIB, allocator.stream()))
    allocator.empty_cache()
    assert actions(allocator) == ["segment_map", "alloc", "free_requested", "free_completed", "segment_unmap"]


def test_the_trace_stands_at_the_number_of_its_device(make: Make) -> None:
    allocator = make(history=100, index=2)
    allocator.allocate(1, allocator.stream())
    snapshot = allocator.snapshot()
    assert [len(trace) for trace in snapshot["device_traces"]] == [0, 0, 2]
    assert snapshot["segments"][0]["device"] == 2


def test_every_number_of_a_snapshot_adds_up(make: Make) -> None:
    allocator = make(history=100)
    stream = allocator.stream()
    held = [allocator.allocate(nbytes, stream) for nbytes in (700, 70_000, MIB, 3 * MIB, 30 * MIB)]
    allocator.free(held.pop(1))
    for segment in allocator.snapshot()["segments"]:
        sizes = [block["size"] for block in segment["blocks"]]
        addresses = [block["address"] for block in segment["blocks"]]
        assert sum(sizes) == segment["total_size"]
        assert addresses == [segment["address"] + sum(sizes[:i]) for i in range(len(sizes))]
        live = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert sum(block["size"] for block in live) == segment["allocated_size"] == segment["active_size"]
        assert sum(block["requested_size"] for block in live) == segment["requested_size"]
    stats = allocator.stats
    segments = allocator.snapshot()["segments"]
    assert sum(segment["total_size"] for segment in segments) == stats.reserved == allocator.driver_bytes
    assert sum(segment["allocated_size"] for segment in segments) == stats.allocated
    assert stats.allocations_up == 5
    assert stats.allocations_down == 1
    assert stats.allocated_up - stats.allocated_down == stats.allocated


def test_a_snapshot_is_written_at_out_of_memory(make: Make, tmp_path: Path) -> None:
    allocator = make(capacity=100 * MIB, history=100)
    stream = allocator.stream()
    allocator.allocate(80 * MIB, stream)
    with pytest.raises(Refused) as silent:
        allocator.allocate(40 * MIB, stream)
    assert "snapshot" not in str(silent.value.args[1])
    path = tmp_path / "oom.json"
    allocator.snapshot_at_oom(path)
    with pytest.raises(Refused) as told:
        allocator.allocate(40 * MIB, stream)
    assert told.value.args[0] == OUT_OF_MEMORY
    assert f"A snapshot is in {path}." in told.value.args[1]
    last = json.loads(path.read_text())["device_traces"][0][-1]
    assert (last["action"], last["device_free"], last["size"]) == ("oom", 20 * MIB, 40 * MIB)
    allocator.snapshot_at_oom(tmp_path / "no" / "folder")
    with pytest.raises(Refused, match="No snapshot could be written"):
        allocator.allocate(40 * MIB, stream)


def test_the_account_says_who_holds_what(make: Make) -> None:
    allocator = make(capacity=200 * MIB)
    one, two = allocator.stream(), allocator.stream()
    for nbytes in (20 * MIB, 30 * MIB):
        allocator.allocate(nbytes, one)
    allocator.begin_pool(1, lambda stream: stream == two)
    block = allocator.allocate(40 * MIB, two)
    waits = allocator.allocate(50 * MIB, two)
    allocator.kernel(one)
    allocator.begin_capture(two)
    allocator.kernel(two)
    allocator.record_stream(waits, one)
    allocator.free(waits)
    allocator.pool_limit(1, 150 * MIB)
    with pytest.raises(Refused) as told:
        allocator.allocate(80 * MIB, two)
    text = str(told.value.args[1])
    assert "this pool may use 150.00 MiB" in text
    assert "The default pool holds 50.00 MiB: 2 blocks of 50.00 MiB, the largest of 30.00 MiB." in text
    assert (
        "Pool (0, 1) holds 90.00 MiB: 1 block of 40.00 MiB, the largest of 40.00 MiB; waiting: 1 block of 50.00 MiB; "
        "it is held; it may use 150.00 MiB." in text
    )
    allocator.end_capture(two)
    allocator.free(block)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reuse": 4}, "rule of reuse"),
        ({"garbage_threshold": 1.5}, "between 0 and 1"),
        ({"history": 1 << 40}, "1500000"),
    ],
)
def test_options_are_strict(make: Make, settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence) as refused:
        make(**settings)
    assert refused.value.args[0] == INVALID
