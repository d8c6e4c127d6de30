"""How a process comes by native calls: compiled once a machine, never trusted blindly, and never in the way.

A program that copies what is built already stands for the compiler, and notes that it was called.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from multigraph_backend import _compat, native
from multigraph_backend.cudagraphs.recordings import native_calls
from multigraph_backend.native import building


class Compiler:
    """`calls`: how often it was called; `does`: the shell's words for what it does with "$out"."""

    def __init__(self, folder: Path, built: Path) -> None:
        self.folder, self.built = folder, built
        self.path = folder / "compiler"
        self.log = folder / "log"
        self.does(f"cp {built} $out")

    def does(self, what: str) -> None:
        find = 'while [ "$1" != -o ]; do shift; done; out=$2'
        self.path.write_text(f"#!/bin/sh\necho called >> {self.log}\n{find}\n{what}\n")
        self.path.chmod(0o700)

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, calls: Any, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    built = Path(_compat.cache_dir()) / building.FOLDER / f"{building.key()}.so"
    assert built.is_file()
    made = Compiler(tmp_path, built)
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    return made


def cached() -> Path:
    return Path(_compat.cache_dir()) / building.FOLDER / f"{building.key()}.so"


def left() -> list[str]:
    """What is in the folder beside modules and locks."""
    return [entry.name for entry in cached().parent.iterdir() if entry.suffix not in (".so", ".lock", ".sha256")]


def test_it_is_compiled_once(compiler: Compiler) -> None:
    for _ in range(3):
        native_calls.checked(building.build())
    assert compiler.calls == 1
    assert stat.S_IMODE(cached().stat().st_mode) == 0o700
    assert left() == []


def test_of_several_at_once_one_compiles(compiler: Compiler) -> None:
    compiler.does(f"sleep 1; cp {compiler.built} $out")
    threads = [threading.Thread(target=building.build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.calls == 1


@pytest.mark.parametrize("harm", ["writable by all", "half", "empty", "without a digest", "a folder of others"])
def test_what_is_not_to_be_trusted_is_not_loaded(compiler: Compiler, harm: str) -> None:
    building.build()
    if harm == "writable by all":
        cached().chmod(0o777)
    elif harm == "a folder of others":
        cached().parent.chmod(0o777)
        with pytest.raises(Exception, match="others may write to it"):
            building.build()
        return
    else:
        half = cached().read_bytes()[: 100_000 if harm == "half" else 0]
        cached().unlink()  # the process may have it mapped
        cached().write_bytes(half)
        if harm == "without a digest":
            cached().with_suffix(".sha256").unlink()
    building.build()
    assert compiler.calls == 2
    building.build()
    assert compiler.calls == 2


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'calls.cc:1: error: no such thing' >&2; exit 1", "ended with 1: calls.cc:1: error: no such thing"),
        ("exit 3", "ended with 3"),
        ("true", "wrote nothing"),
        ("echo text > $out", "could not be loaded"),
    ],
)
def test_a_compiler_that_fails_is_told(compiler: Compiler, does: str, said: str) -> None:
    compiler.does(does)
    with pytest.raises(building.NotBuilt, match=re.escape(said)):
        building.build()
    assert left() == []


def test_a_compiler_that_hangs_is_ended(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.does("sleep 600")
    monkeypatch.setattr(building, "SECONDS", 0.5)
    with pytest.raises(building.NotBuilt, match=r"more than 0\.5 s"):
        building.build()
    assert left() == []


def test_without_a_compiler_or_headers_the_reason_is_said(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_compat, "torch_build", lambda: ("", None, tmp_path))
    with pytest.raises(building.NotBuilt, match=r"python_variable\.h is missing"):
        building.build()
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(building.NotBuilt, match=r"no compiler of C\+\+ was found"):
        building.compiler()


def test_a_module_that_counts_otherwise_is_refused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = iter(range(1000))
    monkeypatch.setattr(
        native_calls, "_compat", type("Other", (), {"storage_use_count": staticmethod(lambda handle: next(uses) * 7)})
    )
    with pytest.raises(building.NotBuilt, match="its counts are not those of torch and Python"):
        native_calls.checked(building.build())


PROGRAM = """
import os, sys, time
from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime
runtime.begin_native_calls()
"""


def program(text: str, **environ: str) -> Callable[[], str]:
    env = {**os.environ, **environ}
    started = subprocess.Popen([sys.executable, "-c", PROGRAM + text], stdout=subprocess.PIPE, text=True, env=env)
    return lambda: started.communicate(timeout=120)[0].strip()


def test_it_can_be_forbidden(compiler: Compiler) -> None:
    said = program("print(native.wait(), native.state())", MULTIGRAPH_DISABLE="native_calls")()
    assert said == "False MULTIGRAPH_DISABLE=native_calls"
    assert compiler.calls == 0


def test_a_process_that_ends_meanwhile_leaves_nothing(compiler: Compiler) -> None:
    compiler.does("echo $$ > $out.pid; mv $out.pid " + str(compiler.folder / "pid") + "; sleep 600")
    program(f"""
while not os.path.exists({str(compiler.folder / "pid")!r}):
    time.sleep(0.01)
""")()
    pid = int((compiler.folder / "pid").read_text())
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert left() == []


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(compiler: Compiler) -> None:
    compiler.does(f"sleep 3; cp {compiler.built} $out")
    said = program("""
pid = os.fork()
if not pid:
    print("child", native.wait(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("parent", native.wait())
""")()
    assert said.splitlines() == ["child False", "parent True"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_program_may_have_another_default_type(compiler: Compiler, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        native_calls.checked(building.build())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_module_of_the_program_s_keeps_its_name(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("calls")
    monkeypatch.setitem(sys.modules, "calls", own)
    monkeypatch.setitem(sys.modules, "_calls", own)
    building.build()
    assert sys.modules["calls"] is sys.modules["_calls"] is own


def test_a_child_that_ends_leaves_the_parent_s_build_alone(compiler: Compiler) -> None:
    compiler.does(f"sleep 3; cp {compiler.built} $out")
    said = program("""
time.sleep(1)
if not os.fork():
    sys.exit(0)
os.wait()
print(native.wait(), native.state())
""")()
    assert said == "True native"


def test_who_asks_later_is_told_at_once(calls: Any) -> None:
    told: list[Any] = []
    native.when_ready(told.append)
    assert told == [native.ready()]
