"""Pools that sleep: their pages are the device's, their addresses stay, and what lay there is there again."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multigraph_backend.allocator import library
from tests.support.allocator.extension import ANY_STREAM, MIB, OUT_OF_MEMORY, Allocator, Refused, capture

Make = Callable[..., Allocator]


def written(allocator: Allocator, *addresses: int) -> None:
    for number, address in enumerate(addresses, 1):
        allocator.write(address, number)


def holds(allocator: Allocator, *addresses: int) -> bool:
    return [allocator.read(address) for address in addresses] == list(range(1, len(addresses) + 1))


@pytest.fixture
def filled(make: Make) -> tuple[Allocator, int, list[int]]:
    """An allocator, a stream of it, and blocks of pool 1, which is held."""
    allocator = make(reuse=ANY_STREAM, expandable=True, capacity=256 * MIB)
    stream = allocator.stream()
    allocator.begin_pool(1, lambda _: True)
    blocks = [allocator.allocate(nbytes, stream) for nbytes in (1000, 3 * MIB, 50 * MIB)]
    allocator.end_pool(1)
    return allocator, stream, blocks


def test_all_of_a_pool_goes_back_and_comes_to_the_same_addresses(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, stream, blocks = filled
    outside = allocator.allocate(4 * MIB, stream)
    written(allocator, *blocks)
    runs = allocator.segments(1)
    of_pool = sum(nbytes for _, nbytes in runs)
    before = allocator.driver_bytes
    for _ in range(3):
        allocator.kernel(stream)
        assert allocator.sleep(1) == of_pool
        assert allocator.driver_bytes == before - of_pool == allocator.stats.reserved
        assert allocator.asleep(1) == (True, of_pool)
        assert not any(allocator.backed(block, 1000) for block in blocks)
        assert allocator.backed(outside, 4 * MIB)
        assert allocator.wake(1) == of_pool
        assert allocator.asleep(1) == (False, 0)
        assert holds(allocator, *blocks)
        assert allocator.segments(1) == runs
        assert allocator.driver_bytes == before
    pinned = allocator.pinned
    assert of_pool <= pinned < of_pool + 2 * MIB  # kept for the next sleep
    assert allocator.empty_host() == pinned
    assert allocator.pinned == 0
    assert not allocator.faults()


def test_contents_that_are_not_kept(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, _, blocks = filled
    written(allocator, *blocks)
    allocator.sleep(1, keep=False)
    assert allocator.pinned == 0
    allocator.wake(1)
    assert [allocator.read(block) for block in blocks] == [0, 0, 0]
    allocator.sleep(1, keep=False)
    allocator.wake(1, fill=0xFF)
    assert allocator.read(blocks[0]) == (1 << 63) + 0xFF


def test_while_it_sleeps_frees_are_heard_and_nothing_is_handed_out(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, stream, blocks = filled
    state = allocator.save(1)
    written(allocator, *blocks)
    allocator.sleep(1)
    allocator.begin_pool(1, lambda _: True)
    with pytest.raises(Refused, match="the pool sleeps: wake it before"):
        allocator.allocate(1000, stream)
    allocator.end_pool(1)
    with pytest.raises(Refused, match="the pool sleeps already"):
        allocator.sleep(1)
    with pytest.raises(Refused, match="the pool sleeps"):
        allocator.restore(state)
    allocator.free(blocks[2])
    allocator.allocate(150 * MIB, stream)  # of what it gave up
    with pytest.raises(Refused, match="the allocator does not sleep"):
        allocator.wake_of_all()
    assert allocator.wake(1) < 50 * MIB  # what was freed is not brought back
    assert holds(allocator, *blocks[:2])
    with pytest.raises(Refused, match="the pool does not sleep"):
        allocator.wake(1)


def test_a_wake_without_memory_can_be_tried_again(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, stream, blocks = filled
    written(allocator, *blocks)
    allocator.sleep(1)
    taken = allocator.allocate(220 * MIB, stream)
    used = allocator.driver_bytes
    for _ in range(2):
        with pytest.raises(Refused, match="the pool sleeps on: the device has no") as refused:
            allocator.wake(1)
        assert refused.value.args[0] == OUT_OF_MEMORY
        assert allocator.driver_bytes == used
    allocator.free(taken)
    allocator.wake(1)  # what is cached goes first
    assert holds(allocator, *blocks)


def test_each_call_of_the_driver_may_fail(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, _, blocks = filled
    written(allocator, *blocks)
    before, refused = allocator.driver_bytes, 0
    for call in range(1, 60):
        allocator.fail_at(call)
        try:
            allocator.sleep(1)
            allocator.wake(1)
        except Refused:
            refused += 1
        allocator.fail_at(0)
        if allocator.asleep(1)[0]:
            allocator.wake(1)
        assert holds(allocator, *blocks)
        assert allocator.driver_bytes == before
        allocator.verify()
    assert refused > 10
    assert not allocator.faults()


def test_what_keeps_a_pool_awake(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, stream, _ = filled
    allocator.begin_pool(1, lambda _: True)
    with pytest.raises(Refused, match="the pool is open"):
        allocator.sleep(1)
    allocator.end_pool(1)
    other = allocator.stream()
    allocator.begin_pool(2, allocator.is_capturing)
    allocator.begin_capture(other)
    allocator.allocate(1000, other)
    with pytest.raises(Refused, match="a capture is under way"):
        allocator.sleep(1)
    with pytest.raises(Refused, match="a capture is under way"):
        allocator.sleep_all()
    allocator.end_capture(other)
    allocator.end_pool(2)
    allocator.use_on_oom(1)
    allocator.free(filled[2][2])
    taken = allocator.allocate(190 * MIB, stream)
    lent = allocator.allocate(45 * MIB, stream)
    assert allocator.lent(1)
    with pytest.raises(Refused, match="memory of the pool is lent"):
        allocator.sleep(1)
    allocator.free(lent)
    allocator.free(taken)
    assert not allocator.faults()


def test_plain_segments_do_not_sleep(make: Make) -> None:
    allocator = make()
    stream = allocator.stream()
    allocator.begin_pool(1, lambda _: True)
    allocator.allocate(1000, stream)
    allocator.end_pool(1)
    with pytest.raises(Refused, match="the pool's segments are plain"):
        allocator.sleep(1)


def test_what_graphs_use_comes_back_with_its_windows(make: Make) -> None:
    allocator = make(reuse=ANY_STREAM, expandable=True, stitch=True)
    main, *_ = capture(allocator, 2)
    blocks = [allocator.allocate(1_500_000, main) for _ in range(6)]
    for block in blocks[::2]:
        allocator.free(block)
    stitched = allocator.allocate(1_900_000, main)
    assert allocator.stats.stitched == 1
    allocator.end_capture(main)
    allocator.end_pool(1)
    used = allocator.driver_bytes
    ends = [*blocks[1::2], stitched, stitched + 1_899_999]
    written(allocator, *ends)
    for _ in range(2):
        allocator.sleep(1)
        assert allocator.driver_bytes == 0
        allocator.wake(1)
        assert holds(allocator, *ends)
        assert allocator.driver_bytes == used
    for block in (*blocks[1::2], stitched):
        allocator.free(block)
    allocator.sleep(1)
    allocator.wake(1)
    assert allocator.driver_bytes == used  # a replay may use it
    assert allocator.backed(stitched, 1_900_000)
    assert not allocator.faults()


def test_the_whole_device_sleeps(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, stream, blocks = filled
    outside = allocator.allocate(4 * MIB, stream)
    cached = allocator.allocate(60 * MIB, stream)
    allocator.free(cached)
    written(allocator, *blocks, outside)
    with pytest.raises(Refused, match="the allocator does not sleep"):
        allocator.wake_of_all()
    assert allocator.sleep_all() > 50 * MIB
    assert allocator.driver_bytes == allocator.stats.reserved == 0
    with pytest.raises(Refused, match="the pool sleeps"):
        allocator.allocate(1000, stream)
    with pytest.raises(Refused, match="the allocator sleeps already"):
        allocator.sleep_all()
    allocator.wake_of_all()
    assert holds(allocator, *blocks, outside)
    allocator.sleep(1)
    allocator.sleep_all()
    allocator.wake_of_all()
    assert allocator.asleep(1)[0]  # it was put to sleep by itself
    allocator.wake(1)
    assert holds(allocator, *blocks, outside)


def test_a_pool_that_ends_asleep_leaves_nothing(filled: tuple[Allocator, int, list[int]]) -> None:
    allocator, _, blocks = filled
    allocator.sleep(1)
    allocator.release_pool(1)
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    allocator.empty_host()
    assert (allocator.driver_bytes, allocator.pinned) == (0, 0)
    assert not allocator.faults()


# ---------------------------------------------------------------- segments of torch's pools


class Slot:
    """A pool of torch's, as torch uses it."""

    def __init__(self, loaded: library.Library, limit: int = 0, sleeps: bool = True) -> None:
        allocate, release = ctypes.c_void_p(), ctypes.c_void_p()
        self.loaded = loaded
        self.number = loaded.call("mg_segments_open", limit, ctypes.byref(allocate), ctypes.byref(release))
        assert self.number >= 0
        if sleeps:
            loaded.call("mg_segments_map", self.number, 0)
        size_t, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        assert allocate.value is not None
        assert release.value is not None
        self._allocate = ctypes.CFUNCTYPE(pointer, size_t, number, pointer)(allocate.value)
        self._release = ctypes.CFUNCTYPE(None, pointer, size_t, number, pointer)(release.value)

    def allocate(self, nbytes: int) -> int | None:
        found: int | None = self._allocate(nbytes, 0, None)
        return found

    def release(self, address: int | None) -> None:
        self._release(address, 0, 0, None)

    def call(self, name: str, *arguments: Any) -> int:
        nbytes = ctypes.c_size_t()
        self.loaded.call(f"mg_segments_{name}", self.number, *arguments, ctypes.byref(nbytes))
        return nbytes.value

    @property
    def asleep(self) -> bool:
        found = ctypes.c_int()
        self.call("asleep", ctypes.byref(found))
        return bool(found.value)

    def close(self) -> None:
        self.loaded.call("mg_segments_empty_host", ctypes.byref(ctypes.c_size_t()))
        self.loaded.call("mg_segments_close", self.number)


@pytest.fixture
def slot(make: Make, simulated: Any) -> Iterator[tuple[Allocator, Slot]]:
    allocator = make(capacity=128 * MIB)
    allocator.stream()
    found = library.look({library.PATH_VARIABLE: str(simulated / "libmultigraph_allocator_sim.so")}).library
    assert found is not None
    made = Slot(found)
    yield allocator, made
    made.close()
    assert (allocator.driver_bytes, allocator.pinned) == (0, 0)
    assert not allocator.faults()


def test_segments_sleep_and_wake(slot: tuple[Allocator, Slot]) -> None:
    allocator, pool = slot
    first, second = pool.allocate(2 * MIB), pool.allocate(40 * MIB)
    assert first is not None
    assert second is not None
    assert allocator.mapped_for(1, second)  # other devices may read it, as plain memory
    written(allocator, first, second + 40 * MIB - 1)
    for _ in range(2):
        assert pool.call("sleep", 1) == 42 * MIB
        assert allocator.driver_bytes == 0
        assert pool.allocate(2 * MIB) is None
        with pytest.raises(library.Refused, match="sleeps already"):
            pool.call("sleep", 1)
        assert pool.call("wake", -1) == 42 * MIB
        assert holds(allocator, first, second + 40 * MIB - 1)
    with pytest.raises(library.Refused, match="does not sleep"):
        pool.call("wake", -1)
    pool.call("sleep", 0)
    pool.release(second)
    assert pool.call("wake", 0xFF) == 2 * MIB
    assert allocator.read(first) == (1 << 63) + 0xFF
    pool.release(first)


def test_segments_that_cannot_be_had_back_yet(slot: tuple[Allocator, Slot]) -> None:
    allocator, pool = slot
    other = Slot(pool.loaded, sleeps=False)
    address = pool.allocate(100 * MIB)
    assert address is not None
    written(allocator, address)
    pool.call("sleep", 1)
    big = other.allocate(60 * MIB)
    with pytest.raises(library.Refused, match="the pool sleeps on: the device has no 100"):
        pool.call("wake", -1)
    other.release(big)
    pool.call("wake", -1)
    assert holds(allocator, address)
    with pytest.raises(library.Refused, match="plain"):
        other.call("sleep", 1)
    other.loaded.call("mg_segments_close", other.number)
    pool.release(address)


def test_segments_whose_driver_fails_once(slot: tuple[Allocator, Slot]) -> None:
    allocator, pool = slot
    refused = 0
    addresses = [pool.allocate(4 * MIB) for _ in range(3)]
    kept = [address for address in addresses if address is not None]
    written(allocator, *kept)
    for call in range(1, 50):
        allocator.fail_at(call)
        try:
            pool.call("sleep", 1)
            pool.call("wake", -1)
        except library.Refused:
            refused += 1
        allocator.fail_at(0)
        if pool.asleep:
            pool.call("wake", -1)
        assert holds(allocator, *kept)
        assert allocator.driver_bytes == 12 * MIB
    assert refused > 10
    for address in kept:
        pool.release(address)


def test_a_segment_that_the_driver_does_not_take_goes_later(slot: tuple[Allocator, Slot]) -> None:
    allocator, pool = slot
    later = 0
    for call in range(1, 8):
        first, second = pool.allocate(4 * MIB), pool.allocate(4 * MIB)
        allocator.fail_at(call)
        pool.release(first)
        allocator.fail_at(0)
        later += allocator.driver_bytes == 8 * MIB
        pool.release(second)
        assert allocator.driver_bytes == 0
    assert later >= 2


# ---------------------------------------------------------------- relief


def test_before_an_allocation_fails_a_thread_of_the_program_is_asked(make: Make, simulated: Any) -> None:
    allocator = make(capacity=64 * MIB)
    stream = allocator.stream()
    found = library.look({library.PATH_VARIABLE: str(simulated / "libmultigraph_allocator_sim.so")}).library
    assert found is not None
    loaded = found
    asked: list[tuple[int, int]] = []
    held = allocator.allocate(40 * MIB, stream)
    allocator.relieved_by_torch_s_side()
    loaded.call("mg_torch_relief", 5.0)

    def serve() -> None:
        index, lacking = ctypes.c_int(), ctypes.c_size_t()
        while True:
            loaded.call("mg_torch_relief_wait", ctypes.byref(index), ctypes.byref(lacking))
            if index.value < 0:
                return
            asked.append((index.value, lacking.value))
            gives = len(asked) == 1
            if gives:
                allocator.free(held)
            loaded.call("mg_torch_relief_done", int(gives))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    time.sleep(0.2)
    block = allocator.allocate(50 * MIB, stream)
    assert asked == [(0, 50 * MIB)]
    with pytest.raises(Refused, match="out of memory"):
        allocator.allocate(50 * MIB, stream)
    assert len(asked) == 2  # once for an allocation
    allocator.free(block)
    loaded.call("mg_torch_relief", 0.0)
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(Refused, match="out of memory"):
        allocator.allocate(80 * MIB, stream)
    assert len(asked) == 2


def test_it_is_asked_once_more_where_the_first_time_gave_too_little(make: Make, simulated: Any) -> None:
    allocator = make(capacity=64 * MIB)
    stream = allocator.stream()
    found = library.look({library.PATH_VARIABLE: str(simulated / "libmultigraph_allocator_sim.so")}).library
    assert found is not None
    held = [allocator.allocate(20 * MIB, stream) for _ in range(3)]
    asked: list[int] = []
    allocator.relieved_by_torch_s_side()
    found.call("mg_torch_relief", 5.0)

    def serve() -> None:
        index, lacking = ctypes.c_int(), ctypes.c_size_t()
        while True:
            found.call("mg_torch_relief_wait", ctypes.byref(index), ctypes.byref(lacking))
            if index.value < 0:
                return
            asked.append(lacking.value)
            if held:
                allocator.free(held.pop())
            found.call("mg_torch_relief_done", 1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    time.sleep(0.2)
    block = allocator.allocate(40 * MIB, stream)
    assert asked == [40 * MIB, 40 * MIB]
    allocator.free(block)
    with pytest.raises(Refused, match="out of memory"):
        allocator.allocate(80 * MIB, stream)
    assert asked[2:] == [80 * MIB, 80 * MIB]  # no more often
    found.call("mg_torch_relief", 0.0)
    thread.join(5)
    assert not thread.is_alive()
