"""Two ranks over NCCL: recorded collectives, decisions of one rank alone, training, and every ending.

Collected where there are two GPUs or more.
"""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.distributed import endings, processes, soak_endings

PROGRAM = Path(__file__).with_name("ranks_on_gpu.py")


def names() -> list[str]:
    """Of the programs, read off their file: importing it would set up CUDA here."""
    functions = [node for node in ast.parse(PROGRAM.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [entry.name for entry in functions if any(ast.unparse(word) == "program" for word in entry.decorator_list)]


def test_two_ranks_are_right() -> None:
    port = str(processes.free_port())
    words = [[str(rank), "2", port] for rank in range(2)]
    assert len(names()) >= 8
    for ended in processes.run(PROGRAM, words, 115):
        assert ended.status == 0, ended.said
        assert [name for name in names() if f"{name}: ok" not in ended.said] == []


def test_every_ending_ends() -> None:
    """All at the same time, each with two ranks of its own."""
    with ThreadPoolExecutor(len(endings.ENDINGS)) as pool:
        said = list(pool.map(lambda ending: soak_endings.run(ending, 2, "cuda", 100), endings.ENDINGS))
    assert {ending: told for ending, told in zip(endings.ENDINGS, said, strict=True) if told is not None} == {}
