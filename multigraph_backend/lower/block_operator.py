"""The operator that stands for a call of a body while AOTAutograd traces, and what is known of bodies.

    multigraph::block(given, body, graph, kind) -> results

`graph` is "whole" in a captured graph; traced under autograd it becomes a call of "forward" whose gradient is a call of
"backward", elsewhere one of "inference".  The operator is never run: what it would return is said of fake tensors, and
before Inductor is given the graph, the body's own graph takes its place (`traced_once.put_in`).

In:  the bodies of the compile that is running (`known`), of each its kinds by what a call is given.
Out: nodes of the operator, each checked against the kind of arguments that its body was traced for; `CannotLower` where
a call is none of them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.lower.steps_of_graph import is_plain, is_step

_library = torch.library.Library("multigraph", "FRAGMENT")
_library.define("block(Tensor[] given, str body, str graph, int kind) -> Tensor[]")


class Refused(Exception):
    """Repeated blocks are traced one by one; the message says why."""


# ---------------------------------------------------------------- what is known of a body

#: type, device, sizes, strides and offset of a tensor
Layout = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """One graph of a body.  `made`: the graph, which hands out memory that it has made; `views`: for each result, what
    of the block's own graph makes it out of that."""

    made: GraphModule
    given: tuple[Layout, ...]
    results: tuple[Layout, ...]
    views: tuple[tuple[Node, ...], ...]

    @property
    def steps(self) -> int:
        return sum(is_step(node) for node in self.made.graph.nodes)


@dataclass(frozen=True, eq=False)
class Kind:
    """A body for one kind of arguments.

    results: how many the block has; its forward graph makes what is saved for backward behind them
    differentiable: which of the results have gradients
    saved: what the backward graph takes before gradients, arguments or results of the forward graph by number
    gradients: for each argument the number of the backward's result, or -1 - the number of the gradient it is given
    """

    forward: Part
    results: int
    differentiable: tuple[bool, ...] = ()
    backward: Part | None = None
    saved: tuple[tuple[str, int], ...] = ()
    gradients: tuple[int | None, ...] = ()


@dataclass
class Bodies:
    """The bodies of one graph by their names: of each its kinds, in order, by what a call is given.

    `wrong`: why what AOTAutograd has traced with them is of no use.
    """

    kinds: dict[str, dict[tuple[Any, ...], Kind]] = field(default_factory=dict)
    wrong: str | None = None

    def find(self, name: str, given: Sequence[torch.Tensor]) -> tuple[int, Kind]:
        kinds = self.kinds.get(name, {})
        key = key_of(given)
        if key not in kinds:
            raise CannotLower("a call of a repeated block is not what its block was traced for")
        return list(kinds).index(key), kinds[key]

    def part(self, name: str, graph: str, kind: int) -> Part:
        found = list(self.kinds[name].values())[kind]
        part = found.backward if graph == "backward" else found.forward
        assert part is not None
        return part


_bodies: ContextVar[Bodies | None] = ContextVar("multigraph_bodies", default=None)


@contextlib.contextmanager
def known(bodies: Bodies) -> Iterator[None]:
    """AOTAutograd may trace calls of `bodies` inside."""
    token = _bodies.set(bodies)
    try:
        yield
    finally:
        _bodies.reset(token)


def key_of(given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    grad = torch.is_grad_enabled()
    return tuple((*layout_of(value), grad and value.requires_grad) for value in given)


def layout_of(value: torch.Tensor) -> Layout:
    sizes = (*value.size(), *value.stride(), value.storage_offset())
    if not is_plain(value) or not all(type(size) is int for size in sizes):
        raise Refused("sizes are symbolic" if is_plain(value) else "it takes what is no plain tensor")
    return value.dtype, value.device, tuple(value.size()), tuple(value.stride()), value.storage_offset()


def empty(layout: Layout) -> torch.Tensor:
    dtype, device, size, stride, offset = layout
    if offset:
        raise Refused("it takes a window into other memory")
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


# ---------------------------------------------------------------- the operator


def _known() -> Bodies:
    bodies = _bodies.get()
    if bodies is None:
        raise CannotLower("a repeated block is traced outside of its compile")
    return bodies


def _fake(given: Sequence[torch.Tensor], body: str, graph: str, kind: int) -> list[torch.Tensor]:
    bodies = _known()
    if graph == "whole":
        kind, _ = bodies.find(body, given)
    part = bodies.part(body, graph, kind)
    if tuple(map(layout_of, given)) != part.given:
        raise CannotLower("a call of a repeated block is not what its block was traced for")
    return [empty(layout) for layout in part.results]


def _differentiated(given: Sequence[torch.Tensor], body: str, graph: str, kind: int) -> list[torch.Tensor]:
    if graph != "whole":
        return _below_autograd(given, body, graph, kind)
    kind, known = _known().find(body, given)
    if known.backward is None:
        return _below_autograd(given, body, "inference", kind)
    results: tuple[torch.Tensor, ...] = _Differentiated.apply(known, body, kind, *given)  # type: ignore[no-untyped-call]
    return list(results)


def _below_autograd(given: Sequence[torch.Tensor], body: str, graph: str, kind: int) -> list[torch.Tensor]:
    with _compat.below_autograd():
        made: list[torch.Tensor] = BLOCK(list(given), body, graph, kind)
    return made


class _Differentiated(torch.autograd.Function):
    """A call and its gradient, while AOTAutograd traces."""

    @staticmethod
    def forward(ctx: Any, known: Kind, body: str, kind: int, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = _below_autograd(given, body, "forward", kind)
        ctx.known, ctx.body, ctx.kind = known, body, kind
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(given[index] if where == "given" else made[index] for where, index in known.saved))
        plain = itertools.compress(made, map(operator.not_, known.differentiable))
        ctx.mark_non_differentiable(*plain, *made[known.results :])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        known: Kind = ctx.known
        assert known.backward is not None
        expected = known.backward.given[len(known.saved) :]
        tangents: list[torch.Tensor] = []
        wanted = list(itertools.compress(gradients, known.differentiable))
        for gradient, layout in zip(wanted, expected, strict=True):
            if gradient is None:  # an error here would come with autograd's warning; `put_in` raises it
                _known().wrong = "a result of a repeated block has no gradient"
                tangents.append(empty(layout).zero_())
                continue
            dtype, _, size, stride, _ = layout
            if gradient.dtype != dtype or gradient.size() != size:
                raise CannotLower("a gradient of a repeated block is of another kind than its result")
            if gradient.stride() != stride or gradient.storage_offset():
                gradient = gradient.contiguous() if _is_contiguous(size, stride) else gradient
                gradient = gradient.clone() if gradient.storage_offset() else gradient
            tangents.append(gradient)
        made = _below_autograd([*ctx.saved_tensors, *tangents], ctx.body, "backward", ctx.kind)
        return (
            *(None, None, None),
            *(
                None if place is None else made[place] if place >= 0 else tangents[-1 - place]
                for place in known.gradients
            ),
        )


def _is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for count, step in zip(reversed(size), reversed(stride), strict=True):
        if step != expected:
            return False
        expected *= max(count, 1)
    return True


_library.impl("block", _differentiated, "Autograd")
torch.library.register_fake("multigraph::block", _fake, lib=_library)
BLOCK = torch.ops.multigraph.block.default
