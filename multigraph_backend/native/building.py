"""`calls.cc`, compiled for the torch and the Python of this process, once a machine.

In:  a compiler of C++, the headers of torch and of Python.  Out: a module, from a folder beside torch's caches; or
`NotBuilt`, with the reason.  A file there is loaded only if nobody else could have written it, and is named after all
that it depends on; who is killed while compiling leaves nothing that counts, and of several processes the first one
compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from multigraph_backend import _compat
from multigraph_backend.cache import trusted

SOURCE = Path(__file__).with_name("calls.cc")
NAME = "multigraph_backend.native._calls"  # of the module; the source has its last part
FOLDER = "multigraph-native"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
SECONDS = 300.0  # that a compile may take, and that another process's is waited for
MOST_BYTES = 64 << 20
_PERIOD = 0.1  # seconds between looks whether another process is done
_NICE = 10


class NotBuilt(RuntimeError):
    """There is no module; the text says why."""


def compiler() -> list[str]:
    """The compiler of C++, and arguments of its: CXX, else the first that is found.  Raises `NotBuilt`."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in asked[:1] or ("g++", "clang++", "c++"):
        if (found := shutil.which(name)) is not None:
            return [found, *asked[1:]]
    raise NotBuilt(f"no compiler of C++ was found ({asked[0] if asked else 'g++, clang++'})")


def include_folders() -> list[Path]:
    """Those of Python and torch.  Raises `NotBuilt` where one lacks what is needed."""
    python, of_torch = Path(sysconfig.get_paths()["include"]), _compat.torch_build()[2] / "include"
    for header in (python / "Python.h", of_torch / "torch" / "csrc" / "autograd" / "python_variable.h"):
        if not header.is_file():
            raise NotBuilt(f"{header} is missing (Python's headers are in a package of their own on many systems)")
    return [python, of_torch, of_torch / "torch" / "csrc" / "api" / "include"]


def command(target: Path) -> list[str]:
    """What compiles `calls.cc` into `target`.  Raises `NotBuilt`."""
    libraries = _compat.torch_build()[2] / "lib"
    includes = [word for folder in include_folders() for word in ("-isystem", str(folder))]
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch_python", "-ldl"]
    modest = [nice, "-n", str(_NICE)] if (nice := shutil.which("nice")) is not None else []
    return [*modest, *compiler(), *FLAGS, *includes, str(SOURCE), "-o", str(target), *linked]


@functools.cache
def key() -> str:
    """What the module depends on, in one word."""
    facts = (*_compat.torch_build(), sys.version, sys.implementation.cache_tag, platform.machine(), *FLAGS)
    return hashlib.sha256(repr(facts).encode() + SOURCE.read_bytes()).hexdigest()[:32]


def folder() -> Path:
    """Where modules lie: among torch's caches."""
    return Path(_compat.cache_dir()) / FOLDER


def build() -> ModuleType:
    """The module, compiled now if need be: also where what is there is damaged, or others could have written it.

    Raises `NotBuilt`, and OSError where a file cannot be read or written.
    """
    lying = trusted.own_folder(folder())
    target = lying / f"{key()}.so"
    with contextlib.suppress(NotBuilt, FileNotFoundError):
        return _loaded(target)
    with _only_one(lying / f"{key()}.lock"):
        with contextlib.suppress(NotBuilt, FileNotFoundError):  # another process was faster
            return _loaded(target)
        _compile(target)
        return _loaded(target)


def _compile(target: Path) -> None:
    with _folder_in(target.parent) as folder:
        made = Path(folder, target.name)
        with subprocess.Popen(
            command(made),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": folder},
            process_group=0,
        ) as compiling:
            # no process waits for this thread at its end: what it has begun ends with it
            end = functools.partial(_end, compiling, folder, os.getpid())
            atexit.register(end)
            try:
                _, said = compiling.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                raise NotBuilt(f"the compiler took more than {SECONDS:g} s") from None
            finally:
                end()
                atexit.unregister(end)
        if compiling.returncode:
            lines = [line for line in said.splitlines() if "error" in line] or said.splitlines() or [""]
            raise NotBuilt(f"the compiler ended with {compiling.returncode}: {lines[0].strip()[:300]}")
        try:
            os.chmod(made, 0o700)
        except FileNotFoundError:
            raise NotBuilt("the compiler wrote nothing") from None
        trusted.write(_digest(target), hashlib.sha256(made.read_bytes()).hexdigest().encode(), durable=False)
        os.replace(made, target)


def _digest(path: Path) -> Path:
    """Where the digest of the module at `path` is."""
    return path.with_suffix(".sha256")


@contextlib.contextmanager
def _folder_in(parent: Path) -> Iterator[str]:
    """A folder for one build, which this process takes away, and none that is forked from it."""
    folder, owner = tempfile.mkdtemp(prefix="build-", dir=parent), os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def _end(compiling: subprocess.Popen[str], folder: str, owner: int) -> None:
    if os.getpid() == owner and compiling.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(compiling.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """One process at a time; who has waited for `SECONDS` goes on beside the other."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_PERIOD)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file, too
        os.close(file)


def _loaded(path: Path) -> ModuleType:
    """Raises `NotBuilt` where it is not to be trusted, or is no module."""
    try:
        content, digest = trusted.read(path, MOST_BYTES), trusted.read(_digest(path), 64)
    except trusted.Refused as why:
        raise NotBuilt(f"{path}: {why}") from None
    if hashlib.sha256(content).hexdigest().encode() != digest:  # to load half a library ends the process
        raise NotBuilt(f"{path} is damaged")
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, str(path), loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise NotBuilt(f"{path} could not be loaded: {error}") from error
    return module
