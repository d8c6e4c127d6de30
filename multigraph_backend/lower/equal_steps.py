"""Steps that do once more what an earlier step has done, taken out of a graph before blocks are looked for.

    visible = ...                                           visible = ...; mask_0 = where(visible, 0, -inf)
    mask_0 = where(visible, 0, -inf); ...  # layer 0   ->   ...
    mask_1 = where(visible, 0, -inf); ...  # layer 1        ...  # takes mask_0

A model that is given no mask makes one in each layer, and Inductor computes all of them in one kernel.  In blocks that
are compiled by themselves each call would compute its own, so a cut between layers would lose something.

In:  an inference graph as Inductor is given it; a training graph's parts come from a partitioner, which has done this.
     Of a captured graph of Dynamo's, whose blocks AOTAutograd is to trace once, tables alone: what depends on nothing,
     such as positions and their sines.  Else each block would make them, and save them for backward.
Out: the same graph, in place, without these steps: what is equal by `steps_of_graph` of the very same operands.  What
     stands for them is done as early as it can be, so that the first layer is like the others.  Left are kernels of
     their own, whatever may not be a part of a body (random numbers, say), memory that nothing is written to yet, and
     what the graph returns: two results stay two tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch.fx import Graph, GraphModule, Node

from multigraph_backend.lower import modes_of_trace
from multigraph_backend.lower.repetition import Step
from multigraph_backend.lower.steps_of_graph import is_tensor_of_trace, steps_of, steps_of_trace, writes_in_a_trace

_EMPTY = "empty"  # in the names of operators that make memory with anything in it


def merge(gm: GraphModule) -> int:
    """How many were taken out."""
    returned = set(gm.graph.output_node().all_input_nodes)
    steps, nodes = steps_of(gm.graph)
    return _merge(gm, steps, nodes, [node not in returned for node in nodes])


def merge_tables(gm: GraphModule) -> int:
    """How many were taken out of a captured graph; none where something is written to, or modes are set: a table would
    be made under another then."""
    graph = gm.graph
    if any(modes_of_trace.sets_mode(node) or writes_in_a_trace(node) for node in graph.nodes):
        return 0
    steps, nodes = steps_of_trace(graph)
    named = {node.name: node for node in graph.nodes}
    tables: list[bool] = []
    for step in steps:
        told = [
            tables[operand] if isinstance(operand, int) else not is_tensor_of_trace(named[operand])
            for operand in step.operands
        ]
        tables.append(all(told) and not step.stays and not step.alone)
    pending = list(graph.output_node().all_input_nodes)  # a program may write to what it is given, or to a view of it
    numbers = {node: index for index, node in enumerate(nodes)}
    while pending:
        node = pending.pop()
        if node in numbers and tables[numbers[node]]:
            tables[numbers[node]] = False
            pending += node.all_input_nodes
    return _merge(gm, steps, nodes, tables)


def _merge(gm: GraphModule, steps: Sequence[Step], nodes: Sequence[Node], may: Sequence[bool]) -> int:
    graph = gm.graph
    stands_for: dict[int | str, int] = {}  # earlier steps, for those that are gone
    known: dict[Hashable, int] = {}
    for index, (step, node) in enumerate(zip(steps, nodes, strict=True)):
        if not may[index] or step.stays or step.alone or _EMPTY in str(node.target):
            continue
        operands = tuple(stands_for.get(operand, operand) for operand in step.operands)
        first = known.setdefault((step.description, operands), index)
        if first != index:
            stands_for[index] = first
            node.replace_all_uses_with(nodes[first])
    for index in sorted(map(int, stands_for), reverse=True):
        graph.erase_node(nodes[index])
    do_early(graph, [nodes[index] for index in sorted(set(stands_for.values()))])
    if stands_for:
        graph.lint()
        gm.recompile()
    return len(stands_for)


def do_early(graph: Graph, chosen: Sequence[Node]) -> None:
    """Move these nodes, which come in order, to behind what they take, and what was moved there before."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    last_at = {place: node for node, place in places.items()}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in chosen:
        taken = [*inputs[-1:], *node.all_input_nodes]
        if taken:
            place = max(places[operand] for operand in taken)
            last_at[place].append(node)
            last_at[place], places[node] = node, place
