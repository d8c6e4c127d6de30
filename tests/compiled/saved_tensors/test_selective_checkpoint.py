"""What a policy of selective checkpointing says holds, whatever rules and budgets would do: seen by the account."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from multigraph_backend import Bits, Cast, Match, Offload, Recompute, Rule, Scaled
from multigraph_backend.saved_tensors.account import SavedTensors
from tests.support.saved_tensors.late_stream import late_stream
from tests.support.saved_tensors.models import accounts, compiled, rules, step

pytestmark = pytest.mark.filterwarnings("ignore:.*context_fn is passed.*")

MATMULS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
MUST_SAVE, MUST_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
Policy = Callable[[Any], CheckpointPolicy]


def matmuls(says: CheckpointPolicy, others: CheckpointPolicy) -> Policy:
    return lambda op: says if op in MATMULS else others


class Checkpointed(torch.nn.Module):
    """A layer before a part that is checkpointed by a policy, and one behind it."""

    def __init__(self, policy: Policy | None, width: int = 32) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = (torch.nn.Linear(width, width) for _ in range(4))
        self.policy = policy

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        given: dict[str, Any] = {}
        if self.policy is not None:
            policy = self.policy

            def says(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                return policy(op)

            given["context_fn"] = functools.partial(create_selective_checkpoint_contexts, says)
        x = checkpoint(self.part, x, use_reentrant=False, **given)
        return self.last(x.exp())


def stepped(policy: Policy | None, packs: list[Rule], bound: float, **options: Any) -> SavedTensors:
    """The account of a step, whose gradients are eager's up to `bound`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Checkpointed(policy)
    run, x = compiled(model, packs, **options), torch.randn(8, 32)
    eager = copy.deepcopy(model)
    for _ in range(2):
        got, wanted = step(model, run, x), step(eager, eager, x)
        assert all((one - other).norm() <= bound * other.norm() for one, other in zip(got, wanted, strict=True))
    return accounts()[-1]


def of(said: SavedTensors, module: str) -> list[tuple[str | None, str | None]]:
    return [
        (entry.packed, entry.reason) for entry in said.tensors if entry.module == module and entry.op == "aten::addmm"
    ]


@pytest.mark.usefixtures("by_operator")
@pytest.mark.parametrize("by", ["a rule", "a rule that begins with packed ones", "a budget"])
def test_what_must_be_saved_is_not_computed_again(by: str) -> None:
    packs = [Rule(Match(op="aten::addmm", min_bytes=0), Recompute(from_packed="packed" in by))]
    options = {"saved_tensors_budget": 0.0} if by == "a budget" else {}
    free = stepped(matmuls(CheckpointPolicy.PREFER_SAVE, MUST_RECOMPUTE), packs, 1e-5, **options)
    # where it need not be saved, this is what they do
    assert "recompute" in str([packed for module in ("up", "down") for packed, _ in of(free, module)])
    said = stepped(matmuls(MUST_SAVE, MUST_RECOMPUTE), packs, 1e-5, **options)
    for module in ("up", "down"):
        ((packed, reason),) = of(said, module)
        assert packed is None
        assert str(reason).startswith("checkpointing says that addmm")
        assert str(reason).endswith("must be saved")
    assert said.bytes_saved >= free.bytes_saved


@pytest.mark.parametrize("pack", [Cast("bf16"), Scaled("int8"), Offload(Scaled("int8"))], ids=str)
@pytest.mark.parametrize("budget", [None, 0.3])
def test_what_must_be_saved_may_be_packed(pack: Any, budget: float | None) -> None:
    options = {} if budget is None else {"saved_tensors_budget": budget}
    with late_stream():
        said = stepped(matmuls(MUST_SAVE, MUST_RECOMPUTE), rules(pack), 0.05, **options)
        assert [packed for packed, _ in of(said, "up")] == [str(pack)]
        assert [packed for packed, _ in of(said, "down")] == [str(pack)]


@pytest.mark.usefixtures("by_operator")
@pytest.mark.parametrize("budget", [None, 1.0, 0.2])
@pytest.mark.parametrize("others", [MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE], ids=str)
def test_what_must_be_recomputed_is_not_saved(others: CheckpointPolicy, budget: float | None) -> None:
    options = {} if budget is None else {"saved_tensors_budget": budget}
    packs = [*rules(Scaled("int8")), Rule(Match(dtype="bool", min_bytes=0), Bits())]
    said = stepped(matmuls(MUST_RECOMPUTE, others), packs, 0.05, **options)
    assert of(said, "up") == of(said, "down") == []
    assert not [entry for entry in said.tensors if entry.op in ("aten::gelu", "aten::erf")]
    assert [entry for entry in said.tensors if entry.op == "aten::tanh"]  # what it begins with
    unpacked = stepped(matmuls(MUST_RECOMPUTE, others), [], 1e-5, saved_tensors_budget=1.0)
    assert {entry.name for entry in said.tensors} == {entry.name for entry in unpacked.tensors}


def test_whole_checkpointed_parts_stay_so() -> None:
    said = stepped(
        None, [Rule(Match(pointwise=True, min_bytes=0), Recompute(from_packed=True)), *rules(Scaled("int8"))], 0.05
    )
    assert of(said, "up") == of(said, "down") == []
    assert said.packed
