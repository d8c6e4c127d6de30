"""A saved tensor that is not saved: the backward computes it again, from what it has anyway.

In: a unit of the forward graph, the backward graph, names of what it must not lean on.  Out: a `Traced` whose pack
saves nothing, and whose unpack is the part of the forward that leads from the backward's inputs to the unit.

Stock's partitioner does the same, by its own prices, before this; what comes here is what it chose to save.

Invariant: what is repeated gives the same each time: operators of torch that draw no random numbers and change nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend.saved_tensors import choosing, costs, graphs
from multigraph_backend.saved_tensors.choosing import Unit
from multigraph_backend.saved_tensors.repeating import MOST, why_not
from multigraph_backend.saved_tensors.tracing import CannotPack, Traced


def trace(unit: Unit, backward: GraphModule, taken: Collection[str]) -> Traced:
    """How to compute `unit` again in `backward`, without its inputs that are `taken`.  Raises CannotPack."""
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder") if node.name not in taken}
    for member in unit.members:
        given.pop(member.name, None)
    given.pop(unit.source.name, None)
    wanted = [*graphs.chain(unit.members[0], unit.source), unit.source]
    for member in unit.members[1:]:
        wanted += graphs.chain(member, unit.source)
    needed, anchors = _needed(wanted, given)
    if not any(graphs.tensor(anchor) is not None for anchor in anchors):
        raise CannotPack("the backward has nothing to compute it from")
    unpack = Graph()
    copies: dict[Node, Node] = {}
    for anchor in anchors:
        copies[anchor] = unpack.placeholder(anchor.name)
        copies[anchor].meta.update(given[anchor.name].meta)
    for node in unit.source.graph.nodes:
        if node in needed:
            copies[node] = unpack.node_copy(node, copies.__getitem__)
    unpack.output(tuple(copies[member] for member in unit.members))
    numbers = tuple(given[anchor.name] for anchor in anchors)
    return Traced(unit, _nothing(unit.source), GraphModule(torch.nn.Module(), unpack), (), numbers)


def _needed(wanted: list[Node], given: dict[str, Node]) -> tuple[set[Node], list[Node]]:
    """What is repeated, and the inputs of the backward that it begins with."""
    needed: set[Node] = set()
    anchors: dict[Node, None] = {}
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in needed or node in anchors:
            continue
        if node.name in given:
            anchors[node] = None
            continue
        if (reason := why_not(node)) is not None:
            raise CannotPack(reason)
        needed.add(node)
        if len(needed) > MOST:
            raise CannotPack(f"more than {MOST} operations lead to it from what the backward has")
        waiting += node.all_input_nodes
    return needed, list(anchors)


def _nothing(source: Node) -> GraphModule:
    graph = Graph()
    graph.placeholder(source.name).meta.update(source.meta)
    graph.output(())
    return GraphModule(torch.nn.Module(), graph)


def seconds(traced: Traced) -> float:
    """Estimated time of computing it again: element by element costs no more than reading what it begins with."""
    total = 0.0
    moved = 0
    device: torch.device | None = None
    for node in traced.unpack.graph.nodes:
        value = graphs.tensor(node)
        if value is None:
            continue
        device = device or value.device
        if node.op == "placeholder":
            moved += graphs.tensor_bytes(value)
        elif not graphs.elementwise(node):
            total += costs.seconds(node)
    assert device is not None
    return total + moved / costs.machine_of(device).bytes_per_second


# ---------------------------------------------------------------- parameters that the backward is not given


def lend_parameters(forward: GraphModule, backward: GraphModule, outputs: int, static: Collection[int]) -> list[str]:
    """Let the backward have all parameters that the forward does not change: saving them takes no memory.

    Returns the names of those that it did not have; `take_back` what of it is not used.
    """
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    results = graphs.results(forward.graph)
    unchecked = "saved_tensor_with_no_vc_check"  # these come together, at one end
    first = next(
        (
            node
            for node in results[outputs:]
            if isinstance(node, Node) and graphs.tensor(node) is not None
            and node.name in given and not node.meta.get(unchecked)
        ),
        None,
    )  # fmt: skip
    changed = choosing.changed(forward)
    lent = [
        node
        for index, node in enumerate(forward.graph.find_nodes(op="placeholder"))
        if index in static and node.name not in given and graphs.tensor(node) is not None and node not in changed
    ]
    if first is None or not lent:
        return []
    at = results.index(first)
    _set_results(forward.graph, [*results[:at], *lent, *results[at:]], at, len(lent))
    for node in lent:
        with backward.graph.inserting_before(given[first.name]):
            made = backward.graph.placeholder(node.name)
        made.meta["val"] = node.meta["val"]
        if "desc" in given[first.name].meta:
            made.meta["desc"] = given[first.name].meta["desc"]
    return [node.name for node in lent]


def take_back(forward: GraphModule, backward: GraphModule, outputs: int, lent: Collection[str]) -> list[str]:
    """Undo `lend_parameters` for what the backward does not use; returns what it uses."""
    unused = [node for node in backward.graph.find_nodes(op="placeholder") if node.name in lent and not node.users]
    names = {node.name for node in unused}
    for node in unused:
        backward.graph.erase_node(node)
    results = list(graphs.results(forward.graph))
    for at in reversed(range(outputs, len(results))):
        if isinstance(results[at], Node) and results[at].op == "placeholder" and results[at].name in names:
            del results[at]
            _set_results(forward.graph, results, at, -1)
    for module in (forward, backward):
        module.recompile()
    return [name for name in lent if name not in names]


def _set_results(graph: Graph, results: list[Any], at: int, more: int) -> None:
    """`more` results came at `at`, or one went there; what describes results goes with them."""
    output = graph.output_node()
    described = output.meta.get("desc")
    before = len(graphs.results(graph))
    output.args = (tuple(results),)
    if isinstance(described, list | tuple) and len(described) == before:
        kept = list(described)
        kept[at : at + (1 if more < 0 else 0)] = [described[at]] * max(more, 0)
        output.meta["desc"] = type(described)(kept)
