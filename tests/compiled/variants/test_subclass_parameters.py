"""Parameters that are tensor subclasses: generic, variants and packing as with plain ones, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch.testing._internal.two_tensor import TwoTensor

import multigraph_backend
from multigraph_backend.cudagraphs.partition import of_inductor
from multigraph_backend.lower import lowering

pytestmark = pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching:UserWarning")
AOT: dict[str, Any] = {"compiler": "aot_eager", "specialize": [{"x[0]": [4, 8]}]}


def pair(rows: int = 8, requires_grad: bool = False) -> torch.nn.Parameter:
    first = torch.randn(rows, 8)
    return torch.nn.Parameter(TwoTensor(first, first.clone()), requires_grad=requires_grad)


class Layer(torch.nn.Module):
    """A linear layer whose weight is made of two tensors; it returns a plain one."""

    def __init__(self, requires_grad: bool = False) -> None:
        super().__init__()
        self.weight = pair(requires_grad=requires_grad)
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self.weight).relu()
        return (y.a if isinstance(y, TwoTensor) else y) + self.bias


def right(compiled: Any, model: torch.nn.Module, *rows: int) -> None:
    for count in rows:
        x = torch.randn(count, 8)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_quantized_like_weight_keeps_variants_through_changes_of_it() -> None:
    """Its numbers are written over, it is exchanged, and a part of it is: each call is right, by its variant."""
    model = Layer()
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=AOT)
    right(compiled, model, 3, 4, 8, 5, 4)
    ran = multigraph_backend.stats()
    assert (ran["generic_compiled"], ran["variants_compiled"], ran["variant_calls"]) == (1, 2, 3)
    weight: Any = model.weight
    with torch.no_grad():
        for part in (weight.a, weight.b):
            part.mul_(2)
    right(compiled, model, 4, 3)
    model.weight = pair()
    right(compiled, model, 4, 3)
    weight = model.weight
    weight.a, weight.b = torch.randn(8, 8), torch.randn(8, 8)  # other tensors of the same sizes
    right(compiled, model, 4, 3)
    weight.a = weight.a.t().contiguous().t()  # other strides than were compiled for
    weight.b = weight.b.t().contiguous().t()
    right(compiled, model, 4, 3)
    (graph, *_) = multigraph_backend.explain().to_dict()["regions"]
    assert any("weight is a TwoTensor" in note for note in graph["notes"])
    assert multigraph_backend.stats()["eager_calls"] == multigraph_backend.stats()["failures"] == 0


class Trained(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = pair(requires_grad=True)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.out(x).sigmoid() * x, self.weight).sin().sum()


def test_it_trains_and_saved_tensors_of_such_graphs_are_packed() -> None:
    """Each gradient is that of eager; of the subclass's own, both parts."""
    model = Trained()
    rule = {"match": {"min_bytes": 0}, "pack": {"cast": "float16"}}
    options = {**AOT, "compiler": "inductor", "saved_tensors": [rule]}
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=options)
    for rows in (4, 5):
        x = torch.randn(rows, 8)
        wanted = torch.autograd.grad(model(x), list(model.parameters()))
        got = torch.autograd.grad(compiled(x), list(model.parameters()))
        for one, other in zip(got, wanted, strict=True):
            for name in ("a", "b") if isinstance(other, TwoTensor) else ("data",):
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=3e-2, atol=3e-2)
    ran = multigraph_backend.stats()
    assert ran["generic_calls"] == ran["variant_calls"] == 1
    assert (ran["packed_tensors"], ran["kept_tensors"]) == (2 * 4, 2 * 3)  # kept: the input, and both of the weight
    assert ran["failures"] == ran["eager_calls"] == 0


def test_what_it_is_made_of_are_static_inputs_of_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is told that both parts lie where they lie, and so is what records its code."""
    model = Layer().eval()
    monkeypatch.setattr(lowering, "records", lambda *_: True)
    static: list[int] = []
    take = of_inductor.take

    def noting(gm: Any, positions: Any, *rest: Any) -> Any:
        static.append(len(positions))
        return take(gm, positions, *rest)

    monkeypatch.setattr(of_inductor, "take", noting)
    compiled = torch.compile(model, backend="multigraph", dynamic=True)
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        right(compiled, model, 3)
    assert static == [3]  # both parts of the weight, and the bias


def test_a_subclass_that_is_no_parameter_or_is_written_to_is_compiled_at_once() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="multigraph", dynamic=True, options={"compiler": "aot_eager"})
    x = TwoTensor(torch.ones(4), torch.ones(4))
    assert torch.equal(compiled(x).a, torch.full((4,), 2.0))

    class Counts(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.add_(1)
            return super().forward(x)

    with torch.no_grad():
        model, twin = Counts(), Counts()
        twin.load_state_dict(model.state_dict())
        counted = torch.compile(model, backend="multigraph", dynamic=True, options=AOT)
        for rows in (4, 3):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(counted(x), twin(x))
    notes = [note for graph in multigraph_backend.explain().to_dict()["regions"] for note in graph["notes"]]
    assert any("(TwoTensor), and no parameter or buffer" in note for note in notes)
    assert any("(TwoTensor) that the graph writes to" in note for note in notes)


def test_what_a_subclass_is_made_of_and_the_graph_changes_is_not_compiled() -> None:
    """A buffer that is written to is a part of the weight too: AOTAutograd does not see that."""

    class Shared(Layer):
        def __init__(self) -> None:
            super().__init__()
            weight: Any = self.weight
            self.register_buffer("part", weight.a.view(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.part.add_(1)
            return super().forward(x)

    torch.manual_seed(0)
    model = Shared()
    torch.manual_seed(0)
    twin = Shared()
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=AOT)
    with torch.no_grad():
        for rows in (3, 4):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), twin(x))
    assert "is made of memory that is changed in place" in str(multigraph_backend.explain())


def nested() -> torch.nn.Parameter:
    first = torch.randn(8, 8)
    inner = TwoTensor(first, first.clone())
    return torch.nn.Parameter(TwoTensor(inner, inner.clone()), requires_grad=False)


class Writes(Layer):
    """Its calls write to a buffer."""

    def __init__(self, made: Callable[[], torch.nn.Parameter]) -> None:
        super().__init__()
        self.weight = made()
        self.register_buffer("part", torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.add_(1)
        y: Any = torch.nn.functional.linear(x, self.weight).relu()
        while isinstance(y, TwoTensor):
            y = y.a
        return y + self.bias + self.part.sum()

    def first_part(self) -> Any:
        """What holds it as `a`."""
        weight: Any = self.weight
        return weight.a if isinstance(weight.a, TwoTensor) else weight


BECOMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the very tensor": lambda part: part,
    "another tensor of its memory": lambda part: part.detach(),
}


@pytest.mark.parametrize("made", [pair, nested])
@pytest.mark.parametrize("becomes", BECOMES)
def test_a_weight_whose_part_becomes_memory_that_the_graph_changes_is_seen_at_the_call(
    becomes: str, made: Callable[[], torch.nn.Parameter]
) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Writes(made))
    compiled = torch.compile(models[0], backend="multigraph", dynamic=True, options=AOT)

    def same() -> None:
        with torch.no_grad():
            for rows in (3, 4, 3):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(compiled(x), models[1](x))

    same()
    before = multigraph_backend.stats()["eager_calls"]
    apart = [each.first_part().a for each in models]
    for each in models:
        each.first_part().a = BECOMES[becomes](each.part)
    same()
    assert multigraph_backend.stats()["eager_calls"] == before + 3
    for each, part in zip(models, apart, strict=True):
        each.first_part().a = part
    same()
    assert multigraph_backend.stats()["eager_calls"] == before + 3


def test_sizes_that_are_not_fixed_are_refused_with_the_reason() -> None:
    model = Layer()
    with dynamo_config.patch(force_parameter_static_shapes=False):
        compiled = torch.compile(model, backend="multigraph", dynamic=True, options=AOT)
        right(compiled, model, 3, 4)
    notes = [note for graph in multigraph_backend.explain().to_dict()["regions"] for note in graph["notes"]]
    assert any("(TwoTensor) whose sizes are not fixed" in note for note in notes), notes
