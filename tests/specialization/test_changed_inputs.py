"""Inputs that a graph changes in place, through Inductor: what stock gets wrong is right or runs eagerly."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import multigraph_backend
from multigraph_backend import _compat


def compiled(model: object) -> object:
    return torch.compile(model, backend="multigraph", dynamic=True, fullgraph=True)


class ReadBeforeTheChange(torch.nn.Module):
    """The layer norm's gradients need `stack([x, x])` from before the change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.stack([x, x])
        x.mul_(0.5)
        return F.layer_norm(before.clone() * 0.5, (16,), self.scale)


class KeepsAView(torch.nn.Module):
    """Here it is a slice of those values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.stack([x[:, 8:], x[:, 8:]])
        x.add_(1.0)
        return before.sin() * self.scale


@pytest.mark.parametrize("kind", [ReadBeforeTheChange, KeepsAView])
def test_gradients_use_what_was_there_before_the_change(kind: type[torch.nn.Module]) -> None:
    eager = kind()
    model = copy.deepcopy(eager)
    run = compiled(model)
    for rows in (8, 5, 9):
        x = torch.randn(rows, 16)
        given = x.clone()
        expected, got = eager(x), run(given)
        cotangent = torch.randn_like(expected)
        expected.backward(cotangent)
        got.backward(cotangent)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(given, x)
        torch.testing.assert_close(model.scale.grad, eager.scale.grad)
    assert multigraph_backend.stats()["generic_calls"] == 3
    assert multigraph_backend.stats()["failures"] == 0


def test_a_product_of_the_old_values_is_not_run_after_the_change() -> None:
    weight = torch.randn(8, 4)

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.cat([x, y])
        product = y @ weight
        y[1:].mul_(2.0)
        return joined, torch.sigmoid(product + product)

    run = compiled(f)
    with torch.no_grad():
        for rows in (3, 6):
            x, y = torch.randn(rows, 8), torch.randn(rows, 8)
            given = y.clone()
            torch.testing.assert_close(run(x, given), f(x, y))
            torch.testing.assert_close(given, y)
    way = "eager_calls" if _compat.SCHEDULER_LOSES_READERS else "generic_calls"
    assert multigraph_backend.stats()[way] == 2


class Cache(torch.nn.Module):
    """A key cache of an inference server: written at a place, then read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(32, 8))

    def forward(self, query: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(0, place, query)
        return query @ self.keys.mT


class Recurrent(torch.nn.Module):
    """A state that is read by a product and then replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.randn(8, 8))
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, query: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(query @ self.state @ self.weight)
        self.state.mul_(0.5)
        return out


@pytest.mark.parametrize("kind", [Cache, Recurrent, torch.nn.BatchNorm1d])
@pytest.mark.parametrize("train", [False, True])
def test_caches_states_and_statistics_stay_compiled(kind: type[torch.nn.Module], train: bool) -> None:
    eager = kind(8) if kind is torch.nn.BatchNorm1d else kind()
    eager.train(train)
    model = copy.deepcopy(eager)
    run = compiled(model)
    with torch.set_grad_enabled(train and kind is not Cache):
        for rows in (3, 6):
            query, place = torch.randn(rows, 8), torch.randperm(32)[:rows]
            arguments = (query,) if kind is torch.nn.BatchNorm1d else (query, place)
            torch.testing.assert_close(run(*arguments), eager(*arguments))
            torch.testing.assert_close(list(model.buffers()), list(eager.buffers()))
    assert multigraph_backend.stats()["generic_calls"] == 2
    assert multigraph_backend.stats()["failures"] == 0


def test_code_is_found_again_in_torchs_caches() -> None:
    """The partitioner is part of the caches' key: were it not the same each time, nothing would ever be found."""
    counters = _compat.counters["aot_autograd"]
    weight = torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        compiled(lambda x: torch.sin(x @ weight).sum())(torch.randn(5, 8)).backward()
    assert counters["autograd_cache_hit"] == 1, dict(counters)
