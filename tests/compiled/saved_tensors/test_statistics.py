"""Statistics of norms, softmaxes and attention are kept unless a rule names them, however many bytes they have."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend import Bits, Cast, Keep, Match, Recompute, Rule
from multigraph_backend.saved_tensors import choosing, rules, statistics
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.tracing import Tracer
from multigraph_backend.saved_tensors.units import CannotPack, Unit
from tests.support.saved_tensors.models import Block, accounts, assert_step, compiled, step

FP8 = Cast("float8_e4m3fn")


class Normed(torch.nn.Module):
    """Rows of 32, each scaled by its own deviation."""

    def __init__(self, norm: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.norm = norm or torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).sin() + 1


def found(function: Callable[..., Any], *inputs: torch.Tensor, decomposed: bool) -> list[str]:
    """The operators of what is a statistic of a forward graph."""
    table = select_decomp_table() if decomposed else {}
    gm = make_fx(torch.func.functionalize(function), decomposition_table=table, tracing_mode="fake")(*inputs)
    return sorted({choosing.describe(node, node, "statistic").ops[0] for node in statistics.of(gm.graph)})


X = torch.randn(6, 8)
IMAGE = torch.randn(2, 4, 3, 3)


@pytest.mark.parametrize(
    ("function", "inputs", "whole", "apart"),
    [
        (lambda x: F.layer_norm(x, (8,)), (X,), ["aten::native_layer_norm"], ["aten::rsqrt", "aten::var_mean"]),
        (lambda x: F.rms_norm(x, (8,)), (X,), None, ["aten::rsqrt"]),
        (lambda x: F.group_norm(x, 2), (IMAGE,), ["aten::native_group_norm"], ["aten::rsqrt", "aten::var_mean"]),
        (lambda x: F.instance_norm(x), (IMAGE,), None, ["aten::rsqrt", "aten::var_mean"]),
        (lambda x: F.normalize(x, dim=-1), (X,), None, None),
        (lambda x: x.softmax(-1), (X,), [], ["aten::amax", "aten::sum"]),
        (lambda x: x - x.logsumexp(-1, keepdim=True), (X,), ["aten::logsumexp"], None),
        (lambda x: (x - x.mean(0)) / x.shape[0], (X,), ["aten::mean"], ["aten::mean"]),
        (lambda x: F.cross_entropy(x, torch.arange(6)), (X,), [], ["aten::amax", "aten::log"]),
    ],
)  # fmt: skip
def test_what_is_one(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], whole: list[str] | None, apart: list[str] | None
) -> None:
    """As operators of torch, and taken apart as Inductor takes them; None: some, and which is torch's business."""
    for decomposed, expected in ((False, whole), (True, apart)):
        got = [entry for entry in found(function, *inputs, decomposed=decomposed) if "view" not in entry]
        assert set(expected or []) <= set(got)
        assert expected is not None or got


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.tanh() @ x.T,
        lambda x: F.linear(x.view(2, 3, 8).mean(1), torch.ones(4, 8)).sin(),  # features that are pooled
        lambda x: (x.view(2, 3, 8) * x.view(2, 3, 8).sigmoid()).sum(1) + 1,  # experts that are combined
        lambda x: x.view(6, 4, 2).amax(-1).sin(),
        lambda x: x[:, :1] * x,  # a gate is no statistic
        lambda x: (x @ torch.ones(8, 1)).sigmoid() * x,
    ],
)
@pytest.mark.parametrize("decomposed", [False, True])
def test_what_is_none(function: Callable[..., Any], decomposed: bool) -> None:
    assert found(function, X, decomposed=decomposed) == []


def test_a_residual_beside_the_normed_output_is_none() -> None:
    """Of an operator of a library: as large as the first result."""
    graph = Graph()
    with FakeTensorMode():
        x, row = torch.empty(6, 8), torch.empty(6, 1)
    made = graph.call_function(torch.ops.aten.native_layer_norm.default)
    made.meta["val"] = (x, x, row)
    for index, value in enumerate(made.meta["val"]):
        part = graph.call_function(operator.getitem, (made, index))
        part.meta["val"] = value
    assert [node.args[1] for node in statistics.of(graph)] == [2]


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(32), torch.nn.RMSNorm(32)], ids=["layer", "rms"])
def test_many_rows_are_no_reason_to_round_their_statistics(norm: torch.nn.Module) -> None:
    """20,000 rows: a number for each takes more than 64 KiB, and each was rounded to three bits."""
    torch.manual_seed(0)
    model = Normed(norm)
    assert_step(model, compiled(model, [Rule(Match(module="norm"), FP8)]), torch.randn(20_000, 32), 0)
    (said,) = accounts()
    assert [entry.packed for entry in said.tensors if entry.shape == "[20000, 1]"] in ([None], [None, None])


def test_the_logsumexp_of_an_attention_is_kept_and_packed_where_it_is_named() -> None:
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(2, 16, 32)
    said = []
    for named in ([], [Rule(Match(role="statistic", min_bytes=0), Cast("bf16"))]):
        assert_step(model, compiled(model, [*named, Rule(Match(min_bytes=0), FP8)]), x, 0.3)
        (account,) = accounts()
        said.append(
            [entry.packed for entry in account.tensors if "attention" in entry.op and entry.shape == "[2, 2, 16]"]
        )
        torch._dynamo.reset()
    assert said == [[None], ["cast to bfloat16"]]


def test_a_rule_that_keeps_need_not_name_them_and_one_that_packs_must() -> None:
    statistic = rules.Described(("aten::rsqrt",), "float32", True, 2**20, "norm", "statistic")
    keep, cast = Rule(Match(module="norm"), Keep()), Rule(Match(), FP8)
    assert rules.decide([keep, Rule(Match(role="statistic"), FP8)], statistic) is keep
    assert "statistic" in str(rules.decide([cast], statistic))
    assert "statistic" in str(rules.decide([Rule(Match(dtype="bool"), Bits()), cast], statistic))
    named = Rule(Match(role="statistic"), FP8)
    assert rules.decide([cast, named], statistic) is named
    assert rules.rule_from_json(rules.rule_to_json(named)) == named


def test_a_budget_computes_them_again_exactly_and_packs_none() -> None:
    torch.manual_seed(0)
    model = Normed()
    x = torch.randn(20_000, 32)
    run = compiled(model, [Rule(Match(), FP8)], saved_tensors_budget=0.0)
    got, wanted = step(model, run, x), step(model, model, x)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    (said,) = accounts()
    rows = [entry for entry in said.tensors if entry.shape == "[20000, 1]"]
    assert rows
    assert {entry.packed for entry in rows} <= {None, str(Recompute())}


def test_the_graph_modules_of_stock_are_given_all_that_is_saved() -> None:
    hook = SavedHook(lambda x: x, lambda x: x, stock=True)
    roles = [rule.match.role for rule in rules.hook_rules(hook)]
    assert roles == ["intermediate", "statistic", "mask"]


def test_cudnn_gets_its_own_back() -> None:
    """Its backward refuses statistics whose last stride is not as its forward left it, and Inductor changes strides."""
    forward, backward = Graph(), Graph()
    with FakeTensorMode():
        value = torch.empty(2, 4, 16, 1)
    source = forward.placeholder("logsumexp")
    reader = backward.placeholder("logsumexp")
    source.meta["val"] = reader.meta["val"] = value
    made = backward.call_function(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default, (reader,))
    backward.output((made,))
    described = rules.Described(("aten::attention",), "float32", True, 512, "", "statistic")
    unit = Unit(source, (source,), described, Cast("bf16"), "named")
    with pytest.raises(CannotPack, match="cuDNN"):
        Tracer(GraphModule(torch.nn.Module(), backward)).trace(unit)
