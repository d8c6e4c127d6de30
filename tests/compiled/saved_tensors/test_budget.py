"""A budget of saved bytes: a smaller one never saves more or needs more, and what it does is right."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import Keep, Match, Recompute, Rule, Scaled
from multigraph_backend.options import Options, OptionsError
from multigraph_backend.saved_tensors import budget, costs
from multigraph_backend.saved_tensors.budget import Budget, Move
from multigraph_backend.saved_tensors.rules import rule_from_json, rule_to_json
from tests.support.saved_tensors.late_stream import late_stream
from tests.support.saved_tensors.models import Block, Mlp, accounts, assert_step, compiled, step
from tests.support.saved_tensors.partitioned import Partitioned, everything, gradients, partition, text

FRACTIONS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


# ---------------------------------------------------------------- the choice, pure


class Peaks:
    """A plan with a peak for each set of moves, up and down, and moves that exclude each other."""

    def __init__(self, seed: int) -> None:
        self.draw, self.seed = random.Random(seed), seed
        self.made: list[Move] = []

    def make(self, move: Move) -> bool:
        if (move.way + len(self.made) + self.seed) % 5 == 0:
            return False
        self.made.append(move)
        return True

    def undo(self, move: Move) -> None:
        self.made.remove(move)

    def peak(self) -> int:
        key = (self.seed, *sorted((move.unit, move.way) for move in self.made))
        return 1000 - 10 * len(self.made) + random.Random(str(key)).randint(0, 30)


def test_the_example_that_opens_the_module() -> None:
    class Rising:
        def __init__(self) -> None:
            self.made: list[str] = []

        def make(self, move: Move) -> bool:
            self.made.append(move.unit + str(move.way))
            return True

        def undo(self, move: Move) -> None:
            self.made.remove(move.unit + str(move.way))

        def peak(self) -> int:
            return 100 + ("h0" in self.made)

    again, offload = Move("g", 0, 6, 1.2), Move("h", 0, 8, 4.0)
    cast, bits = Move("h", 1, 4, 1.0, lossy=True), Move("m", 0, 2, 2.4)
    assert [round(move.price, 6) for move in (again, offload, cast, bits)] == [0.2, 0.5, 1.0, 1.2]
    assert budget.choose([bits, cast, offload, again], 20, 10, Rising()) == [again, cast]


@pytest.mark.parametrize("seed", range(100))
def test_a_smaller_budget_goes_further_and_never_needs_more(seed: int) -> None:
    draw = random.Random(seed)
    moves = [
        Move(f"u{draw.randint(0, 30)}", way, draw.randint(0, 50), draw.random(), draw.random() < 0.5)
        for way in range(draw.randint(1, 60))
    ]
    results = []
    for goal in sorted((draw.randint(0, 900) for _ in range(6)), reverse=True):
        plan = Peaks(seed)
        made = budget.choose(moves, 1000, goal, plan)
        assert plan.made == made
        assert len({move.unit for move in made}) == len(made)
        results.append((made, 1000 - sum(move.saves for move in made), plan.peak()))
    for (more, left, peak), (further, smaller, lower) in pairwise(results):
        assert further[: len(more)] == more
        assert smaller <= left
        assert lower <= peak


def test_what_costs_least_for_a_byte_comes_first_and_precision_counts() -> None:
    moves = [Move("a", 0, 100, 4.0), Move("b", 1, 100, 1.5, lossy=True), Move("c", 2, 100, 3.0)]

    class Flat(Peaks):
        def make(self, move: Move) -> bool:
            self.made.append(move)
            return True

        def peak(self) -> int:
            return 0

    assert [move.unit for move in budget.choose(moves, 300, 0, Flat(0))] == ["c", "a", "b"]
    assert [move.unit for move in budget.choose(moves, 300, 200, Flat(0))] == ["c"]
    assert budget.choose(moves, 300, 300, Flat(0)) == []


def test_bytes_and_fractions() -> None:
    assert Budget.of(100).goal(1000) == 100
    assert Budget.of(0.25).goal(1000) == 250
    assert Budget.of(1.0).goal(1000) == 1000
    assert Options.build({"saved_tensors_budget": 0.5}).packing
    for wrong in (True, "half", -1, 1.5):
        with pytest.raises(OptionsError, match="a fraction"):
            Options.build({"saved_tensors_budget": wrong})


# ---------------------------------------------------------------- graphs

torch.manual_seed(0)
_model = torch.nn.Sequential(*[Block() for _ in range(2)])
_names = [name for name, _ in _model.named_parameters()]
_ARGS = (torch.randn(16, 64, 32), *(parameter.detach() for parameter in _model.parameters()))


def blocks(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    y = torch.func.functional_call(_model, dict(zip(_names, parameters, strict=True)), (x,))
    assert isinstance(y, torch.Tensor)
    return y


def peak_of(made: Partitioned) -> int:
    """The most bytes alive in the forward and the backward, as the graphs that came out would run."""
    from multigraph_backend.saved_tensors import graphs
    from multigraph_backend.saved_tensors.lifetimes import peak

    forward, backward = made.forward[0].graph, made.backward[0].graph
    caller = [node.name for node in forward.find_nodes(op="placeholder")]
    held = [node.name for node in backward.find_nodes(op="placeholder") if node.name in caller]
    return max(peak(graphs.program(forward, caller)), peak(graphs.program(backward, held)))


@pytest.mark.parametrize("rules", [[], [Rule(Match(min_bytes=1024), Scaled("int8"))]], ids=["exact", "int8"])
def test_budgets_of_one_program(rules: list[Rule]) -> None:
    wanted = gradients(blocks, *_ARGS)
    saved, estimated, measured, ways = [], [], [], []
    for fraction in FRACTIONS:
        made = partition(blocks, rules, wanted=Budget.of(fraction))
        got = gradients(made.run, *_ARGS)
        bound = 0.03 if rules else 1e-5
        assert all((one - two).norm() <= bound * two.norm() for one, two in zip(got, wanted, strict=True))
        (said,) = made.accounts
        assert said.failed is None
        assert str(said.budget).startswith(f"budget {fraction} of what is saved")
        results: Any = made.forward[0].graph.output_node().args[0]
        own = {node.name for node in made.forward[0].graph.find_nodes(op="placeholder")}
        values = {node.name: node.meta["val"] for node in results[1:] if node.name not in own}
        saved.append(sum({v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values.values()}.values()))
        if said.packed:
            estimated.append(max(said.forward_peak, said.backward_peak))
        measured.append(peak_of(made))
        ways.append({str(entry.packed) for entry in said.tensors if entry.packed})
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] < 0.8 * saved[0]
    assert estimated == sorted(estimated, reverse=True)
    assert len(estimated) >= 4
    assert max(estimated) <= measured[0]
    assert measured[-1] < measured[0]
    assert ways[0] == set()
    assert "recompute" in ways[-1]
    assert ("int8, scaled per row" in ways[-1]) == bool(rules)


def test_what_is_computed_again_is_computed_in_the_backward_from_what_is_kept() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).sin() @ w).cos()

    made = partition(function, [Rule(Match(op="aten::sin", min_bytes=0), Recompute())])
    args = torch.randn(6, 6), torch.randn(6, 6)
    got, wanted = gradients(made.run, *args), gradients(function, *args)
    assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))
    (said,) = made.accounts
    assert [(entry.name, entry.bytes_saved) for entry in said.tensors if entry.packed] == [("t", 0)]
    assert "sin_unpack_sin = sin(mm)" in text(made.backward[0])
    assert not any(node.name == "sin" for node in made.backward[0].graph.find_nodes(op="placeholder"))


def test_what_is_random_or_leads_nowhere_is_not_computed_again() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand_like(x)).sin().sin()

    made = partition(noisy, everything(Recompute()))
    gradients(made.run, torch.randn(6, 6))
    (said,) = made.accounts
    reasons = [str(entry.reason) for entry in said.tensors]
    assert any("random" in reason or "may give something else" in reason for reason in reasons), reasons


def test_a_keep_is_kept_whatever_the_budget() -> None:
    made = partition(blocks, [Rule(Match(), Keep())], wanted=Budget.of(0.0))
    gradients(made.run, *_ARGS)
    (said,) = made.accounts
    assert said.packed == 0
    assert "nothing more can be done" in str(said.budget)


def test_offload_within_a_budget() -> None:
    with late_stream():
        rule = Rule(Match(min_bytes=4096), multigraph_backend.Offload())
        made = partition(blocks, [rule], wanted=Budget.of(0.1))
        got, wanted = gradients(made.run, *_ARGS), gradients(blocks, *_ARGS)
        assert all((one - two).norm() <= 1e-5 * two.norm() for one, two in zip(got, wanted, strict=True))
        (said,) = made.accounts
        assert {"offload", "recompute"} <= {str(entry.packed) for entry in said.tensors}


def test_compiled_with_a_budget_and_explained() -> None:
    model = torch.nn.Sequential(*[Block() for _ in range(2)])
    x = torch.randn(16, 64, 32)
    run = compiled(model, [], saved_tensors_budget=0.5)
    eager = step(model, model, x)
    got = step(model, run, x)
    for one, two in zip(got, eager, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    said = next(entry for entry in accounts() if entry.budget)
    assert said.packed > 0
    assert said.bytes_saved < said.bytes
    assert "budget 0.5 of what is saved" in str(multigraph_backend.explain())
    assert multigraph_backend.stats()["unpacked_retries"] == 0


@pytest.mark.parametrize(
    "wanted",
    [{"saved_tensors_budget": 1.0}, {"saved_tensors_budget": 0.2}, {"saved_tensors": [Rule(Match(), Recompute())]}],
)
def test_what_is_saved_and_handed_out_is_handed_out(wanted: dict[str, Any]) -> None:
    """An input that is saved is an output, too, and parameters of its shape are lent to the backward."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(4, 16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.tanh(x * self.scale), x.detach(), x

    model = Both()
    run = torch.compile(model, backend="multigraph", options=wanted)
    x = torch.randn(4, 16)
    squashed, detached, same = run(x)
    squashed.sum().backward()
    torch.testing.assert_close(squashed, torch.tanh(x * model.scale))
    torch.testing.assert_close(model.scale.grad, x * (1 - squashed.detach() ** 2))
    assert (same is x, detached.data_ptr()) == (True, x.data_ptr())
    assert torch.equal(detached, x)
    stats = multigraph_backend.stats()
    assert (stats["eager_calls"], stats["failures"]) == (0, 0)


def test_a_budget_of_everything_changes_nothing() -> None:
    model = Mlp()
    assert_step(model, compiled(model, [], saved_tensors_budget=1.0), torch.randn(8, 16), 0.0)
    (said,) = accounts()
    assert said.packed == 0
    assert "are saved" in str(said.budget)


def test_recompute_as_json() -> None:
    assert rule_from_json(rule_to_json(Rule(Match(), Recompute()))) == Rule(Match(), Recompute())


def test_seconds_of_a_matmul_are_its_work_and_of_a_copy_its_memory() -> None:
    made = partition(lambda x, y: (x @ y).sin(), [])
    gradients(made.run, torch.randn(512, 512), torch.randn(512, 512))
    found = costs.seconds_of(made.forward[0].graph)
    machine = costs.MACHINES["cpu"]
    assert found["mm"] == pytest.approx(2 * 512**3 / machine.wide)
    assert found["sin"] == pytest.approx(2 * 4 * 512**2 / machine.bytes_per_second)
