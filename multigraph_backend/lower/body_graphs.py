"""What AOTAutograd has made of a block, as the graphs of a body: checked, and handing out only what they have made.

In:  an inference graph, or a forward and a backward graph, as Inductor's `compile_fx` gives them to what compiles one
graph, and AOTAutograd's description of the block.
Out: a `Kind`; `Refused` where the block is no function of its arguments that makes what it hands out.

An example, of a product whose transposed result is saved: what is handed out is the memory, arguments are not handed
out at all, and the backward graph makes the view again.

    forward    x, w -> y, w, y.t()          x, w -> y
    backward   w, y.t(), dy -> dx, dw       w, y, dy -> dx, dw

Symbols that sizes depend on are taken behind tensors, those that a graph needs.  Numbers that are made of them are not
saved for backward: its graph computes them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower.block_operator import (
    Kind,
    Layout,
    Part,
    Refused,
    expression,
    layout_of,
    number_node,
)
from multigraph_backend.lower.steps_of_graph import (
    draws,
    is_number,
    may_be_done_in_place,
    values_of,
    why_it_stays,
)
from multigraph_backend.saved_tensors.graphs import viewed


def kind_of(
    graphs: Mapping[str, GraphModule], given: tuple[Layout, ...], results: int, metadata: Any, may_draw: bool = False
) -> Kind:
    """`graphs`: by "inference", or "forward" and "backward", which take the symbols of the graph around behind tensors;
    `results`: how many the block has; `may_draw`: whether each call of it draws random numbers of its own."""
    if (why := _not_pure(metadata)) is not None:
        raise Refused(f"a block that comes again {why}")
    if "inference" in graphs:
        made = _outputs(graphs["inference"])
        if len(made) != results:
            raise Refused("a block that comes again has other results than its graph")
        return Kind(_part(graphs["inference"], given, made, may_draw), results)
    if {"forward", "backward"} - set(graphs):
        raise Refused("a block that comes again is in no graph")
    return _parted(graphs["forward"], graphs["backward"], given, results, metadata, may_draw)


def _not_pure(metadata: Any) -> str | None:
    """Why AOTAutograd does not say that a block is a function of its arguments that makes what it hands out."""
    if metadata is None:
        return "was not described by AOTAutograd"
    if any(info.mutates_data or info.mutates_metadata or info.mutates_storage_metadata for info in metadata.input_info):
        return "writes to what it is given"
    # of the second kind is a view of what nothing else sees: whose memory it is, is asked of the graph (`_part`)
    if any(info.output_type.name not in ("non_alias", "unsafe_view_alias") for info in metadata.output_info):
        return "hands out a view, or what it was given"
    if metadata.num_intermediate_bases or metadata.tokens or metadata.num_graphsafe_rng_states:
        return "is no function of its arguments alone"
    return None


def _outputs(gm: GraphModule) -> list[Any]:
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def _chain(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Where the memory of `node` comes from, and the views that lead from there to it."""
    views: list[Node] = []
    while (above := viewed(node)) is not None:
        if [operand for operand in node.all_input_nodes if not is_number(operand)] != [above]:
            raise Refused(f"{node.name} is a view by more than one value")
        views.append(node)
        node = above
    return node, tuple(reversed(views))


def view_again(graph: Graph, view: Node, value: Node, symbols: Mapping[sympy.Symbol, Node]) -> Node:
    """The view of `value` that `view` is of its operand, where a graph inserts now."""
    numbers = {
        operand: number_node(graph, operand.meta["val"], symbols)
        for operand in view.all_input_nodes
        if is_number(operand)
    }
    args, kwargs = torch.fx.node.map_arg((view.args, view.kwargs), lambda operand: numbers.get(operand, value))
    made = graph.call_function(view.target, args, kwargs)  # type: ignore[arg-type]
    made.meta.update(view.meta)
    return made


def call_body(
    graph: Graph, module: GraphModule, attribute: Node, name: str, given: Sequence[Any], convolves: bool
) -> Node:
    """A call of the body `module`, which `graph` holds as `name`, where the graph inserts now.  `convolves`: whether
    there are convolutions in the graph.

    Before Inductor lowers a graph it asks once more which strides its values have, and around convolutions not all are
    what AOTAutograd said, what the forward has saved among them.  A body is code for the strides that it was made for,
    so the call says which these are, and in a graph with convolutions what is given to it is brought to them.
    """
    values = [entry.meta["val"] if isinstance(entry, Node) else entry for entry in given]
    taken = [_with_its_strides(graph, entry) if convolves else entry for entry in given]
    made = graph.call_function(_compat.invoke_subgraph, (attribute, name, *taken))
    made.meta["val"] = tuple(entry.meta["val"] for entry in _outputs(module))
    made.meta["eager_input_vals"] = (None, name, *values), {}
    return made


def _with_its_strides(graph: Graph, given: Any) -> Any:
    """`given`, copied where it has other strides than it has now."""
    value = given.meta["val"] if isinstance(given, Node) else None
    if not isinstance(value, torch.Tensor) or not all(type(stride) is int for stride in value.stride()):
        return given
    made = graph.call_function(_compat.force_stride_order, (given, list(value.stride())))
    made.meta["val"] = value
    return made


def whatever_strides(graph: Graph) -> None:
    """Make views in a body copy where they have to: while Inductor asks, arguments may have other strides."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default


def _part(gm: GraphModule, given: tuple[Layout, ...], outputs: Sequence[Any], may_draw: bool = False) -> Part:
    """A graph of a body that hands out the memory of `outputs`."""
    graph = Graph()
    inside: dict[Node, Node] = {}
    devices = {layout[1] for layout in given}
    depends: set[Any] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" or is_number(node) or (may_draw and draws(node)):
            pass
        elif (why := _why_no_part(node)) is not None:
            raise Refused(f"a block that comes again holds {node.target}: {why}")
        for value in values_of(node):
            if isinstance(value, torch.Tensor):
                layout = layout_of(value)
                devices.add(value.device)
                depends.update(*layout[2:4], (layout[4],))
            elif isinstance(value, torch.SymInt) and node.op != "placeholder":
                depends.add(expression(value))
        inside[node] = graph.node_copy(node, lambda operand: inside[operand])
    if len(devices) != 1:
        raise Refused("a block that comes again is on several devices")
    placeholders = gm.graph.find_nodes(op="placeholder")
    if [is_number(node) for node in placeholders[: len(given)]] != [False] * len(given):
        raise Refused("a block that comes again takes other arguments than its graph")
    makers, views, seen = [], [], set()
    for node in outputs:
        if not isinstance(node, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            raise Refused("a block that comes again hands out what is no tensor")
        maker, chain = _chain(node)
        if maker.op == "placeholder" or maker in seen or not isinstance(maker.meta.get("val"), torch.Tensor):
            raise Refused(f"a block that comes again hands out {node.name}, which has no memory of its own")
        seen.add(maker)
        makers.append(inside[maker])
        views.append(chain)
    output = graph.output(tuple(makers))
    output.meta["user_visible_output_idxs"] = list(range(len(makers)))  # with the strides that they have here
    graph.eliminate_dead_code()
    told = {symbol for expr in depends if isinstance(expr, sympy.Expr) for symbol in expr.free_symbols}
    needed = []
    for index, node in enumerate(placeholders[len(given) :]):
        if not isinstance(node.meta.get("val"), torch.SymInt):
            raise Refused("a block that comes again takes other arguments than its graph")
        if inside[node].users or _compat.sympy_expr(node.meta["val"]) in told:
            needed.append(index)
        else:
            graph.erase_node(inside[node])
    whatever_strides(graph)
    results = tuple(_layout_of_result(node) for node in outputs)
    return Part(GraphModule(torch.nn.Module(), graph, "repeated"), given, results, tuple(views), tuple(needed))


def _layout_of_result(node: Node) -> Layout:
    layout = layout_of(node.meta["val"])
    if layout[4] != 0:
        raise Refused(f"a block that comes again hands out {node.name}, a window into other memory")
    return layout


def _why_no_part(node: Node) -> str | None:
    if node.op != "call_function":
        return "it is no operator"
    if may_be_done_in_place(node):
        first = node.args[0]
        taken = isinstance(first, Node) and _chain(first)[0].op == "placeholder"
        return "it may be done in place" if taken or not isinstance(first, Node) else None
    return why_it_stays(node)


def _parted(
    forward: GraphModule,
    backward: GraphModule,
    given: tuple[Layout, ...],
    results: int,
    metadata: Any,
    may_draw: bool,
) -> Kind:
    made = _outputs(forward)
    taken = backward.graph.find_nodes(op="placeholder")
    differentiable = tuple(bool(info.requires_grad) for info in metadata.output_info)
    tangents = sum(differentiable)
    behind = [node for node in made[results:] if isinstance(node, Node)]
    by_name = {node.name: node for node in taken[: len(taken) - tangents]}
    if any(name.startswith("rng_state") for name in by_name):
        raise Refused(
            "what a block that comes again computes again in the backward may draw random numbers, as attention may"
        )
    if (
        len(differentiable) != results
        or len(behind) != len(made) - results
        or {node.name for node in behind} != set(by_name)
    ):
        raise Refused("a block that comes again is saved for backward in another way")
    saved = [node for node in behind if not is_number(node)]
    placeholders_of_forward = forward.graph.find_nodes(op="placeholder")
    numbers = {node: place for place, node in enumerate(placeholders_of_forward[: len(given)])}
    outputs: list[Any] = made[:results]
    graph = Graph()
    inside: dict[Node, Node] = {}
    placeholders: dict[tuple[str, int], Node] = {}
    layouts: list[Layout] = []

    def take(where: str, index: int, like: Node) -> Node:
        if (where, index) not in placeholders:
            placeholders[where, index] = graph.placeholder(f"{where}_{index}")
            placeholders[where, index].meta["val"] = like.meta["val"]
            layouts.append(layout_of(like.meta["val"]))
        return placeholders[where, index]

    views: list[tuple[Node, Node, tuple[Node, ...]]] = []
    for node in saved:
        maker, chain = _chain(node)  # what is saved is the memory, and the backward graph makes the view again
        if maker not in numbers and maker not in outputs:
            outputs.append(maker)
        source = ("given", numbers[maker]) if maker in numbers else ("made", outputs.index(maker))
        views.append((by_name[node.name], take(*source, maker), chain))
    sources = tuple(placeholders)
    for index, placeholder in enumerate(taken[len(by_name) :]):
        inside[placeholder] = take("tangent", index, placeholder)
    of_symbols: dict[sympy.Symbol, Node] = {}
    for node in placeholders_of_forward[len(given) :]:
        made_for = graph.placeholder(f"symbol_{node.name}")
        made_for.meta["val"] = node.meta["val"]
        if isinstance(expr := _compat.sympy_expr(node.meta["val"]), sympy.Symbol):
            of_symbols.setdefault(expr, made_for)
    for node in behind:
        if is_number(node):
            inside[by_name[node.name]] = number_node(graph, node.meta["val"], of_symbols)
    for placeholder, value, chain in views:
        for view in chain:
            value = view_again(graph, view, value, of_symbols)
        inside[placeholder] = value
    for node in backward.graph.nodes:
        if node.op == "output":
            results_of_backward = [None if entry is None else inside[entry] for entry in node.args[0]]
            graph.output(tuple(results_of_backward))
        elif node.op == "get_attr":
            raise Refused("a block that comes again holds a tensor of its own")
        elif node.op != "placeholder":
            inside[node] = graph.node_copy(node, lambda operand: inside[operand])
    if len(results_of_backward) != len(placeholders_of_forward):
        raise Refused("a block that comes again has other gradients than arguments")
    handed_out: list[Node] = []
    gradients: list[int | None] = []
    of_tangents = [placeholders["tangent", index] for index in range(tangents)]
    for entry in results_of_backward[: len(given)]:
        if entry is None:
            gradients.append(None)
        elif entry in of_tangents:
            gradients.append(-1 - of_tangents.index(entry))
        else:
            if entry not in handed_out:
                handed_out.append(entry)
            gradients.append(handed_out.index(entry))
    module = GraphModule(torch.nn.Module(), graph, "repeated")
    return Kind(
        _part(forward, given, outputs, may_draw),
        results,
        differentiable,
        _part(module, tuple(layouts), handed_out),
        sources,
        tuple(gradients),
        tuple(map(_only_added, of_tangents)),
    )


def _only_added(tangent: Node) -> bool:
    """Whether all that becomes of a gradient in a backward graph are sums with other values, whose size and type these
    have: then -0.0 in its place changes nothing, not even which gradients there are."""
    converted = (torch.ops.prims.convert_element_type.default, torch.ops.aten.clone.default)
    same, others = [tangent], []
    for node in same:
        for user in node.users:
            if viewed(user) is node or user.target in converted:
                same.append(user)
            elif (other := _summand(user, node)) is not None:
                others.append(other)
            else:
                return False
    return set(others).isdisjoint(same)


def _summand(sum_of: Node, node: Node) -> Node | None:
    """The value, of the size and type of the result, that a step adds to `node`; None where it does something else."""
    others = [entry for entry in sum_of.args if entry is not node]
    if sum_of.target is not torch.ops.aten.add.Tensor or sum_of.kwargs or len(others) != 1:
        return None
    other, made = others[0], sum_of.meta["val"]
    value = other.meta.get("val") if isinstance(other, Node) else None
    if not isinstance(other, Node) or not isinstance(value, torch.Tensor) or made.dtype.is_complex:
        return None
    (dtype, _, size, *_), (made_dtype, _, made_size, *_) = layout_of(value), layout_of(made)
    return other if (dtype, size) == (made_dtype, made_size) else None
