"""Python floats: turned into tensors where the compiler can, otherwise part of the condition; never a stale value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import multigraph_backend
from multigraph_backend.backend import multigraph

PROGRAMS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "added": lambda x, n: x + n,
    "filled": lambda x, n: torch.full((3,), n) + x.sum(),
    "sine": lambda x, n: x * math.sin(n),
    "branch": lambda x, n: x + 1 if n > 3.2 else x - n,
    "truncated": lambda x, n: x * int(n),
    "clamped": lambda x, n: torch.clamp(x, min=-n, max=n),
    "repeated": lambda x, n: x.repeat(int(n // 1)),
    "counted": lambda x, n: torch.arange(0, n, 0.5) + x[0],
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_every_value_of_a_float_gives_its_own_result(
    program: Callable[[torch.Tensor, float], torch.Tensor], compiler: str
) -> None:
    options = {"compiler": compiler, "specialize": [{"x[0]": 5}]}
    compiled = torch.compile(program, backend=multigraph, dynamic=True, options=options)
    for size, number in ((5, 3.5), (5, 4.5), (6, 3.5), (5, 5.25), (6, 2.5), (5, 3.5)):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x, number), program(x, number))
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"]) == (4, 2)
    assert ran["failures"] == ran["eager_calls"] == 0


def test_a_float_that_a_module_holds_and_torch_found_constant_is_a_number_in_the_graph() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8, eps=1e-2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    model = Model()
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 5}]}
    compiled = torch.compile(model, backend=multigraph, dynamic=True, options=options)
    for rows in (5, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"], ran["failures"]) == (1, 1, 0)


def test_floats_inside_a_checkpointed_block_are_numbers_there_or_part_of_the_condition() -> None:
    class Block(torch.nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.norm, self.shift = torch.nn.RMSNorm(8, eps=10 * shift), shift

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return (self.norm(x) + self.shift).sin() * scale

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(1e-3), Block(1e-2)

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            inner = checkpoint(self.first, x, scale, use_reentrant=False)
            return checkpoint(self.second, inner, 0.25, use_reentrant=False)  # type: ignore[no-any-return]

    model = Model()
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 5}]}
    compiled = torch.compile(model, backend=multigraph, dynamic=True, options=options)
    for rows, scale in ((5, 2.5), (6, 2.5), (6, 3.25), (5, 3.25)):
        x, y = (torch.randn(rows, 8, requires_grad=True) for _ in range(2))
        with torch.no_grad():
            y.copy_(x)
        actual, expected = compiled(x, scale), model(y, scale)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*torch.autograd.grad(actual.sum(), x), *torch.autograd.grad(expected.sum(), y))
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"], ran["eager_calls"], ran["failures"]) == (2, 2, 0, 0)


def test_floats_of_one_model_do_not_leak_into_the_compile_of_another() -> None:
    def constant(x: torch.Tensor, n: float) -> torch.Tensor:
        return torch.full((3,), n) + x.sum()

    def scaled(x: torch.Tensor, n: float) -> torch.Tensor:
        return x * n

    x = torch.randn(5)
    for function in (constant, scaled, constant):
        compiled = torch.compile(function, backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
        for number in (1.5, 2.5):
            torch.testing.assert_close(compiled(x, number), function(x, number))
    assert multigraph_backend.stats()["failures"] == 0
