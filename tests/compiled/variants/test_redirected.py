"""Programs that name Inductor get multigraph where torch's variable says so, with what they asked of Inductor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config

import multigraph_backend
from multigraph_backend import redirect
from multigraph_backend.options import Options
from multigraph_backend.region import region, registry


@pytest.fixture
def redirected() -> Iterator[None]:
    with dynamo_config.patch(debug_backend_override=redirect.EVERYTHING):  # what torch makes of the variable
        yield


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).relu()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x).square().mean()
        return loss


def like_trainer(model: Model) -> Callable[..., Any]:
    """transformers.Trainer: `torch_compile=True` is Inductor, by `accelerate`, with mode and backend in one place."""
    plugin = {"backend": "inductor", "mode": "default", "fullgraph": False, "dynamic": None}
    return torch.compile(model, **plugin)


def like_accelerate(model: Model) -> Callable[..., Any]:
    """accelerate's regional compile: each layer in place."""
    model.layer.compile(backend="inductor", mode="reduce-overhead")
    return model


def like_ultralytics(model: Model) -> Callable[..., Any]:
    """A checked list of modes and a hard-wired backend, tried out and given up where it raises."""
    try:
        return torch.compile(model, mode="max-autotune-no-cudagraphs", backend="inductor")
    except Exception:
        return model


def like_sglang(model: Model) -> Callable[..., Any]:
    """The function is compiled, with configuration of Inductor's, for sizes that are constants."""
    options = {"triton.cudagraphs": False, "coordinate_descent_tuning": True}
    return torch.compile(model.forward, backend="inductor", options=options, dynamic=False)


NO_CUDAGRAPHS = (("coordinate_descent_tuning", True), ("max_autotune", True))
CALLERS: dict[str, tuple[Callable[[Model], Callable[..., Any]], Any, tuple[tuple[str, object], ...]]] = {
    "trainer": (like_trainer, "auto", ()),
    "accelerate": (like_accelerate, "auto", ()),
    "ultralytics": (like_ultralytics, False, NO_CUDAGRAPHS),
    "sglang": (like_sglang, False, (("coordinate_descent_tuning", True), ("triton.cudagraphs", False))),
}


@pytest.mark.usefixtures("redirected")
@pytest.mark.parametrize("name", CALLERS)
def test_what_a_library_asks_of_inductor_is_honoured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded where its mode records or says nothing, and not where it does not; with its knobs; and it trains."""
    monkeypatch.delenv("MULTIGRAPH_OPTIONS", raising=False)
    compile_model, cudagraphs, knobs = CALLERS[name]
    model, x = Model(), torch.randn(5, 4)
    (expected,) = torch.autograd.grad(model(x), model.layer.weight)
    (got,) = torch.autograd.grad(compile_model(model)(x), model.layer.weight)
    torch.testing.assert_close(got, expected)
    accepted = [entry.options for entry in registry.living() if isinstance(entry, region.Region)]
    assert {(options.cudagraphs, options.inductor) for options in accepted} == {(cudagraphs, knobs)}
    assert multigraph_backend.stats()["failures"] == 0


def test_options_of_the_environment_go_before_what_a_program_asks_of_inductor() -> None:
    environ = {"MULTIGRAPH_OPTIONS": json.dumps({"*": {"cudagraphs": "auto", "inductor": {"max_autotune": False}}})}
    asked = {"max_autotune": True, "coordinate_descent_tuning": True}
    built = Options.build(environ=environ, redirected=asked)
    assert built.cudagraphs == "auto"
    assert dict(built.inductor) == {"max_autotune": False, "coordinate_descent_tuning": True}
    other = {"MULTIGRAPH_OPTIONS": json.dumps({"*": {"compiler": "aot_eager"}})}
    assert Options.build(environ=other, redirected=asked).inductor == ()
    assert Options.build(environ={}, redirected={"triton.cudagraphs": True, "max_autotune": True}).cudagraphs == "auto"


@pytest.mark.usefixtures("redirected")
def test_who_names_multigraph_keeps_its_options_and_who_names_another_backend_gets_that() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.shape[0]

    called: list[torch.fx.GraphModule] = []

    def own(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        called.append(gm)
        return gm.forward

    x = torch.randn(8)
    options = {"compiler": "eager", "specialize": [{"x[0]": 8}]}
    for backend, given in (("multigraph", options), ("eager", None), ("aot_eager", None), (own, None)):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, dynamic=True, options=given)
        torch.testing.assert_close(compiled(x), function(x))
    assert multigraph_backend.stats()["regions"] == 1
    assert multigraph_backend.stats()["variant_calls"] == 1
    assert len(called) == 1


@pytest.mark.usefixtures("redirected")
def test_export_is_left_alone() -> None:
    exported = torch.export.export(Model(), (torch.randn(2, 4),), strict=True)
    assert multigraph_backend.stats()["regions"] == 0
    assert len(exported.graph.find_nodes(op="output")) == 1


if hasattr(torch.compiler, "set_default_backend"):  # from torch 2.13 on

    def test_the_default_backend_may_be_multigraph() -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x.cos() + 1

        torch.compiler.set_default_backend("multigraph")
        try:
            compiled = torch.compile(function, mode="reduce-overhead")
        finally:
            torch.compiler.set_default_backend(None)
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), function(x))
        assert multigraph_backend.stats()["generic_calls"] == 1
