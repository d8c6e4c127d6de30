"""What is saved at the boundaries of graphs: inputs and outputs of blocks that are compiled apart, of graph breaks.

Whether memory is free is seen by the storages themselves, while the step waits between forward and backward.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend import Cast, Match, Recompute, Rule, Scaled, saved_hook
from multigraph_backend.saved_tensors.account import SavedTensor
from tests.support.saved_tensors.models import Block, accounts, compiled

BETWEEN = [Rule(Match(min_bytes=0), Scaled("int8")), Rule(Match(role="input", min_bytes=0), Scaled("int8"))]
INSIDE = BETWEEN[:1]


class Gate(torch.nn.Module):
    """Its last operation saves its result: an output of the graph."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.sin()).tanh()


class Stack(torch.nn.Module):
    """Blocks one after the other; `between` has what each hands on, by memory."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.calls: list[Callable[[torch.Tensor], torch.Tensor]] = list(self.blocks)
        self.between: list[tuple[StorageWeakRef, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.between = []
        for call in self.calls:
            x = call(x)
            self.between.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        return x.square().mean()

    def alive(self) -> list[bool]:
        """Of each block's output but the last's, which the loss saves, whether its memory is there."""
        gc.collect()
        return [not reference.expired() for reference, _ in self.between[:-1]]


def held_bytes(out: torch.Tensor, but: Sequence[torch.Tensor]) -> int:
    """All that the graph behind `out` keeps alive, each storage once, without those of `but`."""
    known = {value.untyped_storage().data_ptr() for value in but}
    found: dict[int, int] = {}
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for value in (*getattr(node, "saved_tensors", ()), *values):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in known:
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        waiting += [entry for entry, _ in node.next_functions]
    return sum(found.values())


def apart(stack: Stack, packs: Sequence[Rule]) -> Stack:
    made = copy.deepcopy(stack)
    made.calls = [compiled(block, packs) for block in made.blocks]
    return made


def trained(stack: Stack, x: torch.Tensor) -> tuple[list[torch.Tensor], list[bool], int]:
    """Gradients of a step; which memory between the blocks was there before its backward, and all bytes that were."""
    x = x.detach().clone().requires_grad_()
    stack.zero_grad()
    out = stack(x)
    alive, held = stack.alive(), held_bytes(out, [*stack.parameters(), x])
    out.backward()
    assert x.grad is not None
    return [*(p.grad.clone() for p in stack.parameters() if p.grad is not None), x.grad], alive, held


def packed(role: str) -> list[SavedTensor]:
    return [entry for said in accounts() for entry in said.tensors if entry.packed and role in (entry.held or "")]


def near(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], bound: float) -> None:
    assert all((one - other).norm() <= bound * other.norm() for one, other in zip(got, wanted, strict=True))


def test_between_blocks_that_are_compiled_apart_only_what_is_packed_is_alive() -> None:
    torch.manual_seed(0)
    stack = Stack([Block() for _ in range(3)])
    plain, inside, between = apart(stack, []), apart(stack, INSIDE), apart(stack, BETWEEN)
    for _ in range(2):
        x = torch.randn(4, 16, 32)
        wanted, alive, _ = trained(stack, x)
        assert alive == [True] * 2
        _, alive, whole = trained(plain, x)
        assert alive == [True] * 2
        _, alive, some = trained(inside, x)
        assert alive == [True] * 2
        got, alive, least = trained(between, x)
        assert alive == [False] * 2
        near(got, wanted, 0.05)
        assert least <= some - 2 * 4 * 16 * 32 * 4 * 0.55  # a quarter and scales are left of each
        assert some < whole
    said = packed("input")
    assert said  # once: the blocks have one code
    assert all(entry.held == "an input: its memory is free once nobody else holds it" for entry in said)
    text = "\n".join(line for account in accounts() for line in account.lines())
    assert "; it is an input: its memory is free once nobody else holds it" in text


def test_data_and_tables_that_all_blocks_share_are_no_inputs_of_that_kind() -> None:
    class Scaling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x + (self.up(x) * table).sin()

    torch.manual_seed(0)
    block, x, table = Scaling(), torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)
    compiled(block, BETWEEN)(x, table).sum().backward()
    (said,) = accounts()
    found = {entry.packed or entry.reason for entry in said.tensors if entry.op == "placeholder"}
    assert "int8, scaled per row" in found
    assert "it is an input of the graph that needs no gradient, which no rule names" in found
    torch._dynamo.reset()
    compiled(block, [*BETWEEN, Rule(Match(role="data", min_bytes=0), Cast("bf16"))])(x, table).sum().backward()
    (entry,) = [entry for entry in packed("no gradient") if entry.packed == "cast to bfloat16"]
    assert (
        entry.held
        == "an input that needs no gradient: where the caller holds it, as data or a table, the pack adds to it"
    )


def test_where_a_block_saves_its_own_output_both_sides_have_to_be_packed() -> None:
    torch.manual_seed(0)
    stack = Stack([Gate() for _ in range(4)])
    output = Rule(Match(role="output", min_bytes=0), Scaled("int8"))
    one, both = apart(stack, BETWEEN), apart(stack, [*BETWEEN, output])
    x = torch.randn(64, 32)
    wanted, _, _ = trained(stack, x)
    got, alive, held = trained(one, x)
    assert alive == [True] * 3
    near(got, wanted, 0.05)
    got, alive, least = trained(both, x)
    assert alive == [False] * 3
    near(got, wanted, 0.05)
    assert least < held
    assert packed("output")


@pytest.mark.parametrize("pack", [Cast("bf16"), Scaled("int4", per=16), Recompute()], ids=str)
def test_other_packs_of_inputs(pack: Any) -> None:
    """What the backward has nothing to compute from is kept, and said to be."""
    torch.manual_seed(0)
    stack = Stack([Block() for _ in range(3)])
    between = apart(stack, [Rule(Match(role="input", min_bytes=0), pack)])
    x = torch.randn(2, 8, 32)
    wanted, _, _ = trained(stack, x)
    got, alive, _ = trained(between, x)
    near(got, wanted, 0.5)
    assert alive == [isinstance(pack, Recompute)] * 2


def test_what_a_graph_break_hands_on_is_packed() -> None:
    handed_on: list[StorageWeakRef] = []

    @torch.compiler.disable
    def note(x: torch.Tensor) -> None:
        handed_on.append(StorageWeakRef(x.untyped_storage()))

    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.gelu(self.first(x)) * 2
            note(x)
            return self.last(x).sin().square().mean()

    torch.manual_seed(0)
    model = Broken()
    x = torch.randn(16, 32)
    results = []
    wanted = _gradients(model, x)
    for packs in (INSIDE, BETWEEN):
        model.zero_grad()
        out = compiled(model, packs, fullgraph=False)(x)
        gc.collect()
        results.append(not handed_on[-1].expired())
        out.backward()
        near([p.grad for p in model.parameters() if p.grad is not None], wanted, 0.05)
    assert results == [True, False]


def _gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_parameters_stay_as_they_are_whatever_rules_say() -> None:
    torch.manual_seed(0)
    model = Block()
    rules = [Rule(Match(role="parameter", min_bytes=0), Cast("bf16")), *INSIDE]
    compiled(model, rules)(torch.randn(2, 8, 32)).sum().backward()
    (said,) = accounts()
    reasons = [entry.reason for entry in said.tensors if entry.op == "placeholder" and entry.shape == "[32, 32]"]
    assert reasons
    assert set(reasons) == {"it is a parameter, which its module holds: a pack would only add to it"}


def test_a_hook_may_have_them() -> None:
    torch.manual_seed(0)
    hook = saved_hook(lambda x: x.to(torch.bfloat16), lambda packed: packed.to(torch.float32))
    model = Block()
    compiled(model, [Rule(Match(role="parameter", min_bytes=0), hook)])(torch.randn(2, 8, 32)).sum().backward()
    (said,) = accounts()
    assert said.packed
