"""Kernels are put into units so that each is there once, beside none with other flags, and as its text is."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import expecttest
import pytest

from multigraph_backend.lower import translation_units
from multigraph_backend.lower.translation_units import Kernel, parted, text_of

TEXT = """\
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* out_ptr0) { out_ptr0[0] = NUMBER; }
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifndef _MSC_VER
# define likely(x) (x)
#else
# define SIZE 3
#endif
PyMODINIT_FUNC PyInit_kernel(void) { return nullptr; }
"""


def kernel(folder: Path, name: str, text: str = TEXT, flag: str = "-O3") -> Kernel:
    source, library = folder / f"{name}.main.cpp", folder / f"{name}.main.so"
    source.write_text(text)
    command = ("g++", str(source), flag, "-o", str(library))
    return Kernel(source, library, command, folder / f"{name}.lock", lambda: None)


def test_each_kernel_keeps_its_text_and_gets_names_of_its_own(tmp_path: Path) -> None:
    unit = [kernel(tmp_path, name, TEXT.replace("NUMBER", name[1])) for name in ("c1", "c2")]
    text = text_of(unit).replace(str(tmp_path), "FOLDER")
    expecttest.TestCase().assertExpectedInline(
        text[: text.index("static PyObject* make_kernel")],
        """\
#define PY_SSIZE_T_CLEAN
#include <torch/csrc/inductor/cpp_prefix.h>
#include <Python.h>
#undef PY_SSIZE_T_CLEAN
#define kernel kernel_c1
#define PyInit_kernel PyInit_kernel_c1
namespace c1 {
#line 1 "FOLDER/c1.main.cpp"
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* out_ptr0) { out_ptr0[0] = 1; }
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifndef _MSC_VER
# define likely(x) (x)
#else
# define SIZE 3
#endif
PyMODINIT_FUNC PyInit_kernel(void) { return nullptr; }

}
#undef kernel
#undef PyInit_kernel
#undef PY_SSIZE_T_CLEAN
#undef likely
#undef SIZE
#define kernel kernel_c2
#define PyInit_kernel PyInit_kernel_c2
namespace c2 {
#line 1 "FOLDER/c2.main.cpp"
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* out_ptr0) { out_ptr0[0] = 2; }
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifndef _MSC_VER
# define likely(x) (x)
#else
# define SIZE 3
#endif
PyMODINIT_FUNC PyInit_kernel(void) { return nullptr; }

}
#undef kernel
#undef PyInit_kernel
#undef PY_SSIZE_T_CLEAN
#undef likely
#undef SIZE
#line 1 "unit.cpp"

#include <cstring>

// Of several kernels in one library, the one whose name Python imports it by.
static const struct { const char* name; PyObject* (*make)(); } kernels[] = {
    {"c1.kernel", c1::PyInit_kernel_c1},
    {"c2.kernel", c2::PyInit_kernel_c2}};

""",
    )


def test_kernels_of_other_flags_are_in_other_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_units, "SHORTEST", 1)
    kernels = [kernel(tmp_path, f"c{n}", flag="-mavx2" if n % 3 else "-mavx512f") for n in range(9)]
    units = list(parted(kernels, 2))
    assert sorted(len(unit) for unit in units) == [1, 2, 3, 3]
    assert all(len({one.flags for one in unit}) == 1 for unit in units)


@pytest.mark.parametrize(
    "directive",
    [
        "#undef SIZE",
        "  # undef SIZE",
        "#error",
        "#import <a>",
        "#ifdef A\n#include <a>\n#endif",
        "#line 3",
        "#warning x",
    ],
)
def test_a_kernel_that_leaves_something_behind_is_by_itself(tmp_path: Path, directive: str) -> None:
    plain = [kernel(tmp_path, f"c{n}") for n in range(2)]
    other = kernel(tmp_path, "other", f"{TEXT}\n{directive}\n")
    assert sorted(map(len, parted([*plain, other], 1))) == [1, 2]


def test_random_kernels_are_each_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_units, "LARGEST", 4000)
    monkeypatch.setattr(translation_units, "SHORTEST", 1000)
    for seed in range(300):
        draw = random.Random(seed)
        kernels = [
            kernel(tmp_path, f"c{n}", TEXT + "x" * draw.choice((0, 1, 500, 9000)), draw.choice(("-O3", "-mavx2")))
            for n in range(draw.choice((0, 1, 2, 3, 20)))
        ]
        threads = draw.choice((1, 2, 3, 64))
        units = list(parted(kernels, threads))
        assert Counter(one.key for unit in units for one in unit) == Counter(one.key for one in kernels)
        for flags in {one.flags for one in kernels}:
            alike = [unit for unit in units if unit[0].flags == flags]
            group = [one for one in kernels if one.flags == flags]
            assert all(one.flags == flags for unit in alike for one in unit)
            assert all(alike)  # no unit is empty
            longest = max(len(one.text) for one in group)
            lengths = [sum(len(one.text) for one in unit) for unit in alike]
            assert len(alike) <= max(threads, -(-sum(lengths) // 4000))
            assert len(alike) >= min(len(group), threads, max(1, sum(lengths) // 1000))
            assert max(lengths) - min(lengths) <= longest or min(map(len, alike)) == 1


def test_of_those_who_compile_the_same_unit_at_once_one_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, compiled = [kernel(tmp_path, f"c{n}") for n in range(3)], list[list[str]]()

    def compile_unit(unit: Sequence[Kernel], folder: Path) -> None:
        compiled.append([one.key for one in unit])
        time.sleep(0.2)
        for one in unit:
            one.library.touch()

    monkeypatch.setattr(translation_units, "compile_unit", compile_unit)
    unit[1].library.touch()  # somebody has compiled it by itself
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(translation_units._compile, [unit] * 4)) == [None] * 4
    assert compiled == [["c0", "c2"]]


def test_what_cannot_be_put_together_does_not_start_all_compilers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def alone() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    kernels = [replace(kernel(tmp_path, f"c{n}", f"{TEXT}\n#error\n"), alone=alone) for n in range(12)]
    monkeypatch.setattr(translation_units, "missing_kernels", lambda source: kernels)
    monkeypatch.setattr(translation_units, "_compat", SimpleNamespace(compile_threads=lambda: 3))
    translation_units.compile_kernels("")
    assert most == 3


def test_a_killed_compile_leaves_a_folder_that_the_next_one_tidies_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, ends = [kernel(tmp_path, f"c{n}") for n in range(2)], [1, 0]

    def run(command: Sequence[str], **others: object) -> SimpleNamespace:
        Path(command[4]).touch()
        return SimpleNamespace(returncode=ends.pop(0), stderr="")

    monkeypatch.setattr(translation_units, "_failures", [])
    monkeypatch.setattr(translation_units.subprocess, "run", run)
    with monkeypatch.context() as killed:
        killed.setattr(translation_units.shutil, "rmtree", lambda *args, **others: None)
        translation_units._compile(unit)
    assert len(list(tmp_path.glob("multigraph-*/unit.so"))) == 1
    assert not unit[0].library.exists()
    translation_units._compile(unit)
    assert [path.name for path in tmp_path.glob("multigraph-*")] == [next(tmp_path.glob("*.lock")).name]
    assert unit[0].library.samefile(unit[1].library)
