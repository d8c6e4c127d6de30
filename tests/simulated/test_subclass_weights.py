"""Recordings of graphs whose weights are tensor subclasses: what they are made of is static, and is looked at as plain
weights are.

Each program runs once with plain weights and once with weights of two tensors, on devices of their own: calls are as
eager's, and what is recorded and replayed is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry as backends
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.cudagraphs.recordings.piece import Piece
from tests.support.simulated.pieces import Bench, values

pytestmark = pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching:UserWarning")


class Plain(torch.nn.Module):
    """Its weight is `made()`, and lies at an address of its own each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.made()

    def made(self) -> Any:
        return torch.nn.Parameter(values(8, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight).relu()

    def exchange_what_it_is_made_of(self) -> None:
        self.weight.data = values(8, 8)

    def write_over(self) -> None:
        self.weight.copy_(values(8, 8))


class Pair(Plain):
    def made(self) -> Any:
        return torch.nn.Parameter(TwoTensor(values(8, 8), values(8, 8)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = super().forward(x)
        return y.a - 2 * y.b  # type: ignore[no-any-return]

    def exchange_what_it_is_made_of(self) -> None:
        weight: Any = self.weight
        weight.a = values(8, 8)

    def write_over(self) -> None:
        weight: Any = self.weight
        for part in (weight.a, weight.b):
            part.copy_(values(8, 8))


def forget() -> None:
    for table in (backends._BACKENDS, backends._COMPILER_FNS):
        table.pop("simulated", None)


class Recorded:
    """A model under multigraph whose code is a piece on a simulated device, with the static inputs that a compiler is
    told of."""

    def __init__(self, kind: type[Plain], most: int = 3) -> None:
        self.bench = Bench(most=most)
        self.pieces: list[Piece] = []
        self.model = kind()

        def compile_graph(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            static = _compat.TracingContext.get().fw_metadata.static_input_indices
            (outputs,) = gm.graph.find_nodes(op="output")[0].args
            piece = self.bench.piece(gm.forward, len(inputs), len(outputs), static=static)
            self.pieces.append(piece)

            def run(given: list[Any]) -> Any:
                return piece(given)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        forget()
        backends.register_backend(name="simulated", compiler_fn=aot_autograd(fw_compiler=compile_graph))
        self.run = torch.compile(
            self.model, backend="multigraph", dynamic=True, options={"compiler": "simulated", "on_failure": "raise"}
        )

    def calls(self, count: int) -> None:
        for _ in range(count):
            x = values(2, 8)
            torch.testing.assert_close(self.run(x), self.model(x), rtol=0, atol=0)

    def counts(self) -> tuple[int, int, int]:
        assert self.bench.unrecorded(*self.pieces) == {}
        return len(self.pieces), self.bench.recorded(), self.bench.replays()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    forget()


def written_over(recorded: Recorded) -> None:
    for _ in range(3):
        recorded.calls(2)
        recorded.model.write_over()
    recorded.calls(2)


def exchanged(recorded: Recorded) -> None:
    for _ in range(3):
        recorded.calls(2)
        recorded.model.weight = recorded.model.made()
    recorded.calls(2)


def its_parts_exchanged(recorded: Recorded) -> None:
    for _ in range(3):
        recorded.calls(2)
        recorded.model.exchange_what_it_is_made_of()
    recorded.calls(2)


def two_in_turn(recorded: Recorded) -> None:
    both = [recorded.model.made() for _ in range(2)]
    for step in range(10):
        recorded.model.weight = both[step % 2]
        recorded.calls(1)


def always_another(recorded: Recorded) -> None:
    """More than are recorded for: then they are copied."""
    for _ in range(16):
        recorded.model.weight = recorded.model.made()
        recorded.calls(2)


#: recordings that there are in the end
PROGRAMS = {written_over: 1, exchanged: 4, its_parts_exchanged: 4, two_in_turn: 2, always_another: 4}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_with_plain_weights(program: Callable[[Recorded], None]) -> None:
    counts: dict[type[Plain], tuple[int, int, int]] = {}
    for kind in (Plain, Pair):
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        recorded = Recorded(kind)
        program(recorded)
        counts[kind] = recorded.counts()
        ran = multigraph_backend.stats()
        assert ran["generic_compiled"] == 1, "the program was compiled again"
        assert not ran["eager_calls"] + ran["failures"]
    assert counts[Pair] == counts[Plain]
    assert counts[Pair][1] == PROGRAMS[program]


def test_both_parts_are_static() -> None:
    for kind, static in ((Plain, 1), (Pair, 2)):
        torch._dynamo.reset()
        recorded = Recorded(kind)
        recorded.calls(3)
        (piece,) = recorded.pieces
        assert len(piece.spec.static) == static
