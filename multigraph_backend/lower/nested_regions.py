"""Regions that a program marks (`torch.compiler.nested_compile_region`), handing out only what they have made, once.

    y, z, y again, w_t = invoke_subgraph(region, "fw_0", w, x)        y, z = invoke_subgraph(region, "fw_0", w, x)
                                                            ->        w_t = permute(w)

In the left form, which is AOTAutograd's where the backward needs a result, an argument or a view of one, four results
lie in two buffers and an argument.  Inductor takes each result of a call for memory of its own: it uses that of `y`
again while `y again` is needed, and lets a backward write into what the caller holds.  Gradients are wrong then, of
the second call on (seen on torch 2.13).  In the right form memory is what Inductor takes it for.

In:  a graph that Inductor is given, before bodies of `one_body` are in it.
Out: the same graph, rewritten in place, and the same contract as Inductor's own function.  What is a view by more than
constants is handed out as a copy.

Invariant: results of a region that is rewritten are its own memory, each another.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower import donation
from multigraph_backend.lower.order_of_changes import InnerCompile, compile_in_order
from multigraph_backend.saved_tensors.graphs import chain, results, root, tensor


def compile_with_regions(
    inner: InnerCompile | None, gm: GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Any:
    """As `compile_in_order`."""
    if not _compat.missing("repeated blocks") and hand_out_once(gm) and settings.get("is_backward"):
        donation.nothing_donated(getattr(_compat.TracingContext.try_get(), "fw_metadata", None))
    return compile_in_order(inner, gm, example_inputs, **settings)


def hand_out_once(gm: GraphModule) -> bool:
    """Rewrite `gm`, and the graphs in it; whether it calls regions."""
    calls: dict[str, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=_compat.invoke_subgraph):
        if isinstance(node.args[0], Node) and node.args[0].op == "get_attr":
            calls.setdefault(str(node.args[0].target), []).append(node)
    for name, nodes in calls.items():
        inside = getattr(gm, name, None)
        if isinstance(inside, GraphModule):
            hand_out_once(inside)
            if all(user.target is operator.getitem for node in nodes for user in node.users):
                _rewrite(gm.graph, inside, nodes)
    if calls:
        gm.graph.lint()
        gm.recompile()
    return bool(calls)


#: where the memory of a result is from, an operand ("given") or what is handed out ("made"), by its place; and the
#: views that lead from there to it
_Source = tuple[str, int, list[Node]]


def _rewrite(graph: Graph, inside: GraphModule, calls: Sequence[Node]) -> None:
    """What the region `inside` hands out is made of each memory once; its `calls` in `graph` make the rest again."""
    output = inside.graph.output_node()
    given = inside.graph.find_nodes(op="placeholder")
    handed_out: list[Any] = []
    found: list[_Source] = []
    for result in results(inside.graph):
        maker, views = result, []
        if isinstance(result, Node) and tensor(result) is not None:
            maker = root(result)
            views = chain(result, maker)
            if not all(view.all_input_nodes == [above] for above, view in zip([maker, *views], views, strict=False)):
                maker, views = _copied(inside.graph, result), []
        if isinstance(maker, Node) and maker in given and tensor(maker) is not None:
            found.append(("given", given.index(maker), views))
        else:
            if not isinstance(maker, Node) or maker not in handed_out:  # a number, or None, for each result that is one
                handed_out.append(maker)
                found.append(("made", len(handed_out) - 1, views))
            else:
                found.append(("made", handed_out.index(maker), views))
    if handed_out == list(results(inside.graph)):
        return
    output.args = (tuple(handed_out),)
    output.meta["user_visible_output_idxs"] = list(range(len(handed_out)))  # with the strides that they have here
    inside.graph.lint()
    inside.recompile()
    for call in calls:
        _take(graph, call, handed_out, found)


def _copied(graph: Graph, result: Node) -> Node:
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(torch.ops.aten.clone.default, (result,))
    made.meta["val"] = result.meta["val"].clone()
    return made


def _take(graph: Graph, call: Node, handed_out: Sequence[Any], found: Sequence[_Source]) -> None:
    """What uses a result of `call` uses what stands for it."""
    values = call.meta.get("val")
    operands = call.args[2:]
    if isinstance(values, tuple | list):
        by_place = {
            place: value
            for (where, place, views), value in zip(found, values, strict=True)
            if where == "made" and not views
        }
        call.meta["val"] = tuple(
            by_place.get(place, entry.meta.get("val") if isinstance(entry, Node) else entry)
            for place, entry in enumerate(handed_out)
        )
    for user in list(call.users):
        where, place, views = found[user.args[1]]  # type: ignore[index]
        with graph.inserting_before(user):
            if where == "given":
                value: Any = operands[place]
            else:
                value = graph.call_function(operator.getitem, (call, place))
                value.meta.update(user.meta)
                value.meta["val"] = call.meta["val"][place]
            for view in views:
                value = graph.node_copy(view, dict.fromkeys(view.all_input_nodes, value).__getitem__)
        user.replace_all_uses_with(value)
        graph.erase_node(user)
