"""What a call costs when its kernels are recorded: five programs, run in seven ways that take turns.

eager        the program as it is
inductor     torch.compile
stock        torch.compile(mode="reduce-overhead")
hand-made    Inductor's code under torch.cuda.graph, by hand: one multi-tensor copy into fixed buffers, one replay; of a
             training program forward and backward are one graph
multigraph   torch.compile(backend="multigraph", options={"cudagraphs": "auto"})
multigraph, sealed   the same while guards that all calls have met are checked no more
             (`torch.compiler.set_stance(skip_guard_eval_unsafe=True)`), as by hand none are checked
multigraph, ahead    what torch's `aot_compile` makes of it: no guards, and no frame of Dynamo's (not of training)

host us      of a call that does not wait, its outputs dropped at once
waited       of a call that is waited for
in a row     of forty calls that follow one another, the last of which is waited for: from end to end, as a program runs
GPU us       of its work, between two events (of the programs with some)
first calls  milliseconds of the calls after the first, in which recordings are made (by hand: of the capture)
pool MiB     in private pools

"floor" is what no recording can do without, for the same signature: "guards + wrappers" is torch.compile with
AOTAutograd around code that does nothing, "input copy" one multi-tensor copy of the inputs, "bare replay" the replay of
the hand-made graph. "address comparison" is stock's own native one, of all parameters. Ratios are medians over passes
of one round. Each form's numbers are compared with eager's on new random inputs, before it is timed and afterwards.
The goals are those of the specification. The exit status is about multigraph's rows alone.

    python benchmarks/replay.py --json replay.json
    python benchmarks/replay.py --only decoder --cudagraphs require
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import workloads
from measure import (
    Call,
    Column,
    Goal,
    Pass,
    Results,
    arguments,
    attempt,
    end_to_end_us,
    goals_text,
    gpu_us,
    host_us,
    input_sets,
    interleaved,
    own_code,
    paired_difference,
    paired_ratio,
    pool_bytes,
    undisturbed,
    unguarded,
    wait,
    worst_difference,
)
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("program", "program"),
    Column("form", "form"),
    Column("host_us", "host us", 1),
    Column("end_us", "waited us", 1),
    Column("row_us", "in a row us", 1),
    Column("gpu_us", "GPU us", 1),
    Column("over_floor", "host/floor", 2),
    Column("over_floor_us", "over floor us", 1),
    Column("over_stock", "host/stock", 2),
    Column("end_over_stock", "waited/stock", 2),
    Column("end_over_hand", "waited/hand-made", 2),
    Column("row_over_hand", "in a row/hand-made", 2),
    Column("record_ms", "first calls ms", 1),
    Column("pool_mib", "pool MiB", 1),
    Column("goals", "goals"),
)

SEALED, AHEAD = "multigraph, sealed", "multigraph, ahead"
FORMS = ("eager", "inductor", "stock", "hand-made", "multigraph", SEALED, AHEAD)
WRAPPERS, COPY, REPLAY, ADDRESSES = "guards + wrappers", "input copy", "bare replay", "address comparison"
FLOOR = (WRAPPERS, COPY, REPLAY)

NEVER_SLOWER = (
    Goal("host/stock", "over_stock", 1.0),
    Goal("waited/stock", "end_over_stock", 1.0),
    Goal("in a row/stock", "row_over_stock", 1.0),
)

Inputs = tuple[torch.Tensor, ...]


# ---------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """`function` is what is compiled; of a `training` program a call is a step, with `function`'s result as the loss.

    `inputs` are copied at each call by who replays at fixed addresses; `parameters` stay where they are. `calls` of one
    pass are few enough for the queue of the GPU. `bound`: how far from eager is right. `unguarded`: goals of the forms
    that check no guards.
    """

    name: str
    function: Callable[..., torch.Tensor]
    inputs: Callable[[], Inputs]
    goals: tuple[Goal, ...]
    bound: float = 1e-4
    parameters: tuple[torch.nn.Parameter, ...] = ()
    training: bool = False
    calls: int = 20
    gpu_time: bool = False
    unguarded: tuple[Goal, ...] = ()


class ManyParameters(torch.nn.Module):
    """Little work with many parameters, each of which matters in its own way."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ramp = torch.linspace(0.5, 1.5, len(self.weights), device=x.device)
        return x * (torch.stack(list(self.weights)) * ramp[:, None]).mean(0)


def tiny(device: str) -> Program:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(a @ b, dim=-1) + 1).sum(0)

    def inputs() -> Inputs:
        return torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)

    goals = (Goal("host/floor", "over_floor", 1.35), Goal("host/stock", "over_stock", 0.25), *NEVER_SLOWER[1:])
    return Program("tiny function", function, inputs, goals, calls=50)


def many_inputs(device: str) -> Program:
    def function(*xs: torch.Tensor) -> torch.Tensor:
        total = xs[0]
        for number, x in enumerate(xs[1:], 1):
            total = total + x * (1 + number / len(xs))
        return total

    def inputs() -> Inputs:
        return tuple(torch.randn(256, 256, device=device) for _ in range(32))

    goals = (Goal("host/floor", "over_floor", 1.3), Goal("host/stock", "over_stock", 0.35), *NEVER_SLOWER[1:])
    return Program("32 copied inputs", function, inputs, goals)


def many_parameters(device: str) -> Program:
    torch.manual_seed(0)
    model = ManyParameters(300, 64).to(device)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        assert isinstance(y, torch.Tensor)
        return y

    goals = (Goal("over floor us", "over_floor_us", 8.0), *NEVER_SLOWER)
    return Program(
        "300 static inputs",
        function,
        lambda: (torch.randn(64, 64, device=device),),
        goals,
        parameters=tuple(model.parameters()),
    )


def decoder(device: str) -> Program:
    model = workloads.decoder(device)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        assert isinstance(y, torch.Tensor)
        return y

    dtype = workloads.dtype_on(device)
    return Program(
        "decoder, 4 layers",
        function,
        lambda: (torch.randn(1, 16, model.width, device=device, dtype=dtype),),
        (
            Goal("in a row/hand-made", "row_over_hand", 1.01),
            Goal("waited/hand-made", "end_over_hand", 1.06),
            *NEVER_SLOWER,
        ),
        bound=3e-2 if dtype == torch.bfloat16 else 1e-4,
        parameters=tuple(model.parameters()),
        calls=10,
        gpu_time=True,
        unguarded=(Goal("waited/hand-made", "end_over_hand", 1.06),),
    )


def training(device: str) -> Program:
    torch.manual_seed(0)
    model = workloads.Decoder(2, 256, 4).to(device)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        assert isinstance(y, torch.Tensor)
        return y.pow(2).mean()

    return Program(
        "training step",
        function,
        lambda: (torch.randn(2, 16, 256, device=device),),
        NEVER_SLOWER,
        bound=1e-3,
        parameters=tuple(model.parameters()),
        training=True,
        calls=10,
        gpu_time=True,
    )


PROGRAMS: tuple[Callable[[str], Program], ...] = (tiny, many_inputs, many_parameters, decoder, training)


# ---------------------------------------------------------------- forms


def step(program: Program, function: Call) -> Call:
    """A call as its user makes it."""
    if not program.training:
        return function
    parameters = program.parameters

    def step(*inputs: torch.Tensor) -> Any:
        for parameter in parameters:
            parameter.grad = None
        loss = function(*inputs)
        loss.backward()
        return loss

    return step


class HandMade:
    """What a user records by hand: buffers for the inputs, one copy, one replay, outputs that the next call changes."""

    def __init__(self, program: Program, call: Call) -> None:
        self.buffers = program.inputs()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call(*self.buffers)
        self.graph = torch.cuda.CUDAGraph()
        with undisturbed():  # what a collection would free must not be freed while a capture is on
            torch.cuda.synchronize()
            started = time.perf_counter()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                output = call(*self.buffers)
            torch.cuda.synchronize()
            self.record_ms = (time.perf_counter() - started) * 1e3
        self.output = output.detach()
        self.gradients = [parameter.grad for parameter in program.parameters] if program.training else []

    def __call__(self, *inputs: torch.Tensor) -> Any:
        torch._foreach_copy_(self.buffers, inputs)
        self.graph.replay()
        return self.output


def ahead_of_time(program: Program, options: Mapping[str, Any]) -> Call:
    """`program` compiled by `aot_compile`, and called without a check of its guards."""
    without = {**options, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    with torch._dynamo.config.patch(enable_aot_compile=True):  # off by default in torch 2.11
        compiled = torch.compile(own_code(program.function), fullgraph=True, backend="multigraph", options=without)
        made: Any = compiled.aot_compile((program.inputs(), {}))  # type: ignore[attr-defined]
    made.disable_guard_check()
    return cast(Call, made)


def does_nothing() -> Callable[..., Any]:
    """A backend whose code returns tensors of the right kind and does no work.

    What autograd writes to or keeps for itself (outputs of a forward, gradients) are new tensors over the same memory.
    """

    def compiler(renewed: bool, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Call:
        (result,) = gm.graph.output_node().args
        assert isinstance(result, (list, tuple))
        kinds = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in result]
        made: list[Any] = []

        def run(args: list[Any]) -> list[Any]:
            args.clear()
            if not made:
                made.extend(_like(kind) for kind in kinds)
            return [*map(_renewed, made)] if renewed else list(made)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def forward(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Call:
        inner = compiler(False, gm, example_inputs)

        def run(args: list[Any]) -> list[Any]:
            outputs: list[Any] = inner(args)
            outputs[0] = _renewed(outputs[0])  # the loss; the others are saved for the backward
            return outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=partial(compiler, True),
        inference_compiler=partial(compiler, False),
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


def _like(kind: Any) -> Any:
    if not isinstance(kind, torch.Tensor):
        return kind
    made = torch.empty_strided(kind.shape, kind.stride(), dtype=kind.dtype, device=kind.device)
    return made.zero_()


def _renewed(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------- one program


class WrongNumbers(RuntimeError):
    """A form does not give what eager gives."""


@dataclass
class Taken:
    """Microseconds of each pass, by form or part."""

    host: dict[str, list[float]] = field(default_factory=dict)
    end: dict[str, list[float]] = field(default_factory=dict)
    row: dict[str, list[float]] = field(default_factory=dict)
    gpu: dict[str, list[float]] = field(default_factory=dict)


class Comparison:
    """The forms of one program: made, checked, timed; one that fails is left out, with its error."""

    def __init__(self, program: Program, device: str, options: Mapping[str, Any]) -> None:
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        gc.collect()
        self.program, self.device, self.options = program, device, options
        self.inputs = input_sets(program.inputs, most=4)
        self.forms: dict[str, Call] = {}
        self.parts: dict[str, tuple[Call, Sequence[Inputs]]] = {}
        self.about: dict[str, dict[str, Any]] = {name: {} for name in FORMS}
        self.errors: dict[str, str] = {}

    def make(self) -> None:
        """All forms, then the parts of a call; the hand-made one last, for a capture that fails may leave traces."""
        program = self.program
        self._add("eager", lambda: program.function)
        self._add("inductor", lambda: torch.compile(own_code(program.function)))
        self._add("stock", lambda: torch.compile(own_code(program.function), mode="reduce-overhead"))
        options = {"on_failure": "raise", **self.options}
        self._add("multigraph", lambda: torch.compile(own_code(program.function), backend=multigraph, options=options))
        if "multigraph" in self.forms:
            self.forms[SEALED] = self.forms["multigraph"]
        if not program.training:
            self._add(AHEAD, lambda: ahead_of_time(program, options))
        # a training step by hand takes a loop of its own, written for the capture
        if self.device == "cuda" and "inductor" in self.forms and not program.training:
            self._add("hand-made", lambda: HandMade(program, self.forms["inductor"]))
        _, error = attempt(self._make_parts)
        if error is not None:
            self.errors[WRAPPERS] = error

    def _add(self, name: str, make: Callable[[], Call]) -> None:
        form, error = attempt(partial(self._checked, name, make))
        if form is not None:
            self.forms[name] = form
        if error is not None:
            self.errors[name] = error

    def _checked(self, name: str, make: Callable[[], Call]) -> Call:
        """A form that gives what eager gives, also after the parameters changed, and is warm for what is timed."""
        about, counted = self.about[name], multigraph_backend.stats()
        pools, reserved = self._memory()
        made = make()
        form = made if isinstance(made, HandMade) else step(self.program, made)
        seconds = [self.check(form) for _ in range(3)]
        about["record_ms"] = made.record_ms if isinstance(made, HandMade) else sum(seconds[1:]) * 1e3
        about["first_call_s"] = seconds[0]
        with torch.no_grad():
            for parameter in self.program.parameters:
                parameter.mul_(0.99)
        for _ in range(5):
            self.check(form)
        for _ in range(3):
            for inputs in self.inputs:
                form(*inputs)
        if self.device == "cuda":
            pools_now, reserved_now = self._memory()
            about["pool_mib"] = (pools_now - pools) / 2**20
            about["reserved_mib"] = (reserved_now - reserved) / 2**20
        if name == "multigraph":
            now = multigraph_backend.stats()
            about["counts"] = {key: now[key] - counted[key] for key in now if now[key] != counted[key]}
            about["explain"] = str(multigraph_backend.explain()).splitlines()
        return form

    def check(self, form: Call) -> float:
        """Compare a form with eager on new inputs; seconds that its call took."""
        inputs = self.program.inputs()
        wanted = self._results(step(self.program, self.program.function), inputs)
        wait()
        started = time.perf_counter()
        given = self._results(form, inputs)
        wait()
        seconds = time.perf_counter() - started
        off = worst_difference(given, wanted)
        if not off < self.program.bound:  # NaN is wrong too
            raise WrongNumbers(f"differs from eager by {off:.2e}")
        return seconds

    def _results(self, form: Call, inputs: Inputs) -> list[torch.Tensor]:
        """The output, and of a training program all gradients."""
        results = [form(*inputs).detach()]
        if self.program.training:
            held = form.gradients if isinstance(form, HandMade) else [each.grad for each in self.program.parameters]
            results += [gradient for gradient in held if gradient is not None]
        return results

    def _memory(self) -> tuple[int, int]:
        """Bytes in private pools, and in all."""
        gc.collect()
        if self.device == "cpu":
            return 0, 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return pool_bytes(), torch.cuda.memory_reserved()

    def _make_parts(self) -> None:
        program = self.program
        wrapped = step(program, torch.compile(own_code(program.function), backend=does_nothing()))
        for inputs in (*self.inputs, *self.inputs):
            wrapped(*inputs)
        self.parts[WRAPPERS] = (wrapped, self.inputs)
        buffers = program.inputs()
        self.parts[COPY] = (lambda *inputs: torch._foreach_copy_(buffers, inputs), self.inputs)
        hand_made = self.forms.get("hand-made")
        if isinstance(hand_made, HandMade):
            self.parts[REPLAY] = (hand_made.graph.replay, [()])
        compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only where torch has CUDA
        if program.parameters and compare is not None:
            tensors = list(program.parameters)
            wanted = ([tensor.data_ptr() for tensor in tensors], list(range(len(tensors))))
            self.parts[ADDRESSES] = (partial(compare, tensors, *wanted), [()])

    def measure(self, rounds: int) -> Taken:
        calls = self.program.calls
        host = self._passes(lambda form: host_us(form, self.inputs, calls))
        host |= {name: host_us(part, inputs, calls) for name, (part, inputs) in self.parts.items()}
        taken = Taken(interleaved(host, rounds))
        taken.end = interleaved(self._passes(lambda form: end_to_end_us(form, self.inputs, calls)), rounds)
        taken.row = interleaved(self._passes(lambda form: end_to_end_us(form, self.inputs, 40, each=False)), rounds)
        if self.program.gpu_time and self.device == "cuda":
            leads = {name: 200 + 2 * statistics.median(taken.host[name]) for name in self.forms}
            gpu = {name: gpu_us(form, self.inputs, leads[name]) for name, form in self.forms.items()}
            taken.gpu = interleaved(gpu, rounds)
        for name, form in self.forms.items():
            _, error = attempt(partial(self.check, form))
            if error is not None:
                self.errors[name] = f"after it was timed: {error}"
        return taken

    def _passes(self, make: Callable[[Call], Pass]) -> dict[str, Pass]:
        return {name: unguarded(make(form)) if name == SEALED else make(form) for name, form in self.forms.items()}


# ---------------------------------------------------------------- rows


def floor(taken: Taken) -> list[float] | None:
    """What each round's parts took together, where all were measured."""
    if not all(part in taken.host for part in FLOOR):
        return None
    return [sum(parts) for parts in zip(*(taken.host[part] for part in FLOOR), strict=True)]


def values(name: str, taken: Taken) -> dict[str, float]:
    """The times of one form (or part) and its ratios; what was not measured is left out."""
    row: dict[str, float] = {}
    for key, passes in (("host_us", taken.host), ("end_us", taken.end), ("row_us", taken.row), ("gpu_us", taken.gpu)):
        if name in passes:
            row[key] = statistics.median(passes[name])
    if name not in taken.end:
        return row
    least = floor(taken)
    if least is not None:
        row["over_floor"] = paired_ratio(taken.host[name], least)
        row["floor_us"] = statistics.median(least)
        row["over_floor_us"] = paired_difference(taken.host[name], least)
    if ADDRESSES in taken.host:
        row["addresses_us"] = statistics.median(taken.host[ADDRESSES])
    for key, passes, other in (
        ("over_stock", taken.host, "stock"),
        ("end_over_stock", taken.end, "stock"),
        ("over_hand", taken.host, "hand-made"),
        ("end_over_hand", taken.end, "hand-made"),
        ("row_over_stock", taken.row, "stock"),
        ("row_over_hand", taken.row, "hand-made"),
        ("gpu_over_hand", taken.gpu, "hand-made"),
    ):
        if name in passes and other in passes:
            row[key] = paired_ratio(passes[name], passes[other])
    return row


def add_rows(program: Program, device: str, rounds: int, options: Mapping[str, Any], results: Results) -> None:
    """All rows of one program."""
    comparison = Comparison(program, device, options)
    with torch.set_grad_enabled(program.training):
        comparison.make()
        taken, error = attempt(partial(comparison.measure, rounds))
    taken = taken or Taken()
    for name in FORMS:
        if name == "multigraph":  # last, below the parts that its ratios are about
            _add_parts(comparison, taken, results)
        if name == "hand-made" and device == "cpu":
            continue
        row: dict[str, Any] = {**values(name, taken), **comparison.about[name]}
        if name in ("multigraph", SEALED, AHEAD) and device == "cuda":
            row["goals"] = goals_text(program.goals if name == "multigraph" else program.unguarded, row)
        about = {"program": program.name, "form": name}
        results.add(about, row, comparison.errors.get(name, error), headline=True)


def _add_parts(comparison: Comparison, taken: Taken, results: Results) -> None:
    for part in (*FLOOR, ADDRESSES):
        wrong = comparison.errors.get(part)
        if part in taken.host or wrong is not None:
            results.add({"program": comparison.program.name, "form": part}, values(part, taken), wrong)
    least = floor(taken)
    if least is not None:
        about = {"program": comparison.program.name, "form": "floor"}
        results.add(about, {"host_us": statistics.median(least)}, headline=True)


def chosen(quick: bool, only: str | None) -> list[Callable[[str], Program]]:
    """What makes the programs: not before they are needed."""
    some = (tiny, many_inputs) if quick else PROGRAMS
    return [make for make in some if only is None or only in make.__name__]


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    names = ", ".join(make.__name__ for make in PROGRAMS)
    made.add_argument("--only", metavar="TEXT", help=f"programs whose name has this in it: {names}")
    made.add_argument("--rounds", type=int, help="passes of each form")
    made.add_argument("--cudagraphs", choices=("auto", "require", "off"), default="auto", help="multigraph's option")
    return made


def options(cudagraphs: str, device: str) -> dict[str, Any]:
    """multigraph's options; nothing is recorded on a CPU."""
    return {"cudagraphs": False if cudagraphs == "off" else cudagraphs} if device == "cuda" else {}


def main() -> int:
    args = parser().parse_args()
    results = Results("replay", "Replay: microseconds of a call of a recorded program, beside stock's", COLUMNS, args)
    rounds = args.rounds or (3 if args.quick else 41)
    for make in chosen(args.quick and args.only is None, args.only):
        program, error = attempt(partial(make, results.device))
        if program is not None:
            wanted = options(args.cudagraphs, results.device)
            _, error = attempt(partial(add_rows, program, results.device, rounds, wanted, results))
        if error is not None:
            results.add({"program": make.__name__, "form": "multigraph"}, {}, error)
    return results.finish(lambda row: row["form"] == "multigraph")


if __name__ == "__main__":
    sys.exit(main())
