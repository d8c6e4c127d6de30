"""Sizes that a call is padded up to.

    >>> buckets = Buckets.of([1, 2, 4, 8, "..."])  # goes on as the last three numbers do: doubling
    >>> buckets.fitting(5), buckets.fitting(8), buckets.fitting(100)
    (8, 8, 128)
    >>> Buckets.of([8, 16, 24, "..."]).fitting(100)  # adding 8
    104
    >>> print(Buckets.of([4, 16]).fitting(17))  # nothing is declared from there on
    None

In: a list of integers as declared in `options["pad"]`, which may end with "...".  Out: the least declared size that is
not below a given one.  Pure.

Invariant: sizes ascend and are at least 1, so that what `fitting` returns is never below what it was asked for.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from multigraph_backend.spelling import shown

MORE = "..."


@dataclass(frozen=True)
class Buckets:
    """`sizes`, ascending; behind them each is the one before, times `factor`, plus `step` (1 and 0: nothing more)."""

    sizes: tuple[int, ...]
    factor: int = 1
    step: int = 0

    @property
    def open(self) -> bool:
        """Whether sizes go on without end."""
        return self.factor > 1 or self.step > 0

    @staticmethod
    def of(declared: Iterable[object]) -> Buckets:
        """Raises ValueError, or TypeError, that says what is wrong with the list."""
        entries = list(declared)
        goes_on = bool(entries) and entries[-1] in (MORE, "…", ...)
        numbers: list[int] = []
        for entry in entries[:-1] if goes_on else entries:
            if not isinstance(entry, int) or isinstance(entry, bool):
                where = "; '...' stands at the end" if entry in (MORE, "…", ...) else ""
                raise TypeError(f"sizes are integers, got {shown(entry)}{where}")
            if entry < 1:
                raise ValueError(f"sizes to pad to are at least 1, got {entry}")
            if entry > sys.maxsize:
                raise ValueError(f"sizes to pad to are at most {sys.maxsize}, got {entry}")
            if numbers and entry <= numbers[-1]:
                raise ValueError(f"sizes must ascend, and {entry} follows {numbers[-1]}")
            numbers.append(entry)
        if not numbers:
            raise ValueError("name at least one size to pad to")
        return Buckets(tuple(numbers), *_progression(numbers)) if goes_on else Buckets(tuple(numbers))

    def fitting(self, size: int) -> int | None:
        """The least declared size that is not below `size`; None where there is none."""
        at = bisect_left(self.sizes, size)
        if at < len(self.sizes):
            return self.sizes[at]
        last = self.sizes[-1]
        if self.step:
            return last + -(-(size - last) // self.step) * self.step
        if self.factor > 1:
            while last < size:
                last *= self.factor
            return last
        return None

    def up_to(self, size: int) -> Iterator[int]:
        """Declared sizes, the listed ones in any case, those that follow as long as they are not above `size`."""
        yield from self.sizes
        last = self.sizes[-1]
        while self.open and (last := last * self.factor + self.step) <= size:
            yield last

    def to_json(self) -> list[int | str]:
        """As it is declared."""
        return [*self.sizes, MORE] if self.open else list(self.sizes)

    def __str__(self) -> str:
        listed = [str(size) for size in self.sizes]
        if len(listed) > 8:
            listed = [*listed[:4], "..", *listed[-3:]]
        return ", ".join([*listed, MORE] if self.open else listed)


def _progression(numbers: list[int]) -> tuple[int, int]:
    """Factor and step by which the last three numbers go on.  Raises ValueError where they do not."""
    if len(numbers) < 3:
        raise ValueError("'...' goes on as the last three sizes do: write three of them, such as [8, 16, 24, '...']")
    first, second, third = numbers[-3:]
    if third - second == second - first:
        return 1, third - second
    if first * third == second * second and second % first == 0:
        return second // first, 0
    ends = f"[.., {first}, {second}, {third}, '...']"
    example = list(itertools.islice((first * 2**power for power in itertools.count()), 3))
    raise ValueError(f"{ends} goes on neither by adding nor by multiplying; write out what follows, or {example}")
