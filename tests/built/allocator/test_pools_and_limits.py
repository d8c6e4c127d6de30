"""Pools, scopes, limits and the ladder at out-of-memory, over the C ABI and the simulated driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.allocator.extension import INVALID, MIB, OUT_OF_MEMORY, Allocator, Refused

Make = Callable[..., Allocator]


def status_of(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(Refused) as refused:
        call()
    status, sentence = refused.value.args
    return int(status), str(sentence)


def test_the_innermost_scope_whose_filter_takes_the_stream_wins(make: Make) -> None:
    allocator = make()
    one, two = allocator.stream(), allocator.stream()
    allocator.begin_pool(1, lambda stream: True)
    allocator.begin_pool(2, lambda stream: stream == two)
    in_one, in_two = allocator.allocate(MIB, one), allocator.allocate(MIB, two)
    pools = {segment["address"]: segment["segment_pool_id"] for segment in allocator.snapshot()["segments"]}
    assert pools[allocator.base(in_one)[0]] == [0, 1]
    assert pools[allocator.base(in_two)[0]] == [0, 2]
    allocator.end_pool(1)
    allocator.end_pool(2)
    outside = allocator.allocate(MIB, one)
    assert allocator.base(outside)[0] not in pools


def test_a_filter_may_call_the_allocator(make: Make) -> None:
    # filters are asked without the lock: with it, this would never return
    allocator = make()
    stream = allocator.stream()
    asked: list[int] = []

    def takes(_: int) -> bool:
        asked.append(int(allocator.stats.allocations))
        return True

    allocator.begin_pool(1, takes)
    allocator.allocate(MIB, stream)
    assert asked == [0]


def test_a_pool_that_is_held_keeps_its_segments(make: Make) -> None:
    allocator = make()
    stream = allocator.stream()
    allocator.begin_pool(1, lambda _: True)
    block = allocator.allocate(30 * MIB, stream)
    allocator.end_pool(1)
    allocator.free(block)
    assert allocator.empty_cache() == 0
    allocator.release_pool(1)
    assert allocator.empty_cache() == 30 * MIB
    assert status_of(lambda: allocator.release_pool(1))[0] == INVALID
    assert status_of(lambda: allocator.end_pool(5))[0] == INVALID


def test_another_stream_waits_for_its_event(make: Make) -> None:
    allocator = make()
    one, two = allocator.stream(), allocator.stream()
    block = allocator.allocate(20 * MIB, one)
    allocator.kernel(two)
    allocator.record_stream(block, two)
    allocator.free(block)
    assert allocator.allocate(20 * MIB, one) != block
    allocator.run_all()
    assert allocator.allocate(20 * MIB, one) == block


def test_at_out_of_memory_cached_segments_go_first(make: Make) -> None:
    allocator = make(capacity=100 * MIB)
    one, two = allocator.stream(), allocator.stream()
    allocator.free(allocator.allocate(80 * MIB, one))
    allocator.allocate(90 * MIB, two)
    assert allocator.stats.retries == 1
    assert allocator.stats.reserved == 90 * MIB


def test_at_out_of_memory_blocks_that_wait_for_events_are_waited_for(make: Make) -> None:
    allocator = make(capacity=100 * MIB)
    one, two = allocator.stream(), allocator.stream()
    block = allocator.allocate(80 * MIB, one)
    allocator.kernel(two)
    allocator.record_stream(block, two)
    allocator.free(block)
    assert allocator.allocate(80 * MIB, one) == block


def test_a_pool_open_at_out_of_memory_serves_any_stream(make: Make) -> None:
    allocator = make(capacity=100 * MIB)
    one, two = allocator.stream(), allocator.stream()
    allocator.begin_pool(1, lambda _: True)
    block = allocator.allocate(80 * MIB, one)
    allocator.free(block)
    allocator.end_pool(1)
    assert status_of(lambda: allocator.allocate(80 * MIB, two))[0] == OUT_OF_MEMORY
    allocator.use_on_oom(1)
    assert allocator.allocate(80 * MIB, two) == block


def test_out_of_memory_tells_who_holds_what_and_leaves_all_well(make: Make) -> None:
    allocator = make(capacity=100 * MIB)
    stream = allocator.stream()
    block = allocator.allocate(80 * MIB, stream)
    status, sentence = status_of(lambda: allocator.allocate(40 * MIB, stream))
    assert status == OUT_OF_MEMORY
    assert "tried to allocate 40.00 MiB" in sentence
    assert "20.00 MiB free of 100.00 MiB" in sentence
    assert "80.00 MiB are allocated" in sentence
    assert allocator.stats.ooms == 1
    allocator.free(block)
    allocator.allocate(90 * MIB, stream)


def test_out_of_memory_inside_a_capture_gives_nothing_to_the_driver(make: Make) -> None:
    allocator = make(capacity=100 * MIB)
    one, two = allocator.stream(), allocator.stream()
    allocator.free(allocator.allocate(80 * MIB, two))
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(one)
    assert status_of(lambda: allocator.allocate(80 * MIB, one))[0] == OUT_OF_MEMORY
    assert allocator.stats.reserved == 80 * MIB
    allocator.end_capture(one)
    allocator.end_pool(1)
    allocator.allocate(80 * MIB, one)


def test_the_callback_may_free_and_is_asked_without_the_lock(make: Make) -> None:
    allocator = make(capacity=100 * MIB)
    stream = allocator.stream()
    held = [allocator.allocate(80 * MIB, stream)]

    def let_go(_: int) -> bool:
        if not held:
            return False
        allocator.free(held.pop())
        return True

    allocator.on_oom(let_go)
    allocator.allocate(90 * MIB, stream)
    assert status_of(lambda: allocator.allocate(90 * MIB, stream))[0] == OUT_OF_MEMORY


def test_limits(make: Make) -> None:
    allocator = make(capacity=200 * MIB)
    stream = allocator.stream()
    allocator.fraction(0.25)
    assert "this process may use 50.00 MiB" in status_of(lambda: allocator.allocate(60 * MIB, stream))[1]
    allocator.allocate(40 * MIB, stream)
    allocator.limit(0)
    allocator.begin_pool(1, lambda _: True)
    allocator.pool_limit(1, 30 * MIB)
    assert "this pool may use 30.00 MiB" in status_of(lambda: allocator.allocate(40 * MIB, stream))[1]
    allocator.allocate(30 * MIB, stream)
    assert status_of(lambda: allocator.fraction(2.0))[0] == INVALID


def test_garbage_goes_above_the_threshold(make: Make) -> None:
    allocator = make(garbage_threshold=0.5)
    stream = allocator.stream()
    allocator.limit(100 * MIB)
    old = allocator.allocate(40 * MIB, stream)
    young = allocator.allocate(20 * MIB, stream)
    allocator.free(old)
    allocator.free(young)
    allocator.free(allocator.allocate(20 * MIB, stream))
    allocator.allocate(60 * MIB, stream)
    assert allocator.stats.retries == 0  # the old segment went before anything had failed
    assert allocator.stats.reserved == 80 * MIB


def test_sizes_and_splitting(make: Make) -> None:
    allocator = make()
    stream = allocator.stream()
    assert allocator.allocate(0, stream) == 0
    small, next_to_it = allocator.allocate(1, stream), allocator.allocate(700, stream)
    assert next_to_it == small + 512
    assert allocator.stats.reserved == 2 * MIB
    assert allocator.stats.allocated == 512 + 1024
    assert allocator.stats.requested == 701
    large = allocator.allocate(3 * MIB, stream)
    assert allocator.allocate(4 * MIB, stream) == large + 3 * MIB
    assert allocator.stats.reserved == 22 * MIB
    assert status_of(lambda: allocator.allocate(1 << 62, stream))[0] == OUT_OF_MEMORY
    assert status_of(lambda: allocator.free(12345))[0] == INVALID


def test_the_snapshot_says_what_is_there(make: Make) -> None:
    allocator = make(history=3)
    stream = allocator.stream()
    kept = allocator.allocate(1000, stream)
    allocator.free(allocator.allocate(3 * MIB, stream))
    snapshot = allocator.snapshot()
    small, large = sorted(snapshot["segments"], key=lambda segment: segment["total_size"])
    assert [block["state"] for block in small["blocks"]] == ["active_allocated", "inactive"]
    assert small["blocks"][0]["address"] == kept
    assert small["blocks"][0]["requested_size"] == 1000
    assert [block["state"] for block in large["blocks"]] == ["inactive"]
    assert sum(block["size"] for block in large["blocks"]) == large["total_size"] == 20 * MIB
    assert [entry["action"] for entry in snapshot["device_traces"][0]] == ["alloc", "free_requested", "free_completed"]


@pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
def test_the_cache_of_one_pool_is_given_back(make: Make, expandable: bool) -> None:
    allocator = make(expandable=expandable)
    stream = allocator.stream()
    allocator.free(allocator.allocate(20 * MIB, stream))
    allocator.begin_pool(1, lambda _: True)
    kept, went = allocator.allocate(20 * MIB, stream), allocator.allocate(40 * MIB, stream)
    allocator.free(went)
    assert allocator.empty_pool(1) == 0  # it may be what a capture is about to use
    allocator.end_pool(1)
    assert allocator.empty_pool(1) == 40 * MIB
    assert allocator.stats.reserved == 40 * MIB
    assert allocator.blocks(1) == [(kept, 20 * MIB)]
    assert allocator.empty_pool(0) == 20 * MIB  # the default one
    with pytest.raises(Refused, match="no such pool"):
        allocator.empty_pool(2)


def test_what_a_replay_may_use_stays_until_nobody_holds_it(make: Make) -> None:
    allocator = make()
    stream = allocator.stream()
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(stream)
    block = allocator.allocate(20 * MIB, stream)
    allocator.kernel(stream)
    allocator.free(block)
    allocator.end_capture(stream)
    allocator.end_pool(1)
    assert allocator.empty_pool(1) == 0
    allocator.release_pool(1)
    assert allocator.empty_pool(1) == 20 * MIB
