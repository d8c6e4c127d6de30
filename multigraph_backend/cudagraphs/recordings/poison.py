"""A debugging aid, `MULTIGRAPH_DEBUG=poison`: memory that nobody may read holds bytes that make wrong numbers.

A liveness error on a GPU is silent: a tensor that was taken for dead keeps its values until something else is written
there.  In this mode, before and after each replay, all memory of the pool is filled but for outputs that are alive: the
bytes are NaN in every floating-point type, -1 in integers.

In:  the pool's segments, the slots of the nodes on the path.  Out: ranges to fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.recordings.recording import Slot
    from multigraph_backend.cudagraphs.recordings.tree import Node

BYTE = 0xFF


def others(segments: Iterable[tuple[int, int]], kept: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each range of `segments` outside of `kept`, which may overlap one another."""
    ordered = sorted(kept)
    for start, nbytes in sorted(segments):
        at, end = start, start + nbytes
        for address, size in ordered:
            if address >= end:
                break
            if address > at:
                yield at, address - at
            at = max(at, address + size)
        if at < end:
            yield at, end - at


def fill(node: Node, own: Iterable[Slot]) -> None:
    """Poison the pool that `node` was recorded in, but for what is alive and for `own`.  An old pool stays as it is."""
    tree = node.tree
    if node.generation == tree.device.generation:
        alive = [slot for entry in tree.path for slot in entry.slots if slot.alive(tree.use_count)]
        tree.device.poison((slot.address, slot.nbytes) for slot in (*alive, *own))
