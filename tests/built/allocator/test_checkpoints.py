"""States of a pool: what comes back, what goes, who may free what afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.allocator.extension import INVALID, MIB, Allocator, Refused

Make = Callable[..., Allocator]


def in_pool(allocator: Allocator) -> int:
    """A stream whose captures allocate in pool 1."""
    stream = allocator.stream()
    allocator.begin_pool(1, lambda asked: asked == stream)
    return stream


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as error:
        call()
    assert error.value.args[0] == INVALID
    return str(error.value.args[1])


def test_a_restore_frees_what_came_since_and_brings_back_what_went(make: Make) -> None:
    allocator = make()
    stream = in_pool(allocator)
    empty = allocator.save(1)
    kept, went = allocator.allocate(MIB, stream), allocator.allocate(3 * MIB, stream)
    state = allocator.save(1)
    allocator.free(went)
    since = [allocator.allocate(nbytes, stream) for nbytes in (MIB, 2 * MIB, 5 * MIB)]
    assert since[1] == went  # its memory was given to another, of another size
    allocated = allocator.stats.allocated
    allocator.restore(state)
    assert allocator.blocks(1) == [(kept, MIB), (went, 3 * MIB)]
    assert allocated == 9 * MIB
    assert allocator.stats.allocated == allocator.stats.active == 4 * MIB
    assert allocator.stats.allocations == 2
    allocator.restore(empty)
    assert allocator.blocks(1) == []
    assert allocator.stats.allocated == 0
    allocator.restore(state)
    assert allocator.blocks(1) == [(kept, MIB), (went, 3 * MIB)]
    allocator.forget(state)
    assert "no such state" in refused(lambda: allocator.restore(state))


def test_what_a_restore_gave_back_is_used_by_the_next_capture(make: Make) -> None:
    allocator = make()
    stream = in_pool(allocator)
    state = allocator.save(1)
    for _ in range(8):
        allocator.begin_capture(stream)
        held = [allocator.allocate(20 * MIB, stream) for _ in range(4)]
        allocator.kernel(stream)
        allocator.end_capture(stream)
        assert sorted(address for address, _ in allocator.blocks(1)) == sorted(held)
        allocator.restore(state)
    assert allocator.stats.reserved == 80 * MIB
    assert allocator.segments(1) == sorted((address, 20 * MIB) for address in held)


def test_a_block_that_dies_in_the_next_capture_is_used_there(make: Make) -> None:
    allocator = make()
    stream = in_pool(allocator)
    allocator.begin_capture(stream)
    parent = allocator.allocate(20 * MIB, stream)
    allocator.kernel(stream)
    allocator.end_capture(stream)
    state = allocator.save(1)
    for _ in range(2):
        allocator.restore(state)
        allocator.begin_capture(stream)
        allocator.kernel(stream)
        allocator.drop(parent)
        assert allocator.allocate(20 * MIB, stream) == parent
        allocator.end_capture(stream)


@pytest.mark.parametrize("owner_first", [True, False])
def test_an_owner_that_lost_its_block_ends_nothing(make: Make, owner_first: bool) -> None:
    allocator = make()
    stream = in_pool(allocator)
    empty = allocator.save(1)
    lost = allocator.allocate(20 * MIB, stream)
    allocator.restore(empty)
    again = allocator.allocate(20 * MIB, stream)
    assert again == lost
    allocator.free(lost)  # one of the two owners: which one cannot be told, so the block stays
    assert allocator.blocks(1) == [(again, 20 * MIB)]
    if owner_first:
        allocator.free(again)
    else:
        allocator.drop(again)
    assert allocator.blocks(1) == []


def test_adopted_blocks_are_freed_by_their_new_owner_alone(make: Make) -> None:
    allocator = make()
    stream = in_pool(allocator)
    block = allocator.allocate(20 * MIB, stream)
    allocator.adopt(block)
    allocator.free(block)  # its storage dies
    assert allocator.blocks(1) == [(block, 20 * MIB)]
    state = allocator.save(1)
    allocator.drop(block)
    assert allocator.blocks(1) == []
    allocator.restore(state)
    assert allocator.blocks(1) == [(block, 20 * MIB)]
    allocator.free(block)  # nobody else has heard of this life
    assert allocator.blocks(1) == []
    assert "not handed out" in refused(lambda: allocator.adopt(block))


def test_the_same_address_in_another_life_is_another_block(make: Make) -> None:
    allocator = make()
    stream = in_pool(allocator)
    block = allocator.allocate(20 * MIB, stream)
    state = allocator.save(1)
    allocator.free(block)
    assert allocator.allocate(20 * MIB, stream) == block
    allocator.restore(state)
    allocator.free(block)  # by the owner of the life that the restore has ended
    assert allocator.blocks(1) == [(block, 20 * MIB)]
    allocator.drop(block)


def test_no_state_while_the_pool_is_in_use(make: Make) -> None:
    allocator = make()
    stream, other = in_pool(allocator), allocator.stream()
    state = allocator.save(1)
    allocator.begin_capture(stream)
    block = allocator.allocate(20 * MIB, stream)
    assert "capture under way" in refused(lambda: allocator.restore(state))
    assert "capture under way" in refused(lambda: allocator.save(1))
    allocator.join(other, stream)
    allocator.kernel(other)
    allocator.record_stream(block, other)
    allocator.free(block)
    assert "waits" in refused(lambda: allocator.restore(state))
    allocator.end_capture(stream)
    allocator.restore(state)
    assert allocator.blocks(1) == []


def test_memory_that_is_gone_cannot_come_back(make: Make) -> None:
    allocator = make()
    stream = in_pool(allocator)
    block = allocator.allocate(20 * MIB, stream)
    state = allocator.save(1)
    allocator.free(block)
    assert allocator.users(1) == 1
    allocator.end_pool(1)
    allocator.release_pool(1)
    assert allocator.users(1) == 0
    allocator.empty_cache()
    assert "given back to the driver" in refused(lambda: allocator.restore(state))
