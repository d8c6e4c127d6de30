"""`measure_gains()` times variants against generic and changes nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

import multigraph_backend
from multigraph_backend.backend import multigraph
from tests.support.activity import assert_right, ran, variants


def for_eight_rows(inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and statically_known_true(x.shape[0] == 8) for x in inputs)


def slow_generic(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Code for eight rows; what serves any number of rows takes 20 ms more."""
    if for_eight_rows(inputs):
        return gm.forward

    def run(*args: Any) -> Any:
        time.sleep(0.02)
        return gm.forward(*args)

    return run


def compiled(function: Callable[..., Any], compiler: Any = slow_generic) -> Callable[..., Any]:
    options = {"specialize": [{"x[0]": 8}], "compiler": compiler}
    return torch.compile(function, backend=multigraph, dynamic=True, options=options)


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + x.shape[0]


def test_a_gain_is_shown_once_it_was_measured() -> None:
    run = compiled(f)
    x = torch.randn(8, 3)
    with ran(variants=1):
        assert_right(run, f, x)
    assert variants()[0]["gain"] is None
    with multigraph_backend.measure_gains(), ran(variants=5, generic=1):
        for _ in range(5):
            assert_right(run, f, x)
        assert_right(run, f, torch.randn(9, 3))
    (shown,) = variants()
    assert shown["gain"] > 3
    assert shown["gain_calls"] == 4
    assert f"{shown['gain']:.2f} times as fast as generic (4 calls)" in str(multigraph_backend.explain())
    with ran(variants=2):
        assert_right(run, f, x)
        assert_right(run, f, x)
    assert variants()[0]["gain_calls"] == 4


def test_variants_that_are_compiled_while_measuring_run_on_their_own_afterwards() -> None:
    run = compiled(f)
    with multigraph_backend.measure_gains(), ran(variants=3):
        for _ in range(3):
            assert_right(run, f, torch.randn(8, 3))
    with ran(variants=1):
        assert_right(run, f, torch.randn(8, 3))
    assert variants()[0]["gain_calls"] == 1


def test_random_numbers_are_drawn_once() -> None:
    def drop(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + 1

    run = compiled(drop, "aot_eager")
    x = torch.randn(8, 300)
    torch.manual_seed(0)
    expected = [run(x) for _ in range(4)]
    torch.manual_seed(0)
    with multigraph_backend.measure_gains():
        torch.testing.assert_close([run(x) for _ in range(4)], expected, rtol=0, atol=0)
    assert variants()[0]["gain_calls"] == 3


def test_a_graph_that_changes_its_inputs_runs_once() -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    run = compiled(add, "aot_eager")
    with multigraph_backend.measure_gains(), ran(variants=3):
        for _ in range(3):
            assert_right(run, add, torch.randn(8, 3))
    assert variants()[0]["gain"] is None


def test_what_goes_wrong_in_generic_costs_the_figure_not_the_call() -> None:
    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        generic = not for_eight_rows(inputs)

        def run(*args: Any) -> Any:
            if generic:
                raise RuntimeError("out of something")
            return gm.forward(*args)

        return run

    run = compiled(f, compiler)
    with multigraph_backend.measure_gains(), ran(variants=3):
        for _ in range(3):
            assert_right(run, f, torch.randn(8, 3))
    assert variants()[0]["gain"] is None


def test_gradients_are_those_of_the_variant() -> None:
    weight = torch.randn(3, 3, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    run = compiled(product, "aot_eager")
    with multigraph_backend.measure_gains():
        for _ in range(3):
            x = torch.randn(8, 3)
            (expected,) = torch.autograd.grad(product(x).sum(), weight)
            (got,) = torch.autograd.grad(run(x).sum(), weight)
            torch.testing.assert_close(got, expected)
    assert variants()[0]["gain_calls"] == 1  # the first call checks the outputs, the next is cold
