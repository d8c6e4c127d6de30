"""`"compile": "eager"`: all that is declared is compiled at the first call; what cannot be costs itself alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.region.region import VariantFailed
from tests.support.activity import assert_right, compiles, ran, variants

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 + x.shape[0]


def compiled(specialize: list[dict[str, object]], compiler: Compiler | str = "aot_eager", **options: object) -> Any:
    chosen = {"specialize": specialize, "compiler": compiler, "compile": "eager", **options}
    return torch.compile(f, backend=multigraph, dynamic=True, options=chosen)


def failing_for(*sizes: int) -> Compiler:
    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        for x in inputs:
            if isinstance(x, torch.Tensor) and any(statically_known_true(x.shape[0] == size) for size in sizes):
                raise RuntimeError("no such instruction")
        return gm.forward

    return compiler


BELOW_TWO: dict[str, dict[str, object]] = {
    "at most 1": {"max": 1},
    "from 0 to 1": {"min": 0, "max": 1},
    "at most 3, in fours": {"max": 3, "multiple_of": 4},
}


@pytest.mark.parametrize("on_failure", ["fallback", "raise"])
@pytest.mark.parametrize("condition", [*BELOW_TWO.values(), 1, 0], ids=[*BELOW_TWO, "1", "0"])
def test_what_no_call_of_the_graph_satisfies_is_not_compiled(condition: object, on_failure: str) -> None:
    run = compiled([{"x[0]": condition}, {"x[0]": {"min": 4, "max": 9}}], on_failure=on_failure)
    with ran(variants=1, generic=1):
        assert_right(run, f, torch.randn(5, 3))
        assert_right(run, f, torch.randn(12, 3))
    never, other = variants()
    assert never["state"] == "inactive"
    assert ">= 2" in never["reason"]
    assert other["state"] == "ready"
    holds = condition in (1, {"max": 1}, {"min": 0, "max": 1})
    with ran(variants=int(holds), generic=int(not holds)):
        assert_right(run, f, torch.randn(1, 3))  # a graph of its own


def test_an_example_is_a_size_that_the_graph_can_have() -> None:
    run = compiled([{"x[0]": {"max": 3}}, {"x[0]": {"multiple_of": 5}}], on_failure="raise")
    with ran(variants=2, generic=1):
        for rows in (3, 10, 7):
            assert_right(run, f, torch.randn(rows, 12))
    assert compiles() == (2, 1)


def test_the_others_are_compiled_where_one_fails_and_the_failure_is_raised() -> None:
    run = compiled([{"x[0]": [4, 8, 16]}], failing_for(4), on_failure="raise")
    with pytest.raises(VariantFailed, match=r"x\[0\] == 4 could not be compiled"):
        run(torch.randn(5, 3))
    assert [entry["state"] for entry in variants()] == ["failed", "ready", "ready"]
    assert compiles() == (2, 1)
    with ran(variants=2, generic=2):
        for rows in (8, 16, 4, 5):
            assert_right(run, f, torch.randn(rows, 3), exact=True)


def test_each_failure_is_in_the_error() -> None:
    run = compiled([{"x[0]": [4, 8, 16]}], failing_for(4, 16), on_failure="raise")
    with pytest.raises(VariantFailed, match=r"x\[0\] == 4") as caught:
        run(torch.randn(5, 3))
    (note,) = caught.value.__notes__
    assert "x[0] == 16 could not be compiled" in note
    assert [entry["state"] for entry in variants()] == ["failed", "ready", "failed"]


def test_a_failure_costs_one_variant_where_nobody_asks_for_errors() -> None:
    run = compiled([{"x[0]": [4, 8]}], failing_for(4))
    with ran(variants=1, generic=2, failures=1):
        for rows in (5, 8, 4):
            assert_right(run, f, torch.randn(rows, 3), exact=True)
    assert multigraph_backend.stats()["variants_compiled"] == 1


def test_unbacked_sizes_are_made_up() -> None:
    """From torch 2.13 on no graph but that of the first call's sizes could be compiled: calls ran eagerly."""
    x = torch.randn(6, 4)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    made = torch.compile(
        f, backend=multigraph, options={"specialize": [{"x[0]": [4, 1]}], "compiler": "aot_eager", "compile": "eager"}
    )
    assert_right(made, f, x)
    assert compiles() == (2, 1)
    for rows in (4, 1):
        assert_right(made, f, torch.randn(rows, 4))
    assert compiles() == (2, 1)
    assert multigraph_backend.stats()["eager_calls"] == multigraph_backend.stats()["failures"] == 0
