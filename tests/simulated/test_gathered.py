"""Parameters that are freed and gathered anew (FSDP2): read in place while they rest, copied once one of them moves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

import multigraph_backend
from multigraph_backend.cudagraphs.recordings.tree import GIVEN_UP
from tests.support.simulated.pieces import Bench, assert_equal, values
from tests.support.simulated.sharded import LAYERS, WIDTH, Sharded, forward

BYTES = WIDTH * 4


class Gathers(Sharded):
    """Each layer's parameter is one storage: `moves(step, layer)` says whether its memory lies elsewhere from that step
    on.  `frees`: its memory is given back behind each use, and lies wherever there is room."""

    def __init__(self, bench: Bench, moves: Callable[[int, int], bool], frees: bool = False) -> None:
        super().__init__(bench, lambda step, call: 0, 1)
        self.bench, self.moves, self.frees = bench, moves, frees
        self.parameters = [torch.zeros(WIDTH) for _ in range(LAYERS)]
        self.moved: set[tuple[int, int]] = set()
        self.noise: list[torch.Tensor] = []
        self.chance = random.Random(3)

    def gathered(self, call: int, layer: int) -> torch.Tensor:
        parameter = self.parameters[layer]
        storage = parameter.untyped_storage()
        if self.frees:
            for other in self.parameters:
                other.untyped_storage().resize_(0)
            self.noise.append(torch.empty(self.chance.randrange(1, 3 * WIDTH)))
            storage.resize_(BYTES)
        elif self.moves(self.step, layer) and (self.step, layer) not in self.moved:
            self.moved.add((self.step, layer))
            before = storage.data_ptr()
            storage.resize_(3 * BYTES - storage.nbytes())  # two sizes by turns
            assert storage.data_ptr() != before
        return parameter.copy_(self.weights[layer])

    def recorded(self, steps: int) -> int:
        """How many recordings so many steps make."""
        before = self.bench.recorded()
        for _ in range(steps):
            self.run()
        return self.bench.recorded() - before


def test_one_that_moves_behind_its_recordings_is_copied_from_then_on() -> None:
    bench = Bench()
    layer = 3
    model = Gathers(bench, lambda step, at: at == layer and step >= 6)
    assert model.recorded(6) == 2 * LAYERS
    assert bench.unrecorded(model.forward, model.backward) == {}
    assert model.recorded(1) == 2 * LAYERS - layer
    assert model.recorded(20) == 0
    assert bench.unrecorded(model.forward, model.backward) == {}
    plans = [node.recording.plan for node in bench.tree.root.below() if node.recording is not None]
    assert sum(1 in plan.copied for plan in plans) == 2, "of that layer, forward and backward"


def test_once_one_has_moved_all_that_are_freed_are_copied() -> None:
    bench = Bench()
    model = Gathers(bench, lambda step, layer: False)
    assert model.recorded(6) == 2 * LAYERS
    model.frees = True
    made = model.recorded(6)
    assert made <= 2 * LAYERS + 1
    assert model.recorded(12) == 0
    plans = [node.recording.plan for node in bench.tree.root.below() if node.recording is not None]
    assert len(plans) == 2 * LAYERS
    assert all(1 in plan.copied for plan in plans)
    assert bench.tree.counts["evicted"] == 0


@pytest.mark.parametrize("seed", range(2))
def test_what_moves_at_random_is_recorded_a_few_times_and_no_more(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench()
    model = Gathers(bench, lambda step, layer: chance.random() < 0.1)
    made = model.recorded(30)
    assert made >= 2 * LAYERS
    assert model.recorded(25) <= 2 * LAYERS
    assert bench.replays() > 25 * LAYERS
    assert set(bench.unrecorded(model.forward, model.backward)) <= {GIVEN_UP}


def test_layers_in_inference_are_no_steps_of_their_own() -> None:
    """All of one code, with parameters that are copied: what tells them apart is which parameters they are."""
    bench = Bench()
    model = Gathers(bench, lambda step, layer: False)
    model.forward = bench.piece(forward, 2, 2, static=[1])

    def run() -> None:
        x = expected = values(WIDTH)
        for layer in range(LAYERS):
            expected, _ = forward(expected, model.weights[layer])
            x, _ = model.forward([x, model.gathered(layer, layer)])
        assert_equal([x], [expected])

    for _ in range(4):
        run()
    model.frees = True
    for _ in range(6):
        run()
    before, moved = bench.recorded(), bench.clones()
    for _ in range(10):
        run()
    assert bench.recorded() == before
    assert bench.clones() == moved
    assert max(node.depth for node in bench.tree.root.below()) == LAYERS


def test_ranks_that_record_alike_are_left_as_they_were() -> None:
    bench = Bench()
    model = Gathers(bench, lambda step, layer: step >= 4)
    model.forward = bench.piece(forward, 2, 2, visible=(True, False), static=[1], groups=("0",))
    for _ in range(8):
        model.run()
    assert not bench.tree.gathered.copied
    assert GIVEN_UP not in bench.unrecorded(model.forward, model.backward)


def test_forgotten_recordings_are_made_in_place_again() -> None:
    bench = Bench()
    model = Gathers(bench, lambda step, layer: step == 6)
    model.recorded(10)
    assert bench.tree.gathered.copied
    bench.tree.forget()
    model.recorded(10)
    plans = [node.recording.plan for node in bench.tree.root.below() if node.recording is not None]
    assert len(plans) == 2 * LAYERS
    assert all(1 in plan.fixed for plan in plans)


def test_where_all_has_to_be_recorded_nothing_runs_unrecorded_for_it() -> None:
    bench = Bench()
    model = Gathers(bench, lambda step, layer: step in (6, 9) and layer % 4 == 1)
    for piece in (model.forward, model.backward):
        piece.spec = dataclasses.replace(piece.spec, required=True)
    model.recorded(6)
    made = model.recorded(12)
    assert made > 0
    assert bench.unrecorded(model.forward, model.backward) == {}
    assert model.recorded(5) == 0


def test_once_sealed_nothing_is_given_up() -> None:
    bench = Bench()
    model = Gathers(bench, lambda step, layer: step == 6 and layer == 8)
    model.recorded(6)
    multigraph_backend.seal("refuse")
    try:
        assert model.recorded(3) == 0
        replays = bench.replays()
        model.run()
        assert bench.replays() - replays == 8, "of the layers before the one that moved"
        assert not bench.tree.gathered.copied
    finally:
        multigraph_backend.unseal()
