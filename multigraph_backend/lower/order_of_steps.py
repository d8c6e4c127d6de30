"""What a forward graph computes at its end only to save it, computed where the values that it takes are made.

    r0 = rsqrt(...); ...; r1 = rsqrt(...); ...; d0 = r0 / 64; d1 = r1 / 64     return d0, d1
    ->
    r0 = rsqrt(...); d0 = r0 / 64; ...; r1 = rsqrt(...); d1 = r1 / 64; ...     return d0, d1

The partitioner keeps the order of the joint graph, in which what belongs to a gradient comes behind everything else.
Inductor computes `d0` in one kernel with `r0`, wherever it stands; but to find blocks it is a value of each layer that
is alive to the end, and no cut between layers is without a loss.

In:  a graph that Inductor is given.  Out: the same graph, in another order, which is as right: only steps that write to
nothing and draw nothing are moved, and over no write.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from multigraph_backend.lower.equal_steps import do_early
from multigraph_backend.lower.steps_of_graph import Told, steps_of


def make_early(graph: Graph, told: Told | None = None) -> list[Node]:
    """The steps that were moved.  `told`: see `steps_of`."""
    late = _late(graph, told)
    do_early(graph, late)
    return late


def make_late(graph: Graph, late: Sequence[Node]) -> None:
    """Move them back to the end, in their order: where some layers save a value and others compute it again, they are
    more alike without it."""
    end = graph.output_node()
    for node in late:
        end.prepend(node)


def _late(graph: Graph, told: Told | None) -> list[Node]:
    """Steps behind the last kernel of its own, and behind all that stays, that only the end of the graph takes; but not
    what is made of inputs and constants there, which would move to the front."""
    steps, nodes = steps_of(graph, told=told)
    begin = max((index + 1 for index, step in enumerate(steps) if step.alone or step.stays), default=len(steps))
    behind: set[int | str] = set()  # what takes something from before
    for index in range(begin, len(nodes)):
        if any(
            isinstance(operand, int) and (operand < begin or operand in behind) for operand in steps[index].operands
        ):
            behind.add(index)
    end = graph.output_node()
    late: dict[Node, None] = {}
    for index in reversed(range(begin, len(nodes))):
        node = nodes[index]
        if index in behind and all(user is end or user in late for user in node.users):
            late[node] = None
    return list(late)[::-1]
