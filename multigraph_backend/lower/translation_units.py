"""The C++ kernels of a graph, compiled together: at most as many translation units as there are threads that compile.

Inductor compiles each kernel by itself, and most of such a compile is the same for all: the compiler starts, reads its
headers, compiles Python's way into the kernel, and links.  Here the kernels of a graph are put into one file,
each in a namespace of its own, which is compiled by the command that Inductor has for each of them.

    kernel a  ->  c7…a.main.cpp  ->  c7…a.main.so           c7…a.main.cpp  \
                                                                             one unit  ->  c7…a.main.so = c9…b.main.so
    kernel b  ->  c9…b.main.cpp  ->  c9…b.main.so           c9…b.main.cpp  /

In:  a compile by Inductor (`kernels_together`), whose generated code has been written and not been loaded yet.
Out: the libraries that Inductor is about to ask its compiler for, under the names that it looks for.

Guarantees: a library is put under a name only when it is whole, and hands out the kernel of that name or none: Python
tells it which one is asked for.  A kernel's text is as it was, and its flags are.  What cannot be put together, or is
not compiled, is left to Inductor, which then does as ever; after `TRIES` failures nothing is tried any more.

How Inductor is heard: a pass over its graph, the way that it offers for such, runs where torch's own debugging handler
is in place, and puts one around it that is told the path of the generated code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from multigraph_backend import _compat, events
from multigraph_backend.cache.cpp_kernels import kernels_in, put_under
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.options import disabled_pieces
from multigraph_backend.process import libraries
from multigraph_backend.process.interruptions import from_outside

log = logging.getLogger(__name__)

SECONDS = 600.0  # that another process is waited for, which compiles the same: as long as torch waits
TRIES = 2  # failures, until nothing is put together any more
SHORTEST = 1 << 14  # characters of a unit, of which there are more only for a further thread: some four small kernels
LARGEST = 1 << 18  # characters of a unit, for compilers take more than twice as long for twice as much
_IDENTITY = "multigraph: kernels of a graph compiled together"
_ENTRY = "kernel"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"].+[>"])[ \t]*$', re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)(?:[ \t]+(\w+))?", re.MULTILINE)
_BRANCHES = {"if": 1, "ifdef": 1, "ifndef": 1, "endif": -1, "elif": 0, "else": 0}
_PLAIN = frozenset({"include", "pragma", "define", *_BRANCHES})

#: kernels that a unit has at least, else Inductor compiles it; None: all of them
_least: ContextVar[int | None] = ContextVar("multigraph_kernels_together", default=None)
_failures: list[str] = []


@contextlib.contextmanager
def kernels_together() -> Iterator[None]:
    """Kernels of graphs that Inductor compiles inside are put together, unless the environment says otherwise; the pass
    of `knob` has to be among its settings.  Where libraries are loaded for everybody, one alone is a unit, too: those
    that Inductor makes have one name inside, and the first that is there takes the place of others."""
    wanted = disabled_pieces(os.environ).isdisjoint({"kernels_together", "all"})
    token = _least.set((1 if libraries.for_everybody() else 2) if wanted else None)
    try:
        yield
    finally:
        _least.reset(token)


def knob(chosen: Iterable[str]) -> dict[str, object]:
    """The setting of Inductor's that this needs; none where somebody else has `chosen` that setting, where Inductor's
    wrappers are in C++, and where this torch differs."""
    name = "post_grad_custom_post_pass"
    config = _compat.inductor_config
    if _compat.missing("kernels together") or {name, "cpp_wrapper"} & set(chosen):
        return {}
    if getattr(config, name) or config.cpp_wrapper or config.is_fbcode() or os.name == "nt":
        return {}
    return {name: _listening()}


@functools.cache
def _listening() -> Any:
    class Listening(_compat.CustomGraphPass):  # type: ignore[misc]  # private to torch, so of no type
        """Changes nothing of the graph."""

        def __call__(self, graph: Any) -> None:
            around = _compat.debug_handler.debug
            if _least.get() is not None and not isinstance(around, _Handler):
                # set by the call; never entered, for torch's own, when it is left, puts back what was before both
                _compat.debug_handler.set_debug_handler(_Handler(around))

        def uuid(self) -> object:
            return _IDENTITY

    return Listening()


class _Handler:
    """torch's handler for debugging, but for what it is told of generated code."""

    def __init__(self, around: Any) -> None:
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._around, name)

    def output_code(self, path: str) -> None:
        """Generated code is at `path`, and nothing has been loaded of it."""
        if (theirs := getattr(self._around, "output_code", None)) is not None:
            theirs(path)
        if (least := _least.get()) is None or len(_failures) >= TRIES:
            return
        try:
            compile_kernels(Path(path).read_text(), least)
        except Exception as error:
            if from_outside(error):
                raise
            _failed(error)


def _failed(error: BaseException) -> None:
    _failures.append(describe(error))
    events.count("failed_kernels_together")
    log.debug("kernels are compiled one by one: %s", _failures[-1])


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Kernel:
    """One that has not been compiled: its `source` with Python's way into it, the `library` that it becomes by
    `command`, and Inductor's own function that does that, once a host, under `lock`."""

    source: Path
    library: Path
    command: tuple[str, ...]
    lock: Path
    alone: Callable[[], object]

    @property
    def key(self) -> str:
        return self.library.name.partition(".")[0]

    @functools.cached_property
    def text(self) -> str:
        return self.source.read_text()

    @property
    def flags(self) -> tuple[str, ...]:
        """The command without this kernel's own files."""
        own = {str(self.source): "source", str(self.library): "library"}
        return tuple(own.get(word, word) for word in self.command)

    @property
    def may_be_put_together(self) -> bool:
        """Whether it can be said what its text leaves behind for what follows in one file: macros, and headers."""
        if not self.key.isidentifier():
            return False
        depth = 0
        for directive, _ in _DIRECTIVE.findall(self.text):
            depth += _BRANCHES.get(directive, 0)
            if directive not in _PLAIN or (directive == "include" and depth):
                return False
        return True

    @property
    def macros(self) -> tuple[str, ...]:
        """Those that its text defines."""
        return tuple(dict.fromkeys(name for word, name in _DIRECTIVE.findall(self.text) if word == "define"))


def compile_kernels(source: str, least: int = 2) -> None:
    """Compile what generated code is about to ask of the compiler; units of fewer than `least` kernels as Inductor."""
    kernels = missing_kernels(source)
    if not kernels:
        return
    most = _compat.compile_threads()
    with ThreadPoolExecutor(most, thread_name_prefix="multigraph-kernels") as threads:
        for done in [threads.submit(_compile, unit, least) for unit in parted(kernels, most)]:
            done.result()


def missing_kernels(source: str) -> list[Kernel]:
    """The C++ kernels of generated code that there is no library for yet."""
    found: list[Kernel] = []

    def later(work: Any) -> _Later:
        found.append(_kernel(work))
        return _Later()

    for types, text in dict.fromkeys((tuple(types), text) for types, text in kernels_in(source)):
        _compat.load_cpp_kernel(list(types), text, submit_fn=later)
    return found


class _Later:
    """What Inductor waits for before it looks whether a library is there: nothing, for it is asked afterwards."""

    def result(self) -> None:
        return None


def _kernel(work: Any) -> Kernel:
    lock, (builder,) = work.args
    library = Path(builder.get_target_file_path())
    command = tuple(shlex.split(builder.get_command_line()))
    return Kernel(library.with_suffix(".cpp"), library, command, Path(lock), work)


def parted(kernels: Sequence[Kernel], threads: int) -> Iterator[list[Kernel]]:
    """Kernels as units, of about equal lengths: for each set of flags as many as there are threads, fewer where units
    would be too short for what each takes, and more where they would grow too long.  A kernel that cannot be put
    together is a unit by itself."""
    alike: dict[tuple[str, ...], list[Kernel]] = {}
    for kernel in kernels:
        if kernel.may_be_put_together:
            alike.setdefault(kernel.flags, []).append(kernel)
        else:
            yield [kernel]
    for group in alike.values():
        length = sum(len(kernel.text) for kernel in group)
        count = min(len(group), max(1, min(threads, length // SHORTEST), -(-length // LARGEST)))
        units: list[list[Kernel]] = [[] for _ in range(count)]
        lengths = [0] * count
        for kernel in sorted(group, key=lambda kernel: -len(kernel.text)):
            shortest = lengths.index(min(lengths))
            units[shortest].append(kernel)
            lengths[shortest] += len(kernel.text)
        yield from units


def _compile(unit: Sequence[Kernel], least: int = 2) -> None:
    if len(unit) >= least and unit[0].may_be_put_together and len(_failures) < TRIES:
        name = "multigraph-" + hashlib.sha256(" ".join(kernel.key for kernel in unit).encode()).hexdigest()[:32]
        try:
            # of processes that compile the same graph, one does it, and where it was killed, the next one tidies up
            with FileLock(unit[0].lock.with_name(f"{name}.lock"), timeout=SECONDS):
                if missing := [kernel for kernel in unit if not kernel.library.exists()]:
                    compile_unit(missing, unit[0].library.with_name(name))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            _failed(error)
    for kernel in unit:  # this looks whether the library is there; what it raises, Inductor will meet again
        with contextlib.suppress(Exception):
            kernel.alone()


def compile_unit(unit: Sequence[Kernel], folder: Path) -> None:
    """One library for all kernels of `unit`, under the name of each, made in `folder`, which is nobody else's and gone
    afterwards.  Raises what opening files and starting the compiler raise, and `ValueError` with what that says."""
    first = unit[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        source, library = folder / "unit.cpp", folder / "unit.so"
        source.write_text(text_of(unit))
        own = {"source": str(source), "library": str(library)}
        command = [own.get(word, word) for word in first.flags]
        if os.path.basename(command[0]).startswith(("g++", "gcc")):
            command += ["--param", "large-unit-insns=10000000"]  # a kernel is inlined as if it were alone
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode or not library.exists():
            raise ValueError(f"the compiler ends with {done.returncode}: {done.stderr.strip()[-2000:]}")
        for kernel in unit:
            put_under(kernel.library, library)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for _ in unit:
        events.count("kernels_together")


# ---------------------------------------------------------------- their text


def text_of(unit: Sequence[Kernel]) -> str:
    """The kernels as they are, each with names of its own, and one way into all of them."""
    headers = dict.fromkeys(header for kernel in unit for header in _INCLUDE.findall(kernel.text))
    parts = ["#define PY_SSIZE_T_CLEAN", *(f"#include {header}" for header in headers), "#undef PY_SSIZE_T_CLEAN"]
    for kernel in unit:  # nothing outside has such names, even where a process loads all libraries with RTLD_GLOBAL
        names = {name: f"{name}_{kernel.key}" for name in (_ENTRY, f"PyInit_{_ENTRY}")}
        parts += [
            *(f"#define {name} {own}" for name, own in names.items()),
            f"namespace {kernel.key} {{",
            f'#line 1 "{kernel.source}"',
            kernel.text,
            "}",
            *(f"#undef {macro}" for macro in (*names, *kernel.macros)),
        ]
    rows = ",\n    ".join(f'{{"{kernel.key}.{_ENTRY}", {kernel.key}::PyInit_{_ENTRY}_{kernel.key}}}' for kernel in unit)
    parts += ['#line 1 "unit.cpp"', _ENTRANCE.replace("ROWS", rows)]
    return "\n".join(parts)


_ENTRANCE = """
#include <cstring>

// Of several kernels in one library, the one whose name Python imports it by.
static const struct { const char* name; PyObject* (*make)(); } kernels[] = {
    ROWS};

static PyObject* make_kernel(PyObject* spec, PyModuleDef*) {
    PyObject* name = PyObject_GetAttrString(spec, "name");
    if (name == nullptr) return nullptr;
    const char* text = PyUnicode_AsUTF8(name);
    PyObject* made = nullptr;
    if (text != nullptr) {
        for (const auto& kernel : kernels) {
            if (std::strcmp(kernel.name, text) == 0) made = kernel.make();
        }
        if (made == nullptr && !PyErr_Occurred()) {
            PyErr_Format(PyExc_ImportError, "this library has no kernel of the name %s", text);
        }
    }
    Py_DECREF(name);
    return made;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_create, reinterpret_cast<void*>(make_kernel)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, slots};

PyMODINIT_FUNC PyInit_kernel(void) { return PyModuleDef_Init(&definition); }
"""
