"""The changes in place that a forward graph makes to its inputs: `copy_(input, new values)`, last of all.

Read by the two modules that keep out what Inductor gets wrong around them: `gradients_of_changes` and
`order_of_changes`.
"""

from __future__ import annotations

import operator

import torch

_COPY = torch.ops.aten.copy_.default


def changes_of(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Inputs that the graph writes to, with the writes."""
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=_COPY):
        if node.args[0].op == "placeholder":
            found.setdefault(node.args[0], []).append(node)
    return found


def is_view(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return bool(getattr(node.target, "is_view", False)) or (node.target is operator.getitem and is_view(node.args[0]))  # type: ignore[arg-type]
