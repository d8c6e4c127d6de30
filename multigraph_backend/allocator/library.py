"""The extension's shared library: where it lies, whether it can be used, and its functions with their types.

In: the package `multigraph_allocator`, or the file that MULTIGRAPH_ALLOCATOR_LIBRARY names.  Out: a `Library`, or one
line that says why there is none.  No CUDA is touched.  It is loaded once; what was found is what the process keeps.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABI_VERSION = 1
PATH_VARIABLE = "MULTIGRAPH_ALLOCATOR_LIBRARY"
PACKAGE = "multigraph_allocator"
INSTALL = "pip install multigraph-allocator (in a checkout: pip install ./allocator_ext)"

OUT_OF_MEMORY = 1

_OUT_SIZE = ctypes.POINTER(ctypes.c_size_t)
_POOL = (ctypes.c_uint64, ctypes.c_uint64)

# name -> what it returns, then what it takes; as allocator_ext/multigraph_allocator.h declares it
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mg_message": (ctypes.c_char_p,),
    "mg_torch_ready": (ctypes.c_int,),
    "mg_torch_errors": (ctypes.c_int,),
    "mg_torch_snapshot_at_oom": (ctypes.c_int, ctypes.c_char_p),
    "mg_set_options": (ctypes.c_int, ctypes.c_void_p),
    "mg_torch_device": (ctypes.c_void_p, ctypes.c_int),
    "mg_torch_make_device": (ctypes.c_void_p, ctypes.c_int),
    "mg_torch_begin_pool_on_thread": (ctypes.c_int, ctypes.c_int, *_POOL),
    "mg_end_pool": (ctypes.c_int, ctypes.c_void_p, *_POOL),
    "mg_release_pool": (ctypes.c_int, ctypes.c_void_p, *_POOL),
    "mg_use_on_oom": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.c_int),
    "mg_pool_lent": (ctypes.c_int, ctypes.c_void_p, *_POOL, _OUT_SIZE),
    "mg_pool_limit": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.c_size_t),
    "mg_torch_pool_save": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.POINTER(ctypes.c_uint64)),
    "mg_torch_pool_restore": (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64),
    "mg_torch_pool_forget": (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64),
    "mg_torch_adopt": (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64),
    "mg_torch_drop": (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64),
    "mg_pool_blocks": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.c_void_p, ctypes.c_size_t, _OUT_SIZE),
    "mg_pool_segments": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.c_void_p, ctypes.c_size_t, _OUT_SIZE),
    "mg_pool_users": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.POINTER(ctypes.c_int)),
    "mg_torch_release_pool": (None, ctypes.c_int, *_POOL),
    "mg_torch_claim": (ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t),
    "mg_record_history": (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    "mg_torch_record_stacks": (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t),
    "mg_torch_stacks_live": (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, _OUT_SIZE),
    "mg_torch_stacks_log": (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, _OUT_SIZE),
    "mg_empty_cache": (ctypes.c_int, ctypes.c_void_p, _OUT_SIZE),
    "mg_empty_pool": (ctypes.c_int, ctypes.c_void_p, *_POOL, _OUT_SIZE),
    "mg_pool_sleep": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.c_int, _OUT_SIZE),
    "mg_pool_wake": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.c_int, _OUT_SIZE),
    "mg_pool_asleep": (ctypes.c_int, ctypes.c_void_p, *_POOL, ctypes.POINTER(ctypes.c_int), _OUT_SIZE),
    "mg_sleep": (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, _OUT_SIZE),
    "mg_wake": (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, _OUT_SIZE),
    "mg_empty_host": (ctypes.c_int, ctypes.c_void_p, _OUT_SIZE),
    "mg_torch_relief": (ctypes.c_int, ctypes.c_double),
    "mg_torch_relief_wait": (ctypes.c_int, ctypes.POINTER(ctypes.c_int), _OUT_SIZE),
    "mg_torch_relief_done": (ctypes.c_int, ctypes.c_int),
    "mg_segments_map": (ctypes.c_int, ctypes.c_int, ctypes.c_int),
    "mg_segments_sleep": (ctypes.c_int, ctypes.c_int, ctypes.c_int, _OUT_SIZE),
    "mg_segments_wake": (ctypes.c_int, ctypes.c_int, ctypes.c_int, _OUT_SIZE),
    "mg_segments_asleep": (ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int), _OUT_SIZE),
    "mg_segments_list": (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, _OUT_SIZE),
    "mg_segments_empty_host": (ctypes.c_int, _OUT_SIZE),
    "mg_read_stats": (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    "mg_verify": (ctypes.c_int, ctypes.c_void_p),
    "mg_reset_peaks": (ctypes.c_int, ctypes.c_void_p),
    "mg_snapshot": (ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, _OUT_SIZE),
    "mg_segments_open": (
        ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p),
    ),
    "mg_segments_close": (None, ctypes.c_int),
    "mg_segments_read": (ctypes.c_int, ctypes.c_int, _OUT_SIZE, _OUT_SIZE, _OUT_SIZE, ctypes.POINTER(ctypes.c_uint64)),
}  # fmt: skip


class Options(ctypes.Structure):
    """mg_options."""

    _fields_ = (
        ("reuse", ctypes.c_int),
        ("empty_nodes", ctypes.c_int),
        ("verify", ctypes.c_int),
        ("expandable", ctypes.c_int),
        ("garbage_threshold", ctypes.c_double),
        ("history", ctypes.c_size_t),
    )


class Block(ctypes.Structure):
    """mg_block."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("requested", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    )


class Refused(RuntimeError):
    """The library did not do what it was asked to; the message is its own."""


class Library:
    """The loaded library.  Its functions are called by name; one that gives a status raises `Refused` for any but 0."""

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.path = path
        self._functions = functions
        for name, (result, *parameters) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, parameters

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns.  Raises `Refused`."""
        returned = getattr(self._functions, name)(*arguments)
        if _FUNCTIONS[name][0] is ctypes.c_int and name != "mg_segments_open" and returned != 0:
            raise Refused(self.message() or f"{name} failed with status {returned}")
        return returned

    def address(self, name: str) -> int:
        """The address of a function, for torch."""
        address = ctypes.cast(getattr(self._functions, name), ctypes.c_void_p).value
        assert address is not None
        return address

    def message(self) -> str:
        """Why the last call of this thread failed."""
        said: bytes = self._functions.mg_message()
        return said.decode(errors="replace")


@dataclass(frozen=True)
class Found:
    """The library, or why it cannot be used; `path` and `abi` where that much was found out."""

    library: Library | None = None
    reason: str | None = None
    path: Path | None = None
    abi: int | None = None


_lock = threading.Lock()
_found: Found | None = None


def load(environ: Mapping[str, str] | None = None) -> Found:
    """The extension's library, looked for at the first call.  Raises nothing."""
    global _found
    with _lock:
        if _found is None:
            _found = look(os.environ if environ is None else environ)
        return _found


def look(environ: Mapping[str, str]) -> Found:
    """Find and load the library, whatever was found before."""
    try:
        path = _path(environ)
    except Exception as error:  # whatever a package of that name does when it is imported
        return Found(reason=f"the package {PACKAGE} cannot be imported: {type(error).__name__}: {_first_line(error)}")
    if path is None:
        return Found(reason=f"the extension is not installed: {INSTALL}")
    if not path.is_file():
        return Found(reason=f"the extension is not built: there is no {path}", path=path)
    try:
        functions = ctypes.CDLL(str(path))
        abi = int(functions.mg_abi_version())
    except (OSError, AttributeError) as error:
        return Found(reason=f"{path.name} cannot be loaded: {_first_line(error)}", path=path)
    if abi != ABI_VERSION:
        said = f"{path.name} has ABI version {abi}, and this multigraph knows {ABI_VERSION}: install both alike"
        return Found(reason=said, path=path, abi=abi)
    try:
        return Found(Library(path, functions), path=path, abi=abi)
    except AttributeError as error:
        return Found(reason=f"{path.name} lacks a function: {_first_line(error)}", path=path, abi=abi)


def _path(environ: Mapping[str, str]) -> Path | None:
    named = environ.get(PATH_VARIABLE, "").strip()
    if named:
        return Path(named)
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name == PACKAGE:
            return None
        raise
    return Path(package.library())


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
