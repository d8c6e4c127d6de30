"""The operator that stands for a call of a body while AOTAutograd traces, and what is known of bodies.

    multigraph::block(given, numbers, symbols, body, graph, kind, draw) -> results

`graph` is "whole" in a captured graph; traced under autograd it becomes a call of "forward" whose gradient is a call of
"backward", elsewhere one of "inference".  The operator is never run: what it would return is said of fake tensors, and
before Inductor is given the graph, the body's own graph takes its place (`traced_once.put_in`).

`draw` is 0, or tells calls apart of a body that draws random numbers: two calls for the same arguments are not one.

A whole call is given the symbolic numbers that its block takes, and all symbols that inputs of the graph are.  What a
body computes with sizes it computes from symbols, so a call of one of its graphs is given those that the graph needs.

In:  the bodies of the compile that is running (`known`), of each its kinds by what a call is given.
Out: nodes of the operator, each checked against the kind of arguments that its body was traced for; `CannotLower` where
a call is none of them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.lower.steps_of_graph import is_plain, is_step

_library = torch.library.Library("multigraph", "FRAGMENT")
_library.define(
    "block(Tensor[] given, SymInt[] numbers, SymInt[] symbols, str body, str graph, int kind, int draw) -> Tensor[]"
)


class Refused(Exception):
    """Repeated blocks are traced one by one; the message says why."""


# ---------------------------------------------------------------- what is known of a body

#: type, device, sizes, strides and offset of a tensor; what is symbolic as an expression
Layout = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """One graph of a body.  `made`: the graph, which hands out memory that it has made; `views`: for each result, what
    of the block's own graph makes it out of that; `symbols`: which of the graph's symbols it takes behind tensors."""

    made: GraphModule
    given: tuple[Layout, ...]
    results: tuple[Layout, ...]
    views: tuple[tuple[Node, ...], ...]
    symbols: tuple[int, ...] = ()

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
    only_added: of each gradient that the backward is given, whether nothing but sums with others is made of it
    """

    forward: Part
    results: int
    differentiable: tuple[bool, ...] = ()
    backward: Part | None = None
    saved: tuple[tuple[str, int], ...] = ()
    gradients: tuple[int | None, ...] = ()
    only_added: tuple[bool, ...] = ()


@dataclass(frozen=True)
class PutIn:
    """What stands for the operators of one graph: names of bodies, and of each its steps and how often it is called;
    `inlined`: the same of those whose steps stand there."""

    names: tuple[str, ...] = ()
    bodies: tuple[tuple[int, int], ...] = ()
    inlined: tuple[tuple[int, int], ...] = ()


@dataclass
class Bodies:
    """The bodies of one graph by their names: of each its kinds, in order, by what a call is given.

    `shape_env`: where symbols that sizes are expressions over come from; None where there are none.
    `wrong`: why what AOTAutograd has traced with them is of no use.  `put`: what stands for the operators in graphs
    where that was settled already, by "forward" and "backward".  `inlined`: whether it is the steps of their parts,
    and not calls.  `checkpointed`: of which the backward computes something again, whatever could be saved.
    """

    kinds: dict[str, dict[tuple[Any, ...], Kind]] = field(default_factory=dict)
    inlined: bool = False
    checkpointed: frozenset[str] = frozenset()
    shape_env: Any = None
    wrong: str | None = None
    put: dict[str, PutIn] = field(default_factory=dict)

    def find(
        self, name: str, given: Sequence[torch.Tensor], numbers: Sequence[int | torch.SymInt] = ()
    ) -> tuple[int, Kind]:
        if (found := self.known(name, given, numbers)) is None:
            raise CannotLower(_ANOTHER)
        return found

    def known(
        self, name: str, given: Sequence[torch.Tensor], numbers: Sequence[int | torch.SymInt] = ()
    ) -> tuple[int, Kind] | None:
        key = key_of(given, numbers)
        kinds = self.kinds.get(name, {})
        return next(((index, kinds[of]) for index, of in enumerate(kinds) if self.same(of, key)), None)

    def part(self, name: str, graph: str, kind: int) -> Part:
        found = list(self.kinds[name].values())[kind]
        part = found.backward if graph == "backward" else found.forward
        assert part is not None
        return part

    def now(self, value: Any) -> Any:
        """The same with symbols replaced that were since found equal to something."""
        if isinstance(value, tuple):
            return tuple(map(self.now, value))
        return _plain(self.shape_env.replace(value)) if isinstance(value, sympy.Expr) else value

    def takes(self, part: Part, given: Sequence[torch.Tensor]) -> bool:
        return self.same(part.given, tuple(map(layout_of, given)))

    def same(self, known: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
        """Whether two layouts, or values made of layouts, are equal.

        torch writes a stride as `Max(1, size)`, or as the size: that they are equal becomes a guard of the graph.
        """
        if known == found or (known := self.now(known)) == found:
            return True
        asked: list[sympy.Basic] = []
        if not _same_but_for_empty(known, found, asked):
            return False
        return all(bool(self.shape_env.evaluate_expr(equal)) for equal in asked)


def _same_but_for_empty(known: Any, found: Any, asked: list[sympy.Basic]) -> bool:
    """Whether two values are equal where no size is 0; what has to hold for that is added to `asked`."""
    if isinstance(known, tuple) and isinstance(found, tuple):
        alike = (_same_but_for_empty(one, other, asked) for one, other in zip(known, found, strict=False))
        return len(known) == len(found) and all(alike)
    if isinstance(known, sympy.Expr) and isinstance(found, sympy.Expr) and known != found:
        asked.append(sympy.Eq(known, found))
        return bool((_compat.plain_size(known) - _compat.plain_size(found)).expand() == 0)
    return bool(known == found)


_ANOTHER = "a call of a repeated block is not what its block was traced for"


_bodies: ContextVar[Bodies | None] = ContextVar("multigraph_bodies", default=None)


@contextlib.contextmanager
def known(bodies: Bodies) -> Iterator[None]:
    """AOTAutograd may trace calls of `bodies` inside."""
    token = _bodies.set(bodies)
    try:
        yield
    finally:
        _bodies.reset(token)


def key_of(given: Sequence[torch.Tensor], numbers: Sequence[int | torch.SymInt] = ()) -> tuple[Any, ...]:
    grad = torch.is_grad_enabled()
    return *((*layout_of(value), grad and value.requires_grad) for value in given), *map(expression, numbers)


def layout_of(value: torch.Tensor) -> Layout:
    if not is_plain(value):
        raise Refused("it takes what is no plain tensor")
    size, stride = (tuple(map(expression, entries)) for entries in (value.size(), value.stride()))
    return value.dtype, value.device, size, stride, expression(value.storage_offset())


def expression(number: Any) -> int | sympy.Expr:
    """A size as a number, or as an expression over symbols that inputs of the graph tell."""
    if type(number) is int:
        return number
    if not isinstance(number, torch.SymInt):
        raise Refused("a number that is no integer goes into or out of it")
    found = _plain(number.node.expr)
    if isinstance(found, sympy.Expr) and (unknown := sorted(map(str, filter(_is_unbacked, found.free_symbols)))):
        raise Refused(f"nothing is known of the size {unknown[0]} before a run")
    return found


def _is_unbacked(symbol: sympy.Symbol) -> bool:
    return bool(_compat.symbol_is_type(symbol, (_compat.SymT.UNBACKED_INT, _compat.SymT.UNBACKED_FLOAT)))


def _plain(expr: Any) -> Any:
    return int(expr) if isinstance(expr, sympy.Integer) else expr


def empty(layout: Layout, shape_env: Any) -> torch.Tensor:
    dtype, device, size, stride, offset = layout
    if offset != 0:
        raise Refused("it takes a window into other memory")
    sizes, strides = ([symbolic(entry, shape_env) for entry in entries] for entries in (size, stride))
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def symbolic(expr: int | sympy.Expr, shape_env: Any) -> int | torch.SymInt:
    if isinstance(expr, int):
        return expr
    made: int | torch.SymInt = shape_env.create_symintnode(expr, hint=None)
    return made


def number_node(graph: Graph, number: Any, symbols: Mapping[sympy.Symbol, Node]) -> Any:
    """A number, computed where a graph inserts now.  `symbols`: the nodes that each symbol is there."""
    expr = number if isinstance(number, sympy.Expr) else expression(number)
    if isinstance(expr, int):
        return expr
    if lacking := sorted(map(str, expr.free_symbols - set(symbols))):
        raise Refused(f"it depends on {lacking[0]}, which no input is")
    if isinstance(expr, sympy.Symbol):
        return symbols[expr]
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: torch.fx.Proxy(symbols[symbol], tracer) for symbol in expr.free_symbols}
    made: Node = _compat.sympy_interp(_compat.ReferenceAnalysis, proxies, expr).node
    if all("val" in symbols[symbol].meta for symbol in expr.free_symbols):
        _give_values(made)
    return made


def _give_values(node: Node) -> None:
    if "val" in node.meta:
        return
    for operand in node.all_input_nodes:
        _give_values(operand)
    target: Any = node.target
    node.meta["val"] = target(*torch.fx.node.map_arg(node.args, lambda operand: operand.meta["val"]))


# ---------------------------------------------------------------- the operator


def _known() -> Bodies:
    bodies = _bodies.get()
    if bodies is None:
        raise CannotLower("a repeated block is traced outside of its compile")
    return bodies


def _fake(
    given: Sequence[torch.Tensor],
    numbers: Sequence[int | torch.SymInt],
    symbols: Sequence[int | torch.SymInt],
    body: str,
    graph: str,
    kind: int,
    draw: int,
) -> list[torch.Tensor]:
    bodies = _known()
    if graph == "whole":
        kind, _ = bodies.find(body, given, numbers)
    part = bodies.part(body, graph, kind)
    if not bodies.takes(part, given) or (graph != "whole" and len(symbols) != len(part.symbols)):
        raise CannotLower(_ANOTHER)
    return [empty(bodies.now(layout), bodies.shape_env) for layout in part.results]


def _differentiated(
    given: Sequence[torch.Tensor],
    numbers: Sequence[int | torch.SymInt],
    symbols: Sequence[int | torch.SymInt],
    body: str,
    graph: str,
    kind: int,
    draw: int,
) -> list[torch.Tensor]:
    if graph != "whole":
        with _compat.below_autograd():
            made: list[torch.Tensor] = BLOCK(list(given), list(numbers), list(symbols), body, graph, kind, draw)
        return made
    kind, known = _known().find(body, given, numbers)
    if known.backward is None:
        return _below_autograd(given, symbols, known.forward, body, "inference", kind, draw)
    results: tuple[torch.Tensor, ...] = _Differentiated.apply(known, body, kind, draw, tuple(symbols), *given)  # type: ignore[no-untyped-call]
    return list(results)


def _below_autograd(
    given: Sequence[torch.Tensor],
    symbols: Sequence[int | torch.SymInt],
    part: Part,
    body: str,
    graph: str,
    kind: int,
    draw: int,
) -> list[torch.Tensor]:
    """`symbols`: all of the graph."""
    with _compat.below_autograd():
        taken = [symbols[index] for index in part.symbols]
        made: list[torch.Tensor] = BLOCK(list(given), [], taken, body, graph, kind, draw)
    return made


class _Differentiated(torch.autograd.Function):
    """A call and its gradient, while AOTAutograd traces.

    An error in the gradient would come with a warning of autograd's: what is wrong there, `put_in` raises.
    """

    @staticmethod
    def forward(
        ctx: Any,
        known: Kind,
        body: str,
        kind: int,
        draw: int,
        symbols: tuple[int | torch.SymInt, ...],
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        made = _below_autograd(given, symbols, known.forward, body, "forward", kind, draw)
        ctx.known, ctx.body, ctx.kind, ctx.symbols = known, body, kind, symbols
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(given[index] if where == "given" else made[index] for where, index in known.saved))
        plain = itertools.compress(made, map(operator.not_, known.differentiable))
        ctx.mark_non_differentiable(*plain, *made[known.results :])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        known: Kind = ctx.known
        bodies = _known()
        assert known.backward is not None
        expected = bodies.now(known.backward.given[len(known.saved) :])
        tangents: list[torch.Tensor] = []
        wanted = list(itertools.compress(gradients, known.differentiable))
        missing = sum(gradient is None for gradient in wanted)
        for gradient, layout, only_added in zip(wanted, expected, known.only_added, strict=True):
            if gradient is None:
                if not only_added or missing > 1:  # two of them may be added to each other
                    bodies.wrong = "a result of a repeated block has no gradient"
                tangents.append(empty(layout, bodies.shape_env).fill_(-0.0))  # added to a number, it leaves that
                continue
            found = layout_of(gradient)
            _, _, size, stride, _ = layout
            if not bodies.same((stride, 0), found[3:]):
                gradient = gradient.contiguous() if _is_contiguous(size, stride) else gradient
                gradient = gradient.clone() if found[4] != 0 else gradient
            if not bodies.same(layout, layout_of(gradient)):
                bodies.wrong = "a gradient of a repeated block is of another kind than its result"
                gradient = empty(layout, bodies.shape_env)
            tangents.append(gradient)
        try:
            saved = list(ctx.saved_tensors)
        except RuntimeError:  # AOTAutograd's own graph saves what is made of it
            bodies.wrong = "what a repeated block saves for its backward is written to before that"
            layouts = bodies.now(known.backward.given[: len(known.saved)])
            saved = [empty(layout, bodies.shape_env) for layout in layouts]
        given = [*saved, *tangents]
        made = _below_autograd(given, ctx.symbols, known.backward, ctx.body, "backward", ctx.kind, 0)
        return (
            *(None, None, None, None, None),
            *(
                None if place is None else made[place] if place >= 0 else tangents[-1 - place]
                for place in known.gradients
            ),
        )


def _is_contiguous(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    expected = sympy.Integer(1)
    for count, step in zip(reversed(size), reversed(stride), strict=True):
        if _compat.plain_size(step) != expected:
            return False
        expected *= 1 if count == 0 else _compat.plain_size(count)
    return True


_library.impl("block", _differentiated, "Autograd")
torch.library.register_fake("multigraph::block", _fake, lib=_library)
BLOCK = torch.ops.multigraph.block.default
