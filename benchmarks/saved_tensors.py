"""What packed saved tensors cost and save in training: steps of a decoder stack, run in forms that take turns.

eager                     the program as it is
eager, fp8                under torch.autograd.graph.saved_tensors_hooks to e4m3, which run in eager
eager, save_on_cpu        under torch.autograd.graph.save_on_cpu, pinned on a GPU
inductor                  torch.compile: the form that nothing is packed in
inductor, fp8             under torch.autograd.graph.saved_tensors_hooks of graph modules, which stock inlines: to e4m3
inductor, int8            the same: int8 with a float32 scale per row
inductor, save_on_cpu     under torch.autograd.graph.save_on_cpu, pinned on a GPU
inductor, offload         torch._functorch.config.enable_activation_offloading, on a stream of its own, of what
                          "multigraph, offload" copies: a pass over the joint graph marks it, as stock wants it
inductor, budget 0.5      torch._functorch.config.activation_memory_budget = 0.5: stock recomputes the rest
inductor, budget 0.3      the same with 0.3
inductor, checkpointing   each block under torch.utils.checkpoint
inductor, selective       the same, and what matrix products give is saved
multigraph                torch.compile(backend="multigraph"), no rules
multigraph, fp8           options={"saved_tensors": [Rule(Match(...), Cast("float8_e4m3fn"))]}
multigraph, fp8 products  the same with Cast("float8_e4m3fn", multiply=True): weight gradients multiply what is saved
multigraph, int8          the same with Scaled("int8", per="row")
multigraph, int8 blocks   the same with Scaled("int8", per=64)
multigraph, fp8, pointwise     what is made pointwise of what is packed is computed again from that: before the others
                          a Rule(Match(..., pointwise=True), Recompute(from_packed=True))
multigraph, int8, pointwise    the same with int8
multigraph, offload       Offload() for the first blocks, a twelfth of them: what a link can carry beside the step
multigraph, budget 0.5    options={"saved_tensors_budget": 0.5} without rules: computed again
multigraph, budget 0.3, int8   the same with 0.3, and int8 allowed

Stock's hooks and the rules pack the same kind of tensor: of the type of the activations, and no smaller than one.

reordering         whether Inductor changes the order of operations to lower the peak
step ms            of one step of some in a row: forward and backward, no optimizer, which would be the same for all
step/unpacked      over that of the same form unpacked, recorded if this one is ("inductor, fp8" over "inductor",
                   "multigraph, fp8" over "multigraph"): the median over passes of one round
step/Inductor      the same over unpacked Inductor's
forward MiB        the most that is allocated while the forward runs
saved MiB          what is allocated when it is over
backward MiB       the most that is allocated while the backward runs
forward/stock      the peak over that of the form of stock that packs alike
backward/stock     the same of the backward
saving/theory      by how much the peak is lower than unpacked Inductor's, over the bytes that are offloaded
gradient error     the largest relative error of a parameter's gradient against eager's, of all checks
numbers            "right", or "WRONG" where that is beyond what the form's packs explain
packed             how many tensors are
reserved MiB       with `--reserved` on a GPU: the most that torch reserves in a process that runs some steps of this
                   form and nothing else, parameters, gradients and recordings included: whether a batch fits

Bytes are those above what is there before the step: parameters, inputs, and an optimizer's state are not in them.
Gradients are released before each step, and are counted from when the backward makes them. On a GPU bytes are
torch.cuda.max_memory_allocated's, reset between the phases; on the CPU they are summed over the profiler's record of
every allocation. What lies in the memory of recordings is in neither: with `--cudagraphs auto` multigraph's rows have
no bytes. By default no form records.

Each form's gradients are compared with eager's on new inputs, before it is timed and afterwards, and a form that packs
must have packed. One of multigraph's that is wrong has failed. One of the others keeps its row, marked, and is measured
once more in a process of its own, beside unpacked Inductor, as "..., alone": stock's inlined hooks were seen to give
wrong gradients through cuDNN's attention in a process that had compiled another form before, and right ones alone.
Where that row is right, multigraph's are compared with it.

The goals: a step of 1.03 times the unpacked one's for fp8, 0.97 with fp8 products, 1.04 for int8, 1.01 for offloading,
and for fp8 also half of what stock's packing costs; no peak above stock's by more than 1 %, and of 10 layers on a
backward peak of int8 that is 20 % lower; of offloading, 95 % of what is offloaded gone from the peak. With
`--no-reordering` Inductor keeps the order of operations, in all forms; there the forward peak is to be half of stock's.
The exit status is about multigraph's rows
alone.

    python benchmarks/saved_tensors.py --json saved_tensors.json
    python benchmarks/saved_tensors.py --layers 4 --only int8 --no-reordering
    python benchmarks/saved_tensors.py --model gpt2-medium --only inductor --only inductor,fp8 --only multigraph,fp8
    python benchmarks/saved_tensors.py --loss-curve 200

`--model` takes language models with random weights in place of the stack. `--only` splits a run (blanks in names do
not count); the unpacked form of what is chosen comes along, and "inductor" has to be named for ratios to it.
`--loss-curve STEPS` trains a small language model on the sources of Python's library instead, once for each pack from
the same start on the same batches, and compares the losses.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import loss_curve
import torch
import torch._functorch.config
import workloads
from measure import (
    Call,
    Column,
    Goal,
    Results,
    answer,
    arguments,
    attempt,
    end_to_end_us,
    goals_text,
    in_own_process,
    interleaved,
    paired_ratio,
    wait,
    worst_difference,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training_programs import Language, Stack

import multigraph_backend
from multigraph_backend import Cast, Match, Offload, Recompute, Rule, Scaled
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("model", "model"),
    Column("layers", "layers"),
    Column("reordering", "reordering"),
    Column("form", "form"),
    Column("step_ms", "step ms", 2),
    Column("over_unpacked", "step/unpacked", 3),
    Column("over_inductor", "step/Inductor", 3),
    Column("forward_mib", "forward MiB", 1),
    Column("saved_mib", "saved MiB", 1),
    Column("backward_mib", "backward MiB", 1),
    Column("reserved_mib", "reserved MiB", 0),
    Column("forward_over_stock", "forward/stock", 3),
    Column("backward_over_stock", "backward/stock", 3),
    Column("saving_over_theory", "saving/theory", 3),
    Column("gradient_error", "gradient error", 4),
    Column("numbers", "numbers"),
    Column("packed", "packed"),
    Column("goals", "goals"),
)

QUICK = ("eager", "eager, save_on_cpu", "inductor", "inductor, int8", "multigraph", "multigraph, int8")
STOCK = {
    "multigraph": "inductor",
    "multigraph, fp8": "inductor, fp8",
    "multigraph, fp8 products": "inductor, fp8",
    "multigraph, int8": "inductor, int8",
    "multigraph, int8 blocks": "inductor, int8",
    "multigraph, fp8, pointwise": "inductor, fp8",
    "multigraph, int8, pointwise": "inductor, int8",
    "multigraph, offload": "inductor, offload",
    "multigraph, budget 0.5": "inductor, budget 0.5",
    "multigraph, budget 0.3, int8": "inductor, int8",
}
WITHIN = {"fp8": 1.03, "fp8 products": 0.97, "int8": 1.04, "offload": 1.01}  # of the unpacked step
DEEP = 10  # layers, from which on the specification asks for more than "not above stock"

ALONE = ", alone"  # behind the name of a form that was measured in a process of its own
SECONDS = 600  # for that
AT_ONCE = 4  # processes of single forms, for the memory that they reserve
STEPS = 8  # of each
ROUGHLY = {"stack": 20, "gpt2-medium": 40, "llama-1b": 40}  # seconds for a form on a large GPU, to say what to expect

Around = Callable[[], contextlib.AbstractContextManager[Any]]


# ---------------------------------------------------------------- stock's hooks

_hook_calls: Counter[str] = Counter()  # while traced, and while a step runs


def _as_fp8(x: torch.Tensor, dtype: torch.dtype, least: int) -> Any:
    _hook_calls["run" if type(x) in (torch.Tensor, torch.nn.Parameter) else "traced"] += 1
    if x.dtype != dtype or x.numel() * x.element_size() < least:
        return x
    return x.to(torch.float8_e4m3fn)


def _from_fp8(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return packed.to(dtype) if packed.dtype == torch.float8_e4m3fn else packed


def _as_int8(x: torch.Tensor, dtype: torch.dtype, least: int) -> Any:
    _hook_calls["run" if type(x) in (torch.Tensor, torch.nn.Parameter) else "traced"] += 1
    if x.dtype != dtype or x.numel() * x.element_size() < least:
        return x
    wide = x.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return torch.round(wide / scale).to(torch.int8), scale


def _from_int8(packed: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    restored = (packed[0].to(torch.float32) * packed[1]).to(dtype)
    assert isinstance(restored, torch.Tensor)
    return restored


for _name in ("_as_fp8", "_from_fp8", "_as_int8", "_from_int8"):
    torch.fx.wrap(_name)  # control flow is not for the tracer of graph modules: what is in these is traced later


def inlined(pack: str, stack: Stack) -> Around:
    """Hooks that stock inlines, one pair for all calls."""
    dtype, least = stack.dtype, stack.least
    pairs: dict[str, tuple[Call, Call]] = {
        "fp8": (lambda x: _as_fp8(x, dtype, least), lambda packed: _from_fp8(packed, dtype)),
        "int8": (lambda x: _as_int8(x, dtype, least), lambda packed: _from_int8(packed, dtype)),
    }
    hooks = [torch.fx.symbolic_trace(function) for function in pairs[pack]]
    return lambda: torch.autograd.graph.saved_tensors_hooks(*hooks)


# ---------------------------------------------------------------- stock's offloading and checkpointing


@contextlib.contextmanager
def offloading(stack: Stack) -> Iterator[None]:
    """Stock offloads what a pass has marked: here what the first blocks make and "multigraph, offload" copies."""

    def mark(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            value, modules = node.meta.get("val"), node.meta.get("nn_module_stack", {})
            blocks = {int(found) for path, _ in modules.values() for found in re.findall(r"blocks\W+(\d+)", path)}
            if isinstance(value, torch.Tensor) and blocks and max(blocks) < stack.first_blocks():
                large = value.numel() * value.element_size() >= stack.least
                node.meta["should_offload"] = large and value.dtype == stack.dtype

    switches = [f"activation_{name}" for name in ("offload_separate_stream", "offload_sink_wait", "reload_prefetch")]
    given: Any = dict.fromkeys(["enable_activation_offloading", *switches], True)
    # the pass is a function of this run, which no cache has a name for
    inductor = torch._inductor.config.patch(joint_custom_post_pass=mark, force_disable_caches=True)
    with torch._functorch.config.patch(**given), inductor:
        yield


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def _products_are_saved(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(_products_are_saved)


# ---------------------------------------------------------------- forms


@dataclass(frozen=True)
class Form:
    """`make` gives what computes the loss; each forward runs inside `around`, what compiles inside `making`."""

    name: str
    make: Callable[[], Call]
    pack: str = ""
    around: Around = contextlib.nullcontext
    making: Around = contextlib.nullcontext

    @property
    def ours(self) -> bool:
        return self.name in STOCK

    @property
    def unpacked(self) -> str:
        """The form that this one is measured against: the same compiler, which packs nothing."""
        return self.name.partition(",")[0]

    def is_called(self, text: str) -> bool:
        return _without_blanks(self.name) == _without_blanks(text)


def _without_blanks(text: str) -> str:
    return text.replace(" ", "")


class Step:
    """A form's training step, as its user writes it."""

    def __init__(self, call: Call, around: Around, parameters: tuple[torch.nn.Parameter, ...]) -> None:
        self.call, self.around, self.parameters = call, around, parameters

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with self.around():
            loss = self.call(*inputs)
        assert isinstance(loss, torch.Tensor)
        return loss

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.release()
        loss = self.forward(*inputs)
        loss.backward()
        return loss.detach()


def forms_of(stack: Stack, options: Mapping[str, Any]) -> list[Form]:
    match = Match(dtype=str(stack.dtype).removeprefix("torch."), min_bytes=stack.least)
    program, again = stack.program, partial(checkpoint, use_reentrant=False)
    blocks = partial(stack.program, again)
    kept = partial(stack.program, partial(again, context_fn=selective))

    def inductor(of: Callable[[], Call] = program) -> Call:
        return torch.compile(of(), fullgraph=True)

    def ours(*rules: Rule, budget: float | None = None) -> Call:
        given = {"on_failure": "raise", "saved_tensors": list(rules), "saved_tensors_budget": budget, **options}
        return torch.compile(program(), backend=multigraph, fullgraph=True, options=given)

    pinned = partial(torch.autograd.graph.save_on_cpu, pin_memory=stack.device == "cuda")

    def recomputing(budget: float) -> Around:
        return partial(torch._functorch.config.patch, activation_memory_budget=budget)

    first = [f"*blocks.{number}{end}" for number in range(stack.first_blocks()) for end in ("", ".*")]
    offload = [Rule(Match(module=name, dtype=match.dtype, min_bytes=stack.least), Offload()) for name in first]
    fp8, int8 = Rule(match, Cast("float8_e4m3fn")), Rule(match, Scaled("int8", per="row"))
    products = Rule(match, Cast("float8_e4m3fn", multiply=True))
    pointwise = Rule(replace(match, pointwise=True), Recompute(from_packed=True))
    return [
        Form("eager", program),
        Form("eager, fp8", program, "fp8", inlined("fp8", stack)),
        Form("eager, save_on_cpu", program, around=pinned),
        Form("inductor", inductor),
        Form("inductor, fp8", inductor, "fp8", inlined("fp8", stack)),
        Form("inductor, int8", inductor, "int8", inlined("int8", stack)),
        Form("inductor, save_on_cpu", inductor, around=pinned),
        *([Form("inductor, offload", inductor, making=partial(offloading, stack))] if stack.device == "cuda" else []),
        Form("inductor, budget 0.5", inductor, making=recomputing(0.5)),
        Form("inductor, budget 0.3", inductor, making=recomputing(0.3)),
        Form("inductor, checkpointing", partial(inductor, blocks)),
        Form("inductor, selective", partial(inductor, kept)),
        Form("multigraph", ours),
        Form("multigraph, fp8", partial(ours, fp8), "fp8"),
        Form("multigraph, fp8 products", partial(ours, products), "fp8 products"),
        Form("multigraph, int8", partial(ours, int8), "int8"),
        Form("multigraph, int8 blocks", partial(ours, Rule(match, Scaled("int8", per=64))), "int8"),
        Form("multigraph, fp8, pointwise", partial(ours, pointwise, fp8), "fp8"),
        Form("multigraph, int8, pointwise", partial(ours, pointwise, int8), "int8"),
        *([Form("multigraph, offload", partial(ours, *offload), "offload")] if stack.device == "cuda" else []),
        Form("multigraph, budget 0.5", partial(ours, budget=0.5), "recompute"),
        Form("multigraph, budget 0.3, int8", partial(ours, int8, budget=0.3), "int8"),
    ]


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Bytes:
    """Of a step, above what was there before: the peak of its forward, what that left, the peak of its backward."""

    forward: int
    saved: int
    backward: int


def bytes_of(step: Step, inputs: tuple[torch.Tensor, ...], device: str) -> Bytes:
    step.release()
    gc.collect()
    return (_on_gpu if device == "cuda" else _on_cpu)(step, inputs)


def _on_gpu(step: Step, inputs: tuple[torch.Tensor, ...]) -> Bytes:
    wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = step.forward(*inputs)
    wait()
    forward, saved = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    wait()
    return Bytes(forward - before, saved - before, torch.cuda.max_memory_allocated() - before)


def _on_cpu(step: Step, inputs: tuple[torch.Tensor, ...]) -> Bytes:
    """One record for both phases: memory from before a record leaves no trace when it is freed."""
    kinds, mark = [torch.profiler.ProfilerActivity.CPU], "the backward begins"
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profile:
        loss = step.forward(*inputs)
        with torch.profiler.record_function(mark):
            pass
        loss.backward()
    raw: Any = profile.profiler
    events = sorted(raw.kineto_results.events(), key=lambda event: int(event.start_ns()))
    curve, border = [0], None
    for event in events:
        if event.name() == mark:
            border = len(curve)
        elif event.name() == "[memory]":
            curve.append(curve[-1] + int(event.nbytes()))
    assert border is not None
    return Bytes(max(curve[:border]), curve[border - 1], max(curve[border - 1 :]))


# ---------------------------------------------------------------- one run


class WrongNumbers(RuntimeError):
    """A form does not give what eager gives, or does not do what its row says."""


class Comparison:
    """The forms: made, checked, their memory measured, timed; one that fails is left out, with its error."""

    def __init__(self, stack: Stack, forms: list[Form]) -> None:
        self.stack, self.forms = stack, forms
        self.eager = Step(stack.program(), contextlib.nullcontext, stack.parameters)
        self.steps: dict[str, Step] = {}
        self.rows: dict[str, dict[str, Any]] = {form.name: {} for form in forms}
        self.errors: dict[str, str] = {}

    def make(self, with_bytes: Callable[[Form], bool]) -> None:
        for form in self.forms:
            step, error = attempt(partial(self._checked, form, with_bytes(form)))
            if step is not None:
                self.steps[form.name] = step
            if error is not None:
                self.errors[form.name] = error

    def _checked(self, form: Form, with_bytes: bool) -> Step:
        """A form that gives what eager gives, packed what it should, and is warm."""
        row, before = self.rows[form.name], multigraph_backend.stats()
        _hook_calls.clear()
        step = Step(form.make(), form.around, self.stack.parameters)
        started = time.perf_counter()
        with form.making():
            step(*self.stack.inputs())
        wait()
        row["first_step_s"] = time.perf_counter() - started
        for _ in range(5):
            self.check(form, step)
        if form.ours:
            now = multigraph_backend.stats()
            row["counts"] = {key: now[key] - before[key] for key in now if now[key] != before[key]}
            row["packed"] = now["packed_tensors"] - before["packed_tensors"]
            if (row["packed"] > 0) != bool(form.pack):
                raise WrongNumbers(f"{row['packed']} tensors are packed\n{multigraph_backend.explain()}")
            row["offloaded_mib"] = offloaded() / 2**20
        elif form.pack:
            row["hook_calls"] = dict(_hook_calls)
            eager = form.name.startswith("eager")
            if bool(_hook_calls["run"]) != eager or bool(_hook_calls["traced"]) == eager:
                raise WrongNumbers(f"the hooks are not inlined: {row['hook_calls']}")
        if with_bytes:
            inputs = self.stack.inputs()
            bytes_of(step, inputs, self.stack.device)
            measured = bytes_of(step, inputs, self.stack.device)
            for key in ("forward", "saved", "backward"):
                row[f"{key}_mib"] = getattr(measured, key) / 2**20
        return step

    def check(self, form: Form, step: Step) -> None:
        """Compare loss and gradients of a step with eager's, on a new input; a form of others may be wrong."""
        inputs = self.stack.inputs()
        wanted, given = self._results(self.eager, inputs), self._results(step, inputs)
        row, bound = self.rows[form.name], self.stack.bound
        loss = worst_difference(given[:1], wanted[:1])
        off = worst_difference(given[1:], wanted[1:])
        row["gradient_error"] = max(off, row.get("gradient_error", 0.0))
        row.setdefault("numbers", "right")
        if not loss < bound("") or not off < bound(form.pack):  # NaN is wrong too
            said = f"differs from eager by {loss:.2e} in the loss, {off:.2e} in gradients"
            if form.ours:
                raise WrongNumbers(said)
            row |= {"numbers": "WRONG", "wrong": said}

    def _results(self, step: Step, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        results = [step(*inputs)]
        for parameter in step.parameters:
            if parameter.grad is None:
                raise WrongNumbers("a parameter has no gradient")
            results.append(parameter.grad)
        step.release()
        return results

    def measure(self, rounds: int, calls: int) -> None:
        inputs = [self.stack.inputs() for _ in range(2)]
        taken = interleaved(
            {name: end_to_end_us(step, inputs, calls, each=False) for name, step in self.steps.items()}, rounds
        )
        for form in self.forms:
            if form.name in taken:
                row = self.rows[form.name]
                row["step_ms"] = statistics.median(taken[form.name]) / 1e3
                for key, other in (("over_inductor", "inductor"), ("over_unpacked", form.unpacked)):
                    if other in taken:
                        row[key] = paired_ratio(taken[form.name], taken[other])
                _, error = attempt(partial(self.check, form, self.steps[form.name]))
                if error is not None:
                    self.errors[form.name] = f"after it was timed: {error}"


def offloaded() -> int:
    """Bytes that the newest code offloads."""
    saved = [said for region in multigraph_backend.explain().regions[-1:] for said in region.generic.saved]
    return sum(entry.bytes for said in saved for entry in said.tensors if entry.packed == "offload")


# ---------------------------------------------------------------- rows


def compare(rows: Mapping[str, dict[str, Any]]) -> None:
    """Ratios of multigraph's rows to those of stock that pack alike; what was not measured is left out."""
    for name, other in STOCK.items():
        row, stock = rows.get(name, {}), rows.get(other, {})
        alone = rows.get(other + ALONE, {})
        if alone.get("numbers") == "right":
            stock = alone
        for key in ("forward", "backward"):
            if f"{key}_mib" in row and f"{key}_mib" in stock:
                row[f"{key}_over_stock"] = row[f"{key}_mib"] / stock[f"{key}_mib"]
        plain = rows.get("inductor", {})
        if row.get("offloaded_mib") and "backward_mib" in row and "backward_mib" in plain:
            peaks = [max(entry["forward_mib"], entry["backward_mib"]) for entry in (plain, row)]
            row["saving_over_theory"] = (peaks[0] - peaks[1]) / row["offloaded_mib"]
        if "over_unpacked" in stock:
            row["half_of_stock"] = 1 + max(0.0, stock["over_unpacked"] - 1) / 2


def goals_of(form: Form, layers: int, reordering: bool) -> tuple[Goal, ...]:
    if not form.ours:
        return ()
    if form.pack == "offload":
        return (
            Goal("step/unpacked", "over_unpacked", WITHIN[form.pack]),
            Goal("saving/theory", "saving_over_theory", 0.95, at_least=True),
        )
    if "budget" in form.name:
        return (Goal("backward/stock", "backward_over_stock", 1.01),)
    forward = 0.5 if form.pack and layers >= DEEP and not reordering else 1.01
    backward = 0.8 if form.pack == "int8" and layers >= DEEP else 1.01
    peaks = (
        Goal("forward/stock", "forward_over_stock", forward),
        Goal("backward/stock", "backward_over_stock", backward),
    )
    if form.pack not in WITHIN:
        return peaks
    within = Goal("step/unpacked", "over_unpacked", WITHIN[form.pack])
    half = Goal("half of stock's", "over_unpacked", "half_of_stock")
    return (*peaks, within, half) if form.pack == "fp8" else (*peaks, within)


def stack_of(args: argparse.Namespace, device: str) -> Stack:
    if args.model != "stack":
        return Language(args.model, device, args.layers)
    return Stack(device, args.layers, args.quick)


def options_of(args: argparse.Namespace, device: str) -> dict[str, Any]:
    return {"cudagraphs": args.cudagraphs if args.cudagraphs == "auto" else False} if device == "cuda" else {}


def add_rows(args: argparse.Namespace, results: Results) -> None:
    stack = stack_of(args, results.device)
    recording = results.device == "cuda" and args.cudagraphs == "auto"
    forms = forms_of(stack, options_of(args, results.device))
    if args.only is not None:
        forms = chosen(forms, args.only)
    elif args.quick:
        forms = [form for form in forms if form.name in QUICK]
    if results.device == "cuda" and not args.quick:
        print(f"{len(forms)} forms, some {len(forms) * ROUGHLY.get(args.model, 20)} seconds on a large GPU", flush=True)
    torch._dynamo.reset()
    comparison = Comparison(stack, forms)
    comparison.make(lambda form: not (recording and form.ours))
    rounds = args.rounds or (3 if args.quick else 31 if results.device == "cuda" and args.model == "stack" else 11)
    _, error = attempt(partial(comparison.measure, rounds, 3 if results.device == "cuda" else 1))
    for form in list(forms) if args.answer is None else []:
        if comparison.rows[form.name].get("numbers") == "WRONG" and form.name.startswith("inductor, "):
            other = Form(form.name + ALONE, form.make)
            forms.insert(forms.index(form) + 1, other)
            found, failed = alone(args, form.name)
            comparison.rows[other.name] = found or {}
            if failed is not None:
                comparison.errors[other.name] = failed
    if args.reserved and results.device == "cuda":
        comparison.steps.clear()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for form, (found, failed) in zip(forms, pool.map(partial(reserved_alone, args), forms), strict=True):
                comparison.rows[form.name] |= found or {"reserved_error": failed}
    compare(comparison.rows)
    for form in forms:
        row = comparison.rows[form.name]
        row |= {
            "model": args.model,
            "layers": stack.layers,
            "reordering": "off" if args.no_reordering else "on",
            "cudagraphs": recording and form.ours,
        }
        if results.device == "cuda" and form.ours:
            row["goals"] = goals_text(goals_of(form, stack.layers, not args.no_reordering), row)
        results.add({"form": form.name}, row, comparison.errors.get(form.name, error), headline=True)


def chosen(forms: list[Form], only: list[str]) -> list[Form]:
    """The forms of these names; for what is no name, those that have it in theirs; and what they are divided by."""
    texts = [text for text in only if not any(form.is_called(text) for form in forms)]
    meant = [form for form in forms if any(map(form.is_called, only)) or any(text in form.name for text in texts)]
    unpacked = {form.unpacked for form in meant}
    return [form for form in forms if form in meant or form.name in unpacked]


def alone(args: argparse.Namespace, name: str) -> tuple[dict[str, Any] | None, str | None]:
    """The row of one form in a process where nothing but unpacked Inductor has run beside it, or why there is none."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    words = ["--only", "inductor", "--only", name, "--model", args.model, "--threads", str(args.threads)]
    given = {"--device": args.device, "--layers": args.layers, "--rounds": args.rounds}
    words += [word for key, value in given.items() if value is not None for word in (key, str(value))]
    words += [key for key, on in {"--quick": args.quick, "--no-reordering": args.no_reordering}.items() if on]
    return in_own_process(str(Path(__file__).resolve()), words, SECONDS)


def reserved_alone(args: argparse.Namespace, form: Form) -> tuple[dict[str, Any] | None, str | None]:
    """What torch reserves in a process that runs nothing but this form, or why that is not known."""
    words = ["--form", form.name.removesuffix(ALONE), "--model", args.model, "--cudagraphs", args.cudagraphs]
    words += ["--layers", str(args.layers)] if args.layers is not None else []
    words += ["--no-reordering"] if args.no_reordering else []
    return in_own_process(str(Path(__file__).resolve()), words, SECONDS)


def reserved(args: argparse.Namespace) -> dict[str, Any]:
    """The other side of `reserved_alone`."""
    stack = stack_of(args, "cuda")
    (form,) = (form for form in forms_of(stack, options_of(args, "cuda")) if form.name == args.form)
    with torch._inductor.config.patch(reorder_for_peak_memory=not args.no_reordering):
        step = Step(form.make(), form.around, stack.parameters)
        with form.making():
            step(*stack.inputs())
        for _ in range(STEPS):
            step(*stack.inputs())
    wait()
    return {"reserved_mib": torch.cuda.max_memory_reserved() / 2**20}


def answered(args: argparse.Namespace) -> dict[str, Any]:
    """The other side of `alone`."""
    results = Results("saved_tensors", "In a process of its own", COLUMNS, args)
    with torch._inductor.config.patch(reorder_for_peak_memory=not args.no_reordering):
        add_rows(args, results)
    (row,) = (row for row in results.rows if row["form"] != "inductor")
    if row["error"] is not None:
        raise RuntimeError(row["error"])
    own = {"benchmark", "form", "goals", "error", "headline"}
    return {key: value for key, value in row.items() if key not in own}


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument(
        "--only", action="append", metavar="TEXT", help="the form of this name, else those that have it in theirs"
    )
    made.add_argument("--model", choices=("stack", *workloads.LANGUAGE_MODELS), default="stack")
    made.add_argument("--loss-curve", type=int, metavar="STEPS", help="train on text, packed and not")
    made.add_argument("--layers", type=int, help="of the stack (12 on a GPU, 4 on a CPU)")
    made.add_argument("--rounds", type=int, help="passes of each form")
    made.add_argument("--cudagraphs", choices=("auto", "off"), default="off", help="multigraph's option")
    made.add_argument("--reserved", action="store_true", help="each form in a process of its own, too (on a GPU)")
    made.add_argument("--form", help=argparse.SUPPRESS)
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    made.add_argument(
        "--no-reordering", action="store_true", help="Inductor's reorder_for_peak_memory off, in all forms"
    )
    return made


def main() -> int:
    args = parser().parse_args()
    if args.loss_curve:
        return loss_curve.main(args)
    if args.answer is not None:
        return answer(args.answer, partial(answered if args.form is None else reserved, args))
    title = "Saved tensors: memory and time of training steps, packed or not"
    title += ", multigraph's recorded" if args.cudagraphs == "auto" else ""
    results = Results("saved_tensors", title, COLUMNS, args)
    with torch._inductor.config.patch(reorder_for_peak_memory=not args.no_reordering):
        _, error = attempt(partial(add_rows, args, results))
    if error is not None:
        results.add({"form": "multigraph"}, {}, error)
    return results.finish(lambda row: row["form"] in STOCK)


if __name__ == "__main__":
    sys.exit(main())
