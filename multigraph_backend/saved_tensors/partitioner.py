"""Inductor's partitioner, and then the packing of what it saves.

In: the joint graph, as Inductor hands it to its custom partitioner; the rules.  Out: the forward and backward graph of
the partitioner inside, with packs and unpacks in them.

The way: choose units, trace pack and unpack of each, place them by estimated peak, change the graphs, and give account.
What fails for one unit leaves that unit as it is; what fails for all leaves both graphs as they were.

Invariant: what this does depends on the rules alone, and its key in Inductor's caches says them and this package's
source, so that code is found again in another process and never for other rules.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat, trace
from multigraph_backend.saved_tensors import (
    account,
    choosing,
    costs,
    graphs,
    packs,
    placement,
    surgery,
    tracing,
    transfers,
)
from multigraph_backend.saved_tensors.account import SavedTensor, SavedTensors
from multigraph_backend.saved_tensors.choosing import Choice, Kept, Unit
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.rules import Offload, Rule, rule_to_json
from multigraph_backend.saved_tensors.tracing import CannotPack, Traced

log = logging.getLogger(__name__)

_Partitioner: Any = object if _compat.missing("changed inputs") else _compat.CustomPartitionerFn


class PackingPartitioner(_Partitioner):  # type: ignore[misc]
    """`inner`, and then packs for what it saves, as `rules` say."""

    def __init__(self, inner: Any, rules: Sequence[Rule]) -> None:
        self.inner, self.rules = inner, tuple(rules)

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        forward, backward = self.inner(gm, joint_inputs, **settings)
        if not joint_inputs:  # a subgraph that a higher-order operator calls: its caller counts what it saves
            return forward, backward
        outputs = settings["num_fwd_outputs"]
        static = settings.get("static_lifetime_input_indices") or ()
        return pack_saved_tensors(forward, backward, outputs, static, self.rules)

    def uuid(self) -> Any:
        theirs = self.inner.uuid()
        rules = json.dumps([rule_to_json(rule) for rule in self.rules])
        return (source_hash(), rules, sorted(transfers.STREAMS), theirs)

    def __getstate__(self) -> dict[str, Any]:  # Inductor pickles its configuration for its caches' keys
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> PackingPartitioner:  # and copies it; nothing in here changes
        return self


def pack_saved_tensors(
    forward: GraphModule, backward: GraphModule, outputs: int, static: Sequence[int], rules: Sequence[Rule]
) -> tuple[GraphModule, GraphModule]:
    """Both graphs with saved tensors packed as `rules` say; `outputs` of the forward's results are the caller's.

    The modules that are returned may be the given ones, changed.  Nothing is raised for what cannot be packed.
    """
    untouched = _copied(forward), _copied(backward)
    try:
        choice = choosing.choose(forward, outputs, static, rules)
        numbers = _numbers(backward)
        computes_bytes = _computes_bytes(backward)
        traced: list[Traced] = []
        known: dict[Hashable, Traced | CannotPack] = {}
        for unit in list(choice.units):
            try:
                _expect(backward, unit)
                if isinstance(unit.pack, Offload) and computes_bytes:
                    raise CannotPack("the backward computes bytes on the CPU, which may come to lie in its copy")
                traced.append(_traced_once(unit, numbers, known))
            except CannotPack as reason:
                _keep(choice, unit, str(reason))
        if not traced:
            account.add(SavedTensors(tuple(_kept(entry) for entry in choice.kept)))
            return forward, backward
        placed = _place(forward, backward, outputs, traced, choice)
        surgery.carry_out(forward, backward, outputs, traced, placed)
        account.add(_account(traced, choice, placed))
    except Exception as error:
        reason_text = f"{type(error).__name__}: {error}"
        trace.warn_once(f"packing failed: {reason_text}", "saved tensors stay as they are: %s", reason_text)
        log.debug("packing failed", exc_info=True)
        saved = choosing.saved_tensors(untouched[0], outputs)
        entries = [Kept(node, choosing.describe(node, node, "intermediate"), reason_text) for node in saved]
        account.add(SavedTensors(tuple(map(_kept, entries)), failed=reason_text))
        return untouched
    return forward, backward


@functools.cache
def source_hash() -> str:
    """The text of this package: other code is another key."""
    made = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        made.update(path.read_bytes())
    return made.hexdigest()


def _traced_once(unit: Unit, numbers: Sequence[Node], known: dict[Hashable, Traced | CannotPack]) -> Traced:
    """The graphs of `unit`, or of one before it that is of the same form.  Raises CannotPack."""
    form = tracing.form(unit)
    if form not in known:
        try:
            known[form] = _traced(unit, numbers)
        except CannotPack as reason:
            known[form] = reason
    found = known[form]
    if isinstance(found, CannotPack):
        raise found
    return replace(found, unit=unit)


def _traced(unit: Unit, numbers: Sequence[Node]) -> Traced:
    value = graphs.tensor(unit.source)
    assert value is not None
    order = graphs.memory_order(value)
    assert order is not None
    if isinstance(unit.pack, SavedHook):
        return tracing.trace(unit, unit.pack.pack, unit.pack.unpack, numbers)
    found = packs.functions(unit.pack, value.permute(order.dims) if value.dim() else value)
    if isinstance(found, str):
        raise CannotPack(found)
    traced = tracing.trace(unit, *found, numbers)
    if isinstance(unit.pack, Offload):
        return traced
    if traced.saved_bytes >= unit.described.bytes:
        raise CannotPack(f"packed it would need {traced.saved_bytes} bytes of {unit.described.bytes}")
    return traced


def _expect(backward: GraphModule, unit: Unit) -> None:
    """The backward graph takes each member by its name, and reads it."""
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for member in unit.members:
        if member.name not in placeholders:
            raise CannotPack("the backward graph does not take it by its name")
        if not placeholders[member.name].users:
            raise CannotPack("the backward graph does not read it")


def _numbers(backward: GraphModule) -> list[Node]:
    """The symbolic integers that the backward graph takes."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    return [node for node in placeholders if isinstance(node.meta.get("val"), torch.SymInt)]


def _computes_bytes(backward: GraphModule) -> bool:
    """Whether Inductor may take the memory of bytes on the host, once it is read, for something that it makes there."""
    made = [graphs.tensor(node) for node in backward.graph.nodes if node.op == "call_function"]
    return any(value is not None and value.dtype == torch.uint8 and value.device.type == "cpu" for value in made)


def _place(
    forward: GraphModule, backward: GraphModule, outputs: int, traced: Sequence[Traced], choice: Choice
) -> placement.Placement:
    packings = [_packing(entry) for entry in traced]
    members = {member for entry in traced for member in entry.unit.members}
    returned = [
        value
        for index, value in enumerate(graphs.results(forward.graph))
        if isinstance(value, Node) and (index < outputs or value not in members)
    ]
    still = frozenset(name for value in returned for name in graphs.memory_of(value))
    sources = {entry.unit.source for entry in traced}
    held = [entry.node.name for entry in choice.kept if entry.described.role != "intermediate"]
    held += [member.name for entry in traced if entry.unit.described.role != "intermediate"
             for member in entry.unit.members]  # fmt: skip
    caller = [node.name for node in forward.graph.find_nodes(op="placeholder")]
    return placement.place(
        graphs.program(forward.graph, caller),
        graphs.program(backward.graph, held),
        packings,
        still,
        dead_views=_dead_views(members - sources, set(returned) | sources),
        seconds=costs.seconds_of(backward.graph) if any(packing.transfer for packing in packings) else None,
    )


def _dead_views(members: set[Node], needed: set[Node]) -> frozenset[str]:
    """Views that nobody needs when the members are not returned."""
    dead: set[Node] = set()
    for member in members:
        node: Node | None = member
        while node is not None and graphs.viewed(node) is not None and node not in needed:
            if any(user.op != "output" and user not in dead for user in node.users):
                break
            dead.add(node)
            node = graphs.viewed(node)
    return frozenset(node.name for node in dead)


def _packing(traced: Traced) -> placement.Packing:
    unit = traced.unit
    packing, unpacking = traced.pack.graph, traced.unpack.graph
    tensors = unpacking.find_nodes(op="placeholder")[: len(traced.saved)]
    return placement.Packing(
        name=unit.name,
        source=unit.source.name,
        memory=graphs.memory_of(unit.source)[0],
        members=tuple(member.name for member in unit.members),
        pack=graphs.fragment(packing, packing.find_nodes(op="placeholder")),
        unpack=graphs.fragment(unpacking, tensors),
        cheap=traced.cheap,
        transfer=_transfer(unit),
    )


def _transfer(unit: Unit) -> placement.Transfer | None:
    value = graphs.tensor(unit.source)
    if not isinstance(unit.pack, Offload) or value is None:
        return None
    _, back = transfers.of(value.device).stream.bytes_per_second()
    return placement.Transfer(unit.pack.waiting, unit.pack.ahead, unit.described.bytes / back)


# ---------------------------------------------------------------- the account


def _keep(choice: Choice, unit: Unit, reason: str) -> None:
    choice.units.remove(unit)
    choice.kept += [Kept(member, unit.described, reason) for member in unit.members]


def _kept(entry: Kept) -> SavedTensor:
    return _shown(entry.node, entry.described.ops[-1], entry.described.module, reason=entry.reason)


def _shown(node: Node, op: str, module: str, **rest: Any) -> SavedTensor:
    value = graphs.tensor(node)
    assert value is not None
    size = graphs.tensor_bytes(value)
    return SavedTensor(
        name=node.name,
        op=op,
        module=module,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=f"[{', '.join(map(str, value.shape))}]",
        bytes=size,
        **{"bytes_saved": size, **rest},
    )


def _account(traced: Sequence[Traced], choice: Choice, placed: placement.Placement) -> SavedTensors:
    tensors = []
    for entry in traced:
        unit = entry.unit
        shares = _shares(entry)
        for member, share in zip(unit.members, shares, strict=True):
            tensors.append(
                _shown(
                    member,
                    unit.described.ops[-1],
                    unit.described.module,
                    bytes_saved=share,
                    packed=str(unit.pack),
                    with_=unit.source.name if member is not unit.source else None,
                    pack_before=placed.pack_before[unit.name],
                    unpack_before=tuple(copy.before for copy in placed.unpackings[unit.name]),
                )
            )
    return SavedTensors(
        tensors=(*tensors, *map(_kept, choice.kept)),
        order=(placed.forward_order, placed.backward_order),
        forward_peak=placed.forward_peak,
        backward_peak=placed.backward_peak,
        stock_forward_peak=placed.stock_forward_peak,
        stock_backward_peak=placed.stock_backward_peak,
        unpacked_forward_peak=placed.unpacked_forward_peak,
        unpacked_backward_peak=placed.unpacked_backward_peak,
    )


def _shares(entry: Traced) -> list[int]:
    """The bytes that are saved for a unit, divided among its members by their sizes."""
    sizes = [graphs.tensor_bytes(value) for node in entry.unit.members if (value := graphs.tensor(node)) is not None]
    shares = [entry.saved_bytes * size // max(sum(sizes), 1) for size in sizes]
    shares[0] += entry.saved_bytes - sum(shares)
    return shares


def _copied(module: GraphModule) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    results: Any = graph.graph_copy(module.graph, copies)
    graph.output(results).meta.update(module.graph.output_node().meta)
    return GraphModule(module, graph)
