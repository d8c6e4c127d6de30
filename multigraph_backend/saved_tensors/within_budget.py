"""A budget of saved bytes, carried from its moves to units and back.

In: a `Partition` and its candidates, the user's rules, a `Budget`.  Out: the units that are packed, traced, and the
tensors that are kept with the reason; what it comes to, for the report.

What may be done with a saved tensor: compute it again, always; pack or offload it as any rule says that matches it;
nothing, where a `Keep` comes first.  Only what is saved for the backward alone counts: parameters, inputs and outputs
of the graph are there anyway.

Invariant: a tensor that another one is computed from is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from multigraph_backend.saved_tensors import budget, choosing, costs, graphs, rematerialize
from multigraph_backend.saved_tensors.budget import Budget, Move
from multigraph_backend.saved_tensors.choosing import Candidate, Choice
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.offload import transfers
from multigraph_backend.saved_tensors.placement import Estimate
from multigraph_backend.saved_tensors.reckoning import MemoryPlan
from multigraph_backend.saved_tensors.rules import Keep, Match, Recompute, Role, Rule
from multigraph_backend.saved_tensors.tracing import Tracer
from multigraph_backend.saved_tensors.units import CannotPack, Kept, Traced, Unit

SAVED_ALONE: tuple[Role, ...] = ("intermediate", "statistic", "mask")  # for the backward, and for nobody else
COMPARED = "the backward asks which of its elements are 0, as that of ReLU does, and rounding changes that"
HIDDEN = 0.1  # what a second of copying costs while there is enough to compute beside it


@dataclass(frozen=True)
class Chosen:
    """`said`: the budget and what became of it, in words; `memory`: the same of a memory goal."""

    traced: list[Traced]
    kept: list[Kept]
    said: str | None = None
    memory: MemoryPlan | None = None


def choose(partition: Partition, candidates: Sequence[Candidate], rules: Sequence[Rule], wanted: Budget) -> Chosen:
    """Which of the `candidates` are packed, and how, so that what is saved fits `wanted`."""
    everything = choosing.choose(candidates, again(0))
    saved = saved_bytes(everything)
    goal = wanted.goal(saved)
    plan = Plan(Tracer(partition.backward), Estimate(partition))
    moves, refused = moves_of(partition, candidates, rules, plan)
    made = budget.choose(moves, saved, goal, plan)
    left = saved - sum(move.saves for move in made)
    traced_units = [plan.made[move.unit] for move in made]
    met = left <= goal
    for unit in everything.units:
        refused.setdefault(unit.source, "the budget is met without it" if met else "nothing lowers it")
    said = f"budget {wanted}: {goal} of {saved} bytes; {left} are saved"
    kept = kept_of(partition, everything, traced_units, refused)
    return Chosen(traced_units, kept, said if met else f"{said}, and nothing more can be done")


def moves_of(
    partition: Partition,
    candidates: Sequence[Candidate],
    rules: Sequence[Rule],
    plan: Plan,
    speed: Speed | None = None,
) -> tuple[list[Move], dict[Node, str]]:
    """What can be done, with its price, as moves on `plan`; what cannot, by the sources of units, and why.

    `speed`: of the device, where it was measured; then what costs nothing has no price, and what rounds what an
    attention's backward reads is to come last.
    """
    refused: dict[Node, str] = {}
    machine = None if speed is None else speed.machine
    seconds = sum(costs.seconds_of(partition.forward.graph, machine).values())
    moves: list[Move] = []
    for unit in _ways(candidates, rules):
        if speed is not None and not unit.exact and plan.tracer.compared(unit):
            refused[unit.source] = COMPARED
            continue
        try:
            traced = plan.tracer.trace(unit)
        except CannotPack as reason:
            refused[unit.source] = str(reason)
            continue
        spent = _seconds(traced, speed)
        if traced.host_bytes:
            hidden = min(spent, max(seconds, 0.0))
            seconds -= hidden
            spent = hidden * HIDDEN + (spent - hidden)
        plan.units.append(unit)
        last = speed is not None and not unit.exact and bool(plan.tracer.into_attention(unit))
        saves = unit.described.bytes - traced.saved_bytes
        moves.append(Move(unit.name, len(plan.units) - 1, saves, spent, not unit.exact, last))
    return moves, refused


def kept_of(
    partition: Partition, everything: Choice, made: Sequence[Traced], reasons: Mapping[Node, str]
) -> list[Kept]:
    """The saved tensors that are in none of the units `made`; `reasons`: by the sources of units."""
    packed = {member for entry in made for member in entry.unit.members}
    needed = {node.name for entry in made for node in entry.computed_from}
    units = {member: unit for unit in everything.units for member in unit.members}
    others = {entry.node: entry for entry in everything.kept}
    kept = []
    for node in partition.saved_tensors():
        if node in units and node not in packed:
            unit = units[node]
            reason = "others are computed from it" if node.name in needed else reasons[unit.source]
            kept.append(Kept(node, unit.described, reason))
        elif node in others and node not in packed:
            kept.append(others[node])
    return kept


@dataclass(frozen=True)
class Speed:
    """Of a device, measured; `link`: bytes a second to the host and back, 0 where it was not."""

    machine: costs.Machine
    link: float = 0.0


class Plan:
    """See `budget.Plan`."""

    def __init__(self, tracer: Tracer, estimate: Estimate, speed: Speed | None = None) -> None:
        self.tracer, self.estimate, self.speed = tracer, estimate, speed
        self.units: list[Unit] = []
        self.made: dict[str, Traced] = {}

    def make(self, move: Move) -> bool:
        unit = self.units[move.way]
        needed = {node.name for entry in self.made.values() for node in entry.computed_from}
        if any(member.name in needed for member in unit.members):
            return False
        taken = {member.name for entry in self.made.values() for member in entry.unit.members}
        try:
            traced = self.tracer.trace(unit, taken)
        except CannotPack:
            return False
        # further up there may be more to compute than was priced
        if isinstance(unit.pack, Recompute) and _seconds(traced, self.speed) > 2 * max(move.seconds, 1e-9):
            return False
        self.made[move.unit] = traced
        return True

    def undo(self, move: Move) -> None:
        del self.made[move.unit]

    def peak(self) -> int:
        return max(self.peaks())

    def peaks(self) -> tuple[int, int]:
        """Of the forward and of the backward."""
        placed = self.estimate.place(list(self.made.values()))
        return placed.forward_peak, placed.backward_peak


def _ways(candidates: Sequence[Candidate], rules: Sequence[Rule]) -> list[Unit]:
    """Each unit in each way that is allowed."""
    keeps: list[Rule] = []
    found: list[Unit] = []
    for rule in rules:
        if isinstance(rule.pack, Keep):
            keeps.append(rule)
        else:
            found += _intermediates(choosing.choose(candidates, [*keeps, rule]))
    return found + _intermediates(choosing.choose(candidates, [*keeps, *again(None)]))


def again(min_bytes: int | None) -> list[Rule]:
    """Computing again rounds nothing: statistics and masks too."""
    return [Rule(Match(min_bytes=min_bytes, role=role), Recompute()) for role in SAVED_ALONE]


def _intermediates(choice: Choice) -> list[Unit]:
    return [unit for unit in choice.units if unit.described.role in SAVED_ALONE]


def saved_bytes(choice: Choice) -> int:
    """Of what is saved for the backward alone."""
    total = sum(unit.described.bytes for unit in choice.units if unit.described.role in SAVED_ALONE)
    memories: dict[Node, int] = {}
    for entry in choice.kept:
        value = graphs.tensor(entry.node)
        if entry.described.role in SAVED_ALONE and value is not None:
            memories[graphs.root(entry.node)] = graphs.tensor_bytes(value)
    return total + sum(memories.values())


def _seconds(traced: Traced, speed: Speed | None = None) -> float:
    """Estimated time that a pack and its unpack take in a step."""
    unit, value = traced.unit, graphs.tensor(traced.unit.source)
    assert value is not None
    if isinstance(unit.pack, Recompute):
        if speed is None:
            return rematerialize.seconds(traced)
        return 0.0 if rematerialize.costs_nothing(traced) else rematerialize.seconds(traced, speed.machine)
    copying = 0.0
    if traced.host_bytes:
        measured = 0.0 if speed is None else speed.link
        copying = traced.host_bytes / (measured or min(transfers.of(value.device).stream.bytes_per_second()))
        if traced.host_bytes >= unit.described.bytes:  # as it is
            return copying
    machine = costs.machine_of(value.device) if speed is None else speed.machine
    packed = traced.saved_bytes + traced.host_bytes
    return copying + 2 * (unit.described.bytes + packed) / machine.bytes_per_second
