"""`MULTIGRAPH_DEBUG=poison`: what is alive is kept, everything else of the pool is filled."""

from __future__ import annotations

import random

import pytest
import torch

from multigraph_backend.cudagraphs.devices import poison
from multigraph_backend.cudagraphs.recordings.slot import Slot
from tests.support.simulated.pieces import Bench, assert_equal, call_right, values


def test_ranges_are_what_segments_hold_beside_what_is_kept() -> None:
    numbers = random.Random(0)
    for _ in range(300):
        starts = sorted(numbers.sample(range(0, 60, 6), 4))
        segments = [(start, numbers.randint(1, 6)) for start in starts]
        kept = [(numbers.randrange(60), numbers.randint(1, 9)) for _ in range(numbers.randrange(5))]
        reserved = {at for start, size in segments for at in range(start, start + size)}
        wanted = reserved - {at for start, size in kept for at in range(start, start + size)}
        numbers.shuffle(segments)
        found = [at for start, size in poison.others(segments, kept) for at in range(start, start + size)]
        assert sorted(found) == sorted(wanted)


def double(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y, y + 1


def test_outputs_that_are_alive_stay_right() -> None:
    bench = Bench(poisons=True)
    first, second = bench.piece(double, 1, 2), bench.piece(double, 1, 2)
    held = []
    for step in range(8):
        x = values()
        y, z = call_right(first, double, x)
        call_right(second, double, z)
        held.append((y, x * 2))
        del z
        if step % 3 == 0:
            held.pop(0)
        for mine, right in held:
            assert_equal([mine], [right])
    assert bench.recorded() >= 2
    assert bench.replays() > 8


def test_an_output_that_is_wrongly_taken_for_dead_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> torch.Tensor:
        bench = Bench(poisons=True)
        piece, other = bench.piece(double, 1, 2), bench.piece(double, 1, 2)
        for _ in range(2):
            kept, _ = piece([values()])
            other([kept])
        other([kept])  # within the step: what it leaves alone may be read
        return kept + 0

    assert not seen().isnan().any()
    monkeypatch.setattr(Slot, "alive", lambda slot, use_count: False)
    assert seen().isnan().all()
