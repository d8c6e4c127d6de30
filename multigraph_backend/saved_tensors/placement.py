"""Where packs go in forward and unpacks in backward, by estimated peak.

Four layers, each of which saves its result (4 bytes), packed to 1 byte.  Bytes alive while each step runs:

    forward, not packed      h1 4    h2 8    h3 12    h4 16    return 16
    packed in stock's order  h1 4    h2 8    h3 12    h4 16    pack h1 17    pack h2 14    pack h3 11    pack h4 8
    placed                   h1 4    h2 8    pack h1 9    h3 9    pack h2 10    h4 10    pack h3 11    pack h4 8

    backward, not packed     g4 17    g3 14    g2 10    g1 6
    packed in stock's order  unpack h1 8    unpack h2 11    unpack h3 14    unpack h4 17    g4 17    g3 14    g2 10 ...
    placed                   unpack h4 8    g4 8    unpack h3 8    g3 8    unpack h2 7    g2 7    unpack h1 6    g1 6

While a pack runs, the buffer and what is saved in its place are both alive; so packing in the wrong place, as in
stock's order, makes the peak higher (17) than not packing (16), and in the right place lowers it (11).

A pack goes right after the last step that computes with the buffer: h1 is read by h2.  A view of it does not count,
what is done with the view does.  An unpack goes right before the first such step; one that costs little is done again
for uses far apart.  An offloaded tensor stays in forward until its copy is waited for, and in backward is there from
where its copy is prefetched; `windows` says where that is.

In: a `Partition` and traced units; of these, both graphs as programs, packs and unpacks as fragments.  Out: a
`Placement`, with the peaks of the order that was chosen and of stock's (all packs at the end of forward, all unpacks at
the start of backward).

Invariant: the estimated peak of the chosen order is not above that of stock's order.  `place` is pure, over names,
positions and sizes; `Estimate` reads the graphs for it, and changes nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Graph, Node

from multigraph_backend.saved_tensors import choosing, costs, graphs
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step, inserted, live_bytes, peak
from multigraph_backend.saved_tensors.offload import transfers, windows
from multigraph_backend.saved_tensors.rules import Offload, Recompute
from multigraph_backend.saved_tensors.units import Traced

FAR = 8  # steps between two uses from which on unpacking twice is tried

WORTH = 1.01  # by how much repeating unpacks has to lower the peak

Order = Literal["placed", "placed, repeated", "stock"]


@dataclass(frozen=True)
class Packing:
    """One unit: its `source` step and `memory` in forward, its `members` (placeholders) in backward.

    `pack` takes the memory, `unpack` what `pack` gives; the outputs of `unpack` stand for the members, in order.
    `transfer`: that the pack is an offload, and how its copies run; `copied`: buffers of `pack` that are copied to the
    host, its input where it is offloaded as it is; `brought_back`: those of `unpack` into which they come back.
    `computed_from`: buffers of the backward that
    `unpack` takes besides, as its last inputs.  `floating`: the compiler finds a place for the pack, which is to stand
    at the end; peaks are estimated as if it were behind the last use.
    """

    name: str
    source: str
    memory: str
    members: tuple[str, ...]
    pack: Fragment
    unpack: Fragment
    computed_from: tuple[str, ...] = ()
    cheap: bool = False
    transfer: Transfer | None = None
    copied: tuple[str, ...] = ()
    brought_back: tuple[str, ...] = ()
    floating: bool = False

    def copied_in(self, forward: Program) -> dict[str, int]:
        """The buffers that are copied to the host, by their names and bytes in `forward` with the pack in it."""
        found = {}
        for name in self.copied:
            if name in self.pack.inputs:
                found[self.memory] = forward.sizes[self.memory]
            else:
                found[f"{self.name}.pack.{name}"] = self.pack.sizes[name]
        return found

    @property
    def bytes_back(self) -> int:
        """What comes back from the host."""
        return sum(self.unpack.sizes[name] for name in self.brought_back)


@dataclass(frozen=True)
class Transfer:
    """See `rules.Offload`; `out`, `back`: the seconds that the copies to the host and from it take."""

    waiting: int
    ahead: int
    out: float
    back: float


@dataclass(frozen=True)
class Unpacking:
    """One copy of an unpack: before the step `before`, for the steps `uses`."""

    before: str
    uses: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """For each packing the step before which it is packed, and its unpackings; how they were found.

    `offloads`, `reloads`: the packings that are transfers, in the order in which they leave and come back.  `waits`:
    steps of the forward, and those whose copies are waited for before each, so that their memory is free from there on;
    the others stay to its end.  `prefetches`: steps of the backward, and those whose copies begin before each; the
    copies of the others begin with the reload.
    """

    pack_before: Mapping[str, str]
    unpackings: Mapping[str, tuple[Unpacking, ...]]
    forward_order: Order
    backward_order: Order
    forward_peak: int
    backward_peak: int
    stock_forward_peak: int
    stock_backward_peak: int
    unpacked_forward_peak: int
    unpacked_backward_peak: int
    offloads: tuple[str, ...] = ()
    reloads: tuple[str, ...] = ()
    waits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    prefetches: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def after(self, first: Placement) -> Placement:
        """Both, where this one is of the programs that `first` left."""
        return replace(
            self,
            pack_before={**first.pack_before, **self.pack_before},
            unpackings={**first.unpackings, **self.unpackings},
            unpacked_forward_peak=first.unpacked_forward_peak,
            unpacked_backward_peak=first.unpacked_backward_peak,
        )


_Packs = dict[str, int]
_Unpacks = dict[str, list[tuple[int, list[int]]]]


def place(
    forward: Program,
    backward: Program,
    packings: Sequence[Packing],
    returned: frozenset[str],
    dead_views: frozenset[str] = frozenset(),
    seconds: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> Placement:
    """Choose positions for `packings`.

    `returned`: buffers that forward still returns when all members are gone; `dead_views`: its steps that nobody needs
    then; `seconds`: estimated times of steps, of the forward and of the backward, by which copies are prefetched and
    waited for.
    """
    end = len(forward.steps) - 1  # the step that returns
    forward_times, times = _times(forward, seconds[0]), _times(backward, seconds[1])
    placed_packs = {packing.name: _after_last_use(forward, packing) for packing in packings}
    stock_packs = {packing.name: end for packing in packings}

    def with_packs(packs: _Packs, waits: _Packs) -> Program:
        return packed_forward(forward, packings, packs, returned, dead_views, waits)

    waits, arrived = _waits(packings, placed_packs, forward_times, end)
    placed, stock = with_packs(placed_packs, waits), with_packs(stock_packs, {})
    stock_forward, placed_forward = peak(stock), peak(placed)
    packs = placed_packs if placed_forward <= stock_forward else stock_packs
    offloads = _in_order(packings, packs)
    if offloads and packs is placed_packs:
        ends = [waits[packing.name] for packing in offloads]
        sizes = [sum(packing.copied_in(forward).values()) for packing in offloads]
        waits = _named(offloads, windows.later(_room(forward, placed), ends, arrived, sizes))

    candidates: dict[Order, _Unpacks] = {
        "placed": {packing.name: _clusters(backward, packing, False) for packing in packings},
        "placed, repeated": {packing.name: _clusters(backward, packing, packing.cheap) for packing in packings},
        "stock": {packing.name: [(0, _uses(backward, packing))] for packing in packings},
    }
    plans = {order: _Reloads(backward, packings, unpacks, times) for order, unpacks in candidates.items()}
    # an unpack that is done again has to lower the peak by more than next to nothing
    enough = {"placed, repeated": WORTH}
    best = min(plans, key=lambda order: plans[order].peak * enough.get(order, 1.0))  # the first of equals
    plan = plans[best]
    floating = {packing.name for packing in packings if packing.floating}
    name: Callable[[int], str] = lambda index: backward.steps[index].name  # noqa: E731
    return Placement(
        pack_before={unit: forward.steps[end if unit in floating else at].name for unit, at in packs.items()},
        unpackings={
            unit: tuple(Unpacking(name(at), tuple(map(name, uses))) for at, uses in copies)
            for unit, copies in plan.unpacks.items()
        },
        forward_order="placed" if packs is placed_packs else "stock",
        backward_order=best,
        forward_peak=min(placed_forward, stock_forward),
        backward_peak=plan.peak,
        stock_forward_peak=stock_forward,
        stock_backward_peak=plans["stock"].peak,
        unpacked_forward_peak=peak(forward),
        unpacked_backward_peak=peak(backward),
        offloads=tuple(packing.name for packing in offloads),
        reloads=tuple(packing.name for packing in plan.order),
        waits=_by_step(forward, {} if packs is stock_packs else {n: at for n, at in waits.items() if at < end}),
        prefetches=_by_step(backward, plan.prefetches()),
    )


def _waits(
    packings: Sequence[Packing], packs: _Packs, times: Sequence[float], end: int
) -> tuple[dict[str, int], list[int]]:
    """Where the copy of each offloaded tensor is waited for at the soonest, by name; where it has arrived, in order."""
    order = _in_order(packings, packs)
    leaving = [packs[packing.name] for packing in order]
    transfers = [packing.transfer for packing in order if packing.transfer is not None]
    arrived = [min(at, end) for at in windows.arrivals(leaving, [entry.out for entry in transfers], times)]
    ends = windows.waits(leaving, [entry.waiting for entry in transfers], end)
    return _named(order, ends), arrived


class _Reloads:
    """When what is offloaded comes back, in one order of unpacks: where it is needed, where it is prefetched."""

    def __init__(
        self, backward: Program, packings: Sequence[Packing], unpacks: _Unpacks, times: Sequence[float]
    ) -> None:
        self._backward, self._packings, self._times = backward, packings, times
        self.unpacks = unpacks
        self.order = _in_order(packings, {unit: copies[0][0] for unit, copies in unpacks.items()})
        self._transfers = [packing.transfer for packing in self.order if packing.transfer is not None]
        self.peak = peak(self._program(unpacks))
        if self.order:
            needed = windows.together([unpacks[packing.name][0][0] for packing in self.order], times)
            nearer = {**unpacks, **{
                packing.name: [(at, unpacks[packing.name][0][1])]
                for packing, at in zip(self.order, needed, strict=True)
            }}  # fmt: skip
            if (found := peak(self._program(nearer))) <= self.peak:
                self.unpacks, self.peak = nearer, found

    def prefetches(self) -> dict[str, int]:
        """Where copies begin that begin before they are needed."""
        if not self.order:
            return {}
        needed, departing, starts = self._starts(self.unpacks)
        room = _room(self._backward, self._program(self.unpacks))
        sizes = [packing.bytes_back for packing in self.order]
        found = windows.earlier(room, starts, departing, sizes)
        return {
            packing.name: at for packing, at, by in zip(self.order, found, needed, strict=True) if at < by
        }  # fmt: skip

    def _starts(self, unpacks: _Unpacks) -> tuple[list[int], list[int], list[int]]:
        needed = [unpacks[packing.name][0][0] for packing in self.order]
        departing = windows.departures(needed, [entry.back for entry in self._transfers], self._times)
        return needed, departing, windows.prefetches(needed, departing, [entry.ahead for entry in self._transfers])

    def _program(self, unpacks: _Unpacks) -> Program:
        return packed_backward(self._backward, self._packings, unpacks, _named(self.order, self._starts(unpacks)[2]))


def packed_forward(
    forward: Program,
    packings: Sequence[Packing],
    packs: Mapping[str, int],
    returned: frozenset[str],
    dead_views: frozenset[str] = frozenset(),
    waits: Mapping[str, int] | None = None,
) -> Program:
    """`forward` with each pack before the position that `packs` gives.

    `waits`: before which positions copies are waited for, and what they are of is needed no more; at the end, where it
    says nothing.
    """
    before: dict[int, list[Step]] = {}
    sizes: dict[str, int] = {}
    saved: set[str] = set()
    end = len(forward.steps) - 1
    last: set[str] = set()
    waiting: dict[int, list[Step]] = {}
    for packing in packings:
        steps, made, outputs = packing.pack.placed(f"{packing.name}.pack.", [packing.memory])
        before.setdefault(packs[packing.name], []).extend(steps)
        sizes.update(made)
        saved.update(outputs)
        if packing.transfer is not None and (at := (waits or {}).get(packing.name, end)) < end:
            waiting.setdefault(at, []).append(Step(f"{packing.name}.wait", frozenset(packing.copied_in(forward))))
        elif packing.transfer is not None:
            last.update(packing.copied_in(forward))
    for at, steps in waiting.items():  # behind the packs that are there
        before.setdefault(at, []).extend(steps)
    results = returned | saved
    returning = replace(forward.steps[-1], reads=frozenset(results | last))
    whole = inserted(replace(forward, steps=(*forward.steps[:-1], returning)), before, sizes)
    steps = [step for step in whole.steps if step.name not in dead_views]
    return replace(whole, steps=tuple(steps), results=results)


def packed_backward(
    backward: Program, packings: Sequence[Packing], unpacks: _Unpacks, prefetches: Mapping[str, int] | None = None
) -> Program:
    """`backward` with what is saved in place of the members, and each unpack before the positions that it is given.

    `prefetches`: before which positions copies begin; where it says nothing, that is where they are needed.
    """
    before: dict[int, list[Step]] = {}
    sizes: dict[str, int] = {}
    given = set(backward.given)
    gone = {member for packing in packings for member in packing.members}
    reads = [set(step.reads) - gone for step in backward.steps]
    early: dict[int, list[Step]] = {}
    for packing in packings:
        saved = [f"{packing.name}.saved.{index}" for index in range(len(packing.pack.outputs))]
        held = set(packing.members) & backward.held
        given -= set(packing.members)
        if not held:
            given |= set(saved)
        known = {**backward.sizes, **packing.pack.sizes}
        sizes.update({name: known.get(output, 0) for name, output in zip(saved, packing.pack.outputs, strict=True)})
        for copy, (at, uses) in enumerate(unpacks[packing.name]):
            own = saved[: len(packing.unpack.inputs) - len(packing.computed_from)]
            prefix = f"{packing.name}.unpack{copy or ''}."
            steps, made, outputs = packing.unpack.placed(prefix, [*own, *packing.computed_from])
            if packing.transfer is not None and (begin := (prefetches or {}).get(packing.name, at)) < at:
                makes = tuple(f"{prefix}{name}" for name in packing.brought_back)
                early.setdefault(begin, []).append(Step(f"{packing.name}.prefetch", makes=makes))
            before.setdefault(at, []).extend(steps)
            sizes.update(made)
            for use in uses:
                for member, output in zip(packing.members, outputs, strict=True):
                    if member in backward.steps[use].reads:
                        reads[use].add(output)
    for at, steps in early.items():
        before.setdefault(at, []).extend(steps)
    own_steps = [replace(step, reads=frozenset(read)) for step, read in zip(backward.steps, reads, strict=True)]
    whole = inserted(replace(backward, steps=tuple(own_steps), given=frozenset(given)), before, sizes)
    results = (backward.results - gone) | own_steps[-1].reads
    needed = [step for step in whole.steps if not (step.view and not step.reads)]  # views of members are made again
    return replace(whole, steps=tuple(needed), results=results, same=_without(backward.same, gone))


def _in_order(packings: Sequence[Packing], positions: Mapping[str, int]) -> list[Packing]:
    """Those that are transfers, in the order of their positions."""
    found = [packing for packing in packings if packing.transfer is not None]
    return sorted(found, key=lambda packing: positions[packing.name])


def _named(order: Sequence[Packing], positions: Sequence[int]) -> dict[str, int]:
    return {packing.name: at for packing, at in zip(order, positions, strict=True)}


def _by_step(program: Program, positions: Mapping[str, int]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The names at each position, in order, under the step that is there."""
    found: dict[int, list[str]] = {}
    for name, at in positions.items():
        found.setdefault(at, []).append(name)
    return tuple((program.steps[at].name, tuple(names)) for at, names in sorted(found.items()))


def _room(program: Program, whole: Program) -> list[int]:
    """What could be alive besides at each step of `program` without a higher peak; `whole` has further steps in it."""
    positions = {step.name: index for index, step in enumerate(program.steps)}
    curve = live_bytes(whole)
    most, at = [0] * len(program.steps), len(program.steps) - 1
    for step, alive in zip(reversed(whole.steps), reversed(curve), strict=True):
        at = positions.get(step.name, at)
        most[at] = max(most[at], alive)
    for index in range(len(most) - 1):  # steps that `whole` has no more
        most[index] = most[index] or (most[index - 1] if index else 0)
    return [max(curve) - alive for alive in most]


def _times(program: Program, seconds: Mapping[str, float]) -> list[float]:
    """When each step begins, one after the other."""
    return list(itertools.accumulate((seconds.get(step.name, 0.0) for step in program.steps), initial=0.0))


def _without(same: Mapping[str, str], gone: set[str]) -> dict[str, str]:
    """`same` without the buffers `gone`; where one of them stood for others, the first of these does."""
    stands: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, memory in same.items():
        if name not in gone:
            memory = stands.setdefault(memory, name) if memory in gone else memory
            if memory != name:
                left[name] = memory
    return left


def _uses(backward: Program, packing: Packing) -> list[int]:
    return backward.uses(packing.members)


def _after_last_use(forward: Program, packing: Packing) -> int:
    """The position behind the last step that computes with the memory, and behind the source itself."""
    end = len(forward.steps) - 1
    used = [index for index in forward.uses([packing.memory]) if index != end]
    made = [index for index, step in enumerate(forward.steps) if step.name == packing.source]
    return min(max([*used, *made], default=-1) + 1, end)


def _clusters(backward: Program, packing: Packing, repeat: bool) -> list[tuple[int, list[int]]]:
    """Uses that share one unpack: all of them, or with `repeat` those that are near each other."""
    uses = _uses(backward, packing)
    groups: list[list[int]] = []
    for use in uses:
        if groups and not (repeat and use - groups[-1][-1] > FAR):
            groups[-1].append(use)
        else:
            groups.append([use])
    return [(group[0], group) for group in groups]


# ---------------------------------------------------------------- from graphs to programs


class Estimate:
    """Both graphs as programs.  `reordered`: the compiler changes the order of operations to lower the peak.

    `fused`: see `graphs.program`; for peaks, not for places.
    """

    def __init__(self, partition: Partition, reordered: bool = False, fused: bool = False) -> None:
        forward, backward = partition.forward.graph, partition.backward.graph
        self._partition, self._reordered = partition, reordered
        self._results = graphs.results(forward)
        caller = [node.name for node in forward.find_nodes(op="placeholder")]
        self._forward = graphs.program(forward, caller, fused)
        self._backward = graphs.program(backward, choosing.held(partition), fused)

    def place(self, traced: Sequence[Traced]) -> Placement:
        """The best places for the packs of these units."""
        packings = [_packing(entry, self._reordered) for entry in traced]
        members = {member for entry in traced for member in entry.unit.members}
        returned = [
            value
            for index, value in enumerate(self._results)
            if isinstance(value, Node) and (index < self._partition.outputs or value not in members)
        ]
        still = frozenset(name for value in returned for name in graphs.memory_of(value))
        sources = {entry.unit.source for entry in traced}
        return place(
            self._forward,
            self._backward,
            packings,
            still,
            dead_views=_dead_views(members - sources, set(returned) | sources),
            seconds=self._seconds if any(packing.transfer for packing in packings) else ({}, {}),
        )

    @functools.cached_property
    def _seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        forward, backward = self._partition.forward.graph, self._partition.backward.graph
        return costs.least_seconds_of(forward), costs.least_seconds_of(backward)


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


def _packing(traced: Traced, reordered: bool) -> Packing:
    unit = traced.unit
    packing, unpacking = traced.pack.graph, traced.unpack.graph
    tensors = unpacking.find_nodes(op="placeholder")[: len(traced.saved)]
    if isinstance(unit.pack, Recompute):
        tensors = [node for node in unpacking.find_nodes(op="placeholder") if graphs.tensor(node) is not None]
    return Packing(
        name=unit.name,
        source=unit.source.name,
        memory=graphs.memory_of(unit.source)[0],
        members=tuple(member.name for member in unit.members),
        pack=graphs.fragment(packing, packing.find_nodes(op="placeholder")),
        unpack=graphs.fragment(unpacking, tensors),
        computed_from=tuple(node.name for node in traced.computed_from if graphs.tensor(node) is not None),
        cheap=traced.cheap and not isinstance(unit.pack, Recompute),
        transfer=_transfer(traced),
        copied=graphs.copied(packing),
        brought_back=graphs.brought_back(unpacking),
        floating=reordered and _fused(packing),
    )


def _fused(pack: Graph) -> bool:
    """Whether the compiler can make a pack a part of other kernels: a cast, or scales of rows or blocks."""
    made = [node for node in pack.nodes if node.op == "call_function" and graphs.viewed(node) is None]
    return bool(made) and all(graphs.elementwise(node) or graphs.reduces(node) or graphs.number(node) for node in made)


def _transfer(traced: Traced) -> Transfer | None:
    unit, value, size = traced.unit, graphs.tensor(traced.unit.source), traced.host_bytes
    if not isinstance(unit.pack, Offload) or value is None or not size:
        return None
    out, back = transfers.of(value.device).stream.bytes_per_second()
    return Transfer(unit.pack.waiting, unit.pack.ahead, size / out, size / back)
