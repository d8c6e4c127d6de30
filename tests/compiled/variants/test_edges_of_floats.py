"""Python floats that no real number is like: infinities, not-a-number, and zeros of both signs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import multigraph_backend
from multigraph_backend.backend import multigraph
from tests.support.activity import compiles

EDGES = (math.inf, 0.0, -0.0, math.nan, 2.5, -math.inf, -0.0, math.inf)


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal numbers, to the sign of a zero."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    numbers = ~wanted.isnan()
    assert torch.equal(got[numbers].signbit(), wanted[numbers].signbit())


Program = Callable[[torch.Tensor, float], torch.Tensor]
PROGRAMS: dict[str, Program] = {
    "scaled": lambda x, n: x * n,
    "one over": lambda x, n: 1 / torch.full((3,), n) + 0 * x,
    "clamped": lambda x, n: torch.clamp(x, max=n),
    "filled": lambda x, n: x.masked_fill(x > 0, n),
    "between": lambda x, n: torch.where(x > 0, x, n),
    "divided": lambda x, n: x / n if n == 0 else x * n,
    "branch": lambda x, n: x + 1 if n > 3.2 else x - 2,
    "both": lambda x, n: x * n + torch.full((3,), n),
    # arithmetic that is simplified for real numbers
    "twice and back": lambda x, n: x * (2 * n - n),
    "negated": lambda x, n: x / (-n * torch.ones(3)),
    "no difference": lambda x, n: x + (n - n),
}


@pytest.mark.parametrize("first", [3.5, -0.0])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_edge_gives_its_own_result(program: Program, first: float) -> None:
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 3}]}
    compiled = torch.compile(program, backend=multigraph, dynamic=True, options=options)
    for number in (first, 3.5, *EDGES):
        x = torch.randn(3)
        assert_same(compiled(x, number), program(x, number))
    ran = multigraph_backend.stats()
    assert ran["failures"] == ran["eager_calls"] == 0, str(multigraph_backend.explain())
    assert ran["variant_calls"] + ran["generic_calls"] == len(EDGES) + 2
    assert ran["variant_calls"] >= 4  # it has four forms at most, and generic more


def test_edges_through_inductor() -> None:
    def program(x: torch.Tensor, n: float) -> torch.Tensor:
        return torch.cat([x.masked_fill(x > 0, n), 1 / torch.full((3,), n)])

    compiled = torch.compile(program, backend=multigraph, dynamic=True)
    for number in (3.5, *EDGES):
        x = torch.randn(3)
        assert_same(compiled(x, number), program(x, number))
    ran = multigraph_backend.stats()
    assert (ran["generic_calls"], ran["failures"], ran["eager_calls"]) == (len(EDGES) + 1, 0, 0)


def test_a_float_that_a_tensor_stands_for_needs_one_form_for_all_values() -> None:
    compiled = torch.compile(lambda x, n: x * n, backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
    for number in (3.5, *EDGES):
        if not math.isnan(number):  # Dynamo traces that as a constant
            x = torch.randn(3)
            assert_same(compiled(x, number), x * number)
    assert compiles() == (0, 1)


@pytest.mark.parametrize(
    "program", [lambda x, n: x + n / n, lambda x, n: x * (1 / (1 / n))], ids=["quotient", "inverse"]
)
def test_an_error_of_pythons_arithmetic_is_raised(program: Program) -> None:
    """torch takes `n / n` for 1, also where n is 0."""
    compiled = torch.compile(program, backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
    for number in (3.5, 2.5, 0.0, 4.5, -0.0):
        x = torch.randn(3)
        if number:
            assert_same(compiled(x, number), program(x, number))
        else:
            with pytest.raises(ZeroDivisionError):
                compiled(x, number)
    assert multigraph_backend.stats()["generic_calls"] == 3
