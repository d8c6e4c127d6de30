"""What torch's caching allocator would reserve for a trace: its rules, without a device.

Why: the extension runs over a simulated driver, and its figures need stock's beside them on any machine. In: a trace
(`allocation_traces.py`). Out: the most that segments hold. Written after CUDACachingAllocator.cpp, with its settings as
they are by default and with `expandable_segments:True`; on a GPU the benchmark measures torch itself.

A request is rounded up to 512 bytes and takes the smallest free block of its stream, its pool and its kind (up to 1
MiB, above) that is large enough. What is left is cut off: small blocks always, large ones where it is more than 1
MiB. Where there is none, a new segment comes: of 2 MiB for small requests, of 20 MiB for those below 10 MiB, else of
the size rounded up to 2 MiB. Free neighbours are one block. With expandable segments a stream has one range of
addresses of a kind, which is mapped in steps of 2 or 20 MiB behind what is free before the unmapped part, and what is
left is always cut off.

A block that other streams used comes back when its free has run; inside of a capture, when that has ended.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
SMALL, MEDIUM = MIB, 10 * MIB
RANGE = 1 << 40  # of addresses, of an expandable segment


def rounded(nbytes: int, to: int = 512) -> int:
    return max(-(-nbytes // to) * to, to)


@dataclass
class _Block:
    address: int
    size: int
    free: _Free
    taken: bool = False
    previous: _Block | None = None
    next: _Block | None = None


class _Free:
    """Free blocks of a pool, a stream and a kind; of an expandable segment, also what is not mapped."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.blocks: list[tuple[int, int]] = []  # size and address
        self.by_address: dict[int, _Block] = {}
        self.end: int | None = None  # the address where the unmapped part begins
        self.last: _Block | None = None  # before it

    def add(self, block: _Block) -> None:
        bisect.insort(self.blocks, (block.size, block.address))
        self.by_address[block.address] = block

    def remove(self, block: _Block) -> None:
        self.blocks.pop(bisect.bisect_left(self.blocks, (block.size, block.address)))
        del self.by_address[block.address]

    def best(self, size: int) -> _Block | None:
        """The smallest; one before the unmapped part counts as large as it can grow."""
        for at in range(bisect.bisect_left(self.blocks, (size, 0)), len(self.blocks)):
            block = self.by_address[self.blocks[at][1]]
            if block is not self.last or at + 1 == len(self.blocks):
                return block
        return None


class StockRules:
    """Plays traces; `peak` is the most that was reserved."""

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved = self.peak = self.live = self.peak_live = 0
        self.driver_calls = 0
        self._free: dict[tuple[int, int, bool], _Free] = {}
        self._address = RANGE
        self._blocks: dict[int, _Block] = {}
        self._sizes: dict[int, int] = {}
        self._recorded: set[int] = set()
        self._waiting: list[_Block] = []
        self._pools: dict[int, list[int]] = {}  # of a stream
        self._begun: list[tuple[int, int]] = []
        self._capturing = 0

    def play(self, events: Iterable[tuple[Any, ...]]) -> int:
        """The most that is reserved so far."""
        for word, *rest in events:
            match word:
                case "allocate":
                    self._allocate(*rest)
                case "free":
                    self._release(*rest)
                case "record":
                    self._recorded.add(rest[0])
                case "begin":
                    self._begun.append((rest[0], rest[1]))
                case "end":
                    self._begun.reverse()
                    self._begun.remove(next(each for each in self._begun if each[0] == rest[0]))
                    self._begun.reverse()
                case "capture":
                    self._capturing += 1
                case "captured":
                    self._capturing -= 1
                    self._over()
                case "run":
                    self._over()
                case "kernel" | "join" | "release":
                    pass
                case _:
                    raise ValueError(f"a trace has no {word!r}")
        return self.peak

    def _over(self) -> None:
        if self._capturing == 0:
            waiting, self._waiting = self._waiting, []
            for block in waiting:
                self._merge(block)

    def _allocate(self, number: int, nbytes: int, stream: int) -> None:
        size = rounded(nbytes)
        pool = next((pool for pool, taken in reversed(self._begun) if taken == stream), 0)
        free = self._free.setdefault((pool, stream, size <= SMALL), _Free(size <= SMALL))
        block = free.best(size)
        if block is not None:
            free.remove(block)
        else:
            block = self._grown(free, size) if self.expandable else self._segment(free, size)
        rest = block.size - size
        if rest >= 512 if free.small or self.expandable else rest > SMALL:
            right = _Block(block.address + size, rest, free, previous=block, next=block.next)
            if block.next is not None:
                block.next.previous = right
            block.size, block.next = size, right
            if free.last is block:
                free.last = right
            free.add(right)
        block.taken = True
        self._blocks[number], self._sizes[number] = block, size
        self.live += size
        self.peak_live = max(self.peak_live, self.live)

    def _segment(self, free: _Free, size: int) -> _Block:
        nbytes = 2 * MIB if free.small else 20 * MIB if size < MEDIUM else rounded(size, 2 * MIB)
        self._address += RANGE
        self._reserve(nbytes, 1)
        return _Block(self._address, nbytes, free)

    def _grown(self, free: _Free, size: int) -> _Block:
        step = 2 * MIB if free.small else 20 * MIB
        block = free.last
        if free.end is None:
            self._address += RANGE
            free.end = self._address
            self.driver_calls += 1
        if block is not None and not block.taken:
            free.remove(block)
        else:
            block = _Block(free.end, 0, free, previous=free.last)
            if free.last is not None:
                free.last.next = block
            free.last = block
        nbytes = rounded(size - block.size, step)
        self._reserve(nbytes, 4 * (nbytes // step))  # a handle, mapped, made accessible, let go at last
        block.size += nbytes
        free.end += nbytes
        return block

    def _reserve(self, nbytes: int, calls: int) -> None:
        self.driver_calls += calls
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)

    def _release(self, number: int) -> None:
        block = self._blocks.pop(number)
        self.live -= self._sizes.pop(number)
        if number in self._recorded:
            self._recorded.discard(number)
            self._waiting.append(block)
        else:
            self._merge(block)

    def _merge(self, block: _Block) -> None:
        free = block.free
        block.taken = False
        for left, right in ((block, block.next), (block.previous, block)):
            if left is None or right is None:
                continue
            other = right if left is block else left
            if other.address not in free.by_address or free.by_address[other.address] is not other:
                continue
            free.remove(other)
            left.size += right.size
            left.next = right.next
            if right.next is not None:
                right.next.previous = left
            if free.last is right:
                free.last = left
            block = left
        free.add(block)
