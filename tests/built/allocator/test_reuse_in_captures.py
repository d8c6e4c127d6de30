"""What reuse inside a capture gives, in bytes, and what waits for the capture's end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.allocator.extension import (
    ANY_STREAM,
    GRAPH_WIDE,
    MIB,
    OWN_STREAM,
    STRICT,
    Allocator,
    Refused,
    capture,
)

Make = Callable[..., Allocator]


def ping_pong(allocator: Allocator, steps: int) -> int:
    """`t = acc * a` on one stream, `u = t + 1` on another, `acc = u * b` on the first; bytes reserved for it."""
    main, side = capture(allocator, 2)
    acc = allocator.allocate(64 * MIB, main)
    allocator.kernel(main)
    for _ in range(steps):
        t = allocator.allocate(64 * MIB, main)
        allocator.kernel(main)
        allocator.join(side, main)
        allocator.record_stream(t, side)
        u = allocator.allocate(64 * MIB, side)
        allocator.kernel(side)
        allocator.join(main, side)
        allocator.record_stream(u, main)
        allocator.free(acc)
        acc = allocator.allocate(64 * MIB, main)
        allocator.kernel(main)
        allocator.free(t)
        allocator.free(u)
    reserved = int(allocator.stats.reserved)
    allocator.free(acc)
    allocator.end_capture(main)
    return reserved


# an empty node on each stream is a later marker than the terminal, which asking all streams feels most
@pytest.mark.parametrize(
    ("reuse", "empty_nodes"),
    [(OWN_STREAM, False), (GRAPH_WIDE, False), (ANY_STREAM, False), (OWN_STREAM, True), (ANY_STREAM, True)],
)
def test_ping_pong_needs_four_blocks(make: Make, reuse: int, empty_nodes: bool) -> None:
    allocator = make(reuse=reuse, empty_nodes=empty_nodes)
    assert ping_pong(allocator, 32) <= 258 * MIB
    assert allocator.stats.proven >= 60
    assert allocator.stats.verified > 0


def test_ping_pong_strictly_keeps_every_block(make: Make) -> None:
    allocator = make(reuse=STRICT)
    assert ping_pong(allocator, 32) >= 64 * 64 * MIB
    assert allocator.stats.proven == 0


def test_blocks_without_any_use_need_no_wait(make: Make) -> None:
    # nothing was launched before the frees, so there is no terminal and nothing to wait for
    allocator = make()
    main = allocator.stream()
    side = allocator.stream()
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(main)
    allocator.join(side, main)
    for _ in range(50):
        block = allocator.allocate(20 * MIB, main)
        allocator.record_stream(block, side)
        allocator.free(block)
    assert allocator.stats.reserved == 20 * MIB


def test_a_stream_outside_of_the_capture_is_not_proven(make: Make) -> None:
    allocator = make()
    (main,) = capture(allocator, 1)
    outside = allocator.stream()
    first = allocator.allocate(20 * MIB, main)
    allocator.record_stream(first, outside)
    allocator.free(first)
    assert allocator.allocate(20 * MIB, main) != first
    assert allocator.stats.parked == 1


def test_what_waits_comes_back_after_the_capture(make: Make) -> None:
    allocator = make(reuse=STRICT)
    main, side = capture(allocator, 2)
    block = allocator.allocate(20 * MIB, main)
    allocator.record_stream(block, side)
    allocator.free(block)
    assert allocator.stats.active == 20 * MIB
    allocator.end_capture(main)
    allocator.end_pool(1)
    allocator.release_pool(1)
    assert allocator.empty_cache() == 20 * MIB
    assert allocator.driver_bytes == 0


def test_the_walk_is_linear(make: Make) -> None:
    # four times the program, four times the driver's calls: not sixteen times
    def calls(steps: int) -> int:
        allocator = make(verify=False)
        ping_pong(allocator, steps)
        return allocator.driver_calls

    assert calls(400) < 4.4 * calls(100)


def test_deferred_blocks_do_not_slow_allocations(make: Make) -> None:
    def calls_for_one_more(deferred: int) -> int:
        allocator = make(verify=False)
        main, side = capture(allocator, 2)
        allocator.kernel(side)
        for _ in range(deferred):
            block = allocator.allocate(512, main)
            allocator.kernel(side)
            allocator.record_stream(block, side)
            allocator.free(block)
        allocator.allocate(512, main)
        before = allocator.driver_calls
        allocator.allocate(512, main)
        return allocator.driver_calls - before

    assert calls_for_one_more(1000) == calls_for_one_more(10)


def test_an_invalidated_capture_gives_nothing_back_and_leaves_all_well(make: Make) -> None:
    allocator = make()
    for _ in range(1000):
        main, side = capture(allocator, 2)
        block = allocator.allocate(20 * MIB, main)
        allocator.kernel(main)
        allocator.record_stream(block, side)
        allocator.invalidate_capture(main)
        allocator.free(block)
        with pytest.raises(Refused):
            allocator.free(block)
        allocator.end_capture(main)
        allocator.end_pool(1)
        allocator.release_pool(1)
    allocator.empty_cache()
    assert allocator.driver_bytes == 0
