"""Parameters that are DTensors: variants, and that a form runs only for those that are as they were at its compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import multigraph_backend
from multigraph_backend.capture import dtensors
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.region import registry

pytestmark = pytest.mark.usefixtures("group_of_one")
VARIANT: dict[str, Any] = {"specialize": [{"x[0]": [4, 8]}], "on_failure": "raise"}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def divided(*size: int, by: Any = None) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(torch.randn(size), mesh(), [by or Replicate()]))


class Layer(torch.nn.Module):
    """It returns a plain tensor, and takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = divided(8, 8, by=Shard(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to_local()).relu()  # type: ignore[operator]


def right(compiled: Any, model: torch.nn.Module, *rows: int) -> None:
    for count in rows:
        x = torch.randn(count, 8)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_model_that_is_divided_keeps_variants_and_trains_as_eager() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ours, theirs = (parallelize_module(copy.deepcopy(base), mesh(), plan) for _ in range(2))
    compiled = torch.compile(
        ours, backend="multigraph", dynamic=True, options={"specialize": [{"input[0]": 4}], "on_failure": "raise"}
    )
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs)]
    for rows in (3, 4, 5, 4, 3):
        x = torch.randn(rows, 8)
        losses = [model(x).square().mean() for model in (compiled, theirs)]
        torch.testing.assert_close(*losses)
        for loss, step in zip(losses, steps, strict=True):
            loss.backward()
            step.step()
            step.zero_grad()
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted.full_tensor())  # type: ignore[attr-defined]
    ran = multigraph_backend.stats()
    assert (ran["generic_calls"], ran["variant_calls"], ran["eager_calls"]) == (3, 2, 0)
    notes = [note for region in registry.living() for note in region.notes]
    assert any(note.startswith("4 parameters are DTensors, of fixed sizes") for note in notes), notes
    assert not any("compiled at once" in note for note in notes)


def test_what_it_has_here_may_be_exchanged_and_written_over() -> None:
    """Each call has the numbers that are there, by the same code."""
    model = Layer()
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=VARIANT)
    right(compiled, model, 3, 4)
    weight: Any = model.weight
    with torch.no_grad():
        weight.mul_(2)
    right(compiled, model, 4, 3)
    weight._local_tensor = torch.randn(8, 8)
    right(compiled, model, 4, 3)
    model.weight = divided(8, 8, by=Shard(0))
    right(compiled, model, 4, 3)
    ran = multigraph_backend.stats()
    assert (ran["generic_compiled"], ran["variants_compiled"], ran["variant_calls"]) == (1, 1, 4)


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "other sizes": lambda model: setattr(model, "weight", divided(4, 8, by=Shard(0))),
    "divided otherwise": lambda model: setattr(model, "weight", divided(8, 8, by=Shard(1))),
    "on each rank": lambda model: setattr(model, "weight", divided(8, 8)),
    "frozen": lambda model: model.weight.requires_grad_(False),
    "other strides": lambda model: setattr(
        model,
        "weight",
        torch.nn.Parameter(DTensor.from_local(torch.randn(8, 8).t(), mesh(), [Shard(0)], run_check=False)),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_one_is_seen(change: str) -> None:
    model = Layer()
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=VARIANT)
    right(compiled, model, 3, 4)
    CHANGES[change](model)
    right(compiled, model, 4, 3)
    right(compiled, model, 4, 3)
    if model.weight.requires_grad:
        x = torch.randn(4, 8)
        mine, wanted = (torch.autograd.grad(one(x).sum(), list(model.parameters())) for one in (compiled, model))
        torch.testing.assert_close(mine, wanted)


def test_each_form_asks_for_itself() -> None:
    """Also where no guard of Dynamo's would: its check does not hold with a weight that it was not compiled for."""
    model = Layer()
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=VARIANT)
    right(compiled, model, 3)
    (region,) = registry.living()
    (form,) = region.generic.forms
    assert "dtensors_alike(a)" in form.lowered.guards.text
    graph = region.captured
    assert isinstance(graph, CapturedGraph)
    (at,) = (index for index, entry in enumerate(graph.inputs) if entry.is_dtensor)
    args: list[Any] = [3 if entry.expr is not None else torch.randn(3, 8) for entry in graph.inputs]

    def holds(weight: Any) -> bool:
        return form.lowered.guards.hold([*args[:at], weight, *args[at + 1 :]])

    assert holds(model.weight)
    assert holds(divided(8, 8, by=Shard(0)))
    for other in (divided(4, 8, by=Shard(0)), divided(8, 8, by=Shard(1)), divided(8, 8), divided(8, 8).double()):
        assert not holds(other)
    assert not holds(divided(8, 8, by=Shard(0)).requires_grad_(False))
    for local in (torch.randn(4, 8), torch.randn(8, 8).t(), torch.randn(8, 8).double()):
        inside: Any = divided(8, 8, by=Shard(0))
        inside._local_tensor = local
        assert not holds(inside)
    two_named = init_device_mesh("cpu", (1,), mesh_dim_names=("rows",))
    same_mesh = torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), two_named, [Shard(0)]))
    assert holds(same_mesh) == (two_named == mesh())


def test_the_check_keeps_nothing_of_a_model_alive() -> None:
    import gc
    import weakref

    model = Layer()
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=VARIANT)
    right(compiled, model, 3)
    (region,) = registry.living()
    assert region.captured is not None
    check = dtensors.alike(region.captured, [model.weight if e.is_dtensor else None for e in region.captured.inputs])
    weights = [weakref.ref(model.weight), weakref.ref(model.weight.to_local())]
    del region, model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert check is not None
    assert weights[0]() is None


def test_one_that_the_graph_writes_to_is_compiled_at_once() -> None:
    class Counts(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.add_(1)
            return super().forward(x)

    class CountsHere(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.to_local().add_(1)  # type: ignore[operator]
            return super().forward(x)

    for kind in (Counts, CountsHere):
        torch._dynamo.reset()
        model = kind()
        twin = copy.deepcopy(model)
        compiled = torch.compile(model, backend="multigraph", dynamic=True, options=VARIANT)
        with torch.no_grad():
            for rows in (3, 4, 3):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(compiled(x), twin(x))
        notes = [note for region in multigraph_backend.explain().to_dict()["regions"] for note in region["notes"]]
        assert any("(DTensor) that the graph writes to" in note for note in notes), (kind, notes)


def test_what_it_has_here_may_be_memory_that_the_graph_changes() -> None:
    class Counts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return super().forward(x) + self.count.sum()

    torch.manual_seed(0)
    model = Counts()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options={**VARIANT, "on_failure": "fallback"})

    def same() -> None:
        with torch.no_grad():
            for rows in (3, 4, 3):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(compiled(x), twin(x))

    same()
    before = multigraph_backend.stats()["eager_calls"]
    for each in (model, twin):
        each.weight._local_tensor = each.count  # type: ignore[union-attr]
    same()
    assert multigraph_backend.stats()["eager_calls"] == before + 3


def test_a_plain_model_asks_nothing() -> None:
    model = torch.nn.Linear(8, 8)
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options={"compiler": "aot_eager"})
    captures = counters["stats"]["unique_graphs"]
    compiled(torch.randn(3, 8))
    assert counters["stats"]["unique_graphs"] == captures + 1
    (region,) = registry.living()
    assert region.generic.forms[0].lowered.guards.text == "True"
