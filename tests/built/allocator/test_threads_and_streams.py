"""Frees by threads that drive no capture; captures that go on in a graph; streams that are gone; mapped memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.support.allocator.extension import ANY_STREAM, MIB, OWN_STREAM, Allocator, capture

Make = Callable[..., Allocator]


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("reuse", [OWN_STREAM, ANY_STREAM])
def test_a_free_of_another_thread_is_heard_by_the_one_that_captures(make: Make, reuse: int) -> None:
    allocator = make(reuse=reuse)
    (main,) = capture(allocator, 1)
    block = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    before = allocator.driver_calls
    in_a_thread(lambda: allocator.free(block))
    assert allocator.driver_calls - before <= 1  # whether it captures, and no look at the graph
    assert allocator.stats.freed_in_captures == 0
    assert allocator.allocate(20 * MIB, main) == block
    assert allocator.stats.freed_in_captures == 1


def test_what_it_frees_is_proven_as_of_when_it_was_heard(make: Make) -> None:
    allocator = make()
    main, side = capture(allocator, 2)
    block = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.join(side, main)
    allocator.kernel(side)
    allocator.record_stream(block, side)
    in_a_thread(lambda: allocator.free(block))
    assert allocator.allocate(20 * MIB, main) != block
    allocator.join(main, side)
    assert allocator.allocate(20 * MIB, main) == block


def test_what_nobody_heard_waits_for_the_end(make: Make) -> None:
    allocator = make()
    (main,) = capture(allocator, 1)
    block = allocator.allocate(20 * MIB, main)
    in_a_thread(lambda: allocator.free(block))
    allocator.end_capture(main)
    allocator.end_pool(1)
    allocator.release_pool(1)
    assert allocator.empty_cache() == 20 * MIB


@pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
def test_a_capture_that_goes_on_in_a_graph_takes_nothing_that_the_graph_used(make: Make, expandable: bool) -> None:
    allocator = make(reuse=ANY_STREAM, expandable=expandable)
    (main,) = capture(allocator, 1)
    used, kept = allocator.allocate(20 * MIB, main), allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.free(used)
    graph = allocator.graph(main)
    allocator.end_capture(main)
    allocator.begin_capture_to(main, graph)
    first = allocator.allocate(20 * MIB, main)
    assert first != used
    allocator.kernel(main)
    allocator.free(first)
    assert allocator.allocate(20 * MIB, main) == first  # its own
    allocator.end_capture(main)
    allocator.begin_capture(main)  # another graph
    assert allocator.allocate(20 * MIB, main) in (used, first)
    allocator.free(kept)


def test_a_body_whose_capture_was_not_seen_keeps_what_lives_longer(make: Make) -> None:
    allocator = make()
    main, body = capture(allocator, 2)
    block = allocator.allocate(20 * MIB, body)
    allocator.kernel(body)
    allocator.join(main, body)
    allocator.end_capture(main)
    allocator.begin_capture(main)  # and nothing is allocated there
    allocator.begin_body(body, main)
    allocator.kernel(body)
    allocator.free(block)
    # the body may run again, and would find another's bytes
    assert allocator.allocate(20 * MIB, body) != block


def test_blocks_of_a_destroyed_stream_cost_no_calls_and_come_back(make: Make) -> None:
    allocator = make()
    main, gone = allocator.stream(), allocator.stream()
    blocks = [allocator.allocate(2 * MIB, main) for _ in range(1000)]
    for block in blocks:
        allocator.record_stream(block, gone)
    allocator.kernel(gone)
    allocator.destroy_stream(gone)
    for block in blocks:
        allocator.free(block)
    calls = []
    for _ in range(100):
        before = allocator.driver_calls
        small = allocator.allocate(1000, main)
        calls.append(allocator.driver_calls - before)
        allocator.free(small)
    assert sum(calls) < 200  # of 100 allocations, the first of which makes a segment
    reserved = allocator.stats.reserved
    for _ in range(1000):  # more than there is: all work is waited for once, and they are back
        allocator.allocate(2 * MIB, main)
    assert allocator.stats.reserved == reserved
    assert not allocator.faults()


def test_a_stream_may_go_as_soon_as_what_it_used_is_freed(make: Make) -> None:
    # its event is recorded at the free, though another capture is under way
    allocator = make()
    main, gone, capturing = (allocator.stream() for _ in range(3))
    block = allocator.allocate(20 * MIB, main)
    allocator.record_stream(block, gone)
    allocator.kernel(gone)
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(capturing)
    allocator.allocate(20 * MIB, capturing)
    allocator.free(block)
    allocator.destroy_stream(gone)
    allocator.end_capture(capturing)
    allocator.end_pool(1)
    allocator.run_all()
    assert allocator.allocate(20 * MIB, main) == block


def test_memory_is_mapped_as_torch_maps_it(make: Make) -> None:
    allocator = make(expandable=True)
    allocator.allocate(20 * MIB, allocator.stream())
    assert allocator.as_the_driver_was_asked() == (1, 1)  # a file descriptor, and network cards
    assert not allocator.faults()
    allocator = make(expandable=True)
    allocator.cannot_share()
    allocator.allocate(20 * MIB, allocator.stream())
    assert allocator.as_the_driver_was_asked() == (0, 0)
    assert allocator.snapshot()["segments"][0]["is_expandable"]


def test_where_pages_are_larger_than_ours_segments_are_plain(make: Make) -> None:
    allocator = make(expandable=True)
    allocator.granularity(32 * MIB)
    allocator.allocate(20 * MIB, allocator.stream())
    assert not allocator.snapshot()["segments"][0]["is_expandable"]
    assert not allocator.faults()
