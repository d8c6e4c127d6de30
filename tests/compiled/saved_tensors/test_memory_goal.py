"""A memory goal in graphs: a smaller one never needs more, what fits is untouched, what is done is right, and what
cannot be met is said before the first step."""

from __future__ import annotations

import itertools
import logging
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import multigraph_backend
from multigraph_backend import Bits, Cast, Keep, Match, Offload, Recompute, Rule, Scaled
from multigraph_backend.capture import from_dynamo
from multigraph_backend.region.region import VariantFailed
from multigraph_backend.saved_tensors import budget, costs, graphs, within_goal
from multigraph_backend.saved_tensors.budget import Move
from multigraph_backend.saved_tensors.lifetimes import live_bytes
from multigraph_backend.saved_tensors.memory_goal import default_rules, size
from multigraph_backend.saved_tensors.partitioner import PackingPartitioner
from multigraph_backend.saved_tensors.reckoning import MemoryPlan, Reckoned
from tests.support.no_code import no_code
from tests.support.saved_tensors.late_stream import late_stream
from tests.support.saved_tensors.models import Block, Mlp, accounts, assert_step, step
from tests.support.saved_tensors.partitioned import gradients, partition

MIB = 2**20

torch.manual_seed(0)
_model = torch.nn.Sequential(*[Block(64, 4) for _ in range(2)])
_names = [name for name, _ in _model.named_parameters()]


def blocks(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    y = torch.func.functional_call(_model, dict(zip(_names, parameters, strict=True)), (x,))
    assert isinstance(y, torch.Tensor)
    return y


def arguments(batch: int = 16) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 64, 64), *(parameter.detach() for parameter in _model.parameters()))


def planned(
    function: Callable[..., Any],
    args: Sequence[torch.Tensor],
    goal: int | None,
    rules: Sequence[Rule] = default_rules("cpu"),
    **rest: Any,
) -> tuple[MemoryPlan, tuple[torch.Tensor, ...]]:
    """What a goal comes to, and the gradients of the graphs that came out."""
    wanted = Reckoned(goal, costs.MACHINES["cpu"], **rest)
    made = partition(function, rules, wanted=wanted)
    got = gradients(made.run, *args)
    (said,) = made.accounts
    assert said.failed is None
    assert said.memory is not None
    assert bool(said.memory.ways) == bool(said.packed)
    return said.memory, got


def within(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], bound: float) -> bool:
    return all((one - two).norm() <= bound * two.norm() for one, two in zip(got, wanted, strict=True))


# ---------------------------------------------------------------- plans


def test_a_smaller_goal_never_needs_more_and_is_right() -> None:
    args = arguments()
    wanted = gradients(blocks, *args)
    peaks, ways = [], []
    goals = (1 << 40, 6 * MIB, 5 * MIB, 4 * MIB, 3 * MIB, MIB, 1, 0)
    for goal in goals:
        found, got = planned(blocks, args, goal)
        rounding = any("254" in way.error for way in found.ways)
        assert within(got, wanted, 0.03 if rounding else 1e-5)
        assert found.peak <= found.peak_without
        assert found.saved <= found.saved_without
        assert (found.missed == 0) == (found.peak <= goal)
        assert found.saved == found.saved_without - sum(way.bytes - way.bytes_saved for way in found.ways)
        peaks.append(found.peak)
        ways.append({way.name for way in found.ways})
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.75 * peaks[0]
    assert ways[0] == set()
    assert any("recompute" in entry for entry in ways)
    assert any("int8, scaled per block of 64" in entry for entry in ways)
    assert len(set(peaks)) >= 3


def test_what_one_kernel_computes_and_reads_takes_no_memory() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.sin() + y  # y and its sine are read within the kernel that makes z
        return (z @ w) * x.cos()  # the cosine is read within that of the product

    with FakeTensorMode():
        x = torch.empty(8, 8)
        graph = make_fx(function)(x, torch.empty(8, 8)).graph
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert names == ["mul", "sin", "add", "mm", "cos", "mul_1"]
    caller = [node.name for node in graph.find_nodes(op="placeholder")]
    assert live_bytes(graphs.program(graph, caller)) == (256, 512, 768, 512, 512, 768, 256)
    fused = graphs.program(graph, caller, fused=True)
    assert live_bytes(fused) == (0, 0, 256, 512, 256, 512, 256)
    assert [step.reads for step in fused.steps if step.name == "add"] == [frozenset({"x_1"})]


def test_what_an_attention_reads_is_rounded_last() -> None:
    args = arguments()
    untouched = partition(blocks, [])
    gradients(untouched.run, *args)
    backwards = [node for node in untouched.backward[0].graph.nodes if "attention" in str(node.target)]
    into_attention = {entry.name for node in backwards for entry in node.all_input_nodes}
    goal = planned(blocks, args, 0)[0].peak_without
    rounded: list[set[str]] = []
    while True:
        made = partition(blocks, default_rules("cpu"), wanted=Reckoned(goal, costs.MACHINES["cpu"]))
        gradients(made.run, *args)
        (said,) = made.accounts
        names = {entry.name for entry in said.tensors if entry.packed and "int8" in entry.packed}
        rounded.append({"attention" if name in into_attention else "other" for name in names})
        assert said.memory is not None
        if said.memory.missed:
            break
        goal = said.memory.peak - 1
    assert rounded[0] == set()
    assert rounded[-1] == {"attention", "other"}
    assert all("other" in kinds for kinds in rounded if kinds)


def test_what_is_to_come_last_comes_behind_what_costs_more() -> None:
    class Made:
        def make(self, move: Move) -> bool:
            return True

        def undo(self, move: Move) -> None:
            raise AssertionError

        def peak(self) -> int:
            return 0

    moves = [Move("a", 0, 10, 1.0, lossy=True, last=True), Move("b", 1, 10, 9.0, lossy=True), Move("c", 2, 5, 9.0)]
    for goal, made in ((25, ""), (20, "c"), (19, "cb"), (10, "cb"), (9, "cba")):
        assert "".join(move.unit for move in budget.choose(moves, 25, goal, Made())) == made


def test_what_fits_is_left_as_it_is() -> None:
    args = arguments(4)
    found, got = planned(blocks, args, 1 << 40)
    untouched = partition(blocks, [])
    assert all(torch.equal(one, two) for one, two in zip(got, gradients(untouched.run, *args), strict=True))
    assert found.ways == ()
    assert found.peak == found.peak_without


def test_without_a_goal_only_what_costs_nothing_is_done() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().mul(x).exp().tanh()  # pointwise: the backward reads x anyway

    x = torch.randn(64, 1024)
    found, got = planned(function, [x], None)
    assert within(got, gradients(function, x), 1e-5)
    assert found.seconds == 0
    assert all(way.name == "recompute" for way in found.ways)
    found, _ = planned(blocks, arguments(4), None)
    assert found.seconds == 0
    assert {way.name for way in found.ways} <= {"recompute"}


def test_what_costs_nothing_is_computed_by_those_who_read_it() -> None:
    """Both are saved by a partitioner that saves all: y follows from x, which its readers read anyway."""
    from functorch.compile import aot_function, default_partition, make_boxed_func

    from multigraph_backend.saved_tensors import account
    from multigraph_backend.saved_tensors.graphs import Partition
    from multigraph_backend.saved_tensors.partitioner import pack_saved_tensors

    def run(function: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...]]:
        found = []

        def parts(gm: torch.fx.GraphModule, joint_inputs: Sequence[Any], **settings: Any) -> Any:
            forward, backward = default_partition(gm, joint_inputs, **settings)
            with account.collecting() as said:
                graphs = Partition(forward, backward, settings["num_fwd_outputs"], ())
                graphs = pack_saved_tensors(graphs, [], Reckoned(None, costs.MACHINES["cpu"]))
            found.extend(said)
            return graphs.forward, graphs.backward

        compiler = lambda gm, inputs: make_boxed_func(gm.forward)  # noqa: E731
        made = aot_function(function, compiler, compiler, partition_fn=parts)
        return found, gradients(made, x)

    def free(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin().sin()

    def not_free(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ x.cos()).sin()

    x = torch.randn(256, 256)
    (said,), got = run(free, x)
    assert all(torch.equal(one, two) for one, two in zip(got, gradients(free, x), strict=True))
    assert [way.name for way in said.memory.ways] == ["recompute"]
    assert said.memory.seconds == 0
    assert said.memory.saved < said.memory.saved_without
    (said,), got = run(not_free, x)
    assert within(got, gradients(not_free, x), 1e-5)
    assert said.memory.ways == ()
    assert all(entry.reason == "it would take time" for entry in said.tensors if "input" not in str(entry.reason))


def test_what_is_beside_the_graph_counts() -> None:
    args = arguments(4)
    plain = planned(blocks, args, None)[0].peak_without
    for beside in ({"optimizer": 5}, {"elsewhere": 11}):
        assert planned(blocks, args, None, **beside)[0].peak_without == plain + sum(beside.values())
    many = {"gradients": 1 << 30}  # those of the step before, in the forward; the backward makes its own
    assert planned(blocks, args, None, **many)[0].peak_without > plain + (1 << 29)
    assert planned(blocks, args, None, **many, gradients_in_forward=False)[0].peak_without == plain
    given = sum(arg.numel() * 4 for arg in args)
    assert planned(blocks, args, None, held=13)[0].peak_without == plain - given + 13
    twice = planned(blocks, args, None, calls=2)[0]
    assert twice.peak_without == plain + twice.saved_without
    assert planned(blocks, args, plain, calls=2)[0].peak <= plain


SMALL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": lambda x: x.sin().exp(),
    "sum": lambda x: (x * x).sum(),
    "nothing is saved": lambda x: x + 1,
    "mean": lambda x: x.tanh().mean(),
}


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (0, 2), (1, 1), (2, 2), (2, 0, 1)])
@pytest.mark.parametrize("kind", SMALL)
def test_goals_from_the_edges_of_small_graphs(kind: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    wanted = gradients(SMALL[kind], x)
    rules = [Rule(Match(min_bytes=0), Scaled("int8", per="row")), Rule(Match(min_bytes=0), Cast("bfloat16"))]
    last = math.inf
    for goal in (1 << 50, 64, 8, 1, 0, None):
        found, got = planned(SMALL[kind], [x], goal, rules)
        for one, two in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=0.05, atol=0.05, equal_nan=True)
        if goal is not None:
            assert found.peak <= last
            last = found.peak
        assert found.fit <= found.rows
        assert found.lines()


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 40))])
def test_random_goals_of_random_programs(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([8, 64, 96])
    steps = [draw.choice(["sin", "mm", "add", "tanh", "mask", "norm"]) for _ in range(draw.randint(2, 8))]

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x
        for kind in steps:
            if kind == "mm":
                y = y @ w
            elif kind == "add":
                y = y + x
            elif kind == "mask":
                y = torch.where(y > 0, y, 0.1 * y)
            elif kind == "norm":
                y = torch.nn.functional.layer_norm(y, (size,))
            else:
                y = getattr(y, kind)()
        return y

    torch.manual_seed(seed)
    args = [torch.randn(size, size), torch.randn(size, size) / size**0.5]
    wanted = gradients(program, *args)
    rules = [Rule(Match(dtype="bool", min_bytes=0), Bits()), Rule(Match(min_bytes=0), Scaled("int8", per=8))]
    beside = {"calls": draw.randint(1, 3), "gradients": draw.randint(0, 9999), "optimizer": draw.randint(0, 9999)}
    top = planned(program, args, None, rules, **beside)[0].peak_without
    last = math.inf
    for goal in sorted({draw.randint(0, top) for _ in range(3)} | {0, 1, top}, reverse=True):
        found, got = planned(program, args, goal, rules, **beside)
        assert within(got, wanted, 0.2)
        assert found.peak <= last
        assert found.ways == () or goal < top
        last = found.peak


def test_offload_for_a_goal() -> None:
    args = arguments(8)
    rules = [Rule(Match(op="*norm*"), Keep()), Rule(Match(min_bytes=4096), Offload())]
    with late_stream():
        wanted = Reckoned(0, costs.MACHINES["cpu"], link=1e9)
        made = partition(blocks, rules, wanted=wanted)
        got = gradients(made.run, *args)
    (said,) = made.accounts
    assert within(got, gradients(blocks, *args), 1e-5)
    assert said.memory is not None
    (way,) = [way for way in said.memory.ways if way.name == "offload"]
    assert (way.error, way.bytes_saved) == ("none", 0)
    assert way.seconds > 0


def test_keys_of_caches_tell_goals_prices_and_processes_apart() -> None:
    class Inner:
        def uuid(self) -> str:
            return "inner"

    one = Reckoned(10 * MIB, costs.MACHINES["cpu"], held=5, optimizer=6, optimizer_by="x", gradients=7)
    others = [
        replace(one, goal=11 * MIB),
        replace(one, goal=None),
        replace(one, held=6),
        replace(one, optimizer=7),
        replace(one, gradients=8),
        replace(one, elsewhere=1),
        replace(one, calls=2),
        replace(one, gradients_in_forward=False),
        replace(one, link=1.0),
        replace(one, machine=replace(one.machine, wide=2e11)),
        None,
    ]
    keys = [PackingPartitioner(Inner(), [], wanted).uuid() for wanted in (one, *others)]
    assert len(set(map(repr, keys))) == len(keys)
    assert PackingPartitioner(Inner(), [], replace(one)).uuid() == keys[0]


def test_errors_by_kind_of_pack() -> None:
    assert within_goal._error(Scaled("int8")) == "1/254 of the largest in its row"
    assert within_goal._error(Scaled("int8", per=64)) == "1/254 of the largest in its block"
    assert within_goal._error(Scaled("int4", per=64)) == "1/14 of the largest in its block"
    assert within_goal._error(Offload(Scaled("int4", per=64))) == "1/14 of the largest in its block"
    assert within_goal._error(Scaled("float8_e4m3fn")) == "2^-4 of its value"
    assert within_goal._error(Cast("bfloat16")) == "2^-8 of its value"
    assert within_goal._error(Recompute()) == "none but the compiler's rounding"
    assert within_goal._error(Bits()) == within_goal._error(Offload()) == "none"
    assert within_goal._error(Keep()) == "that of the pack"


# ---------------------------------------------------------------- compiled


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    result: Callable[..., Any] = torch.compile(model, backend="multigraph", options=options)
    return result


def memory_plans() -> list[MemoryPlan]:
    return [entry.memory for entry in accounts() if entry.memory is not None]


def test_a_compiled_step_within_a_goal_and_explained() -> None:
    model = torch.nn.Sequential(*[Block(64, 4) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 64, 64)
    with no_code():
        step(model, compiled(model, memory_goal=0), x)
        (most,) = memory_plans()  # all that can be done
    torch._dynamo.reset()
    run = compiled(model, saved_tensors="auto", memory_goal=most.peak)
    assert_step(model, run, x, 0.03)
    (found,) = memory_plans()
    assert found.goal is not None
    assert found.peak <= found.goal < found.peak_without
    assert found.optimizer_by == "AdamW's, to come"
    assert {"recompute", "int8, scaled per block of 64"} >= {way.name for way in found.ways} != set()
    text = str(multigraph_backend.explain())
    assert f"memory goal: {size(found.goal)}" in text
    assert "decides about nothing" not in text
    assert all(str(way) in text for way in found.ways)
    assert multigraph_backend.explain().to_dict()["regions"][0]["generic"]["saved"][0]["memory"]["goal"] == found.goal
    assert multigraph_backend.stats()["unpacked_retries"] == 0
    del optimizer


@pytest.mark.parametrize("options", [{"memory_goal": "1 TiB"}, {"memory_goal": 1.0}], ids=["bytes", "fraction"])
def test_a_goal_that_needs_nothing_gives_bitwise_the_unpacked_gradients(options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(Block(), Mlp(32))
    x = torch.randn(4, 16, 32)
    plain = step(model, compiled(model), x)
    torch._dynamo.reset()
    got = step(model, compiled(model, **options), x)
    assert all(torch.equal(one, two) for one, two in zip(got, plain, strict=True))
    (found,) = memory_plans()
    assert found.ways == ()


@pytest.mark.usefixtures("by_operator")
def test_a_goal_that_cannot_be_met_is_said_once_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    model, rows = Mlp(64), 4096
    said_at_the_call: list[str] = []

    class Watching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y

    watching = Watching()
    run = compiled(watching, memory_goal=4 * MIB)
    with caplog.at_level(logging.WARNING, "multigraph_backend"):
        for _ in range(2):
            out = run(torch.randn(rows, 64))
            said_at_the_call.append(caplog.text)  # before the backward
            out.sum().backward()
    assert caplog.text.count("the memory goal of 4.00 MiB is missed by") == 1
    assert said_at_the_call[0].count("the memory goal") == 1
    fit = re.search(r"about (\d+) of the 4096 rows of the batch would fit", caplog.text)
    assert fit is not None
    # and so it does
    torch._dynamo.reset()
    fewer = compiled(watching, memory_goal=4 * MIB, on_failure="raise")
    fewer(torch.randn(int(fit[1]) - 64, 64)).sum().backward()
    (found,) = memory_plans()
    assert not found.missed


@pytest.mark.usefixtures("by_operator")
def test_on_failure_raise_names_the_remedy_before_anything_runs() -> None:
    model = Mlp(64)
    run = compiled(model, memory_goal=1, on_failure="raise")
    with pytest.raises(VariantFailed, match=r"memory goal of 1 byte is missed by .* no smaller batch would fit"):
        run(torch.randn(512, 64))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("by_operator")
def test_several_graphs_share_one_goal_and_inference_has_none() -> None:
    first, second = Mlp(64), Mlp(64)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], momentum=0.9)

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        out: torch.Tensor = second(y)
        return out

    run = compiled(broken, memory_goal="1 GiB")
    run(torch.randn(512, 64)).sum().backward()
    found = memory_plans()
    assert len(found) == 2
    of_one = sum(parameter.numel() * 4 for parameter in first.parameters())
    for entry in found:
        assert entry.elsewhere == pytest.approx(of_one, rel=0.02)
        assert entry.optimizer == pytest.approx(2 * of_one, rel=0.02)
    with torch.no_grad():
        run(torch.randn(512, 64))
    assert len(memory_plans()) == 2
    del optimizer


@pytest.mark.usefixtures("by_operator")
def test_variants_have_a_plan_each() -> None:
    model = Mlp(64)
    inputs = [torch.randn(rows, 64) for rows in (2048, 256)]

    def plans(**options: Any) -> list[MemoryPlan]:
        torch._dynamo.reset()
        given = {"specialize": [{"x[0]": 2048}], **options}
        run: Any = torch.compile(model, backend="multigraph", dynamic=True, options=given)
        for x in inputs:
            assert within(step(model, run, x), step(model, model, x), 0.03)
        return memory_plans()

    large, small = plans(memory_goal=0)
    goal = large.peak
    assert goal > small.peak_without
    large, small = plans(memory_goal=goal)
    assert large.ways != ()
    assert small.ways == ()
    assert max(large.peak, small.peak) <= goal < large.peak_without


def test_a_second_compile_finds_the_code_and_the_plan_for_the_same_goal_alone() -> None:
    model, x = Mlp(64), torch.randn(1024, 64)
    counts = torch._dynamo.utils.counters["aot_autograd"]
    hits, one = [], random.SystemRandom().randrange(MIB, 2 * MIB)  # what earlier runs have left is for others
    for goal in (one, one, one + 1):
        torch._dynamo.reset()
        before = counts["autograd_cache_hit"]
        compiled(model, memory_goal=goal)(x).sum().backward()
        hits.append(counts["autograd_cache_hit"] - before)
        (found,) = memory_plans()
        assert found.goal == goal
    assert hits == [0, 1, 0]


@pytest.mark.usefixtures("by_operator")
def test_user_rules_say_what_may_be_done() -> None:
    model = torch.nn.Sequential(Block(64, 4))
    run = compiled(model, saved_tensors=[Rule(Match(), Keep())], memory_goal=1)
    assert_step(model, run, torch.randn(4, 64, 64), 0.0)
    (found,) = memory_plans()
    assert found.ways == ()
    assert found.missed


@pytest.mark.usefixtures("by_operator")
@pytest.mark.parametrize("pair", list(itertools.pairwise((1.0, 0.5))))
def test_fractions_are_of_this_machine(pair: tuple[float, float]) -> None:
    from multigraph_backend.saved_tensors import holding

    model = Mlp()
    memory = holding.memory(torch.device("cpu"))
    for fraction in pair:
        torch._dynamo.reset()
        compiled(model, memory_goal=fraction)(torch.randn(4, 16)).sum().backward()
        (found,) = memory_plans()
        assert found.goal == int(memory * fraction)


@pytest.mark.usefixtures("by_operator")
def test_a_graph_that_is_compiled_at_once_has_a_goal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise from_dynamo.CannotCapture("the graph was split")

    monkeypatch.setattr(from_dynamo, "capture", refuse)
    model = Mlp(64)
    assert_step(model, compiled(model, memory_goal="1 MiB"), torch.randn(2048, 64), 0.05)
    (found,) = memory_plans()
    assert found.ways != ()
    torch._dynamo.reset()
    run = compiled(model, memory_goal=1, on_failure="raise")
    with pytest.raises(Exception, match="the memory goal of 1 byte is missed by"):
        run(torch.randn(2048, 64))


def test_what_a_relu_makes_is_not_rounded_for_its_output_is_its_mask() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.cos()) @ w

    x, w = torch.randn(256, 256, requires_grad=True), torch.randn(256, 256, requires_grad=True)
    (expected,) = torch.autograd.grad(program(x, w).sum(), x)
    compiled = torch.compile(program, backend="multigraph", options={"memory_goal": 1})
    (got,) = torch.autograd.grad(compiled(x, w).sum(), x)
    assert torch.equal(got == 0, expected == 0)
    (saved,) = multigraph_backend.explain().regions[-1].generic.saved
    assert not any(entry.packed and "int8" in entry.packed for entry in saved.tensors if entry.op == "aten::relu")


@pytest.mark.parametrize(
    "options", [{"memory_goal": "2 MiB"}, {"saved_tensors": [Rule(Match(), Scaled("int8"))]}], ids=str
)
def test_sparse_gradients_are_in_nobodys_way(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = [
        torch.nn.Embedding(500, 64, sparse=True),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 8),
    ]
    model = torch.nn.Sequential(*layers)
    optimizers = torch.optim.SparseAdam(layers[0].parameters()), torch.optim.Adam(layers[1].parameters())
    run, ids = torch.compile(model, backend="multigraph", options=options), torch.randint(0, 500, (64, 16))
    found = []
    for each in (run, model):
        model.zero_grad()
        each(ids).square().mean().backward()
        found.append([entry.grad.to_dense().clone() for entry in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()
    (said,) = accounts()
    assert said.failed is None
    assert (said.memory is not None) == ("memory_goal" in options)
    assert (said.packed > 0) == ("saved_tensors" in options)
    del optimizers
