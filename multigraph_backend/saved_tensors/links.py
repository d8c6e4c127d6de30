"""The order of copies, written into both graphs: where each copy is waited for, and where copies back begin.

    offload(a)                        begun = begin([a, b], after=[x])
    offload(b)                        reload(a, begun=[begun], after=[y])
    s = settle(sources=[a, b])        reload(b, begun=[begun], after=[z])
    last = settle(after=[s])

`settle` waits for copies, and `begin` prefetches them; `last` is saved for the backward.

In: graphs with offloads and reloads in them, and a placement.  Out: the same graphs, linked.

A copy depends on nothing that is computed around the place that was chosen for it, so that a compiler may move it: to
the very front, for one.  So each of these operators names, as `after`, a tensor that is computed shortly before that
place, and that lives until after it anyway; it is not read.

Invariant: each offloaded tensor is free once, after its own copy; each reload comes after what begins it; no tensor
lives longer for being named, and none is made that would not be.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from multigraph_backend.saved_tensors import graphs
from multigraph_backend.saved_tensors.offload.operators import BEGIN, RELOAD, SETTLE


def link_forward(
    graph: Graph, offloads: Mapping[str, Sequence[Node]], waits: Sequence[tuple[str, Sequence[str]]]
) -> Node:
    """Wait for copies where `waits` say, and for the rest at the end; returns the last wait, for saving.

    `offloads`: by name, one or several each; `waits`: steps, and the names of those whose copies are waited for before
    each.
    """
    left = dict(offloads)
    tokens: list[Node] = []
    steps = {node.name: node for node in graph.nodes}
    for step, names in waits:
        copies = [copy for name in names for copy in left.pop(name)]
        with graph.inserting_before(steps[step]):
            token = graph.call_function(SETTLE, ([copy.args[0] for copy in copies], copies, []))
        tokens.append(_with_meta(token, copies[-1]))
        token.update_arg(2, ordered_after(token))
    copies = [copy for found in left.values() for copy in found]
    with graph.inserting_before(graph.output_node()):
        last = graph.call_function(SETTLE, ([copy.args[0] for copy in copies], copies, tokens))
    return _with_meta(last, next(iter(offloads.values()))[0])


def link_backward(
    graph: Graph, copies: Mapping[str, Sequence[Node]], prefetches: Sequence[tuple[str, Sequence[str]]], last_wait: Node
) -> None:
    """Prefetch where `prefetches` say, and keep reloads where they stand; `copies`: on the host, by name.

    All of that comes after `last_wait`, the last wait of the forward.
    """
    steps = {node.name: node for node in graph.nodes}
    reloads = {node.args[0]: node for node in graph.find_nodes(op="call_function", target=RELOAD)}
    for step, names in prefetches:
        begun = [copy for name in names for copy in copies[name]]
        first = reloads[begun[0]]
        with graph.inserting_before(steps[step]):
            token = graph.call_function(BEGIN, (begun, first.args[2], []))
        _with_meta(token, first)
        token.update_arg(2, ordered_after(token))
        for copy in begun:
            reloads[copy].update_arg(3, [token])
    for node in reloads.values():
        node.update_arg(4, ordered_after(node))
        node.meta.pop("eager_input_vals", None)  # of other arguments
    first_of_all = next(node for node in graph.nodes if node.target in (BEGIN, RELOAD))
    at = 4 if first_of_all.target is RELOAD else 2
    first_of_all.update_arg(at, [*first_of_all.args[at], last_wait])


def ordered_after(node: Node) -> list[Node]:
    """The tensor that keeps a copy in its place: computed last before `node`, and needed behind it anyway.

    Nothing where there is no such tensor.  It is the result of a matmul, a convolution or attention, which has memory
    of its own in any case; rather one that several operations read or that is returned: in another one a compiler may
    find a pattern, which a further reader would spoil.
    """
    order = {entry: index for index, entry in enumerate(node.graph.nodes)}
    second: Node | None = None
    entry = node.prev
    while entry.op != "root":
        if _computed(entry) and any(order[user] > order[node] for user in graphs.readers(entry)):
            if len(entry.users) > 1 or _returned(entry):
                return [entry]
            second = second or entry
        entry = entry.prev
    return [second] if second is not None else []


def _computed(node: Node) -> bool:
    if graphs.tensor(node) is None or node.op != "call_function":
        return False
    made = node.args[0] if node.target is operator.getitem and isinstance(node.args[0], Node) else node
    return getattr(made.target, "overloadpacket", None) in flop_registry


def _returned(node: Node) -> bool:
    return all(user.op == "output" for user in graphs.readers(node))


def _with_meta(node: Node, like: Node) -> Node:
    """Give `node` the place of `like` in the user's code, and the value of a token."""
    value = graphs.tensor(like)
    assert value is not None
    node.meta.update(like.meta)
    node.meta["val"] = value.new_empty(1, dtype=torch.uint8, device="cpu")
    for entry in ("tensor_meta", "eager_input_vals"):
        node.meta.pop(entry, None)
    return node
