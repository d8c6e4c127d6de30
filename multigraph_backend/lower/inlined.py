"""What a block that was traced once does, put in place of each operator that stands for it.

    y = block([x, n1, w1], ..., "9f3c", ...)[0]          y = mm(rms_norm(x, n1), w1)
    z = block([y, n2, w2], ..., "9f3c", ...)[0]    ->    z = mm(rms_norm(y, n2), w2)

AOTAutograd is spared all blocks but one, and Inductor sees the whole graph: it computes in one kernel what it would
have, across the edges of blocks, and bodies are looked for once more where no kernel is cut (`one_body`).

Of a training graph that is done before it is parted into forward and backward: then what is saved is decided of the
graph as a whole, and as without blocks that are traced once.  A mask that each layer makes of the same is saved once.

In:  a graph, joint or as Inductor is given it, an operator's node in it, the part of its body, what the call is given.
Out: the same graph with the steps of that part in front of the node, and the nodes of its results.

Invariants:
- Each copy has values of its own.  Inductor tells by the memory of fake values what may be a view of what, so copies of
  a step never share it; a view has that of what it is a view of.
- Copies draw random numbers each its own: torch's partitioner takes equal steps for one, also where they draw seeds,
  for it expects one draw of them in a graph (2.11 to 2.15).  So there is one, and each copy looks its seeds up in it.
  What draws in another way is put in its place behind the partitioner, and so are checkpointed blocks, for which
  nothing may be saved that the one block did not save.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from multigraph_backend import _compat
from multigraph_backend.lower.block_operator import Part
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.lower.steps_of_graph import draws
from multigraph_backend.saved_tensors.graphs import viewed


def inline(graph: Graph, operator_node: Node, part: Part, given: Sequence[Any]) -> list[Node]:
    """The results of `part`, computed in front of `operator_node`; `given`: its tensors, and the symbols that it needs.

    Modules that a step is of are those of the call: its own are those of the block that was traced.
    """
    inside: dict[Node, Any] = {}
    stack = operator_node.meta.get("nn_module_stack")
    taken = iter(given)
    made: list[Node] = []
    with graph.inserting_before(operator_node):
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


def may_be_parted(part: Part) -> bool:
    """Whether steps of this part may be in a graph that is yet to be parted; of checkpoints nothing is known here."""
    return all(not draws(node) or _name(node) == _SEEDS for node in part.made.graph.nodes)


_SEEDS, _LOOKED_UP = "inductor_seeds", "inductor_lookup_seed"


def _name(node: Node) -> str:
    return str(node.target).partition(".")[2].partition(".")[0]


def draw_seeds_at_once(graph: Graph) -> None:
    """One draw of seeds for each device, in place of several."""
    by_device: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _name(node) == _SEEDS:
            by_device.setdefault(node.args[1], []).append(node)
    for device, nodes in by_device.items():
        if len(nodes) == 1:
            continue
        counts: list[Any] = [node.args[0] for node in nodes]
        with graph.inserting_before(nodes[0]), nodes[0].meta["val"].fake_mode:
            drawn = graph.call_function(nodes[0].target, (sum(counts), device))  # type: ignore[arg-type]
            drawn.meta = {**nodes[0].meta, "val": torch.empty(sum(counts), dtype=torch.int64, device=device)}
        behind = 0
        for node, count in zip(nodes, counts, strict=True):
            for user in list(node.users):
                if _name(user) != _LOOKED_UP:
                    raise CannotLower("the seeds of a repeated block are taken as a list")
                user.args = (drawn, behind + user.args[1])  # type: ignore[operator]
            behind += count
            graph.erase_node(node)


def give_value(node: Node) -> None:
    """A fake value of its own, of the kind that the step had where it was traced."""
    kind, of = node.meta["val"], viewed(node)
    if node.target is operator.getitem:
        taken: Any = node.args[0]
        node.meta["val"] = taken.meta["val"][node.args[1]]
    elif of is None:
        node.meta["val"] = torch.fx.node.map_aggregate(kind, _like)
    elif isinstance(kind, _compat.FakeTensor) and _is_told(kind):
        memory = of.meta["val"].untyped_storage()
        with _compat.disable_current_modes():
            laid = torch.empty(0, dtype=kind.dtype, device="meta")
            laid.set_(memory, kind.storage_offset(), kind.size(), kind.stride())
            node.meta["val"] = _compat.FakeTensor(kind.fake_mode, laid, kind.device)
    else:
        target: Any = node.target
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        with of.meta["val"].fake_mode:
            node.meta["val"] = target(*args, **kwargs)


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    mode: Any = value.fake_mode  # type: ignore[attr-defined]
    if _is_told(value):  # what an operator makes under a mode takes many times as long
        with _compat.disable_current_modes():
            laid = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            return _compat.FakeTensor(mode, laid, value.device)
    with mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _is_told(value: torch.Tensor) -> bool:
    """Whether sizes, strides and offset are all that there is to a tensor, and each is a number."""
    numbers = (*value.size(), *value.stride(), value.storage_offset())
    return all(type(number) is int for number in numbers) and not (value.is_conj() or value.is_neg())
