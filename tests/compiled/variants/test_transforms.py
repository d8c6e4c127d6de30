"""Transforms of torch.func, also of each other: the graph has values that are wrapped once for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

from tests.support.activity import assert_right

WEIGHT = torch.randn(4)


def of(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * WEIGHT).sum()


def changing(x: torch.Tensor) -> torch.Tensor:
    made = x * WEIGHT
    made.mul_(x)
    return made.sin().sum()


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hessian": lambda x: hessian(of)(x),
    "hessian of an in-place change": lambda x: hessian(changing)(x),
    "jacfwd of jacrev": lambda x: jacfwd(jacrev(of))(x),
    "jacrev of jacrev": lambda x: jacrev(jacrev(of))(x),
    "jacfwd of jacfwd": lambda x: jacfwd(jacfwd(of))(x),
    "three deep": lambda x: jacrev(hessian(of))(x),
    "grad of grad": lambda x: grad(lambda y: grad(of)(y).sum())(x),
    "jvp of grad": lambda x: jvp(grad(of), (x,), (torch.ones_like(x),))[1],
    "vjp of grad": lambda x: vjp(grad(of), x)[1](torch.ones_like(x))[0],
}


#: with symbolic sizes Dynamo itself fails on it
FIXED = ("jacfwd of jacfwd",)


@pytest.mark.parametrize(
    ("name", "dynamic"), [(name, way) for name in PROGRAMS for way in (None, True) if not (way and name in FIXED)]
)
def test_a_transform_is_as_in_eager(name: str, dynamic: bool | None) -> None:
    compiled = torch.compile(
        PROGRAMS[name], backend="multigraph", fullgraph=True, dynamic=dynamic, options={"compiler": "aot_eager"}
    )
    for _ in range(2):
        assert_right(compiled, PROGRAMS[name], torch.randn(4))


def test_a_hessian_is_right_by_inductor() -> None:
    compiled = torch.compile(PROGRAMS["hessian"], backend="multigraph", fullgraph=True, dynamic=True)
    assert_right(compiled, PROGRAMS["hessian"], torch.randn(4))
