"""Two things that Inductor gets wrong around inputs that a graph changes in place, kept out of our code.

- Gradients.  Such a change is the last thing of the forward graph, and the min-cut partitioner does not see it: it may
  keep the input itself for the backward and compute there again what was read before the change, from what is there
  after it.  (Seen in torch 2.11, 2.13 and 2.15.)  `SafePartitioner` looks at the result and parts such a graph anew,
  with everything that the backward needs computed in the forward.
- Order.  Up to torch 2.12 the scheduler may fuse the change with one reader of the old values and put both before
  another reader that is a kernel of its own, such as a matrix product.  `compile_in_order` refuses such a graph.

In: Inductor's joint graph, or its forward graph.  Out: the same contract as Inductor's own function, or `CannotLower`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from multigraph_backend import _compat, trace
from multigraph_backend.fresh_inputs import CannotLower

ORDER = (
    "an input is changed in place, and its old values are read by several operations, of which one is a kernel of its "
    "own: Inductor of torch 2.11 and 2.12 may run that one after the change"
)
KEPT = "the backward needs an input as it was before the graph changed it in place, and nothing keeps those values"

_COPY = torch.ops.aten.copy_.default


def compile_fx_settings(chosen: Mapping[str, object]) -> dict[str, object]:
    """Keyword arguments for Inductor's `compile_fx`: the knobs `chosen`, and the two guards of this module."""
    lacking = _compat.missing("changed inputs")
    if lacking:
        message = f"gradients may be wrong where a graph changes its inputs in place; this torch differs: {lacking[0]}"
        trace.warn_once(message, "%s", message)
        return {"config_patches": dict(chosen) or None}
    theirs = chosen.get("custom_partitioner_fn", _compat.partitioner_config.custom_partitioner_fn)
    patches = {**chosen, "custom_partitioner_fn": SafePartitioner(theirs)}
    return {"config_patches": patches, "inner_compile": compile_in_order}


_Partitioner: Any = object if _compat.missing("changed inputs") else _compat.CustomPartitionerFn


class SafePartitioner(_Partitioner):  # type: ignore[misc]
    """Inductor's min-cut partitioner (or the user's own), and another one where its answer is wrong.

    It is part of the key of Inductor's caches, so it can be pickled, and it is the same from process to process.
    """

    def __init__(self, theirs: Any = None) -> None:
        self.theirs = theirs

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        part = self.theirs or _compat.min_cut_rematerialization_partition
        if not _changes(gm):
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
        return _compat.get_hash_for_files((__file__,)), self.theirs and self.theirs.uuid()


def compile_in_order(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
    """Inductor's compile of one graph.  Raises `CannotLower` for a graph that it may compile in the wrong order."""
    if _compat.SCHEDULER_LOSES_READERS and _reads_in_peril(gm):
        raise CannotLower(ORDER)
    return _compat.compile_fx_inner(gm, example_inputs, **settings)


def _copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    results: Any = graph.graph_copy(gm.graph, copies)
    graph.output(results).meta.update(gm.graph.output_node().meta)
    return torch.fx.GraphModule(gm, graph)


def _changes(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Inputs that the graph writes to, with the writes."""
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=_COPY):
        if node.args[0].op == "placeholder":
            found.setdefault(node.args[0], []).append(node)
    return found


def _keeps_a_changed_input(forward: torch.fx.GraphModule, outputs: int) -> bool:
    """Whether what the forward hands to the backward is, or is a view of, an input that it has changed by then."""
    changed = _changes(forward)
    results: Any = forward.graph.output_node().args[0]
    for node in results[outputs:]:
        while isinstance(node, torch.fx.Node) and node not in changed and _is_view(node):
            node = node.args[0]
        if node in changed:
            return True
    return False


def _reads_in_peril(gm: torch.fx.GraphModule) -> bool:
    for changed, writes in _changes(gm).items():
        needed = _ancestors(writes)
        readers = [node for node in _readers(changed) if node not in needed]
        if len(readers) > 1 and not all(torch.Tag.pointwise in getattr(node.target, "tags", ()) for node in readers):
            return True
    return False


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What reads the memory of `node`, also through views."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        elif user.op == "call_function" and user.target not in (_COPY, torch.ops.aten.sym_size.int):
            yield user


def _ancestors(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    seen: set[torch.fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(node.all_input_nodes)
    return seen


def _is_view(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return bool(getattr(node.target, "is_view", False)) or (node.target is operator.getitem and _is_view(node.args[0]))  # type: ignore[arg-type]
