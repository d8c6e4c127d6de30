"""What a region that is compiled once and called often saves is packed, and what rules do not do is told."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F

from multigraph_backend import Bits, Cast, Match, Rule, Scaled
from multigraph_backend.saved_tensors import graphs
from tests.support.saved_tensors.models import Mlp, accounts, assert_step, compiled, rules, step


@torch.compiler.nested_compile_region
def region(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.gelu((x @ w).tanh())


@torch.compiler.nested_compile_region
def normed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y * (y.square().mean(-1, keepdim=True) + 1e-3).rsqrt()).sin()


class Regions(torch.nn.Module):
    """Calls of regions, with a layer between some of them."""

    def __init__(self, calls: list[Any], width: int = 16) -> None:
        super().__init__()
        self.calls = calls
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call, layer in zip(self.calls, self.layers, strict=True):
            x = call(layer.weight, x) if call is not None else layer(x).cos()
        return x.sin() + 1


def test_regions_are_packed_and_their_parameters_are_not() -> None:
    torch.manual_seed(0)
    model = Regions([region, region, region])
    assert_step(model, compiled(model, rules(Cast("bf16"))), torch.randn(8, 16), 0.03)
    (said,) = accounts()
    found = [(entry.op, entry.shape, entry.packed, entry.reason) for entry in said.tensors if "getitem" in entry.name]
    assert sum(packed is not None for _, _, packed, _ in found) >= 4
    assert {shape for _, shape, packed, _ in found if packed} == {"[8, 16]", "[16, 8]"}
    reasons = {(shape, str(reason)) for _, shape, packed, reason in found if packed is None}
    assert ("[16, 16]", "it is a parameter of the graph, which no rule names") in reasons
    assert {reason.split()[3] for _, reason in reasons} <= {"parameter", "input"}


def test_statistics_inside_of_a_region_are_kept() -> None:
    torch.manual_seed(0)
    model = Regions([normed, normed])
    assert_step(model, compiled(model, rules(Cast("e4m3"))), torch.randn(8, 16), 0.3)
    (said,) = accounts()
    rows = [entry for entry in said.tensors if entry.shape == "[8, 1]"]
    assert rows
    assert all("statistic" in str(entry.reason) for entry in rows)
    assert said.packed > 0


@pytest.mark.parametrize("seed", range(3))
def test_regions_at_random(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Regions([rng.choice([region, normed, None]) for _ in range(4)])
    pack = rng.choice([Cast("bf16"), Scaled("int8")])
    assert_step(model, compiled(model, rules(pack)), torch.randn(8, 16), 0.1)
    assert accounts()[0].packed > 0


def test_without_a_look_inside_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect that there was, put back, is seen."""
    monkeypatch.setattr(graphs, "subgraph_result", lambda forward, node: None)
    code_of_now = functorch_config.patch(enable_autograd_cache=False)
    with code_of_now, pytest.raises(AssertionError):
        test_regions_are_packed_and_their_parameters_are_not()


def test_masks_of_odd_rows_are_saved_as_bits_exactly() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    packs = [Rule(Match(dtype="bool", min_bytes=0), Bits())]
    assert_step(model, compiled(model, packs), torch.randn(3, 8, 5, 5), 0)
    (said,) = accounts()
    masks = [entry for entry in said.tensors if entry.dtype == "bool"]
    assert [(entry.bytes, entry.bytes_saved, entry.packed) for entry in masks] == [(600, 75, "bits")]


@pytest.mark.parametrize("height", [6, 8, 1])
def test_masks_whose_rows_differ_from_call_to_call_are_bits_along_another_dimension(height: int) -> None:
    class Columns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(height, height))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(self.weight @ x > 0, x.sin(), x.cos()).sin()

    torch.manual_seed(0)
    model = Columns()
    run = compiled(model, [Rule(Match(dtype="bool", min_bytes=0), Bits())], dynamic=True)
    for columns in (5, 9, 16, 2):
        assert_step(model, run, torch.randn(height, columns), 0)
    masks = [entry for said in accounts() for entry in said.tensors if entry.dtype == "bool"]
    assert masks or height == 1  # torch 2.11 computes that of one row again
    for entry in masks:
        assert "s" in entry.shape  # a symbol
        if height > 1:
            assert (entry.packed, entry.bytes_saved) == ("bits", entry.bytes // height)
        else:
            assert str(entry.reason).endswith("differ from call to call, and no other dimension is fixed")


@pytest.mark.usefixtures("by_operator")
def test_blocks_that_do_not_fit_are_said_to_be_rows() -> None:
    model = Mlp(12)
    assert_step(model, compiled(model, rules(Scaled("int8", per=8))), torch.randn(8, 12), 0.05)
    text = "\n".join(accounts()[0].lines())
    assert "int8, scaled per row, for its rows are of 12 elements, no multiple of 8" in text
    assert "block of 8" not in text


@pytest.mark.usefixtures("by_operator")
@pytest.mark.parametrize("budget", [None, 0.5])
def test_rules_that_decide_about_nothing_are_reported(budget: float | None) -> None:
    model = Mlp()
    idle = [Rule(Match(module="no_such"), Cast("bf16")), Rule(Match(dtype="float64", min_bytes=0), Cast("bf16"))]
    options = {} if budget is None else {"saved_tensors_budget": budget}
    run = compiled(model, [*idle, *rules(Cast("bf16"))], **options)
    step(model, run, torch.randn(8, 16))
    (said,) = accounts()
    assert said.unmatched == tuple(map(str, idle))
    assert "decides about nothing here: rule module=no_such: cast to bfloat16" in "\n".join(said.lines())
