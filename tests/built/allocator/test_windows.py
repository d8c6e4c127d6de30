"""Blocks made of free pieces of several pages, which are mapped a second time side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.allocator.extension import ANY_STREAM, MIB, Allocator, Refused

Make = Callable[..., Allocator]

PAGE = 2 * MIB
STITCHED = 3 * MIB // 2


class Capture:
    """Two pages in a pool of a capture: a piece of each is free, at its beginning and at its end, the rest lives."""

    def __init__(self, make: Make, **settings: bool | int) -> None:
        self.allocator = allocator = make(**{"expandable": True, "reuse": ANY_STREAM, "stitch": True} | settings)
        self.main, self.side = allocator.stream(), allocator.stream()
        allocator.begin_pool(1, allocator.is_capturing)
        allocator.begin_capture(self.main)
        allocator.join(self.side, self.main)
        self.first, *self.kept, self.last = [allocator.allocate(MIB, s) for s in (self.main,) * 2 + (self.side,) * 2]
        assert self.last == self.first + 3 * MIB
        allocator.kernel(self.main)
        allocator.kernel(self.side)
        allocator.free(self.first)
        allocator.free(self.last)

    @property
    def home(self) -> range:
        return range(self.first, self.first + 2 * PAGE)

    def stitched(self) -> int:
        """A block that lies in a window."""
        self.allocator.join(self.main, self.side)
        block = self.allocator.allocate(STITCHED, self.main)
        assert block not in self.home
        assert self.allocator.stats.stitched == 1
        assert self.allocator.stats.reserved == self.allocator.driver_bytes == 2 * PAGE
        return block

    def end(self) -> None:
        self.allocator.join(self.main, self.side)
        self.allocator.end_capture(self.main)
        self.allocator.end_pool(1)


def test_free_pieces_of_two_pages_are_one_block(make: Make) -> None:
    capture = Capture(make)
    allocator, block = capture.allocator, capture.stitched()
    allocator.verify()
    # half a MiB of the first page is left, and that is all there is
    assert allocator.allocate(MIB // 2, capture.main) in capture.home
    assert allocator.stats.reserved == 2 * PAGE
    assert allocator.base(block + 5) == (block, STITCHED)
    assert all(allocator.mapped_for(0, block + at) for at in range(0, STITCHED, 512))
    allocator.free(block)
    # its pieces are at home again, as what they were
    assert allocator.allocate(MIB, capture.main) == capture.first
    capture.end()


def test_another_stream_has_the_pieces_when_all_uses_of_the_block_are_over(make: Make) -> None:
    capture = Capture(make)
    allocator, block = capture.allocator, capture.stitched()
    allocator.join(capture.side, capture.main)
    for stream in (capture.main, capture.side):
        allocator.kernel(stream)
    allocator.record_stream(block, capture.side)
    allocator.free(block)
    # main is not behind what side does with both pieces
    assert allocator.allocate(MIB // 2 + 512, capture.main) not in capture.home
    allocator.join(capture.main, capture.side)
    allocator.kernel(capture.main)
    assert allocator.allocate(MIB, capture.main) == capture.first
    assert allocator.stats.verified > 0
    capture.end()


def test_pieces_that_are_not_proven_are_not_taken(make: Make) -> None:
    capture = Capture(make)
    allocator = capture.allocator
    # main has not waited for what side did with the last piece
    assert allocator.allocate(STITCHED, capture.main) not in (capture.first, capture.last)
    assert allocator.stats.reserved > 2 * PAGE
    capture.end()


@pytest.mark.parametrize("nbytes", [MIB - 512, 10 * MIB])
def test_small_and_large_requests_are_not_stitched(make: Make, nbytes: int) -> None:
    capture = Capture(make)
    allocator = capture.allocator
    allocator.join(capture.main, capture.side)
    allocator.allocate(nbytes, capture.main)
    assert allocator.stats.stitched == 0
    capture.end()


def test_nothing_is_stitched_where_it_is_turned_off_or_kernels_begin_early(make: Make) -> None:
    for early in (False, True):
        capture = Capture(make, stitch=early)
        allocator = capture.allocator
        allocator.join(capture.main, capture.side)
        allocator.kernel(capture.main)
        if early:
            allocator.early_kernel(capture.main)
        allocator.allocate(STITCHED, capture.main)
        assert allocator.stats.stitched == 0
        capture.end()


def test_a_window_stays_as_long_as_graphs_may_be_launched(make: Make) -> None:
    capture = Capture(make)
    allocator, block = capture.allocator, capture.stitched()
    allocator.free(block)
    capture.end()
    allocator.empty_cache()
    allocator.empty_pool(1)
    assert allocator.mapped_for(0, block)
    assert allocator.driver_bytes == 2 * PAGE
    allocator.release_pool(1)
    for kept in capture.kept:
        allocator.free(kept)
    assert allocator.empty_cache() == 2 * PAGE
    assert not allocator.mapped_for(0, block)
    assert allocator.driver_bytes == 0


def test_a_block_in_a_window_outlives_its_pool(make: Make) -> None:
    capture = Capture(make)
    allocator, block = capture.allocator, capture.stitched()
    for kept in capture.kept:
        allocator.free(kept)
    capture.end()
    allocator.release_pool(1)
    assert allocator.empty_cache() == 0  # both pages have a piece of it
    assert allocator.mapped_for(0, block)
    allocator.free(block)
    assert allocator.empty_cache() == 2 * PAGE
    assert allocator.driver_bytes == 0


def test_a_state_has_the_block_where_it_was(make: Make) -> None:
    capture = Capture(make)
    allocator, block = capture.allocator, capture.stitched()
    capture.end()
    state = allocator.save(1)
    lives = allocator.blocks(1)
    assert (block, STITCHED) in lives
    allocator.free(block)
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(capture.main)
    # what another capture has of its memory goes
    assert {allocator.allocate(MIB, capture.main) for _ in range(2)} == {capture.first, capture.last}
    allocator.end_capture(capture.main)
    allocator.end_pool(1)
    allocator.restore(state)
    allocator.verify()
    assert allocator.blocks(1) == lives
    assert allocator.mapped_for(0, block)
    allocator.restore(state)
    assert allocator.blocks(1) == lives
    # from then on it is the caller's
    allocator.drop(block)
    for kept in capture.kept:
        allocator.free(kept)
    for _ in range(2):
        allocator.release_pool(1)
    assert allocator.empty_cache() == 2 * PAGE
    with pytest.raises(Refused, match="given back"):
        allocator.restore(state)


def test_a_restore_ends_a_block_that_came_after(make: Make) -> None:
    capture = Capture(make)
    allocator = capture.allocator
    capture.end()
    state = allocator.save(1)
    allocator.begin_pool(1, allocator.is_capturing)
    allocator.begin_capture(capture.main)
    block = allocator.allocate(STITCHED, capture.main)
    assert allocator.stats.stitched == 1
    allocator.end_capture(capture.main)
    allocator.end_pool(1)
    allocator.restore(state)
    assert [address for address, _ in allocator.blocks(1)] == capture.kept
    allocator.free(block)  # its owner comes too late
    allocator.verify()
    assert allocator.stats.allocated == 2 * MIB


def test_no_byte_is_shown_twice(make: Make) -> None:
    capture = Capture(make, history=100)
    allocator, block = capture.allocator, capture.stitched()

    def shown() -> dict[int, str]:
        segments = allocator.snapshot()["segments"]
        stats = allocator.stats
        assert sum(segment["total_size"] for segment in segments) == stats.reserved
        assert sum(segment["allocated_size"] for segment in segments) == stats.allocated
        assert sum(segment["active_size"] for segment in segments) == stats.active
        for segment in segments:
            assert sum(part["size"] for part in segment["blocks"]) == segment["total_size"]
        assert sum(nbytes for _, nbytes in allocator.segments(1)) == stats.reserved
        return {part["address"]: part["state"] for segment in segments for part in segment["blocks"]}

    assert shown()[block] == "active_allocated"
    assert (block, STITCHED) in allocator.blocks(1)
    assert (block, STITCHED) in allocator.segments(1)
    allocator.record_stream(block, capture.side)
    allocator.kernel(capture.side)
    allocator.free(block)
    states = shown()
    assert block not in states
    assert states[capture.first] == states[capture.last + MIB // 2] == "active_pending_free"
    assert states[capture.last] == "inactive"
    # its memory is waited for at home, so the window's part of the history ends with the block
    events = [event["action"] for event in allocator.snapshot()["device_traces"][0] if event["addr"] == block]
    assert events == ["alloc", "free_requested", "free_completed"]
    capture.end()


def test_windows_are_no_memory_of_the_pool(make: Make) -> None:
    capture = Capture(make)
    allocator = capture.allocator
    allocator.pool_limit(1, 2 * PAGE)
    allocator.limit(2 * PAGE)
    capture.stitched()
    with pytest.raises(Refused, match=r"this process may use 4\.00 MiB"):
        allocator.allocate(MIB, capture.main)
    capture.end()


def test_windows_are_not_without_end(make: Make) -> None:
    capture = Capture(make)
    allocator = capture.allocator
    allocator.join(capture.main, capture.side)
    for _ in range(40):
        allocator.free(allocator.allocate(STITCHED, capture.main))
    assert allocator.stats.stitched == 10  # of two pages each, for a pool of two
    assert allocator.stats.reserved == 3 * PAGE
    capture.end()


def test_new_pages_are_made_up_for_by_pieces(make: Make) -> None:
    capture = Capture(make)
    allocator = capture.allocator
    allocator.join(capture.main, capture.side)
    # one page of the two that it takes is new, and is no more than missing
    block = allocator.allocate(4 * MIB, capture.main)
    assert block not in capture.home
    assert allocator.stats.stitched == 1
    assert allocator.stats.reserved == allocator.stats.allocated == 3 * PAGE
    capture.end()


def test_other_devices_may_use_windows_too(make: Make) -> None:
    for before in (True, False):
        capture = Capture(make)
        allocator = capture.allocator
        if before:
            allocator.peer_access(1)
        block = capture.stitched()
        if not before:
            assert not allocator.mapped_for(1, block)
            allocator.peer_access(1)
        assert all(allocator.mapped_for(1, block + at) for at in range(0, STITCHED, 512))
        capture.end()


def test_what_the_driver_refuses_leaves_no_window(make: Make) -> None:
    stitched = set()
    for call in range(1, 30):
        capture = Capture(make, verify=False)
        allocator = capture.allocator
        allocator.join(capture.main, capture.side)
        allocator.fail_at(call)
        block = allocator.allocate(STITCHED, capture.main)
        allocator.fail_at(0)
        stitched.add(allocator.stats.stitched)
        allocator.verify()
        assert all(allocator.mapped_for(0, block + at) for at in range(0, STITCHED, 512))
        for live in (block, *capture.kept):
            allocator.free(live)
        capture.end()
        allocator.release_pool(1)
        allocator.empty_cache()
        allocator.empty_cache()  # what one unmapping left
        assert allocator.driver_bytes == allocator.stats.reserved == 0
    assert stitched == {0, 1}


def test_what_is_not_unmapped_is_not_given_back(make: Make) -> None:
    given = set()
    for call in range(1, 20):
        capture = Capture(make)
        allocator, block = capture.allocator, capture.stitched()
        for live in (block, *capture.kept):
            allocator.free(live)
        capture.end()
        allocator.release_pool(1)
        allocator.fail_at(call)
        given.add(allocator.empty_cache())
        allocator.fail_at(0)
        allocator.verify()
        assert allocator.driver_bytes == allocator.stats.reserved
        allocator.empty_cache()
        assert allocator.driver_bytes == 0
    assert given >= {0, PAGE, 2 * PAGE}
