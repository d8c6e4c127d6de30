"""Why a size is a constant of a graph, and what to do where it should be none.

    layer = torch.nn.Linear(32, 32);  layer(x)    first called with x of 4 x 32 x 32
    x[1]   "x[2] was 32 in that call, too, so one symbol stands for all of them, and `return F.linear(...)`
           (linear.py:134) asks for 32; begin with a call in which they differ"

In:  the inputs of a graph of a trace in progress, Dynamo's ShapeEnv.  Out: for names of sizes, the reason in words.
Nothing but text is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from multigraph_backend import _compat
from multigraph_backend.capture import size_names
from multigraph_backend.capture.graph import Input
from multigraph_backend.capture.user_code import UserCode

NOT_SEEN = "no other size was seen before, and neither dynamic=True nor a mark says that there are others"
KEPT = "its tensor is kept at one address, as caches are (mark_static_address), and torch takes its sizes for constants"
MARKED = "it is marked as static (mark_static)"


def reasons(inputs: Sequence[Input], examples: Sequence[Any], shape_env: Any, user_code: UserCode) -> dict[str, str]:
    """By the names of sizes that are constants of the graph.  Sizes 0 and 1 are left out: torch traces them apart."""
    found: dict[str, str] = {}
    for entry, example in zip(inputs, examples, strict=True):
        if entry.layout is None or entry.number:
            continue
        for dim, size in enumerate(entry.layout.size):
            if size.is_Integer and size not in (0, 1):
                name = size_names.size_name(_compat.source_name(entry.layout.source), dim)
                marked = dim in getattr(example, "_dynamo_static_indices", ())
                found[user_code.known_as(name)] = KEPT if entry.static else MARKED if marked else NOT_SEEN
    for symbol, value in shape_env.replacements.items():
        if _compat.symbol_is_type(symbol, _compat.SymT.SIZE) and (number := shape_env.replace(value)).is_Integer:
            names = _names(shape_env.var_to_sources.get(symbol, ()), user_code)
            for name in names:
                others = [other for other in names if other != name]
                found[name] = _asked_for(int(number), others, _guarded_at(shape_env, symbol))
    return found


def _names(sources: Sequence[Any], user_code: UserCode) -> list[str]:
    found: dict[str, None] = {}
    for source in sources:
        if isinstance(source, _compat.TensorPropertySource) and source.prop is _compat.TensorProperty.SIZE:
            found[user_code.known_as(size_names.size_name(_compat.source_name(source.base), source.idx))] = None
    return [name for name in found if "._base" not in name]


def _asked_for(number: int, others: Sequence[str], place: str | None) -> str:
    line, _, where = (place or "").partition("  # ")
    at = f"`{line}` ({where.partition(' in ')[0]})" if where else "the program"
    if others:
        shared = f"{' and '.join(others[:3])} {'was' if len(others) == 1 else 'were'} {number} in that call, too"
        return (
            f"{shared}, so one symbol stands for all of them, and {at} asks for {number}; "
            "begin with a call in which they differ"
        )
    return (
        f"{at} asks for {number}, as where a weight, a cache or a mask has that size; "
        "make that as large as the calls are, or declare nothing on it"
    )


def _guarded_at(shape_env: Any, symbol: sympy.Symbol) -> str | None:
    """The user's line at which torch came to know that the symbol is a number."""
    for guard in shape_env.guards:
        if isinstance(guard.expr, sympy.Eq) and guard.expr.free_symbols == {symbol}:
            line: str | None = getattr(getattr(guard, "sloc", None), "maybe_user_loc", None)
            return line
    return None


def said(name: str, value: int, static: Mapping[str, str]) -> str:
    """That a size is a constant, and why."""
    text = f"{name} is {value} in this graph"
    return f"{text}: {static[name]}" if name in static else text
