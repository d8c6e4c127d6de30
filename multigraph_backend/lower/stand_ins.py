"""Arguments that no call has had yet, for compiling a variant before its first call.

In: a captured graph, the arguments of a call, and the values that its symbols shall have.  Out: arguments like those,
with other sizes and without memory.  A `Likeness` is what remains of a call's arguments for that when it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from multigraph_backend.capture.aliasing import sharing
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.lower import fresh_inputs
from multigraph_backend.lower.fresh_inputs import CannotLower


def stand_ins(graph: CapturedGraph, args: Sequence[Any], values: Mapping[sympy.Symbol, int]) -> list[Any]:
    """Arguments like `args` with other sizes, without memory: fake tensors for all that depends on `values`.

    For compiling before any call has such sizes.  Raises `CannotLower` for inputs that cannot be made up (views).
    """
    made: list[Any] = []

    def number(expr: Any) -> int:
        return int(expr.xreplace(values)) if isinstance(expr, sympy.Basic) else int(expr)

    for entry, arg in zip(graph.inputs, args, strict=True):
        if entry.expr is not None:
            free = entry.expr.free_symbols
            made.append(number(entry.expr) if free <= set(values) else arg)
        elif entry.layout is not None and _depends(entry.layout.size, entry.layout.stride, entry.layout.offset):
            if arg._is_view() or type(arg) not in (torch.Tensor, torch.nn.Parameter):
                raise CannotLower(f"input {entry.name} cannot be made up for other sizes (a view, or a subclass)")
            size, stride = [number(expr) for expr in entry.layout.size], [number(expr) for expr in entry.layout.stride]
            made.append(fresh_inputs.twin(arg, size, stride, number(entry.layout.offset)))
        else:
            made.append(arg)
    return made


def _depends(size: Sequence[Any], stride: Sequence[Any], offset: Any) -> bool:
    return any(isinstance(expr, sympy.Basic) and expr.free_symbols for expr in (*size, *stride, offset))


@dataclass(frozen=True)
class Likeness:
    """What the arguments of a call were like: it keeps none of their memory alive, and no parameter.

    `kept`: for an input or a parameter its stand-in, for buffers, and for parameters where the graph changes
    something, a weak reference, for anything else the value itself.  Who refers to a parameter weakly keeps torch from
    exchanging it (`torch.utils.swap_tensors`, and with it `Module.to` and `load_state_dict` where that is asked for).
    """

    kept: tuple[Any, ...]

    @classmethod
    def of(cls, graph: CapturedGraph, args: Sequence[Any]) -> Likeness | None:
        """None where a stand-in would not be compiled as the arguments were: subclasses, conjugates, and views where
        the graph changes its inputs; and for parameters that are subclasses made of tensors."""
        if graph.mutates_inputs and (sharing(graph, args) or any(args[at]._is_view() for at in graph.user_inputs)):
            return None
        kept: list[Any] = []
        for entry, arg in zip(graph.inputs, args, strict=True):
            if not isinstance(arg, torch.Tensor):
                if not isinstance(arg, int | float | str | None):
                    return None
                kept.append(arg)
            elif entry.number:
                kept.append(arg)  # made for the call, of one element
            elif entry.wrapper is not None:  # `Module.to` exchanges it, and cannot while somebody refers to it weakly
                return None
            elif entry.static and (graph.mutates_inputs or type(arg) is not torch.nn.Parameter or _is_odd(arg)):
                kept.append(weakref.ref(arg))  # what it shares memory with tells, or it is no ordinary parameter
            elif type(arg) not in (torch.Tensor, torch.nn.Parameter) or _is_odd(arg):
                return None
            else:
                kept.append(_twin_of(arg, tuple(arg.size()), tuple(arg.stride()), int(arg.storage_offset())))
        return cls(tuple(kept))

    def with_values(self, graph: CapturedGraph, values: Mapping[str, int]) -> list[Any] | None:
        """Arguments for which the symbols of these names have these values; None where there can be none any more."""
        known = {symbol: values[str(symbol)] for symbol in graph.symbols if str(symbol) in values}
        made: list[Any] = []

        def number(expr: Any) -> int:
            return int(expr.xreplace(known)) if isinstance(expr, sympy.Basic) else int(expr)

        for entry, kept in zip(graph.inputs, self.kept, strict=True):
            layout = entry.layout
            expressions = () if layout is None else (*layout.size, *layout.stride, layout.offset)
            if entry.expr is not None:
                expressions = (entry.expr,)
            depends = _depends(expressions, (), 0)
            if depends and not _free(expressions) <= set(known):
                if entry.expr is not None and not isinstance(kept, int):  # a float: as the call had it
                    made.append(kept)
                    continue
                return None
            if isinstance(kept, weakref.ref):
                made.append(kept())
                if made[-1] is None:
                    return None
            elif entry.expr is not None:
                made.append(number(entry.expr) if depends else kept)
            elif layout is not None and depends and not entry.number:
                size, stride = [number(expr) for expr in layout.size], [number(expr) for expr in layout.stride]
                made.append(_twin_of(kept, size, stride, number(layout.offset)))
            else:
                made.append(kept)
        return made


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether its elements do not lie in memory as they are."""
    return tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()


def _free(expressions: Sequence[Any]) -> set[Any]:
    return {symbol for expr in expressions if isinstance(expr, sympy.Basic) for symbol in expr.free_symbols}


def _twin_of(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return fresh_inputs.twin(tensor, size, stride, offset)
