"""Which saved tensors are made pointwise of others: computing one again takes no longer than reading those.

In: the forward graph, families of saved tensors (a buffer and the saved views of it), which inputs are parameters.
Out: the families that follow from the rest.

A family counts where each of its elements comes, by operations that draw no random numbers, from tensors that stay:
parameters, and saved families that do not follow themselves.  At most `SOURCES` of them are of its size, so that a
long sum of saved tensors is not read again for each of its terms.

Invariant: a family that follows needs nothing of another one that does, so all of them can be left unsaved together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from multigraph_backend.saved_tensors import graphs
from multigraph_backend.saved_tensors.repeating import MOST, why_not

SOURCES = 2


def following(graph: Graph, families: Mapping[Node, Sequence[Node]], parameters: set[Node]) -> set[Node]:
    """The roots of `families` that follow from the other families and `parameters`."""
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
