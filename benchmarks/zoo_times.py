"""How fast are ordinary architectures in ordinary loops? Some of the zoo's, beside Inductor and stock's recordings.

    python benchmarks/zoo_times.py --json zoo_times.json --jobs 16 --seconds 250
    python benchmarks/zoo_times.py --only GPT2LMHeadModel resnet18 --loops inference --jobs 2

inference     under no_grad, batches of four, no output is held: calls that follow one another, the last of which is
              waited for ("in a row"), and calls that are each waited for ("waited")
step          forward, loss, backward and SGD's step, gradients set to None at its begin, in a row
accumulated   the same with two micro-batches before SGD's step

The forms are torch.compile ("inductor"), torch.compile(mode="reduce-overhead") with a mark at the begin of each step,
and multigraph with cudagraphs="auto" and no mark. Microseconds of a step, medians of passes that take turns in one
process, after its outputs or gradients were compared with eager's. "ratio": multigraph's over those of the better one
of stock's two forms, the median over passes of one round; a form that raised or was wrong (1e-3, or three times
Inductor's difference) is not there, and "stock said" is what it raised. "GPU us": of a step's work, between two events,
with the whole step in the queue. "recorded": what multigraph still recorded while it was timed.

A model's loop has a process of its own. Processes make their forms side by side, then wait, and are timed one after the
other while nothing else runs. After `--seconds` what was not timed is said not to have been, and so is what was not
ready when `READY` of them had gone. Caches of compiled code are where torch has them (TORCHINDUCTOR_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zoo
from measure import (
    Call,
    Column,
    Goal,
    Pass,
    Results,
    answer,
    arguments,
    attempt,
    end_to_end_us,
    goals_text,
    gpu_us,
    interleaved,
    paired_ratio,
    wait,
    worst_difference,
)

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("model", "model"),
    Column("loop", "loop"),
    Column("inductor_us", "inductor us", 1),
    Column("stock_us", "reduce-overhead us", 1),
    Column("us", "multigraph us", 1),
    Column("ratio", "ratio", 3),
    Column("stock_gpu_us", "reduce-overhead GPU us", 1),
    Column("gpu_us", "GPU us", 1),
    Column("recorded", "recorded"),
    Column("stock_said", "stock said"),
    Column("goals", "goals"),
)
FORMS = ("inductor", "multigraph", "stock")  # what raises comes last
LOOPS = ("inference", "step", "accumulated")
MODELS = (  # those that take longest to compile come first
    "convnext_tiny", "resnet50", "mobilenet_v2", "T5ForConditionalGeneration", "BartForConditionalGeneration",
    "MixtralForCausalLM", "resnet18", "MistralForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel",
    "RobertaForMaskedLM", "ViTForImageClassification", "CLIPVisionModelWithProjection",
)  # fmt: skip
ROWS = 4  # of a batch
SETS = 4  # of inputs, in turn
WARM_UP = 12  # steps of each form
PASS_US = 15_000.0  # that a pass takes at least
READY = 0.6  # of the time, for making the forms

GOALS = (Goal("ratio", "ratio", 1.02),)


# ---------------------------------------------------------------- loops


@dataclass
class Loop:
    """One model's loop in all forms; a form that raises or is wrong is left out, and `said` has the reason."""

    model: zoo.Model
    kind: str
    device: str
    forms: dict[str, Call] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    bound: float = zoo.BOUND

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.module.parameters(), lr=1e-3)
        self.micro_batches = 2 if self.kind == "accumulated" else 1
        self.batches = [self.model.inputs(ROWS) for _ in range(SETS)]
        with torch.no_grad():
            logits = zoo.tensors(self.model.module(**self.batches[0]))[0]
        self.targets = [torch.randint(0, logits.shape[-1], logits.shape[:-1], device=self.device) for _ in self.batches]

    def make(self, name: str) -> None:
        """Compile, compare with eager, and warm up."""
        form, error = attempt(partial(self._checked, name))
        if form is not None:
            self.forms[name] = form
        if error is not None:
            self.said[name] = error

    def _checked(self, name: str) -> Call:
        step = self.step(compiled(name, self.model.module), marked=name == "stock")
        if name == "inductor":
            self.bound = max(self.bound, 3 * self.off(step, 0))
        for number in range(3):
            self.compare(step, number)
        for number in range(WARM_UP):
            step(number % SETS)
        self.compare(step, 0)
        return step

    def step(self, form: Call, marked: bool) -> Call:
        """A step as its user writes it, of the batch with this number."""
        batches, targets, optimizer = self.batches, self.targets, self.optimizer

        def inference(number: int) -> Any:
            if marked:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                return form(**batches[number])

        def training(number: int) -> None:
            if marked:
                torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            for _ in range(self.micro_batches):
                logits = zoo.tensors(form(**batches[number]))[0]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets[number].flatten())
                loss.backward()
                number = (number + 1) % SETS
            optimizer.step()

        return inference if self.kind == "inference" else training

    def compare(self, step: Call, number: int) -> None:
        """Raises WrongNumbers: a step's outputs or gradients are not eager's."""
        off = self.off(step, number)
        if not off < self.bound:  # NaN is wrong too
            raise WrongNumbers(f"off by {off:.1e}")

    def off(self, step: Call, number: int) -> float:
        wanted = self._results(self.step(self.model.module, marked=False), number)
        return worst_difference(self._results(step, number), wanted)

    def _results(self, step: Call, number: int) -> list[torch.Tensor]:
        """Of a step after which the weights are what they were."""
        if self.kind == "inference":
            return [output.clone() for output in zoo.tensors(step(number))]
        groups = self.optimizer.param_groups
        for group in groups:
            group["lr"] = 0.0
        step(number)
        for group in groups:
            group["lr"] = 1e-3
        return [p.grad.clone() for p in self.model.module.parameters() if p.grad is not None]

    def measure(self, rounds: int) -> list[dict[str, Any]]:
        """A row for each way to call."""
        waits = {"in a row": False, "waited": True} if self.kind == "inference" else {"in a row": False}
        rows = []
        for way, each in waits.items():
            row, error = attempt(partial(self._measured, rounds, each))
            named = f"{self.kind}, {way}" if len(waits) > 1 else self.kind
            rows.append({"loop": named, "error": error or self.said.get("multigraph"), **(row or {})})
        return rows

    def _measured(self, rounds: int, each: bool) -> dict[str, Any]:
        inputs: Any = [(number,) for number in range(SETS)]
        once = {name: end_to_end_us(form, inputs, 8, each) for name, form in self.forms.items()}
        first = interleaved(once, 3)
        calls = {name: max(4, min(64, math.ceil(PASS_US / statistics.median(first[name])))) for name in first}
        passes: dict[str, Pass] = {
            name: end_to_end_us(form, inputs, calls[name], each) for name, form in self.forms.items()
        }
        before = multigraph_backend.stats()
        taken = interleaved(passes, rounds)
        row: dict[str, Any] = {"stock_said": None}
        if "stock" in self.said:
            row["stock_said"] = self.said["stock"].splitlines()[0].split(" Stack trace")[0][:160]
        for name in taken:
            row["us" if name == "multigraph" else f"{name}_us"] = statistics.median(taken[name])
        theirs = [name for name in ("inductor", "stock") if name in taken]
        if "multigraph" in taken and theirs:
            best = min(theirs, key=lambda name: statistics.median(taken[name]))
            row |= {"best": best, "ratio": paired_ratio(taken["multigraph"], taken[best])}
            row |= {f"over_{name}": paired_ratio(taken["multigraph"], taken[name]) for name in theirs}
        now = multigraph_backend.stats()
        row["recorded"] = now["recordings"] - before["recordings"]
        row["counts"] = {key: value for key, value in now.items() if value}
        if self.device == "cuda":
            if not each:
                row |= self._gpu_us(taken, inputs, rounds)
            row["goals"] = goals_text(GOALS, row)
        return row

    def _gpu_us(self, taken: Mapping[str, Sequence[float]], inputs: Any, rounds: int) -> dict[str, float]:
        """Of the recorded forms: Inductor's kernels need not fit into the queue."""
        names = [name for name in ("stock", "multigraph") if name in taken]
        passes = {name: gpu_us(self.forms[name], inputs, 200 + 2 * statistics.median(taken[name])) for name in names}
        found = interleaved(passes, rounds)
        return {
            ("gpu_us" if name == "multigraph" else f"{name}_gpu_us"): statistics.median(found[name]) for name in names
        }


class WrongNumbers(RuntimeError):
    """A form does not give what eager gives."""


def compiled(form: str, module: torch.nn.Module) -> Call:
    if form == "multigraph":
        return torch.compile(module, backend=multigraph, options={"cudagraphs": "auto", "on_failure": "raise"})
    return torch.compile(module, mode="reduce-overhead" if form == "stock" else None)


def made(name: str, kind: str, device: str) -> Loop:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    loop = Loop(zoo.model_of(name, "inference" if kind == "inference" else "training", device), kind, device)
    for form in FORMS:
        loop.make(form)
    wait()
    return loop


# ---------------------------------------------------------------- processes


class Process:
    """One loop's: it makes its forms, says so by a file, and is timed when it is told to."""

    def __init__(self, name: str, kind: str, args: argparse.Namespace, folder: Path) -> None:
        self.name, self.kind = name, kind
        self.place = folder / f"{name}-{kind}"
        self.place.mkdir()
        words = ["--only", name, "--loops", kind, "--device", args.device, "--threads", str(args.threads)]
        words += ["--rounds", str(args.rounds), "--answer", str(self.place / "answer.json")]
        self._said = (self.place / "said").open("wb")
        command = [sys.executable, str(Path(__file__).resolve()), *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said)

    def busy(self) -> bool:
        """Whether it still makes its forms."""
        return self._process.poll() is None and not (self.place / "answer.json.ready").exists()

    def timed(self, seconds: float) -> tuple[list[dict[str, Any]] | None, str | None]:
        """Its rows, or what went wrong."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        path, until = self.place / "answer.json", time.monotonic() + seconds
        while not path.exists() and self._process.poll() is None:
            if time.monotonic() > until:
                return None, f"not timed in {seconds:.0f} seconds"
            time.sleep(0.01)
        if path.exists():
            told = json.loads(path.read_text())
            return told["value"], told["error"]
        said = (self.place / "said").read_text(errors="replace").strip().splitlines() or ["nothing said"]
        return None, "\n".join([f"ended with status {self._process.returncode}: {said[-1]}", *said[-20:]])

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._said.close()


def serve(args: argparse.Namespace) -> int:
    """The process of one loop."""
    torch.set_num_threads(args.threads)

    def measured() -> list[dict[str, Any]]:
        loop = made(args.only[0], args.loops[0], args.device)
        Path(f"{args.answer}.ready").touch()
        sys.stdin.readline()
        return loop.measure(args.rounds)

    status = answer(args.answer, measured)
    sys.stdout.flush()
    os._exit(status)  # what it holds takes seconds to go, and the next one waits


def run(results: Results, names: Sequence[str], args: argparse.Namespace) -> None:
    began = time.monotonic()
    todo = [(name, kind) for kind in args.loops or LOOPS for name in names]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as many processes as there are processors
    processes: list[Process] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while time.monotonic() - began < READY * args.seconds:
                busy = sum(process.busy() for process in processes)
                while busy < args.jobs and len(processes) < len(todo):
                    processes.append(Process(*todo[len(processes)], args, Path(folder)))
                    busy += 1
                if not busy:
                    break
                time.sleep(0.05)
            late = f"its forms were not ready after {time.monotonic() - began:.0f} seconds"
            for process in processes:
                if process.busy():
                    process.end()
                    results.add({"model": process.name, "loop": process.kind}, {}, late, headline=True)
                    process.name = ""
            for name, kind in todo[len(processes) :]:
                results.add({"model": name, "loop": kind}, {}, late, headline=True)
            for process in filter(lambda each: each.name, processes):
                left = args.seconds - (time.monotonic() - began)
                rows, error = process.timed(min(left, 60.0)) if left > 1 else (None, "no time was left for it")
                for row in rows or [{"loop": process.kind, "error": error}]:
                    wrong = row.pop("error")
                    results.add({"model": process.name, "loop": row.pop("loop")}, row, wrong, headline=True)
                process.end()
        finally:
            for process in processes:
                process.end()


# ---------------------------------------------------------------- all


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each loop and for all of them, geometric means of the ratios: of all rows, and of those where stock's
    recordings ran."""
    found = []
    loops = list(dict.fromkeys(row["loop"] for row in rows))
    for title, chosen in [*((loop, [loop]) for loop in loops), ("all", loops)]:
        ran = [row for row in rows if row["loop"] in chosen and row.get("ratio") is not None]
        beside = [row for row in ran if row.get("stock_us") is not None]
        for what, some in (("models", ran), ("models that stock records", beside)):
            if some:
                summary = {"ratio": geometric_mean([row["ratio"] for row in some])}
                summary["worst"] = max(row["ratio"] for row in some)
                found.append(({"model": f"{len(some)} {what}", "loop": title}, summary))
    return found


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(zoo.MODELS), help=f"{len(MODELS)} of the zoo")
    made.add_argument("--loops", nargs="+", choices=LOOPS, help="all")
    made.add_argument("--jobs", type=int, default=1, help="processes that make their forms at a time (1)")
    made.add_argument("--rounds", type=int, default=9, help="passes of each form (9)")
    made.add_argument("--seconds", type=float, default=3600.0, help="for all of it (3600)")
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # of the process of one loop
    return made


def main() -> int:
    args = parser().parse_args()
    if args.answer is not None:
        return serve(args)
    title = "Ordinary architectures in ordinary loops: microseconds of a step, beside stock's"
    results = Results("zoo_times", title, COLUMNS, args)
    args.device = results.device
    names: Sequence[str] = args.only or (MODELS[-4:] if args.quick else MODELS)
    run(results, names, args)
    results.sort(lambda row: names.index(row["model"]))
    for about, row in summaries(results.rows):
        results.add(about, row, headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
