"""Decoding with weights that torchao has quantized: one model in five forms that take turns.

eager               the model as it is
inductor            torch.compile(dynamic=True)
inductor per shape  torch.compile(dynamic=False): a trace and a compile for each size
reduce-overhead     the same with mode="reduce-overhead", stock's CUDA graphs, and a mark at the begin of each step
multigraph          dynamic=True, a variant for each size through "specialize", cudagraphs="auto" on a GPU, and no mark

The model is a decoder of this repository with an embedding, a head, and keys and values in buffers of 256 positions
that calls write to in place. A call is one token for each of 1, 8 or 64 rows, somewhere in the second half of these
positions, or the first 128 of 8 rows; its result is the last token's logits. All linear layers are quantized:

Int8WeightOnly          int8, a scale for each row
IntxWeightOnly          4 bits, a scale for each row; each number takes a byte
Int4WeightOnly          4 bits, two to a byte, a scale for each 128; on a GPU, with kernels that a machine may lack
Int4WeightOnly, tiled   the same in the layout of torch's own kernel; on a GPU

us           of a call that is waited for, from end to end; "GPU us": of its work, between two events, with the whole
             call in the queue. "ratio": over the best of the other forms, the median over passes of one round
in variants  share of the calls behind "us" that a variant ran; "replayed": that recordings ran as a whole
worst        largest relative difference from eager, on new inputs, before and after a form is timed
failures     of multigraph's compiles

A form that is 30 times as slow as the fastest is timed by one call, and has no ratio.

Floats that the model holds (epsilons) are constants, in all forms: torch._dynamo.config.specialize_float, as
docs/how-to/serve.md has it.

Each kind of weights has a process of its own. Processes compile side by side (`--jobs`), then each in turn warms up,
when recordings are made, and is timed, while nothing else runs. Weights that cannot be made or called are a row with
the error; the exit status is about multigraph's rows, and about weights that need no kernels of their own. Inductor is
as torch sets it; `--tuned`: as torchao recommends, which tunes each kernel and takes minutes.

    python benchmarks/quantized.py --json quantized.json       needs torchao (`pip install "multigraph[clients]"`)
    python benchmarks/quantized.py --bits 8 --only multigraph

With --quick the model is small and nothing generates code (aot_eager): whether it runs, not how fast.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
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
    gpu_us,
    in_own_process,
    input_sets,
    interleaved,
    own_code,
    paired_ratio,
    wait,
    worst_difference,
)

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("bits", "bits"),
    Column("weights", "weights"),
    Column("call", "call"),
    Column("form", "form"),
    Column("us", "us", 1),
    Column("over_stock", "ratio", 3),
    Column("gpu_us", "GPU us", 1),
    Column("gpu_over_stock", "GPU ratio", 3),
    Column("in_variants", "in variants", 2),
    Column("replayed", "replayed", 2),
    Column("worst", "worst"),
    Column("failures", "failures"),
    Column("goals", "goals"),
)
STOCK = ("eager", "inductor", "inductor per shape", "reduce-overhead")
OURS = "multigraph"
FORMS = (*STOCK, OURS)
IN_VARIANTS = Goal("in variants", "in_variants", 1, at_least=True)
RECORDED = (Goal("replayed", "replayed", 1, at_least=True), Goal("ratio", "over_stock", 1.0))
GOALS = {"cpu": (IN_VARIANTS,), "cuda": (IN_VARIANTS, *RECORDED)}

WARM_UP = 12  # calls of each form and size
SETTLING = 12  # passes over the inputs, at most, before a size is timed
TOO_SLOW = 0.2  # seconds of a call, which is not made so often then
SLOW = 30  # times as slow as the fastest: one call says enough
SECONDS = 1200.0  # of one process
NEEDED = 'benchmarks/quantized.py needs torchao: pip install "multigraph[clients]"'

Inputs = tuple[torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------- weights


@dataclass(frozen=True)
class Weights:
    """`config`: from `torchao.quantization`. `kernels`: which it needs kernels for that torch and Inductor lack."""

    bits: int
    config: Callable[[Any], Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    kernels: bool = False


WEIGHTS = {
    "Int8WeightOnly": Weights(8, lambda ao: ao.Int8WeightOnlyConfig(set_inductor_config=False)),
    "IntxWeightOnly": Weights(4, lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),  # type: ignore[attr-defined]
    "Int4WeightOnly": Weights(4, lambda ao: ao.Int4WeightOnlyConfig(set_inductor_config=False), ("cuda",), True),
    "Int4WeightOnly, tiled": Weights(
        4,
        lambda ao: ao.Int4WeightOnlyConfig(set_inductor_config=False, int4_packing_format="tile_packed_to_4d"),
        ("cuda",),
        True,
    ),
}


# ---------------------------------------------------------------- the model


class CachedAttention(workloads.Attention):
    """Attention over buffers, to which the keys and values of a call's tokens are written first."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, width: int, heads: int, rows: int, context: int) -> None:
        super().__init__(width, heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(rows, context, heads, width // heads), persistent=False)

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """`past`: the positions of the tokens, and which positions each of them sees."""
        assert past is not None
        places, visible = past
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads).unbind(2)
        each = torch.arange(rows, device=x.device)[:, None]
        self.keys.index_put_((each, places), k)
        self.values.index_put_((each, places), v)
        k, v = self.keys[:rows].transpose(1, 2), self.values[:rows].transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible)
        mixed = self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        assert isinstance(mixed, torch.Tensor)
        return mixed


@dataclass(frozen=True)
class Size:
    """Of a model and its calls."""

    layers: int
    width: int
    heads: int
    words: int
    context: int
    prompt: int
    dtype: torch.dtype

    @property
    def calls(self) -> dict[str, tuple[int, int]]:
        """Rows and tokens. The largest comes first, as a server warms up."""
        decode = {f"decode, {rows}": (rows, 1) for rows in (64, 8, 1)}
        return {f"prefill, 8 x {self.prompt}": (8, self.prompt), **decode}


def size_on(device: str, quick: bool) -> Size:
    if quick:
        return Size(1, 64, 2, 100, 32, 16, torch.float32)
    if device == "cpu":
        return Size(2, 256, 4, 1000, 256, 128, torch.float32)
    return Size(4, 2048, 16, 32000, 256, 128, torch.bfloat16)


class LanguageModel(torch.nn.Module):
    """Token ids, rows x tokens, and the positions of these tokens -> logits of the last one of each row."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = torch.nn.Embedding(size.words, size.width)
        self.decoder = workloads.Decoder(size.layers, size.width, size.heads)
        rows = 2 + max(rows for rows, _ in size.calls.values())  # more than any call has: no size is taken for it
        for block in self.decoder.blocks:
            block.attention = CachedAttention(size.width, size.heads, rows, size.context)
        self.norm = torch.nn.RMSNorm(size.width)
        self.head = torch.nn.Linear(size.width, size.words, bias=False)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        visible = torch.arange(self.size.context, device=ids.device) <= places[:, None]
        for block in self.decoder.blocks:
            x = block(x, (places, visible))
        logits = self.head(self.norm(x[:, -1:]))
        assert isinstance(logits, torch.Tensor)
        return logits


def quantized(name: str, size: Size, device: str, tuned: bool) -> LanguageModel:
    ao = importlib.import_module("torchao.quantization")
    torch.manual_seed(0)
    model = LanguageModel(size).to(device, size.dtype).eval()
    ao.quantize_(model, WEIGHTS[name].config(ao))
    if tuned:
        importlib.import_module("torchao.quantization.utils").recommended_inductor_config_setter()
    return model


# ---------------------------------------------------------------- forms


def compiled_as(form: str, program: Call, size: Size, device: str, quick: bool) -> Call:
    """`quick`: by aot_eager, which knows no modes."""
    if form == "eager":
        return program
    backend = "aot_eager" if quick else "inductor"
    program = own_code(program)
    if form == OURS:
        declared = [{"ids[0]": rows, "ids[1]": tokens} for rows, tokens in size.calls.values()]
        options: dict[str, Any] = {"specialize": declared, "compiler": backend}
        if device == "cuda":
            options["cudagraphs"] = "auto"
        return torch.compile(program, backend=multigraph, dynamic=True, options=options)
    if form != "reduce-overhead":
        return torch.compile(program, backend=backend, dynamic=form == "inductor")
    how: dict[str, Any] = {"backend": backend} if quick else {"mode": "reduce-overhead"}
    marked = torch.compile(program, dynamic=False, **how)

    def call(*inputs: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return marked(*inputs)

    return call


class WrongNumbers(RuntimeError):
    """A form does not give what eager gives."""


class Comparison:
    """All forms of one model, made and checked; one that fails is left out, with its error."""

    def __init__(self, name: str, device: str, quick: bool, tuned: bool) -> None:
        """Raises what torchao, or a call of the model, raises."""
        self.device, self.quick, self.size = device, quick, size_on(device, quick)
        self.bound = 3e-2 if self.size.dtype == torch.bfloat16 else 1e-4
        model = quantized(name, self.size, device, tuned)

        def program(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            logits = model(ids, places)
            assert isinstance(logits, torch.Tensor)
            return logits

        self.program: Call = program
        self.forms: dict[str, Call] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.errors: dict[tuple[str, str], str] = {}
        self.worst: dict[tuple[str, str], float] = {}
        for call in self.size.calls:
            program(*self.inputs(call))
        wait()

    def inputs(self, call: str) -> Inputs:
        rows, tokens = self.size.calls[call]
        half = self.size.context // 2
        ids = torch.randint(self.size.words, (rows, tokens), device=self.device)
        if tokens > 1:
            return ids, torch.arange(tokens, device=self.device)
        return ids, torch.randint(half, 2 * half, (1,), device=self.device)

    def make(self, form: str) -> None:
        """A form that has been called once at all sizes, and gave what eager gives."""
        began = time.perf_counter()
        made, error = attempt(partial(compiled_as, form, self.program, self.size, self.device, self.quick))
        if made is not None:
            self.forms[form] = made
        for call in self.size.calls:
            if made is not None:
                _, error = attempt(partial(self.check, form, made, call))
            if error is not None:
                self.errors[form, call] = error
        self.about[form] = {"made_s": time.perf_counter() - began}

    def warm_up(self) -> None:
        """What records does so here, and looks at how long its recordings take: when nothing else runs."""
        for form, made in self.forms.items():
            for call in self.size.calls:
                if (form, call) not in self.errors:
                    _, error = attempt(partial(self._warm, form, made, call))
                    if error is not None:
                        self.errors[form, call] = error
        if OURS in self.forms:
            counts = multigraph_backend.stats()
            self.about[OURS] |= {"failures": counts["failures"]}
            self.about[OURS] |= {"counts": {key: value for key, value in counts.items() if value}}
            self.about[OURS] |= {"explain": str(multigraph_backend.explain()).splitlines()}

    def _warm(self, form: str, made: Call, call: str) -> None:
        took = []
        for _ in range(3):
            began = time.perf_counter()
            self.check(form, made, call)
            took.append(time.perf_counter() - began)
        for _ in range(WARM_UP if min(took) < TOO_SLOW else 0):
            made(*self.inputs(call))
        wait()

    def check(self, form: str, made: Call, call: str) -> None:
        """Raises WrongNumbers: on new inputs, the result is not eager's."""
        inputs = self.inputs(call)
        wanted = self.program(*inputs).clone()
        off = worst_difference([made(*inputs)], [wanted])
        self.worst[form, call] = max(off, self.worst.get((form, call), 0.0))
        if not off < self.bound:  # NaN is wrong too
            raise WrongNumbers(f"differs from eager by {off:.2e}")

    def rows(self, call: str, rounds: int) -> list[dict[str, Any]]:
        """One for each form."""
        taken, error = attempt(partial(self._timed, call, rounds))
        rows: list[dict[str, Any]] = []
        for form, about in self.about.items():
            wrong = self.errors.get((form, call), error)
            if wrong is None:
                _, wrong = attempt(partial(self.check, form, self.forms[form], call))
            row = {"call": call, "form": form, **about, **(taken or {}).get(form, {}), "error": wrong}
            off = self.worst.get((form, call))
            rows.append(row | {"worst": None if off is None else f"{off:.1e}"})
            if form == OURS:
                rows[-1]["goals"] = goals_text(GOALS[self.device], row)
        return rows

    def _timed(self, call: str, rounds: int) -> dict[str, dict[str, Any]]:
        """What was measured of each form that is right, by form."""
        inputs = input_sets(lambda: self.inputs(call), most=4)
        forms = {form: made for form, made in self.forms.items() if (form, call) not in self.errors}
        for made in forms.values():
            settle(made, inputs)
        once = {form: end_to_end_us(made, inputs, 1)() for form, made in forms.items()}
        slow = {form: us for form, us in once.items() if us > SLOW * min(once.values())}
        forms = {form: made for form, made in forms.items() if form not in slow}
        before = answered()
        end = interleaved({form: end_to_end_us(made, inputs) for form, made in forms.items()}, rounds)
        found: dict[str, dict[str, Any]] = {form: {"us": statistics.median(us)} for form, us in end.items()}
        if OURS in found:
            found[OURS] |= answered().since(before, 8 * rounds, self.device)
        add_ratios(found, end, "over_stock")
        if self.device == "cuda":
            passes = {form: gpu_us(made, inputs, 200 + 2 * found[form]["us"]) for form, made in forms.items()}
            work = interleaved(passes, rounds)
            for form, us in work.items():
                found[form]["gpu_us"] = statistics.median(us)
            add_ratios(found, work, "gpu_over_stock")
        return found | {form: {"us": us} for form, us in slow.items()}


def settle(made: Call, inputs: Sequence[tuple[torch.Tensor, ...]]) -> None:
    """Call until nothing is recorded: recordings of other sizes may have given way to those of this one."""
    for passes in range(1, SETTLING + 1):
        before = multigraph_backend.stats()["recordings"]
        for each in inputs:
            made(*each)
        if passes > 1 and multigraph_backend.stats()["recordings"] == before:
            return


def add_ratios(found: Mapping[str, dict[str, Any]], taken: Mapping[str, Sequence[float]], key: str) -> None:
    """Add each form's ratio to the best of stock's."""
    stock = [form for form in STOCK if form in taken]
    if stock:
        best = min(stock, key=lambda form: statistics.median(taken[form]))
        for form, us in taken.items():
            found[form][key] = paired_ratio(us, taken[best])


@dataclass(frozen=True)
class Answered:
    """What has run calls of multigraph so far: variants, recordings, code whose kernels are recorded as a rule."""

    variants: int
    replays: int
    unrecorded: int
    recordings: int

    def since(self, before: Answered, calls: int, device: str) -> dict[str, Any]:
        """Of so many calls: those that variants ran, and those of which no kernel ran outside of recordings."""
        values: dict[str, Any] = {"in_variants": (self.variants - before.variants) / calls}
        if device == "cuda":
            recorded = self.recordings - before.recordings
            missed = self.unrecorded - before.unrecorded + recorded
            replays = calls if recorded else self.replays - before.replays  # what is replaced takes its count along
            values |= {"replayed": max(0, min(replays, calls - missed)) / calls}
            values |= {"recorded": recorded}
        return values


def answered() -> Answered:
    pieces = [piece for device in multigraph_backend.explain().recordings for piece in device.pieces]
    counts = multigraph_backend.stats()
    return Answered(
        counts["variant_calls"],
        sum(piece.replays for piece in pieces),
        sum(sum(piece.unrecorded.values()) for piece in pieces),
        counts["recordings"],
    )


# ---------------------------------------------------------------- processes


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one kind of weights."""
    torch._dynamo.config.specialize_float = True
    with torch.no_grad():
        comparison = Comparison(args.weights, args.device, args.quick, args.tuned)
        for form in chosen(args.only):
            comparison.make(form)
        wait_for_turn(args.turn)
        comparison.warm_up()
        return [row for call in comparison.size.calls for row in comparison.rows(call, args.rounds)]


def wait_for_turn(turn: Path) -> None:
    turn.with_suffix(".ready").touch()
    while not turn.exists():
        if not turn.parent.exists():
            raise RuntimeError("nobody waits for what would be measured")
        time.sleep(0.02)


def in_turns(names: Sequence[str], words: Sequence[str], jobs: int) -> Iterator[tuple[str, Any, str | None]]:
    """What the process of each name measured, or its error. At most `jobs` of them make their forms at a time; they
    are timed when all have."""
    running: dict[str, Future[tuple[Any, str | None]]] = {}
    # the folder goes first, and with it all who wait for their turn
    with ThreadPoolExecutor(len(names)) as threads, tempfile.TemporaryDirectory() as folder:
        turns = {name: Path(folder) / f"turn{number}" for number, name in enumerate(names)}

        def busy() -> int:
            return sum(
                not process.done() and not turns[name].with_suffix(".ready").exists()
                for name, process in running.items()
            )

        for name in names:
            while busy() >= jobs:
                time.sleep(0.05)
            more = ["--weights", name, "--turn", str(turns[name])]
            running[name] = threads.submit(in_own_process, __file__, [*words, *more], SECONDS)
        while busy():
            time.sleep(0.05)
        for name, process in running.items():
            turns[name].touch()
            yield name, *process.result()


def chosen(only: str | None) -> list[str]:
    return [form for form in FORMS if only is None or only in form]


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    processors = os.cpu_count() or 1
    made.add_argument("--only", metavar="TEXT", help=f"forms whose name has this in it: {', '.join(FORMS)}")
    made.add_argument("--bits", nargs="+", type=int, choices=sorted({each.bits for each in WEIGHTS.values()}))
    made.add_argument("--rounds", type=int, help="passes of each form")
    made.add_argument("--jobs", type=int, default=max(1, processors // 4), help="processes that compile at a time")
    made.add_argument("--tuned", action="store_true", help="Inductor as torchao recommends it: takes minutes")
    made.add_argument("--weights", choices=WEIGHTS, help=argparse.SUPPRESS)  # of the process of one kind
    made.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> int:
    args = parser().parse_args()
    if importlib.util.find_spec("torchao") is None:
        sys.exit(NEEDED)
    if not chosen(args.only):
        parser().error(f"--only: no form has {args.only!r} in its name")
    if args.answer is not None:
        torch.set_num_threads(args.threads)
        return answer(args.answer, partial(measured, args))
    results = Results("quantized", "Quantized weights: microseconds of a call, beside stock's", COLUMNS, args)
    rounds = args.rounds or (2 if args.quick else 15)
    words = ["--device", results.device, "--threads", str(args.threads), "--rounds", str(rounds)]
    words += [f"--{name}" for name in ("quick", "tuned") if getattr(args, name)]
    words += [] if args.only is None else ["--only", args.only]
    names = [
        name
        for name, weights in WEIGHTS.items()
        if results.device in weights.devices and (args.bits is None or weights.bits in args.bits)
    ]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // args.jobs)))
    for name, rows, error in in_turns(names, words, args.jobs):
        for row in rows or [{"call": None, "form": None, "error": error}]:
            about = {"bits": WEIGHTS[name].bits, "weights": name, "call": row.pop("call"), "form": row.pop("form")}
            results.add(about, row, row.pop("error"), headline=True)
    return results.finish(
        lambda row: row["form"] == OURS or (row["form"] is None and not WEIGHTS[row["weights"]].kernels)
    )


if __name__ == "__main__":
    sys.exit(main())
