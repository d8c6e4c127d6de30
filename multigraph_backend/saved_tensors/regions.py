"""What comes out of a region that is compiled once and called often (`torch.compiler.nested_compile_region`).

    out, tanh, w_t = invoke_subgraph(subgraph, "fw_0", w, x)      # tanh is saved, and w_t is a view of w

A graph sees one operator with a tuple of results.  Its fake values say nothing about memory: torch uses them again for
each call of the same region.  So the subgraph is read.

In: a forward graph.  Out: for the result of a region, the node inside that made its memory, or the operand outside
that it is a view of.

Invariant: for a result that is not understood the answer is None, and it is left alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from multigraph_backend.saved_tensors import graphs


@dataclass(frozen=True)
class Result:
    """A result of the call `call`: `made` in the subgraph `inside`, or a view of `operand`."""

    call: Node
    inside: GraphModule
    made: Node
    operand: Node | None


def result(forward: GraphModule, node: Node) -> Result | None:
    """Of which region `node` is a result; None for anything else."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    call, index = node.args
    if not isinstance(call, Node) or not is_call(call) or not isinstance(index, int):
        return None
    attribute = call.args[0]
    inside = getattr(forward, str(attribute.target), None) if isinstance(attribute, Node) else None
    if not isinstance(inside, GraphModule):
        return None
    results = graphs.results(inside.graph)
    value = results[index] if index < len(results) else None
    if not isinstance(value, Node):
        return None
    made = graphs.root(value)
    if made.op != "placeholder":
        return Result(call, inside, made, None)
    operands = call.args[2:]  # behind the subgraph and its name
    position = inside.graph.find_nodes(op="placeholder").index(made)
    operand = operands[position] if position < len(operands) else None
    return Result(call, inside, made, operand) if isinstance(operand, Node) else None


def is_call(node: Node) -> bool:
    """Whether `node` calls a region."""
    return node.op == "call_function" and str(node.target) == "invoke_subgraph"


def memory(forward: GraphModule, node: Node) -> tuple[Node, Node | None]:
    """What names the memory that `node` lies in, through regions: a node of the graph, and the node in its region."""
    root = graphs.root(node)
    found = result(forward, root)
    if found is None:
        return root, None
    return memory(forward, found.operand) if found.operand is not None else (found.call, found.made)
