"""Memory of the recordings of one path, laid out for a picture: time to the right, addresses upwards.

In:  lifetimes of blocks (`cudagraphs.memory_map`).  Out: rectangles in the units of a picture, and the addresses along
its side.  Addresses where no block lies take no room, for the segments of a pool lie far apart; such a gap is a line.

    blocks at 0..64, 64..96 and 1000000..1000064  ->  bands 0..96 and 1000000..1000064, one on top of the other
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multigraph_backend.cudagraphs.memory_map import Lifetime

WIDTH, HEIGHT = 640.0, 240.0
_GAP = 6.0  # between two bands
_LEAST = 1.5  # a block is never thinner than can be seen


@dataclass(frozen=True)
class Band:
    """Addresses from `low` up to `high`, drawn from `y` (its upper edge) over `height`."""

    low: int
    high: int
    y: float
    height: float

    def at(self, address: int) -> float:
        """Where an address is drawn."""
        return self.y + self.height * (1 - (address - self.low) / (self.high - self.low))


@dataclass(frozen=True)
class Rectangle:
    """One block while it is alive."""

    x: float
    y: float
    width: float
    height: float
    lifetime: Lifetime


@dataclass(frozen=True)
class Picture:
    """`columns`: how many, one a recording, each `column` wide; `bytes`: of all bands together."""

    columns: int
    column: float
    bands: tuple[Band, ...]
    rectangles: tuple[Rectangle, ...]
    width: float = WIDTH
    height: float = HEIGHT

    @property
    def bytes(self) -> int:
        return sum(band.high - band.low for band in self.bands)


def draw(lifetimes: Sequence[Lifetime], columns: int) -> Picture:
    """The picture of a path of `columns` recordings.  Blocks of no bytes are left out."""
    shown = [entry for entry in lifetimes if entry.block.bytes > 0]
    bands = _bands((entry.block.address, entry.block.address + entry.block.bytes) for entry in shown)
    column = WIDTH / max(columns, 1)
    return Picture(columns, column, bands, tuple(_rectangle(entry, bands, column) for entry in shown))


def _bands(ranges: Iterable[tuple[int, int]]) -> tuple[Band, ...]:
    """What is covered, in whole stretches, the lowest addresses at the bottom."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    total = sum(high - low for low, high in merged)
    gap = min(_GAP, HEIGHT / 3 / len(merged)) if merged else 0.0
    room = HEIGHT - gap * (len(merged) - 1)
    bands, bottom = [], HEIGHT
    for low, high in merged:
        height = room * (high - low) / total
        bands.append(Band(low, high, bottom - height, height))
        bottom -= height + gap
    return tuple(bands)


def _rectangle(entry: Lifetime, bands: Sequence[Band], column: float) -> Rectangle:
    block = entry.block
    band = next(band for band in bands if band.low <= block.address < band.high)
    top, bottom = band.at(block.address + block.bytes), band.at(block.address)
    height = max(bottom - top, _LEAST)
    # a buffer of a copied input serves again as soon as its recording has read it: it takes the first part of its time
    width = column / 3 if block.kind == "input" else column * (entry.last - entry.first + 1)
    return Rectangle(entry.first * column, min(top, HEIGHT - height), width, height, entry)
