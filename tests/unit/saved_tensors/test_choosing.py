"""Which buffers are packed, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.saved_tensors import graphs, statistics
from multigraph_backend.saved_tensors.budget import Budget
from multigraph_backend.saved_tensors.choosing import Choice, candidates, choose, module_path
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.rules import Cast, Keep, Match, Recompute, Role, Rule
from tests.support.saved_tensors.partitioned import gradients, partition

PACK = Cast("bfloat16")


def chosen(
    function: Callable[..., Any], outputs: int = 1, role: Role | None = None, static: tuple[int, ...] = ()
) -> Choice:
    """The choice for a forward graph that returns what `function` does, the first `outputs` of it to the caller."""
    x, y = torch.randn(6, 8), torch.randn(8, 8)
    gm = make_fx(function, tracing_mode="fake")(x, y)
    partition = Partition(gm, GraphModule(torch.nn.Module(), Graph()), outputs, static)
    return choose(candidates(partition), [Rule(Match(min_bytes=0, role=role), PACK)])


def sources(choice: Choice) -> dict[str, list[str]]:
    return {unit.name: [member.name for member in unit.members] for unit in choice.units}


def reasons(choice: Choice) -> list[str]:
    return [entry.reason for entry in choice.kept]


def test_views_of_one_buffer_are_one_unit() -> None:
    choice = chosen(lambda x, y: (x.sum(), (z := x @ y).t(), z.view(-1), z.chunk(2)[0]))
    assert sources(choice) == {"mm": ["t", "view", "getitem"]}


def test_parts_that_are_less_than_the_buffer_are_packed_alone() -> None:
    choice = chosen(lambda x, y: (x.sum(), (x @ y)[:2], (x @ y)[:, :2]))
    assert sources(choice) == {"slice_1": ["slice_1"]}
    assert reasons(choice) == [
        "it is a part of a larger buffer, with gaps between its elements, and the rest is not saved"
    ]


def test_what_has_no_element_is_kept_and_said_so() -> None:
    choice = chosen(lambda x, y: (x.sum(), (x @ y)[:, :0] * 2, (x @ y)[:0] * 2))
    assert sources(choice) == {}
    assert reasons(choice) == ["it has no element", "it has no element"]


@pytest.mark.parametrize(
    ("role", "static", "packed"), [("input", (), ["x_1", "t"]), ("parameter", (1,), []), (None, (), [])]
)
def test_inputs_and_parameters_only_by_name(role: Role | None, static: tuple[int, ...], packed: list[str]) -> None:
    choice = chosen(lambda x, y: (x @ y, x, y.t()), role=role, static=static)
    assert [member for members in sources(choice).values() for member in members] == packed
    held = [reason for reason in reasons(choice) if "its module holds" in reason]
    assert len(held) == (role == "parameter")  # with a pack there would be both


def test_what_the_caller_gets_is_an_output_also_as_a_view() -> None:
    choice = chosen(lambda x, y: ((z := x @ y).view(-1), z.t()))
    assert reasons(choice) == ["it is an output of the graph, which no rule names"]
    assert sources(chosen(lambda x, y: ((z := x @ y).view(-1), z.t()), role="output")) == {"mm": ["t"]}


def test_what_the_graph_changes_is_left_alone() -> None:
    """A pack behind the last use would see what was written."""

    def change(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x.sin()
        view = z.view(-1)
        torch.ops.aten.copy_.default(x, z)
        return z.sum(), x, view

    choice = chosen(change, role="input")
    assert sources(choice) == {}
    assert "the graph changes it in place" in reasons(choice)


def test_every_saved_tensor_is_chosen_or_kept_once() -> None:
    choice = chosen(lambda x, y: (x.sum(), (z := (x @ y).sin()), z.T, x > 0, y, z.cos()[1:], z.cos().T))
    names = [member.name for unit in choice.units for member in unit.members]
    names += [entry.node.name for entry in choice.kept]
    assert len(names) == len(set(names)) == 6


@pytest.mark.parametrize("budget", [None, Budget(fraction=0.5)])
def test_a_graph_is_read_once_however_many_rules_there_are(
    monkeypatch: pytest.MonkeyPatch, budget: Budget | None
) -> None:
    read: list[Any] = []
    find = statistics.of
    monkeypatch.setattr(statistics, "of", lambda graph: read.append(graph) or find(graph))
    rules = [
        Rule(Match(op="aten::sin", min_bytes=0), Keep()), Rule(Match(pointwise=True, min_bytes=0), Recompute()),
        Rule(Match(op="aten::tanh", min_bytes=0), PACK), Rule(Match(min_bytes=0), PACK), Rule(Match(op="aten::none")),
    ]  # fmt: skip
    made = partition(lambda x, y: ((x @ y).sin() @ y).tanh().exp() @ y, rules, wanted=budget)
    gradients(made.run, torch.randn(6, 8), torch.randn(8, 8))
    (said,) = made.accounts
    assert said.packed
    assert str(rules[-1]) in said.unmatched
    assert len(read) == 1


@pytest.mark.parametrize(
    ("size", "stride", "dims"),
    [
        ((2, 3, 4), (12, 4, 1), (0, 1, 2)), ((2, 3, 4), (1, 2, 6), (2, 1, 0)), ((2, 1, 4), (4, 7, 1), (1, 0, 2)),
        ((2, 3), (4, 1), None), ((2, 3), (0, 1), None), ((), (), ()), ((1, 1), (5, 9), (1, 0)),
    ],
)  # fmt: skip
def test_the_order_in_memory(size: tuple[int, ...], stride: tuple[int, ...], dims: tuple[int, ...] | None) -> None:
    value = torch.empty_strided(size, stride)
    order = graphs.memory_order(value)
    assert (order and order.dims) == dims
    if order is not None:
        assert value.permute(order.dims).is_contiguous()
        assert value.permute(order.dims).permute(order.inverse).shape == value.shape


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ("L['self'].layers.0.mlp", "layers.0.mlp"), ("L['fn']", ""), ("L['self']._modules['layers'].0", "layers.0"),
        ("L['model'].head", "model.head"),
    ],
)  # fmt: skip
def test_the_path_of_a_module(stack: str, path: str) -> None:
    assert module_path({"nn_module_stack": {"outer": ("L['self']", None), "key": (stack, None)}}) == path
    assert module_path({}) == ""
