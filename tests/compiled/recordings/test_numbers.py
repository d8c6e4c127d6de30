"""Floats that a graph computes with come in a vector, through AOTAutograd and Inductor, in calls and gradients.

The CPU stands for the GPU: its steps read the vector all the same, and nothing is recorded.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from multigraph_backend import _compat
from multigraph_backend.cudagraphs import output_code
from multigraph_backend.cudagraphs.output_code import RecordedCode, Wanted
from multigraph_backend.cudagraphs.partition.cuts import CutRules

EDGES = (0.5, 0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-30, 0.1, -1.5)


class Scaled(nn.Module):
    """A norm as models write it, and a scale, which the backward wants as well."""

    def __init__(self, scale: float, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps, self.scale = nn.Parameter(torch.randn(8)), eps, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return x + (y * self.scale).sin()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with _compat.inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compiled(function: Any, codes: list[RecordedCode]) -> Any:
    """`function`, compiled as for recordings."""
    wanted = Wanted(required=False, must_pay=True, most=5)
    inner = functools.partial(output_code._compile_inner, CutRules(device_type="cpu"), wanted, "a graph")

    def kept(gm: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        codes.append(inner(gm, inputs, **settings))
        return codes[-1]

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return _compat.compile_fx(gm, inputs, inner_compile=kept)

    return torch.compile(function, backend=backend, dynamic=True)


def test_calls_have_eagers_numbers_at_every_value() -> None:
    codes: list[RecordedCode] = []
    model = nn.Sequential(Scaled(0.5), Scaled(1.25), Scaled(-0.75))
    run = compiled(model, codes)
    with torch.no_grad():
        for rows, value in enumerate((0.5, *EDGES), 2):
            model[1].scale = value
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(x), model(x), equal_nan=True)
    lifted = [code.lifted.places for code in codes if code.lifted is not None]
    assert lifted
    assert len(lifted[0]) == 6  # three epsilons, three scales


@pytest.mark.parametrize("value", [0.5, -0.0, 1.0, math.nan])
def test_gradients_are_eagers_where_a_number_is_handed_on_to_the_backward(value: float) -> None:
    codes: list[RecordedCode] = []
    model = nn.Sequential(Scaled(0.7), Scaled(0.3))
    other = copy.deepcopy(model)
    run = compiled(model, codes)
    for scale in (0.7, value, 0.7):
        model[1].scale = other[1].scale = scale
        x = torch.randn(3, 8, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        run(x).sin().sum().backward()
        other(same).sin().sum().backward()
        mine = [value.grad for value in (x, *model.parameters())]
        theirs = [value.grad for value in (same, *other.parameters())]
        torch.testing.assert_close(mine, theirs, equal_nan=True)
        for parameter in (*model.parameters(), *other.parameters()):
            parameter.grad = None
    ahead, behind = codes[:2]  # torch makes NaN a constant of graphs of its own
    assert (ahead.spec.is_backward, behind.spec.is_backward) == (False, True)
    assert ahead.lifted is not None
    assert behind.lifted is not None
    assert (len(ahead.lifted.places), len(behind.lifted.places)) == (4, 2)
    assert set(ahead.lifted.places) <= set(ahead.spec.unread)


def test_a_number_that_is_a_tensor_of_the_programs_own() -> None:
    """It is changed between calls, and in the call; what is computed of it alone comes back.

    Where stock traces alone, as here, a change of one in float64 is lost before torch 2.15.
    """

    def step(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * t
        t.add_(1)
        return y + t, t * 2

    codes: list[RecordedCode] = []
    run = compiled(step, codes)
    t, other = torch.tensor(0.25), torch.tensor(0.25)
    for value in (0.25, -0.0, 0.0, math.inf, 2.0):
        t.fill_(value)
        other.fill_(value)
        x = torch.randn(4)
        torch.testing.assert_close(run(x, t), step(x, other), equal_nan=True)
        torch.testing.assert_close(t, other, equal_nan=True)
    assert all(code.lifted is not None for code in codes)
