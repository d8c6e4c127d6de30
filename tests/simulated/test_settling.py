"""Parameters that are gathered anew at each step: recorded once, when they have come to rest."""

from __future__ import annotations

import random

import pytest
import torch

from multigraph_backend.cudagraphs.recordings.settling import MOST_STEPS
from tests.support.simulated.pieces import Bench, call_right, values
from tests.support.simulated.sharded import LAYERS, WIDTH, Sharded, forward


def test_a_step_whose_parameters_come_to_rest_is_recorded_once() -> None:
    """Steps 0 to 2 lie elsewhere; from then on two places serve in turn, as those of a layer and of the next."""
    bench = Bench()
    chance = random.Random(0)
    model = Sharded(bench, lambda step, call: chance.randrange(2, 12) if step < 3 else call % 2, 12)
    for _ in range(5):
        model.run()
        assert bench.recorded() == 0
    for _ in range(6):
        model.run()
    assert bench.recorded() == 2 * LAYERS
    assert bench.replays() == 6 * 2 * LAYERS
    assert bench.unrecorded(model.forward, model.backward) == {}
    made = [node.recording for node in bench.tree.root.below() if node.recording is not None]
    assert len(made) == 2 * LAYERS
    assert all(1 in recording.plan.fixed for recording in made), "gathered parameters are copied"


def test_a_later_parameter_that_still_moves_is_waited_for() -> None:
    """The first call lies where it lay from step 1 on; others move until step 3."""
    bench = Bench()
    model = Sharded(bench, lambda step, call: 0 if step and not call else min(step, 4) + 1, 6)
    for _ in range(12):
        model.run()
    assert bench.recorded() == 2 * LAYERS


def test_parameters_that_never_move_are_recorded_at_the_second_step() -> None:
    bench = Bench()
    model = Sharded(bench, lambda step, call: call % LAYERS if call < LAYERS else 2 * LAYERS - 1 - call, LAYERS)
    model.run()
    assert bench.recorded() == 0
    model.run()
    assert bench.recorded() == 2 * LAYERS
    for _ in range(3):
        model.run()
    assert bench.recorded() == 2 * LAYERS


def test_what_never_comes_to_rest_is_recorded_after_some_steps() -> None:
    bench = Bench(most=2)
    chance = random.Random(1)
    model = Sharded(bench, lambda step, call: chance.randrange(64), 64)
    for _ in range(MOST_STEPS + 1):
        model.run()
    assert bench.recorded() == 0
    for _ in range(40):
        model.run()
    before = bench.recorded()
    assert before > 0
    for _ in range(10):
        model.run()
    assert bench.recorded() == before


@pytest.mark.parametrize("models", [2, 5])
def test_models_of_one_class_that_take_turns_are_recorded_at_their_second_turn(models: int) -> None:
    bench = Bench()

    def weighted(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * w,)

    piece = bench.piece(weighted, 2, 1, static=[1])
    weights = [torch.randn(WIDTH) for _ in range(models)]
    for turn in range(4):
        for w in weights:
            call_right(piece, weighted, values(WIDTH), w)
        assert bench.recorded() == (models if turn else 0)
    assert bench.replays() == 3 * models


def test_what_issues_collectives_is_recorded_as_often_on_all_ranks() -> None:
    """Another rank's parameters may have come to rest already: these do not wait."""
    bench = Bench()
    model = Sharded(bench, lambda step, call: step, 64)
    grouped = bench.piece(forward, 2, 2, visible=(True, False), static=[1], groups=("0",))
    model.forward = grouped
    for _ in range(3):
        model.run()
    assert bench.recorded() > 0
