"""A short slice of the random chains of blocks, and proof that they find what they are for: merged blocks.

The whole run is `tests/support/fuzz/repeated.py`, whose first lines say how to call it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

from multigraph_backend.lower import repetition, steps_of_graph
from tests.support.fuzz.repeated import Block, Program, generate, run_case, through_inductor, traced_once

ALMOST_EQUAL = ("constant", "shared", "shared inside", "order", "operator", "write")


@pytest.fixture(autouse=True)
def _on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def chain(different: str, training: bool = False) -> Program:
    """Six blocks, of which the fourth differs."""
    blocks = [Block("feed forward")] * 6
    blocks[3] = Block("feed forward", different)
    return Program(1, tuple(blocks), training, dynamic=False)


def checkpointed(program: Program) -> Program:
    blocks = (dataclasses.replace(block, checkpointed=True) for block in program.blocks)
    return dataclasses.replace(program, blocks=tuple(blocks))


def test_random_chains_are_right() -> None:
    verdicts = [run_case(generate(seed)) for seed in range(4)]
    assert [verdict.wrong for verdict in verdicts if verdict.wrong] == []
    assert sum(verdict.calls for verdict in verdicts) > 4


def test_a_chain_with_a_block_that_is_almost_equal_is_right() -> None:
    for different in ALMOST_EQUAL:
        verdict = run_case(chain(different))
        assert verdict.wrong is None
        assert verdict.calls > 1


def test_chains_whose_blocks_are_traced_once_are_right() -> None:
    different = (None, "shared", "stride")
    programs = [chain(other, training=True) if other else generate(4) for other in different]
    programs.append(checkpointed(chain("constant", training=True)))
    for repeat in ("always", "auto"):
        verdicts = [run_case(program, functools.partial(traced_once, repeat=repeat)) for program in programs]
        assert [verdict.wrong for verdict in verdicts if verdict.wrong] == []
        assert all(verdict.calls > 4 for verdict in verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3000, 3200, 50))
def test_many_chains_whose_blocks_are_traced_once_are_right(first: int) -> None:
    programs = [generate(seed) for seed in range(first, first + 50)]
    drawing = [any(block.different == "dropout" for block in program.blocks) for program in programs]
    verdicts = [run_case(program, traced_once) for program, draws in zip(programs, drawing, strict=True) if not draws]
    assert [verdict.wrong for verdict in verdicts if verdict.wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1300, 50))
def test_many_random_chains_are_right(first: int) -> None:
    verdicts = [run_case(generate(seed)) for seed in range(first, first + 50)]
    assert [verdict.wrong for verdict in verdicts if verdict.wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2016))
def test_random_chains_are_right_through_inductor(seed: int) -> None:
    program = generate(seed)
    if any(block.different == "dropout" for block in program.blocks):
        program = generate(seed + 1000)  # Inductor draws other numbers than eager
    if any(block.different == "dropout" for block in program.blocks):
        return
    verdict = run_case(program, through_inductor)
    assert verdict.wrong is None


def whatever_constants(monkeypatch: pytest.MonkeyPatch) -> str:
    exact = steps_of_graph._constant

    def loose(value: Any) -> Hashable:
        return "float" if isinstance(value, float) else exact(value)

    monkeypatch.setattr(steps_of_graph, "_constant", loose)
    return "constant"


def whatever_operands(monkeypatch: pytest.MonkeyPatch) -> str:
    exact = repetition._Graph.block

    def loose(self: Any, start: int, length: int) -> Any:
        (tokens, _), arguments = exact(self, start, length)
        return (tokens, len(arguments)), arguments

    monkeypatch.setattr(repetition._Graph, "block", loose)
    return "order"


def whatever_operators(monkeypatch: pytest.MonkeyPatch) -> str:
    exact = steps_of_graph._description

    def loose(node: Any, operands: Any, known: Any) -> Hashable:
        said: Any = exact(node, operands, known)
        name = "sine or cosine" if node.target in (torch.ops.aten.sin.default, torch.ops.aten.cos.default) else said[1]
        return (said[0], name, *said[2:])

    monkeypatch.setattr(steps_of_graph, "_description", loose)
    return "operator"


def whatever_functions(monkeypatch: pytest.MonkeyPatch) -> str:
    exact = steps_of_graph._said_in_a_trace

    def loose(node: Any) -> Hashable:
        said: Any = exact(node)
        return (said[0], "sine or cosine" if node.target in ("sin", "cos") else said[1], *said[2:])

    monkeypatch.setattr(steps_of_graph, "_said_in_a_trace", loose)
    return "operator"


def whatever_regions(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(steps_of_graph, "_said_of_region", lambda region: "whatever it does")
    return "constant"


@pytest.mark.parametrize("mutant", [whatever_constants, whatever_operands, whatever_operators])
def test_a_search_that_merges_almost_equal_blocks_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    different = mutant(monkeypatch)
    verdict = run_case(chain(different))
    assert verdict.calls > 1
    assert verdict.wrong is not None


@pytest.mark.parametrize("mutant", [whatever_constants, whatever_operands, whatever_functions])
def test_a_search_in_dynamos_graph_that_merges_them_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    different = mutant(monkeypatch)
    verdict = run_case(chain(different), traced_once)
    assert verdict.calls > 1
    assert verdict.wrong is not None


def test_a_search_that_merges_checkpointed_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = checkpointed(chain(whatever_regions(monkeypatch)))
    verdict = run_case(program, traced_once)
    assert verdict.calls > 1
    assert verdict.wrong is not None
