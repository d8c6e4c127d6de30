"""Code that calls bodies runs first; a worker compiles the whole graph, and what is faster on calls stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import multigraph_backend
from multigraph_backend.lower import workers
from multigraph_backend.region import background, tiers

LAYERS = 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x).cos() + 0.5)).tanh() * 2


class Model(nn.Module):
    """`counts`: each call writes to a buffer, so that none may be run twice."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers, self.counts = nn.Sequential(*(Layer() for _ in range(LAYERS))), counts
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.seen.add_(1)
        return self.layers(x) + self.seen


@pytest.fixture(autouse=True)
def _soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # code out of caches does not say what it calls
    for name, value in {"CALLS": 6, "COLD": 1, "ALIKE": 3, "TIMED": 8, "LOOKS": 4}.items():
        monkeypatch.setattr(tiers, name, value)
    yield
    assert background.wait(120)
    torch._dynamo.reset()


def call(run: nn.Module, model: Model, *sizes: int) -> None:
    for size in sizes:
        x = torch.randn(size, 8)
        with torch.no_grad():
            got = run(x)
            expected = model(x)
            if model.counts:
                expected -= 1  # both have counted
                model.seen -= 1
        torch.testing.assert_close(got, expected)


def told() -> list[str]:
    """Of generic and of each variant, what is said of blocks that come again."""
    (region,) = multigraph_backend.explain().regions
    return [entry.repeated or "" for entry in (region.generic, *region.variants)]


@pytest.mark.parametrize("taken", [True, False])
def test_the_whole_graph_is_tried_beside_bodies(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of generic, which was compiled in a call, and of a variant, which a worker has compiled."""
    monkeypatch.setattr(tiers, "FASTER", 1000.0 if taken else 0.0)
    model = Model(counts=taken)
    options = {"compile": "background", "specialize": [{"x[0]": 16}]}
    run = torch.compile(model, backend="multigraph", dynamic=True, options=options)
    call(run, model, *[5, 7] * 4, 16)
    assert background.wait(120)  # the variant, and generic as a whole
    call(run, model, *[5, 7] * 40, *[16] * 8)
    assert background.wait(120)  # the variant as a whole
    call(run, model, *[16] * 40)
    stats = multigraph_backend.stats()
    assert (stats["whole_graphs_taken"], stats["whole_graphs_refused"]) == ((2, 0) if taken else (0, 2))
    assert (stats["failures"], stats["eager_calls"], stats["generic_compiled"]) == (0, 0, 1)
    assert (stats["worker_compiles"], stats["generic_calls"], stats["variant_calls"]) == (1, 89, 48)
    for said in told():
        assert ("taken their place" if taken else "bodies stay") in said
        assert ("calls of one body" in said) is not taken
    call(run, model, 5, 7, 16, 1, 0, 33)


def test_where_the_worker_fails_bodies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for pid in workers.pool.pids:
        os.kill(pid, signal.SIGKILL)
    monkeypatch.setattr(workers, "PROGRAM", "multigraph_backend.no_such_module")
    model = Model(False)
    run = torch.compile(model, backend="multigraph", dynamic=True, options={"compile": "background"})
    call(run, model, *[5, 7] * 4)
    assert background.wait(120)
    call(run, model, 5, 7)
    assert multigraph_backend.stats()["failures"] == 0
    (said,) = told()
    assert "could not be compiled" in said
    assert "bodies stay" in said


def test_a_graph_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are eager's before, during and after the trial; some calls have no backward, or two."""
    monkeypatch.setattr(tiers, "FASTER", 1000.0)
    model = Model(False).double()
    run = torch.compile(model, backend="multigraph", dynamic=True, options={"compile": "background"})

    def train(*sizes: int) -> None:
        for number, size in enumerate(sizes):
            x = torch.randn(size, 8, dtype=torch.float64, requires_grad=True)
            parameters = [x, *model.parameters()]
            got, expected = run(x), model(x)
            torch.testing.assert_close(got, expected)
            if number % 5 == 4:
                continue
            loss = got.square().sum()
            theirs = torch.autograd.grad(expected.square().sum(), parameters)
            for _ in range(1 + number % 2):
                mine = torch.autograd.grad(loss, parameters, retain_graph=bool(number % 2))
                torch.testing.assert_close(mine, theirs)

    train(*[5, 7] * 4)
    assert background.wait(120)
    train(*[5, 7] * 40)
    stats = multigraph_backend.stats()
    assert (stats["whole_graphs_taken"], stats["whole_graphs_refused"]) == (1, 0)
    assert (stats["failures"], stats["eager_calls"], stats["body_calls"] > 0) == (0, 0, True)
    (said,) = told()
    assert "taken their place" in said
    train(5, 7, 1, 2, 33)
