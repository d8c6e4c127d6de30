"""Inductor's code as it comes out of a cache, made callable again.

torch's own way there loads Inductor's lowerings, for a hook of its tests, and so does the text of generated code, whose
imports are the same whether they are used or not.  Where code is loaded past Inductor (`past_inductor`), neither is.

In:  code that Inductor has made, and later what a cache has unpickled.  Out: the same code, which can be called.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from multigraph_backend import _compat
from multigraph_backend.cache import cpp_kernels

_lacks = bool(_compat.missing("stored code"))
_OutputCode: Any = object if _lacks else _compat.OutputCode
_StoredGraph: Any = object if _lacks else _compat.StoredGraph
_OF_COMPILES = "get_decomp_fn"
_INSTRUMENTS = "torch._inductor.debug"
_past_inductor: ContextVar[bool] = ContextVar("past_inductor", default=False)


def compile_by_inductor(gm: Any, example_inputs: Sequence[Any], **settings: Any) -> Any:
    """Inductor's compile of one graph.  What loads its decompositions is not kept with the code, which has no use for
    it any more: a cache would pickle it by its name, and import that in each process that loads the code."""
    code = _compat.compile_fx_inner(gm, example_inputs, **settings)
    given = getattr(code, "fx_kwargs", None)
    if isinstance(given, dict) and _OF_COMPILES in given:
        code.fx_kwargs = {name: value for name, value in given.items() if name != _OF_COMPILES}
    return code


@contextmanager
def past_inductor() -> Iterator[None]:
    """Within, `revived` loads nothing that generates code."""
    token = _past_inductor.set(True)
    try:
        yield
    finally:
        _past_inductor.reset(token)


def revived(code: Any, constants: Any) -> Any:
    """Inductor's `code` as it can be called, out of a cache; raises RuntimeError where a file of it is gone."""
    if _past_inductor.get():
        return _past_lowerings(code, constants)
    made, _ = _compat.FxGraphCache.cache_hit_post_compile(code, {}, constants)
    if made is None:
        raise RuntimeError("compiled code could not be loaded from the cache")
    return made


def _past_lowerings(code: Any, constants: Any) -> Any:
    if code._triton_bundle:
        _compat.StoredKernels.read_and_emit(code._triton_bundle)
    source = cpp_kernels.by_library(without_inductor(code.source_code))
    if source != code.source_code:
        code.source_code, code.cache_key = source, f"c{hashlib.sha256(source.encode()).hexdigest()[:50]}"
    code.after_deserialization(constants)
    code.__class__ = _WithoutInstruments
    return code


class _WithoutInstruments(_StoredGraph):  # type: ignore[misc]
    """Code that looks for Inductor's instruments in each call: they are in a module that others have to load."""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        if _INSTRUMENTS in sys.modules:
            return super().__call__(inputs)
        return self.current_callable(inputs)


class Alone(_OutputCode):  # type: ignore[misc]
    """Inductor's code that nothing of ours is around: torch's cache would load the lowerings to revive it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        return self.inner(inputs)

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        self.inner = revived(self.inner, constants)
        self.inner.post_compile(example_inputs, constants, graph_kwargs)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        self.inner.set_triton_bundle(triton_bundle)


# ---------------------------------------------------------------- its text


#: of Inductor's namespace of kernels of others: what is a function of torch's by the same name
OF_TORCH = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
_IMPORT = re.compile(r"^from torch\._inductor[\w.]* import (\w+)(?: as (\w+))?$", re.MULTILINE)
_KERNELS = "from torch._inductor.select_algorithm import extern_kernels"


def without_inductor(source: str) -> str:
    """Generated code without imports that it has no use for, and that load Inductor's lowerings."""

    def shorter(line: re.Match[str]) -> str:
        name = line[2] or line[1]
        if line[0] == _KERNELS:
            used = [part.split("(", 1)[0] for part in source.split("extern_kernels.")[1:]]
            plain = source.count("extern_kernels") == 1 + len(used)
            return "import torch as extern_kernels" if plain and OF_TORCH.issuperset(used) else line[0]
        used_once = source.count(name) == line[0].count(name) or len(re.findall(rf"\b{name}\b", source)) == 1
        return f"# not used: {line[0]}" if used_once else line[0]

    head, mark, rest = source.partition(_AFTER_IMPORTS)  # large, and without imports of this kind
    return _IMPORT.sub(shorter, head) + mark + rest


_AFTER_IMPORTS = "\nasync_compile = AsyncCompile()\n"
