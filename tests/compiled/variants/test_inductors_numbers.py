"""Where Inductor's code on the CPU differs from eager: the cases that docs/sharp-edges.md names.

Each row fails when torch mends it, and the page has to say so then.  Without generated code the numbers are eager's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

INF, NAN = float("inf"), float("nan")


def floor_division(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x // y, torch.div(x, y, rounding_mode="floor")


def softshrink(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (functional.softshrink(x),)


def variance_of_one(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.var(unbiased=False),)


def pooled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (functional.max_pool2d(x, 3, 2, 1, return_indices=True)[1],)


def root(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x**0.5,)


ROWS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "floor division": (floor_division, (torch.tensor([3.0]), torch.tensor([0.3]))),
    "floor division of infinity": (floor_division, (torch.tensor([INF]), torch.tensor([2.0]))),
    "floor division by infinity": (floor_division, (torch.tensor([-1.0]), torch.tensor([INF]))),
    "softshrink of nan": (softshrink, (torch.tensor([NAN, 1.0, -1.0]),)),
    "variance of nan": (variance_of_one, (torch.tensor(NAN),)),
    "variance of infinity": (variance_of_one, (torch.tensor(INF),)),
    "indices of minus infinity": (pooled, (torch.full((1, 1, 4, 4), -INF),)),
    "indices of nan": (pooled, (torch.full((1, 1, 4, 4), NAN),)),
    "root of minus infinity": (root, (torch.tensor([-INF, 4.0], dtype=torch.float16),)),
}

#: the versions of torch from which on a row is right
MENDED = {
    "floor division of infinity": (2, 15),
    "floor division by infinity": (2, 15),
    "softshrink of nan": (2, 15),
}
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def outcome(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], **how: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    return list(torch.compile(function, **how)(*inputs) if how else function(*inputs))


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.allclose(*pair, equal_nan=True) for pair in zip(ones, others, strict=True))


@pytest.mark.parametrize("row", ROWS)
def test_it_is_stocks_number_and_without_generated_code_eagers(row: str) -> None:
    eager = outcome(*ROWS[row])
    stock = outcome(*ROWS[row], backend="inductor")
    assert same(stock, eager) == (MENDED.get(row, (99,)) <= TORCH)
    assert same(outcome(*ROWS[row], backend="multigraph"), stock)
    assert same(outcome(*ROWS[row], backend="multigraph", options={"compiler": "aot_eager"}), eager)


def test_the_backward_of_such_a_pooling_raises_or_gives_gradients_elsewhere() -> None:
    def gradient(backend: str | None) -> torch.Tensor | None:
        torch._dynamo.reset()
        x = torch.full((1, 1, 6, 6), -INF, requires_grad=True)
        pool = functools.partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1)
        y = (pool if backend is None else torch.compile(pool, backend=backend))(x)
        try:
            y.backward(torch.ones_like(y))
        except RuntimeError as error:
            if "index out of bounds" in str(error):
                return None
            raise
        return x.grad

    eager = gradient(None)
    for backend in ("inductor", "multigraph"):
        found = gradient(backend)
        assert found is None if TORCH >= (2, 13) else not torch.equal(found, eager)
