"""Did steps become slower? Recorded steps of this checkout, of another one, and stock's, in turns on one GPU.

    git archive --prefix before/ COMMIT multigraph_backend | tar x
    python benchmarks/step_times.py --before before --before-commit COMMIT --json step_times.json

two lengths    12 decoder blocks (width 1024, batch 8), AdamW, in turn of 1024 and 512 tokens
accumulation   the same at 512 tokens, steps of 4 micro-batches each
three models   three models of 4 blocks each, a step of each in turn, gradients cleared after each step
inference      8 decoder blocks, batches of 240 x 16 tokens, an output's norm is read after each
small          2 decoder blocks of width 256, inference of 4 x 16 tokens, 20 calls in a row

The forms are multigraph of this checkout, multigraph of the other ("before"), and torch.compile(mode="reduce-overhead")
with a mark before each step. Each has a process of its own; they all stay, and take turns of some steps, each time in
another order; while one is timed the others wait. "ms" is the median over turns of the milliseconds of a step, until
its number is read; "ratio" (this checkout's over the other's) and "over stock" are medians of the quotients of turns of
one round. All forms run the programs of this checkout, and their losses must agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
import workloads
from measure import CHECKOUT, Column, Results, arguments, paired_ratio
from memory_programs import Compile, accumulation, compiled_as, three_models, two_lengths

COLUMNS = (
    Column("program", "program"),
    Column("before_ms", "before ms", 3),
    Column("ms", "ms", 3),
    Column("stock_ms", "stock ms", 3),
    Column("ratio", "ratio", 3),
    Column("over_stock", "over stock", 3),
    Column("spread", "spread", 3),
)
FORMS = ("multigraph", "before", "stock")
PROGRAMS = ("two lengths", "accumulation", "three models", "inference", "small")
STEPS = 1 << 30  # more than are asked for
WARM_UP = {"three models": 24, "small": 3}
AGREE = 0.02  # how far losses may be from each other: AdamW in bfloat16


def inference(compiled: Compile, device: str, quick: bool) -> Iterator[float]:
    layers, width, batch = (1, 64, 2) if quick else (8, 1024, 240)
    model = workloads.Decoder(layers, width, width // 64).to(device, workloads.dtype_on(device))
    run = compiled(lambda x: model(x))
    while True:
        with torch.no_grad():
            x = torch.randn(batch, 16, width, device=device, dtype=workloads.dtype_on(device))
            yield float(torch.linalg.vector_norm(run(x), 1, dtype=torch.float32)) / x.numel()


def small(compiled: Compile, device: str, quick: bool) -> Iterator[float]:
    model = workloads.Decoder(2, 256, 4).to(device, workloads.dtype_on(device))
    run = compiled(lambda x: model(x))
    while True:
        with torch.no_grad():
            x = torch.randn(4, 16, 256, device=device, dtype=workloads.dtype_on(device))
            for _ in range(20):
                y = run(x)
            yield float(torch.linalg.vector_norm(y, 1, dtype=torch.float32)) / x.numel()


def steps_of(name: str, form: str, device: str, quick: bool) -> Iterator[float]:
    """The numbers of a program's steps, without end."""
    torch.manual_seed(0)
    compiled = compiled_as("stock" if form == "stock" else "multigraph", device, dynamic=True)
    if name == "two lengths":
        return two_lengths(compiled, device, quick, steps=STEPS)
    if name == "accumulation":
        return accumulation(compiled, device, quick, steps=STEPS)
    if name == "three models":
        return three_models(compiled, device, quick, steps=STEPS)
    return inference(compiled, device, quick) if name == "inference" else small(compiled, device, quick)


# ---------------------------------------------------------------- processes


def serve(args: argparse.Namespace) -> int:
    """The process of one form: for each line, a number of steps, says their milliseconds and the last's number."""
    import multigraph_backend

    torch.set_num_threads(args.threads)
    steps = steps_of(args.program[0], args.form, args.device, args.quick)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        began = time.perf_counter()
        numbers = list(islice(steps, int(line)))
        ms = 1000 * (time.perf_counter() - began) / len(numbers)
        where = str(Path(multigraph_backend.__file__).parents[1])
        told = {"ms": ms, "number": numbers[-1], "where": where, "recordings": multigraph_backend.stats()["recordings"]}
        print(json.dumps(told), file=said, flush=True)
    said.flush()
    os._exit(0)  # stock's trees take their time to go


class Form:
    """A form's process, and what it says."""

    def __init__(self, program: str, form: str, checkout: Path, args: argparse.Namespace, log: TextIO) -> None:
        words = ["--serve", "--program", program, "--form", form, "--device", args.device]
        words += ["--threads", str(args.threads), *(["--quick"] if args.quick else [])]
        path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.checkout = checkout
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *words],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def ask(self, steps: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()

    def told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.flush()
            said = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-8:]
            raise RuntimeError(f"the process ended with status {self._process.wait()}: " + "\n".join(said))
        told: dict[str, Any] = json.loads(line)
        if Path(told["where"]).resolve() != self.checkout.resolve():
            raise RuntimeError(f"multigraph was found in {told['where']}, not in {self.checkout}")
        return told

    def steps(self, count: int) -> dict[str, Any]:
        self.ask(count)
        return self.told()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(name: str, args: argparse.Namespace) -> Mapping[str, Any]:
    """The row of a program."""
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        forms: dict[str, Form] = {}
        logs = {form: (Path(folder) / form).open("w") for form in args.forms}
        try:
            for form in args.forms:
                forms[form] = Form(name, form, args.before if form == "before" else CHECKOUT, args, logs[form])
            warm_up = 2 if args.quick else WARM_UP.get(name, 12)
            for each in forms.values():  # side by side
                each.ask(warm_up)
            numbers = {form: each.told()["number"] for form, each in forms.items()}
            for form, number in numbers.items():
                if not math.isclose(number, numbers["multigraph"], rel_tol=AGREE):
                    raise RuntimeError(f"{form} gives {number}, not {numbers['multigraph']}")
            told = {form: each.steps(6) for form, each in forms.items()}
            count = 6 * max(1, math.ceil(args.turn_ms / 6 / max(each["ms"] for each in told.values())))
            ms: dict[str, list[float]] = {form: [] for form in forms}
            for _ in range(args.rounds):
                for form in order.sample(list(forms), len(forms)):
                    ms[form].append(forms[form].steps(count)["ms"])
            later = {form: each.steps(1)["recordings"] - told[form]["recordings"] for form, each in forms.items()}
        finally:
            for each in forms.values():
                each.end()
            for log in logs.values():
                log.close()
    row: dict[str, Any] = {"steps": count, "recorded_later": later, "ms": statistics.median(ms["multigraph"])}
    row["spread"] = (max(ms["multigraph"]) - min(ms["multigraph"])) / row["ms"]
    for form, key in (("before", "ratio"), ("stock", "over_stock")):
        if form in ms:
            row[f"{form}_ms"], row[key] = statistics.median(ms[form]), paired_ratio(ms["multigraph"], ms[form])
    return row


def main(words: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--before", type=Path, metavar="DIR", help="a folder that holds the other multigraph_backend")
    parser.add_argument("--before-commit", metavar="COMMIT", help="which one that is, for the file")
    parser.add_argument("--program", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each form (15)")
    parser.add_argument("--turn-ms", type=float, default=400.0, help="milliseconds of a turn, at least (400)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # the process of one form
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.serve:
        return serve(args)
    if args.before is not None and not (args.before / "multigraph_backend").is_dir():
        parser.error(f"{args.before} holds no multigraph_backend")
    args.forms = [form for form in FORMS if form != "before" or args.before is not None]
    if args.quick:
        args.rounds, args.turn_ms = 2, 1.0
    results = Results("step_times", "Recorded steps beside those of another checkout, in turns", COLUMNS, args)
    args.device = results.device
    for name in args.program:
        about = {"program": name, "before": args.before_commit}
        results.row(about, lambda name=name: compare(name, args), headline=True)  # type: ignore[misc]
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
