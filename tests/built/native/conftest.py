"""The module of native calls, built once, and a driver that only takes notes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.native import building

NUMBERS = (
    "graphs", "kernels", "sets", "fail_graph", "fail_kernel", "fail_set", "contexts", "needs_context", "capturing",
)  # fmt: skip


class Launched(ctypes.Structure):
    """As `driver.cc` has it."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("graph", "function", "stream", "table")),
        *((name, ctypes.c_uint32) for name in ("programs", "threads", "shared")),
        ("sources", ctypes.c_uint64 * 64),
    ]


class Driver:
    """What it was asked for: `last`, and how often; `fail(name)` lets calls of that name fail in what follows."""

    def __init__(self, path: Path) -> None:
        self.path, self._library = path, ctypes.CDLL(str(path))
        self.last = Launched.in_dll(self._library, "last")
        ctypes.c_uint64.in_dll(self._library, "node").value = 0
        for name in NUMBERS:
            self.be(name, 0)

    @property
    def node(self) -> int:
        return ctypes.c_uint64.in_dll(self._library, "node").value

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    def be(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, name).value = value

    def fail(self, name: str) -> None:
        self.be(f"fail_{name}", 700)


@pytest.fixture(scope="session")
def calls() -> Any:
    runtime.begin_native_calls()
    native.wait()
    assert native.ready() is not None, native.state()
    return native.ready()


@pytest.fixture(scope="session")
def _driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("driver") / "libdriver.so"
    source = str(Path(__file__).with_name("driver.cc"))
    subprocess.run([*building.compiler(), "-shared", "-fPIC", "-O1", source, "-o", str(made)], check=True)
    return made


@pytest.fixture
def driver(_driver_library: Path, calls: Any) -> Driver:
    made = Driver(_driver_library)
    calls.drive(str(made.path), torch.Tensor.__dlpack_c_exchange_api__)  # type: ignore[attr-defined]
    return made
