"""When copies run: every copy waited for once and late enough, every copy back begun once and early enough."""

from __future__ import annotations

import random

import pytest

from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step, live_bytes
from multigraph_backend.saved_tensors.offload import windows
from multigraph_backend.saved_tensors.placement import Packing, Transfer, packed_backward, place
from tests.support.saved_tensors.layers import BIG, layers

TIMES = [float(index) for index in range(101)]  # a second for each of 100 steps


def test_copies_run_one_after_the_other() -> None:
    assert windows.arrivals([0, 1, 2], [0.5, 3.0, 3.0], TIMES) == [1, 4, 7]
    assert windows.arrivals([5, 5, 50], [1.0, 1.0, 0.0], TIMES) == [6, 7, 50]
    assert windows.departures([10, 11, 12], [3.0, 3.0, 3.0], TIMES) == [3, 6, 9]
    assert windows.departures([10, 30], [2.5, 100.0], TIMES) == [0, 0]  # too late whatever is done
    assert windows.departures([10, 11], [0.0, 0.0], TIMES) == [10, 11]


def test_the_shortest_windows_are_those_of_the_rule() -> None:
    assert windows.waits([0, 1, 2, 3], [2, 2, 2, 2], 99) == [2, 3, 2, 3]
    assert windows.waits([0, 4], [0, 0], 99) == [4, 4]
    assert windows.prefetches([10, 20, 30], [0, 0, 0], [1, 1, 2]) == [10, 10, 10]
    assert windows.prefetches([10, 20, 30], [9, 19, 29], [2, 2, 2]) == [10, 19, 29]
    assert windows.prefetches([10, 20], [0, 0], [0, 0]) == [10, 20]


def test_windows_grow_where_there_is_room_and_share_their_ends() -> None:
    room = [9, 9, 9, 9, 9, 9, 9, 9, 1, 1]
    assert windows.later(room, [2, 3], [5, 7], [4, 4]) == [7, 7]
    assert windows.later(room, [2, 3], [5, 7], [4, 6]) == [5, 3]  # there is no room for both: the first one first
    assert windows.later(room, [2, 3], [5, 20], [4, 4]) == [8, 8]
    assert windows.later([0] * 10, [2, 3], [5, 7], [4, 4]) == [2, 3]
    assert windows.earlier(room[::-1], [7, 8], [3, 5], [4, 4]) == [3, 3]
    assert windows.earlier(room[::-1], [7, 8], [0, 0], [4, 4]) == [2, 2]
    assert windows.earlier(room[::-1], [7, 8], [3, 5], [6, 6]) == [3, 7]


def test_the_example_that_opens_windows() -> None:
    ends, arrived = windows.waits([0, 1, 2], [1, 1, 1], 10), windows.arrivals([0, 1, 2], [1.5] * 3, TIMES)
    assert (ends, arrived) == ([1, 2, 2], [2, 3, 5])
    found = [windows.later([room] * 10, ends, arrived, [4] * 3) for room in (0, 4, 8, 12)]
    assert found == [[1, 2, 2], [2, 3, 2], [2, 5, 5], [5, 5, 5]]


def test_what_is_needed_almost_at_once_is_awaited_at_one_place() -> None:
    times = [at * windows.NEAR / 2 for at in range(9)]
    assert windows.together([0, 1, 2, 3, 6], times) == [0, 0, 0, 3, 6]


@pytest.mark.parametrize("seed", range(200))
def test_rules_of_the_order_hold_for_any_times(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    sizes = [draw.randint(1, 9) for _ in range(count)]
    seconds = [draw.uniform(0, 10) for _ in range(count)]
    room = [draw.randint(0, 40) for _ in range(100)]
    places = sorted(draw.randrange(99) for _ in range(count))

    arrived = [min(at, 99) for at in windows.arrivals(places, seconds, TIMES)]
    ends = windows.waits(places, [draw.randint(0, 4) for _ in range(count)], 99)
    longer = windows.later(room, ends, arrived, sizes)
    assert all(place <= soonest <= at <= 99 for place, soonest, at in zip(places, ends, longer, strict=True))
    assert all(at <= max(max(arrived), max(ends)) for at in longer)

    departing = windows.departures(places, seconds, TIMES)
    starts = windows.prefetches(places, departing, [draw.randint(0, 3) for _ in range(count)])
    sooner = windows.earlier(room, starts, departing, sizes)
    assert all(0 <= at <= start <= place for at, start, place in zip(sooner, starts, places, strict=True))
    assert sooner == sorted(sooner)

    for short, long in ((ends, longer), (starts, sooner)):
        for position, left in enumerate(room):
            taken = [
                size for size, one, other in zip(sizes, short, long, strict=True)
                if min(one, other) <= position < max(one, other)
            ]  # fmt: skip
            assert sum(taken) <= left


def offloading(name: str, waiting: int = 1, ahead: int = 1, seconds: float = 0.0) -> Packing:
    return Packing(
        name=name,
        source=name,
        memory=name,
        members=(name,),
        pack=Fragment((Step("out", frozenset({"x"}), ("h",)),), {"x": BIG, "h": 0}, ("x",), ("h",)),
        unpack=Fragment((Step("in", frozenset({"h"}), ("u",)),), {"h": 0, "u": BIG}, ("h",), ("u",)),
        transfer=Transfer(waiting, ahead, seconds, seconds),
        copied=("x",),
        brought_back=("u",),
    )


def packed_first(name: str, waiting: int = 1) -> Packing:
    """Offloaded as it is packed, to a quarter and something small that stays."""
    pack = (Step("q", frozenset({"x"}), ("q",)), Step("s", frozenset({"x"}), ("s",)))
    unpack = (Step("r", frozenset({"h"}), ("r",)), Step("u", frozenset({"r", "s"}), ("u",)))
    sizes = {"x": BIG, "q": BIG // 4, "s": 1, "h": 0}
    return Packing(
        name=name,
        source=name,
        memory=name,
        members=(name,),
        pack=Fragment((*pack, Step("out", frozenset({"q"}), ("h",))), sizes, ("x",), ("h", "s")),
        unpack=Fragment(unpack, {"h": 0, "s": 1, "r": BIG // 4, "u": BIG}, ("h", "s"), ("u",)),
        transfer=Transfer(waiting, 1, 100.0, 100.0),
        copied=("q",),
        brought_back=("r",),
    )


def of_a_second(program: Program) -> dict[str, float]:
    return {step.name: 1.0 for step in program.steps}


def test_what_waits_in_forward_and_what_comes_early_in_backward_is_in_the_estimate() -> None:
    forward, backward = layers(10)
    names = [f"h{index}" for index in range(10)]
    seconds = of_a_second(forward), of_a_second(backward)
    peaks = []
    for waiting in (1, 2, 4):
        packings = [offloading(name, waiting, seconds=100.0) for name in names]
        placed = place(forward, backward, packings, frozenset({"out"}), seconds=seconds)
        assert placed.offloads == tuple(names)
        assert placed.reloads == tuple(reversed(names))
        peaks.append(placed.forward_peak)
    assert peaks == sorted(set(peaks))  # the longer they stay, the more there is
    late = place(forward, backward, [offloading(name) for name in names], frozenset({"out"}), seconds=seconds)
    early = place(
        forward, backward, [offloading(name, ahead=2, seconds=1.5) for name in names], frozenset({"out"}),
        seconds=seconds,
    )  # fmt: skip
    assert late.prefetches == ()  # copies take no time
    assert len([name for _, group in early.prefetches for name in group]) == 9
    assert early.backward_peak > late.backward_peak


def test_one_that_is_away_for_long_has_the_time_that_its_copy_needs_and_adds_nothing_to_the_peak() -> None:
    """The first of ten layers: the link has all the others to carry it, each way."""
    forward, backward = layers(10)
    seconds = of_a_second(forward), of_a_second(backward)
    others = frozenset({"out", *(f"h{index}" for index in range(1, 10))})
    placed = place(forward, backward, [offloading("h0", 0, 0, 4.5)], others, seconds=seconds)
    slow = place(forward, backward, [offloading("h0", 0, 0, 400.0)], others, seconds=seconds)
    positions = {step.name: index for program in (forward, backward) for index, step in enumerate(program.steps)}
    ((step, names),) = placed.waits
    assert names == ("h0",)
    assert positions[step] == positions[placed.pack_before["h0"]] + 5
    ((step, names),) = placed.prefetches
    assert names == ("h0",)
    assert positions[step] == positions[placed.unpackings["h0"][0].before] - 5
    assert placed.forward_peak == placed.unpacked_forward_peak - BIG
    assert placed.backward_peak == placed.unpacked_backward_peak - BIG
    # one that would need longer gets what there is; then the step waits for it
    assert (slow.forward_peak, slow.backward_peak) == (placed.forward_peak, placed.backward_peak)
    assert positions[placed.waits[0][0]] < positions[slow.waits[0][0]] < len(forward.steps) - 1
    assert 0 < positions[slow.prefetches[0][0]] < positions[step]


def test_what_is_packed_first_waits_and_comes_early_with_its_packed_bytes() -> None:
    forward, backward = layers(10)
    names = [f"h{index}" for index in range(10)]
    seconds = of_a_second(forward), of_a_second(backward)
    whole = [offloading(name, 4, seconds=100.0) for name in names]
    quarter = [packed_first(name, 4) for name in names]
    one, other = (place(forward, backward, kind, frozenset({"out"}), seconds=seconds) for kind in (whole, quarter))
    assert other.offloads == one.offloads
    assert other.waits
    assert other.prefetches
    # of five at a time, three or four wait, a quarter each
    assert other.forward_peak <= one.forward_peak - 2 * BIG
    assert other.backward_peak <= one.backward_peak
    curve = live_bytes(packed_backward(
        Program((Step("a"), Step("b", frozenset({"y"})), Step("output")), {"y": BIG}, frozenset({"y"})),
        [packed_first("y")], {"y": [(1, [1])]}, {"y": 0},
    ))  # fmt: skip
    assert curve[:3] == (BIG // 4 + 1, BIG // 4 + 1, BIG // 4 + 1)
    assert max(curve) == BIG + BIG // 4 + 1


def test_a_copy_that_begins_early_takes_memory_from_there() -> None:
    backward = Program(
        (Step("a", frozenset({"x"})), Step("b", frozenset()), Step("c", frozenset({"y"})), Step("output")),
        {"x": BIG, "y": BIG},
        frozenset({"x", "y"}),
    )
    packings = [offloading("x"), offloading("y")]
    unpacks = {"x": [(0, [0])], "y": [(2, [2])]}
    curve = live_bytes(packed_backward(backward, packings, unpacks, {"y": 0}))
    assert curve == (BIG, 2 * BIG, 2 * BIG, BIG, BIG, BIG, 0)
    curve = live_bytes(packed_backward(backward, packings, unpacks))
    assert curve == (BIG, BIG, 0, BIG, BIG, 0)
