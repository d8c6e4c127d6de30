"""The books of a simulated device's pool: which ranges are taken, and which streams are ordered behind which work.

A simulated device's pool keeps bytes; `Arena` keeps offsets into them, a best-fit allocator.  Free neighbours are
always one hole, so the taken blocks say everything: a state is the set of them, and going back to one is exact.  The
same calls from the same state give the same offsets.  Invariant: blocks do not overlap, lie within the capacity, and
begin and end at multiples of the granularity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ArenaState:
    """The taken blocks at one moment: (offset, bytes), ascending."""

    blocks: tuple[tuple[int, int], ...] = ()


class Arena:
    """`blocks` maps the offset of each taken block to its bytes; `high_water` is the highest end that one ever had."""

    def __init__(self, capacity: int, granularity: int = 64) -> None:
        if granularity <= 0 or capacity % granularity:
            raise ValueError(f"a capacity of {capacity} bytes is not a multiple of the granularity {granularity}")
        self.capacity = capacity
        self.granularity = granularity
        self.blocks: dict[int, int] = {}
        self.high_water = 0

    def holes(self) -> Iterator[tuple[int, int]]:
        """The free ranges: (offset, bytes), ascending."""
        end = 0
        for offset, nbytes in sorted(self.blocks.items()):
            if offset > end:
                yield end, offset - end
            end = offset + nbytes
        if end < self.capacity:
            yield end, self.capacity - end

    def allocate(self, nbytes: int) -> int:
        """Take the front of the smallest hole that holds `nbytes`, of several the lowest; `MemoryError` without one."""
        if nbytes <= 0:
            raise ValueError(f"a block of {nbytes} bytes")
        rounded = -(-nbytes // self.granularity) * self.granularity
        fitting = [(size, offset) for offset, size in self.holes() if size >= rounded]
        if not fitting:
            raise MemoryError(f"no room for {nbytes} bytes: {sum(self.blocks.values())} of {self.capacity} are taken")
        _, offset = min(fitting)
        self.blocks[offset] = rounded
        self.high_water = max(self.high_water, offset + rounded)
        return offset

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
