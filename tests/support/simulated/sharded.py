"""Layers of one code whose parameters are gathered before each call, forward and backward, as FSDP2 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.simulated.pieces import Bench, assert_equal, values

LAYERS, WIDTH = 12, 8


def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * w
    return y.sin() + 1, y


def backward(grad: torch.Tensor, w: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inner = grad * y.cos()
    return inner * w, inner * x


class Sharded:
    """Layers of one code, whose parameters are gathered into `places` before each call: `where(step, call)` says into
    which.  Calls are numbered through forward and backward."""

    def __init__(self, bench: Bench, where: Callable[[int, int], int], places: int) -> None:
        self.forward = bench.piece(forward, 2, 2, visible=(True, False), static=[1])
        self.backward = bench.piece(backward, 4, 2, static=[1, 2, 3], is_backward=True)
        self.where, self.step = where, 0
        self.places = [torch.zeros(WIDTH) for _ in range(places)]
        self.weights = [torch.randn(WIDTH) for _ in range(LAYERS)]

    def gathered(self, call: int, layer: int) -> torch.Tensor:
        place = self.places[self.where(self.step, call)]
        return place.copy_(self.weights[layer])

    def run(self) -> None:
        x = expected = values(WIDTH)
        saved: list[list[Any]] = []
        right: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in range(LAYERS):
            before, held = expected, x
            expected, y = forward(expected, self.weights[layer])
            right.append((y, before))
            x, mine = self.forward([x, self.gathered(layer, layer)])
            saved.append([mine, held])
            del mine, held
        assert_equal([x], [expected])
        del x
        grad = wanted = values(WIDTH)
        for layer in reversed(range(LAYERS)):
            y, before = right.pop()
            wanted, of_weights = backward(wanted, self.weights[layer], y, before)
            inputs = [grad, self.gathered(2 * LAYERS - 1 - layer, layer), *saved.pop()]
            del grad
            grad, mine = self.backward(inputs)
            assert_equal((grad, mine), (wanted, of_weights))
        self.step += 1
