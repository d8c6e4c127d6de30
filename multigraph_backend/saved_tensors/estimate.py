"""Where the packs of traced units go in two graphs, and what that comes to: between FX graphs and programs.

In: a `Partition`, units with their packs traced.  Out: a `Placement`.

Invariant: the graphs are read, never changed, so that many choices can be compared before one is carried out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch.fx import Graph, Node

from multigraph_backend.saved_tensors import choosing, costs, graphs, placement
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.offload import transfers
from multigraph_backend.saved_tensors.rules import Offload, Recompute
from multigraph_backend.saved_tensors.units import Traced


class Estimate:
    """Both graphs as programs.  `reordered`: the compiler changes the order of operations to lower the peak."""

    def __init__(self, partition: Partition, reordered: bool = False) -> None:
        forward, backward = partition.forward.graph, partition.backward.graph
        self._partition, self._reordered = partition, reordered
        self._results = graphs.results(forward)
        caller = [node.name for node in forward.find_nodes(op="placeholder")]
        self._forward = graphs.program(forward, caller)
        self._backward = graphs.program(backward, choosing.held(partition))

    def place(self, traced: Sequence[Traced]) -> placement.Placement:
        """The best places for the packs of these units."""
        packings = [_packing(entry, self._reordered) for entry in traced]
        members = {member for entry in traced for member in entry.unit.members}
        returned = [
            value
            for index, value in enumerate(self._results)
            if isinstance(value, Node) and (index < self._partition.outputs or value not in members)
        ]
        still = frozenset(name for value in returned for name in graphs.memory_of(value))
        sources = {entry.unit.source for entry in traced}
        return placement.place(
            self._forward,
            self._backward,
            packings,
            still,
            dead_views=_dead_views(members - sources, set(returned) | sources),
            seconds=self._seconds if any(packing.transfer for packing in packings) else ({}, {}),
        )

    @functools.cached_property
    def _seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        forward, backward = self._partition.forward.graph, self._partition.backward.graph
        return costs.least_seconds_of(forward), costs.least_seconds_of(backward)


def _dead_views(members: set[Node], needed: set[Node]) -> frozenset[str]:
    """Views that nobody needs when the members are not returned."""
    dead: set[Node] = set()
    for member in members:
        node: Node | None = member
        while node is not None and graphs.viewed(node) is not None and node not in needed:
            if any(user.op != "output" and user not in dead for user in node.users):
                break
            dead.add(node)
            node = graphs.viewed(node)
    return frozenset(node.name for node in dead)


def _packing(traced: Traced, reordered: bool) -> placement.Packing:
    unit = traced.unit
    packing, unpacking = traced.pack.graph, traced.unpack.graph
    tensors = unpacking.find_nodes(op="placeholder")[: len(traced.saved)]
    if isinstance(unit.pack, Recompute):
        tensors = [node for node in unpacking.find_nodes(op="placeholder") if graphs.tensor(node) is not None]
    return placement.Packing(
        name=unit.name,
        source=unit.source.name,
        memory=graphs.memory_of(unit.source)[0],
        members=tuple(member.name for member in unit.members),
        pack=graphs.fragment(packing, packing.find_nodes(op="placeholder")),
        unpack=graphs.fragment(unpacking, tensors),
        computed_from=tuple(node.name for node in traced.computed_from if graphs.tensor(node) is not None),
        cheap=traced.cheap and not isinstance(unit.pack, Recompute),
        transfer=_transfer(traced),
        floating=reordered and _fused(packing),
    )


def _fused(pack: Graph) -> bool:
    """Whether the compiler can make a pack a part of other kernels: a cast, or scales of rows or blocks."""
    made = [node for node in pack.nodes if node.op == "call_function" and graphs.viewed(node) is None]
    return bool(made) and all(graphs.elementwise(node) or graphs.reduces(node) or graphs.number(node) for node in made)


def _transfer(traced: Traced) -> placement.Transfer | None:
    unit, value = traced.unit, graphs.tensor(traced.unit.source)
    if not isinstance(unit.pack, Offload) or value is None:
        return None
    out, back = transfers.of(value.device).stream.bytes_per_second()
    size = unit.described.bytes
    return placement.Transfer(unit.pack.waiting, unit.pack.ahead, size / out, size / back)
