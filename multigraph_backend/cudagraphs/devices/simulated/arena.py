"""The books of a simulated device's pool: which ranges are taken, and which streams are ordered behind which work.

A simulated device's pool keeps bytes; `Arena` keeps offsets into them, a best-fit allocator.  Free neighbours are
always one hole, so the taken blocks say everything: a state is the set of them, and going back to one is exact.  The
same calls from the same state give the same offsets.  Invariant: blocks do not overlap, lie within the capacity, and
begin and end at multiples of the granularity.

With `Segments` the arena grows as pools of torch's caching allocator do: by segments, which are neither joined nor
given back, so that what is free in several of them serves no block that is larger than each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ArenaState:
    """The taken blocks at one moment: (offset, bytes), ascending."""

    blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Segments:
    """How a pool grows; torch's caching allocator's rules, with a KiB in place of a MiB.

    Blocks of at most `small` bytes lie in segments of `small_segment`.  Larger ones lie in segments of `large_segment`,
    and from `own` bytes on in one of their own, a multiple of `rounding`.  A remainder of at most `small` bytes is not
    split off a large block.
    """

    small: int = 1 << 10
    small_segment: int = 2 << 10
    large_segment: int = 20 << 10
    own: int = 10 << 10
    rounding: int = 2 << 10

    def for_block(self, nbytes: int) -> int:
        """Bytes of a new segment for a block that no other has room for."""
        if nbytes <= self.small:
            return self.small_segment
        return self.large_segment if nbytes < self.own else -(-nbytes // self.rounding) * self.rounding


class Arena:
    """`blocks` maps the offset of each taken block to its bytes; `high_water` is the highest end that one ever had.
    `reserved`: offset and bytes of each segment, ascending, where there are segments."""

    def __init__(self, capacity: int, granularity: int = 64, segments: Segments | None = None) -> None:
        if granularity <= 0 or capacity % granularity:
            raise ValueError(f"a capacity of {capacity} bytes is not a multiple of the granularity {granularity}")
        self.capacity = capacity
        self.granularity = granularity
        self.segments = segments
        self.reserved: list[tuple[int, int]] = []
        self._small: set[int] = set()  # offsets of segments for small blocks
        self.blocks: dict[int, int] = {}
        self.high_water = 0

    @property
    def bytes(self) -> int:
        """What it has taken of the device."""
        return self.high_water if self.segments is None else sum(nbytes for _, nbytes in self.reserved)

    def mark(self) -> tuple[int, int]:
        """How far it has grown, for `return_to`."""
        return self.high_water, len(self.reserved)

    def return_to(self, mark: tuple[int, int]) -> None:
        """Take back what it has grown by since then, where nothing lies."""
        self.high_water, segments = mark
        del self.reserved[segments:]
        self._small &= {start for start, _ in self.reserved}

    def holes(self) -> Iterator[tuple[int, int]]:
        """The free ranges: (offset, bytes), ascending; none lies in two segments."""
        within = [(0, self.capacity)] if self.segments is None else self.reserved
        taken = iter(sorted(self.blocks.items()))
        block = next(taken, None)
        for start, size in within:
            end = start
            while block is not None and block[0] < start + size:
                if block[0] > end:
                    yield end, block[0] - end
                end = block[0] + block[1]
                block = next(taken, None)
            if end < start + size:
                yield end, start + size - end

    def allocate(self, nbytes: int) -> int:
        """Take the front of the smallest hole that holds `nbytes`, of several the lowest; `MemoryError` without one."""
        if nbytes <= 0:
            raise ValueError(f"a block of {nbytes} bytes")
        rounded = -(-nbytes // self.granularity) * self.granularity
        fitting = [(size, offset) for offset, size in self.holes() if size >= rounded and self._is_for(offset, rounded)]
        if not fitting:
            grown = self._grow(rounded)
            if grown is None:
                taken = sum(self.blocks.values())
                raise MemoryError(f"no room for {nbytes} bytes: {taken} of {self.capacity} are taken")
            fitting = [grown]
        size, offset = min(fitting)
        if self.segments is not None and rounded > self.segments.small and size - rounded <= self.segments.small:
            rounded = size
        self.blocks[offset] = rounded
        self.high_water = max(self.high_water, offset + rounded)
        return offset

    def _is_for(self, offset: int, nbytes: int) -> bool:
        """Whether the segment at `offset` is for blocks of `nbytes`."""
        if self.segments is None:
            return True
        start = max(start for start, _ in self.reserved if start <= offset)
        return (start in self._small) == (nbytes <= self.segments.small)

    def _grow(self, nbytes: int) -> tuple[int, int] | None:
        """Bytes and offset of a new segment for a block of `nbytes`, if there is room for one."""
        if self.segments is None:
            return None
        start = 0 if not self.reserved else sum(self.reserved[-1])
        size = self.segments.for_block(nbytes)
        if start + size > self.capacity:
            return None
        self.reserved.append((start, size))
        if nbytes <= self.segments.small:
            self._small.add(start)
        return size, start

    def free(self, offset: int) -> int:
        """Give the block at `offset` back; its bytes."""
        return self.blocks.pop(offset)

    def state(self) -> ArenaState:
        return ArenaState(tuple(sorted(self.blocks.items())))

    def restore(self, state: ArenaState) -> None:
        """Be what it was at `state`; the high-water mark stays."""
        self.blocks = dict(state.blocks)


class Timeline:
    """Which work on a pool each stream is ordered behind.  Every work waits for the one before it, so a stream that is
    behind the last is behind all."""

    def __init__(self) -> None:
        self.works = 0
        self.last = ""
        self.reached: dict[int, int] = {}

    def check(self, stream: int, call: str) -> None:
        if self.reached.get(stream, 0) < self.works:
            raise AssertionError(f"race on the pool: {call} on stream {stream} does not wait for the last {self.last}")

    def work(self, stream: int, call: str) -> None:
        self.check(stream, call)
        self.works += 1
        self.last = f"{call} on stream {stream}"
        self.reached[stream] = self.works

    def wait(self, waiting: int, awaited: int) -> None:
        self.reached[waiting] = max(self.reached.get(waiting, 0), self.reached.get(awaited, 0))
