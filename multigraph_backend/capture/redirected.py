"""What a program asked for whose graphs torch hands to multigraph in place of the backend that the program names.

A library with `torch.compile(model, backend="inductor", mode="reduce-overhead")` in its code is not rewritten: with
`TORCH_COMPILE_OVERRIDE_BACKENDS=">=0:multigraph"`, which `python -m multigraph_backend run` sets, torch calls
multigraph with its graphs, and with nothing else.  What the program asked for is to be had from the trace in progress.

In:  a trace in progress.  Out: `Asked`, or None where torch has overridden nothing.

Invariant: only what asks for Inductor, or for multigraph, is multigraph's.  torch overrides also what `torch.export`,
attention that runs eagerly and a debugger hand to it, which name a function or a backend of their own: they get that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multigraph_backend import _compat


@dataclass(frozen=True)
class Asked:
    """`knobs`: of Inductor, where the program asked for it, those of its mode among them; `arguments`: for multigraph,
    where it asked for that; `other`: what compiles the graph, where it asked for neither."""

    knobs: Mapping[str, object] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    other: Callable[..., Any] | None = None


def asked(backend: object) -> Asked | None:
    """What the program asked for whose trace is in progress, where torch calls `backend` in its place."""
    if _compat.missing("redirect") or _compat.without("InstructionTranslator", "CompileContext"):
        return None
    if _compat.overridden() is not backend or (given := _compat.asked_backend()) is None:
        return None
    wanted = _compat.innermost_backend(given)
    # under DistributedDataParallel: what parts graphs at its buckets, around the backend
    wanted = _compat.innermost_backend(getattr(getattr(wanted, "__self__", None), "backend_compile_fn", wanted))
    if type(wanted) is _compat.InductorWrapper:
        return Asked(knobs=dict(wanted.config))
    if isinstance(wanted, _compat.BackendWrapper):
        arguments, wanted = dict(wanted.kwargs), wanted.compiler_fn
        if wanted is backend:
            return Asked(arguments=arguments)
    if wanted is backend or wanted is _compat.lookup_compiler("inductor"):
        return Asked()
    return Asked(other=given)
