"""Numbers on the CPU that a recorded graph is given: what a GPU computes with comes in one vector, and Inductor finds
nothing to copy.

Graphs have tensors of a GPU that are fake: no GPU is needed.  They are run with tensors of the CPU in their place, and
Inductor's own pass, which copies numbers to the GPU where graphs are recorded, is run over them.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.fx_passes.post_grad import move_constructors_to_gpu
from torch._subclasses import FakeTensor, FakeTensorMode

from multigraph_backend.cudagraphs import numbers
from multigraph_backend.cudagraphs.partition import of_inductor
from multigraph_backend.cudagraphs.partition.cuts import CutRules

aten, prims = torch.ops.aten, torch.ops.prims
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Graph:
    """A graph under construction, whose nodes have values of `mode`."""

    def __init__(self) -> None:
        self.mode, self.graph = FakeTensorMode(), torch.fx.Graph()
        self.inputs: list[Any] = []

    def fake(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return FakeTensor(self.mode, torch.empty(shape, dtype=dtype, device="meta"), device)

    def given(self, name: str, shape: Sequence[int] = (), dtype: Any = torch.float64, device: Any = CPU) -> Any:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.fake(shape, dtype, device)
        self.inputs.append(node.meta["val"])
        return node

    def step(self, op: Any, *args: Any, dtype: torch.dtype | None = None) -> Any:
        """On the GPU where an input is there."""
        node = self.graph.call_function(op, args)
        values = [of.meta["val"] for of in node.all_input_nodes]
        device = GPU if any(value.device == GPU for value in values) else CPU
        shape = max((value.shape for value in values), key=len)
        node.meta["val"] = self.fake(shape, dtype or max(values, key=torch.Tensor.dim).dtype, device)
        return node

    def ends(self, *outputs: Any) -> torch.fx.GraphModule:
        self.graph.output(outputs)
        return torch.fx.GraphModule({}, self.graph)


def _lifted(graph: Graph, gm: torch.fx.GraphModule) -> tuple[numbers.Numbers | None, list[Any], list[int]]:
    """What was lifted, Inductor's example inputs, and outputs that are hidden inputs."""
    inputs = list(graph.inputs)
    found = numbers.lift(gm, inputs, "cuda")
    gm.graph.lint()
    return found, inputs, numbers.hide(gm, of_inductor.take(gm, (), False, CutRules()).graph.unread, inputs)


def _copied(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> int:
    """How many numbers Inductor copies to the GPU before the rest of `gm`."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value  # as Inductor does, of the inputs that it is given
    with config.patch({"triton.cudagraphs": True, "graph_partition": True}):
        move_constructors_to_gpu(gm.graph)
    return len(gm.graph.find_nodes(op="call_function", target=aten.unsqueeze.default))


def _scaled(used: bool = True, handed_on: bool = False) -> tuple[Graph, torch.fx.GraphModule]:
    """A norm's epsilon and a scale, in float32 as the trace has them."""
    graph = Graph()
    scale, eps, x = graph.given("scale"), graph.given("eps"), graph.given("x", (3,), torch.float32, GPU)
    y = x
    if used:
        same = graph.step(prims.convert_element_type.default, scale, torch.float64, dtype=torch.float64)
        y = graph.step(aten.mul.Tensor, x, graph.step(prims.convert_element_type.default, same, torch.float32))
    y = graph.step(aten.add.Tensor, y, eps if used else 2.0)
    return graph, graph.ends(y, scale) if handed_on else graph.ends(y)


def test_what_the_gpu_computes_with_comes_in_one_vector() -> None:
    graph, gm = _scaled()
    found, inputs, handed_on = _lifted(graph, gm)
    assert found == numbers.Numbers((0, 1), (), GPU)
    assert [(tuple(value.shape), value.device.type) for value in inputs] == [
        ((0,), "cpu"),
        ((0,), "cpu"),
        ((3,), "cuda"),
        ((2,), "cuda"),
    ]
    assert handed_on == []
    assert _copied(gm, inputs) == 0
    assert "cpu" not in {str(node.meta["val"].device) for node in gm.graph.nodes if "val" in node.meta and node.users}
    graph, gm = _scaled()
    assert _copied(gm, graph.inputs) == 2  # what Inductor does otherwise


def test_numbers_that_nothing_reads_are_not_copied() -> None:
    graph, gm = _scaled(used=False)
    found, inputs, _ = _lifted(graph, gm)
    assert found is None
    assert [tuple(value.shape) for value in inputs] == [(0,), (0,), (3,)]
    assert _copied(gm, inputs) == 0
    graph, gm = _scaled(used=False)
    assert _copied(gm, graph.inputs) == 2


def test_what_is_handed_on_to_a_backward_stays_on_the_cpu() -> None:
    """Torch 2.11 hands a copy on the GPU on, to a backward that was compiled for one on the CPU."""
    graph, gm = _scaled(handed_on=True)
    found, inputs, handed_on = _lifted(graph, gm)
    assert found is not None
    assert handed_on == [1]
    assert _copied(gm, inputs) == 0
    output, scale = gm.graph.output_node().args[0]
    assert scale is gm.graph.find_nodes(op="placeholder")[0]
    assert output.meta["val"].device == GPU

    class Code:
        output_strides = [(1,), (1,)]  # noqa: RUF012

    numbers.show_again(Code, handed_on)
    assert Code.output_strides == [(1,), ()]


def test_a_graph_whose_compile_failed_is_compiled_again() -> None:
    graph, gm = _scaled()
    first = _lifted(graph, gm)
    again = _lifted(graph, gm)
    assert first[0] == again[0]
    assert [tuple(value.shape) for value in first[1]] == [tuple(value.shape) for value in again[1]]


def test_outputs_that_the_program_computes_on_the_cpu_leave_the_graph() -> None:
    """Inductor moves them to the GPU with the number that they are computed of, or cuts the graph for their kernel."""
    graph = Graph()
    t, unused, x = graph.given("t"), graph.given("unused"), graph.given("x", (3,), torch.float32, GPU)
    saved = graph.step(prims.convert_element_type.default, t, torch.float32, dtype=torch.float32)
    more = graph.step(aten.mul.Tensor, saved, 3)
    gm = graph.ends(unused, saved, graph.step(aten.mul.Tensor, x, saved), more)
    found, inputs, handed_on = _lifted(graph, gm)
    assert found is not None
    assert (found.places, found.at_home, handed_on) == ((0,), (1, 3), [0])
    assert _copied(gm, inputs) == 0
    assert {node.meta["val"].device for node in gm.graph.nodes if node.op == "call_function"} == {GPU}

    kept = pickle.loads(pickle.dumps(found))  # as caches of compiled code do
    for numbers_of in (found, kept):
        taken: list[Any] = []

        def code(inputs: list[Any], taken: list[Any] = taken) -> tuple[Any, ...]:
            taken += inputs
            results = gm(*inputs)
            inputs.clear()
            return tuple(results)

        given = [torch.tensor(0.1, dtype=torch.float64), torch.tensor(7.0), torch.ones(3)]
        number, first, scaled, last = _completed(numbers_of)(code)(list(given))
        assert len(taken) == 4
        assert number is given[1]
        assert torch.equal(first, torch.tensor(0.1))
        assert torch.equal(last, torch.tensor(0.1) * 3)
        assert (first.dtype, last.dtype, first.device) == (torch.float32, torch.float32, CPU)
        torch.testing.assert_close(scaled, torch.full((3,), 0.1))


def _completed(found: numbers.Numbers) -> Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]]:
    return dataclasses.replace(found, device=CPU).supplied


def test_a_number_that_the_program_changes_is_changed() -> None:
    graph = Graph()
    t, x = graph.given("t"), graph.given("x", (3,), torch.float64, GPU)
    after = graph.step(aten.add.Tensor, t, 1)
    y = graph.step(aten.mul.Tensor, x, after)
    graph.step(aten.copy_.default, t, after)
    gm = graph.ends(y)
    found, inputs, _ = _lifted(graph, gm)
    assert found is not None
    assert len(gm.graph.find_nodes(op="call_function", target=aten.copy_.default)) == 1
    number, given = torch.tensor(0.5, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    (result,) = gm(number, given, torch.tensor([0.5], dtype=torch.float64))
    assert (number.item(), result.tolist()) == (1.5, [1.5] * 3)
    assert [tuple(value.shape) for value in inputs] == [(), (3,), (1,)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_what_is_no_float_is_left_to_inductor(dtype: torch.dtype) -> None:
    graph = Graph()
    t, x = graph.given("t", (), dtype), graph.given("x", (3,), torch.float32, GPU)
    gm = graph.ends(graph.step(aten.mul.Tensor, x, t))
    text = str(gm.graph)
    found, inputs, _ = _lifted(graph, gm)
    assert found is None
    assert inputs == graph.inputs
    assert str(gm.graph) == text


def test_nothing_is_done_without_a_gpu_or_with_two() -> None:
    for devices in ((CPU, CPU), (GPU, torch.device("cuda:1"))):
        graph = Graph()
        t = graph.given("t")
        steps = [
            graph.step(aten.mul.Tensor, graph.given(f"x{at}", (3,), torch.float32, device), t)
            for at, device in enumerate(devices)
        ]
        gm = graph.ends(*steps)
        assert numbers.lift(gm, list(graph.inputs), "cuda") is None


# ---------------------------------------------------------------- random graphs

_TWO = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default)
_ONE = (aten.neg.default, aten.abs.default, aten.sin.default)
_EDGES = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-300, 0.1)


def _random(seed: int) -> tuple[Graph, torch.fx.GraphModule]:
    rng, graph = random.Random(seed), Graph()
    given = [graph.given(f"n{at}", (), rng.choice([torch.float64, torch.float32])) for at in range(rng.randint(1, 4))]
    given.insert(rng.randrange(len(given) + 1), graph.given("x", (3,), torch.float64, GPU))
    nodes = list(given)
    for _ in range(rng.randint(1, 9)):
        if rng.random() < 0.2:
            one = rng.choice(nodes)
            dtype = rng.choice([torch.float64, torch.float32]) if one.meta["val"].dim() == 0 else torch.float64
            nodes.append(graph.step(prims.convert_element_type.default, one, dtype, dtype=dtype))
        elif rng.random() < 0.3:
            nodes.append(graph.step(rng.choice(_ONE), rng.choice(nodes)))
        else:
            one, other = rng.choice(nodes), rng.choice(nodes)
            dtypes = {value.meta["val"].dtype for value in (one, other)}
            if one.meta["val"].dim() == other.meta["val"].dim() == 0 and len(dtypes) == 2:
                continue
            nodes.append(graph.step(rng.choice(_TWO), one, other))
    return graph, graph.ends(*rng.sample(nodes, min(len(nodes), rng.randint(1, 4))))


def test_random_graphs_compute_the_same_and_copy_nothing_that_the_gpu_reads() -> None:
    lifted = handed = homes = 0
    for seed in range(400):
        graph, gm = _random(seed)
        rng = random.Random(seed)
        given = [
            torch.tensor([rng.choice(_EDGES) for _ in range(3)], dtype=torch.float64)
            if value.dim()
            else torch.tensor(rng.choice(_EDGES), dtype=value.dtype)
            for value in graph.inputs
        ]
        expected = gm(*given)
        found, _, handed_on = _lifted(graph, gm)
        handed += len(handed_on)
        if found is None:
            continue
        lifted += bool(found.places)
        vector = numbers.Vectors(found.places, CPU)
        actual = list(gm(*given, *([vector(given)] if found.places else [])))
        if found.home is not None:
            assert [actual[at] for at in found.at_home] == [None] * len(found.at_home)
            for at, value in zip(found.at_home, found.home(*given), strict=True):
                actual[at] = value
            homes += 1
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(one.signbit(), other.signbit()) or one.isnan().any()
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.meta["val"].device == GPU:
                assert all(of.meta["val"].device == GPU for of in node.all_input_nodes)
        for at, node in enumerate(numbers.outputs_of(gm)):
            assert (node is None) == (at in found.at_home)
            assert node is None or node.op == "placeholder" or node.meta["val"].device == GPU
    assert lifted > 200
    assert homes > 100
    assert handed > 20


# ---------------------------------------------------------------- a call


def _values(vectors: numbers.Vectors, *values: float) -> torch.Tensor:
    return vectors([torch.tensor(value, dtype=torch.float64) for value in values])


def test_a_vector_is_made_once_for_each_set_of_values() -> None:
    vectors = numbers.Vectors((0, 1), CPU)
    first = _values(vectors, 0.5, 2.0)
    assert first.tolist() == [0.5, 2.0]
    assert _values(vectors, 0.5, 2.0) is first
    other = _values(vectors, 0.5, 3.0)
    assert other is not first
    assert _values(vectors, 0.5, 2.0) is first
    assert first.tolist() == [0.5, 2.0]


def test_zeros_of_both_signs_and_nan_are_told_apart() -> None:
    vectors = numbers.Vectors((0,), CPU)
    plus, minus, nan = _values(vectors, 0.0), _values(vectors, -0.0), _values(vectors, math.nan)
    assert not plus.signbit().item()
    assert minus.signbit().item()
    assert nan.isnan().item()
    for value, vector in ((0.0, plus), (-0.0, minus), (math.nan, nan)):
        assert _values(vectors, value) is vector


def test_only_so_many_are_kept() -> None:
    vectors = numbers.Vectors((0,), CPU)
    for value in range(100):
        assert _values(vectors, float(value)).item() == value
    assert len(vectors._made) == numbers.MOST


def test_what_a_graph_of_the_users_own_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its values were there before, in the very stream that it is captured on."""
    vectors, captures = numbers.Vectors((0,), CPU), False
    monkeypatch.setattr(vectors, "_capturing", lambda: captures)
    monkeypatch.setattr(vectors, "_beside", vectors._new)
    known = _values(vectors, 0.5)
    captures = True
    assert _values(vectors, 0.5) is known
    other = _values(vectors, 0.25)
    assert _values(vectors, 0.25) is other
    captures = False
    for value in range(1, 2 * numbers.MOST):
        _values(vectors, float(value))
    assert _values(vectors, 0.25).tolist() == [0.25]
    assert any(known is kept for kept in vectors._kept.values())
    assert any(other is kept for kept in vectors._kept.values())


def test_a_tensor_that_its_owner_changes_is_read_at_each_call() -> None:
    vectors, number = numbers.Vectors((1,), CPU), torch.tensor(1.0)
    for value in (1.0, 2.0, 1.0):
        number.fill_(value)
        assert vectors([None, number]).item() == value


def test_threads_get_their_own_values() -> None:
    vectors, wrong = numbers.Vectors((0,), CPU), []

    def calls(value: float) -> None:
        for _ in range(300):
            if _values(vectors, value).item() != value:
                wrong.append(value)

    threads = [threading.Thread(target=calls, args=(float(at),)) for at in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_supplied_comes_behind_the_inputs() -> None:
    seen: list[list[Any]] = []

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        seen.append(list(inputs))
        inputs.clear()
        return (1,)

    supplied: Callable[[list[Any]], Any] = numbers._with_vector(run, numbers.Vectors((1,), CPU))
    given = [7, torch.tensor(0.25, dtype=torch.float64)]
    assert supplied(given) == (1,)
    assert given == []
    assert seen[0][:2] == [7, 0.25]
    assert seen[0][2].tolist() == [0.25]
