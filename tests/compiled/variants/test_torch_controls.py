"""torch's own controls hold with variants as without: stances, reset, modes, autocast, optimizers, DDP's splitting."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters

import multigraph_backend
from multigraph_backend.backend import multigraph
from tests.support.activity import assert_right, compiles, ran, variants

EIGHT: list[dict[str, Any]] = [{"x[0]": 8}]


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * x.shape[0]


def compile(
    function: Callable[..., Any],
    specialize: list[dict[str, Any]] = EIGHT,
    compiler: Any = "aot_eager",
    backend: Any = multigraph,
    dynamic: bool | None = True,
    **more: Any,
) -> Any:
    options = {"specialize": specialize, "compiler": compiler}
    return torch.compile(function, backend=backend, dynamic=dynamic, options=options, **more)


@pytest.fixture(params=["name", "callable"])
def backend(request: pytest.FixtureRequest) -> Any:
    """The backend as a user gives it: torch treats a name and a callable differently (tracing state, guards)."""
    if request.param == "callable":
        return multigraph
    assert "multigraph" in torch._dynamo.list_backends(exclude_tags=()), "install the package: scripts/install"
    return "multigraph"


# ---------------------------------------------------------------- stances


def test_eager_on_recompile_uses_what_is_compiled_and_compiles_nothing() -> None:
    compiled = compile(f)
    assert_right(compiled, f, torch.randn(9, 4))
    with torch.compiler.set_stance("eager_on_recompile"):
        with ran(generic=2):
            assert_right(compiled, f, torch.randn(8, 4))
            assert_right(compiled, f, torch.randn(9, 4))
        with ran():  # another dtype is another trace: torch runs the function itself
            assert_right(compiled, f, torch.randn(9, 4, dtype=torch.float64))
    assert compiles() == (0, 1)
    with ran(variants=1):
        assert_right(compiled, f, torch.randn(8, 4))


def test_eager_on_recompile_with_nothing_compiled() -> None:
    def trace_only(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise RuntimeError("never")

    compiled = compile(f, [{"x[0]": 8}, {"x[0]": 9}])
    assert_right(compiled, f, torch.randn(8, 4))
    with torch.compiler.set_stance("eager_on_recompile"), ran(eager=1):
        assert_right(compiled, f, torch.randn(9, 4))
    assert compiles() == (1, 0)


def test_fail_on_recompile() -> None:
    compiled = compile(f)
    assert_right(compiled, f, torch.randn(8, 4))
    with torch.compiler.set_stance("fail_on_recompile"):
        with ran(variants=1):
            assert_right(compiled, f, torch.randn(8, 4))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            compiled(torch.randn(9, 4))
    assert compiles() == (1, 0)


def test_force_eager() -> None:
    compiled = compile(f)
    with torch.compiler.set_stance("force_eager"), ran():
        assert_right(compiled, f, torch.randn(8, 4))
    assert multigraph_backend.stats()["regions"] == 0
    with ran(variants=1):
        assert_right(compiled, f, torch.randn(8, 4))
    with torch.compiler.set_stance("force_eager"), ran():
        assert_right(compiled, f, torch.randn(8, 4))


def test_eager_then_compile() -> None:
    compiled = compile(f)
    with torch.compiler.set_stance("eager_then_compile"):
        with ran():
            assert_right(compiled, f, torch.randn(8, 4))
        assert_right(compiled, f, torch.randn(9, 4))
        with ran(variants=2):
            assert_right(compiled, f, torch.randn(8, 4))
            assert_right(compiled, f, torch.randn(8, 4))


# ---------------------------------------------------------------- reset, errors, graph breaks, other backends


def test_reset_forgets_all_variants(backend: Any) -> None:
    compiled = compile(f, backend=backend)
    assert_right(compiled, f, torch.randn(8, 4))
    torch._dynamo.reset()
    assert multigraph_backend.explain().to_dict()["regions"] == []
    with ran(variants=1, generic=1):
        assert_right(compiled, f, torch.randn(8, 4))
        assert_right(compiled, f, torch.randn(9, 4))
    assert compiles() == (2, 1)


@pytest.mark.parametrize("suppressed", [False, True])
def test_suppress_errors(suppressed: bool) -> None:
    """A wrong option is an error at the first call; with suppress_errors torch runs the function itself."""
    compiled = torch.compile(f, backend=multigraph, options={"specialise": EIGHT})
    x = torch.randn(8, 4)
    with torch._dynamo.config.patch(suppress_errors=suppressed):
        if suppressed:
            assert_right(compiled, f, x)
        else:
            with pytest.raises(Exception, match="specialize"):
                compiled(x)


def test_a_knob_that_stands_for_one_of_another_module_switches_caches_off() -> None:
    """`force_disable_caches` is torch.compiler.config's, and Inductor's by another name."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    for off in (True, False):
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(scaled, backend=multigraph, options={"inductor": {"force_disable_caches": off}})
        assert_right(run, scaled, torch.randn(5))
        asked = sum(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss"))
        assert (asked == 0) == off


def test_fullgraph() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return f(x)

    compiled = compile(f, fullgraph=True)
    with ran(variants=1):
        assert_right(compiled, f, torch.randn(8, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile(breaks, fullgraph=True)(torch.randn(8, 4))


def test_both_sides_of_a_graph_break_are_specialized(backend: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * x.shape[0]
        torch._dynamo.graph_break()
        return y + x.sum()

    compiled = compile(g, backend=backend)
    with ran(variants=2, generic=2):
        assert_right(compiled, g, torch.randn(8, 4))
        assert_right(compiled, g, torch.randn(9, 4))
    assert multigraph_backend.stats()["regions"] == 2


def test_another_backend_for_the_same_function_gets_its_own_code(backend: Any) -> None:
    ours, eager = compile(f, backend=backend), torch.compile(f, backend="eager", dynamic=True)
    for _ in range(2):
        with ran(variants=1):
            assert_right(ours, f, torch.randn(8, 4))
        with ran():
            assert_right(eager, f, torch.randn(8, 4))
    others = compile(f, [{"x[0]": 9}], backend=backend)
    with ran(variants=1, generic=1):
        assert_right(others, f, torch.randn(9, 4))
        assert_right(others, f, torch.randn(8, 4))
    with ran(variants=1):
        assert_right(ours, f, torch.randn(8, 4))


def test_dynamic_sources() -> None:
    compiled = compile(f, dynamic=None)
    with torch.compiler.config.patch(dynamic_sources="L['x']"), ran(variants=1, generic=1):
        assert_right(compiled, f, torch.randn(8, 4))
        assert_right(compiled, f, torch.randn(9, 4))
    assert multigraph_backend.stats()["regions"] == 1


def test_a_size_that_becomes_dynamic_at_its_second_value() -> None:
    compiled = compile(f, [{"x[0]": 8}, {"x[0]": {"multiple_of": 5}}], dynamic=None)
    assert_right(compiled, f, torch.randn(9, 4))
    with ran(variants=2, generic=1):
        assert_right(compiled, f, torch.randn(8, 4))
        assert_right(compiled, f, torch.randn(10, 4))
        assert_right(compiled, f, torch.randn(7, 4))


# ---------------------------------------------------------------- modes of autograd


def test_autocast_around_and_inside() -> None:
    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(x)
            return y @ y.transpose(0, 1) if y.dtype == torch.bfloat16 else y

    inside, plain = Inside(), torch.nn.Linear(4, 4)
    compiled = compile(inside)
    for rows in (9, 8):
        with torch.no_grad(), ran(variants=int(rows == 8), generic=int(rows != 8)):
            assert_right(compiled, inside, torch.randn(rows, 4))
    compiled = compile(plain, [{"input[0]": 8}])
    for enabled in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
            for rows in (9, 8):
                with ran(variants=int(rows == 8), generic=int(rows != 8)):
                    x = torch.randn(rows, 4)
                    assert compiled(x).dtype == (torch.bfloat16 if enabled else torch.float32)
                with ran(variants=int(rows == 8), generic=int(rows != 8)):
                    assert_right(compiled, plain, x)


def test_a_variant_first_met_outside_of_autocast_is_compiled_in_the_state_of_its_trace() -> None:
    seen: list[tuple[bool, bool]] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return gm.forward

    compiled = compile(f, compiler=compiler)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        compiled(torch.randn(9, 4))
        compiled(torch.randn(8, 4))
    compiled(torch.randn(8, 4))
    assert seen == [(True, False), (True, False), (False, True)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_modes_of_autograd(mode: Callable[[], contextlib.AbstractContextManager[None]], compiler: str) -> None:
    model = torch.nn.Linear(4, 4)
    compiled = compile(model, [{"input[0]": 8}], compiler)
    for rows in (8, 9, 8):
        with mode(), ran(variants=int(rows == 8), generic=int(rows != 8)):
            x = torch.randn(rows, 4)
            got = compiled(x)
            torch.testing.assert_close(got, model(x))
            assert got.requires_grad == (mode is torch.enable_grad)
            assert got.is_inference() == (mode is torch.inference_mode)


def test_one_model_in_all_modes_in_turn() -> None:
    model = torch.nn.Linear(4, 4)
    compiled = compile(model, [{"input[0]": 8}])
    for _ in range(2):
        for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad):
            for rows in (8, 9):
                with mode(), ran(variants=int(rows == 8), generic=int(rows != 8)):
                    x = torch.randn(rows, 4)
                    got = compiled(x)
                    torch.testing.assert_close(got, model(x))
                if mode is torch.enable_grad:
                    grads = torch.autograd.grad(got.square().sum(), list(model.parameters()))
                    expected = torch.autograd.grad(model(x.clone()).square().sum(), list(model.parameters()))
                    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_compiled_autograd(compiled_autograd: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    compiled = compile(model, [{"input[0]": 8}])
    for rows in (9, 8, 8, 9):
        x = torch.randn(rows, 4)
        model.zero_grad()
        model(x).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
            before = multigraph_backend.stats()["variant_calls"]
            compiled(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
        assert multigraph_backend.stats()["variant_calls"] - before == int(rows == 8)
    assert multigraph_backend.stats()["failures"] == multigraph_backend.stats()["eager_calls"] == 0


# ---------------------------------------------------------------- training


def _optimizers() -> list[Any]:
    known = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.1}, "Muon": {"lr": 0.1}}
    return [pytest.param(name, more, id=name) for name, more in known.items() if hasattr(torch.optim, name)]


@pytest.mark.parametrize(("name", "more"), _optimizers())
@pytest.mark.parametrize("compile_step", [False, True])
def test_optimizers_move_the_weights_as_in_eager(name: str, more: dict[str, float], compile_step: bool) -> None:
    def train(wrap: Callable[[Any], Any], wrap_step: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 8, bias=False)
        )
        model.double()  # so that Adam's quotients of small numbers can be compared
        optimizer = getattr(torch.optim, name)(model.parameters(), **more)
        run, step = wrap(model), wrap_step(optimizer.step)
        for rows in (16, 9, 16, 8, 16, 9):
            optimizer.zero_grad()
            run(torch.randn(rows, 8, dtype=torch.float64)).square().sum().backward()
            step()
        return [p.detach().clone() for p in model.parameters()]

    def wrap_step(step: Callable[[], None]) -> Callable[[], None]:
        return torch.compile(step, backend=multigraph, options={"compiler": "aot_eager"}) if compile_step else step

    # torch's trace of a step rounds in its own way (Adam, Muon): there, eager is that trace, run eagerly
    expected = train(lambda model: model, lambda step: torch.compile(step, backend="eager") if compile_step else step)
    got = train(lambda model: compile(model, [{"input[0]": [8, 16]}]), wrap_step)
    torch.testing.assert_close(got, expected)
    stats = multigraph_backend.stats()
    assert stats["variant_calls"] == 4
    assert stats["failures"] == stats["eager_calls"] == 0
    assert stats["generic_calls"] >= (8 if compile_step else 2)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")  # of DDP's own making
def test_ddp_splits_a_graph() -> None:
    """Dynamo hands out the parts of a split graph with fake inputs: each is compiled at once, and says so."""
    torch.manual_seed(0)
    model = Deep()
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)  # of two megabytes of weights
    compiled = compile(parallel)
    for rows in (9, 8, 8, 5):
        x = torch.randn(rows, 256)
        model.zero_grad()
        model(x).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        before = multigraph_backend.stats()["generic_calls"]
        out = compiled(x)
        torch.testing.assert_close(out, model(x))
        out.square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
        assert multigraph_backend.stats()["generic_calls"] >= before + 2
    stats = multigraph_backend.stats()
    assert stats["failures"] == stats["eager_calls"] == 0
    assert stats["regions"] == 2, "it was not split"
    for region in multigraph_backend.explain().to_dict()["regions"]:
        assert any("split" in note for note in region["notes"])


# ---------------------------------------------------------------- how sizes are declared


@pytest.mark.parametrize("declared", ["marks", "options", "both"])
def test_marks_and_options(declared: str, backend: Any) -> None:
    specialize = EIGHT if declared != "marks" else []
    compiled = compile(f, specialize, backend=backend, dynamic=None)
    for rows, met in ((9, False), (8, True), (16, declared != "options"), (8, True)):
        x = torch.randn(rows, 4)
        on = [lambda n: n == 8, lambda n: n == 16] if declared == "marks" else [lambda n: n == 16]
        torch._dynamo.mark_dynamic(x, 0, specialize_on=on if declared != "options" else [])
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, f, x)
    assert multigraph_backend.stats()["regions"] == 1


@pytest.mark.parametrize("condition", [8, {"multiple_of": 8}, {"min": 8, "max": 16}])
def test_unbacked_marks(condition: Any) -> None:
    compiled = compile(f, [{"x[0]": condition}], dynamic=None)
    for rows in (5, 8, 16, 1, 8):
        x = torch.randn(rows, 4)
        mark_unbacked(x, 0)
        met = rows == 8 or (rows == 16 and condition != 8)
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, f, x)
    assert multigraph_backend.stats()["regions"] == 1


def test_an_unbacked_size_1_can_be_declared() -> None:
    compiled = compile(f, [{"x[0]": 1}], dynamic=None)
    for rows in (5, 1, 1, 2):
        x = torch.randn(rows, 4)
        mark_unbacked(x, 0)
        with ran(variants=int(rows == 1), generic=int(rows != 1)):
            assert_right(compiled, f, x)
    assert multigraph_backend.stats()["regions"] == 1


def test_integer_inputs() -> None:
    def g(x: torch.Tensor, n: int) -> torch.Tensor:
        return x[:n] * n + torch.arange(n).sum()

    compiled = compile(g, [{"n": 4}, {"n": {"multiple_of": 3}, "x[0]": 8}])
    for rows, n, met in ((8, 5, False), (8, 4, True), (7, 4, True), (8, 6, True), (7, 6, False), (8, 3, True)):
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, g, torch.randn(rows, 4), n)
    assert [v["calls"] for v in variants()] == [2, 2]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_size_1_declared_and_met(compiler: str) -> None:
    compiled = compile(f, [{"x[0]": 1}, {"x[0]": 8}], compiler)
    for rows in (8, 1, 9, 1, 8):
        with ran(variants=int(rows != 9), generic=int(rows == 9)):
            assert_right(compiled, f, torch.randn(rows, 4))


def test_64_equalities_are_one_graph_and_compile_as_they_are_met() -> None:
    compiled = compile(f, [{"x[0]": list(range(2, 66))}], compiler=lambda gm, inputs: gm.forward)
    for rows in (100, *range(2, 66), 100, *range(2, 66)):
        assert_right(compiled, f, torch.randn(rows, 4), exact=True)
        if rows == 10:
            assert compiles() in ((9, 1), (64, 1))
    stats = multigraph_backend.stats()
    assert (stats["regions"], stats["variants_compiled"], stats["generic_compiled"]) == (1, 64, 1)
    assert (stats["variant_calls"], stats["generic_calls"], stats["eager_calls"]) == (128, 2, 0)
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    assert len(_debug_get_cache_entry_list(f.__code__)) == 1
