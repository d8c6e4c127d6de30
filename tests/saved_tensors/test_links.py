"""Which copy waits for which: every tensor let go once and late enough, every reload begun once and early enough."""

from __future__ import annotations

import random

import pytest

from multigraph_backend.saved_tensors import links
from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step, live_bytes
from multigraph_backend.saved_tensors.placement import Packing, Transfer, packed_backward, place
from tests.saved_tensors.test_placement import BIG, layers


def test_each_tensor_is_let_go_when_so_many_more_were_offloaded() -> None:
    assert links.waits([2, 2, 2, 2]) == [[], [], [0], [1], [2, 3]]
    assert links.waits([0, 5, 1]) == [[], [0], [], [1, 2]]
    assert links.waits([]) == [[]]


def test_a_reload_begins_at_the_last_one_from_which_it_arrives_in_time() -> None:
    assert links.starts([0, 10, 20, 30], [1, 1, 1, 1], [2] * 4) == [0, 0, 1, 2]
    assert links.starts([0, 10, 20, 30], [1, 1, 15, 1], [2] * 4) == [0, 0, 0, 2]
    assert links.starts([0, 10, 20, 30], [1, 1, 100, 1], [1] * 4) == [0, 0, 1, 2]  # too late whatever is done
    assert links.starts([0, 10, 20], [1, 1, 1], [0] * 3) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(200))
def test_rules_of_the_order_hold_for_any_times(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    waiting = [draw.randint(0, 4) for _ in range(count)]
    freed = links.waits(waiting)
    assert sorted(index for group in freed for index in group) == list(range(count))
    for at, group in enumerate(freed):
        assert all(index < at for index in group)
        assert all(at >= min(index + waiting[index], count) for index in group)
    needed = sorted(draw.uniform(0, 50) for _ in range(count))
    ahead = [draw.randint(0, 3) for _ in range(count)]
    begun = links.starts(needed, [draw.uniform(0, 10) for _ in range(count)], ahead)
    assert begun == sorted(begun)
    assert all(max(index - ahead[index], 0) <= at <= index for index, at in enumerate(begun))


def offloading(name: str, waiting: int = 1, ahead: int = 1, seconds: float = 0.0) -> Packing:
    return Packing(
        name=name,
        source=name,
        memory=name,
        members=(name,),
        pack=Fragment((Step("out", frozenset({"x"}), ("h",)),), {"x": BIG, "h": 0}, ("x",), ("h",)),
        unpack=Fragment((Step("in", frozenset({"h"}), ("u",)),), {"h": 0, "u": BIG}, ("h",), ("u",)),
        transfer=Transfer(waiting, ahead, seconds),
    )


def test_what_waits_in_forward_and_what_comes_early_in_backward_is_in_the_estimate() -> None:
    forward, backward = layers(10)
    names = [f"h{index}" for index in range(10)]
    peaks = []
    for waiting in (1, 2, 4):
        placed = place(forward, backward, [offloading(name, waiting) for name in names], frozenset({"out"}))
        assert placed.offloads == tuple(names)
        assert placed.reloads == tuple(reversed(names))
        peaks.append(placed.forward_peak)
    assert peaks == sorted(set(peaks))  # the longer they stay, the more there is
    seconds = {step.name: 1.0 for step in backward.steps}
    late = place(forward, backward, [offloading(name) for name in names], frozenset({"out"}), seconds=seconds)
    early = place(
        forward, backward, [offloading(name, ahead=2, seconds=1.5) for name in names], frozenset({"out"}),
        seconds=seconds,
    )  # fmt: skip
    assert late.begun == tuple(range(10))  # copies take no time
    assert early.begun == (0, 0, 0, 1, 2, 3, 4, 5, 6, 7)
    assert early.backward_peak > late.backward_peak


def test_a_reload_that_begins_early_takes_memory_from_there() -> None:
    backward = Program(
        (Step("a", frozenset({"x"})), Step("b", frozenset()), Step("c", frozenset({"y"})), Step("output")),
        {"x": BIG, "y": BIG},
        frozenset({"x", "y"}),
    )
    packings = [offloading("x", seconds=1.5), offloading("y", seconds=1.5)]
    unpacks = {"x": [(0, [0])], "y": [(2, [2])]}
    curve = live_bytes(packed_backward(backward, packings, unpacks, [0.0, 1.0, 2.0, 3.0, 4.0]))
    assert curve == (2 * BIG, 2 * BIG, BIG, BIG, BIG, 0)
    packings = [offloading("x", ahead=0, seconds=1.5), offloading("y", ahead=0, seconds=1.5)]
    curve = live_bytes(packed_backward(backward, packings, unpacks, [0.0, 1.0, 2.0, 3.0, 4.0]))
    assert curve == (BIG, BIG, 0, BIG, BIG, 0)
