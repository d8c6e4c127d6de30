"""Compiled forward code together with the account of what it saves, as torch keeps, caches and calls it.

In: a forward graph that Inductor is to compile, after its partition was packed.  Out: Inductor's code, with the account
beside it.  A process that finds the code in AOTAutograd's cache never sees a partition: it reads the account from here.

Invariant: calling it is calling Inductor's code, and code that offloads keeps what it offloads until it is settled.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.saved_tensors import account, kept
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.offload.operators import OFFLOAD

InnerCompile = Callable[..., Any]

_OutputCode: Any = object if _compat.missing("cudagraphs") else _compat.OutputCode


def inner_compile(inner: InnerCompile | None, runs: bool = True) -> InnerCompile:
    """`inner`, or Inductor's own compile of one graph; forward code gets the account of the last partition.

    `runs`: what it gives is code that will run, and not the trace of a graph alone.
    """
    return functools.partial(_compile, inner, runs)


def _compile(
    inner: InnerCompile | None, runs: bool, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Any:
    offloads = bool(gm.graph.find_nodes(op="call_function", target=OFFLOAD))  # Inductor changes the graph
    code = (inner or _compat.compile_fx_inner)(gm, example_inputs, **settings)
    if offloads and runs:
        kept.check(getattr(getattr(code, "inner", code), "source_code", ""))
    found = account.latest()
    if found is None or settings.get("is_backward") or settings.get("is_inference"):
        return code
    return PackingCode(code, found)


class PackingCode(_OutputCode):  # type: ignore[misc]
    """Forward code `inner`, and what became of the tensors that it saves."""

    def __init__(self, inner: Any, found: SavedTensors) -> None:
        self.inner, self.account = inner, found
        self._boxed_call = True
        self._fx_graph_cache_key = getattr(inner, "_fx_graph_cache_key", None)

    def __call__(self, args: list[Any]) -> Any:
        return self.inner(args)

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        plain = isinstance(self.inner, _compat.CompiledFxGraph)
        if plain and self.inner.current_callable is None:  # from a cache
            inner, _ = _compat.FxGraphCache.cache_hit_post_compile(self.inner, {}, constants)
            if inner is None:
                raise RuntimeError("compiled code could not be loaded from the cache")
            self.inner = inner
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        if account.latest() != self.account:
            account.add(self.account)

    def prepare_for_serialization(self) -> None:
        # called on a copy of this object, which is then pickled
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        self.inner.set_triton_bundle(triton_bundle)
