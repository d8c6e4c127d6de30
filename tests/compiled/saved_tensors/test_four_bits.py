"""Training steps whose saved tensors have two elements in a byte: gradients within their bound, and it was done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import Match, Rule, Scaled
from multigraph_backend.options import Options, OptionsError
from tests.support.saved_tensors.models import Block, Mlp, accounts, assert_step, compiled, rules, step


def packed() -> set[str]:
    return {entry.packed for said in accounts() for entry in said.tensors if entry.packed}


@pytest.mark.parametrize(
    ("dtype", "stochastic"),
    [
        (torch.float32, False), (torch.bfloat16, True),
        *(
            pytest.param(dtype, stochastic, marks=pytest.mark.slow)
            for dtype, stochastic in (
                (torch.float32, True), (torch.bfloat16, False), (torch.float16, False), (torch.float16, True),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_in_four_bits(dtype: torch.dtype, stochastic: bool) -> None:
    torch.manual_seed(0)
    model = Mlp(32).to(dtype)
    pack = Scaled("int4", per=16, stochastic=stochastic)
    run = compiled(model, rules(pack))
    for rows in (8, 5):
        assert_step(model, run, torch.randn(rows, 32, dtype=dtype), 0.35)
    assert packed() == {str(pack)}
    said = accounts()[0]
    ours = [entry for entry in said.tensors if entry.packed]
    assert sum(entry.bytes_saved for entry in ours) <= sum(entry.bytes for entry in ours) * 12 // (16 * dtype.itemsize)


@pytest.mark.usefixtures("by_operator")
def test_transposes_and_parts_of_a_projection_share_what_is_packed() -> None:
    torch.manual_seed(0)
    model = Block()
    assert_step(model, compiled(model, rules(Scaled("int4", per=32))), torch.randn(4, 16, 32), 0.5)
    (said,) = accounts()
    assert any(entry.packed and entry.with_ for entry in said.tensors)
    assert "int4, scaled per block of 32" in packed()


@pytest.mark.parametrize("width", [33, 35])
def test_rows_of_odd_length(width: int) -> None:
    torch.manual_seed(0)
    model = Mlp(width)
    assert_step(model, compiled(model, rules(Scaled("int4", per=11))), torch.randn(8, width), 0.35)
    rows = "int4, scaled per row, for its rows are of 35 elements, no multiple of 11"
    assert packed() == ({"int4, scaled per block of 11"} if width == 33 else {rows})


def test_sizes_that_change() -> None:
    torch.manual_seed(0)
    model = Mlp(32)
    run = compiled(model, rules(Scaled("int4", per=8)), dynamic=True)
    for rows in (2, 5, 8):
        assert_step(model, run, torch.randn(rows, 32), 0.5)
    assert packed() == {"int4, scaled per block of 8"}
    assert any("s" in entry.shape for entry in accounts()[0].tensors)


class Sums(torch.nn.Module):
    """Saves what is as long as its rows, which no parameter fixes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.cos().cumsum(0) * 0.01).sin().cumsum(0) * 0.01).sin().cumsum(0)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rows_that_differ_are_not_fixed_to_the_length_of_a_block(kind: str) -> None:
    model = Sums()
    run = compiled(model, rules(Scaled(kind, per=64)), dynamic=True)
    for length in (64, 100, 128, 64):
        assert_step(model, run, torch.randn(480, length), 0.05)
    assert len(multigraph_backend.explain().regions) == 1
    assert packed() == {"int8, scaled per row, for its rows differ from call to call"}


def test_rows_whose_length_changes_are_int8() -> None:
    """There a byte cannot hold two: how many bytes there are would not tell how long a row is."""

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight @ (self.weight @ x).tanh()).sin()

    torch.manual_seed(0)
    model = Rows()
    run = compiled(model, rules(Scaled("int4", per=8)), dynamic=True)
    for columns in (8, 13, 24):
        assert_step(model, run, torch.randn(16, columns), 0.05)
    assert "int8, scaled per row, for its rows differ from call to call" in packed()


def test_what_is_not_finite_stays_so() -> None:
    model = Mlp(32)
    run = compiled(model, rules(Scaled("int4")))
    x = torch.randn(4, 32)
    x[1, 3] = float("nan")
    gradients = step(model, run, x)[1:]
    assert not gradients[-1][1].isfinite().any()
    assert gradients[-1][[0, 2, 3]].isfinite().all()


@pytest.mark.usefixtures("by_operator")
def test_within_a_budget() -> None:
    torch.manual_seed(0)
    model = Mlp(32)
    said: list[int] = []
    for budget in (1.0, 0.2):
        torch._dynamo.reset()
        run = compiled(model, rules(Scaled("int4", per=8)), saved_tensors_budget=budget)
        step(model, run, torch.randn(64, 32))
        said.append(accounts()[-1].bytes_saved)
    assert said[1] < said[0]
    assert packed() & {"int4, scaled per block of 8"}


def test_the_rule_as_json_and_its_errors() -> None:
    given: Any = {"saved_tensors": [{"match": {"min_bytes": 0}, "pack": {"scale": "int4", "per": 32}}]}
    assert Options.build(given, environ={}).saved_tensors == (Rule(Match(min_bytes=0), Scaled("int4", per=32)),)
    with pytest.raises(OptionsError, match=r"dtype 'int3' is not possible here \(did you mean 'int\d'"):
        Options.build({"saved_tensors": [{"pack": {"scale": "int3"}}]}, environ={})
