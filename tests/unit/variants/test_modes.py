"""A mode, which libraries pass along, is met with any compiler: it does what it can, and what it cannot is said."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.options import Options, OptionsError

MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def f(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + x.shape[0]


def plain(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


given: list[Any] = []


def with_mode(gm: torch.fx.GraphModule, inputs: list[Any], mode: str | None = None) -> Callable[..., Any]:
    given.append(mode)
    return gm.forward


def with_anything(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
    given.append(kwargs.get("mode"))
    return gm.forward


class Compiler:
    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], *, mode: str = "") -> Callable[..., Any]:
        given.append(mode)
        return gm.forward


def run(compiled: Callable[..., Any]) -> list[str]:
    """Notes of the only region, after a call that is right."""
    x = torch.randn(5, 3)
    torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    assert region["generic"]["state"] == "ready"
    return list(region["notes"])


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch._dynamo.reset()
    given.clear()


def called(compiler: Any) -> str:
    """The same in every process, which a function's text is not."""
    return compiler if isinstance(compiler, str) else getattr(compiler, "__name__", type(compiler).__name__)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", plain, functools.partial(plain)], ids=called)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_torch_without_effect_is_a_note(
    mode: str, compiler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library gives the mode, the operator the compiler; it was an error, and no call ran."""
    if isinstance(compiler, str):
        monkeypatch.setenv("MULTIGRAPH_OPTIONS", f'{{"*": {{"compiler": "{compiler}"}}}}')
        compiled = torch.compile(f, backend=multigraph, mode=mode)
    else:
        compiled = torch.compile(f, backend=multigraph, options={"mode": mode, "compiler": compiler})
    (note,) = run(compiled)
    why = "only Inductor's code is recorded in CUDA graphs" if mode == "reduce-overhead" else "only Inductor tunes its"
    assert note.startswith(f"mode {mode!r} has no effect, for the compiler is {compiler!r}, and {why}")
    assert sum(note in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("compiler", [with_mode, with_anything, Compiler(), functools.partial(with_mode)], ids=called)
@pytest.mark.parametrize("mode", [*MODES, "fastest"])
def test_a_compiler_that_has_a_use_for_a_mode_is_given_it(mode: str, compiler: Any) -> None:
    assert run(torch.compile(f, backend=multigraph, options={"mode": mode, "compiler": compiler})) == []
    assert given == [mode]


def test_a_registered_backend_is_given_a_mode_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (with_mode, with_anything):
        monkeypatch.setattr(backend, "_tags", (), raising=False)
        monkeypatch.setitem(registry._BACKENDS, backend.__name__, None)
        monkeypatch.setitem(registry._COMPILER_FNS, backend.__name__, backend)
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", '{"*": {"compiler": "with_mode"}}')
    assert run(torch.compile(f, backend=multigraph, mode="reduce-overhead")) == []
    assert given == ["reduce-overhead"]
    assert Options.build({"compiler": "with_anything", "mode": "reduce-overhead"}, environ={}).mode is None


@pytest.mark.parametrize("compiler", ["inductor", "eager", plain, with_mode])
def test_the_default_mode_is_none(compiler: Any) -> None:
    options = Options.build({"compiler": compiler}, "default", environ={})
    assert (options.mode, options.notes, options.inductor) == (None, (), ())
    assert options == Options.build({"compiler": compiler}, environ={})


@pytest.mark.parametrize("compiler", ["inductor", "eager", plain], ids=called)
def test_a_mode_that_nobody_knows_is_an_error(compiler: Any) -> None:
    with pytest.raises(
        OptionsError, match=r"option 'mode': expected one of 'default'.*\(did you mean 'reduce-overhead'"
    ):
        Options.build({"compiler": compiler, "mode": "reduce_overhead"}, environ={})


def test_a_note_is_there_for_graphs_that_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "all")
    options = {"mode": "reduce-overhead", "compiler": "eager"}
    at_once, note = run(torch.compile(f, backend=multigraph, options=options))
    assert at_once.startswith("compiled at once")
    assert note.startswith("mode 'reduce-overhead' has no effect")
