"""A memory goal as the user writes it, the peak of a step from its parts, and what this process holds: no graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from multigraph_backend.options import Options, OptionsError
from multigraph_backend.saved_tensors import account, holding, memory_goal, speeds
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.costs import MACHINES, Machine
from multigraph_backend.saved_tensors.memory_goal import Goal, default_rules
from multigraph_backend.saved_tensors.reckoning import GoalMissed, MemoryPlan, Reckoned, Way, rounded_up
from multigraph_backend.saved_tensors.rules import Keep, Match, Offload, Rule

MIB = 2**20


# ---------------------------------------------------------------- the option


@pytest.mark.parametrize(
    ("written", "bytes_", "fraction"),
    [
        ("30 GiB", 30 << 30, None),
        ("30GB", 30 * 10**9, None),
        ("1.5 gib", 3 << 29, None),
        ("0.3 kB", 300, None),
        ("7 B", 7, None),
        ("2 TiB", 2 << 40, None),
        (0, 0, None),
        (1, 1, None),
        (0.9, None, 0.9),
        (0.0, None, 0.0),
        (1.0, None, 1.0),
    ],
)
def test_bytes_units_and_fractions(written: object, bytes_: int | None, fraction: float | None) -> None:
    assert Goal.of(written) == Goal(bytes_, fraction)
    assert Goal.of({"peak": written}) == Goal(bytes_, fraction)
    wanted = Goal.of(written).wanted(1000)
    assert wanted == (bytes_ if fraction is None else int(1000 * fraction))


def test_what_cannot_be_seen_is_said_beside_it() -> None:
    goal = Goal.of({"peak": "1 GiB", "optimizer": 8, "calls": 12, "gradients_in_forward": False})
    assert goal == Goal(bytes=1 << 30, optimizer=8, calls=12, gradients_in_forward=False)
    assert Goal.of({"peak": None}).wanted(1000) is None


WRONG: dict[str, tuple[object, str]] = {
    "no unit": ("30", r"text with a unit.*; write 30$"),
    "half a unit": ("30 G", r"text with a unit.*; write 30000000000$"),
    "another unit": ("30 apples", "text with a unit"),
    "a percentage": ("80%", "write 0.8"),
    "a flag": (True, "text with a unit"),
    "negative": (-1, "0 or more"),
    "above the device": (1.5, "whole numbers are bytes"),
    "not a number": (float("nan"), "from 0.0 to 1.0"),
    "a list": ([1], "text with a unit"),
    "no peak": ({"optimizer": 8}, 'a goal as a dict has a "peak"; None stands for as little time as possible'),
    "an unknown key": ({"peek": 1}, r"no 'peek' \(did you mean 'peak'\?\); it has peak, optimizer, calls"),
    "no calls": ({"calls": 0}, "from 1 on"),
    "calls as text": ({"calls": "2"}, "from 1 on"),
    "an optimizer by name": ({"optimizer": "adam"}, "8 for Adam"),
    "a negative optimizer": ({"optimizer": -8}, "8 for Adam"),
    "gradients": ({"gradients_in_forward": 1}, "True or False"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_goals_are_errors_that_say_what_to_write(wrong: str) -> None:
    value, said = WRONG[wrong]
    with pytest.raises(OptionsError, match=said):
        Options.build({"memory_goal": value})


def test_options_of_a_goal() -> None:
    rule = Rule(Match(), Keep())
    assert Options.build({"saved_tensors": "auto"}).memory_goal == Goal(auto=True)
    assert Options.build({"saved_tensors": "auto", "memory_goal": 5}).memory_goal == Goal(bytes=5, auto=True)
    assert Options.build({"memory_goal": 5}).memory_goal == Goal(bytes=5, auto=True)
    named = Options.build({"memory_goal": 5, "saved_tensors": [rule]})
    assert (named.memory_goal, named.saved_tensors) == (Goal(bytes=5), (rule,))
    assert Options.build({"memory_goal": None}) == Options.build({})
    assert Options.build({"memory_goal": 5}).packing
    assert not Options.build({"memory_goal": 5}).without_packs().packing
    assert hash(named) != hash(Options.build({"memory_goal": 6, "saved_tensors": [rule]}))
    with pytest.raises(OptionsError, match=r'"auto" \(did you mean \'auto\'\?\)'):
        Options.build({"saved_tensors": "atuo"})
    with pytest.raises(OptionsError, match="did you mean 'memory_goal'"):
        Options.build({"memory_gaol": 5})
    for other in ({"memory_goal": 5}, {"saved_tensors": "auto"}):
        with pytest.raises(OptionsError, match="leave one of them out"):
            Options.build({**other, "saved_tensors_budget": 0.5})
    with pytest.raises(OptionsError, match="only Inductor has it"):
        Options.build({"memory_goal": 5, "compiler": "aot_eager"})


def test_the_same_in_json() -> None:
    environ = {"MULTIGRAPH_OPTIONS": json.dumps({"*": {"saved_tensors": "auto", "memory_goal": "30 GiB"}})}
    assert Options.build(environ=environ) == Options.build({"saved_tensors": "auto", "memory_goal": "30 GiB"})
    environ = {"MULTIGRAPH_OPTIONS": json.dumps({"*": {"memory_goal": {"peak": 0.5, "calls": -1}}})}
    with pytest.raises(OptionsError, match=r"from 1 on.*MULTIGRAPH_OPTIONS"):
        Options.build(environ=environ)


def test_default_rules_offload_on_a_gpu_alone_and_round_nothing_without_a_goal() -> None:
    assert default_rules("cuda", goal=False) == ()
    assert [str(rule.pack) for rule in default_rules("cpu")] == ["bits", "int8, scaled per block of 64"]
    assert default_rules("cuda")[:2] == default_rules("cpu")
    assert isinstance(default_rules("cuda")[2].pack, Offload)


# ---------------------------------------------------------------- the peak of a step


def reckoned(**rest: Any) -> Reckoned:
    return Reckoned(rest.pop("goal", None), MACHINES["cpu"], **rest)


def test_the_example_that_opens_the_module() -> None:
    parts = {"held": 100, "optimizer": 80, "gradients": 40}
    assert reckoned(**parts).whole(90, 110, 0) == 310
    assert reckoned(**parts, gradients_in_forward=False).whole(90, 110, 0) == 290
    assert reckoned(**parts, elsewhere=7).whole(90, 110, 0) == 317
    assert reckoned(**parts, calls=3).whole(90, 110, 50) == 410


@pytest.mark.parametrize("count", [0, 1, 2, 3, 127, 128, 129, 1000, 12345, 10**9 + 7, 3 * 2**40 + 1])
def test_rounded_figures_are_no_smaller_and_next_to_the_same(count: int) -> None:
    assert count <= rounded_up(count) <= count + count // 64
    assert rounded_up(rounded_up(count)) == rounded_up(count)


def test_rows_that_fit_grow_with_all_but_what_no_batch_changes() -> None:
    one = reckoned(goal=200, held=60, optimizer=20, gradients=10)  # 10 of what is held is given: 80 are constant
    assert one.rows_that_fit(320, given=10, rows=8) == 4
    assert one.rows_that_fit(200, given=10, rows=8) == 8
    assert reckoned(goal=79, held=60, optimizer=20, gradients=10).rows_that_fit(320, 10, 8) == 0
    assert reckoned(goal=0).rows_that_fit(1, 0, 1) == 0
    assert reckoned(goal=0).rows_that_fit(0, 0, 5) == 5
    assert reckoned().rows_that_fit(10**12, 0, 5) == 5


# ---------------------------------------------------------------- what is said


def planned(**rest: Any) -> MemoryPlan:
    parts = {"goal": 100 * MIB, "held": 20 * MIB, "optimizer": 10 * MIB, "optimizer_by": "AdamW's, to come"}
    parts |= {"gradients": 5 * MIB, "elsewhere": 0, "calls": 1, "peak_without": 150 * MIB, "peak": 90 * MIB}
    return MemoryPlan(**{**parts, "saved_without": 80 * MIB, "saved": 20 * MIB, **rest})  # type: ignore[arg-type]


def test_a_plan_as_text() -> None:
    way = Way("recompute", 3, 60 * MIB, 0, 0.0021, "none but the compiler's rounding")
    other = Way("offload", 1, 2 * MIB, 0, 0.0, "none")
    assert "\n".join(planned(ways=(way, other)).lines()) == (
        "memory goal: 100.00 MiB; held 20.00 MiB, gradients 5.00 MiB, optimizer 10.00 MiB (AdamW's, to come)\n"
        "  estimated peak of the step 150.00 MiB -> 90.00 MiB; saved 80.00 MiB -> 20.00 MiB: it fits, for about "
        "2.10 ms a step\n"
        "  recompute: 3 tensors, 60.00 MiB -> 0 bytes, about 2.10 ms a step, error none but the compiler's rounding\n"
        "  offload: 1 tensor, 2.00 MiB -> 0 bytes, about 0.00 ms a step, error none"
    )
    assert "2 calls at one time" in "\n".join(planned(calls=2).lines())
    assert "as little time as possible" in planned(goal=None).lines()[0]


def test_a_goal_that_is_missed_says_by_how_much_and_what_to_do() -> None:
    assert planned().complaint() is None
    assert planned(goal=None, peak=10**15).complaint() is None
    missed = planned(peak=110 * MIB, rows=32, fit=28)
    assert missed.missed == 10 * MIB
    said = str(missed.complaint())
    assert "missed by 10.00 MiB" in said
    assert "about 28 of the 32 rows of the batch would fit" in said
    assert "Offload()" in said
    assert "checkpoint" in said
    assert "Offload()" not in str(planned(peak=110 * MIB, offloads=True).complaint())
    assert "no smaller batch would fit: 35.00 MiB" in str(planned(peak=110 * MIB, rows=32, fit=0).complaint())
    account.refuse_missed([SavedTensors((), memory=planned()), SavedTensors(())])
    with pytest.raises(GoalMissed, match="missed by"):
        account.refuse_missed([SavedTensors((), memory=missed)])
    with pytest.raises(GoalMissed, match="nothing is packed for the memory goal: it broke"):
        account.refuse_missed([SavedTensors((), failed="it broke")])


# ---------------------------------------------------------------- what this process holds


@pytest.fixture
def fixed_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "of", lambda device: (MACHINES["cpu"], 0.0))


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "Adam": (lambda ps: torch.optim.Adam(ps), 2),
    "AdamW, amsgrad": (lambda ps: torch.optim.AdamW(ps, amsgrad=True), 3),
    "SGD": (lambda ps: torch.optim.SGD(ps), 0),
    "SGD, momentum": (lambda ps: torch.optim.SGD(ps, momentum=0.9), 1),
    "RMSprop": (lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True), 3),
    "NAdam": (lambda ps: torch.optim.NAdam(ps), 2),
    "RAdam": (lambda ps: torch.optim.RAdam(ps), 2),
    "Adamax": (lambda ps: torch.optim.Adamax(ps), 2),
    "Adadelta": (lambda ps: torch.optim.Adadelta(ps), 2),
    "Rprop": (lambda ps: torch.optim.Rprop(ps), 2),
    "ASGD": (lambda ps: torch.optim.ASGD(ps), 1),
    "LBFGS": (lambda ps: torch.optim.LBFGS(ps, history_size=3), 8),
}


@pytest.mark.usefixtures("fixed_speeds")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_that_an_optimizer_will_have_is_the_state_it_then_has(kind: str) -> None:
    make, tensors = OPTIMIZERS[kind]
    model = torch.nn.Linear(64, 64)
    parameters = list(model.parameters())
    size = sum(entry.numel() * entry.element_size() for entry in parameters)
    optimizer = make(parameters)
    if kind == "LBFGS":  # it calls for the loss after it has begun to count
        optimizer.state[parameters[0]].update(func_evals=0, n_iter=0)
    before = holding.reckon(Goal(), [torch.randn(4, 64), *parameters])
    assert before.optimizer == rounded_up(tensors * size)
    assert "to come" in before.optimizer_by

    def loss() -> float:
        optimizer.zero_grad()
        value = model(torch.randn(4, 64)).square().sum()
        value.backward()
        return float(value.detach())

    for _ in range(1 + 3 * (kind == "LBFGS")):  # which fills its history as it goes
        loss()
        optimizer.step(loss if kind == "LBFGS" else None)
    after = holding.reckon(Goal(), [torch.randn(4, 64), *parameters])
    assert after.optimizer == pytest.approx(before.optimizer, rel=0.02, abs=64)  # beside tensors that count steps
    if tensors:
        assert after.optimizer_by.endswith("which has its state")


@pytest.mark.usefixtures("fixed_speeds")
def test_an_optimizer_that_is_not_there_is_assumed_or_said_and_others_are_not_taken() -> None:
    model, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    stranger = torch.optim.SGD(other.parameters())
    parameters = list(model.parameters())
    size = sum(entry.numel() * 4 for entry in parameters)
    found = holding.reckon(Goal(), parameters)
    assert (found.optimizer, found.optimizer_by) == (rounded_up(2 * size), "none is found; as Adam's")
    said = holding.reckon(Goal(optimizer=1.5), parameters)
    assert (said.optimizer, said.optimizer_by) == (rounded_up(size * 3 // 8), "1.5 bytes a number")
    assert found.gradients == rounded_up(size)
    assert found.elsewhere == 0
    del stranger


@pytest.mark.usefixtures("fixed_speeds")
def test_of_several_optimizers_each_counts_but_not_for_the_same_parameter() -> None:
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)
    parameters = [*first.parameters(), *second.parameters()]
    mine = torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), momentum=0.9)
    found = holding.reckon(Goal(), parameters)
    sizes = [sum(entry.numel() * 4 for entry in layer.parameters()) for layer in (first, second)]
    assert found.optimizer == rounded_up(2 * sizes[0] + sizes[1])
    assert found.optimizer_by == "AdamW's, to come; SGD's, to come"
    again = torch.optim.Adagrad(parameters)  # takes the place of both
    found = holding.reckon(Goal(), parameters)
    assert (found.optimizer, found.optimizer_by) == (rounded_up(sum(sizes)), "Adagrad, which has its state")
    del mine, again


@pytest.mark.usefixtures("fixed_speeds")
def test_parameters_of_other_graphs_count_where_the_optimizer_has_them() -> None:
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    found = holding.reckon(Goal(), list(first.parameters()))
    size = 4 * (64 * 64 + 64)
    assert (found.gradients, found.elsewhere, found.optimizer) == tuple(map(rounded_up, (size, size, 4 * size)))
    frozen = next(iter(second.parameters())).requires_grad_(False)
    assert holding.reckon(Goal(), list(first.parameters())).elsewhere == rounded_up(4 * 64)
    del optimizer, frozen


@pytest.mark.usefixtures("fixed_speeds")
@pytest.mark.parametrize(
    "args", [[], [3, None], [torch.empty(0)], [torch.ones(())], [torch.ones(2, dtype=torch.int32)]]
)
def test_nothing_to_train_is_nothing_to_come(args: list[object]) -> None:
    found = holding.reckon(Goal(fraction=0.5), args)
    assert (found.gradients, found.elsewhere, found.optimizer, found.held) == (0, 0, 0, None)
    assert found.goal == holding.memory(torch.device("cpu")) // 2


# ---------------------------------------------------------------- measured speeds


def test_measured_figures_are_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    monkeypatch.setenv("MULTIGRAPH_MANIFESTS", str(folder))
    measured = []

    def measure(device: torch.device) -> tuple[float, float, float, float]:
        measured.append(device)
        return (4e9, 1e10, 1e10, 0.0)

    monkeypatch.setattr(speeds, "_measured", measure)

    def asked() -> tuple[Machine, float]:
        speeds._known.cache_clear()  # as another process
        return speeds.of(torch.device("cpu"))

    first = asked()
    (path,) = folder.iterdir()
    assert json.loads(path.read_text()) == [4e9, 1e10, 1e10, 0.0]
    assert first == asked() == (Machine(4e9, 1e10, 1e10), 0.0)
    assert len(measured) == 1
    for spoiled in ("[1]", "", "[0, 1, 1, 1]", '{"a": 1}'):
        path.write_text(spoiled)
        assert asked() == first
    assert len(measured) == 5
    speeds._known.cache_clear()


def test_what_cannot_be_measured_is_the_round_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_MANIFESTS", "")

    def fails(device: torch.device) -> tuple[float, float, float, float]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(speeds, "_measured", fails)
    speeds._known.cache_clear()
    assert speeds.of(torch.device("cpu")) == (MACHINES["cpu"], 0.0)
    speeds._known.cache_clear()


def test_a_real_measurement_is_two_steps_to_a_factor_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_MANIFESTS", "")
    monkeypatch.setattr(speeds, "_COPIED", 1 << 20)
    monkeypatch.setitem(speeds._ROWS, "cpu", 64)  # type: ignore[arg-type]
    state = torch.get_rng_state()
    speeds._known.cache_clear()
    machine, link = speeds.of(torch.device("cpu"))
    speeds._known.cache_clear()
    assert torch.equal(torch.get_rng_state(), state)
    assert link == 0.0
    for speed in (machine.bytes_per_second, machine.narrow, machine.wide):
        assert speed == speeds.rounded(speed)
        assert 1e6 < speed < 1e15
    assert [speeds.rounded(x) for x in (1e9, 1.1e9, 1.25e9)] == [2.0**30] * 3
    assert memory_goal.size(1) == "1 byte"


@pytest.mark.usefixtures("fixed_speeds")
def test_where_the_device_counts_what_is_there_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: allocated bytes have gradients and state of the optimizer in them, once these are there."""
    monkeypatch.setattr(holding, "allocated", lambda device: 12345)
    model = torch.nn.Linear(64, 64)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    size = 4 * (64 * 64 + 64)
    before = holding.reckon(Goal(), parameters)
    assert before.held == rounded_up(12345)
    assert (before.gradients, before.optimizer) == (rounded_up(size), rounded_up(2 * size))
    model(torch.randn(4, 64)).sum().backward()
    assert holding.reckon(Goal(), parameters).gradients == 0
    optimizer.step()
    after = holding.reckon(Goal(), parameters)
    assert (after.optimizer, after.optimizer_by) == (0, "AdamW, which has its state")
    assert holding.reckon(Goal(optimizer=8), parameters).optimizer == 0
