"""A recorded step holds nothing of what it was given: neither its first calls, nor its capture, nor a replay, nor one
that raises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.support.simulated.pieces import Bench, assert_equal

WIDTH = 16


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * w
    return y.sin().sum(), y


def backward(grad: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (grad * y.cos() * x,)


def fails(x: torch.Tensor) -> tuple[torch.Tensor]:
    raise RuntimeError("no kernel today")


def test_of_a_step_that_warms_up_is_recorded_and_replayed() -> None:
    bench = Bench()
    there = bench.piece(forward, 2, 2, visible=(True, False), static=[1])
    back = bench.piece(backward, 3, 1, is_backward=True)
    w, seen = torch.randn(WIDTH), list[weakref.ref[torch.Tensor]]()
    for _ in range(6):
        x, one = torch.randn(WIDTH), torch.ones(())
        wanted = (x * w).cos() * x
        loss, saved = there([x, w])
        (gradient,) = back([one, saved, x])
        assert_equal([gradient], [wanted])
        seen += map(weakref.ref, (x, one, loss, gradient))  # the tensor that is saved is handed out again
        del x, one, loss, saved, gradient, wanted
        assert [one() for one in seen] == [None] * len(seen)
    assert bench.recorded() == 2
    assert bench.replays() >= 2 * 4


@pytest.mark.parametrize("calls", [1, 3])
def test_of_a_call_that_raises(calls: int) -> None:
    bench = Bench()
    piece = bench.piece(fails, 1, 1)
    seen = []
    for _ in range(calls):
        x = torch.randn(WIDTH)
        seen.append(weakref.ref(x))
        with pytest.raises(RuntimeError, match="no kernel today"):
            piece([x])
        del x
    assert [one() for one in seen] == [None] * calls
