"""The library as it is delivered: what it exports, what it needs, what it says without a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.allocator.extension import SOURCE, declared_exports


def test_it_exports_what_is_declared_and_nothing_else(library: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listed.splitlines()}
    assert exported == declared_exports()
    assert len(exported) > 25


def test_it_needs_neither_cuda_nor_torch(library: Path) -> None:
    needs = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"NEEDED.*\[(.*?)\.so", needs))
    assert found <= {"libstdc++", "libm", "libc", "libgcc_s", "libdl", "libpthread", "ld-linux-x86-64"}


def test_abi_version(library: Path) -> None:
    declared = re.search(r"MG_ABI_VERSION (\d+)", (SOURCE / "abi.h").read_text())
    assert declared is not None
    assert ctypes.CDLL(str(library)).mg_abi_version() == int(declared[1])


def test_it_says_why_it_is_not_ready(library: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        loaded = ctypes.CDLL(str(library))
        loaded.mg_message.restype = ctypes.c_char_p
        assert loaded.mg_torch_ready() != 0
        assert b"no CUDA driver" in loaded.mg_message()
    else:
        assert ctypes.CDLL(str(library)).mg_torch_ready() == 0


@pytest.mark.parametrize("path", sorted(SOURCE.glob("core/*")), ids=lambda path: path.name)
def test_the_core_knows_no_cuda_and_no_torch(path: Path) -> None:
    included = re.findall(r"#include [\"<](.*?)[\">]", path.read_text())
    assert not [name for name in included if name.startswith(("cuda", "torch", "sim", "c10", "ATen"))]
