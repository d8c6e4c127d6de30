"""A memory goal, carried from what the process holds to units and back.

In: a `Partition` and its candidates, the rules, a `Reckoned`.  Out: as of `within_budget`, with a `MemoryPlan`.

    held, optimizer, gradients  +  estimated peaks of both graphs  ->  the peak of the step
    while that is above the goal: the next move by price, those that round what an attention's backward reads last
    no move is left: once more from the start, with what is computed again behind what is packed; the lower peak counts
    no goal: the moves that cost nothing

The second order is for short memory alone: computing a tensor again is the cheaper of two ways, and keeps what it is
computed from; packing both leaves less.

Invariants: what fits is left as it is.  In each order moves are those of a larger goal, and further ones, and the
second is for goals below all that the first reaches; so a smaller goal never has a higher estimated peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multigraph_backend import _compat
from multigraph_backend.saved_tensors import budget, choosing, graphs
from multigraph_backend.saved_tensors.budget import Move
from multigraph_backend.saved_tensors.choosing import Candidate
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.placement import Estimate
from multigraph_backend.saved_tensors.reckoning import MemoryPlan, Reckoned, Way
from multigraph_backend.saved_tensors.rules import Bits, Cast, Offload, Recompute, Rule, Scaled
from multigraph_backend.saved_tensors.tracing import Tracer
from multigraph_backend.saved_tensors.units import Traced
from multigraph_backend.saved_tensors.within_budget import Chosen, Plan, Speed, again, kept_of, moves_of, saved_bytes

UNSEEN = 8  # a part for what no graph says: memory that kernels take for themselves, copies into other layouts
_STEPS = {"int8": 254, "int4": 14}
_ERRORS = {"bfloat16": "2^-8", "float16": "2^-11", "float8_e4m3fn": "2^-4", "float8_e5m2": "2^-3"}


def choose(partition: Partition, candidates: Sequence[Candidate], rules: Sequence[Rule], reckoned: Reckoned) -> Chosen:
    """Which of the `candidates` are packed, and how, so that the step fits what is `reckoned`."""
    everything = choosing.choose(candidates, again(0))
    saved = saved_bytes(everything)
    static, given = _given(partition)
    if reckoned.held is None:
        reckoned = replace(reckoned, held=static + given)
    speed = Speed(reckoned.machine, reckoned.link)
    plan = _WholeStep(Tracer(partition.backward), Estimate(partition, fused=True), speed, reckoned, saved)
    before = plan.peak()
    moves, refused = moves_of(partition, candidates, rules, plan, speed)
    if reckoned.goal is None:
        made = budget.choose([move for move in moves if not move.seconds and not move.lossy], saved, 0, plan)
    else:
        made = budget.choose(moves, saved, saved, plan, reckoned.goal)
    peak = plan.peak()
    if reckoned.goal is not None and peak > reckoned.goal:
        second = plan.anew()
        packed_first = [replace(move, last=isinstance(plan.units[move.way].pack, Recompute)) for move in moves]
        others = budget.choose(packed_first, saved, saved, second, reckoned.goal)
        if (lower := second.peak()) < peak:
            plan, made, peak = second, others, lower
    traced = [plan.made[move.unit] for move in made]
    met = reckoned.goal is None or peak <= reckoned.goal
    why_not = "it would take time" if reckoned.goal is None else "the goal is met without it"
    for unit in everything.units:
        refused.setdefault(unit.source, why_not if met else "nothing lowers it")
    rows = _rows(partition)
    told = MemoryPlan(
        goal=reckoned.goal,
        held=reckoned.held or 0,
        optimizer=reckoned.optimizer,
        optimizer_by=reckoned.optimizer_by,
        gradients=reckoned.gradients,
        elsewhere=reckoned.elsewhere,
        calls=reckoned.calls,
        peak_without=before,
        peak=peak,
        saved_without=saved,
        saved=saved - sum(move.saves for move in made),
        ways=_ways(made, traced),
        rows=rows,
        fit=reckoned.rows_that_fit(peak, given, rows),
        offloads=_offloads(partition, rules),
    )
    return Chosen(traced, kept_of(partition, everything, traced, refused), memory=told)


class _WholeStep(Plan):
    """A plan whose peak is that of the step."""

    def __init__(self, tracer: Tracer, estimate: Estimate, speed: Speed, reckoned: Reckoned, saved: int) -> None:
        super().__init__(tracer, estimate, speed)
        self._reckoned, self._saved = reckoned, saved

    def anew(self) -> _WholeStep:
        """The same units with no move made."""
        assert self.speed is not None
        made = _WholeStep(self.tracer, self.estimate, self.speed, self._reckoned, self._saved)
        made.units = self.units
        return made

    def peak(self) -> int:
        less = sum(entry.unit.described.bytes - entry.saved_bytes for entry in self.made.values())
        forward, backward = (count + count // UNSEEN for count in self.peaks())
        return self._reckoned.whole(forward, backward, self._saved - less)


def _given(partition: Partition) -> tuple[int, int]:
    """Bytes of parameters and buffers of the graph, and of its other inputs."""
    parameters = frozenset(partition.static)
    found = [0, 0]
    for index, node in enumerate(partition.forward.graph.find_nodes(op="placeholder")):
        value = graphs.tensor(node)
        found[index not in parameters] += 0 if value is None else graphs.tensor_bytes(value)
    return found[0], found[1]


def _rows(partition: Partition) -> int:
    """The first size of the largest input that is no parameter: the batch, mostly."""
    parameters = frozenset(partition.static)
    values = [
        value
        for index, node in enumerate(partition.forward.graph.find_nodes(op="placeholder"))
        if index not in parameters and (value := graphs.tensor(node)) is not None and value.dim()
    ]
    largest = max(values, key=graphs.tensor_bytes, default=None)
    return 0 if largest is None else _compat.hint(largest.shape[0], 0)


def _offloads(partition: Partition, rules: Sequence[Rule]) -> bool:
    """Whether what can be offloaded may be."""
    on_gpu = any(value.is_cuda for node in partition.saved_tensors() if (value := graphs.tensor(node)) is not None)
    return not on_gpu or any(isinstance(rule.pack, Offload) for rule in rules)


def _ways(made: Sequence[Move], traced: Sequence[Traced]) -> tuple[Way, ...]:
    """One for each kind of pack, the cheapest first."""
    found: dict[str, Way] = {}
    for move, entry in zip(made, traced, strict=True):
        pack, before = entry.unit.pack, entry.unit.described.bytes
        way = found.get(str(pack)) or Way(str(pack), 0, 0, 0, 0.0, _error(pack))
        found[way.name] = replace(
            way,
            tensors=way.tensors + 1,
            bytes=way.bytes + before,
            bytes_saved=way.bytes_saved + before - move.saves,
            seconds=way.seconds + move.seconds,
        )
    return tuple(found.values())


def _error(pack: object) -> str:
    """Of each element, at the most."""
    if isinstance(pack, Offload) and pack.pack is not None:
        return _error(pack.pack)
    if isinstance(pack, Bits | Offload):
        return "none"
    if isinstance(pack, Recompute):
        return "none but the compiler's rounding"
    if isinstance(pack, Cast) and pack.dtype in _ERRORS:
        return f"{_ERRORS[pack.dtype]} of its value"
    if isinstance(pack, Scaled) and (steps := _STEPS.get(pack.dtype)) is not None:
        return f"1/{steps} of the largest in its {'row' if pack.per == 'row' else 'block'}"
    if isinstance(pack, Scaled) and pack.dtype in _ERRORS:
        return f"{_ERRORS[pack.dtype]} of its value"
    return "that of the pack"
