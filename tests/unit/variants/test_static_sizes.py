"""A condition that cannot run says why its size is a constant, and what to do; long guards are shown in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend.report import folded


def reasons(
    function: Callable[..., Any], inputs: Sequence[Any], names: Sequence[str], dynamic: bool | None
) -> list[str]:
    options = {"compiler": "eager", "specialize": [{name: 7} for name in names]}
    compiled = torch.compile(function, backend="multigraph", dynamic=dynamic, options=options)
    compiled(*inputs)
    (region,) = multigraph_backend.explain().regions
    return [variant.reason or "" for variant in region.variants]


LAYER = torch.nn.Linear(32, 32)


def through_a_layer(x: torch.Tensor) -> torch.Tensor:
    return LAYER(x)


def into_a_cache(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return torch.where(cache[:, None] > 0, x[:, None], 0.0) if x.shape[0] == 16 else x


def test_a_size_that_was_equal_to_another_one_in_the_first_call() -> None:
    first, second = reasons(through_a_layer, [torch.randn(4, 32, 32)], ["x[1]", "x[2]"], True)
    assert first.startswith("x[1] is 32 in this graph: x[2] was 32 in that call, too, so one symbol stands for all")
    assert "linear.py:" in first
    assert first.endswith("asks for 32; begin with a call in which they differ")
    assert second.startswith("x[2] is 32 in this graph: x[1] was 32 in that call, too")


def test_a_size_that_a_line_of_the_program_asks_for() -> None:
    said, other = reasons(through_a_layer, [torch.randn(4, 8, 32)], ["x[2]", "x[0]"], True)
    assert said.startswith("x[2] is 32 in this graph: `return F.linear(")
    assert said.endswith("make that as large as the calls are, or declare nothing on it")
    assert other == ""


def test_a_size_of_which_no_other_was_seen_and_sizes_of_a_cache() -> None:
    cache = torch.ones(16)
    torch._dynamo.mark_static_address(cache)
    not_seen, kept = reasons(into_a_cache, [torch.randn(16), cache], ["x[0]", "cache[0]"], None)
    assert not_seen == (
        "x[0] is 16 in this graph: no other size was seen before, and neither dynamic=True nor a mark says that there "
        "are others"
    )
    assert kept.startswith("cache[0] is a constant of this graph: its tensor is kept at one address, as caches are")


def test_sizes_0_and_1_are_told_as_before() -> None:
    assert reasons(through_a_layer, [torch.randn(1, 32)], ["x[0]"], True) == ["x[0] is 1 in this graph"]


def test_a_mark_that_came_when_graphs_had_been_traced() -> None:
    compiled = torch.compile(through_a_layer, backend="multigraph", dynamic=True, options={"compiler": "eager"})
    early, late = torch.randn(3, 32), torch.randn(5, 32)
    multigraph_backend.mark(early, 0, specialize_on=[3])
    compiled(early.clone())
    multigraph_backend.mark(late, 0, specialize_on=[5])
    account = multigraph_backend.explain()
    assert len(account.unmet_marks) == 2
    assert account.late_marks == account.unmet_marks[1:]
    first, second = [line for line in str(account).splitlines() if line.startswith("marked at")]
    assert "a clone or a slice of it, perhaps, or no call yet" in first
    assert "mark before the first call, or declare in options" in second


def test_long_guards_are_shown_in_words() -> None:
    layers = " and ".join(f"self.model.layers._modules['{index}'].eps == 1e-05" for index in range(12))
    assert folded(f"x[0] <= 4096 and {layers}") == "x[0] <= 4096 and 12 attributes of self.model.layers as traced"
    zeros = " and ".join(f"same_float(self.drops[{index}].p, 0.0)" for index in range(9))
    assert folded(f"{layers} and {zeros} and scale == 2.0") == (
        "12 attributes of self.model.layers as traced and 9 attributes of self.drops as traced and scale == 2.0"
    )
    sizes = " and ".join(f"({name}[0] <= 4096 and {name}[1] != 7)" for name in "abcdefghij")
    assert folded(sizes, 60) == "(a[0] <= 4096 and a[1] != 7) and 9 more"
    assert folded("x[0] <= 4096 and y.shape == 3") == "x[0] <= 4096 and y.shape == 3"


@pytest.mark.parametrize("guards", ["x" * 300, "a.b == 1 and " * 20 + "c.d == 2", "f(a and b) and " * 30 + "c"])
def test_folded_guards_are_no_longer_than_they_were(guards: str) -> None:
    assert len(folded(guards)) <= len(guards)
