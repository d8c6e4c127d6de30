"""Pieces of compiled code for tests of the runtime, made of plain functions, and a tree on the simulated device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from multigraph_backend import native
from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.partition.graph_spec import GraphSpec, PartitionSpec, Placeholder
from multigraph_backend.cudagraphs.recordings.piece import Piece
from multigraph_backend.cudagraphs.recordings.piece_spec import MOST, PieceSpec
from multigraph_backend.cudagraphs.recordings.tree import Tree

#: what is known of a graph that is one piece of one input and one output
PIECE = PartitionSpec(0, (0,), (0,), (), (), (True,), ("x",))
SPEC = GraphSpec(
    is_backward=False,
    inputs=(Placeholder("x", "the user's line"),),
    outputs=1,
    static=(),
    mutated=(),
    visible=(True,),
    pieces=(PIECE,),
    whole=True,
    cuts=(),
    devices=(0,),
)

Body = Callable[..., tuple[Any, ...]]


def boxed(function: Body) -> Callable[[list[Any]], tuple[Any, ...]]:
    """As Inductor calls its code: with a list that the callee clears."""

    def run(args: list[Any]) -> tuple[Any, ...]:
        given = list(args)
        args.clear()
        return function(*given)

    return run


class StepMarks:
    """As torch counts them; `tell` is asked each time."""

    def __init__(self, tell: Callable[[], int]) -> None:
        self._tell = tell

    @property
    def mark_step_counter(self) -> int:
        return self._tell()


class Entered(Piece):
    """A piece that is called as compiled code calls it: natively, where calls of its tree are."""

    _ways: tuple[object, Any] = None, None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        calls = self.tree.calls
        if self._ways[0] is not calls:
            self._ways = calls, self.entry()
        if calls is None:
            return super().__call__(inputs)
        outputs: Sequence[Any] = self._ways[1](inputs)
        return outputs


class Bench:
    """A simulated device, a tree, and pieces on it whose results are compared with plain calls."""

    def __init__(
        self,
        limits: Limits | None = None,
        marks: Callable[[], int] = lambda: 0,
        most: int = MOST,
        poisons: bool = False,
        native_calls: bool = True,
        **device: Any,
    ) -> None:
        self.most = most
        self.device = SimulatedDevice(**device)
        self.tree = Tree(self.device, limits, StepMarks(marks), poisons)
        if native_calls and (calls := native.ready()) is not None:
            assert self.tree.take(calls)

    def piece(self, function: Body, inputs: int, outputs: int, *, visible: Sequence[bool] = (), **known: Any) -> Piece:
        """`known`: static, mutated, constants, is_backward."""
        names = tuple(f"x{index}" for index in range(inputs))
        label = known.pop("label", getattr(function, "__name__", "piece"))
        shown = tuple(visible) or (True,) * outputs
        limits = known.pop("limits", None)
        for name, kind in (("static", frozenset), ("mutated", frozenset), ("reused", frozenset), ("constants", tuple)):
            known[name] = kind(known.get(name, ()))
        spec = PieceSpec(names, shown, label=label, most=self.most, **known)
        return Entered(self.tree, boxed(function), spec, limits)

    def recorded(self) -> int:
        return self.tree.counts["recordings"]

    def replays(self) -> int:
        return len(self.device.calls("replay"))

    def clones(self) -> int:
        return self.tree.counts["clones"]

    def unrecorded(self, *pieces: Piece) -> dict[str, int]:
        """Why calls of `pieces` ran unrecorded, first calls left out."""
        reasons: dict[str, int] = {}
        for piece in pieces:
            for keyed in piece.by_key.values():
                for reason, count in keyed.reasons.items():
                    if reason != "first call":
                        reasons[reason] = reasons.get(reason, 0) + count
        return reasons


_made: list[torch.Tensor] = []


def values(*shape: int) -> torch.Tensor:
    """Never at an address that was used before: one that comes twice by chance would be taken for one that stays."""
    _made.append(torch.randn(shape or (8,)))
    return _made[-1]


def one() -> torch.Tensor:
    """A gradient of 1, at an address of its own, too."""
    _made.append(torch.ones(()))
    return _made[-1]


def call_right(piece: Piece, function: Body, *args: Any) -> tuple[Any, ...]:
    """Call `piece`, compare with `function` on the same values, and return the piece's outputs."""
    expected = function(*copy.deepcopy([arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]))
    outputs = tuple(piece(list(args)))
    assert_equal(outputs, expected)
    return outputs


def assert_equal(outputs: Iterable[Any], expected: Iterable[Any]) -> None:
    for output, value in zip(outputs, expected, strict=True):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(output, value, rtol=0, atol=0)
        else:
            assert output == value
