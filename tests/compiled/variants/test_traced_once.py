"""Blocks that come again are traced by AOTAutograd once where that is right, and one by one where it is not.

Graphs run operator by operator, all else is as a user has it: no code is generated.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import multigraph_backend
from multigraph_backend.lower import block_operator
from tests.support.fuzz.repeated import Verdict
from tests.support.fuzz.repeated import traced_once as compiled_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))).cos() + 0.5).tanh() * 1.5
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class WritesInside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(self.inner(x), inplace=True)


class Streams(nn.Module):
    """Blocks hand on two values, and the last one's first is used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = x
        for layer in self.layers:
            new = layer.inner(rest)
            rest = rest * 0.5 + new
            x = layer.down(layer.up(x) + 1).sin() + rest.cos()
        return x


class WritesLater(Layer):
    """What a layer was given is written to behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + self.inner(x.detach() * 3)
        x.add_(1)
        return y


class HandsOutView(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.inner(x)).transpose(-1, -2).contiguous().transpose(-1, -2)


class OwnAutocast(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        return x + y.float()


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.second(functional.silu(self.norm(self.first(x))).tanh()).sin() * 2
        return y


def frozen() -> nn.Module:
    model = layers(Layer, 6)
    for parameter in list(model.parameters())[:18]:
        parameter.requires_grad_(False)
    return model


def layers(kind: type[nn.Module], count: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *(kind() for _ in range(count)))


def step(run: Any, model: nn.Module, x: torch.Tensor, training: bool) -> list[torch.Tensor | None]:
    """The result, gradients where there are any, and buffers."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        out = run(x)
    if training:
        (out.float() * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
    found = [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]
    return [None if value is None else value.detach().clone() for value in found]


CASES: dict[str, tuple[Any, bool, bool]] = {  # model, whether it is traced once in inference, and in training
    "plain": (lambda: layers(Layer), True, True),
    "writes inside": (lambda: layers(WritesInside), True, True),
    "first layers are frozen": (frozen, True, True),
    "a result without gradient": (Streams, True, False),
    "writes later": (lambda: layers(WritesLater), True, False),
    "hands out a view": (lambda: layers(HandsOutView), True, False),
    "own autocast": (lambda: layers(OwnAutocast), False, False),
    "statistics": (lambda: layers(Statistics), False, False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [False, True])
def test_results_gradients_and_buffers_are_eagers(case: str, training: bool) -> None:
    torch.manual_seed(0)
    made, *expected = CASES[case]
    model = made()
    other, verdict = copy.deepcopy(model), Verdict()
    run = compiled_of(other, verdict)
    for _ in range(2):
        x = torch.randn(2, 8, 8)
        mine, theirs = step(run, other, x, training), step(model, model, x, training)
        assert [value is None for value in mine] == [value is None for value in theirs]
        close = 0.05 if case == "own autocast" else 1e-4
        torch.testing.assert_close(
            [value for value in mine if value is not None],
            [value for value in theirs if value is not None],
            rtol=close,
            atol=close,
        )
    once = "traced once" in verdict.said[-1]
    assert once == expected[training]
    assert (verdict.calls > 0) or not once
    stats = multigraph_backend.stats()
    assert (stats["repeat_retries"], stats["eager_calls"]) == (0, 0)


def test_results_are_eagers_under_autocast() -> None:
    model = layers(Layer)
    other, verdict = copy.deepcopy(model), Verdict()
    run, x = compiled_of(other, verdict), torch.randn(2, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = step(run, other, x, True), step(model, model, x, True)
    torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
    assert verdict.calls > 2


def test_a_call_of_another_kind_is_refused() -> None:
    """What a call is given is compared with what its block was traced for, whatever was found equal before."""
    bodies = block_operator.Bodies({"body": {}})
    with pytest.raises(block_operator.CannotLower, match="not what its block was traced for"):
        bodies.find("body", [torch.randn(2)])


def test_symbolic_sizes_are_traced_one_by_one() -> None:
    model, verdict = layers(Layer), Verdict()
    run, x = compiled_of(model, verdict), torch.randn(3, 8, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert "sizes are symbolic" in verdict.said[-1]
