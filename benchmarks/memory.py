"""What memory a process takes: peak reserved, and what the device has less of, by form and program.

eager              nothing compiled
inductor           torch.compile, without CUDA graphs
stock              torch.compile(mode="reduce-overhead")
multigraph         torch.compile(backend="multigraph", options={"cudagraphs": "auto"})
multigraph, over the extension   the same, with the allocator extension as the process's allocator

two lengths        12 decoder blocks (width 1024, batch 8), AdamW, 40 steps in turn of 1024 and 512 tokens
accumulation       the same at 512 tokens, 10 steps of 4 micro-batches each
sizes, ORDER       8 decoder blocks, inference, 32 batch sizes of 16 tokens, three calls each: ascending, descending, at
                   random, and the largest alone
three models       three models of 4 blocks each, trained in turn, 10 steps each

Every form of every program has a process of its own, which runs nothing else. "reserved" is torch's
`max_memory_reserved`, which knows nothing of what a pluggable allocator holds; "used" is the most by which the
device's free memory went down since the process had its context, looked at after each step: what decides whether
something else fits beside it. Stock's loops raise without step marks; it gets one before each call, and nobody else.
The losses, or outputs, of the last steps are compared with eager's.

    python benchmarks/memory.py --json memory.json
    python benchmarks/memory.py --program "two lengths" --only multigraph
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import workloads
from measure import Column, Goal, Results, answer, arguments, goals_text, in_own_process

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("program", "program"),
    Column("form", "form"),
    Column("reserved_mib", "reserved MiB", 0),
    Column("used_mib", "used MiB", 0),
    Column("end_mib", "used at the end", 0),
    Column("over_stock", "used/stock", 3),
    Column("over_inductor", "used/Inductor", 3),
    Column("over_largest", "used/largest alone", 3),
    Column("recordings", "recordings"),
    Column("goals", "goals"),
)
FORMS = ("eager", "inductor", "stock", "multigraph", "multigraph, over the extension")
ORDERS = ("largest", "ascending", "descending", "at random")
PROGRAMS = ("two lengths", "accumulation", *(f"sizes, {order}" for order in ORDERS), "three models")
QUICK = PROGRAMS[:1]
GOALS = {
    "two lengths": (Goal("over stock", "over_stock", 1.0), Goal("over Inductor", "over_inductor", 1.1)),
    "accumulation": (Goal("over stock", "over_stock", 1.0),),
    "three models": (Goal("over stock", "over_stock", 1.0),),
}
SIZES_GOALS = (Goal("over stock", "over_stock", 1.0), Goal("over the largest alone", "over_largest", 1.02))
SECONDS = 300  # for the process of one form

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Loss = Callable[[torch.Tensor], torch.Tensor]


class Watch:
    """What the device has less of since the process began to use it."""

    def __init__(self, device: str) -> None:
        self.on = device == "cuda"
        if self.on:
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.free, self.used = self._free(), 0

    def _free(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.on else 0

    def look(self) -> int:
        now = self.free - self._free()
        self.used = max(self.used, now)
        return now


# ---------------------------------------------------------------- programs: each yields a number after each step


def _model(layers: int, width: int, device: str) -> workloads.Decoder:
    return workloads.Decoder(layers, width, width // 64).to(device, workloads.dtype_on(device))


def _loss(model: torch.nn.Module) -> Loss:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).float().pow(2).mean()  # type: ignore[no-any-return]

    return loss


def two_lengths(compiled: Compile, device: str, quick: bool) -> Iterator[float]:
    layers, width, batch, lengths, steps = (2, 64, 2, (8, 4), 4) if quick else (12, 1024, 8, (1024, 512), 40)
    model = _model(layers, width, device)
    loss, optimizer = compiled(_loss(model)), torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        x = torch.randn(batch, lengths[step % 2], width, device=device, dtype=workloads.dtype_on(device))
        optimizer.zero_grad()
        value = loss(x)
        value.backward()
        optimizer.step()
        yield float(value)


def accumulation(compiled: Compile, device: str, quick: bool) -> Iterator[float]:
    layers, width, batch, length, steps = (2, 64, 2, 8, 3) if quick else (12, 1024, 8, 512, 10)
    model = _model(layers, width, device)
    loss, optimizer = compiled(_loss(model)), torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        total = 0.0
        optimizer.zero_grad()
        for _ in range(4):
            x = torch.randn(batch, length, width, device=device, dtype=workloads.dtype_on(device))
            value = loss(x) / 4
            value.backward()
            total += float(value.detach())
        optimizer.step()
        yield total


def sizes(compiled: Compile, device: str, quick: bool, order: str) -> Iterator[float]:
    layers, width = (1, 64) if quick else (8, 1024)
    all_sizes = [2, 3, 4] if quick else [2, 4, *range(8, 241, 8)]
    if order == "largest":
        all_sizes = all_sizes[-1:]
    if order == "descending":
        all_sizes.reverse()
    if order == "at random":
        random.Random(0).shuffle(all_sizes)
    model = _model(layers, width, device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)  # type: ignore[no-any-return]

    run = compiled(forward)
    with torch.no_grad():
        for batch in all_sizes:
            for _ in range(3):
                x = torch.randn(batch, 16, width, device=device, dtype=workloads.dtype_on(device))
                yield float(run(x).float().abs().mean())


def three_models(compiled: Compile, device: str, quick: bool) -> Iterator[float]:
    layers, width, batch, length, steps = (1, 64, 2, 8, 3) if quick else (4, 1024, 8, 512, 10)
    models = [_model(layers, width, device) for _ in range(3)]
    losses = [compiled(_loss(model)) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    for _ in range(steps):
        for loss, optimizer in zip(losses, optimizers, strict=True):
            x = torch.randn(batch, length, width, device=device, dtype=workloads.dtype_on(device))
            optimizer.zero_grad()
            value = loss(x)
            value.backward()
            optimizer.step()
            yield float(value)


def program(name: str) -> Callable[[Compile, str, bool], Iterator[float]]:
    if name.startswith("sizes, "):
        return partial(sizes, order=name.removeprefix("sizes, "))
    return {"two lengths": two_lengths, "accumulation": accumulation, "three models": three_models}[name]


# ---------------------------------------------------------------- forms


def compiled_as(form: str, device: str) -> Compile:
    """What compiles a function as `form` says; a function of its own each time, as users have."""
    if form == "eager":
        return lambda function: function
    if form == "inductor":
        return lambda function: torch.compile(function, dynamic=True)
    if form == "stock":
        return lambda function: _marked(torch.compile(function, mode="reduce-overhead", dynamic=True))
    options: dict[str, Any] = {"cudagraphs": "auto"} if device == "cuda" else {}
    return lambda function: torch.compile(function, backend=multigraph, dynamic=True, options=options)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return function(x)

    return call


def measured(name: str, form: str, device: str, quick: bool) -> dict[str, Any]:
    """The values of one row, in a process that does nothing else."""
    extension = form.endswith("over the extension")
    if extension:
        multigraph_backend.allocator.install()
    watch = Watch(device)
    torch.manual_seed(0)
    numbers = []
    for number in program(name)(compiled_as(form, device), device, quick):
        numbers.append(number)
        watch.look()
    row: dict[str, Any] = {"numbers": numbers[-6:], "used_mib": watch.used / 2**20}
    if device == "cuda":
        if not extension:
            row["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
        gc.collect()
        row["end_mib"] = watch.look() / 2**20
    row["recordings"] = multigraph_backend.stats()["recordings"]
    return row


# ---------------------------------------------------------------- rows


def wrong(row: dict[str, Any], eager: dict[str, Any]) -> str | None:
    pairs = zip(row.get("numbers", ()), eager.get("numbers", ()), strict=False)
    off = max((abs(a - b) / max(abs(b), 1e-6) for a, b in pairs), default=0.0)
    return None if off < 3e-2 else f"WrongNumbers: off by {off:.2e}"


def add_rows(name: str, args: argparse.Namespace, results: Results, largest: dict[str, float]) -> None:
    words = ["--device", results.device, "--threads", str(args.threads), "--program", name]
    words += ["--quick"] if args.quick else []
    rows: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        if args.only is not None and args.only not in form:
            continue
        if form.endswith("over the extension") and results.device != "cuda":
            continue
        row, error = in_own_process(str(Path(__file__).resolve()), [*words, "--form", form], SECONDS)
        rows[form] = row = row or {}
        error = error or wrong(row, rows.get("eager", {}))
        used = row.get("used_mib")
        if used:
            for key, other in (("over_stock", "stock"), ("over_inductor", "inductor")):
                if rows.get(other, {}).get("used_mib"):
                    row[key] = used / rows[other]["used_mib"]
            if name == "sizes, largest":
                largest[form] = used
            if name.startswith("sizes") and largest.get(form):
                row["over_largest"] = used / largest[form]
        if form == "multigraph" and results.device == "cuda":
            row["goals"] = goals_text(GOALS.get(name, SIZES_GOALS), row)
        results.add({"program": name, "form": form}, row, error, headline=True)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--program", nargs="+", choices=PROGRAMS, help="which (all)")
    parser.add_argument("--only", metavar="TEXT", help=f"forms whose name has this in it: {'; '.join(FORMS)}")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)  # of the process of one form
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer is not None:
        torch.set_num_threads(args.threads)
        return answer(args.answer, lambda: measured(args.program[0], args.form, args.device, args.quick))
    results = Results("memory", "Memory: what a process takes of the device", COLUMNS, args)
    largest: dict[str, float] = {}
    for name in args.program or (QUICK if args.quick else PROGRAMS):
        add_rows(name, args, results, largest)
    return results.finish(lambda row: str(row["form"]).startswith("multigraph"))


if __name__ == "__main__":
    sys.exit(main())
