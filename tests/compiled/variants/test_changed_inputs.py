"""Inputs that a graph changes in place, through Inductor: what stock gets wrong is right, and compiled."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.process import sources


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


WEIGHT = torch.randn(8, 4)
# what is read before the change, and what becomes of it afterwards
READS: dict[str, tuple[Callable[[torch.Tensor], Sequence[torch.Tensor]], Callable[..., Sequence[torch.Tensor]]]] = {
    "gather": (lambda x: (x[torch.arange(x.shape[0]) // 2],), lambda old: (torch.sin(old) / 5,)),
    "pad": (lambda x: (F.pad(x, (0, 1)),), lambda old: (torch.sin(old),)),
    "product": (lambda x: (x @ WEIGHT, x + 1), lambda product, more: (product + product, more)),
    "reshape": (lambda x: (torch.tanh(x),), lambda old: (torch.maximum(old.reshape(-1), old.reshape(-1)),)),
    "part of the new values": (lambda x: (x.flip(0),), lambda old: (old * 2,)),
}


def slice_(x: torch.Tensor, old: torch.Tensor) -> None:
    x[1:].mul_(2.0)


def select(x: torch.Tensor, old: torch.Tensor) -> None:
    x[0] = 0.25


def from_old(x: torch.Tensor, old: torch.Tensor) -> None:
    x[1:, :4] = old[1:, :4]


@pytest.mark.parametrize("change", [slice_, select, from_old], ids=lambda change: change.__name__)
@pytest.mark.parametrize("read", READS)
def test_old_values_are_read_before_a_part_is_changed(read: str, change: Callable[..., None]) -> None:
    """Wrong through stock Inductor of torch 2.11."""
    before, after = READS[read]

    def f(x: torch.Tensor) -> Sequence[torch.Tensor]:
        old = before(x)
        change(x, old[0])
        return after(*old)

    run = compiled(f)
    with torch.no_grad():
        for rows in (6, 9):
            x = torch.randn(rows, 8)
            given = x.clone()
            torch.testing.assert_close(tuple(run(given)), tuple(f(x)))
            torch.testing.assert_close(given, x)
    assert multigraph_backend.stats()["generic_calls"] == 2
    assert multigraph_backend.stats()["failures"] == 0


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


def test_what_another_multigraph_has_cached_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been wrong: an update would go on with the numbers of before."""
    counters = _compat.counters["aot_autograd"]
    found = []
    one, another = uuid.uuid4().hex, uuid.uuid4().hex  # torch's caches outlive this process
    for other in (one, another, one):
        monkeypatch.setattr(sources, "key", lambda other=other: other)
        torch._dynamo.reset()
        counters.clear()
        x = torch.randn(5, 8, requires_grad=True)
        compiled(lambda x: torch.cos(x * 3).sum())(x).backward()
        found.append((counters["autograd_cache_hit"], counters["autograd_cache_miss"]))
    assert found == [(0, 1), (0, 1), (1, 0)]


def test_changes_that_come_last_are_right_also_where_code_is_cached_whole() -> None:
    """Recorded code is cached as one bundle, which an output code that defers changes has no place in."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        y = x.flip(0) * 2
        x[1:] = x.flip(0)[1:]
        return y + x

    with _compat.functorch_config.patch(bundled_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            run = torch.compile(shifted, backend="multigraph")
            for rows in (4, 5, 6):
                x = torch.randn(rows, 3)
                y = x.clone()
                torch.testing.assert_close(run(x), shifted(y))
                torch.testing.assert_close(x, y)
    assert multigraph_backend.stats()["failures"] == 0
    assert multigraph_backend.stats()["eager_calls"] == 0


def test_code_that_torch_does_not_cache_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Spectral norms change their vectors last, by code that is in no cache; stock's code is saved without a word."""
    torch.manual_seed(0)
    model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(5, 8))
    model_in_eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="multigraph")
    for _ in range(2):
        x = torch.randn(4, 5)
        torch.testing.assert_close(compiled(x), model_in_eager(x))
        compiled(x).sum().backward()
        model_in_eager(x)
    assert [record for record in caplog.records if "serialize" in record.getMessage()] == []
