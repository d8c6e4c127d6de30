"""Packs go behind the last use and unpacks before the first, where that lowers the peak."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step, live_bytes, peak
from multigraph_backend.saved_tensors.placement import FAR, Packing, Unpacking, packed_backward, packed_forward, place
from tests.support.saved_tensors.layers import BIG, layers

SMALL = 10


def narrowing(name: str) -> Packing:
    """One step that makes SMALL of BIG, and back."""
    return Packing(
        name=name,
        source=name,
        memory=name,
        members=(name,),
        pack=Fragment((Step("q", frozenset({"x"}), ("q",)),), {"x": BIG, "q": SMALL}, ("x",), ("q",)),
        unpack=Fragment((Step("u", frozenset({"q"}), ("u",)),), {"q": SMALL, "u": BIG}, ("q",), ("u",)),
        cheap=True,
    )


def test_the_example_that_opens_the_module() -> None:
    names = ["h1", "h2", "h3", "h4"]
    forward = [Step(name, frozenset({before}), (name,)) for before, name in zip(["x", *names], names, strict=False)]
    gradients = [Step(f"g{at}", frozenset({f"h{at}", f"g{at + 1}"}), (f"g{at}",)) for at in (4, 3, 2, 1)]
    sizes = {**dict.fromkeys(["x", *names], 4), **{f"g{at}": 1 for at in range(1, 5)}, "g5": 0}
    before = Program((*forward, Step("return", frozenset(names))), sizes, held=frozenset({"x"}))
    behind = Program((*gradients, Step("return", frozenset({"g1"}))), sizes, frozenset({*names, "g5"}))
    pack = Fragment((Step("q", frozenset({"x"}), ("q",)),), {"x": 4, "q": 1}, ("x",), ("q",))
    unpack = Fragment((Step("u", frozenset({"q"}), ("u",)),), {"q": 1, "u": 4}, ("q",), ("u",))
    packings = [Packing(name, name, name, (name,), pack, unpack) for name in names]
    placed = place(before, behind, packings, frozenset())
    assert live_bytes(before) == (4, 8, 12, 16, 16)
    assert live_bytes(behind) == (17, 14, 10, 6, 1)
    last = {"h1": 2, "h2": 3, "h3": 4, "h4": 4}
    assert live_bytes(packed_forward(before, packings, dict.fromkeys(names, 4), frozenset()))[4:] == (17, 14, 11, 8, 4)
    assert live_bytes(packed_forward(before, packings, last, frozenset())) == (4, 8, 9, 9, 10, 10, 11, 8, 4)
    assert (placed.unpacked_forward_peak, placed.stock_forward_peak, placed.forward_peak) == (16, 17, 11)
    assert (placed.unpacked_backward_peak, placed.stock_backward_peak, placed.backward_peak) == (17, 17, 8)


def test_the_peak_no_longer_grows_with_the_layers() -> None:
    forward, backward = layers(10)
    packings = [narrowing(f"h{index}") for index in range(10)]
    placed = place(forward, backward, packings, frozenset({"out"}))
    assert placed.pack_before == {f"h{index}": f"h{index + 1}.view" for index in range(9)} | {"h9": "output"}
    assert placed.unpackings["h3"] == (Unpacking("g.h3", ("g.h3",)),)
    assert placed.unpacked_forward_peak >= 10 * BIG
    assert placed.stock_forward_peak >= 10 * BIG
    assert placed.forward_peak <= 3 * BIG + 10 * SMALL
    assert placed.stock_backward_peak >= 10 * BIG
    assert placed.backward_peak <= 4 * BIG + 10 * SMALL


def test_what_a_pack_calls_its_results_is_no_buffer_of_the_backward() -> None:
    _, backward = layers(3)
    packings = [narrowing(f"h{index}") for index in range(3)]
    unpacks = {packing.name: [(0, [0])] for packing in packings}
    once = packed_backward(backward, packings, unpacks)
    theirs = replace(backward, sizes={**backward.sizes, "q": 5 * BIG})
    assert peak(packed_backward(theirs, packings, unpacks)) == peak(once)


def two_uses(apart: int) -> Program:
    """A backward that uses `a` twice, and needs much memory in between."""
    steps = [Step("first", frozenset({"a"}), ("r",))]
    for index in range(apart):
        steps.append(Step(f"t{index}", frozenset(), (f"t{index}",)))
    steps += [Step("second", frozenset({"a", "r"}), ("s",)), Step("output", frozenset({"s"}))]
    sizes = {"a": BIG, "r": 1, "s": 1, **{f"t{index}": 5 * BIG for index in range(apart)}}
    return Program(tuple(steps), sizes, frozenset({"a"}), results=frozenset({"s"}))


@pytest.mark.parametrize(("apart", "copies"), [(FAR - 1, 1), (FAR, 2)])
def test_cheap_unpacks_are_repeated_for_far_uses(apart: int, copies: int) -> None:
    forward = Program((Step("a", frozenset(), ("a",)), Step("output", frozenset({"a"}))), {"a": BIG})
    placed = place(forward, two_uses(apart), [narrowing("a")], frozenset())
    assert len(placed.unpackings["a"]) == copies
    if copies == 2:
        assert placed.backward_order == "placed, repeated"
        assert [copy.uses for copy in placed.unpackings["a"]] == [("first",), ("second",)]
        assert placed.backward_peak < placed.stock_backward_peak


def test_what_is_returned_all_the_same_is_no_reason_to_keep_the_plan() -> None:
    """Nothing is freed early where another result holds the memory: then both orders need the same."""
    forward, backward = layers(3)
    placed = place(forward, backward, [narrowing("h0")], frozenset({"out", "h0", "h1", "h2"}))
    assert placed.forward_peak == placed.stock_forward_peak


def random_programs(seed: int) -> tuple[Program, Program, list[Packing]]:
    """Programs of random steps over random sizes, and packings for what the forward returns."""
    draw = random.Random(seed)
    names: list[str] = []
    steps: list[Step] = []
    sizes: dict[str, int] = {}
    for index in range(draw.randint(3, 14)):
        reads = frozenset(draw.sample(names, min(len(names), draw.randint(0, 3))))
        if reads and draw.random() < 0.3:
            steps.append(Step(f"v{index}", reads, view=True))
        else:
            names.append(f"n{index}")
            steps.append(Step(names[-1], reads, (names[-1],)))
            sizes[names[-1]] = draw.choice([0, 1, BIG, 3 * BIG])
    saved = draw.sample(names, draw.randint(1, len(names)))
    steps.append(Step("output", frozenset(saved)))
    back: list[Step] = []
    for index in range(draw.randint(1, 25)):
        reads = frozenset(draw.sample(saved, draw.randint(0, min(2, len(saved)))))
        back.append(Step(f"b{index}", reads, (f"b{index}",)))
        sizes[f"b{index}"] = draw.choice([0, BIG])
    back.append(Step("all", frozenset(saved), ("end",)))
    back.append(Step("output", frozenset({"end"})))
    sizes["end"] = 1
    forward = Program(tuple(steps), sizes, results=frozenset(saved))
    backward = Program(tuple(back), sizes, frozenset(saved), results=frozenset({"end"}))
    return forward, backward, [narrowing(name) for name in draw.sample(saved, draw.randint(1, len(saved)))]


@pytest.mark.parametrize("seed", range(200))
def test_never_above_stocks_order_and_every_use_is_served_once(seed: int) -> None:
    forward, backward, packings = random_programs(seed)
    names = {packing.name for packing in packings}
    placed = place(forward, backward, packings, frozenset(forward.results - names))
    assert placed.forward_peak <= placed.stock_forward_peak
    assert placed.backward_peak <= placed.stock_backward_peak
    order = {step.name: index for index, step in enumerate(backward.steps)}
    positions = {
        packing.name: [
            (order[copy.before], [order[use] for use in copy.uses]) for copy in placed.unpackings[packing.name]
        ]
        for packing in packings
    }
    assert peak(packed_backward(backward, packings, positions)) == placed.backward_peak
    for packing in packings:
        uses = [use for _, served in positions[packing.name] for use in served]
        assert uses == backward.uses([packing.name])
        assert all(at <= served[0] for at, served in positions[packing.name])
        packed = [step.name for step in forward.steps].index(placed.pack_before[packing.name])
        if placed.forward_order == "placed":
            assert packed > max(use for use in [*forward.uses([packing.name]), -1] if use < len(forward.steps) - 1)
