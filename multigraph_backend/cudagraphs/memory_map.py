"""Where the memory of recordings lies: over addresses, and along the paths of the tree.

A recording keeps memory at fixed addresses: buffers of the inputs that it copies, which serve again as soon as it has
run, and outputs, which are somebody's until a later recording of the path may write over them.  What a capture
allocates and frees inside is no part of this: nobody but the driver's graph knows of it.

In:  the nodes of a tree.  Out: one `RecordingReport` each, plain data for `explain()`; `lifetimes` reads off what lies
where while the recordings of a path run one after the other, which `page` draws.

    path A, B, C:  A hands out h at 0x1000; B reads h, which dies in it; C may write there
    lifetimes:     h at 0x1000 from the path's recording 0 to 1

Nothing is computed for it at a call, and nothing is asked of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a page is made of stored accounts too, without torch
    from multigraph_backend.cudagraphs.recordings.nodes import Node

Kind = Literal["output", "inside", "input"]


@dataclass(frozen=True)
class Block:
    """Memory of one recording.  `kind`: an output that a user may hold, one that only compiled code holds, or the
    buffer of a copied input, whose name is `name`."""

    address: int
    bytes: int
    kind: Kind
    name: str = ""


@dataclass(frozen=True)
class RecordingReport:
    """One recording in its place in the tree.

    `number`: names it in this process; `parent`: the recording that it follows, None where it begins a step; `pool`:
    the pool that it lives in, counted from 0; `over`: addresses of earlier blocks that it may write over, dead before
    it runs; `consumes`: of those that die while it runs.
    """

    number: int
    parent: int | None
    label: str
    replays: int
    pool: int
    blocks: tuple[Block, ...]
    over: tuple[int, ...]
    consumes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of what it hands out."""
        return sum(block.bytes for block in self.blocks if block.kind != "input")


@dataclass(frozen=True)
class Lifetime:
    """A block on a path: alive from its recording `first` to its recording `last`, both included."""

    block: Block
    first: int
    last: int


def of(node: Node, label: str) -> RecordingReport:
    """What is known of one recording.  Under the tree's lock."""
    recording, parent = node.recording, node.parent
    assert recording is not None
    assert node.keyed is not None
    names, address = node.keyed.piece.spec.names, node.tree.device.storage_address
    storages = [buffer.untyped_storage() for buffer in recording.buffers]
    inputs = [
        Block(address(storage), storage.nbytes(), "input", names[index])
        for index, storage in zip(recording.plan.copied, storages, strict=True)
    ]
    outputs = [Block(slot.address, slot.nbytes, "output" if slot.visible else "inside") for slot in node.slots]
    return RecordingReport(
        number=node.number,
        parent=None if parent is None or parent.recording is None else parent.number,
        label=label,
        replays=node.calls,
        pool=node.generation,
        blocks=(*inputs, *outputs),
        over=tuple(sorted({slot.address for slot in node.dead})),
        consumes=tuple(sorted({slot.address for slot, _ in recording.consumed})),
    )


def paths(recordings: Iterable[RecordingReport]) -> list[tuple[RecordingReport, ...]]:
    """From the first recording of a step to each that nothing follows; most replayed first."""
    known = {entry.number: entry for entry in recordings}
    followed = {entry.parent for entry in known.values()}
    found = []
    for last in (entry for entry in known.values() if entry.number not in followed):
        path = [last]
        while path[-1].parent in known:
            path.append(known[path[-1].parent])
        found.append(tuple(reversed(path)))
    return sorted(found, key=lambda path: -path[-1].replays)


def lifetimes(path: Sequence[RecordingReport]) -> tuple[Lifetime, ...]:
    """Of each block of the path's recordings, in the order in which they begin.

    An output lives to the end of the path, or until a recording may write over it: up to the one before, where it was
    dead then; through that one, where it dies in it.
    """
    alive: dict[int, tuple[Block, int]] = {}  # by address: what lies there, since which recording
    found = []
    for at, entry in enumerate(path):
        for address in entry.over:
            if address in alive:
                block, first = alive.pop(address)
                found.append(Lifetime(block, first, at - 1))
        for address in entry.consumes:
            if address in alive:
                block, first = alive.pop(address)
                found.append(Lifetime(block, first, at))
        for block in entry.blocks:
            if block.kind == "input":
                found.append(Lifetime(block, at, at))
            else:
                alive[block.address] = block, at
    found += [Lifetime(block, first, len(path) - 1) for block, first in alive.values()]
    return tuple(sorted(found, key=lambda entry: (entry.first, entry.block.address)))
