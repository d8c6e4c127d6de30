"""What programs do to weights that are tensor subclasses between two calls: each call is as eager's.

Where a graph writes to memory that such a weight shares, AOTAutograd's code is wrong, as stock's is; those calls run
eagerly, and the tests show stock's numbers too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import multigraph_backend

pytestmark = pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching:UserWarning")
OPTIONS: dict[str, Any] = {"compiler": "aot_eager", "specialize": [{"x[0]": [4, 8]}]}


def pair(rows: int = 8) -> Any:
    return torch.nn.Parameter(TwoTensor(torch.randn(rows, 8), torch.randn(rows, 8)), requires_grad=False)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = pair()
        self.bias = torch.nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = torch.nn.functional.linear(x, self.weight)
        return (y.a - 2 * y.b if isinstance(y, TwoTensor) else y) + self.bias


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))  # type: ignore[no-any-return]


class Writes(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one.weight.add_(1)
        return super().forward(x)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def exchanged(model: Two) -> None:
    model.one.weight, model.two.weight = model.two.weight, model.one.weight


def tied(model: Two) -> None:
    model.two.weight = model.one.weight


def share_a_part(model: Two) -> None:
    model.two.weight.a = model.one.weight.a
    model.one.weight.a.mul_(2)


def parts_exchanged(model: Two) -> None:
    weight = model.one.weight
    weight.a, weight.b = weight.b, weight.a


def parts_in_one_memory(model: Two) -> None:
    model.one.weight.a = model.one.weight.b


def of_other_sizes(model: Two) -> None:
    model.two.weight, model.two.bias = pair(16), torch.nn.Parameter(torch.randn(16), requires_grad=False)


def of_other_strides_in_place(model: Two) -> None:
    for part in (model.one.weight.a, model.one.weight.b):
        part.set_(torch.randn(64).untyped_storage(), 0, (8, 8), (1, 8))


def loaded(model: Two) -> None:
    model.load_state_dict(Two().state_dict())


def loaded_by_assignment(model: Two) -> None:
    model.load_state_dict(Two().state_dict(), assign=True)


def plain(model: Two) -> None:
    model.one.weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)


def the_bias_is_a_part(model: Two) -> None:
    model.one.bias = torch.nn.Parameter(model.one.weight.a[0], requires_grad=False)
    model.one.weight.a.add_(1)


def new_data(model: Two) -> None:
    model.one.weight.a.data = torch.randn(8, 8)
    model.two.weight.data = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))


CHANGES = (exchanged, tied, share_a_part, parts_exchanged, parts_in_one_memory, of_other_sizes, new_data, plain,
           of_other_strides_in_place, loaded, loaded_by_assignment, the_bias_is_a_part)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_call_is_right(change: Callable[[Two], None]) -> None:
    model = Two()
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=OPTIONS)
    for _ in range(2):
        for rows in (3, 4, 8):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))
        change(model)
    copied = copy.deepcopy(compiled)
    for rows in (3, 4):
        x = torch.randn(rows, 8)
        for one in (compiled, copied):
            torch.testing.assert_close(one(x), model(x))
    assert multigraph_backend.stats()["variant_calls"] >= 3


def test_a_model_is_moved_to_another_type_also_where_its_graphs_are_noted_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Module.to` exchanges such weights as a whole, and cannot while anybody refers to them weakly."""
    monkeypatch.setenv("MULTIGRAPH_MANIFESTS", str(tmp_path))
    model = Two()
    compiled = torch.compile(model, backend="multigraph", dynamic=True)
    compiled(torch.randn(3, 8))
    model.double()
    x = torch.randn(3, 8, dtype=torch.double)
    torch.testing.assert_close(compiled(x), model(x))


def parts_of_two_weights(model: Two, x: torch.Tensor) -> None:
    model.two.weight.a = model.one.weight.a


def a_part_and_the_input(model: Two, x: torch.Tensor) -> None:
    model.one.weight.b = x


@pytest.mark.parametrize("share", [parts_of_two_weights, a_part_and_the_input], ids=lambda share: share.__name__)
def test_what_is_written_to_and_shared_runs_eagerly(share: Callable[[Two, torch.Tensor], None]) -> None:
    def outcome(backend: str | None, shares: bool) -> list[torch.Tensor]:
        """What calls return and leave behind, all of the same numbers."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, found = Writes(), []
        options = {"options": {"compiler": "aot_eager"}} if backend == "multigraph" else {}
        # the cache of stock's code does not tell apart what shares memory from what does not: aot_eager has none
        run = model if backend is None else torch.compile(model, backend=backend, dynamic=True, **options)
        for step in range(3):
            x = torch.randn(8, 8)
            if shares and step:
                share(model, x)
            found += [run(x), x, model.one.weight.a.clone(), model.one.weight.b.clone(), model.two.weight.a.clone()]
        return found

    for shares in (False, True):
        wanted = outcome(None, shares)
        torch.testing.assert_close(outcome("multigraph", shares), wanted)
        assert ("shares memory with what a tensor subclass is made of" in str(multigraph_backend.explain())) == shares
        stock = outcome("aot_eager", shares)
        right = all(torch.allclose(one, other, atol=1e-4) for one, other in zip(stock, wanted, strict=True))
        assert right != shares, "stock is right: nothing need run eagerly"
