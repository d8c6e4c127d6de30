"""What proves that a block's last use is over, one rule at a time; random and exhaustive programs run all at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.allocator.extension import (
    ANY_STREAM,
    GRAPH_WIDE,
    MIB,
    OWN_STREAM,
    STRICT,
    Allocator,
    capture,
    stress,
)

Make = Callable[..., Allocator]


def used_on_both(allocator: Allocator, main: int, side: int, *, early: bool = False) -> int:
    """A block that was used on `main`, then on `side`, and was freed; nothing is joined yet."""
    block = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.join(side, main)
    allocator.kernel(side)
    if early:
        allocator.early_kernel(side)
    allocator.record_stream(block, side)
    allocator.free(block)
    return block


@pytest.mark.parametrize("reuse", [OWN_STREAM, GRAPH_WIDE, ANY_STREAM])
def test_a_join_proves(make: Make, reuse: int) -> None:
    allocator = make(reuse=reuse)
    main, side = capture(allocator, 2)
    block = used_on_both(allocator, main, side)
    assert allocator.allocate(20 * MIB, main) != block
    allocator.join(main, side)
    assert allocator.allocate(20 * MIB, main) == block
    assert allocator.stats.proven == 1
    # the side stream was behind all of it at the free: by that rule the block was its own, and is lent back
    assert allocator.stats.moved == (2 if reuse == ANY_STREAM else 0)


def test_strict_always_defers(make: Make) -> None:
    allocator = make(reuse=STRICT)
    main, side = capture(allocator, 2)
    blocks = [used_on_both(allocator, main, side)]
    for _ in range(5):
        allocator.join(main, side)
        blocks.append(allocator.allocate(20 * MIB, main))
        assert len(set(blocks)) == len(blocks)
    assert (allocator.stats.proven, allocator.stats.parked) == (0, 1)
    # what its own stream alone has used is not deferred: it is in that stream's order, as outside of graphs
    allocator.free(blocks[-1])
    assert allocator.allocate(20 * MIB, main) == blocks[-1]


@pytest.mark.parametrize("reuse", [OWN_STREAM, GRAPH_WIDE, ANY_STREAM])
def test_an_edge_of_an_early_kernel_proves_nothing(make: Make, reuse: int) -> None:
    allocator = make(reuse=reuse)
    main, side = capture(allocator, 2)
    block = used_on_both(allocator, main, side, early=True)
    allocator.join(main, side)
    # the early kernel is over, the one before it has only begun
    assert allocator.allocate(20 * MIB, main) != block
    assert allocator.allocate(20 * MIB, side) != block
    assert allocator.stats.proven == 0


def test_a_full_edge_behind_early_kernels_proves_again(make: Make) -> None:
    allocator = make()
    main, side = capture(allocator, 2)
    allocator.kernel(side)
    allocator.early_kernel(side)
    allocator.kernel(side)
    allocator.join(main, side)
    allocator.allocate(MIB, side)  # the early kernel is noticed before the block's life, so it is none of its uses
    block = used_on_both(allocator, main, side)
    allocator.join(main, side)
    assert allocator.allocate(20 * MIB, main) == block


def test_replaced_dependencies_are_noticed(make: Make) -> None:
    allocator = make()
    (main,) = capture(allocator, 1)
    fork = allocator.kernel(main)
    block = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.free(block)
    other = allocator.allocate(20 * MIB, main)
    assert other == block  # in the stream's order
    allocator.kernel(main)
    allocator.free(other)
    allocator.set_terminal(main, fork)
    # what comes now runs beside the kernels that used the block
    assert allocator.allocate(20 * MIB, main) != block


def test_a_body_does_not_reuse_what_the_capture_around_it_allocated(make: Make) -> None:
    allocator = make()
    (main,) = capture(allocator, 1)
    body = allocator.stream()
    block = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.begin_body(body, main)
    within = allocator.allocate(20 * MIB, body)
    allocator.kernel(body)
    allocator.join(body, body)
    allocator.free(within)
    # of the body itself: each run of it comes whole before the next
    assert allocator.allocate(20 * MIB, body) == within
    allocator.free(block)
    # the body may run again, and would find the bytes of its last run
    assert allocator.allocate(20 * MIB, body) not in (block, within)
    allocator.end_capture(body)
    allocator.end_capture(main)


def test_pools_may_end_and_begin_again_inside_a_capture(make: Make) -> None:
    allocator = make()
    main, side = capture(allocator, 2)
    block = used_on_both(allocator, main, side)
    allocator.end_pool(1)
    allocator.join(main, side)
    allocator.begin_pool(1, allocator.is_capturing)
    assert allocator.allocate(20 * MIB, main) == block
    assert allocator.stats.proven == 1


def test_pools_that_are_nested_share_no_memory_and_one_proof(make: Make) -> None:
    allocator = make()
    main, side = capture(allocator, 2)
    outer = used_on_both(allocator, main, side)
    allocator.begin_pool(2, lambda stream: stream == main)
    allocator.join(main, side)
    inner = allocator.allocate(20 * MIB, main)
    assert inner != outer
    allocator.end_pool(1)  # not the innermost
    allocator.free(inner)
    assert allocator.allocate(20 * MIB, main) == inner
    allocator.end_pool(2)
    allocator.begin_pool(1, allocator.is_capturing)
    assert allocator.allocate(20 * MIB, main) == outer


def test_graphs_that_share_a_pool_share_its_memory(make: Make) -> None:
    allocator = make()
    reserved = []
    for _ in range(3):
        main, side = capture(allocator, 2)
        used_on_both(allocator, main, side)
        allocator.join(main, side)
        allocator.end_capture(main)
        allocator.end_pool(1)
        reserved.append(allocator.stats.reserved)
    # three streams, so a segment for each: what a capture leaves goes to its own stream
    assert reserved == [20 * MIB, 40 * MIB, 60 * MIB]
    main = allocator.stream()
    allocator.begin_pool(1, allocator.is_capturing)
    for _ in range(3):
        allocator.begin_capture(main)
        block = allocator.allocate(20 * MIB, main)
        allocator.kernel(main)
        allocator.free(block)
        allocator.end_capture(main)
    assert allocator.stats.reserved == 80 * MIB


def test_no_use_needs_no_proof_but_one_that_cannot_be_seen_does(make: Make) -> None:
    allocator = make()
    main, side = capture(allocator, 2)
    empty = allocator.allocate(20 * MIB, main)
    allocator.record_stream(empty, side)
    allocator.free(empty)
    assert allocator.allocate(20 * MIB, main) == empty  # no terminal, nothing to wait for
    # a stream that is not part of the capture: no terminal either, and that says nothing
    outside = allocator.stream()
    other = allocator.allocate(20 * MIB, main)
    allocator.record_stream(other, outside)
    allocator.free(other)
    assert allocator.allocate(20 * MIB, main) != other


def test_memory_from_before_the_capture_needs_more_than_no_use(make: Make) -> None:
    allocator = make()
    main = allocator.stream()
    allocator.begin_pool(1, lambda _: True)
    block = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.begin_capture(main)
    allocator.free(block)
    assert allocator.allocate(20 * MIB, main) != block
    allocator.end_capture(main)


def test_a_pool_open_at_out_of_memory_serves_no_capture(make: Make) -> None:
    allocator = make(capacity=100 * MIB)
    main = allocator.stream()
    allocator.begin_pool(2, lambda _: True)
    allocator.free(allocator.allocate(80 * MIB, main))
    allocator.end_pool(2)
    allocator.use_on_oom(2)
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(main)
    with pytest.raises(Exception, match="out of memory"):
        allocator.allocate(80 * MIB, main)
    allocator.end_capture(main)
    allocator.end_pool(1)
    allocator.allocate(80 * MIB, main)


def test_pools_that_hold_nothing_are_forgotten(make: Make) -> None:
    def driver_calls(pools: int) -> int:
        allocator = make(verify=False)
        stream = allocator.stream()
        for pool in range(1, pools):
            allocator.begin_pool(pool, lambda _: True)
            allocator.free(allocator.allocate(20 * MIB, stream))
            allocator.end_pool(pool)
            allocator.release_pool(pool)
            allocator.empty_cache()
        before = allocator.driver_calls
        allocator.empty_cache()
        assert allocator.snapshot()["segments"] == []
        return allocator.driver_calls - before

    assert driver_calls(200) == driver_calls(2)


@pytest.mark.parametrize("mutant", [2, 4, 5, 8])
def test_the_verifier_refuses_what_a_broken_rule_would_give(broken: Path, mutant: int) -> None:
    # without it the oracle finds two blocks over each other; with it the block is not handed out
    found = stress(
        broken / "exhaustive", "--operations", "4", "--odd", "--verify", "--reuse", "any", "--mutant", str(mutant)
    )
    assert found["wrong"].endswith("the verifier refused a reuse")
