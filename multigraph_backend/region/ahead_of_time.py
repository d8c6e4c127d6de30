"""A region that torch can save and load: what `aot_compile` and vLLM's mode 2 ask of a backend.

    compiled = torch.compile(f, fullgraph=True, backend="multigraph").aot_compile(((x,), {}))
    compiled.save_compiled_function("f.bin")
    torch.compiler.load_compiled_function(open("f.bin", "rb"))(x)        # in another process

torch keeps the bytecode and the guards of its trace, and asks the callable that the backend returned for the rest as
bytes (`saved_region`).

In: a region, in `aot_compile`.  Out: a callable over the graph's arguments, of the class that torch saves
(`serializable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from multigraph_backend.region.region import Region
from multigraph_backend.region.serializable import SerializableRegion


def of_region(region: Region, example_inputs: Sequence[Any]) -> SerializableRegion:
    """What the backend returns to `aot_compile`; what a call with the inputs of the trace needs is compiled now."""
    region.may_be_saved()
    _prepare(region, example_inputs)
    return SerializableRegion(region, region.dispatcher())


def _prepare(region: Region, example_inputs: Sequence[Any]) -> None:
    """Compile what a call with the inputs of the trace needs.

    Sizes that are symbols in the trace are read off the tensors.  Where one cannot be, the first call compiles.
    """
    graph = region.captured
    assert graph is not None
    values: dict[Any, Any] = {}
    for entry, example in zip(graph.inputs, example_inputs, strict=True):
        if entry.layout is not None:
            actual = (*example.size(), *example.stride())
            for expr, value in zip((*entry.layout.size, *entry.layout.stride), actual, strict=True):
                if isinstance(expr, sympy.Symbol):
                    values.setdefault(expr, sympy.Integer(value))
    args = list(example_inputs)
    for index, entry in enumerate(graph.inputs):
        if entry.expr is not None:
            number = entry.expr.xreplace(values)
            node = getattr(example_inputs[index], "node", None)
            if number.is_number:
                args[index] = int(number) if number.is_Integer else float(number)
            elif node is not None and node.has_hint():
                args[index] = node.hint
            else:
                return
    region.prepare(args)
