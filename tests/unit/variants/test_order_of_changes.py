"""Which changes of inputs stay in the graph that Inductor compiles, and which are taken out of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.lower.order_of_changes import outlives, reads_elsewhere

Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def traced(program: Program) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
    """The first input, and the writes to it, of the functional graph with its copies at the end."""
    functional = torch.func.functionalize(program)
    gm = make_fx(functional, tracing_mode="real")(torch.randn(6, 8), torch.randn(6, 8), torch.tensor([1, 3]))
    gm.graph.eliminate_dead_code()
    changed = gm.graph.find_nodes(op="placeholder")[0]
    writes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert writes
    return changed, [write for write in writes if write.args[0] is changed]


def all_of_it(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    return x.mul_(0.9).add_(y, alpha=0.1) + 1


def running_mean(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    return x.copy_(x * 0.9 + y.mean(0) * 0.1)


def rows_written(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[at] = y[at]
    return x @ y.T


def rows_added_to(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[at] += y[at]
    return x.sum()


def slice_written(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[1:3] = y[1:3]
    return x.sum()


def slice_updated(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[1:3, ::2].mul_(2.0).add_(1.0)
    return x.sum()


def two_slices(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[0] = 0.25
    x[1:].sigmoid_()
    return None


def by_its_norm(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    return x.div_(x.norm() + 1)


def by_a_product(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    return x.copy_(torch.tanh(x @ y.T @ y))


def flattened(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    return x.view(-1).mul_(y.view(-1))


@pytest.mark.parametrize(
    "program",
    [all_of_it, running_mean, rows_written, rows_added_to, slice_written, slice_updated, two_slices, by_its_norm,
     by_a_product, flattened],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_caches_states_and_updates_stay(program: Program) -> None:
    changed, writes = traced(program)
    assert not reads_elsewhere(changed, writes)
    assert not outlives(changed, writes)


def reversed_rows(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    return x.copy_(x.flip(0))


def reversed_part(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[1:, :4] = x.flip(0)[1:, :4]


def the_next_row(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[1:] = x[:-1] * 2


def another_part(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[1:3].copy_(x[2:4] + x[1:3])


def other_rows(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[at] = x[at + 1]


def transposed(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x[:, :6] = x[:, :6].T.sin()


def one_row_everywhere(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x.add_(x[0].clone())


def windows(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
    x.add_(torch.cumsum(x, 0))


@pytest.mark.parametrize(
    "program",
    [reversed_rows, reversed_part, the_next_row, another_part, other_rows, transposed, one_row_everywhere, windows],
    ids=lambda program: program.__name__,
)
def test_values_from_other_places_are_copied_in_the_end(program: Program) -> None:
    assert reads_elsewhere(*traced(program))


def test_old_values_that_live_on() -> None:
    def returned(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
        old = x + 1
        x.mul_(2)
        return old

    def on_the_way(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
        old = x * 2
        x.copy_(old + y)
        return old.sum()

    def the_new_ones(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> object:
        x.mul_(2)
        return x.sum() + (x * y).sum()

    assert outlives(*traced(returned))
    assert outlives(*traced(on_the_way))
    assert not outlives(*traced(the_new_ones))
