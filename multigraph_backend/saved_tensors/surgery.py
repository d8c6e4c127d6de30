"""A plan carried out on the two graphs: packs and unpacks put in, saved tensors exchanged for what is saved instead.

    forward   h = mm(x, w);  y = sin(h);                  return y, h       h is saved, and
    becomes   h = mm(x, w);  y = sin(h);  p = bf16(h);    return y, p       a cast is its pack
    backward  given h, g:    c = cos(h);                  return mul(g, c)
    becomes   given p, g:    u = fp32(p);  c = cos(u);    return mul(g, c)

In: a `Partition`, traced units, a placement.  Out: the same two modules, changed.

Invariant: what forward returns behind the caller's outputs and what backward takes stay in the same order and of the
same kinds, numbers and tensors; nothing else of either graph changes its meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend.saved_tensors import graphs, kernels, links, products, tracing
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.placement import Placement, Unpacking
from multigraph_backend.saved_tensors.units import Traced

_NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"
_FEW = 16  # times fewer elements than there were
#: inputs of such names are, for Inductor's estimates, the caller's to keep, and count for nothing; they are freed all
#: the same
_UNCOUNTED = "args_"


def carry_out(partition: Partition, units: Sequence[Traced], placement: Placement) -> None:
    """Change both graphs."""
    forward, backward = partition.forward, partition.backward
    replaced: dict[Node, list[Node]] = {}
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    unpacked: list[_Unpacked] = []
    packed: dict[str, list[Node]] = {}
    for traced in units:
        name = traced.unit.name
        saved = _pack(forward, traced, _step(forward.graph, placement.pack_before[name]))
        packed[name] = saved
    last_wait: Node | None = None
    offloads = {name: list(filter(graphs.on_host, packed[name])) for name in placement.offloads}
    if offloads:
        last_wait = links.link_forward(forward.graph, offloads, placement.waits)
        packed[placement.offloads[-1]].append(last_wait)
    for traced in units:
        name, saved = traced.unit.name, packed[traced.unit.name]
        first = traced.unit.members[0]
        replaced.update({member: saved if member is first else [] for member in traced.unit.members})
        members = [placeholders[member.name] for member in traced.unit.members]
        inputs = _inputs(backward.graph, members[0], saved, traced.unit.source)
        unpacked.append(_Unpacked(traced, members, inputs, placement.unpackings[name]))
    _exchange_results(forward.graph, partition.outputs, replaced)
    reloads = {name: index for index, name in enumerate(placement.reloads)}
    for unit in sorted(unpacked, key=lambda unit: reloads.get(unit.traced.unit.name, -1)):
        _unpack(backward, unit)
    if last_wait is not None:
        pairs = (zip(packed[unit.traced.unit.name], unit.inputs, strict=True) for unit in unpacked)
        given = dict(itertools.chain.from_iterable(pairs))
        copies = {name: [given[node] for node in nodes] for name, nodes in offloads.items()}
        links.link_backward(backward.graph, copies, placement.prefetches, given[last_wait])
    for unit in unpacked:
        for member in unit.members:
            _erase(backward.graph, member)
        if unit.traced.unit.products:
            products.multiply(backward.graph, unit.traced.unit.products, unit.inputs[0])
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


@dataclass(frozen=True)
class _Unpacked:
    traced: Traced
    members: list[Node]
    inputs: list[Node]
    copies: tuple[Unpacking, ...]


def _step(graph: Graph, name: str) -> Node:
    found: Node = next(node for node in graph.nodes if node.name == name)
    return found


def _pack(forward: GraphModule, traced: Traced, before: Node) -> list[Node]:
    """The pack before `before`; what is saved, each tensor once."""
    source = traced.unit.source
    values = _put_in(forward, traced.pack, [source], before, f"{source.name}_pack", source.meta, {kernels.MARK: True})
    saved = list(dict.fromkeys(values))
    if any(member.meta.get(_NO_VERSION_CHECK) for member in traced.unit.members):
        for node in saved:
            node.meta[_NO_VERSION_CHECK] = True
    return saved


def _inputs(graph: Graph, first: Node, saved: Sequence[Node], source: Node) -> list[Node]:
    """Placeholders for what is saved of `source`, where the first member's is."""
    made = []
    for node in saved:
        with graph.inserting_before(first):
            placeholder = graph.placeholder(f"{_UNCOUNTED}{node.name}" if _miscounted(node, source) else node.name)
        placeholder.meta["val"] = node.meta["val"]
        for entry in ("tensor_meta", "desc", "partitioner_tag", _NO_VERSION_CHECK):
            if entry in first.meta and entry != "tensor_meta":
                placeholder.meta[entry] = first.meta[entry]
        made.append(placeholder)
    return made


def _miscounted(saved: Node, source: Node) -> bool:
    """Whether Inductor would take `saved` for many times the memory that it is: the scales of blocks.

    Where a kernel reads an input at an index that is divided, as a scale of a block is read for each element of it,
    Inductor (torch 2.11 to 2.15) counts each read as memory that the input gives back when it is freed.  That would be
    worth more than all else: everything is unpacked at the start of the backward, and buffers are kept to be used
    again later.
    """
    value, of = saved.meta["val"], source.meta["val"]
    return value.dim() > of.dim() and graphs.elements(value) * _FEW <= graphs.elements(of)


def _exchange_results(graph: Graph, outputs: int, replaced: Mapping[Node, Sequence[Node]]) -> None:
    output = graph.output_node()
    values = graphs.results(graph)
    described = output.meta.get("desc")
    results: list[Any] = []
    descriptions: list[Any] = []
    for index, value in enumerate(values):
        instead = replaced.get(value) if index >= outputs and isinstance(value, Node) else None
        new: Iterable[Any] = [value] if instead is None else instead
        results.extend(new)
        if isinstance(described, list | tuple) and len(described) == len(values):
            descriptions.extend([described[index]] * len(list(new)))
    output.args = (tuple(results),)
    if descriptions:
        output.meta["desc"] = descriptions
    for node in replaced:
        _remove_unused_views(graph, node)


def _remove_unused_views(graph: Graph, node: Node) -> None:
    while not node.users and (above := graphs.viewed(node)) is not None:
        graph.erase_node(node)
        node = above


def _unpack(backward: GraphModule, unit: _Unpacked) -> None:
    """A copy of the unpack for each cluster of uses, and the views that each use needs, made again next to it."""
    graph, traced = backward.graph, unit.traced
    inputs = _tensor_inputs(traced, unit.inputs)
    for copy in unit.copies:
        before = _step(graph, copy.before)
        values = _put_in(
            backward,
            traced.unpack,
            [*inputs, *traced.inputs],
            before,
            f"{traced.unit.name}_unpack",
            before.meta if before.op != "output" else {},
        )
        remade: dict[Node, Node] = dict(zip(unit.members, values, strict=True))
        for name in copy.uses:
            use = _step(graph, name)
            for entry in use.all_input_nodes:
                if any(graphs.root(entry) is member for member in unit.members):
                    use.replace_input_with(entry, _again(graph, entry, remade, use))


def _tensor_inputs(traced: Traced, placeholders: Sequence[Node]) -> list[Node]:
    """A placeholder for each output of the pack; outputs that are the same node have the same one."""
    values = [value for value in graphs.results(traced.pack.graph) if isinstance(value, Node)]
    distinct = list(dict.fromkeys(values))
    return [placeholders[distinct.index(value)] for value in values]


def _again(graph: Graph, view: Node, remade: dict[Node, Node], before: Node) -> Node:
    """`view` over the unpacked tensor instead of the saved one."""
    if view not in remade:
        above = graphs.viewed(view)
        assert above is not None
        over = _again(graph, above, remade, before)
        with graph.inserting_before(before):
            made = graph.node_copy(view, lambda node: over if node is above else node)
        remade[view] = made
    return remade[view]


def _erase(graph: Graph, member: Node) -> None:
    """The placeholder of a saved tensor and the views of it, all of which were made again."""
    for user in list(member.users):
        if graphs.viewed(user) is not member:
            raise AssertionError(f"{user.name} still reads {member.name}")
        _erase(graph, user)
    graph.erase_node(member)


def _put_in(
    module: GraphModule,
    traced: GraphModule,
    inputs: Sequence[Node],
    before: Node,
    prefix: str,
    origin: Mapping[str, Any],
    marks: Mapping[str, Any] = MappingProxyType({}),
) -> list[Node]:
    """The nodes of `traced` before `before`, over `inputs`, with `marks` in their `meta`; returns what it returns."""
    placeholders = traced.graph.find_nodes(op="placeholder")
    copies: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
    values = [value for node in inputs if (value := graphs.tensor(node)) is not None]
    mode = getattr(values[0], "fake_mode", None)
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with module.graph.inserting_before(before):
            if node.op == "get_attr":
                made = module.graph.get_attr(_constant(module, traced, str(node.target), prefix))
            else:
                made = module.graph.create_node(
                    node.op,
                    node.target,
                    torch.fx.map_arg(node.args, copies.__getitem__),
                    torch.fx.map_arg(node.kwargs, copies.__getitem__),
                    name=f"{prefix}_{node.name}",
                )
        tracing.values_again(node, made, mode)
        for entry in ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag", "autograd_backward"):
            if entry in origin:
                made.meta[entry] = origin[entry]
        made.meta.update(marks)
        copies[node] = made
    return [copies[value] for value in graphs.results(traced.graph)]


def _constant(module: GraphModule, traced: GraphModule, target: str, prefix: str) -> str:
    """A tensor that a hook captured, as an attribute of `module`."""
    value = getattr(traced, target)
    name = f"_{prefix}{target}"
    while hasattr(module, name) and getattr(module, name) is not value:
        name += "_"
    module.register_buffer(name, value, persistent=False)
    return name
