"""A user finds his inputs under the names that he gave them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.capture import size_names


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['x']", "x"),
        ("L['batch']['ids'][0]", "batch['ids'][0]"),
        ('L["batch"]["ids"]', "batch['ids']"),
        ("G['table']", "table"),
        ("L['self']._modules['l']._parameters['weight']", "self.l.weight"),
        ("___from_numpy(L['x'])", "x"),
        ("made by torch", "made by torch"),
    ],
)
def test_a_source_is_written_as_in_python(source: str, name: str) -> None:
    assert size_names.input_name(source) == name


def test_spaces_and_double_quotes_in_a_declared_name_do_not_matter() -> None:
    assert size_names.normalized('batch["ids"] [0]') == "batch['ids'][0]"


def passes_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def method_passes_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapper


class Plain(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return input_ids.cumsum(0) + mask


class Decorated(torch.nn.Module):
    @method_passes_on
    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return input_ids.cumsum(0) + mask


def plain(input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return input_ids.cumsum(0) + mask


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (Plain, "Plain.forward"),
        (Decorated, "Decorated.forward"),
        (lambda: plain, "plain"),
        (lambda: passes_on(plain), "plain"),
        (lambda: torch.nn.Sequential(torch.nn.Tanh()), "Sequential.forward"),
    ],
    ids=["module", "decorated module", "function", "decorated function", "torch's own module"],
)
def test_sizes_have_the_names_of_the_user_s_signature(make: Any, function: str, keyword: bool) -> None:
    model = make()
    ids, mask = torch.randn(6, 2), torch.randn(6, 2)
    names = ("input",) if isinstance(model, torch.nn.Sequential) else ("input_ids", "mask")
    tensors = dict(zip(names, (ids, mask), strict=False))
    compiled = torch.compile(
        model,
        backend=multigraph,
        dynamic=True,
        options={"compiler": "eager", "specialize": [{f"{names[0]}[0]": 6}]},
    )
    call = (lambda target: target(**tensors)) if keyword else (lambda target: target(*tensors.values()))
    torch.testing.assert_close(call(compiled), call(model))
    (region,) = multigraph_backend.explain().regions
    assert region.function == function
    assert set(region.sizes) == {f"{name}[{dim}]" for name in names for dim in (0, 1)}
    assert multigraph_backend.stats()["variant_calls"] == 1


def test_nested_inputs_and_integers_are_named_as_in_python() -> None:
    def f(batch: dict[str, list[torch.Tensor]], n: int, **extra: torch.Tensor) -> torch.Tensor:
        return batch["ids"][0].sum() * n + extra["mask"].sum()

    compiled = torch.compile(f, backend=multigraph, dynamic=True, options={"compiler": "eager"})
    compiled({"ids": [torch.randn(5)]}, 7, mask=torch.randn(9))
    (region,) = multigraph_backend.explain().regions
    assert set(region.sizes) == {"batch['ids'][0][0]", "n", "mask[0]"}
