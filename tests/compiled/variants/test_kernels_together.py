"""Kernels that are compiled together are each the one that Inductor asks for, and what goes wrong costs time alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.debug import DebugContext
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V

import multigraph_backend
from multigraph_backend.lower import translation_units


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(translation_units, "_failures", [])
    multigraph_backend.reset_stats()
    with fresh_cache(dir=str(tmp_path)), inductor_config.patch(compile_threads=1):
        yield tmp_path


def five_kernels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Pointwise, reductions, and a product of integers, between products that no kernel goes across."""
    for step in range(3):
        x = torch.softmax(torch.nn.functional.gelu(x * (step + 1)), -1) @ w
        x = x - x.mean(0) if step % 2 else x.sin()
    return (x.to(torch.int32) % 3).cumsum(-1) + x


def two_kernels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ w).cos()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.main.so"))


def files(folder: Path) -> int:
    return len({path.stat().st_ino for path in libraries(folder)})


def together() -> tuple[int, int]:
    stats = multigraph_backend.stats()
    assert (stats["eager_calls"], stats["failures"]) == (0, 0)
    return stats["kernels_together"], stats["failed_kernels_together"]


def check(function: Any, **options: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="multigraph", options=options)
    for seed in range(3):
        torch.manual_seed(seed)
        args = torch.randn(9, 33), torch.randn(33, 33)
        torch.testing.assert_close(compiled(*args), function(*args))


def test_kernels_of_a_graph_are_one_library_by_each_name(folder: Path) -> None:
    check(five_kernels)
    count = len(libraries(folder))
    assert count >= 4
    assert files(folder) == 1
    assert together() == (count, 0)
    assert not list(folder.rglob("multigraph-*/*"))  # nothing else is left behind


def test_there_are_as_many_units_as_threads_that_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_units, "SHORTEST", 1000)
    with inductor_config.patch(compile_threads=2):
        check(five_kernels)
    assert files(folder) == 2
    assert together() == (len(libraries(folder)), 0)


def test_forward_and_backward(folder: Path) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return five_kernels(x, w).square().sum()

    compiled = torch.compile(loss, backend="multigraph")
    for seed in range(2):
        torch.manual_seed(seed)
        args = [torch.randn(9, 33, requires_grad=True), torch.randn(33, 33, requires_grad=True)]
        expected = torch.autograd.grad(loss(*args), args)
        for mine, theirs in zip(torch.autograd.grad(compiled(*args), args), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert files(folder) == 2
    assert together() == (len(libraries(folder)), 0)


def test_a_second_compile_finds_the_libraries(folder: Path) -> None:
    check(two_kernels)
    made = {path: path.stat().st_mtime_ns for path in libraries(folder)}
    with inductor_config.patch(fx_graph_cache=False):
        check(two_kernels)
    assert {path: path.stat().st_mtime_ns for path in libraries(folder)} == made
    assert together() == (len(made), 0)


def test_a_library_hands_out_no_kernel_of_another_name(folder: Path) -> None:
    check(two_kernels)
    path = libraries(folder)[0]
    spec = importlib.util.spec_from_file_location("another.kernel", path)
    assert spec is not None
    with pytest.raises(ImportError, match=r"no kernel of the name another\.kernel"):
        importlib.util.module_from_spec(spec)


ONE_AFTER_ANOTHER = """
import os, sys, torch
sys.setdlopenflags(sys.getdlopenflags() | os.RTLD_GLOBAL)
x = torch.randn(9, 33)
for function in torch.sin, torch.cos:
    compiled = torch.compile(lambda x: function(x))
    print(next((name for name in ("sin", "cos") if torch.allclose(compiled(x), getattr(x, name)())), "neither"))
"""


def test_stocks_libraries_take_each_others_place_where_they_are_loaded_for_all() -> None:
    """docs/sharp-edges.md has a row of it."""
    program = [sys.executable, "-c", ONE_AFTER_ANOTHER]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["sin", "sin"], done.stderr


@pytest.mark.parametrize("alone", [False, True])
def test_libraries_that_are_loaded_for_all_do_not_take_each_others_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Libraries of MPI ask for that; Inductor's own kernels all have one name then, and are loaded for nobody else."""
    if alone:
        monkeypatch.setenv("MULTIGRAPH_DISABLE", "kernels_together")
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        check(two_kernels)
        check(lambda x, w: two_kernels(w, w))
        check(lambda x, w: x.exp())
        check(lambda x, w: x.cos())
        assert sys.getdlopenflags() == flags | os.RTLD_GLOBAL
    finally:
        sys.setdlopenflags(flags)
    assert len(libraries(folder)) == 6
    assert (files(folder), together()) == ((6, (0, 0)) if alone else (4, (6, 0)))


def test_what_the_compiler_refuses_is_compiled_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_units, "text_of", lambda unit: "no C++ at all")
    check(two_kernels)
    assert files(folder) == len(libraries(folder))
    assert together() == (0, 1)
    check(lambda x, w: two_kernels(x[:7], w))
    check(lambda x, w: two_kernels(x[:5], w))
    assert together() == (0, translation_units.TRIES)


def test_a_folder_without_links_gets_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refused)
    check(two_kernels)
    assert files(folder) == len(libraries(folder)) == together()[0]


def test_a_compiler_that_cannot_be_started_is_inductors_to_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **others: object) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(subprocess, "run", refused)
    compiled = torch.compile(two_kernels, backend="multigraph")
    args = torch.randn(9, 33), torch.randn(33, 33)
    torch.testing.assert_close(compiled(*args), two_kernels(*args))  # eagerly, or by what Inductor could do
    assert multigraph_backend.stats()["kernels_together"] == 0


def test_a_pass_of_somebody_elses_stays_alone(folder: Path) -> None:
    seen: list[object] = []
    with inductor_config.patch(post_grad_custom_post_pass=seen.append):
        check(two_kernels)
    assert seen
    assert together() == (0, 0)
    check(two_kernels, inductor={"post_grad_custom_post_pass": seen.append})
    assert len(seen) == 2
    assert together() == (0, 0)


def test_torchs_own_handler_puts_back_what_was_there() -> None:
    listening = translation_units.knob(())["post_grad_custom_post_pass"]
    assert callable(listening)
    before = type(V.debug)
    with DebugContext(), translation_units.kernels_together():
        listening(torch.fx.Graph())
        handler = V.debug
        listening(torch.fx.Graph())  # of a graph inside
        assert V.debug is handler
        assert isinstance(handler, translation_units._Handler)
    assert type(V.debug) is before


def test_torchs_own_traces_of_a_compile_are_written(folder: Path) -> None:
    with inductor_config.patch({"trace.enabled": True, "trace.debug_dir": str(folder / "traces")}):
        check(two_kernels)
    assert list((folder / "traces").rglob("output_code.py"))
    assert together() == (len(libraries(folder)), 0)


@pytest.mark.parametrize("piece", ["kernels_together", "all"])
def test_it_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch, piece: str) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", piece)
    check(two_kernels)
    assert files(folder) == len(libraries(folder)) > 1
    assert together() == (0, 0)


def test_code_beside_ours_is_inductors_alone(folder: Path) -> None:
    compiled = torch.compile(two_kernels, backend="inductor")
    args = torch.randn(9, 33), torch.randn(33, 33)
    torch.testing.assert_close(compiled(*args), two_kernels(*args))
    assert files(folder) == len(libraries(folder)) > 1
    assert together() == (0, 0)
