"""The library as it is delivered: what it exports, what it needs, what it says without a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from multigraph_backend.allocator import library as mirror
from tests.support.allocator.extension import HEADER, SOURCE, declarations, declared_exports


def test_it_exports_what_is_declared_and_nothing_else(library: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listed.splitlines()}
    assert exported == declared_exports()
    assert len(exported) > 25


def test_the_linker_is_told_the_same_names() -> None:
    lines = (SOURCE / "exports.map").read_text().splitlines()
    listed = [line.strip().rstrip(";") for line in lines if line.startswith("    ")]
    assert listed == list(declarations())


@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_the_header_is_c(standard: str, tmp_path: Path) -> None:
    program = tmp_path / "program.c"
    program.write_text(f'#include "{HEADER}"\nint main(void) {{ return mg_abi_version() == MG_ABI_VERSION; }}\n')
    command = ["gcc", f"-std={standard}", "-Wall", "-Wextra", "-Wstrict-prototypes", "-pedantic", "-Werror"]
    done = subprocess.run([*command, "-fsyntax-only", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# how ctypes may spell a type of the header
SPELLINGS: dict[str, set[Any]] = {
    "void": {None},
    "int": {ctypes.c_int},
    "size_t": {ctypes.c_size_t},
    "uint64_t": {ctypes.c_uint64},
    "char*": {ctypes.c_char_p},
    "int*": {ctypes.POINTER(ctypes.c_int)},
    "size_t*": {ctypes.POINTER(ctypes.c_size_t)},
    "uint64_t*": {ctypes.POINTER(ctypes.c_uint64)},
    "void**": {ctypes.POINTER(ctypes.c_void_p)},
    "double": {ctypes.c_double},
}


def spellings(declared: str) -> set[Any]:
    kind = declared.removeprefix("const ")
    return SPELLINGS.get(kind, set()) | ({ctypes.c_void_p} if kind.endswith("*") or "(*" in kind else set())


@pytest.mark.parametrize("name", mirror._FUNCTIONS)
def test_the_backend_calls_it_with_the_types_of_the_header(name: str) -> None:
    result, parameters = declarations()[name]
    found, *given = mirror._FUNCTIONS[name]
    assert found in spellings(result), result
    kinds = [each if "(*" in each else each.rpartition(" ")[0] for each in parameters]
    # a pair of two integers comes in two registers
    kinds = [each for kind in kinds for each in (["uint64_t"] * 2 if kind == "mg_torch_pool" else [kind])]
    assert len(given) == len(kinds)
    for one, kind in zip(given, kinds, strict=True):
        assert one in spellings(kind), kind


@pytest.mark.parametrize(("name", "structure"), [("mg_options", mirror.Options), ("mg_block", mirror.Block)])
def test_the_backend_has_the_structures_of_the_header(name: str, structure: type[ctypes.Structure]) -> None:
    body = re.search(rf"struct {name} {{(.*?)}}", HEADER.read_text(), re.DOTALL)
    assert body is not None
    fields = []
    for kind, names in re.findall(r"(\w+\*?) ([\w, ]+);", re.sub(r"/\*.*?\*/", "", body[1])):
        fields += [(field, spellings(kind)) for field in names.split(", ")]
    assert [field for field, _ in fields] == [field[0] for field in structure._fields_]
    assert all(field[1] in allowed for (_, allowed), field in zip(fields, structure._fields_, strict=True))


def test_the_backend_knows_the_abi_version(library: Path) -> None:
    assert ctypes.CDLL(str(library)).mg_abi_version() == mirror.ABI_VERSION


def test_it_needs_neither_cuda_nor_torch(library: Path) -> None:
    needs = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"NEEDED.*\[(.*?)\.so", needs))
    assert found <= {"libstdc++", "libm", "libc", "libgcc_s", "libdl", "libpthread", "ld-linux-x86-64"}


def test_abi_version(library: Path) -> None:
    declared = re.search(r"MG_ABI_VERSION (\d+)", HEADER.read_text())
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
