"""The estimate of live bytes is what running a graph one operation after the other shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from multigraph_backend.saved_tensors import graphs
from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step, inserted, live_bytes, peak
from multigraph_backend.saved_tensors.rules import Cast, Scaled
from tests.support.saved_tensors.partitioned import everything, gradients, partition


def test_a_buffer_lives_from_its_making_to_its_last_use() -> None:
    program = Program(
        steps=(
            Step("a", frozenset({"x"}), ("a",)),
            Step("b", frozenset({"a"}), ("b",)),
            Step("c", frozenset({"b"}), ("c",)),
            Step("end", frozenset({"c"})),
        ),
        sizes={"x": 100, "a": 10, "b": 20, "c": 5},
        given=frozenset({"x"}),
        results=frozenset({"c"}),
    )
    assert live_bytes(program) == (110, 30, 25, 5)
    assert peak(program) == 110


def test_what_the_caller_holds_is_not_counted() -> None:
    step = Step("a", frozenset({"x", "w"}), ("a",))
    program = Program((step,), {"x": 1, "w": 2, "a": 4}, frozenset({"x", "w"}), frozenset({"w"}), frozenset({"a"}))
    assert live_bytes(program) == (5,)


def test_a_view_holds_the_memory_that_it_shares() -> None:
    program = Program(
        steps=(Step("a", frozenset(), ("a",)), Step("b", frozenset(), ("b",)), Step("v", frozenset({"a"}), view=True)),
        sizes={"a": 8, "b": 1},
    )
    assert live_bytes(program) == (8, 9, 8)
    assert program.uses(["a"]) == []


def test_steps_are_put_in_before_a_position() -> None:
    fragment = Fragment((Step("q", frozenset({"in"}), ("q",)),), {"in": 4, "q": 1}, ("in",), ("q",))
    steps, sizes, outputs = fragment.placed("u.", ["a"])
    program = Program((Step("a", frozenset(), ("a",)), Step("end")), {"a": 4})
    made = inserted(program, {1: steps}, sizes)
    assert [step.name for step in made.steps] == ["a", "u.q", "end"]
    assert made.steps[1].reads == {"a"}
    assert made.sizes == {"a": 4, "u.q": 1}
    assert outputs == ("u.q",)


# ---------------------------------------------------------------- against execution


class Counting(torch.fx.Interpreter):
    """Runs a graph, drops each value after its last use, and notes the bytes alive at each operation."""

    def __init__(self, module: torch.fx.GraphModule, held: set[str]) -> None:
        super().__init__(module)
        self.names, self.held, self.curve = held, set(), []

    def run_node(self, node: torch.fx.Node) -> Any:
        result = super().run_node(node)
        if node.op == "placeholder":
            self.held |= set(storages(result)) if node.name in self.names else set()
            return result
        alive = {storage for value in (*self.env.values(), result) for storage in storages(value)} - self.held
        self.curve.append(sum(size for _, size in alive))
        return result


def storages(value: Any) -> Iterator[tuple[int, int]]:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        yield storage._cdata, storage.nbytes()
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from storages(entry)


def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (F.gelu(x @ w) @ v).tanh()


def attention(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, values = (x @ w).chunk(3, -1)
    return ((q @ k.T).softmax(-1) @ values) @ v


def normalized(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, (x.shape[1],)) @ w
    return F.layer_norm(h, (h.shape[1],)).sigmoid() * h.T.reshape(h.shape)


def pooled(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = (x @ w).view(2, 4, 4, -1)
    return F.max_pool2d(h, 2).exp().sum(1) + F.dropout(x, 0.0).sum()


PROGRAMS = [mlp, attention, normalized, pooled]
ARGUMENTS = (torch.randn(8, 12), torch.randn(12, 24), torch.randn(24, 12))


def arguments(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    x, w, v = ARGUMENTS
    return (x, w, v[:8]) if function is attention else ARGUMENTS


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("packed", [None, Cast("bfloat16"), Scaled("int8")], ids=str)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_the_estimate_is_what_execution_shows(function: Callable[..., Any], packed: Any, dynamic: bool) -> None:
    rules = [] if packed is None else everything(packed)
    made = partition(function, rules, dynamic)
    gradients(made.run, *arguments(function))
    assert made.accounts[0].packed > 0 or packed is None
    (forward,), (backward,) = made.forward, made.backward
    inputs = forward.graph.find_nodes(op="placeholder")
    names = {node.name for node in inputs}
    values = [_real(node.meta["val"]) for node in inputs]
    results = _count(forward, names, values)
    by_name = dict(zip(map(str, graphs.results(forward.graph)), results, strict=True))
    tangent = torch.zeros_like(results[0])
    placeholders = backward.graph.find_nodes(op="placeholder")
    _count(backward, set(), [by_name.get(node.name, tangent) for node in placeholders])


def _count(gm: torch.fx.GraphModule, held: set[str], inputs: list[Any]) -> Any:
    counting = Counting(gm, held)
    results = counting.run(*inputs)
    assert list(live_bytes(graphs.program(gm.graph, held))) == counting.curve
    return results


def _real(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    size = [int(entry) if isinstance(entry, int) else entry.node.hint for entry in value.shape]
    stride = [int(entry) if isinstance(entry, int) else entry.node.hint for entry in value.stride()]
    return torch.empty_strided(size, stride, dtype=value.dtype).zero_()


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_the_planned_peak_is_the_peak_of_the_changed_graphs(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placement estimates over plans; read back from the graphs that surgery made, the peaks are the same."""
    fragment = graphs.fragment
    monkeypatch.setattr(graphs, "fragment", lambda graph, inputs: fragment(graph, inputs, fused=False))
    made = partition(function, everything(Scaled("int8")))
    gradients(made.run, *arguments(function))
    (said,) = made.accounts
    assert said.packed > 0
    (forward,), (backward,) = made.forward, made.backward
    assert peak(graphs.program(forward.graph, [node.name for node in forward.graph.nodes])) == said.forward_peak
    kept = {entry.name for entry in said.tensors if entry.packed is None and "of the graph" in str(entry.reason)}
    assert peak(graphs.program(backward.graph, kept)) == said.backward_peak
