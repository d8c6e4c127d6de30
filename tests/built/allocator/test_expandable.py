"""Expandable segments: ranges of addresses that grow, shrink, and share memory between sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.allocator.extension import ANY_STREAM, MIB, OUT_OF_MEMORY, OWN_STREAM, Allocator, Refused

Make = Callable[..., Allocator]


def test_sizes_share_what_is_mapped(make: Make) -> None:
    def reserved(expandable: bool) -> int:
        allocator = make(expandable=expandable)
        stream = allocator.stream()
        for nbytes in range(20 * MIB, 400 * MIB, 20 * MIB):  # each a little larger than all before it
            allocator.free(allocator.allocate(nbytes, stream))
        return int(allocator.stats.reserved)

    assert reserved(expandable=True) == 380 * MIB
    assert reserved(expandable=False) > 3000 * MIB


def test_a_block_grows_out_of_free_memory_and_what_is_mapped_behind_it(make: Make) -> None:
    allocator = make(expandable=True)
    stream = allocator.stream()
    first, second = allocator.allocate(40 * MIB, stream), allocator.allocate(30 * MIB, stream)
    assert second == first + 40 * MIB
    assert allocator.stats.reserved == allocator.driver_bytes == 70 * MIB
    assert allocator.stats.segments == 1
    allocator.free(second)
    assert allocator.allocate(60 * MIB, stream) == second
    assert allocator.stats.reserved == 100 * MIB
    assert allocator.base(second) == (first, 100 * MIB)


def test_holes_go_back_and_are_filled_again(make: Make) -> None:
    allocator = make(expandable=True)
    stream = allocator.stream()
    blocks = [allocator.allocate(20 * MIB, stream) for _ in range(5)]
    for block in blocks[1:4]:
        allocator.free(block)
    assert allocator.empty_cache() == 60 * MIB
    assert allocator.stats.reserved == allocator.driver_bytes == 40 * MIB
    runs = [(segment["address"], segment["total_size"]) for segment in allocator.snapshot()["segments"]]
    assert runs == [(blocks[0], 20 * MIB), (blocks[4], 20 * MIB)]
    assert all(segment["is_expandable"] for segment in allocator.snapshot()["segments"])
    assert allocator.allocate(60 * MIB, stream) == blocks[1]
    for block in (blocks[0], blocks[1], blocks[4]):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.driver_bytes == 0
    assert allocator.stats.segments == 0
    assert allocator.stats.segments_up == 1


def test_the_device_is_waited_for_before_memory_is_unmapped(make: Make) -> None:
    # the simulated driver calls it a fault otherwise, and fails the unmapping
    allocator = make(expandable=True)
    stream = allocator.stream()
    block = allocator.allocate(20 * MIB, stream)
    allocator.kernel(stream)
    allocator.free(block)
    assert allocator.empty_cache() == 20 * MIB


def test_what_the_driver_refuses_half_way_is_as_if_not_begun(make: Make) -> None:
    allocator = make(expandable=True)
    stream = allocator.stream()
    allocator.allocate(20 * MIB, stream)
    refusals = []
    for call in range(1, 40):
        allocator.fail_at(call)
        try:
            block = allocator.allocate(60 * MIB, stream)
        except Refused as refused:
            refusals.append(refused.args[0])
            allocator.fail_at(0)
            allocator.verify()
            block = allocator.allocate(60 * MIB, stream)
        allocator.fail_at(0)
        allocator.free(block)
        assert allocator.empty_cache() == 60 * MIB
        assert allocator.driver_bytes == allocator.stats.reserved == 20 * MIB
    # the ladder tries most of it twice; a failed call of the exchange of the capture's mode, too, costs one try
    assert allocator.stats.retries > 5
    assert set(refusals) == {OUT_OF_MEMORY}
    assert len(refusals) < 39


def test_out_of_memory_in_a_range_gives_other_ranges_back_first(make: Make) -> None:
    allocator = make(expandable=True, capacity=100 * MIB)
    one, two = allocator.stream(), allocator.stream()
    allocator.free(allocator.allocate(80 * MIB, one))
    allocator.allocate(90 * MIB, two)
    assert allocator.stats.reserved == 90 * MIB
    with pytest.raises(Refused, match="out of memory"):
        allocator.allocate(20 * MIB, one)


def test_a_pool_open_at_out_of_memory_is_extended(make: Make) -> None:
    allocator = make(expandable=True, capacity=100 * MIB)
    one, two = allocator.stream(), allocator.stream()
    allocator.begin_pool(1, lambda _: True)
    block = allocator.allocate(60 * MIB, one)
    allocator.free(block)
    allocator.end_pool(1)  # and it is held: what it has does not go back to the driver
    allocator.use_on_oom(1)
    # 40 MiB are left, and behind the 60 MiB of the pool they are enough
    assert allocator.allocate(80 * MIB, one) == block
    assert allocator.stats.reserved == 80 * MIB
    with pytest.raises(Refused):
        allocator.allocate(80 * MIB, two)
    allocator.free(block)
    assert allocator.allocate(70 * MIB, two) == block


def test_pools_keep_their_states_in_ranges(make: Make) -> None:
    allocator = make(expandable=True)
    stream = allocator.stream()
    allocator.begin_pool(1, lambda asked: asked == stream)
    kept, went = allocator.allocate(20 * MIB, stream), allocator.allocate(30 * MIB, stream)
    state = allocator.save(1)
    allocator.free(went)
    allocator.allocate(10 * MIB, stream)
    allocator.restore(state)
    assert allocator.blocks(1) == [(kept, 20 * MIB), (went, 30 * MIB)]
    assert allocator.segments(1) == [(kept, 50 * MIB)]
    allocator.drop(went)
    allocator.end_pool(1)
    allocator.release_pool(1)
    assert allocator.empty_cache() == 30 * MIB
    with pytest.raises(Refused, match="given back"):
        allocator.restore(state)


def test_reuse_in_captures_is_the_same(make: Make) -> None:
    allocator = make(expandable=True)
    main, side = allocator.stream(), allocator.stream()
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(main)
    allocator.join(side, main)
    for _ in range(8):
        block = allocator.allocate(20 * MIB, main)
        allocator.join(side, main)
        allocator.kernel(side)
        allocator.record_stream(block, side)
        allocator.join(main, side)
        allocator.free(block)
    assert allocator.stats.proven == 8
    assert allocator.stats.reserved == 20 * MIB
    allocator.end_capture(main)


def test_many_middle_sized_blocks_are_mapped_together(make: Make) -> None:
    allocator = make(expandable=True)
    stream = allocator.stream()
    allocator.allocate(2 * MIB, stream)
    assert allocator.stats.reserved == 20 * MIB
    calls = allocator.driver_calls
    for _ in range(9):
        allocator.allocate(2 * MIB, stream)
    assert allocator.driver_calls == calls
    allocator.allocate(11 * MIB, stream)
    assert allocator.stats.reserved == (20 + 12) * MIB


def test_other_devices_may_use_what_is_mapped_before_and_after_they_ask(make: Make) -> None:
    allocator = make(expandable=True)
    stream = allocator.stream()
    before = allocator.allocate(60 * MIB, stream)
    assert not allocator.mapped_for(1, before)
    allocator.peer_access(1)
    after = allocator.allocate(30 * MIB, stream)
    for block, nbytes in ((before, 60 * MIB), (after, 30 * MIB)):
        for device, may in ((0, True), (1, True), (2, False)):
            assert allocator.mapped_for(device, block) == may
            assert allocator.mapped_for(device, block + nbytes - 1) == may
    with pytest.raises(Refused, match="do not reach each other"):
        allocator.peer_access(7)
    assert not allocator.mapped_for(7, before)


def test_a_driver_that_does_not_open_memory_to_another_device_is_told(make: Make) -> None:
    refusals = []
    for call in range(1, 8):
        allocator = make(expandable=True)
        block = allocator.allocate(60 * MIB, allocator.stream())
        allocator.fail_at(call)
        try:
            allocator.peer_access(1)
        except Refused as refused:
            refusals.append(refused.args[1])
            allocator.fail_at(0)
            allocator.peer_access(1)
        allocator.fail_at(0)
        assert all(allocator.mapped_for(1, block + at * MIB) for at in range(60))
    assert any("does not open memory" in said for said in refusals)
    assert any("does not tell whether" in said for said in refusals)


TWO_DEVICES = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in ("sim_new", "mg_torch_make_device"):
    getattr(library, name).restype = ctypes.c_void_p
simulator = ctypes.c_void_p(library.sim_new(ctypes.c_size_t(1 << 40)))
library.sim_enter(simulator)
assert library.mg_set_options((ctypes.c_int * 8)(3, 0, 0, 1)) == 0

def made(index):
    device, address = ctypes.c_void_p(library.mg_torch_make_device(index)), ctypes.c_uint64()
    assert library.mg_allocate(device, ctypes.c_size_t(1 << 25), None, ctypes.byref(address)) == 0
    return address

blocks = [made(0), made(1)]
print([[library.sim_mapped_for(simulator, device, block) for device in (0, 1, 2)] for block in blocks])
"""


def test_devices_on_which_torch_allocates_may_use_each_other_s_memory(simulated: Path) -> None:
    command = [sys.executable, "-c", TWO_DEVICES, str(simulated / "libmultigraph_allocator_sim.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[[1, 1, 0], [1, 1, 0]]", "")


def test_a_driver_that_cannot_map_gives_plain_segments(make: Make) -> None:
    allocator = make(expandable=True)
    allocator.cannot_map()
    main, side = allocator.stream(), allocator.stream()
    block = allocator.allocate(20 * MIB, main)
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(side)
    allocator.allocate(30 * MIB, side)
    assert [segment["is_expandable"] for segment in allocator.snapshot()["segments"]] == [False, False]
    allocator.free(block)
    allocator.end_capture(side)


# ---------------------------------------------------------------- what captures share


def captures(make: Make, reuse: int = ANY_STREAM) -> tuple[Allocator, int, int]:
    """Two streams of a capture whose memory is a pool's."""
    allocator = make(expandable=True, reuse=reuse)
    main, side = allocator.stream(), allocator.stream()
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(main)
    allocator.join(side, main)
    return allocator, main, side


def test_streams_and_sizes_of_a_capture_share_one_range(make: Make) -> None:
    allocator, main, side = captures(make)
    blocks = [allocator.allocate(nbytes, stream) for nbytes in (5000, 3 * MIB, 700_000) for stream in (main, side)]
    assert len(allocator.segments(1)) == 1
    assert allocator.stats.reserved == 8 * MIB  # all of them have 7.4 MiB
    for block in blocks:
        allocator.free(block)
    allocator.end_capture(main)

    allocator, main, side = captures(make, reuse=OWN_STREAM)
    for nbytes in (5000, 3 * MIB):
        allocator.allocate(nbytes, main)
        allocator.allocate(nbytes, side)
    assert len(allocator.segments(1)) == 4  # where streams do not take turns, each has ranges of its own


def test_a_block_is_made_of_neighbours_that_different_streams_have_freed(make: Make) -> None:
    allocator, main, side = captures(make)
    one, two, three = (
        allocator.allocate(4 * MIB, main),
        allocator.allocate(4 * MIB, side),
        allocator.allocate(2 * MIB, main),
    )
    assert (two, three) == (one + 4 * MIB, one + 8 * MIB)
    allocator.kernel(main)
    allocator.kernel(side)
    allocator.free(one)
    allocator.free(two)
    # main is not behind what side has done with the second
    other = allocator.allocate(7 * MIB, main)
    assert other > three
    allocator.free(other)
    reserved = allocator.stats.reserved
    allocator.join(main, side)
    allocator.kernel(main)
    assert allocator.allocate(7 * MIB, main) == one
    assert allocator.stats.moved == 1
    # what is left of the second is still side's own
    assert allocator.allocate(MIB, side) == one + 7 * MIB
    assert allocator.stats.reserved == reserved
    assert allocator.stats.verified > 0
    allocator.end_capture(main)


def test_neighbours_may_have_any_beginning_of_a_run_only_where_each_is_proven(make: Make) -> None:
    allocator, main, side = captures(make)
    blocks = [allocator.allocate(2 * MIB, stream) for stream in (main, side, main)]
    allocator.kernel(side)
    for block in blocks:
        allocator.free(block)
    # the middle one waits for side, so main's two neighbours of it are not one
    assert allocator.allocate(3 * MIB, main) >= blocks[2]
    allocator.end_capture(main)


def test_the_next_capture_has_the_memory_of_the_last_on_any_stream(make: Make) -> None:
    allocator, main, side = captures(make)
    block = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.free(block)
    allocator.join(main, side)
    allocator.end_capture(main)
    allocator.begin_capture(side)
    assert allocator.allocate(20 * MIB, side) == block
    assert allocator.stats.reserved == 20 * MIB
    allocator.end_capture(side)


def test_what_was_used_outside_of_captures_stays_with_its_stream(make: Make) -> None:
    allocator, main, side = captures(make)
    output = allocator.allocate(20 * MIB, main)
    allocator.kernel(main)
    allocator.join(main, side)
    allocator.end_capture(main)
    allocator.end_pool(1)
    allocator.kernel(main)  # uses the output
    allocator.free(output)
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(side)
    assert allocator.allocate(20 * MIB, side) != output
    allocator.end_capture(side)
    allocator.begin_capture(main)
    assert allocator.allocate(20 * MIB, main) == output
    allocator.end_capture(main)


def test_work_outside_of_captures_has_nothing_of_what_captures_share(make: Make) -> None:
    allocator, main, side = captures(make)
    block = allocator.allocate(20 * MIB, main)
    allocator.free(block)
    allocator.join(main, side)
    allocator.end_capture(main)
    allocator.end_pool(1)
    allocator.begin_pool(1, lambda _: True)
    assert allocator.allocate(20 * MIB, main) != block
    for _ in range(2):
        allocator.release_pool(1)
    allocator.end_pool(1)
    assert allocator.empty_cache() == 20 * MIB


def test_without_a_range_of_addresses_there_are_plain_segments(make: Make) -> None:
    kinds = set()
    for call in range(1, 12):
        allocator = make(expandable=True)
        stream = allocator.stream()
        allocator.fail_at(call)
        try:
            allocator.free(allocator.allocate(20 * MIB, stream))
            kinds.add(allocator.snapshot()["segments"][0]["is_expandable"])
        except Refused:  # the mapping failed, as a plain segment's allocation may
            kinds.add("refused")
        allocator.empty_cache()
        assert allocator.driver_bytes == 0
    assert kinds == {True, False, "refused"}
