"""Inductor's partitioner, and then the packing of what it saves.

In: the joint graph, as Inductor hands it to its custom partitioner; the rules.  Out: the forward and backward graph of
the partitioner inside, with packs and unpacks in them.

The way: choose units, by the rules or within a budget, trace pack and unpack of each, place them by estimated peak,
change the graphs, and give account.
What fails for one unit leaves that unit as it is; what fails for all leaves both graphs as they were.

Invariant: what this does depends on the rules alone, and its key in Inductor's caches says them and this package's
source, so that code is found again in another process and never for other rules.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from multigraph_backend import _compat, events
from multigraph_backend.distributed import groups
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.saved_tensors import (
    account,
    choosing,
    graphs,
    packs,
    placement,
    rematerialize,
    surgery,
    within_budget,
    within_goal,
)
from multigraph_backend.saved_tensors.account import SavedTensor, SavedTensors
from multigraph_backend.saved_tensors.budget import Budget
from multigraph_backend.saved_tensors.choosing import Choice
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.memory_goal import default_rules
from multigraph_backend.saved_tensors.offload import transfers
from multigraph_backend.saved_tensors.placement import Estimate
from multigraph_backend.saved_tensors.reckoning import Reckoned
from multigraph_backend.saved_tensors.rules import Recompute, Rule, rule_to_json
from multigraph_backend.saved_tensors.tracing import Tracer
from multigraph_backend.saved_tensors.units import CannotPack, Kept, Traced, Unit

log = logging.getLogger(__name__)

OF_ITS_OWN = default_rules("cuda")  # that no user has written

_Partitioner: Any = object if _compat.missing("changed inputs") else _compat.CustomPartitionerFn


class PackingPartitioner(_Partitioner):  # type: ignore[misc]
    """`inner`, and then packs for what it saves, as `rules` say."""

    def __init__(self, inner: Any, rules: Sequence[Rule], wanted: Budget | Reckoned | None = None) -> None:
        self.inner, self.rules, self.wanted = inner, tuple(rules), wanted
        self.gathered = groups.gathers_parameters()

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        forward, backward = self.inner(gm, joint_inputs, **settings)
        if not joint_inputs:  # a subgraph that a higher-order operator calls: its caller counts what it saves
            return forward, backward
        static = settings.get("static_lifetime_input_indices") or ()
        primals = joint_inputs[0] if isinstance(joint_inputs[0], Sequence) else ()
        activations = _compat.activations(primals)
        partition = Partition(forward, backward, settings["num_fwd_outputs"], static, activations)
        reordered = bool(_compat.inductor_config.reorder_for_peak_memory)
        packed = pack_saved_tensors(partition, self.rules, self.wanted, reordered, self.gathered)
        return packed.forward, packed.backward

    def uuid(self) -> Any:
        theirs = self.inner.uuid()
        rules = json.dumps([rule_to_json(rule) for rule in self.rules])
        return (source_hash(), rules, self._wanted(), sorted(transfers.STREAMS), self.gathered, theirs)

    def _wanted(self) -> str:
        return repr(self.wanted) if isinstance(self.wanted, Reckoned) else str(self.wanted)

    def __getstate__(self) -> dict[str, Any]:  # Inductor pickles its configuration for its caches' keys
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> PackingPartitioner:  # and copies it; nothing in here changes
        return self


def pack_saved_tensors(
    partition: Partition,
    rules: Sequence[Rule],
    wanted: Budget | Reckoned | None = None,
    reordered: bool = False,
    gathered: bool = False,
) -> Partition:
    """Both graphs with saved tensors packed as `rules` say.

    With a budget or a memory goal `wanted` the rules say what may be done, and it says how much of that is.
    `reordered`: the compiler changes the order of operations to lower the peak.  `gathered`: see `choosing.choose`.

    What is returned may be the given graphs, changed.  Nothing is raised for what cannot be packed.
    """
    untouched = partition.copy()
    try:
        lent: list[str] = []
        if wanted is not None or any(isinstance(rule.pack, Recompute) for rule in rules):
            lent = rematerialize.lend_parameters(partition)
        candidates = choosing.candidates(partition, any(rule.match.pointwise is not None for rule in rules))
        memory = None
        named = rules
        if isinstance(wanted, Reckoned):
            named = [rule for rule in rules if rule not in OF_ITS_OWN]
        if wanted is None:
            choice = choosing.choose(candidates, rules, gathered)
            deciding, said = choice.deciding, None
            traced, kept = _by_rules(partition, choice)
        else:  # there each rule says what may be done, whatever precedes it
            deciding = [rule for rule in rules if choosing.choose(candidates, [rule]).deciding]
            if isinstance(wanted, Budget):
                chosen = within_budget.choose(partition, candidates, rules, wanted)
            else:
                chosen = within_goal.choose(partition, candidates, rules, wanted)
            traced, kept, said, memory = chosen.traced, chosen.kept, chosen.said, chosen.memory
        idle = _deciding_nothing(named, deciding)
        if not traced:
            rematerialize.take_back(partition, lent)
            kept = [entry for entry in kept if entry.node.name not in lent]
            account.add(SavedTensors(tuple(map(_kept, kept)), budget=said, memory=memory, unmatched=idle))
            return partition
        placed = _carry_out(partition, traced, reordered)
        used = rematerialize.take_back(partition, lent)
        kept = [entry for entry in kept if entry.node.name not in lent or entry.node.name in used]
        account.add(replace(_account(traced, kept, placed), budget=said, memory=memory, unmatched=idle))
    except Exception as error:
        if from_outside(error):
            raise
        reason_text = f"{type(error).__name__}: {error}"
        events.warn_once(f"packing failed: {reason_text}", "saved tensors stay as they are: %s", reason_text)
        log.debug("packing failed", exc_info=True)
        entries = [
            Kept(node, choosing.describe(node, node, "intermediate"), reason_text) for node in untouched.saved_tensors()
        ]
        account.add(SavedTensors(tuple(map(_kept, entries)), failed=reason_text))
        return untouched
    return partition


def _carry_out(partition: Partition, traced: Sequence[Traced], reordered: bool) -> placement.Placement:
    """Put packs and unpacks into both graphs, where they are placed.

    What is computed again from what is packed comes first: to the others these are steps like any.
    """
    packed = {member.name for entry in traced for member in entry.unit.members}
    from_packed: list[Traced] = []
    rest: list[Traced] = []
    for entry in traced:
        needs_packed = any(node.name in packed for node in entry.computed_from)
        (from_packed if needs_packed else rest).append(entry)
    found = []
    for part in filter(None, (from_packed, rest)):
        found.append(Estimate(partition, reordered).place(part))
        surgery.carry_out(partition, part, found[-1])
    return found[0] if len(found) == 1 else found[1].after(found[0])


def _by_rules(partition: Partition, choice: Choice) -> tuple[list[Traced], list[Kept]]:
    """The units of `choice`, traced; what cannot be traced is kept."""
    tracer = Tracer(partition.backward)
    # what is computed again is computed from nothing that a rule packs, or, if it may, from what is packed
    taken = {member.name for unit in choice.units for member in unit.members}
    again = {member.name for unit in choice.units if isinstance(unit.pack, Recompute) for member in unit.members}
    traced, kept = [], list(choice.kept)
    for unit in choice.units:
        from_packed = isinstance(unit.pack, Recompute) and unit.pack.from_packed
        try:
            traced.append(tracer.trace(unit, again if from_packed else taken))
        except CannotPack as reason:
            kept += [Kept(member, unit.described, str(reason)) for member in unit.members]
    return traced, kept


def _deciding_nothing(rules: Sequence[Rule], deciding: Sequence[Rule]) -> tuple[str, ...]:
    """The user's rules that are not among those that decide about a saved tensor."""
    known = set(map(id, deciding))
    return tuple(str(rule) for rule in rules if id(rule) not in known and not _of_torch(rule))


def _of_torch(rule: Rule) -> bool:
    """Whether it stands for torch's own hooks, and not in the options."""
    return isinstance(rule.pack, SavedHook) and rule.pack.stock


@functools.cache
def source_hash() -> str:
    """The text of this folder and of those in it: other code is another key."""
    made = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        made.update(path.read_bytes())
    return made.hexdigest()


# ---------------------------------------------------------------- the account


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


def _account(traced: Sequence[Traced], kept: Sequence[Kept], placed: placement.Placement) -> SavedTensors:
    tensors = []
    for entry in traced:
        unit = entry.unit
        multiplied = {product.name for product in unit.products}
        shares, on_host = _shares(entry, entry.saved_bytes), _shares(entry, entry.host_bytes)
        for member, share, there in zip(unit.members, shares, on_host, strict=True):
            tensors.append(
                _shown(
                    member,
                    unit.described.ops[-1],
                    unit.described.module,
                    bytes_saved=share,
                    bytes_on_host=there,
                    packed=_said(unit),
                    with_=unit.source.name if member is not unit.source else None,
                    held=unit.held,
                    pack_before=placed.pack_before[unit.name],
                    unpack_before=tuple(
                        copy.before for copy in placed.unpackings[unit.name] if not multiplied >= {*copy.uses}
                    ),
                )
            )
    return SavedTensors(
        tensors=(*tensors, *map(_kept, kept)),
        order=(placed.forward_order, placed.backward_order),
        forward_peak=placed.forward_peak,
        backward_peak=placed.backward_peak,
        stock_forward_peak=placed.stock_forward_peak,
        stock_backward_peak=placed.stock_backward_peak,
        unpacked_forward_peak=placed.unpacked_forward_peak,
        unpacked_backward_peak=placed.unpacked_backward_peak,
    )


def _said(unit: Unit) -> str:
    value = graphs.tensor(unit.source)
    assert value is not None
    if isinstance(unit.pack, Recompute | SavedHook):
        return str(unit.pack)
    order = graphs.memory_order(value)
    done = packs.said(unit.pack, value if order is None else value.permute(order.dims))
    return done if unit.alone is None else f"{done}; not multiplied, for {unit.alone}"


def _shares(entry: Traced, total: int) -> list[int]:
    """The `total` bytes that are saved for a unit, divided among its members by their sizes."""
    sizes = [graphs.tensor_bytes(value) for node in entry.unit.members if (value := graphs.tensor(node)) is not None]
    shares = [total * size // max(sum(sizes), 1) for size in sizes]
    shares[0] += total - sum(shares)
    return shares
