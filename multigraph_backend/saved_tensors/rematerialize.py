"""Rematerializing: a saved tensor that is not saved, for the backward can compute it again from what it has anyway.

    forward    h = x @ w;  y = h.relu();  returns y, and saves h and y      (w is a parameter)
    following  y follows from h, element by element: `Match(pointwise=True)` matches y and not h
    trace      y again:  pack(y) = nothing,  unpack = relu(h)     the backward has h
               h again:  pack(h) = nothing,  unpack = x @ w       it has x, and w was lent to it

Stock's partitioner does the same, by its own prices, before this; what comes here is what it chose to save.

In: the forward graph; families of saved tensors, of which `following` finds those that follow from the rest; or a
unit and the backward graph.  Out of `trace`: a `Traced` whose pack saves nothing, and whose unpack is the part of the
forward that leads from the backward's inputs to the unit.  `lend_parameters` and `take_back` see to it that parameters
are among these inputs.

torch marks what a policy of selective checkpointing says of each operation (`meta["recompute"]`), and where a
checkpointed part ends.  What must be saved is never repeated here; what must be recomputed never comes here, for it is
not saved.

Invariants: what is repeated gives the same each time: operators of torch that draw no random numbers and change
nothing.  A family that follows needs nothing of another one that does, so all of them can be left unsaved together.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from multigraph_backend.saved_tensors import costs, graphs
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.units import CannotPack, Traced, Unit

MOST = 64  # operations that are repeated for one tensor
SOURCES = 2  # tensors of its own size that one that follows is computed from, at the most


def why_not(node: Node) -> str | None:
    """Why `node` cannot be computed again, None if it can."""
    if node.op != "call_function":
        return f"it is made of {node.name}, which the backward does not have"
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return f"checkpointing says that {node.name} must be saved"
    if node.target is operator.getitem:
        return None
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or getattr(node.target, "namespace", "") not in ("aten", "prims"):
        return f"it is made by {node.target}, which may give something else when it is repeated"
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return f"it is made by {node.target}, which draws random numbers"
    if schema.is_mutable:
        return f"it is made by {node.target}, which changes something"
    return None


# ---------------------------------------------------------------- which saved tensors follow from others


def following(graph: Graph, families: Mapping[Node, Sequence[Node]], parameters: set[Node]) -> set[Node]:
    """The roots of `families` (a buffer and the saved views of it) that follow from the rest and from `parameters`.

    Computing such a family again takes no longer than reading what it is computed from.  Each of its elements comes, by
    operations that draw no random numbers, from tensors that stay: parameters, and saved families that do not follow
    themselves.  At most `SOURCES` of them are of its size, so that a long sum of saved tensors is not read again for
    each of its terms.
    """
    stays = set(parameters)
    found: set[Node] = set()
    for node in graph.nodes:
        members = families.get(node)
        if members is None:
            continue
        if node.op != "placeholder" and _follows(node, members, stays):
            found.add(node)
        else:
            stays.update(members)
    return found


def _follows(root: Node, members: Sequence[Node], stays: set[Node]) -> bool:
    size = _bytes(root)
    needed: set[Node] = set()
    sources: set[Node] = set()
    waiting = [root, *members]
    while waiting:
        node = waiting.pop()
        if node in needed or node in sources:
            continue
        if node in stays:
            sources.add(node)
            continue
        if why_not(node) is not None or not (graphs.elementwise(node) or graphs.viewed(node) is not None):
            return False
        needed.add(node)
        if len(needed) > MOST:
            return False
        waiting += node.all_input_nodes
    large = [node for node in sources if 2 * _bytes(node) >= size]
    return bool(sources) and len(large) <= SOURCES


def _bytes(node: Node) -> int:
    value = graphs.tensor(node)
    return 0 if value is None else graphs.tensor_bytes(value)


# ---------------------------------------------------------------- computing one again


def trace(unit: Unit, backward: GraphModule, taken: Collection[str]) -> Traced:
    """How to compute `unit` again in `backward`, without its inputs that are `taken`.  Raises CannotPack."""
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder") if node.name not in taken}
    for member in unit.members:
        given.pop(member.name, None)
    given.pop(unit.source.name, None)
    wanted = [*graphs.chain(unit.members[0], unit.source), unit.source]
    for member in unit.members[1:]:
        wanted += graphs.chain(member, unit.source)
    needed, inputs = _needed(wanted, given)
    if not any(graphs.tensor(node) is not None for node in inputs):
        raise CannotPack("the backward has nothing to compute it from")
    unpack = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = unpack.placeholder(node.name)
        copies[node].meta.update(given[node.name].meta)
    for node in unit.source.graph.nodes:
        if node in needed:
            copies[node] = unpack.node_copy(node, copies.__getitem__)
    unpack.output(tuple(copies[member] for member in unit.members))
    return Traced(
        unit,
        _nothing(unit.source),
        GraphModule(torch.nn.Module(), unpack),
        (),
        tuple(given[node.name] for node in inputs),
    )


def _needed(wanted: list[Node], given: dict[str, Node]) -> tuple[set[Node], list[Node]]:
    """What is repeated, and the inputs of the backward that it begins with."""
    needed: set[Node] = set()
    inputs: dict[Node, None] = {}
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in needed or node in inputs:
            continue
        if node.name in given:
            inputs[node] = None
            continue
        if (reason := why_not(node)) is not None:
            raise CannotPack(reason)
        needed.add(node)
        if len(needed) > MOST:
            raise CannotPack(f"more than {MOST} operations lead to it from what the backward has")
        waiting += node.all_input_nodes
    return needed, list(inputs)


def _nothing(source: Node) -> GraphModule:
    graph = Graph()
    graph.placeholder(source.name).meta.update(source.meta)
    graph.output(())
    return GraphModule(torch.nn.Module(), graph)


def seconds(traced: Traced, machine: costs.Machine | None = None) -> float:
    """Estimated time of computing it again: element by element costs no more than reading what it begins with.

    `machine`: one that was measured.
    """
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
            total += costs.seconds(node, machine)
    assert device is not None
    return total + moved / (machine or costs.machine_of(device)).bytes_per_second


def costs_nothing(traced: Traced) -> bool:
    """Whether reading the saved tensor takes no less: its readers compute it on the way, from what they read anyway or
    what is not larger."""
    for node in traced.unpack.graph.nodes:
        if node.op == "call_function" and not (graphs.elementwise(node) or graphs.viewed(node) is not None):
            return False
    names = {member.name for member in traced.unit.members}
    inputs = traced.inputs[0].graph.find_nodes(op="placeholder") if traced.inputs else []
    readers = {reader for node in inputs if node.name in names for reader in graphs.readers(node)}
    if not all(graphs.elementwise(reader) or graphs.reduces(reader) for reader in readers):
        return False
    more = [node for node in traced.computed_from if not readers <= set(graphs.readers(node))]
    return sum(map(_bytes, more)) <= traced.unit.described.bytes


# ---------------------------------------------------------------- parameters that the backward is not given


def lend_parameters(partition: Partition) -> list[str]:
    """Let the backward have all parameters that the forward does not change: saving them takes no memory.

    Returns the names of those that it did not have; `take_back` what of it is not used.
    """
    forward, backward = partition.forward, partition.backward
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    results = graphs.results(forward.graph)
    unchecked = "saved_tensor_with_no_vc_check"  # what is saved so comes together, at one end
    first = next(
        (
            node
            for node in results[partition.outputs :]
            if isinstance(node, Node) and graphs.tensor(node) is not None
            and node.name in given and not node.meta.get(unchecked)
        ),
        None,
    )  # fmt: skip
    changed = graphs.changed(forward.graph)
    lent = [
        node
        for index, node in enumerate(forward.graph.find_nodes(op="placeholder"))
        if index in partition.static
        and node.name not in given
        and graphs.tensor(node) is not None
        and node not in changed
    ]
    if first is None or not lent:
        return []
    at = results.index(first, partition.outputs)  # the caller may be handed it as well
    _set_results(forward.graph, [*results[:at], *lent, *results[at:]], at, len(lent))
    for node in lent:
        with backward.graph.inserting_before(given[first.name]):
            made = backward.graph.placeholder(node.name)
        made.meta["val"] = node.meta["val"]
        if "desc" in given[first.name].meta:
            made.meta["desc"] = given[first.name].meta["desc"]
    return [node.name for node in lent]


def take_back(partition: Partition, lent: Collection[str]) -> list[str]:
    """Undo `lend_parameters` for what the backward does not use; returns what it uses."""
    forward, backward = partition.forward, partition.backward
    unused = [node for node in backward.graph.find_nodes(op="placeholder") if node.name in lent and not node.users]
    names = {node.name for node in unused}
    for node in unused:
        backward.graph.erase_node(node)
    results = list(graphs.results(forward.graph))
    for at in reversed(range(partition.outputs, len(results))):
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
        descriptions = list(described)
        descriptions[at : at + (1 if more < 0 else 0)] = [described[at]] * max(more, 0)
        output.meta["desc"] = type(described)(descriptions)
