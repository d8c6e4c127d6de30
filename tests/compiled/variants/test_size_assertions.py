"""Assertions of the program about its sizes (`torch._check`) raise as with stock, though code is compiled later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config

import multigraph_backend
from tests.support.activity import ran

Triple = tuple[int, int, int]


@pytest.fixture(autouse=True)
def numbers_in_graphs() -> Any:
    with dynamo_config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def sum_of_sizes(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = z.sum().long().item()
    torch._check(n == x.shape[0] + y.shape[0])
    return x + 1, y + 1


def of_one_size(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = z.sum().long().item()
    torch._check(n == x.shape[0] * 2)
    return torch.ones(n) + torch.cat([x, x]), y + 1


def of_what_is_found(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = z.nonzero()
    torch._check(found.shape[0] == x.shape[0] + y.shape[0])
    return x + 1, y + found.sum()


def inputs(*sizes: int) -> list[torch.Tensor]:
    made = [torch.ones(size) for size in sizes]
    for tensor in made:
        torch._dynamo.mark_dynamic(tensor, 0)
    return made


PROGRAMS: dict[str, tuple[Callable[..., Any], list[Triple], list[Triple]]] = {
    "sum": (sum_of_sizes, [(3, 4, 7), (5, 6, 11)], [(3, 4, 8), (5, 6, 8), (9, 2, 7)]),
    "one": (of_one_size, [(3, 4, 6), (5, 6, 10)], [(3, 4, 7), (5, 6, 12)]),
    "found": (of_what_is_found, [(3, 4, 7), (5, 6, 11)], [(3, 4, 8), (5, 6, 8)]),
}


@pytest.mark.parametrize(
    ("name", "compiler"), [("sum", "aot_eager"), ("sum", "inductor"), ("one", "inductor"), ("found", "aot_eager")]
)
def test_an_assertion_holds_in_every_form_of_the_graph(name: str, compiler: str) -> None:
    function, hold, fail = PROGRAMS[name]
    options = {"compiler": compiler, "specialize": [{"x[0]": 3}]}
    call = torch.compile(function, backend="multigraph", options=options)
    with ran(variants=1, generic=1):
        for sizes in hold:
            torch.testing.assert_close(call(*inputs(*sizes)), function(*inputs(*sizes)))
    for sizes in fail:
        with pytest.raises(Exception, match=r"Eq\(u\d, |u\d <= 6"):
            call(*inputs(*sizes))


def test_stock_raises_there_with_inductor_and_forgets_it_without() -> None:
    """What is put back is what torch itself has taken out of the graph: run as it is, it asserts nothing."""
    torch.compile(sum_of_sizes, backend="aot_eager")(*inputs(3, 4, 8))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="Eq"):
        torch.compile(sum_of_sizes, backend="inductor")(*inputs(3, 4, 8))


def test_a_graph_that_runs_eagerly_asserts_too() -> None:
    def refuses(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise RuntimeError("no")

    call = torch.compile(sum_of_sizes, backend="multigraph", options={"compiler": refuses})
    call(*inputs(3, 4, 7))
    with pytest.raises(RuntimeError, match="Eq"):
        call(*inputs(3, 4, 8))
    assert multigraph_backend.stats()["eager_calls"] == 2


def test_an_assertion_over_a_size_that_no_input_has_is_said_not_to_be_checked() -> None:
    """Stock's code for it raises NameError at every call."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n = z.sum().long().item()
        torch._check(n == x.shape[0] + y.shape[0])
        return x + 1

    call = torch.compile(function, backend="multigraph", options={"compiler": "aot_eager"})
    with ran(generic=1):
        torch.testing.assert_close(call(*inputs(3, 4, 7)), torch.full((3,), 2.0))
    (region,) = multigraph_backend.explain().regions
    (note,) = region.notes
    assert "is not checked: no input of the graph has" in note


def test_calls_whose_sizes_are_asserted_are_not_padded() -> None:
    def function(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n = z.sum().long().item()
        torch._check(n == x.shape[0] * 2)
        return x + 1

    call = torch.compile(function, backend="multigraph", options={"compiler": "aot_eager", "pad": {"x[0]": [4, 8]}})
    for rows in (3, 4, 5):
        torch.testing.assert_close(call(*inputs(rows, rows * 2)), torch.full((rows,), 2.0))
    assert multigraph_backend.stats()["padded_calls"] == 0
