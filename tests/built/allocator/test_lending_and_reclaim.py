"""At out-of-memory: what pools lend, and what goes back to the driver while scopes are open and nobody captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.allocator.extension import ANY_STREAM, MIB, OWN_STREAM, Allocator, Refused

Make = Callable[..., Allocator]

SETTINGS = [(ANY_STREAM, True), (ANY_STREAM, False), (OWN_STREAM, True), (OWN_STREAM, False)]


def captured(allocator: Allocator, pool: int, nbytes: int) -> tuple[int, int]:
    """A stream that has captured a block into a pool, which is held, and freed it; the block."""
    stream = allocator.stream()
    allocator.begin_pool(pool, allocator.is_capturing)
    allocator.begin_capture(stream)
    block = allocator.allocate(nbytes, stream)
    allocator.kernel(stream)
    allocator.free(block)
    allocator.end_capture(stream)
    allocator.end_pool(pool)
    return stream, block


@pytest.mark.parametrize(("reuse", "expandable"), SETTINGS)
def test_what_captures_have_left_is_lent(make: Make, reuse: int, expandable: bool) -> None:
    allocator = make(capacity=100 * MIB, reuse=reuse, expandable=expandable)
    _, block = captured(allocator, 1, 80 * MIB)
    one, two = allocator.stream(), allocator.stream()
    with pytest.raises(Refused, match="out of memory"):
        allocator.allocate(80 * MIB, one)
    allocator.use_on_oom(1)
    for stream in (one, two):  # it comes back, and is lent to another stream
        assert allocator.allocate(80 * MIB, stream) == block
        assert allocator.lent(1) == 80 * MIB
        allocator.kernel(stream)
        allocator.free(block)
    allocator.run_all()
    assert allocator.lent(1) == 0


def test_what_was_lent_serves_captures_again_on_any_stream(make: Make) -> None:
    allocator = make(capacity=100 * MIB, reuse=ANY_STREAM, expandable=True)
    _, block = captured(allocator, 1, 80 * MIB)
    allocator.use_on_oom(1)
    eager = allocator.stream()
    assert allocator.allocate(80 * MIB, eager) == block
    allocator.kernel(eager)
    with pytest.raises(Refused, match="memory of the pool is lent"):
        allocator.save(1)
    allocator.free(block)
    allocator.run_all()
    assert allocator.lent(1) == 0
    assert captured(allocator, 1, 80 * MIB)[1] == block


def test_small_requests_are_lent_parts_of_large_blocks(make: Make) -> None:
    allocator = make(capacity=82 * MIB, reuse=ANY_STREAM, expandable=True)
    _, block = captured(allocator, 1, 80 * MIB)
    allocator.use_on_oom(1)
    stream = allocator.stream()
    allocator.allocate(MIB, stream)
    allocator.allocate(MIB, stream)
    assert allocator.allocate(MIB, stream) == block
    assert allocator.lent(1) == MIB


@pytest.mark.parametrize("filter_", [lambda _: True, lambda _: False, None], ids=["all", "none", "capturing"])
@pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
def test_an_open_scope_stops_no_reclaim(make: Make, filter_: Callable[[int], bool] | None, expandable: bool) -> None:
    allocator = make(capacity=100 * MIB, reuse=ANY_STREAM, expandable=expandable)
    one, two, three = (allocator.stream() for _ in range(3))
    allocator.begin_pool(1, filter_ or allocator.is_capturing)
    allocator.end_pool(1)
    cached = allocator.allocate(80 * MIB, one)
    waiting = allocator.allocate(2 * MIB, one)
    allocator.kernel(two)
    allocator.record_stream(waiting, two)
    allocator.begin_pool(1, filter_ or allocator.is_capturing)
    allocator.free(cached)
    allocator.free(waiting)
    block = allocator.allocate(90 * MIB, three)
    allocator.free(block)
    allocator.end_pool(1)
    allocator.release_pool(1)
    allocator.release_pool(1)
    allocator.begin_pool(2, filter_ or allocator.is_capturing)
    cached = allocator.allocate(30 * MIB, two)
    allocator.free(cached)
    if filter_ is None or not filter_(two):
        assert allocator.empty_cache() >= 30 * MIB
    assert not allocator.faults()


def test_a_capture_that_begins_unseen_is_not_broken(make: Make) -> None:
    allocator = make(capacity=100 * MIB, reuse=ANY_STREAM, expandable=True)
    one, two, capturing = (allocator.stream() for _ in range(3))
    allocator.free(allocator.allocate(80 * MIB, one))
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(capturing)  # and nothing is allocated there
    allocator.allocate(90 * MIB, two)
    assert allocator.is_capturing(capturing)
    assert not allocator.faults()
