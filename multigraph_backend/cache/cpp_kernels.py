"""The C++ kernels of stored code, loaded as the libraries that they are.

Inductor finds the library of a kernel by the command that would compile it.  For that it looks for a compiler, and in
processes of their own it tries which instructions the processor has.  A process that loads what another has compiled,
for the same instructions (`stored_code.fingerprint`), needs neither: where a kernel was compiled it is taken down which
library it is in.

In:  keys of AOTAutograd's cache, where they were compiled; generated code, where it is loaded.
Out: libraries by kernel; the same code, which loads those that are named, and asks Inductor for all others.

As Inductor does, it takes a library for whole and for the kernel's where it has its name.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from multigraph_backend import _compat
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.process.libraries import for_nobody_else

log = logging.getLogger(__name__)

_COMPILER = "\nasync_compile = AsyncCompile()\n"
_METHOD = "cpp_pybinding"

#: path of a library below Inductor's folder, by the name of a kernel
Libraries = Mapping[str, str]

_known: ContextVar[Libraries | None] = ContextVar("known", default=None)
_loaded: dict[str, None] = {}


def libraries_of(keys: Sequence[str]) -> dict[str, str]:
    """In which library each C++ kernel of these entries is; asked where they were compiled, under the same options."""
    found: dict[str, str] = {}
    for key in keys:
        for entry, *_ in _compat.StoredResults.iterate_over_candidates(True, None, key):
            for part in (getattr(entry, "compiled_fw", None), getattr(entry, "compiled_bw", None)):
                for types, text in kernels_in(_source_of(getattr(part, "result", None))):
                    name = _name(types, text)
                    if name not in found and (path := _library_of(types, text)) is not None:
                        found[name] = path
    return found


@contextmanager
def known(libraries: Libraries) -> Iterator[None]:
    """Within, code that `by_library` has changed loads these."""
    token = _known.set(libraries)
    try:
        yield
    finally:
        _known.reset(token)


def by_library(source: str) -> str:
    """Generated code that loads its C++ kernels from libraries that are `known`."""
    if f".{_METHOD}(" not in source or not _known.get():
        return source
    own = f"\nfrom {__name__} import around as _around\nasync_compile = _around(AsyncCompile())\n"
    return source.replace(_COMPILER, own, 1)


def around(compiler: Any) -> Any:
    """In generated code: `compiler`, but for kernels whose libraries are known."""
    libraries = _known.get()
    return _Kernels(compiler, libraries) if libraries else compiler


def put_under(name: Path, library: Path) -> None:
    """The same file under a further name, whole from the first moment on; a copy where there are no links."""
    name.parent.mkdir(parents=True, exist_ok=True)
    whole = name.with_name(f".{name.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        try:
            os.link(library, whole)
        except OSError:
            shutil.copy2(library, whole)
        whole.replace(name)
    finally:
        whole.unlink(missing_ok=True)


def loaded() -> tuple[str, ...]:
    """The libraries that this process has loaded so."""
    return tuple(_loaded)


class _Kernels:
    def __init__(self, compiler: Any, libraries: Libraries) -> None:
        self._compiler, self._libraries = compiler, libraries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler, name)

    def cpp_pybinding(self, argtypes: Sequence[str], source_code: str) -> Any:
        path = self._libraries.get(_name(argtypes, source_code))
        if path is not None and (library := _load(path)) is not None:
            return library.kernel
        return self._compiler.cpp_pybinding(argtypes, source_code)


def _load(path: str) -> Any:
    try:
        with for_nobody_else():
            library = _compat.CppKernels._load_library(str(_compat.cache_entry("native", path)), _key(path))
    except Exception as error:  # it is gone, or of a machine that has other libraries: Inductor compiles the kernel
        if from_outside(error):
            raise
        log.debug("the library %s of a kernel cannot be loaded: %s", path, error)
        return None
    _loaded[path] = None
    return library


def _key(path: str) -> str:
    return Path(path).name.partition(".")[0]


def _name(types: Sequence[str], source: str) -> str:
    return hashlib.sha256(repr((list(types), source)).encode()).hexdigest()


def _source_of(code: Any) -> str:
    """The text of Inductor's code, of which others of ours may be around."""
    while (inner := getattr(code, "inner", None)) is not None:
        code = inner
    return getattr(code, "source_code", None) or ""


def kernels_in(source: str) -> list[tuple[list[str], str]]:
    """Types of arguments and text of each C++ kernel in generated code."""
    if f".{_METHOD}(" not in source:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == _METHOD:
            types, text = (ast.literal_eval(argument) for argument in node.args)
            found.append((types, text))
    return found


def _library_of(types: Sequence[str], text: str) -> str | None:
    """The library that Inductor finds for a kernel: it has compiled it already."""
    function = _compat.CppKernels.load_pybinding(types, text)
    key = getattr(getattr(function, "__self__", None), "key", None)
    path = f"{key[1:3]}/{key}.main.so" if isinstance(key, str) else ""
    return path if path in _compat.kernel_libraries() else None
