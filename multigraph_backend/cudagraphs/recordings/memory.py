"""What recordings take of a device's memory, read off what is there: nothing is noted at a call.

A pool's memory is *held*: reserved of the device.  Of that

    live    something alive lies there: outputs that somebody has, and what a first call left that runs as it is
    lent    serves ordinary allocations of the process
    dead    all else, which recordings write over: the next capture finds it free

and held = live + lent + dead.  A recording *keeps* the memory of its outputs; while nobody has them that is dead, and
others use it.  What it needs while it runs is its *peak*; what of that are no outputs (temporaries, copies of inputs)
it *shares* with others as soon as it has run.  So peaks do not add up to a pool, and what is alive does: a pool is live
as far as outputs of its recordings, and what warm-ups left, are alive.

In:  a tree, under its lock.  Out: plain numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from multigraph_backend.cudagraphs.recordings.nodes import Node
from multigraph_backend.cudagraphs.recordings.slot import Slot
from multigraph_backend.cudagraphs.recordings.tree import Tree
from multigraph_backend.cudagraphs.recordings.warm_up import WarmUp


@dataclass(frozen=True)
class RecordingMemory:
    """One recording, in bytes of the pool of `generation`.

    `kept`: of its outputs; `alive`: those that somebody has now.  `peak`: what it needs at once while it runs, at most;
    `shared`: of that, what others use when it has run.  `grown`: by how much it made the pool larger.  `given_up`: no
    call finds it any more, but it has outputs that are alive.
    """

    label: str
    generation: int
    kept: int
    alive: int
    peak: int
    shared: int
    grown: int
    given_up: bool = False


@dataclass(frozen=True)
class PoolMemory:
    """One pool, in bytes; `id` as snapshots of memory name it.  `warm`: of what is live, what belongs to first calls.
    `in_use`: the next recording is made here."""

    generation: int
    id: tuple[int, int]
    in_use: bool
    held: int
    live: int
    lent: int
    dead: int
    warm: int


def label(node: Node) -> str:
    """What messages call a recording: its piece, and its key in brackets."""
    assert node.keyed is not None
    key = ", ".join(map(str, node.keyed.key))
    return node.keyed.piece.spec.label + (f" [{key}]" if key else "")


def alive(tree: Tree, slot: Slot) -> bool:
    """Whether something alive lies in the memory of `slot`: a storage that was resized lies elsewhere."""
    return slot.alive(tree.use_count) and slot.lies(tree.device)


def of_node(tree: Tree, node: Node, given_up: bool = False) -> RecordingMemory:
    """What one recording takes."""
    assert node.recording is not None
    kept = sum(slot.nbytes for slot in node.slots)
    return RecordingMemory(
        label=label(node),
        generation=node.generation,
        kept=kept,
        alive=sum(slot.nbytes for slot in node.slots if alive(tree, slot)),
        peak=node.recording.peak,
        shared=node.recording.peak - kept,
        grown=node.recording.grown,
        given_up=given_up,
    )


def of_recordings(tree: Tree) -> dict[Node, RecordingMemory]:
    """Of each recording: those that calls can find, in the order of the tree, and then those that were given up."""
    found = {node: of_node(tree, node) for node in tree.root.below() if node.recording is not None}
    for node in tree.path:
        if node.recording is not None and node not in found:
            found[node] = of_node(tree, node, given_up=True)
    return found


def of_pools(tree: Tree) -> tuple[PoolMemory, ...]:
    """All pools of the tree's device.  Asks the allocator, and looks at the path alone."""
    live: Counter[int] = Counter()
    warm: Counter[int] = Counter()
    for node in tree.path:
        taken = sum(slot.nbytes for slot in node.slots if alive(tree, slot))
        if isinstance(node, WarmUp):
            node.look()
            taken += sum(node.strangers.values())
            warm[node.generation] += taken
        live[node.generation] += taken
    return tuple(
        PoolMemory(
            generation=pool.generation,
            id=pool.id,
            in_use=pool.generation == tree.device.generation,
            held=pool.held,
            live=live[pool.generation],
            lent=pool.lent,
            dead=pool.held - pool.lent - live[pool.generation],
            warm=warm[pool.generation],
        )
        for pool in tree.device.pools()
    )
