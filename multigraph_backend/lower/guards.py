"""What a compile came to rely on: its guards, as one Python expression over the arguments of a call.

While a graph is compiled, torch decides questions about sizes by looking at the example, and notes the answers as
guards.  A graph over `x` of sizes `[s0, s1]` is called with `(s0, s1, x)`; for 16 by 4 a compiler asks

    is x.numel() * 4 <= 2**31 (bytes that 32 bits can count)? yes;  does x.size(0) equal 7? no

The ShapeEnv has two guards from then on, and the guards of the code are their text over the argument tuple `a`:

    4*a[1]*a[0] <= 2147483648 and a[0] != 7

A variant for multiples of 8 asks the same.  Its first size is `8*k`, which no compile has to ask about 7:

    32*a[1]*(a[0]//8) <= 2147483648

Dynamo has long returned and would not check any of this, so each call does.  A call for which it does not hold gets
another form.  AOTAutograd notes more: which inputs are the same tensor or share memory.

In: a compile that has just ended: its fresh inputs with their ShapeEnv, and its tracing context.  Out: `Guards`.

Invariant: nothing that a compile assumed is dropped.  A guard over a symbol that no argument carries rejects the
compile.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from multigraph_backend import _compat
from multigraph_backend.capture import dtensors
from multigraph_backend.capture.aliasing import (
    overlapping,
    sharing,
    wrappers_apart,
    writes_beside_wrappers,
    written_alone,
)
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.lower.fresh_inputs import OVERLAPPING, CannotLower, FreshInputs

_BASE = re.compile(r"a\[\d+\]\._base")


@dataclass(frozen=True)
class Guards:
    """`text`: one Python expression over the argument tuple `a` ("True": there are none).  `check`: the same as a
    function of it, None where there are none."""

    text: str
    check: Callable[[Sequence[Any]], bool] | None

    def hold(self, args: Sequence[Any]) -> bool:
        return self.check is None or bool(self.check(args))


NONE = Guards("True", None)


def guards_of(
    graph: CapturedGraph,
    fresh: FreshInputs,
    context: Any,
    args: Sequence[Any],
    pinned: Mapping[sympy.Symbol, int | float],
) -> Guards:
    """The guards of a compile that has just ended under the tracing context `context`.

    `pinned` symbols were fixed though nothing was declared so.

    Raises `CannotLower` if they cannot be expressed, or do not hold for the very arguments of the compile.
    """
    dtensors_alike = dtensors.alike(graph, args)
    parts = [
        *_pinned_parts(graph, pinned),
        *_float_parts(graph, fresh, pinned, args),
        *_shape_parts(fresh),
        *_aliasing_parts(graph, fresh, context, args),
        *(() if dtensors_alike is None else ("dtensors_alike(a)",)),
    ]
    text = " and ".join(dict.fromkeys(parts))
    if not text:
        return NONE
    namespace = {
        **_compat.SYMPY_INTERP,
        "overlapping": overlapping,
        "sharing": functools.partial(sharing, graph),
        "written_alone": written_alone(graph),
        "wrappers_apart": wrappers_apart(graph, args),
        "dtensors_alike": dtensors_alike,
        "same_float": _same_float,
        "ordinary": _ordinary,
        "inf": math.inf,
        "nan": math.nan,
    }
    check = eval(f"lambda a: {text}", namespace)  # printed by sympy from guards, never from user text
    if not check(args):
        raise CannotLower(f"the compile assumed what does not hold for its own inputs: {text}")
    return Guards(text, check)


def _pinned_parts(graph: CapturedGraph, pinned: Mapping[sympy.Symbol, int | float]) -> list[str]:
    locations = {symbol: graph.symbols[symbol].location for symbol in pinned}
    return [_is_number(where.text(), pinned[symbol]) for symbol, where in locations.items() if where is not None]


def _float_parts(
    graph: CapturedGraph, fresh: FreshInputs, pinned: Mapping[sympy.Symbol, int | float], args: Sequence[Any]
) -> Iterator[str]:
    """What has to hold of Python floats beyond guards, which do not tell zeros apart."""
    for index, zero in fresh.zeros.items():
        yield _is_number(f"a[{index}].item()", zero)
    guarded = {symbol for guard in fresh.shape_env.guards[fresh.known_guards :] for symbol in guard.expr.free_symbols}
    guarded.update(fresh.shape_env.replacements)
    for symbol in graph.floats:
        where = graph.symbols[symbol].location
        if symbol in pinned or where is None:
            continue
        if where.read(args) == 0 and fresh.replaced.get(symbol) in guarded:
            yield _is_number(where.text(), 0.0)
        elif graph.computes_floats:
            yield f"ordinary({where.text()})"


def _ordinary(value: float) -> bool:
    """Whether arithmetic with this float may be simplified as with a real number that is not zero."""
    return value != 0 and math.isfinite(value)


def _is_number(text: str, number: int | float) -> str:
    """Text that says that `text` is this very number: zeros of both signs are two, and not-a-number is one."""
    if isinstance(number, float) and (number == 0 or math.isnan(number)):
        return f"same_float({text}, {number!r})"
    return f"{text} == {number!r}"


def _same_float(value: float, number: float) -> bool:
    if math.isnan(number):
        return math.isnan(value)
    return value == number and math.copysign(1.0, value) == math.copysign(1.0, number)


def _shape_parts(fresh: FreshInputs) -> list[str]:
    names = fresh.text_of

    class Printer(_compat.PythonPrinter):  # type: ignore[misc]
        def _print_Symbol(self, expr: sympy.Symbol) -> str:
            return names[expr]

    printer = Printer()
    assumed = [guard.expr for guard in fresh.shape_env.guards[fresh.known_guards :]]
    # a symbol that was found equal to something else is replaced by it from then on
    for new in fresh.text_of:
        target = fresh.shape_env.replacements.get(new)
        if target is not None:
            assumed.append(sympy.Eq(new, target, evaluate=False))
    parts, unknown = [], []
    for expr in assumed:
        if expr in (sympy.true, True):
            continue
        if not expr.free_symbols <= set(names):
            unknown.append(str(expr))
            continue
        text = printer.doprint(expr)
        # sizes of the tensor that a view looks into can be asked of a view only
        bases = sorted(set(_BASE.findall(text)))
        parts += [f"{base} is not None" for base in bases]
        parts.append(text)
    if unknown:
        raise CannotLower(f"the compile assumed something of values that no input carries: {'; '.join(unknown)}")
    return parts


def _aliasing_parts(graph: CapturedGraph, fresh: FreshInputs, context: Any, args: Sequence[Any]) -> list[str]:
    position = {
        _compat.source_name(entry.source): index for index, entry in enumerate(graph.inputs) if entry.source is not None
    }
    parts = []
    for guard in context.guards_context.aotautograd_guards:
        if isinstance(guard, _compat.DuplicateInputs):
            names = [_compat.source_name(source) for source in (guard.input_source_a, guard.input_source_b)]
            if not set(names) <= set(position):
                raise CannotLower(f"an input is a tensor that the graph holds: {' and '.join(names)}")
            first, second = (position[name] for name in names)
            parts.append(f"a[{first}] is a[{second}]")
        elif isinstance(guard, _compat.StorageOverlap):
            if guard.overlapping_sources:
                raise CannotLower(OVERLAPPING)
            over = [position[_compat.source_name(source)] for source in guard.overlapping_sources]
            apart = [position[_compat.source_name(source)] for source in guard.non_overlapping_sources]
            parts.append(f"overlapping({_tuple_text(over)}, {_tuple_text(apart)})")
        else:
            raise CannotLower(f"AOTAutograd added a guard of an unknown kind: {guard}")
    parts += [f"a[{index}].storage_offset() == {offset}" for index, offset in fresh.offsets.items()]
    for index in fresh.windows:
        parts.append(f"a[{index}].storage_offset() == 0 and a[{index}].is_contiguous()")
    groups = sharing(graph, args)
    if groups:
        parts.append(f"sharing(a) == {groups}")
    elif graph.mutates_inputs and len(graph.tensor_inputs) + len(graph.held) > 1:
        parts.append("written_alone(a)")
    if writes_beside_wrappers(graph):
        parts.append("wrappers_apart(a)")
    return parts


def _tuple_text(indices: Sequence[int]) -> str:
    return "(" + "".join(f"a[{index}], " for index in indices) + ")"
