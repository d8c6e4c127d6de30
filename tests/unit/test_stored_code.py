"""Code is loaded past Inductor for the conditions that it was compiled under, and for no others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from multigraph_backend import Keep, Match, Range, Rule, Scaled
from multigraph_backend.cache import cpp_kernels, revived, torch_files
from multigraph_backend.cache.stored_code import fingerprint
from multigraph_backend.options import Options

SOURCE = """\
import torch
from math import inf, nan
from torch._inductor.hooks import run_intermediate_hooks
from torch._inductor.utils import maybe_profile
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels

aten = torch.ops.aten
assert_alignment = torch._C._dynamo.guards.assert_alignment
async_compile = AsyncCompile()
KERNELS
def call(args):
    CALL
"""


def generated(call: str, kernels: str = "") -> str:
    return SOURCE.replace("CALL", call).replace("KERNELS", kernels)


def imports(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if "import" in line)


def test_imports_that_nothing_uses_are_left_out_and_torchs_own_kernels_come_from_torch() -> None:
    source = revived.without_inductor(generated("extern_kernels.mm(a, b, out=c); extern_kernels.addmm(d, a, b, out=c)"))
    expecttest.TestCase().assertExpectedInline(
        imports(source),
        """\
import torch
from math import inf, nan
# not used: from torch._inductor.hooks import run_intermediate_hooks
# not used: from torch._inductor.utils import maybe_profile
# not used: from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.async_compile import AsyncCompile
import torch as extern_kernels""",
    )


KERNEL = """\
one = async_compile.cpp_pybinding(['float*'], r'''void kernel(float* x) {}''')
two = async_compile.cpp_pybinding(['long'], r'''void kernel(long x) {}''')
"""


class Compiler:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> str:
        self.asked += argtypes
        return "compiled"


def test_kernels_whose_libraries_are_not_known_are_asked_of_the_compiler() -> None:
    source = generated("one(a); two(b)", KERNEL)
    assert cpp_kernels.by_library(source) == source  # none is known
    (types, text), other = cpp_kernels.kernels_in(source)
    assert (types, text, other[0]) == (["float*"], "void kernel(float* x) {}", ["long"])
    with cpp_kernels.known({cpp_kernels._name(types, text): "ab/gone.main.so"}):
        changed = cpp_kernels.by_library(source)
        compiler = Compiler()
        assert cpp_kernels.around(compiler).cpp_pybinding(*other) == "compiled"
        assert cpp_kernels.around(compiler).cpp_pybinding(types, text) == "compiled"  # the library is gone
    assert compiler.asked == ["long", "float*"]
    assert cpp_kernels.around(compiler) is compiler
    told = set(changed.splitlines()) - set(source.splitlines())
    expecttest.TestCase().assertExpectedInline(
        "\n".join(sorted(told)),
        """\
async_compile = _around(AsyncCompile())
from multigraph_backend.cache.cpp_kernels import around as _around""",
    )


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        ("buf0 = alloc(align(8))", "memory_planning import _align as align"),
        ("with maybe_profile(): pass", "utils import maybe_profile"),
        ("extern_kernels.mm(a, b); extern_kernels.bias_addmm(a, b, c)", "select_algorithm import extern_kernels"),
        ("f = extern_kernels; f.mm(a, b)", "select_algorithm import extern_kernels"),
        ("getattr(extern_kernels, 'mm')(a, b)", "select_algorithm import extern_kernels"),
    ],
)
def test_imports_that_something_uses_stay(call: str, kept: str) -> None:
    assert f"from torch._inductor.{kept}" in imports(revived.without_inductor(generated(call))).replace("codegen.", "")


def test_what_kernels_import_in_their_own_text_stays() -> None:
    kernel = "k = async_compile.triton('k', '''\nfrom torch._inductor.runtime import triton_helpers\n''')"
    source = revived.without_inductor(generated("k.run()", kernel))
    assert "\nfrom torch._inductor.runtime import triton_helpers\n" in source


def test_what_is_taken_from_torch_is_what_inductor_has_by_that_name() -> None:
    program = """
import torch, torch._inductor.lowering
from torch._inductor.select_algorithm import extern_kernels
from multigraph_backend.cache.revived import OF_TORCH
print({name for name in OF_TORCH if getattr(extern_kernels, name) is not getattr(torch, name)})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---------------------------------------------------------------- fingerprints


@dataclass(frozen=True)
class ByTheUser:
    """A pass or a way to pack."""


def graph(number: float = 2.0) -> str:
    return f"def forward(self, x):\n    return (x * {number},)"


def fakes(*tensors: torch.Tensor) -> list[Any]:
    mode = FakeTensorMode()
    return [mode.from_tensor(tensor) for tensor in tensors]


def told(
    code: str | None = None,
    *inputs: Any,
    known: object = None,
    asked: object = None,
) -> str:
    return fingerprint([code or graph()], inputs or fakes(torch.randn(4, 8)), known, asked)


def test_the_same_compile_has_the_same_fingerprint() -> None:
    assert told() == told(graph(), *fakes(torch.randn(4, 8)))
    assert told() != ""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 9),
        torch.randn(8, 4).t(),
        torch.randn(4, 8, dtype=torch.float64),
        torch.randn(4, 8, requires_grad=True),
        torch.randn(5, 8)[1:],
        torch.empty(4, 8, device="meta"),
    ],
    ids=["size", "strides", "type", "gradients", "offset", "device"],
)
def test_another_input_has_another_one(tensor: torch.Tensor) -> None:
    assert told(None, *fakes(tensor)) not in ("", told())


def test_another_graph_or_constant_has_another_one() -> None:
    found = {told(), told(graph(3.0)), told(None, 3), told(None, 3.0), told(None, True), told(None, 1)}
    found |= {told(known={"s": 0.0}), told(known={"s": -0.0}), told(known={"s": float("nan")})}
    assert len(found - {""}) == 9


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a knob of Inductor": lambda: torch._inductor.config.patch(epilogue_fusion=False),
    "a knob of AOTAutograd": lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
    "gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "determinism": lambda: _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "the default type": lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "the default device": lambda: torch.device("meta"),
    "precision of products": lambda: _set(
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
        False,
    ),
    "threads": lambda: _set(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("state", STATES)
def test_another_state_has_another_one(state: str) -> None:
    inputs = fakes(torch.randn(4, 8))
    before = told(None, *inputs)
    with STATES[state]():
        within = told(None, *inputs)
    assert within not in ("", before)
    assert told(None, *inputs) == before


def test_what_cannot_be_written_down_for_certain_has_none() -> None:
    with torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert told() == ""
    assert told(None, torch.randn(4, 8)) == ""  # no fake tensor: its values would count
    assert told(None, object()) == ""
    assert told(asked=lambda: None) == ""
    assert told(asked=ByTheUser()) == ""  # its text is the same, whatever its code does
    assert told(f"{graph()}\n# triton_kernel_wrapper_mutation(kernel_idx = 0)") == ""


def test_other_options_have_another_one_and_options_that_were_pickled_the_same() -> None:
    asked = {
        "specialize": [{"x[0]": [8, 16]}, Range("x[1]", 1, 4)],
        "saved_tensors": [
            Rule(Match(op="aten::tanh"), Keep()),
            Rule(Match(dtype="float32"), Scaled("int8")),
        ],
        "inductor": {"max_autotune": False, "epilogue_fusion": True},
    }
    options = Options.build(asked, None, (), {})
    again = pickle.loads(pickle.dumps(options))
    assert told(asked=options) == told(asked=again) != ""
    assert told(asked=options) != told(asked=options.without(frozenset({"saved_tensors"})))


def test_how_a_process_does_its_work_does_not_count() -> None:
    before = told()
    with torch._inductor.config.patch({"compile_threads": 3, "debug": True, "cpp.cxx": ("clang++",)}):
        assert told() == before


# ---------------------------------------------------------------- which torch


def test_a_file_that_was_changed_after_it_was_installed_is_seen(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    files = [tmp_path / "one.py", tmp_path / "inner" / "two.py", tmp_path / "inner" / "other.txt"]
    for file in files:
        file.write_text("")
        os.utime(file, (1000, 1000))
    assert not torch_files.changed_since(tmp_path, 1001)
    os.utime(files[2], (2000, 2000))
    assert not torch_files.changed_since(tmp_path, 1001)
    os.utime(files[1], (2000, 2000))
    assert torch_files.changed_since(tmp_path, 1001)


def test_an_installed_torch_has_an_identity_and_one_without_a_record_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = torch_files.identity()
    assert len(known) == 32
    place = tmp_path / "torch"
    place.mkdir()
    (place / "__init__.py").write_text("")
    torch_files.identity.cache_clear()
    monkeypatch.setattr("multigraph_backend._compat.torch_build", lambda: ("2.11.0", "abc", place))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton")
    try:
        assert torch_files.identity() == ""
        (tmp_path / "torch-2.11.0.dist-info").mkdir()
        record = tmp_path / "torch-2.11.0.dist-info" / "RECORD"
        record.write_text("torch/__init__.py,sha256=1,0\n../../bin/torchrun,sha256=2,0\n")
        torch_files.identity.cache_clear()
        first = torch_files.identity()
        record.write_text("torch/__init__.py,sha256=1,0\n../../bin/torchrun,sha256=other,0\n")
        torch_files.identity.cache_clear()
        assert torch_files.identity() == first != ""  # a script says where it lies, and is no part of torch
        record.write_text("torch/__init__.py,sha256=9,0\n")
        torch_files.identity.cache_clear()
        assert torch_files.identity() not in ("", first)
        os.utime(place / "__init__.py", (4e9, 4e9))
        torch_files.identity.cache_clear()
        assert torch_files.identity() == ""
    finally:
        torch_files.identity.cache_clear()
