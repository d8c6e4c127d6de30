"""Kernels that pack rows keep a row where they can, and all other choices stay Inductor's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.utils import is_nonfreeable_buffers

from multigraph_backend import Cast, Match, Rule, Scaled, _compat
from multigraph_backend.backend import multigraph
from multigraph_backend.saved_tensors import kernels

INNER, OUTER = _compat.ReductionHint.INNER, _compat.ReductionHint.OUTER


def graph(marked: bool) -> torch.fx.GraphModule:
    module = torch.fx.symbolic_trace(torch.nn.ReLU())
    if marked:
        next(iter(module.graph.nodes)).meta[kernels.MARK] = True
    return module


def kernel(row: Any, hint: Any = INNER, marked: bool = True, **more: Any) -> Any:
    """What Inductor says of a kernel with a plain step, and one of a pack, or plain, too."""
    steps = [SimpleNamespace(meta={}), SimpleNamespace(meta={kernels.MARK: True} if marked else {})]
    nodes = [SimpleNamespace(node=SimpleNamespace(get_origins=partial(list, [step]))) for step in steps]
    return SimpleNamespace(
        reduction_numel=sympy.sympify(row), get_reduction_hint=lambda: hint, scheduler_nodes=lambda: nodes, **more
    )


class Theirs:
    """A handler of somebody else's."""

    keeps = False

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        return self.keeps

    def can_fuse(self) -> str:
        return "theirs"


@pytest.fixture
def theirs() -> Iterator[Theirs]:
    handler = Theirs()
    with _compat.inductor_choices._set_handler(handler):
        yield handler


def keeps(features: Any, cooperative: bool = False) -> bool:
    with kernels.rows_read_once(graph(True)):
        found = _compat.inductor_choices.should_use_persistent_reduction(features, cooperative)
        assert isinstance(found, bool)
        return found


@pytest.mark.parametrize(("row", "kept"), [(1025, True), (3000, True), (4096, True), (4097, False), (8192, False)])
def test_a_pack_keeps_rows_up_to_the_longest(theirs: Theirs, row: int, kept: bool) -> None:
    assert keeps(kernel(row)) is kept


def test_other_kernels_get_inductors_own_answer(theirs: Theirs) -> None:
    asked = {
        "no step of a pack": (kernel(3000, marked=False), False),
        "sums along columns": (kernel(3000, OUTER), False),
        "rows that several blocks share": (kernel(3000), True),
        "sums in pieces that are given": (kernel(3000, strict_reduction_rblock=lambda: 1024), False),
        "rows that differ from call to call": (kernel(sympy.Symbol("s0")), False),
    }
    assert [name for name, (features, cooperative) in asked.items() if keeps(features, cooperative)] == []
    assert keeps(kernel(3000, strict_reduction_rblock=lambda: None))
    theirs.keeps = True
    assert [name for name, (features, cooperative) in asked.items() if not keeps(features, cooperative)] == []


def test_who_switches_it_off_in_inductor_has_none(theirs: Theirs) -> None:
    with torch._inductor.config.patch({"triton.persistent_reductions": False}):
        assert not keeps(kernel(3000))


def test_all_else_is_asked_of_the_handler_that_was_there(theirs: Theirs) -> None:
    with kernels.rows_read_once(graph(True)):
        assert _compat.inductor_choices.can_fuse() == "theirs"
        assert _compat.inductor_choices._get_handler(False) is not theirs
    assert _compat.inductor_choices._get_handler(False) is theirs
    with kernels.rows_read_once(graph(False)):
        assert _compat.inductor_choices._get_handler(False) is theirs


@pytest.mark.parametrize("pack", [Scaled("int8", per="row"), Cast("float8_e4m3fn")], ids=str)
def test_inductor_is_given_marked_packs(pack: Any) -> None:
    seen: list[tuple[set[str], bool]] = []  # marked steps of a graph, and whether they are those of packs

    def look(within: torch.fx.Graph) -> None:
        marked = {node.name for node in within.nodes if kernels.MARK in node.meta}
        handler = _compat.inductor_choices._get_handler(False)
        assert isinstance(handler, kernels._Choices) is bool(marked)
        packs = {node.name for node in within.nodes if node.op == "call_function" and "_pack_" in node.name}
        seen.append((marked, marked == packs))

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ w) @ w

    x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    rules = [Rule(Match(min_bytes=1), pack)]
    options = {"on_failure": "raise", "saved_tensors": rules}
    with torch._inductor.config.patch(post_grad_custom_pre_pass=look):
        torch.compile(program, backend=multigraph, options=options)(x, w).sum().backward()
    assert all(those for _, those in seen)
    assert [bool(marked) for marked, _ in seen] == [True, False]  # forward and backward


@pytest.mark.parametrize(("pack", "apart"), [(Scaled("int8", per=64), True), (Scaled("int8"), False)], ids=str)
def test_scales_of_blocks_count_for_nothing_where_inductor_plans_memory(pack: Any, apart: bool) -> None:
    given: list[str] = []

    def look(within: torch.fx.Graph) -> None:
        if not any(kernels.MARK in node.meta for node in within.nodes):  # the backward
            given.extend(node.name for node in within.find_nodes(op="placeholder"))

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ w) @ w

    x, w = torch.randn(16, 256, requires_grad=True), torch.randn(256, 256, requires_grad=True)
    options = {"on_failure": "raise", "saved_tensors": [Rule(Match(min_bytes=1), pack)]}
    with torch._inductor.config.patch(post_grad_custom_pre_pass=look):
        torch.compile(program, backend=multigraph, options=options)(x, w).sum().backward()
    with _compat.virtualized.set_graph_handler(SimpleNamespace(name=None)):
        kept = [name for name in given if is_nonfreeable_buffers(SimpleNamespace(name=name))]
    packed = [name for name in given if "_pack_" in name]
    assert [name in kept for name in packed] == [False, apart] * (len(packed) // 2) != []  # bytes, and their scales
