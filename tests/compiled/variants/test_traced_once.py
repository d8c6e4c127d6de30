"""Blocks that come again are traced by AOTAutograd once where that is right, and one by one where it is not.

Graphs run operator by operator, all else is as a user has it: no code is generated.
"""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import multigraph_backend
from multigraph_backend.lower import block_operator, repetition, traced_once
from multigraph_backend.lower.lowering import CompileJob
from multigraph_backend.lower.only_cached import NotCached
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


def test_where_one_way_to_cut_cannot_be_traced_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are asked for each way, since what was refused before is not known to a process that only looks there."""
    lengths: list[int] = []
    block = traced_once._block

    def first_refused(body: repetition.Body, *others: Any) -> Any:
        lengths.append(body.length * len(body.calls))
        if len(lengths) == 1:
            raise block_operator.Refused("a block that comes again hands out a view, or what it was given")
        return block(body, *others)

    monkeypatch.setattr(traced_once, "_block", first_refused)
    model, verdict = layers(Layer), Verdict()
    run, x = compiled_of(model, verdict), torch.randn(2, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert "traced once" in verdict.said[-1]
    cut_elsewhere, between_entries = lengths[:2]
    assert cut_elsewhere < between_entries  # where nothing is lost the first layer begins outside


def test_a_compile_from_caches_goes_through_all_ways_and_then_the_graph_as_it_was() -> None:
    asked: list[tuple[int, str | None]] = []

    def look(process_wide: contextlib.ExitStack) -> str:
        here = traced_once._attempt.get()
        assert here is not None
        asked.append((here.passed, here.why_not))
        if here.why_not is not None:
            return "as it was"
        here.lifted, here.more = True, here.passed < 2
        raise NotCached("nothing is kept of it")

    job: Any = SimpleNamespace(only_cached=True, graph=SimpleNamespace(user_code="f"), _floats_or_constants=look)
    with contextlib.ExitStack() as process_wide:
        assert CompileJob._traced_once_or_not(job, process_wide) == "as it was"  # type: ignore[comparison-overlap]
    assert [passed for passed, _ in asked] == [0, 1, 2, 0]
    assert [why is None for _, why in asked] == [True, True, True, False]
