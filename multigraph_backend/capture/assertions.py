"""Assertions that Dynamo's trace has made about its sizes and that its graph has lost, put back into the graph.

    n = mask.sum().item()                             item = sum_1.item()
    torch._check(n == x.shape[0] + y.shape[0])        eq = item == item

From the assertion on Dynamo knows that both sides are one number, and writes one node for both; what is left of the
assertion compares that number with itself.  Stock's Inductor reads assertions from Dynamo's ShapeEnv, which a late
compile does not have, and a graph that is run as it is has nothing else.  So the captured graph says it in full:

    item = sum_1.item();  add = s0 + s1;  eq_1 = item == add;  _assert_scalar(eq_1, "Eq(u0, s0 + s1)")

In:  the copy of a graph of a trace in progress, with its meta; Dynamo's ShapeEnv; the symbols that inputs carry.
Out: the same copy, with each assertion that was lost (whose symbols Dynamo has replaced by what they are equal to) as
nodes behind those that it compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.capture.graph import SymbolInfo


class CannotAssert(Exception):
    """An assertion that the graph has lost cannot be put back; the message says which."""


def put_back(module: torch.fx.GraphModule, shape_env: Any, symbols: Mapping[sympy.Symbol, SymbolInfo]) -> list[str]:
    """Add to `module` what of the trace's assertions it has lost; notes of those over sizes that no input has.

    Raises `CannotAssert`.
    """
    every = [entry.expr for entries in shape_env.deferred_runtime_asserts.values() for entry in entries]
    lost = [_over_known(expr, shape_env) for expr in every if shape_env.replace(expr) != expr]
    notes: list[str] = []
    if not lost:
        return notes
    if lacking := _compat.missing("size assertions"):
        raise CannotAssert(f"{lost[0]}: {lacking[0]}")
    graph = module.graph
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    made = _made_inside(module)
    placeholders = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for expr in lost:
        wanted = sorted(expr.free_symbols, key=str)
        unknown = [symbol for symbol in wanted if symbol not in made and not _carried(symbols, symbol)]
        if any(map(_unbacked, unknown)):
            raise CannotAssert(f"{expr}: nothing at the top of the graph is {' or '.join(map(str, unknown))}")
        if unknown:  # stock's Inductor generates code that does not run
            notes.append(
                f"the assertion {expr} is not checked: no input of the graph has {' or '.join(map(str, unknown))}"
            )
            continue
        behind = [made[symbol][0] for symbol in wanted if symbol in made]
        place = max(behind, key=list(graph.nodes).index).next if behind else first
        with graph.inserting_before(place):
            nodes = {
                symbol: _number(graph, *made[symbol]) if symbol in made else _read(graph, placeholders, symbols[symbol])
                for symbol in wanted
            }
            numbers = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in nodes.items()}
            try:
                holds = _compat.sympy_interp(_compat.ReferenceAnalysis, numbers, expr)
            except Exception as error:
                raise CannotAssert(f"{expr}: {error}") from error
            said = f"Runtime assertion failed for expression {expr}"
            graph.call_function(torch.ops.aten._assert_scalar.default, (holds.node, said))
    graph.lint()
    module.recompile()
    return notes


def _over_known(expr: Any, shape_env: Any) -> Any:
    """The same over sizes that Dynamo has not replaced: of those that it has, its guards check that they are equal."""
    return expr.xreplace({symbol: shape_env.replace(symbol) for symbol in expr.free_symbols if not _unbacked(symbol)})


def _unbacked(symbol: sympy.Symbol) -> bool:
    types = _compat.SymT
    return bool(_compat.symbol_is_type(symbol, (types.UNBACKED_INT, types.UNBACKED_FLOAT)))


def _made_inside(module: torch.fx.GraphModule) -> dict[sympy.Symbol, tuple[torch.fx.Node, Sequence[Any]]]:
    """Symbols of numbers that the graph computes from data: the node, and where in its value the number is."""
    made: dict[sympy.Symbol, tuple[torch.fx.Node, Sequence[Any]]] = {}
    for node in module.graph.nodes:
        for symbol, path in (node.meta.get("unbacked_bindings") or {}).items():
            if not path or _is_size(path):
                made.setdefault(symbol, (node, path))
    return made


def _is_size(path: Sequence[Any]) -> bool:
    return len(path) == 2 and isinstance(path[0], _compat.CallMethodKey) and path[0].name == "size"


def _carried(symbols: Mapping[sympy.Symbol, SymbolInfo], symbol: sympy.Symbol) -> bool:
    info = symbols.get(symbol)
    return info is not None and info.location is not None and info.location.kind in ("arg", "size")


def _number(graph: torch.fx.Graph, node: torch.fx.Node, path: Sequence[Any]) -> torch.fx.Node:
    return graph.call_method("size", (node, path[1].idx)) if path else node


def _read(graph: torch.fx.Graph, placeholders: Sequence[torch.fx.Node], info: SymbolInfo) -> torch.fx.Node:
    assert info.location is not None
    node = placeholders[info.location.index]
    return node if info.location.kind == "arg" else graph.call_method("size", (node, info.location.dim))
