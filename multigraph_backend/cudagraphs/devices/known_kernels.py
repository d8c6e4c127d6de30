"""Kernels of our own that an earlier process has compiled, found again without Triton's hash.

Triton finds a compiled kernel by a hash over all of its own files, its compiler's library among them, which each
process reads for that.  Which Triton it is, `torch_files` tells from what an installer wrote down; so a note beside
torch's caches says where Triton's cache has the kernel.

In:  Triton's compile of one kernel.  Out: the same kernel; where there is no note, or it is not to be trusted, or what
it names is gone, Triton compiles, and a note is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import triton

from multigraph_backend import _compat
from multigraph_backend.cache import torch_files, trusted

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16
_FOLDER = "multigraph-kernels"


class KnownKernel(triton.JITFunction):  # type: ignore[misc]
    """A kernel that is compiled by way of `found_or_compiled`."""

    _compile: Callable[..., Any]

    @property
    def compile(self) -> Callable[..., Any]:
        return self._found_or_compiled

    @compile.setter
    def compile(self, function: Callable[..., Any]) -> None:
        self._compile = function

    def _found_or_compiled(self, source: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        return found_or_compiled(self._compile, source, target, options, **others)


def known(kernel: Any) -> Any:
    """`kernel`, as `triton.jit` made it, as one that is found again; what is interpreted stays as it is."""
    if type(kernel) is triton.JITFunction:
        kernel.__class__ = KnownKernel
    return kernel


def found_or_compiled(
    compile_kernel: Callable[..., Any], source: Any, target: Any, options: Mapping[str, Any] | None, **others: Any
) -> Any:
    note = _note(source, target, options)
    if note is not None and (found := _found(note, source)) is not None:
        return found
    made = compile_kernel(source, target=target, options=options, **others)
    if note is not None:
        _write(note, made)
    return made


def _note(source: Any, target: Any, options: Mapping[str, Any] | None) -> Path | None:
    """The note on such a compile; None where nothing says which Triton this is."""
    try:
        if not (files := torch_files.identity()):
            return None
        asked = sorted((name, value) for name, value in os.environ.items() if _decides(name))
        said = [files, source.hash(), str(target), sorted(map(repr, (options or {}).items())), asked]
        return Path(_compat.cache_dir()) / _FOLDER / f"{hashlib.sha256(repr(said).encode()).hexdigest()}.json"
    except Exception:  # another Triton
        log.debug("no note on a kernel", exc_info=True)
        return None


def _decides(variable: str) -> bool:
    """Whether an environment variable may change what is compiled, or where it is kept."""
    return variable.startswith(("TRITON", "LLVM", "MLIR", "USE_", "DISABLE_", "ENABLE_", "NVPTX", "PTXAS"))


def _found(note: Path, source: Any) -> Any:
    try:
        said = json.loads(trusted.read(note, _MOST_BYTES))
        return triton.compiler.CompiledKernel(source, said["files"], said["hash"])
    except FileNotFoundError:
        return None
    except Exception:
        log.debug("%s says nothing of use", note, exc_info=True)
        return None


def _write(note: Path, made: Any) -> None:
    try:
        trusted.own_folder(note.parent)
        said = {"files": {name: str(path) for name, path in made.metadata_group.items()}, "hash": made.hash}
        trusted.write(note, json.dumps(said).encode(), durable=False)
    except Exception:
        log.debug("%s is not written", note, exc_info=True)
