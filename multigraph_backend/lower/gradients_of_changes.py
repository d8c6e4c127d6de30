"""Gradients of a graph that changes its inputs in place: they must not be computed from the new values.

The min-cut partitioner does not see the change, `copy_(input, new values)`.  It may keep the input itself for the
backward, and compute there again what was read before the change, from what is there after it.  (Seen in torch 2.11,
2.13 and 2.15.)

    forward:  old = exp(x); copy_(x, y); return old * 2   saves x
    backward: exp(x)                                      x is y by then

In: the joint graph of Inductor, or of `aot_eager`.  Out: the same contract as torch's own partitioner; where
its answer is wrong the graph is parted anew, with all that the backward needs from the forward, or `CannotLower`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.lower.changes import changes_of, is_view
from multigraph_backend.lower.fresh_inputs import CannotLower

KEPT = "the backward needs an input as it was before the graph changed it in place, and nothing keeps those values"

# code that comes from a cache was compiled as all of these decide
_DECIDING = tuple(
    str(Path(__file__).with_name(name))
    for name in (
        "as_eager.py",
        "changes.py",
        Path(__file__).name,
        "nested_regions.py",
        "order_of_changes.py",
        "quantized_products.py",
    )
)

_Partitioner: Any = object if _compat.missing("changed inputs") else _compat.CustomPartitionerFn


class SafePartitioner(_Partitioner):  # type: ignore[misc]
    """Inductor's min-cut partitioner (or the user's own), and another one where its answer is wrong.

    It is part of the key of Inductor's caches, so it can be pickled, and it is the same from process to process.
    """

    def __init__(self, theirs: Any = None) -> None:
        self.theirs = theirs

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        part = self.theirs or _compat.min_cut_rematerialization_partition
        if not changes_of(gm):
            return part(gm, joint_inputs, **settings)
        untouched = _copy(gm)
        parts = part(gm, joint_inputs, **settings)
        if _keeps_a_changed_input(parts[0], settings["num_fwd_outputs"]):
            settings.pop("compiler", None)
            parts = _compat.default_partition(untouched, joint_inputs, **settings)
            if _keeps_a_changed_input(parts[0], settings["num_fwd_outputs"]):
                raise CannotLower(KEPT)
        return parts

    def uuid(self) -> Any:
        return _compat.get_hash_for_files(_DECIDING), self.theirs and self.theirs.uuid()


def _copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    results: Any = graph.graph_copy(gm.graph, copies)
    graph.output(results).meta.update(gm.graph.output_node().meta)
    return torch.fx.GraphModule(gm, graph)


def _keeps_a_changed_input(forward: torch.fx.GraphModule, outputs: int) -> bool:
    """Whether what the forward hands to the backward is, or is a view of, an input that it has changed by then."""
    changed = changes_of(forward)
    results: Any = forward.graph.output_node().args[0]
    for node in results[outputs:]:
        while isinstance(node, torch.fx.Node) and node not in changed and is_view(node):
            node = node.args[0]
        if node in changed:
            return True
    return False
