"""Which offload waits for which, and which reload begins which: the order of copies, written into both graphs.

    offload(a)                        reload(c, following=[b])
    offload(b)                        reload(b, following=[a])
    offload(c, kept=[a])              reload(a)
    settle(kept=[b, c])

In: the offloads of a forward and the reloads of a backward, in order.  Out: for each offload the earlier ones that it
lets go (`waits`), for each reload the later ones that it begins (`starts`); `link_forward` and `link_backward` write
them into graphs.

A copy to the host has until `waiting` further tensors are offloaded.  A copy from the host begins at the last reload
from which it still arrives in time, by estimated seconds of the steps and measured bandwidth.

Invariant: each offloaded tensor is let go once, after its own copy; each reload is begun at itself or before, no
earlier than `ahead` reloads before, in the order in which they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from multigraph_backend.saved_tensors.offloading import OFFLOAD, RELOAD, SETTLE


def waits(waiting: Sequence[int]) -> list[list[int]]:
    """For each offload, and behind them for the end of the forward, which earlier ones are let go there.

    `waiting`: for each, how many further ones it stays for; 0: until the next.
    """
    freed: list[list[int]] = [[] for _ in range(len(waiting) + 1)]
    for index, further in enumerate(waiting):
        freed[min(index + max(further, 1), len(waiting))].append(index)
    return freed


def starts(needed: Sequence[float], seconds: Sequence[float], ahead: Sequence[int]) -> list[int]:
    """For each reload, the one at which its copy begins.

    `needed`: seconds from the start of the backward at which each is needed, in order; `seconds`: what its copy takes;
    `ahead`: at most so many reloads before it.
    """
    latest = float("inf")
    begin = [0.0] * len(needed)
    for index in reversed(range(len(needed))):
        latest = min(needed[index], latest) - seconds[index]
        begin[index] = latest
    found: list[int] = []
    for index, moment in enumerate(begin):
        at = index
        while at > max(index - ahead[index], 0) and needed[at] > moment:
            at -= 1
        found.append(max(at, found[-1]) if found else at)
    return found


def link_forward(graph: Graph, waiting: Sequence[int]) -> Node:
    """Put `waits` into the offloads of `graph`, in its order; the node that lets the last ones go, for saving."""
    nodes = graph.find_nodes(op="call_function", target=OFFLOAD)
    order = {node: index for index, node in enumerate(graph.nodes)}
    nodes.sort(key=order.__getitem__)
    sources = [node.args[0] for node in nodes]
    *freed, last = waits(waiting)
    for node, earlier in zip(nodes, freed, strict=True):
        node.args = (node.args[0], [sources[index] for index in earlier], [nodes[index] for index in earlier])
        node.meta.pop("eager_input_vals", None)  # of other arguments
    with graph.inserting_before(graph.output_node()):
        settled = graph.call_function(SETTLE, ([sources[at] for at in last], [nodes[at] for at in last]))
    fake = nodes[-1].meta["val"]
    settled.meta.update({**nodes[-1].meta, "val": fake.new_empty(1)})
    for entry in ("tensor_meta", "eager_input_vals"):
        settled.meta.pop(entry, None)
    return settled


def link_backward(graph: Graph, begun: Sequence[int], settled: Node) -> None:
    """Put `begun`, as `starts` gives it, into the reloads of `graph`, in its order."""
    nodes = graph.find_nodes(op="call_function", target=RELOAD)
    order = {node: index for index, node in enumerate(graph.nodes)}
    nodes.sort(key=order.__getitem__)
    copies = [node.args[0] for node in nodes]
    for index, node in enumerate(nodes):
        following = [copies[later] for later, at in enumerate(begun) if at == index and later != index]
        node.meta.pop("eager_input_vals", None)
        node.args = (*node.args[:3], following, [settled] if index == 0 else [])
