"""Where packs go in forward and unpacks in backward, by estimated peak.

In: both programs as they are, and for each unit its pack and unpack as fragments.  Out: a `Placement`, and the peaks of
the order that was chosen and of stock's (all packs at the end of forward, all unpacks at the start of backward).

A pack goes right after the last step that computes with the buffer; a view of it does not count, what is done with the
view does.  An unpack goes right before the first such step; one that costs little is done again for uses far apart.

Invariant: the peak of the chosen order is not above that of stock's order.  Pure: names, positions and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step, inserted, peak

FAR = 8  # steps between two uses from which on unpacking twice is tried

Order = Literal["placed", "placed, repeated", "stock"]


@dataclass(frozen=True)
class Packing:
    """One unit: its `source` step and `memory` in forward, its `members` (placeholders) in backward.

    `pack` takes the memory, `unpack` what `pack` gives; the outputs of `unpack` stand for the members, in order.
    """

    name: str
    source: str
    memory: str
    members: tuple[str, ...]
    pack: Fragment
    unpack: Fragment
    cheap: bool = False


@dataclass(frozen=True)
class Unpacking:
    """One copy of an unpack: before the step `before`, for the steps `uses`."""

    before: str
    uses: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """For each packing the step before which it is packed, and its unpackings; how they were found."""

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


_Packs = dict[str, int]
_Unpacks = dict[str, list[tuple[int, list[int]]]]


def place(
    forward: Program,
    backward: Program,
    packings: Sequence[Packing],
    returned: frozenset[str],
    dead_views: frozenset[str] = frozenset(),
) -> Placement:
    """Choose positions for `packings`.

    `returned`: buffers that forward still returns when all members are gone; `dead_views`: its steps that nobody needs
    then.
    """
    end = len(forward.steps) - 1  # the step that returns
    placed_packs = {packing.name: _after_last_use(forward, packing) for packing in packings}
    stock_packs = {packing.name: end for packing in packings}

    def forward_peak(packs: _Packs) -> int:
        return peak(packed_forward(forward, packings, packs, returned, dead_views))

    stock_forward, placed_forward = forward_peak(stock_packs), forward_peak(placed_packs)
    packs = placed_packs if placed_forward <= stock_forward else stock_packs

    candidates: dict[Order, _Unpacks] = {
        "placed": {packing.name: _clusters(backward, packing, False) for packing in packings},
        "placed, repeated": {packing.name: _clusters(backward, packing, packing.cheap) for packing in packings},
        "stock": {packing.name: [(0, _uses(backward, packing))] for packing in packings},
    }
    peaks = {order: peak(packed_backward(backward, packings, unpacks)) for order, unpacks in candidates.items()}
    best = min(peaks, key=lambda order: peaks[order])  # the first of equals
    name: Callable[[int], str] = lambda index: backward.steps[index].name  # noqa: E731
    return Placement(
        pack_before={unit: forward.steps[index].name for unit, index in packs.items()},
        unpackings={
            unit: tuple(Unpacking(name(at), tuple(map(name, uses))) for at, uses in copies)
            for unit, copies in candidates[best].items()
        },
        forward_order="placed" if packs is placed_packs else "stock",
        backward_order=best,
        forward_peak=min(placed_forward, stock_forward),
        backward_peak=peaks[best],
        stock_forward_peak=stock_forward,
        stock_backward_peak=peaks["stock"],
        unpacked_forward_peak=peak(forward),
        unpacked_backward_peak=peak(backward),
    )


def packed_forward(
    forward: Program,
    packings: Sequence[Packing],
    packs: Mapping[str, int],
    returned: frozenset[str],
    dead_views: frozenset[str] = frozenset(),
) -> Program:
    """`forward` with each pack before the position that `packs` gives."""
    before: dict[int, list[Step]] = {}
    sizes: dict[str, int] = {}
    saved: set[str] = set()
    for packing in packings:
        steps, made, outputs = packing.pack.placed(f"{packing.name}.pack.", [packing.memory])
        before.setdefault(packs[packing.name], []).extend(steps)
        sizes.update(made)
        saved.update(outputs)
    results = returned | saved
    last = replace(forward.steps[-1], reads=frozenset(results))
    whole = inserted(replace(forward, steps=(*forward.steps[:-1], last)), before, sizes)
    steps = [step for step in whole.steps if step.name not in dead_views]
    return replace(whole, steps=tuple(steps), results=results)


def packed_backward(backward: Program, packings: Sequence[Packing], unpacks: _Unpacks) -> Program:
    """`backward` with what is saved in place of the members, and each unpack before the positions that it is given."""
    before: dict[int, list[Step]] = {}
    sizes: dict[str, int] = {}
    given = set(backward.given)
    gone = {member for packing in packings for member in packing.members}
    reads = [set(step.reads) - gone for step in backward.steps]
    for packing in packings:
        saved = [f"{packing.name}.saved.{index}" for index in range(len(packing.pack.outputs))]
        held = set(packing.members) & backward.held
        given -= set(packing.members)
        if not held:
            given |= set(saved)
        known = {**packing.pack.sizes, **backward.sizes}
        sizes.update({name: known.get(output, 0) for name, output in zip(saved, packing.pack.outputs, strict=True)})
        for copy, (at, uses) in enumerate(unpacks[packing.name]):
            steps, made, outputs = packing.unpack.placed(
                f"{packing.name}.unpack{copy or ''}.", saved[: len(packing.unpack.inputs)]
            )
            before.setdefault(at, []).extend(steps)
            sizes.update(made)
            for use in uses:
                for member, output in zip(packing.members, outputs, strict=True):
                    if member in backward.steps[use].reads:
                        reads[use].add(output)
    kept = [replace(step, reads=frozenset(read)) for step, read in zip(backward.steps, reads, strict=True)]
    whole = inserted(replace(backward, steps=tuple(kept), given=frozenset(given)), before, sizes)
    rewound = [step for step in whole.steps if not (step.view and not step.reads)]
    results = (backward.results - gone) | kept[-1].reads
    return replace(whole, steps=tuple(rewound), results=results, same=_without(backward.same, gone))


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
