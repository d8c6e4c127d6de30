"""What a block that was traced once does, put in place of each operator that stands for it.

    y = block([x, n1, w1], ..., "9f3c", ...)[0]          y = mm(rms_norm(x, n1), w1)
    z = block([y, n2, w2], ..., "9f3c", ...)[0]    ->    z = mm(rms_norm(y, n2), w2)

AOTAutograd is spared all blocks but one, and Inductor sees the whole graph: it computes in one kernel what it would
have, across the edges of blocks, and bodies are looked for once more where no kernel is cut (`one_body`).

In:  a graph that Inductor is given, an operator's node in it, the part of its body, what the call is given.
Out: the nodes of the results of that part.

Invariant: each copy has values of its own.  Inductor tells by the memory of fake values what may be a view of what, so
copies of a step never share it; a view has that of what it is a view of.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from multigraph_backend import _compat
from multigraph_backend.lower.block_operator import Part
from multigraph_backend.lower.steps_of_graph import values_of
from multigraph_backend.saved_tensors.graphs import viewed


def inline(graph: Graph, operator_node: Node, part: Part, given: Sequence[Any]) -> list[Node]:
    """The results of `part`, computed in front of `operator_node`; `given`: its tensors, and the symbols that it needs.

    Modules that a step is of are those of the call: its own are those of the block that was traced.
    """
    inside: dict[Node, Any] = {}
    stack = operator_node.meta.get("nn_module_stack")
    taken = iter(given)
    made: list[Node] = []
    with graph.inserting_before(operator_node), _fake_mode(part):
        for node in part.made.graph.nodes:
            if node.op == "placeholder":
                inside[node] = next(taken)
            elif node.op == "output":
                made = [inside[result] for result in node.args[0]]
            else:
                inside[node] = copy = graph.node_copy(node, inside.__getitem__)
                if copy.target is torch.ops.aten.reshape.default:  # a view, but for a body of whatever strides
                    copy.target = torch.ops.aten.view.default
                if stack is not None:
                    copy.meta["nn_module_stack"] = stack
                give_value(copy)
    return made


def give_value(node: Node) -> None:
    """A fake value of its own, of the kind that the step had where it was traced."""
    if node.target is operator.getitem:
        of: Any = node.args[0]
        node.meta["val"] = of.meta["val"][node.args[1]]
    elif viewed(node) is None:
        node.meta["val"] = tree_map_only(torch.Tensor, _like, node.meta["val"])
    else:
        target: Any = node.target
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        node.meta["val"] = target(*args, **kwargs)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _fake_mode(part: Part) -> Any:
    values = (entry for node in part.made.graph.nodes for entry in values_of(node))
    return next(value.fake_mode for value in values if isinstance(value, _compat.FakeTensor))
