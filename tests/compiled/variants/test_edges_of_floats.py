"""Python floats that no real number is like: infinities, not-a-number, and zeros of both signs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


WithSizes = Callable[[torch.Tensor, float, float], torch.Tensor]
#: sizes, and a second float, meet the first: expressions of theirs have no sign of zero
WITH_SIZES: dict[str, WithSizes] = {
    "times a size": lambda x, s, t: x + x.shape[0] * s,
    "over a size": lambda x, s, t: x * (s / x.shape[0]),
    "halved, over a size": lambda x, s, t: x * (s / 2.0 / x.shape[1]),
    "over a float": lambda x, s, t: x * (s / t if t else s),
    "times a float": lambda x, s, t: x * (s * t),
    "times less than nothing": lambda x, s, t: x * (-x.shape[0] * s),
    "times both": lambda x, s, t: x * (s * x.shape[0] * t),
    "negated": lambda x, s, t: x * -(s * x.shape[0]),
    "times what may be of either sign": lambda x, s, t: x * (s * (x.shape[0] - 4)),
    "to the third": lambda x, s, t: x * ((s * s * s) * x.shape[0]),
    "added": lambda x, s, t: x * (s + x.shape[0] * s),
    "taken off": lambda x, s, t: x * (s - x.shape[0] * t),
    "a size taken off": lambda x, s, t: x * (s - (x.shape[0] - 4)),
    "all elements": lambda x, s, t: x * (x.numel() * s),
    "two sizes": lambda x, s, t: x * (s * x.shape[0] + s * x.shape[1]),
    "in a checkpoint": lambda x, s, t: checkpoint(lambda y: y * (s * y.shape[0]), x, use_reentrant=False),
    "given to a checkpoint": lambda x, s, t: checkpoint(lambda y, z: y * z, x, s * x.shape[0], use_reentrant=False),
}
PAIRS = ((0.5, 2.0), (-0.0, 2.0), (-0.0, -3.0), (0.0, 2.0), (0.0, -3.0), (2.0, -0.0), (-1.5, 0.0), (-0.0, math.inf))


@pytest.mark.parametrize("program", WITH_SIZES.values(), ids=WITH_SIZES)
def test_zeros_keep_their_signs_where_they_meet_sizes_and_other_floats(program: WithSizes) -> None:
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 5}]}
    compiled = torch.compile(program, backend=multigraph, dynamic=True, options=options)
    for s, t in PAIRS:
        for rows in (5, 3, 4):
            x = torch.tensor([[-0.0, 0.0, 1.0, -1.0]]).repeat(rows, 1)
            assert_same(compiled(x, s, t), program(x, s, t))
    assert multigraph_backend.stats()["variant_calls"] >= 1, str(multigraph_backend.explain())


def test_a_zero_over_a_float_that_is_added_to_other_numbers_has_one_form_for_all_floats() -> None:
    """As where a rate changes at each step of a training that decays nothing."""

    def program(x: torch.Tensor, rate: float, decay: float) -> torch.Tensor:
        return x * (1 - decay / rate)

    compiled = torch.compile(program, backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
    for decay in (0.0, -0.0):
        for rate in (0.5, -0.25, 0.125, 3.0):
            x = torch.tensor([-0.0, 0.0, 1.5])
            assert_same(compiled(x, rate, decay), program(x, rate, decay))
    ran = multigraph_backend.stats()
    assert (ran["generic_compiled"], ran["eager_calls"]) == (2, 0), str(multigraph_backend.explain())


def test_a_zero_whose_sign_is_not_known_runs_eagerly_and_is_said() -> None:
    def program(x: torch.Tensor, s: float) -> torch.Tensor:
        return x * (s * (x.shape[0] - 9))

    compiled = torch.compile(program, backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
    for s in (0.5, -0.0, 0.5):
        x = torch.ones(3, 2)
        assert_same(compiled(x, s), program(x, s))
    assert multigraph_backend.stats()["eager_calls"] == 1
    assert "the sign of a zero is not known of mul" in str(multigraph_backend.explain())


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
