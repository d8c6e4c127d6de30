"""Where packs go in forward and unpacks in backward, by estimated peak.

In: both programs as they are, and for each unit its pack and unpack as fragments.  Out: a `Placement`, and the peaks of
the order that was chosen and of stock's (all packs at the end of forward, all unpacks at the start of backward).

An offloaded tensor stays in forward until the copy of it is waited for, and in backward is there from when its copy
begins; `links` says when that is.

A pack goes right after the last step that computes with the buffer; a view of it does not count, what is done with the
view does.  An unpack goes right before the first such step; one that costs little is done again for uses far apart.

Invariant: the estimated peak of the chosen order is not above that of stock's order.  Pure: names, positions and sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from multigraph_backend.saved_tensors import links
from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step, inserted, peak

FAR = 8  # steps between two uses from which on unpacking twice is tried

Order = Literal["placed", "placed, repeated", "stock"]


@dataclass(frozen=True)
class Packing:
    """One unit: its `source` step and `memory` in forward, its `members` (placeholders) in backward.

    `pack` takes the memory, `unpack` what `pack` gives; the outputs of `unpack` stand for the members, in order.
    `transfer`: that the pack is an offload, and how its copies run.  `anchors`: buffers of the backward that `unpack`
    takes besides, as its last inputs.  `floating`: the compiler finds a place for the pack, which is to stand at
    the end; peaks are estimated as if it were behind the last use.
    """

    name: str
    source: str
    memory: str
    members: tuple[str, ...]
    pack: Fragment
    unpack: Fragment
    anchors: tuple[str, ...] = ()
    cheap: bool = False
    transfer: Transfer | None = None
    floating: bool = False


@dataclass(frozen=True)
class Transfer:
    """See `rules.Offload`; `seconds`: what the copy from the host takes."""

    waiting: int
    ahead: int
    seconds: float


@dataclass(frozen=True)
class Unpacking:
    """One copy of an unpack: before the step `before`, for the steps `uses`."""

    before: str
    uses: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """For each packing the step before which it is packed, and its unpackings; how they were found.

    `offloads`, `reloads`: the packings that are transfers, in the order in which they leave and come back; `begun`: for
    each of `reloads` the one at which its copy begins.
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
    begun: tuple[int, ...] = ()


_Packs = dict[str, int]
_Unpacks = dict[str, list[tuple[int, list[int]]]]


def place(
    forward: Program,
    backward: Program,
    packings: Sequence[Packing],
    returned: frozenset[str],
    dead_views: frozenset[str] = frozenset(),
    seconds: Mapping[str, float] | None = None,
) -> Placement:
    """Choose positions for `packings`.

    `returned`: buffers that forward still returns when all members are gone; `dead_views`: its steps that nobody needs
    then; `seconds`: estimated time of steps of the backward.
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
    times = _times(backward, seconds or {})
    peaks = {order: peak(packed_backward(backward, packings, unpacks, times)) for order, unpacks in candidates.items()}
    best = min(peaks, key=lambda order: peaks[order])  # the first of equals
    name: Callable[[int], str] = lambda index: backward.steps[index].name  # noqa: E731
    floating = {packing.name for packing in packings if packing.floating}
    reloads = _in_order(packings, {unit: copies[0][0] for unit, copies in candidates[best].items()})
    return Placement(
        pack_before={unit: forward.steps[end if unit in floating else at].name for unit, at in packs.items()},
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
        offloads=tuple(packing.name for packing in _in_order(packings, packs)),
        reloads=tuple(packing.name for packing in reloads),
        begun=tuple(_begun(reloads, candidates[best], times)),
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
    offloads = _in_order(packings, packs)
    *freed, last = links.waits([packing.transfer.waiting for packing in offloads if packing.transfer is not None])
    kept = dict(zip((packing.name for packing in offloads), freed, strict=True))
    for packing in packings:
        steps, made, outputs = packing.pack.placed(f"{packing.name}.pack.", [packing.memory])
        if earlier := kept.get(packing.name):
            reads = steps[-1].reads | {offloads[index].memory for index in earlier}
            steps[-1] = replace(steps[-1], reads=reads)
        before.setdefault(packs[packing.name], []).extend(steps)
        sizes.update(made)
        saved.update(outputs)
    results = returned | saved
    settled = replace(forward.steps[-1], reads=frozenset(results) | {offloads[index].memory for index in last})
    whole = inserted(replace(forward, steps=(*forward.steps[:-1], settled)), before, sizes)
    steps = [step for step in whole.steps if step.name not in dead_views]
    return replace(whole, steps=tuple(steps), results=results)


def packed_backward(
    backward: Program, packings: Sequence[Packing], unpacks: _Unpacks, times: Sequence[float] = ()
) -> Program:
    """`backward` with what is saved in place of the members, and each unpack before the positions that it is given.

    `times`: when each step begins, for transfers.
    """
    before: dict[int, list[Step]] = {}
    sizes: dict[str, int] = {}
    given = set(backward.given)
    gone = {member for packing in packings for member in packing.members}
    reads = [set(step.reads) - gone for step in backward.steps]
    reloaded: dict[str, list[Step]] = {}
    for packing in packings:
        saved = [f"{packing.name}.saved.{index}" for index in range(len(packing.pack.outputs))]
        held = set(packing.members) & backward.held
        given -= set(packing.members)
        if not held:
            given |= set(saved)
        known = {**packing.pack.sizes, **backward.sizes}
        sizes.update({name: known.get(output, 0) for name, output in zip(saved, packing.pack.outputs, strict=True)})
        for copy, (at, uses) in enumerate(unpacks[packing.name]):
            own = saved[: len(packing.unpack.inputs) - len(packing.anchors)]
            steps, made, outputs = packing.unpack.placed(
                f"{packing.name}.unpack{copy or ''}.", [*own, *packing.anchors]
            )
            if packing.transfer is not None:
                reloaded[packing.name] = steps
            before.setdefault(at, []).extend(steps)
            sizes.update(made)
            for use in uses:
                for member, output in zip(packing.members, outputs, strict=True):
                    if member in backward.steps[use].reads:
                        reads[use].add(output)
    reloads = _in_order(packings, {unit: copies[0][0] for unit, copies in unpacks.items()})
    for packing, index in zip(reloads, _begun(reloads, unpacks, times), strict=True):
        first = reloaded[reloads[index].name][0].name
        makes = next(step.makes for step in reloaded[packing.name] if step.makes)
        for steps in before.values():
            steps[:] = [replace(step, makes=_with(step.makes, makes)) if step.name == first else step for step in steps]
    kept = [replace(step, reads=frozenset(read)) for step, read in zip(backward.steps, reads, strict=True)]
    whole = inserted(replace(backward, steps=tuple(kept), given=frozenset(given)), before, sizes)
    rewound = [step for step in whole.steps if not (step.view and not step.reads)]
    results = (backward.results - gone) | kept[-1].reads
    return replace(whole, steps=tuple(rewound), results=results, same=_without(backward.same, gone))


def _with(makes: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*makes, *more)))


def _in_order(packings: Sequence[Packing], positions: Mapping[str, int]) -> list[Packing]:
    """Those that are transfers, in the order of their positions."""
    found = [packing for packing in packings if packing.transfer is not None]
    return sorted(found, key=lambda packing: positions[packing.name])


def _begun(reloads: Sequence[Packing], unpacks: _Unpacks, times: Sequence[float]) -> list[int]:
    """For each of `reloads`, in order, the one at which its copy begins."""
    transfers = [packing.transfer for packing in reloads if packing.transfer is not None]
    return links.starts(
        [times[unpacks[packing.name][0][0]] for packing in reloads],
        [transfer.seconds for transfer in transfers],
        [transfer.ahead for transfer in transfers],
    )


def _times(backward: Program, seconds: Mapping[str, float]) -> list[float]:
    """When each step begins, one after the other."""
    return list(itertools.accumulate((seconds.get(step.name, 0.0) for step in backward.steps), initial=0.0))


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
