"""Calls of other sizes are the example's, element for element, and new in memory."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from multigraph_backend.serving.example_calls import ExampleCall

Pair = namedtuple("Pair", "first second")


def forward(ids: torch.Tensor, batch: Any = None, *more: Any, n: int = 3, **rest: Any) -> None: ...


def test_sizes_are_found_by_the_names_that_declarations_have() -> None:
    call = ExampleCall(
        forward,
        (torch.zeros(4, 6), {"ids": [torch.zeros(2, 3, 5)], "pair": Pair(torch.zeros(7), 9)}),
        {"n": 8, "mask": torch.zeros(1, 2)},
    )
    names = ["ids[0]", "ids[1]", "ids[-1]", "batch['ids'][0][2]", 'batch["pair"][1]', "n", "mask[1]", "ids [ 0 ]"]
    assert [call.size(name) for name in names] == [4, 6, 6, 5, 9, 8, 2, 4]
    nothing = [
        "ids",
        "ids[2]",
        "other[0]",
        "batch['none'][0]",
        "self.ids[0]",
        "ids[0][0]",
        "1 +",
        "",
        "n[0]",
        "ids['a']",
    ]
    assert [call.size(name) for name in nothing] == [None] * len(nothing)


def test_elements_are_repeated_or_cut_off() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    call = ExampleCall(forward, (ids,), {"n": 2})
    (larger,), named = call.resized({"ids[0]": 3, "ids[1]": 4, "n": 3, "unknown[0]": 5})
    assert larger.tolist() == [[1, 2, 3, 1], [4, 5, 6, 4], [1, 2, 3, 1]]
    assert named == {"n": 3}
    (smaller,), named = call.resized({"ids[1]": 1})
    assert smaller.tolist() == [[1], [4]]
    assert named == {"n": 2}
    (none,), _ = call.resized({"ids[0]": 0})
    assert none.shape == (0, 3)
    (from_none,), _ = ExampleCall(forward, (ids[:0],), {}).resized({"ids[0]": 2})
    assert from_none.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_tensors_are_new_and_one_that_comes_twice_is_one() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    call = ExampleCall(forward, (x, [x, {"deep": (x,)}]), {})
    args, _ = call.resized({"ids[0]": 4})
    one, (two, deep) = args
    assert one is two is deep["deep"][0]
    assert one.requires_grad
    assert one.is_leaf
    assert one.data_ptr() != x.data_ptr()
    torch.testing.assert_close(one, x)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 2).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(()),
    ],
    ids=["channels last", "transposed", "sliced", "no dimension"],
)
def test_dimensions_stay_in_their_order_in_memory(x: torch.Tensor) -> None:
    (made,), _ = ExampleCall(forward, (x,), {}).resized({"ids[0]": 5} if x.dim() else {})
    assert sorted(range(x.dim()), key=x.stride) == sorted(range(x.dim()), key=made.stride)
    assert made[: len(x)].equal(x) if x.dim() else made.equal(x)


def test_what_no_container_holds_is_passed_on_as_it_is() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.zeros(4)

    cache = Cache()
    call = ExampleCall(forward, (torch.zeros(2), cache), {})
    assert call.size("batch.keys[0]") is None
    (_, same), _ = call.resized({"ids[0]": 3, "batch.keys[0]": 9})
    assert same is cache
