"""What is declared is a fact of the compiler: seen in the generated code by what it leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.lower import guards
from multigraph_backend.region import registry
from multigraph_backend.region.region import Region

SYMBOL = re.compile(r"\b(?:ks\d+|s\d+|u\d+)\b")


def generated(function: Callable[..., Any], *args: torch.Tensor, specialize: list[Any]) -> str:
    """Inductor's code for the first call, which must run the declared variant (or generic where none is)."""
    torch._dynamo.reset()
    multigraph_backend.reset_stats()
    compiled = torch.compile(function, backend=multigraph, dynamic=True, options={"specialize": specialize})
    outputs, code = run_and_get_code(compiled, *args)
    torch.testing.assert_close(outputs, function(*args))
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"]) == ((1, 0) if specialize else (0, 1))
    assert ran["failures"] == ran["eager_calls"] == 0
    (text,) = code
    return text


def kernels(code: str) -> str:
    return "\n".join(re.findall(r"'''(.*?)'''", code, re.DOTALL))


def test_an_equality_leaves_no_symbolic_size_in_the_code_of_a_linear_layer() -> None:
    linear = torch.nn.Linear(64, 128)
    inputs = torch.randn(32, 64)
    with torch.no_grad():
        assert SYMBOL.search(generated(linear, inputs, specialize=[]))
        assert not SYMBOL.search(generated(linear, inputs, specialize=[{"input[0]": 32}]))


def test_a_multiple_leaves_out_the_loop_for_the_rest() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    generic = kernels(generated(f, torch.randn(64), specialize=[]))
    variant = kernels(generated(f, torch.randn(64), specialize=[{"x[0]": {"multiple_of": 64}}]))
    assert "C10_UNLIKELY" in generic
    assert "sin" in variant
    assert "C10_UNLIKELY" not in variant
    assert SYMBOL.search(variant)  # still any multiple


def test_a_range_spares_the_condition_that_a_reduction_adds() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum()

    def added(specialize: list[Any]) -> tuple[str, ...]:
        generated(f, torch.randn(64), specialize=specialize)
        (region,) = multigraph_backend.explain().regions
        return (region.variants[0] if specialize else region.generic).forms

    assert added([]) == ("x[0] <= 4096",)
    assert added([{"x[0]": {"max": 4096}}]) == ("True",)
    assert added([{"x[0]": {"max": 5000}}]) == ("x[0] <= 4096",)


@pytest.mark.parametrize(
    ("declared", "known", "unknown"),
    [
        ({"x[0]": 32}, ["n == 32"], ["n == 16"]),
        ({"x[0]": {"multiple_of": 16}}, ["n % 16 == 0", "n % 8 == 0"], ["n % 32 == 0", "n > 32"]),
        ({"x[0]": {"min": 10, "max": 100}}, ["n >= 10", "n <= 100"], ["n >= 11", "n % 2 == 0"]),
        ({"x[0]": {"min": 10, "max": 100, "multiple_of": 8}}, ["n >= 16", "n <= 96", "n % 8 == 0"], ["n <= 88"]),
    ],
)
def test_a_compiler_can_ask_for_the_declared_fact(
    declared: dict[str, Any], known: list[str], unknown: list[str]
) -> None:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    answers: dict[str, bool] = {}

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        (size,) = (x.shape[0] for x in inputs if isinstance(x, torch.Tensor))
        for question in (*known, *unknown):
            answers[question] = statically_known_true(eval(question, {"n": size}))
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    options = {"specialize": [declared], "compiler": compiler}
    compiled = torch.compile(f, backend=multigraph, dynamic=True, options=options)
    x = torch.randn(32, 3)
    torch.testing.assert_close(compiled(x), f(x))
    assert multigraph_backend.stats()["variant_calls"] == 1
    assert answers == {**dict.fromkeys(known, True), **dict.fromkeys(unknown, False)}


def test_the_guards_in_the_example_of_their_module_are_true() -> None:
    def asking(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        x = inputs[2]
        assert x.numel() * 4 <= 2**31
        assert x.size(0) != 7
        return gm.forward

    options = {"compiler": asking, "specialize": [{"x[0]": {"multiple_of": 8}}]}
    compiled = torch.compile(lambda x: x.sum(1), backend="multigraph", dynamic=True, options=options)
    torch._dynamo.reset()
    for rows in (15, 16):
        compiled(torch.randn(rows, 4))
    (region,) = (entry for entry in registry.living() if isinstance(entry, Region))
    forms = [form.lowered.guards.text for variant in (region.generic, *region.variants) for form in variant.forms]
    assert forms == ["4*a[1]*a[0] <= 2147483648 and a[0] != 7", "32*a[1]*(a[0]//8) <= 2147483648"]
    assert guards.__doc__ is not None
    assert all(f"\n    {text}\n" in guards.__doc__ for text in forms)
