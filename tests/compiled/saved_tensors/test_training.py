"""Training steps with packed saved tensors, through Inductor: gradients, and that packing happened."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import multigraph_backend
from multigraph_backend import Bits, Cast, Keep, Match, Rule, Scaled, _compat
from multigraph_backend.capture import from_dynamo
from tests.support import forked
from tests.support.saved_tensors.models import Block, Mlp, accounts, assert_step, compiled, rules, step

BOUNDS = [
    (Scaled("int8", per=16), 0.05),
    pytest.param(Cast("e4m3", stochastic=True), 0.4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("pack", "bound"), BOUNDS, ids=str)
def test_gradients_of_a_block_are_within_the_bound_of_the_pack(pack: Any, bound: float) -> None:
    torch.manual_seed(0)
    model = Block()
    run = compiled(model, rules(pack), dynamic=True)
    for tokens in (8, 12):
        assert_step(model, run, torch.randn(2, tokens, 32), bound)
    stats = multigraph_backend.stats()
    assert (stats["generic_calls"], stats["failures"], stats["unpacked_retries"]) == (2, 0, 0)
    (said,) = accounts()
    assert said.packed >= 6
    assert said.bytes_saved < said.bytes
    assert said.forward_peak <= said.stock_forward_peak
    assert said.backward_peak <= said.stock_backward_peak


@pytest.mark.usefixtures("by_operator")
def test_rules_pick_tensors_by_operator_module_dtype_size_and_role() -> None:
    model = torch.nn.Sequential(Block(), Block())
    packs = [
        Rule(Match(module="0.*", min_bytes=0), Keep()),
        Rule(Match(op="aten::native_layer_norm", min_bytes=0), Keep()),
        Rule(Match(op="aten::*attention*", min_bytes=0), Cast("bf16")),
        Rule(Match(min_bytes=3000), Scaled("int8")),
        Rule(Match(role="input", min_bytes=0), Cast("bf16")),
    ]
    assert_step(model, compiled(model, packs), torch.randn(2, 8, 32), 0.05)
    (said,) = accounts()
    packed = {(entry.module, entry.op): entry.packed for entry in said.tensors}
    assert packed["1.qkv", "aten::addmm"] == "int8, scaled per row"
    assert not any(how for (module, _), how in packed.items() if module in ("0.qkv", "0.out", "0.norm"))
    assert packed["", "placeholder"] in (None, "cast to bfloat16")
    (given,) = [entry for entry in said.tensors if entry.op == "placeholder" and entry.shape == "[2, 8, 32]"]
    assert given.packed == "cast to bfloat16"
    by_attention = [entry for entry in said.tensors if "attention" in entry.op]
    # its output, and its logsumexp, which is a statistic
    assert {entry.packed or entry.reason for entry in by_attention if entry.module.startswith("1")} == {
        "cast to bfloat16",
        "it is a statistic of a norm, a softmax or an attention, which no rule names",
    }
    text = str(multigraph_backend.explain())
    assert "kept: it is a parameter of the graph, which no rule names" in text
    assert "kept: rule: op=aten::native_layer_norm" in text


@pytest.mark.usefixtures("by_operator")
def test_nothing_is_packed_without_a_reason_to() -> None:
    """Everything here is small, and the rule does not say min_bytes."""
    model = Mlp()
    assert_step(model, compiled(model, [Rule(pack=Scaled("int8"))]), torch.randn(8, 16), 0.0)
    (said,) = accounts()
    assert said.packed == 0
    assert {entry.reason for entry in said.tensors if entry.op != "placeholder"} >= {
        "it is small (512 bytes), and no rule says min_bytes"
    }
    assert multigraph_backend.stats()["kept_tensors"] == len(said.tensors) > 3


class Pooled(torch.nn.Module):
    """Saves indices of max pooling, the mask of a relu, a dropout's mask, and statistics of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, indices = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2, return_indices=True)
        h = h * (indices % 2 == 0)
        return self.last(h.mean((2, 3)))


def test_indices_and_masks_are_never_packed_by_a_rule_for_numbers() -> None:
    """Row 8 of the defects: stock's inlined hook makes them wrong numbers or does not compile."""
    torch.manual_seed(1)
    model = Pooled()
    assert_step(model, compiled(model, rules(Scaled("int8"))), torch.randn(2, 3, 12, 12), 0.1)
    (said,) = accounts()
    assert said.packed > 0
    others = [entry for entry in said.tensors if not entry.dtype.startswith("float")]
    assert others
    assert all(entry.packed is None for entry in others)


def test_masks_are_saved_as_bits_and_gradients_stay_the_same() -> None:
    """Of relu and of dropout."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.dropout(F.relu(self.first(x)), 0.25)
            return F.hardtanh(self.last(y)).sin()

    model, x = Masked(), torch.randn(8, 16)
    found = []
    for packs in ([], [Rule(Match(dtype="bool", min_bytes=0), Bits())]):
        run = compiled(model, packs)
        for _ in range(2):
            torch.manual_seed(5)
            found.append(step(model, run, x))
    assert all(torch.equal(one, other) for one, other in zip(found[1], found[3], strict=True))
    said = accounts()[-1]
    masks = [entry for entry in said.tensors if entry.dtype == "bool"]
    assert masks
    assert all(entry.packed == "bits" and entry.bytes_saved * 8 == entry.bytes for entry in masks)


def test_variants_pack_each_for_itself() -> None:
    model = Mlp()
    specialize = [{"x[0]": 8}, {"x[0]": {"multiple_of": 16}}]
    run = compiled(model, rules(Scaled("int8")), dynamic=True, specialize=specialize)
    for rows in (8, 32, 11):
        assert_step(model, run, torch.randn(rows, 16), 0.05)
    stats = multigraph_backend.stats()
    assert (stats["variant_calls"], stats["generic_calls"], stats["failures"]) == (2, 1, 0)
    found = accounts()
    assert len(found) == 3
    assert all(said.packed >= 3 for said in found)


class Scaling(torch.nn.Module):
    """Changes an input in place that its backward reads as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = torch.stack([y, y])
        y.mul_(0.5)
        return F.layer_norm(before.clone() * 0.5 + x, (16,), self.scale)


def test_together_with_inputs_that_the_graph_changes() -> None:
    model = Scaling()
    run = compiled(model, rules(Cast("bf16")))
    y = torch.randn(8, 16)
    eager, given = y.clone(), y.clone()
    expected = step(copy.deepcopy(model), lambda x: model(x, eager), torch.randn(8, 16))
    torch.testing.assert_close(eager, y * 0.5)
    x = torch.randn(8, 16)
    expected = step(model, lambda x: model(x, y.clone()), x)
    got = step(model, lambda x: run(x, given), x)
    torch.testing.assert_close(given, y * 0.5)
    torch.testing.assert_close(got[0], expected[0])
    for gradient, wanted in zip(got[1:], expected[1:], strict=True):
        assert 0 < (gradient - wanted).norm() / wanted.norm() < 0.02
    assert accounts()[0].packed > 0
    assert multigraph_backend.stats()["failures"] == 0


def test_backward_twice_over_one_graph() -> None:
    model = Mlp()
    run = compiled(model, rules(Scaled("int8")))
    out = run(torch.randn(8, 16))
    cotangent = torch.randn_like(out)
    out.backward(cotangent, retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out.backward(cotangent)
    for gradient, again in zip(first, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(again, gradient, rtol=0, atol=0)
    assert accounts()[0].packed == 3


@pytest.mark.usefixtures("by_operator")
def test_around_activation_checkpointing() -> None:
    """What is recomputed is not saved; what leaves the checkpoint is, and is packed."""
    inner, outer = Mlp(), Mlp()
    model = torch.nn.Sequential(inner, outer)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return outer(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False))

    assert_step(model, compiled(checkpointed, rules(Cast("bf16"))), torch.randn(8, 16), 0.02)
    (said,) = accounts()
    assert said.packed > 0


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return gradient * (y + x * y)


def test_what_an_autograd_function_saves() -> None:
    model = torch.nn.Linear(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        return Squared.apply(model(x)).sin()

    eager = copy.deepcopy(model)
    x = torch.randn(4, 16)
    got = step(model, compiled(function, rules(Scaled("int8"))), x)
    expected = step(eager, lambda x: Squared.apply(eager(x)).sin(), x)
    torch.testing.assert_close(got[0], expected[0])
    for gradient, wanted in zip(got[1:], expected[1:], strict=True):
        assert 1e-6 < (gradient - wanted).norm() / wanted.norm() < 0.1
    assert accounts()[0].packed > 0


def test_across_a_graph_break() -> None:
    first, second = Mlp(), Mlp()
    model = torch.nn.ModuleList([first, second])

    def function(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    run = compiled(function, rules(Scaled("int8")), fullgraph=False)
    eager = copy.deepcopy(model)
    x = torch.randn(8, 16)
    got = step(model, run, x)
    expected = step(eager, lambda x: eager[1](eager[0](x)), x)
    torch.testing.assert_close(got[0], expected[0])
    for gradient, wanted in zip(got[1:], expected[1:], strict=True):
        assert (gradient - wanted).norm() / wanted.norm() < 0.1
    assert [said.packed >= 3 for said in accounts()] == [True, True]


def test_a_graph_that_is_compiled_at_once_packs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise from_dynamo.CannotCapture("the graph was split")

    monkeypatch.setattr(from_dynamo, "capture", refuse)
    model = Mlp()
    assert_step(model, compiled(model, rules(Scaled("int8"))), torch.randn(8, 16), 0.05)
    assert accounts()[0].packed == 3
    assert "compiled at once, without variants: the graph was split" in str(multigraph_backend.explain())


@pytest.mark.parametrize("step_that_fails", ["_pack_", "_unpack_"])
def test_a_graph_that_is_compiled_at_once_is_compiled_again_without_packs(
    monkeypatch: pytest.MonkeyPatch, step_that_fails: str
) -> None:
    def refuse(*args: Any) -> Any:
        raise from_dynamo.CannotCapture("the graph was split")

    inner = _compat.compile_fx_inner

    def refusing(gm: torch.fx.GraphModule, *args: Any, **settings: Any) -> Any:
        if any(step_that_fails in node.name for node in gm.graph.nodes if node.op == "call_function"):
            raise RuntimeError("type fp8e4nv is not supported here")
        return inner(gm, *args, **settings)

    monkeypatch.setattr(from_dynamo, "capture", refuse)
    monkeypatch.setitem(vars(_compat), "compile_fx_inner", refusing)
    model = Mlp()
    assert_step(model, compiled(model, rules(Cast("e4m3"))), torch.randn(8, 16), 0.0)
    assert multigraph_backend.stats()["unpacked_retries"] == 1
    assert multigraph_backend.stats()["packed_tensors"] == 0  # none is, in the code that runs
    (said,) = accounts()
    assert "type fp8e4nv is not supported here" in str(said.failed)


@pytest.mark.parametrize("reordered", [True, False])
def test_where_the_compiler_reorders_it_places_what_it_can_fuse(reordered: bool) -> None:
    model = Mlp()
    packs = [
        Rule(Match(op="aten::gelu", min_bytes=0), Scaled("int8", stochastic=True)),
        Rule(Match(module="first", min_bytes=0), Scaled("int8")),
        *rules(Cast("bf16")),
    ]
    run = compiled(model, packs, inductor={"reorder_for_peak_memory": reordered})
    assert_step(model, run, torch.randn(8, 16), 0.05)
    (said,) = accounts()
    places = {(entry.packed, entry.pack_before == "output") for entry in said.tensors if entry.packed}
    assert places == {
        ("int8, scaled per row, stochastic", False),
        ("int8, scaled per row", reordered),
        ("cast to bfloat16", reordered),
    }


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "saved_tensors")
    model = Mlp()
    assert_step(model, compiled(model, rules(Scaled("int8"))), torch.randn(8, 16), 0.0)
    assert accounts() == []
    assert multigraph_backend.stats()["packed_tensors"] == 0
    assert "MULTIGRAPH_DISABLE turns off: saved_tensors" in str(multigraph_backend.explain())


def test_a_compile_that_fails_with_packs_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor may be unable to compile a pack (fp8 on an old GPU): training goes on, and the report says why."""
    inner = _compat.compile_fx_inner

    def refusing(gm: torch.fx.GraphModule, *args: Any, **settings: Any) -> Any:
        if any("pack" in node.name for node in gm.graph.nodes):
            raise RuntimeError("type fp8e4nv is not supported here")
        return inner(gm, *args, **settings)

    monkeypatch.setitem(vars(_compat), "compile_fx_inner", refusing)
    model = Mlp()
    assert_step(model, compiled(model, rules(Cast("e4m3"))), torch.randn(8, 16), 0.0)
    assert multigraph_backend.stats()["unpacked_retries"] == 1
    assert multigraph_backend.stats()["failures"] == 0
    (said,) = accounts()
    assert "type fp8e4nv is not supported here" in str(said.failed)


@pytest.mark.parametrize("pack", [Cast("e4m3"), Scaled("int8")], ids=str)
def test_what_is_not_finite_stays_so_in_compiled_code(pack: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().mul(2.0).sin()

    model = torch.nn.Linear(16, 16, bias=False)
    torch.nn.init.eye_(model.weight)
    x = torch.randn(4, 16)
    x[1, 3], x[2, 5] = 1000.0, float("nan")
    got = step(model, compiled(lambda x: function(model(x)), rules(pack)), x)
    expected = step(model, lambda x: function(model(x)), x)
    assert accounts()[0].packed > 0
    for gradient, wanted in zip(got[1:], expected[1:], strict=True):
        assert not wanted.isfinite().all()
        assert not (gradient.isfinite() & ~wanted.isfinite()).any()


# ---------------------------------------------------------------- caches

PROGRAM = """
import json, sys, torch, multigraph_backend
from multigraph_backend import _compat
torch.manual_seed(0)
w = torch.randn(32, 32, requires_grad=True)
def f(x):
    return torch.sin(torch.sin(x @ w) @ w * float(sys.argv[1])).sum()
found = []
for pack in json.loads(sys.argv[2]):
    torch._dynamo.reset()
    _compat.counters["aot_autograd"].clear()
    w.grad = None
    options = {"saved_tensors": [{"match": {"min_bytes": 0}, "pack": pack}]}
    torch.compile(f, backend="multigraph", options=options)(torch.ones(16, 32)).backward()
    (region,) = multigraph_backend.explain().regions
    (said,) = region.generic.saved
    counters = _compat.counters["aot_autograd"]
    hits = [counters["autograd_cache_hit"], counters["autograd_cache_miss"]]
    found.append([hits, said.packed, said.bytes_saved, float(w.grad.double().sum())])
print(json.dumps(found))
"""


def in_a_process(constant: float, packs: list[object]) -> list[Any]:
    path = os.pathsep.join([str(Path(multigraph_backend.__file__).parent.parent), *filter(None, sys.path)])
    done = forked.run("-c", PROGRAM, str(constant), json.dumps(packs), env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_another_process_finds_the_code_and_the_account_but_not_for_other_rules() -> None:
    constant = 1 + random.SystemRandom().random()  # a program that no cache has seen
    (first,) = in_a_process(constant, [{"scale": "int8"}])
    again, other = in_a_process(constant, [{"scale": "int8"}, {"cast": "bfloat16"}])
    assert (first[0], again[0], other[0]) == ([0, 1], [1, 0], [0, 1])
    assert first[1:] == again[1:]
    assert first[1] > 0
    assert other[2] != first[2]
    assert other[3] != first[3]


@pytest.mark.parametrize("pack", [Scaled("int8", per=64), Cast("float8_e4m3fn")], ids=str)
def test_equal_blocks_are_bodies_with_their_packs(pack: Any) -> None:
    model = torch.nn.Sequential(*[Block(64, 2) for _ in range(6)])
    rule = Rule(Match(min_bytes=16 * 64 * 64 * 4), pack)
    step = torch.compile(model, backend="multigraph", options={"on_failure": "raise", "saved_tensors": [rule]})
    step(torch.randn(16, 64, 64)).square().mean().backward()
    (region,) = multigraph_backend.explain().regions
    assert re.search(r"forward: \d calls of one body of \d+ steps", region.generic.repeated or "nothing")
