"""Sums with a zero are spelled so that they stay, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from multigraph_backend.lower.sums_with_zero import keep_sums

Program = Callable[[torch.Tensor], Any]


def captured(program: Program, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    found: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=True)(*inputs)
    return found[0]


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y += 0.0
    y.sub_(-0.0)
    return y


KEPT: list[Program] = [
    lambda x: x + 0.0,
    lambda x: 0.0 + x,
    lambda x: x + 0,
    lambda x: x - -0.0,
    lambda x: torch.add(x.relu(), 0.0),
    lambda x: torch.nn.functional.softplus(x).add(0.0),
    lambda x: torch.relu(x * 2).sub(-0.0),
    in_place,
]
LEFT: list[Program] = [
    lambda x: x + -0.0,
    lambda x: x - 0.0,
    lambda x: x - 0,
    lambda x: x + 1.0,
    lambda x: 0.0 - x,
    lambda x: torch.add(x, 0.0, alpha=3),
    lambda x: x.new_zeros(x.shape[0] + 0) + x.size(1),
]


@pytest.mark.parametrize("number", range(len(KEPT)))
def test_sums_with_a_zero_are_kept(number: int) -> None:
    x = torch.tensor([[-0.0, 0.0, -1.0]])
    gm = captured(KEPT[number], x)
    keep_sums(gm)
    assert "alpha = 2" in gm.code
    sizes = len(gm.graph.find_nodes(op="placeholder")) - 1
    (got,) = gm(*[3] * sizes, x)
    wanted = KEPT[number](x)
    assert torch.equal(torch.signbit(got), torch.signbit(wanted))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("number", range(len(LEFT)))
def test_other_sums_stay_as_they_are(number: int) -> None:
    gm = captured(LEFT[number], torch.randn(4, 4))
    before = gm.code
    keep_sums(gm)
    assert gm.code == before


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_zeros_of_a_float_argument_keep_their_sign(compiler: str) -> None:
    def program(x: torch.Tensor, s: float) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y += s
        return x * s + s / 2, (x + s) * x.shape[0], x - s, torch.relu(x) + s * 3, y

    torch._dynamo.reset()
    run = torch.compile(program, backend="multigraph", dynamic=True, options={"compiler": compiler})
    for s in (-0.0, 0.0, 1.0, -0.0, 0.0):
        x = torch.tensor([-0.0, 0.0, -1.0, 2.0])
        for got, wanted in zip(run(x, s), program(x, s), strict=True):
            assert torch.equal(got, wanted)
            assert torch.equal(torch.signbit(got), torch.signbit(wanted)), (s, got, wanted)


def test_stock_leaves_out_what_is_added() -> None:
    """docs/sharp-edges.md says from which torch on."""
    x = torch.tensor([-0.0, 1.0])
    torch._dynamo.reset()
    stock = torch.compile(lambda x: 1 / (x + 0.0), backend="inductor")
    torch._dynamo.reset()
    ours = torch.compile(lambda x: 1 / (x + 0.0), backend="multigraph")
    left_out = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    assert (stock(x)[0] < 0) == left_out
    assert ours(x)[0] > 0
