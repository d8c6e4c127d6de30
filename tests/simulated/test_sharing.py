"""Recordings of many sizes take what the largest takes alone, in whatever order they come."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from multigraph_backend.cudagraphs import account
from multigraph_backend.cudagraphs.devices.simulated import Segments
from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings import sharing
from multigraph_backend.cudagraphs.recordings.piece import Piece
from tests.support.simulated.pieces import Bench, assert_equal, call_right, one, values

SIZES = range(3, 34, 2)
WORDS = 112  # of a row, so that blocks of the larger sizes lie in segments of their own
LEAST = 16 << 10  # bytes of a pool in which nothing gives way


def layers(n: int, x: torch.Tensor) -> tuple[torch.Tensor]:
    """What a model does: some large intermediates at a time, most of which die."""
    for _ in range(2):
        wide = x.repeat(1, 4)
        x = wide[:, : x.shape[1]] + torch.remainder(wide * 3, 7)[:, : x.shape[1]] + x
    return (x.sum(0),)


def rows(n: int) -> torch.Tensor:
    return values(n * WORDS).view(n, WORDS)


class Sized:
    """A bench whose pools grow by segments, as torch's do, with a KiB for a MiB."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.bench = Bench(limits, pool_bytes=1 << 22, segments=Segments())
        self.tree, self.device = self.bench.tree, self.bench.device
        self.tree.sharing.least = LEAST
        self.piece = self.bench.piece(layers, 2, 1)

    def call(self, n: int, piece: Piece | None = None) -> torch.Tensor:
        return call_right(piece or self.piece, layers, n, rows(n))[0]

    def calls(self, sizes: Sequence[int], times: int = 3) -> None:
        for n in sizes:
            for _ in range(times):
                self.call(n)

    def __getitem__(self, name: str) -> int:
        return self.tree.counts[name]


def in_order(order: str) -> list[int]:
    sizes = list(SIZES)
    if order == "descending":
        sizes.reverse()
    elif order != "ascending":
        random.Random(order).shuffle(sizes)
    return sizes


def alone() -> int:
    made = Sized()
    made.calls([max(SIZES)])
    return made.device.most_reserved


@pytest.mark.parametrize("order", ["ascending", "descending", *(f"at random {seed}" for seed in range(4))])
def test_sizes_in_any_order_take_what_the_largest_takes_alone(order: str) -> None:
    made = Sized()
    made.calls(in_order(order))
    outlives = 2 << 10  # a segment for small blocks, of which the largest has none
    assert made.device.most_reserved <= 1.02 * alone() + outlives
    for _ in range(2):  # what gave way lies in there too
        made.calls(in_order("ascending"), 2)
    assert made.device.most_reserved <= 1.02 * alone() + outlives
    assert len(made.device.generations()) == 1
    assert made.tree.size == len(SIZES)
    assert made["recordings"] <= 2 * len(SIZES) + (order not in ("ascending", "descending")) * len(SIZES)


def test_without_it_ascending_sizes_take_much_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated pool has the defect that is mended."""
    monkeypatch.setattr(sharing.Sharing, "asks", lambda self, keyed: False)
    made = Sized()
    made.calls(in_order("ascending"))
    assert made.device.most_reserved > 1.3 * alone()


def test_the_old_pool_goes_back_before_the_new_one_grows() -> None:
    made = Sized()
    made.calls([20])
    made.device.log.clear()
    made.call(30)
    calls = [name for name, _ in made.device.log if name in ("leave", "capture_begin", "allocate")]
    assert calls[:2] == ["leave", "capture_begin"]
    assert made["gave way"] == 1


def test_nothing_gives_way_to_what_does_not_fit_the_limit_of_bytes() -> None:
    alone = Sized()
    alone.calls([20])
    made = Sized(Limits(pool_bytes=3 * alone.device.pool_bytes(), keep_free=0))
    for _ in range(2):
        made.calls([20, 12])
        made.call(200)  # is tried, and then put off
    kept = made.tree.size
    assert kept == 2
    gave_way, evicted = made["gave way"], made["evicted"]
    for _ in range(2):
        made.call(200)
        assert made.tree.size == kept
    assert (made["gave way"], made["evicted"]) == (gave_way, evicted)


def test_it_is_counted_and_shown() -> None:
    made = Sized()
    made.calls([20, 30, 20])
    report = account.of(made.tree)
    assert report.gave_way == 1
    assert "1 gave way to larger ones" in str(report)


def test_an_output_that_is_alive_and_stays_where_it_is_keeps_all_where_they_are() -> None:
    """What compiled code holds cannot be moved: the larger call is recorded behind it."""

    def saves(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + 1,)

    made = Sized()
    saving = made.bench.piece(saves, 1, 1, visible=[False])
    made.calls([20])
    ones = torch.ones(64)
    call_right(saving, saves, ones)
    saved = [call_right(saving, saves, ones)[0]]
    generation = made.device.generation
    for _ in range(3):
        made.call(30)
    assert made["gave way"] == 0
    assert made.device.generation == generation
    torch.testing.assert_close(saved[0], torch.ones(64) + 1)


def test_an_output_that_the_user_holds_is_right_when_all_give_way() -> None:
    made = Sized()
    made.calls([20])
    x = rows(20)
    (held,) = made.piece([20, x])
    expected = held.clone()
    for n in (30, 20, 33):
        made.calls([n])
        torch.testing.assert_close(held, expected, rtol=0, atol=0)
    assert made["gave way"] >= 1


def test_a_small_pool_is_left_alone() -> None:
    made = Sized()
    made.tree.sharing.least = 1 << 20
    made.calls(in_order("ascending"), 1)
    assert made["gave way"] == 0


def test_a_smaller_piece_takes_no_room_from_a_larger_one_that_it_fits_into() -> None:
    made = Sized()
    other = made.bench.piece(layers, 2, 1)
    made.calls([30])
    for n in range(4, 16):
        for _ in range(3):
            made.call(n, other)
    assert made["gave way"] == 0


def test_growing_sizes_of_which_all_are_used_are_recorded_a_constant_number_of_times() -> None:
    made = Sized()
    for largest in SIZES:
        made.calls([n for n in SIZES if n <= largest], 1)
    assert made["recordings"] <= (1 + sharing.AGAIN) * len(SIZES)
    assert made["gave way"] > 0


def test_a_fragmented_pool_is_made_anew_once_its_largest_has_come_often() -> None:
    made = Sized()
    grown = made.tree.sharing
    grown._firsts = -1000  # nothing gives way before a recording any more
    made.calls(in_order("ascending"))
    assert made["gave way"] == 0
    assert made.device.reserved_bytes() > 1.3 * alone()
    size = made.tree.size
    for _ in range(sharing.REPLAYS * size + 2):
        made.call(max(SIZES))
    assert made["gave way"] == size
    made.calls(in_order("ascending"), 1)
    assert made.device.reserved_bytes() <= 1.02 * alone() + (2 << 10)
    replayed = made["recordings"]
    for _ in range(3):
        made.calls(in_order("ascending"), sharing.REPLAYS)
    assert (made["recordings"], made["gave way"]) == (replayed, size)


def test_a_step_of_several_pieces_gives_way_where_it_begins() -> None:
    """Forward and backward of one size are a path; the larger forward begins the next."""

    def forward(n: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.repeat(1, 3)
        return wide.sum(0), wide

    def backward(n: int, wide: torch.Tensor) -> tuple[torch.Tensor]:
        return ((wide * 2).sum(0),)

    def steps(sizes: Sequence[int]) -> tuple[int, Bench]:
        bench = Bench(pool_bytes=1 << 22, segments=Segments())
        bench.tree.sharing.least = LEAST
        ahead = bench.piece(forward, 2, 2, visible=[True, False])
        back = bench.piece(backward, 2, 1, is_backward=True, static=[1])
        for n in sizes:
            for _ in range(3):
                x = rows(n)
                y, wide = ahead([n, x])
                torch.testing.assert_close(y, forward(n, x)[0], rtol=0, atol=0)
                handed = [n, wide]
                del wide
                (z,) = back(handed)
                torch.testing.assert_close(z, backward(n, x.repeat(1, 3))[0], rtol=0, atol=0)
                del y, z
        return bench.device.most_reserved, bench

    largest, _ = steps([33])
    taken, bench = steps(range(10, 34))
    assert taken <= 1.02 * largest + (2 << 10)
    assert bench.tree.counts["gave way"] > 0


def test_nothing_gives_way_while_several_threads_call_or_collectives_are_recorded() -> None:
    for prevent in ("shared", "collectives"):
        made = Sized()
        made.calls([20])
        if prevent == "shared":
            made.tree.shared = True
        else:
            made.tree.collectives._held.update(made.tree.root.below())
        made.call(30)
        assert made["gave way"] == 0


class Trained:
    """A model that is trained: `width` weights of its own, code that all of its class share, and its last gradient."""

    def __init__(self, forward: Piece, backward: Piece, width: int) -> None:
        self.forward, self.backward = forward, backward
        self.weight, self.right = torch.randn(width), torch.zeros(width)
        self.gradient: torch.Tensor | None = None

    def step(self) -> None:
        self.gradient = None
        x = values(self.weight.numel())
        loss, saved = self.forward([x, self.weight])
        assert_equal([loss], [(x * self.weight).sin().sum()])
        (self.gradient,) = self.backward([one(), saved, self.weight, x])
        self.right = (x * self.weight).cos() * x


@pytest.mark.parametrize("models", [2, 3, 5])
def test_models_that_take_turns_train_in_the_pool_of_one_and_keep_their_gradients(models: int) -> None:
    def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * w
        return y.sin().sum(), y

    def backward(grad: torch.Tensor, y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (grad * y.cos() * x,)

    def trained(count: int) -> tuple[int, Bench]:
        made = Sized()
        there = made.bench.piece(forward, 2, 2, visible=(True, False), static=[1])
        back = made.bench.piece(backward, 4, 1, static=[2], is_backward=True)
        several = [Trained(there, back, 40 * WORDS) for _ in range(count)]
        for turn in range(6):
            for model in several:
                model.step()
                for other in several[: several.index(model) + 1] if not turn else several:
                    assert other.gradient is not None
                    assert_equal([other.gradient], [other.right])
            if turn == 2:  # two of their steps were alike
                recorded = made.bench.recorded()
        assert made.bench.recorded() == recorded == 2 * count
        return made.device.most_reserved, made.bench

    alone, _ = trained(1)
    taken, bench = trained(models)
    assert taken <= alone + (2 << 10)
    roots = sum(len(nodes) for nodes in bench.tree.root.children.values())
    assert roots == models  # one after the other would keep the gradients of those before
