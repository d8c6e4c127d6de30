"""Two ranks over NCCL: recorded collectives, decisions of one rank alone, training, and every ending.

Collected where there are two GPUs or more.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from multigraph_backend.allocator import library
from tests.support.distributed import endings, processes, soak_endings

PROGRAM = processes.CHECKOUT / "tests/support/gpu/ranks_on_gpu.py"


def names(kind: str = "program") -> list[str]:
    """Of the programs, read off their file: importing it would set up CUDA here."""
    functions = [node for node in ast.parse(PROGRAM.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [entry.name for entry in functions if any(ast.unparse(word) == kind for word in entry.decorator_list)]


def run(wanted: list[str], seconds: float, environ: Mapping[str, str] | None = None) -> None:
    port = str(processes.free_port())
    words = [[str(rank), "2", port, *wanted] for rank in range(2)]
    ranks = processes.run(PROGRAM, words, seconds, environ)
    every = "\n".join(f"rank {rank} ended with {ended.status}: {ended.said}" for rank, ended in enumerate(ranks))
    assert [ended.status for ended in ranks] == [0, 0], every
    for ended in ranks:
        assert [name for name in wanted if f"{name}: ok" not in ended.said] == []


def test_two_ranks_are_right() -> None:
    assert len(names()) >= 8
    run(names(), 235)


if library.load().library is not None:  # where the extension is built: scripts/gpu --allocator

    @pytest.mark.parametrize(
        ("kind", "environ"),
        [
            ("installed", {"MULTIGRAPH_ALLOCATOR": "1"}),
            ("installed", {"MULTIGRAPH_ALLOCATOR": "1", "NCCL_GRAPH_REGISTER": "0"}),
            ("beside", {"MULTIGRAPH_ALLOCATOR": "0"}),
        ],
        ids=["installed", "installed, collectives recorded", "beside"],
    )
    def test_two_ranks_with_the_allocator_extension(kind: str, environ: dict[str, str]) -> None:
        assert names(kind)
        run(names(kind), 115, environ)


def test_every_ending_ends() -> None:
    """All at the same time, each with two ranks of its own."""
    with ThreadPoolExecutor(len(endings.ENDINGS)) as pool:
        said = list(pool.map(lambda ending: soak_endings.run(ending, 2, "cuda", 100), endings.ENDINGS))
    assert {ending: told for ending, told in zip(endings.ENDINGS, said, strict=True) if told is not None} == {}
