"""Arguments that no call has had yet, for compiling a variant before its first call.

In: a captured graph, the arguments of a call, and the values that its symbols shall have.  Out: arguments like those,
with other sizes and without memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

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
