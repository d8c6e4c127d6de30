"""Compiled forward code together with the account of what it saves, as torch keeps, caches and calls it.

In: a forward graph that Inductor is to compile, after its partition was packed.  Out: Inductor's code, with the account
beside it.  A process that finds the code in AOTAutograd's cache never sees a partition: it reads the account from here.

Code that offloads is read before it is used.  A copy to the host runs beside the code that has asked for it; `settle`,
which waits for it, names the source of the copy too, so that Inductor does not use that memory for something else
before.  This holds where the buffer that `settle` is given is the one that `offload` was given.  Inductor may make two
buffers of one tensor (this was seen where operators prescribe strides): then one of them lives on, and the other one is
written over while it is copied.

    buf1 = torch.ops.multigraph.offload.default(buf0)
    buf3 = torch.ops.multigraph.settle.default([buf0], [buf1], [])    right; with [buf2] in its place: `MayOverwrite`

Invariants: calling it is calling Inductor's code, and code that offloads leaves what it offloads alone until the copy
has been waited for.  Buffers are compared by name: another name for the same memory counts as another buffer, for that
is how Inductor writes that memory is used again.
"""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cache.revived import compile_by_inductor, revived
from multigraph_backend.saved_tensors import account, kernels
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.offload.operators import OFFLOAD, SETTLE

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
    with kernels.rows_read_once(gm):
        code = (inner or compile_by_inductor)(gm, example_inputs, **settings)
    if offloads and runs:
        check_offloads(getattr(getattr(code, "inner", code), "source_code", ""))
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
            self.inner = revived(self.inner, constants)
        self.inner.post_compile(example_inputs, constants, graph_kwargs)
        if account.latest() != self.account:
            account.add(self.account)

    def prepare_for_serialization(self) -> None:
        # called on a copy of this object, which is then pickled
        self.inner = copy.copy(self.inner)
        self.inner.prepare_for_serialization()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        self.inner.set_triton_bundle(triton_bundle)


# ---------------------------------------------------------------- what is being copied stays as it is


class MayOverwrite(RuntimeError):
    """Code may write over what it offloads; the text says what it offloads and what it keeps."""


def check_offloads(code: str) -> None:
    """Raises `MayOverwrite` where the forward code `code` may write over what it offloads, or cannot be read."""
    try:
        assigned = list(_assignments(ast.parse(code)))
    except SyntaxError:
        raise MayOverwrite(
            "the compiled code offloads tensors, and is not in Python: what it keeps is not known"
        ) from None
    names = {name: value.id for name, value in assigned if isinstance(value, ast.Name)}
    offloaded = {name: _buffer(call.args[0]) for name, call in _calls(assigned, str(OFFLOAD))}
    if not offloaded:
        raise MayOverwrite("the compiled code is to offload tensors, and no call in it does")
    for _, settle in _calls(assigned, str(SETTLE)):
        sources, copies = (argument.elts if isinstance(argument, ast.List) else None for argument in settle.args[:2])
        if sources is None or copies is None or len(sources) != len(copies):
            raise MayOverwrite(f"what is kept for copies to the host is not understood: {ast.unparse(settle)}")
        for source, made in zip(map(_buffer, sources), map(_buffer, copies), strict=True):
            copied = offloaded.pop(_first_name(made, names), None)
            if copied != source:
                raise MayOverwrite(f"the compiled code offloads {copied or 'what is not known'} and keeps {source}")
    if offloaded:
        raise MayOverwrite(f"the compiled code offloads {', '.join(offloaded.values())} and keeps nothing for it")


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _calls(assigned: list[tuple[str, ast.expr]], operator: str) -> Iterator[tuple[str, ast.Call]]:
    for name, value in assigned:
        if isinstance(value, ast.Call) and ast.unparse(value.func) == f"torch.ops.{operator}":
            yield name, value


def _buffer(expression: ast.expr) -> str:
    """The buffer of a view, or of itself."""
    if isinstance(expression, ast.Call) and expression.args and ast.unparse(expression.func) == "reinterpret_tensor":
        return _buffer(expression.args[0])
    return ast.unparse(expression)


def _first_name(name: str, names: dict[str, str]) -> str:
    """Of what is handed on under other names; a name is given once."""
    while name in names:
        name = names[name]
    return name
