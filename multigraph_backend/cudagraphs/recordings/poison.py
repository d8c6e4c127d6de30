"""A debugging aid, `MULTIGRAPH_DEBUG=poison`: memory that nobody may read holds bytes that make wrong numbers.

A liveness error on a GPU is silent: a tensor that was taken for dead keeps its values until something else is written
there.  In this mode, before and after each replay, all memory of the pool is filled but for outputs that are alive.

In:  the slots of the nodes on the path.  Out: nothing; the device fills the rest (`devices.poison`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from multigraph_backend.cudagraphs.recordings.nodes import Node
from multigraph_backend.cudagraphs.recordings.slot import Slot
from multigraph_backend.spelling import did_you_mean

VARIABLE = "MULTIGRAPH_DEBUG"
_AIDS = ("poison",)


def asked(environ: Mapping[str, str]) -> bool:
    """Whether ``MULTIGRAPH_DEBUG``, a list of debugging aids, asks for it.  Raises ValueError for an unknown aid."""
    names = [name for name in (entry.strip() for entry in environ.get(VARIABLE, "").split(",")) if name]
    for name in names:
        if name not in _AIDS:
            raise ValueError(f"{VARIABLE}: unknown aid {name!r}{did_you_mean(name, _AIDS)}; aids: {', '.join(_AIDS)}")
    return bool(names)


def fill(node: Node, own: Iterable[Slot]) -> None:
    """Poison the pool that `node` was recorded in, but for what is alive and for `own`.  An old pool stays as it is."""
    tree = node.tree
    if node.generation == tree.device.generation:
        alive = [slot for entry in tree.path for slot in entry.slots if slot.alive(tree.use_count)]
        tree.device.poison((slot.address, slot.nbytes) for slot in (*alive, *own))
