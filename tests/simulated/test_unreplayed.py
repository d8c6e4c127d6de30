"""Recordings that nothing replays come to an end, limits hold without throwing everything away, and what is given up
goes at once."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from multigraph_backend.cudagraphs import account
from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings.cost import NOT_REPLAYED, Uses
from multigraph_backend.cudagraphs.recordings.nodes import Node
from multigraph_backend.cudagraphs.recordings.piece_state import MOST_KEYS
from multigraph_backend.cudagraphs.recordings.room import NO_ROOM
from tests.support.simulated.pieces import Bench, call_right, values


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def at(n: int, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * n,)


def grown(n: int, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.repeat(n),)


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


# ---------------------------------------------------------------- numbers without end, orders without end


def test_a_number_that_grows_at_each_call_is_recorded_no_more_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    piece = bench.piece(at, 2, 1, label="a cache position")
    for n in (0, *range(400)):  # the first number warms up
        call_right(piece, at, n, values())
    assert bench.recorded() <= Limits().unreplayed
    assert bench.tree.size <= Limits().unreplayed
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"a cache position runs unrecorded: {NOT_REPLAYED}"]
    (report,) = account.of(bench.tree).pieces
    assert report.unrecorded[NOT_REPLAYED] >= 400 - Limits().unreplayed - 1


def test_a_number_that_stays_at_last_is_recorded() -> None:
    bench = Bench()
    piece = bench.piece(at, 2, 1)
    for n in (0, *range(200)):
        call_right(piece, at, n, values())
    replays = bench.replays()
    for _ in range(20):
        call_right(piece, at, 7000, values())
    assert bench.replays() >= replays + 15


def test_each_size_of_a_warm_up_is_replayed_in_the_end() -> None:
    bench = Bench()
    piece = bench.piece(at, 2, 1)
    for n in (0, *range(100)):  # far more than are recorded on trust
        call_right(piece, at, n, values())
    chance = random.Random(0)
    for _ in range(600):
        call_right(piece, at, chance.randrange(100), values())
    before = bench.replays()
    for n in range(100):
        call_right(piece, at, n, values())
    assert bench.replays() == before + 100


def test_pieces_in_random_order_are_recorded_where_they_come_again() -> None:
    def run(limits: Limits) -> Bench:
        bench, chance = Bench(limits), random.Random(1)
        heads = [bench.piece(lambda x, n=n: (x * n,), 1, 1, visible=[False], label=f"head {n}") for n in range(8)]
        for _ in range(120):
            held: list[Any] = []
            for n in chance.sample(range(8), 8):
                held += call_right(heads[n], lambda x, n=n: (x * n,), values())
        return bench

    limited = run(Limits())
    assert limited.recorded() < run(Limits(unreplayed=1 << 30)).recorded() / 2
    assert limited.replays() > 100


def test_what_is_replayed_is_recorded_without_end() -> None:
    bench = Bench()
    piece = bench.piece(at, 2, 1)
    for n in range(100):
        for _ in range(3):
            call_right(piece, at, n, values())
    assert (bench.unrecorded(piece), bench.tree.size) == ({}, 100)


def test_where_all_has_to_be_recorded_it_is() -> None:
    bench = Bench()
    piece = bench.piece(at, 2, 1, required=True)
    for n in (0, *range(100)):
        call_right(piece, at, n, values())
    assert (bench.unrecorded(piece), bench.recorded()) == ({}, 100)


def test_verdicts_make_it_seldom_and_replays_make_it_often() -> None:
    class Made:
        calls = 1

    uses, held = Uses(), []

    def record(times: int, calls: int) -> None:
        for _ in range(times):
            held.append(Made())
            held[-1].calls = calls
            uses.recorded(held[-1])  # type: ignore[arg-type]

    needed = []
    for number, calls in ((32, 1), (32, 1), (33, 1), (32, 1), (32, 2), (32, 1)):
        record(number, calls)
        uses.wanted("a place that comes once", 32)
        needed.append(uses.needed)
    assert needed == [2, 16, 128, 512, 1, 2]
    assert [uses.wanted("a place", 32) for _ in range(4)] == [False, True, False, True]
    for number in range(1000):
        uses.wanted(number, 32)
    assert len(uses._seen) <= 256


def test_functions_that_are_not_recorded_are_not_kept_without_end() -> None:
    bench = Bench()
    piece = bench.piece(at, 2, 1)
    for n in (0, *range(4 * MOST_KEYS)):
        call_right(piece, at, n, values())
    assert len(piece.by_key) <= 2 * MOST_KEYS
    (report,) = account.of(bench.tree).pieces
    assert report.unrecorded[NOT_REPLAYED] == 4 * MOST_KEYS - bench.recorded()
    assert bench.tree.size == sum(keyed.nodes for keyed in piece.by_key.values())
    call_right(piece, at, 1, values())  # of the first, which is still there
    assert bench.recorded() <= Limits().unreplayed


# ---------------------------------------------------------------- at random


def play(seed: int) -> None:
    """Numbers that never come again, and one that stays for a while, in turns: few of those are recorded, and each that
    stays is replayed in the end."""
    chance = random.Random(seed)
    limits = Limits(unreplayed=chance.choice([1, 2, 4, 8]))
    bench = Bench(limits)
    piece = bench.piece(at, 2, 1)
    numbers = iter(range(1, 1 << 30))
    call_right(piece, at, 0, values())  # warms up
    for _ in range(chance.randint(2, 5)):
        recorded = bench.recorded()
        for _ in range(chance.choice([0, 1, 2, 40])):
            call_right(piece, at, next(numbers), values())
        assert bench.recorded() - recorded <= 2 * limits.unreplayed, "what never comes again is recorded"
        stays = next(numbers)
        for _ in range(6):
            replays = bench.replays()
            call_right(piece, at, stays, values())
        assert bench.replays() == replays + 1, "what stays is not replayed"


def _all_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """As it was: 399 recordings for 400 calls."""
    patch.setattr(Uses, "wanted", lambda uses, place, most: True)


def _a_verdict_is_for_ever(patch: pytest.MonkeyPatch) -> None:
    wanted = Uses.wanted
    patch.setattr(Uses, "wanted", lambda uses, place, most: wanted(uses, place, most) and uses.needed == 1)


def test_numbers_at_random_are_recorded_where_they_come_again() -> None:
    for seed in range(30):
        play(seed)


@pytest.mark.parametrize("mutant", [_all_is_recorded, _a_verdict_is_for_ever], ids=lambda mutant: mutant.__name__)
def test_numbers_at_random_show_what_went_wrong_once(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=r"what never comes again|what stays"):
        test_numbers_at_random_are_recorded_where_they_come_again()


# ---------------------------------------------------------------- limits


def test_a_limit_of_the_pools_bytes_keeps_what_fits() -> None:
    bench = Bench(Limits(pool_bytes=64 * 20), granularity=64)
    piece = bench.piece(grown, 2, 1)
    x = torch.randn(16)  # 64 bytes, read where it lies
    for _ in range(3):
        for n in range(1, 31):
            call_right(piece, grown, n, x)
    assert bench.tree.counts["evicted"] == 0
    assert bench.tree.size >= 15
    assert sum(pool.arena.high_water for pool in bench.device._pools.values()) <= 64 * 20
    assert list(bench.unrecorded(piece)) == [NO_ROOM]
    captures = len(bench.device.calls("capture_begin"))
    for n in range(1, 31):
        call_right(piece, grown, n, x)
    assert len(bench.device.calls("capture_begin")) == captures, "what does not fit is not tried at each call"
    bench.tree.limits = Limits()
    for n in range(1, 31):
        call_right(piece, grown, n, x)
    assert bench.tree.size == 30


def test_a_pool_that_has_outgrown_its_limit_is_given_back() -> None:
    bench = Bench(Limits(pool_bytes=64 * 10), granularity=64)
    small, large = bench.piece(double, 1, 1), bench.piece(grown, 2, 1)
    x = torch.randn(16)
    for _ in range(4):
        call_right(small, double, x)
        call_right(large, grown, 30, x)  # the pool is not half full: only the recording shows what it needs
    assert bench.device.generation >= 1
    assert bench.tree.size == 1
    assert sum(pool.arena.high_water for pool in bench.device._pools.values()) <= 64 * 10
    assert bench.unrecorded(large)[NO_ROOM] == 3


def test_the_least_recently_used_is_given_up_whatever_was_used_since() -> None:
    bench = Bench(Limits(per_device=4))
    piece = bench.piece(at, 2, 1, required=True)
    x = values()

    def recorded() -> set[Any]:
        return {node.keyed.key[0] for node in bench.tree.root.below() if node.keyed is not None}

    for n in (1, 2, 3, 4, 1, 2, 5, 1, 4, 6):
        call_right(piece, at, n, x)
    # 3 went for 5; then 2 for 6, which was used least recently
    assert recorded() == {1, 4, 5, 6}
    chance, used = random.Random(3), [1, 4, 5, 6]
    used.sort(key=(5, 1, 4, 6).index)
    for _ in range(200):
        n = chance.randrange(1, 9)
        call_right(piece, at, n, x)
        used = [*[entry for entry in used if entry != n][-3:], n]
        assert recorded() == set(used)


def test_a_parent_is_given_up_after_its_children() -> None:
    bench = Bench(Limits(per_device=6))
    first, second = bench.piece(at, 2, 1, required=True), bench.piece(double, 1, 1)
    for n in range(40):
        (y,) = call_right(first, at, n % 7, values())
        (z,) = call_right(second, double, y)
        del y, z
        nodes = [node for node in bench.tree.root.below() if node.keyed is not None]
        assert len(nodes) == bench.tree.size <= 6


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("poisons", [False, True])
@pytest.mark.parametrize("must_pay", [False, True])
def test_what_is_given_up_goes_without_a_garbage_collection(poisons: bool, must_pay: bool) -> None:
    bench = Bench(Limits(per_device=2), poisons=poisons)
    first = bench.piece(at, 2, 1, must_pay=must_pay, required=True)
    second = bench.piece(double, 1, 1, must_pay=must_pay)
    nodes: list[weakref.ref[Node]] = []
    for n in (0, *range(5)):
        (y,) = call_right(first, at, n, values())
        (z,) = call_right(second, double, y)
        nodes += [weakref.ref(node) for node in bench.tree.path]
        del y, z
    alive = {entry() for entry in nodes} - {None}
    linked = {node for node in bench.tree.root.below() if node.keyed is not None}
    assert alive == linked | set(bench.tree.path)
    del alive, linked
    bench.tree.drop([first, second])
    assert [entry for entry in nodes if entry() is not None] == []
    assert bench.device.generation == 1


def test_a_new_recording_neither_walks_the_tree_nor_takes_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Limits(per_device=50, pool_bytes=1 << 19))
    piece = bench.piece(at, 2, 1, required=True)
    x = values()
    for n in (0, *range(60)):
        call_right(piece, at, n, x)
    seen: list[str] = []
    below = Node.below

    def walked(node: Node) -> Iterator[Node]:
        if node is bench.tree.root:
            seen.append("a walk")
        return below(node)

    def looked() -> int:
        seen.append("a snapshot")
        return 0

    monkeypatch.setattr(Node, "below", walked)
    monkeypatch.setattr(bench.device, "pool_bytes", looked)
    monkeypatch.setattr(bench.device, "reserved_bytes", lambda: 1 << 10)
    recorded = bench.recorded()
    for n in range(60, 80):
        call_right(piece, at, n, x)
    assert bench.recorded() == recorded + 20
    assert seen == []
