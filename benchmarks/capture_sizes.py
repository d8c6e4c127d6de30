"""What it takes to record a model at many batch sizes: seconds and memory.

bare         Inductor's code captured by hand, one graph a size, all in one pool
bare, gc     the same through torch.cuda.graph, with its garbage collection
stock        torch.compile(mode="reduce-overhead")
multigraph   torch.compile(backend="multigraph", options={"cudagraphs": "auto"})

The model is a stack of decoder blocks, compiled once with a dynamic batch. Every form has a process of its own, so that
pools do not mix. There each size runs once unrecorded first (cuBLAS picks its kernels then, which takes longer than all
that is measured here), and the first size is recorded; then each other size is called three times, each call waited
for. "ms a size" is the mean, over the sizes after the first, of the calls up to the one that recorded the size and did
its work, and "calls" says how many those are; "three calls" is the mean of all. A bare capture is recorded, then
replayed. Afterwards each size is compared with eager on a new input.

"pool MiB" is what private pools hold at the end. Order "largest": the largest size alone, for comparison.
The goals are those of the specification. The exit status is about multigraph's rows alone.

    python benchmarks/capture_sizes.py --json capture_sizes.json
    python benchmarks/capture_sizes.py --order descending --sizes 2 4 8 16
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import workloads
from measure import (
    Call,
    Column,
    Goal,
    Results,
    answer,
    arguments,
    attempt,
    difference,
    goals_text,
    in_own_process,
    own_code,
    pool_bytes,
    wait,
)
from torch._dynamo.decorators import mark_dynamic
from torch._dynamo.utils import counters

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("form", "form"),
    Column("order", "order"),
    Column("sizes", "sizes"),
    Column("calls", "calls", 1),
    Column("ms", "ms a size", 2),
    Column("median_ms", "median", 2),
    Column("all_ms", "three calls", 2),
    Column("first_ms", "first", 2),
    Column("second_ms", "second", 2),
    Column("third_ms", "third", 2),
    Column("over_bare", "over bare", 2),
    Column("over_stock", "over stock", 2),
    Column("all_over_stock", "three/stock", 2),
    Column("pool_mib", "pool MiB", 1),
    Column("goals", "goals"),
)
GOALS = (Goal("over stock", "over_stock", 0.4), Goal("pool", "pool_mib", "stock_pool_mib"))

FORMS = ("bare", "bare, gc", "stock", "multigraph")
ORDERS = ("ascending", "descending", "largest")
CALLS = ("first", "second", "third")
SECONDS = 400  # for the process of one form


@dataclass
class Timed:
    """Of one size: milliseconds of each call, and how many calls it took until one had recorded it."""

    calls: dict[str, float]
    needed: int

    @property
    def needed_ms(self) -> float:
        return sum(list(self.calls.values())[: self.needed])

    @property
    def all_ms(self) -> float:
        return sum(self.calls.values())


# ---------------------------------------------------------------- the model


class Stack:
    """The decoder blocks and their inputs."""

    def __init__(self, device: str, quick: bool) -> None:
        torch.manual_seed(0)
        layers, self.width = (1, 64) if quick else (8, 1024)
        self.device, self.dtype = device, workloads.dtype_on(device)
        model = workloads.Decoder(layers, self.width, self.width // 64).to(device, self.dtype)

        def program(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            assert isinstance(y, torch.Tensor)
            return y

        self.program = program

    def input(self, batch: int) -> torch.Tensor:
        return torch.randn(batch, 16, self.width, device=self.device, dtype=self.dtype)

    def compiled(self, first: int, **how: Any) -> Call:
        """Compiled at the size `first`, with a dynamic batch."""
        form: Call = torch.compile(own_code(self.program), fullgraph=True, **how)
        traced = counters["stats"]["unique_graphs"]
        x = self.input(first)
        mark_dynamic(x, 0)
        form(x)
        wait()
        if counters["stats"]["unique_graphs"] != traced + 1:
            raise RuntimeError("the first call was not traced, or more than once")
        return form


def sizes_of(quick: bool) -> list[int]:
    """32 sizes from 2 on, the steps of a server."""
    return [2, 3, 4] if quick else [2, 4, *range(8, 241, 8)]


def ordered(sizes: Sequence[int], order: str) -> list[int]:
    if order == "largest":
        return [max(sizes)]
    return sorted(sizes, reverse=order == "descending")


# ---------------------------------------------------------------- forms


class Recorder:
    """A form that records by itself: three calls of a size."""

    def __init__(self, form: Call) -> None:
        self.form = form

    def calls(self, x: torch.Tensor) -> dict[str, Callable[[], object]]:
        return {name: lambda: self.form(x) for name in CALLS}

    def recorded(self) -> int:
        """A number that grows when this form records; stock counts copied inputs of recordings, here one each."""
        stock = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
        return int(stock + multigraph_backend.stats()["recordings"])

    def output(self, x: torch.Tensor) -> torch.Tensor:
        output = self.form(x)
        assert isinstance(output, torch.Tensor)
        return output


class Bare:
    """Captures by hand. What a size gave dies before the next is captured, so that they can share memory."""

    def __init__(self, plain: Call, collect: bool) -> None:
        self.plain, self.collect = plain, collect
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._warm = False

    def calls(self, x: torch.Tensor) -> dict[str, Callable[[], object]]:
        if not self._warm:  # libraries get their workspace for this stream, outside of the pool
            with torch.cuda.stream(self.stream):
                self.plain(x)
            wait()
            self._warm = True
        return {"first": partial(self._record, x), "second": lambda: self.graphs[len(x)][0].replay()}

    def recorded(self) -> int:
        return -1  # the second call does the work

    def _record(self, x: torch.Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        if self.collect:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                self.plain(x)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    self.plain(x)
                finally:
                    graph.capture_end()
        self.graphs[len(x)] = (graph, x)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Captured once more, with an output that is kept: those of the timed graphs are gone."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            output = self.plain(x)
        graph.replay()
        assert isinstance(output, torch.Tensor)
        return output.clone()


def made(name: str, stack: Stack, first: int, plain: Call, device: str) -> Recorder | Bare:
    match name:
        case "bare":
            return Bare(plain, collect=False)
        case "bare, gc":
            torch.compiler.config.force_cudagraph_gc = True
            return Bare(plain, collect=True)
        case "stock":
            return Recorder(stack.compiled(first, mode="reduce-overhead"))
        case "multigraph":
            options: dict[str, Any] = {"on_failure": "raise"}
            if device == "cuda":
                options["cudagraphs"] = "auto"
            return Recorder(stack.compiled(first, backend=multigraph, options=options))
    raise ValueError(name)


# ---------------------------------------------------------------- one form, in its process


def measured(name: str, sizes: Sequence[int], device: str, quick: bool) -> dict[str, Any]:
    """The values of a row: of the calls at each size of `sizes`, in this order, and of memory at the end."""
    stack = Stack(device, quick)
    inputs = {size: stack.input(size) for size in sizes}
    with torch.no_grad():
        plain = stack.compiled(sizes[0])
        for x in inputs.values():
            plain(x)
        form = made(name, stack, sizes[0], plain, device)
        started = multigraph_backend.stats()
        taken = {size: _timed(form, x) for size, x in inputs.items()}
        row = summary(list(taken.values()))
        now = multigraph_backend.stats()
        row["counts"] = {key: now[key] - started[key] for key in now if now[key] != started[key]}
        if device == "cuda":
            gc.collect()
            row["pool_mib"] = pool_bytes() / 2**20
        row["each_size_ms"] = {str(size): round(each.needed_ms, 4) for size, each in taken.items()}
        row["wrong"] = _wrong(form, stack, sizes)
    return row


def _timed(form: Recorder | Bare, x: torch.Tensor) -> Timed:
    taken, needed = {}, 0
    for number, (name, call) in enumerate(form.calls(x).items(), 1):
        before = form.recorded()
        wait()
        started = time.perf_counter()
        call()
        wait()
        taken[name] = (time.perf_counter() - started) * 1e3
        if form.recorded() != before:
            needed = number
    return Timed(taken, needed or len(taken))


def summary(taken: Sequence[Timed]) -> dict[str, Any]:
    """Of the sizes after the first; nothing where there is none."""
    row: dict[str, Any] = {"sizes": len(taken), "first_size_ms": taken[0].all_ms}
    later = taken[1:]
    if later:
        sums = [each.needed_ms for each in later]
        row |= {"ms": statistics.fmean(sums), "median_ms": statistics.median(sums)}
        row |= {"calls": statistics.fmean(each.needed for each in later)}
        row |= {"all_ms": statistics.fmean(each.all_ms for each in later)}
        row |= {f"{name}_ms": statistics.fmean(each.calls[name] for each in later) for name in taken[0].calls}
    return row


def _wrong(form: Recorder | Bare, stack: Stack, sizes: Sequence[int]) -> str | None:
    """The first size whose output is not eager's, on a new input."""
    bound = 3e-2 if stack.dtype == torch.bfloat16 else 1e-4
    for size in sizes:
        x = stack.input(size)
        off = difference(form.output(x), stack.program(x))
        if not off < bound:  # NaN is wrong too
            return f"WrongNumbers: size {size} differs from eager by {off:.2e}"
    return None


# ---------------------------------------------------------------- rows


def ratios(rows: Mapping[str, dict[str, Any]]) -> None:
    """Add to each form's values what it takes of the bare capture's, of stock's, and stock's memory."""
    for row in rows.values():
        for key, other in (("over_bare", "bare"), ("over_stock", "stock")):
            if row.get("ms") and rows.get(other, {}).get("ms"):
                row[key] = row["ms"] / rows[other]["ms"]
        if row.get("all_ms") and rows.get("stock", {}).get("all_ms"):
            row["all_over_stock"] = row["all_ms"] / rows["stock"]["all_ms"]
        stock = rows.get("stock", {}).get("pool_mib")
        if stock is not None:
            row["stock_pool_mib"] = stock


def add_rows(order: str, sizes: Sequence[int], args: argparse.Namespace, results: Results) -> None:
    """One row a form, each measured in its process."""
    words = ["--device", results.device, "--threads", str(args.threads), "--order", order]
    words += ["--sizes", *map(str, sizes), *(["--quick"] if args.quick else [])]
    rows: dict[str, dict[str, Any]] = {}
    for name in [form for form in FORMS if results.device == "cuda" or not form.startswith("bare")]:
        if args.only is not None and args.only not in name:
            continue
        row, error = in_own_process(str(Path(__file__).resolve()), [*words, "--form", name], SECONDS)
        rows[name] = row or {}
        error = error or rows[name].pop("wrong", None)
        ratios(rows)
        if name == "multigraph" and results.device == "cuda":
            rows[name]["goals"] = goals_text(GOALS[1:] if order == "largest" else GOALS, rows[name])
        results.add({"form": name, "order": order}, rows[name], error, headline=True)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--order", nargs="+", choices=ORDERS, help="in which sizes come (all three)")
    made.add_argument("--sizes", nargs="+", type=int, metavar="N", help="batch sizes, from 2 on (32 up to 240)")
    made.add_argument("--only", metavar="TEXT", help=f"forms whose name has this in it: {'; '.join(FORMS)}")
    made.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)  # of the process of one form
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> int:
    args = parser().parse_args()
    sizes = args.sizes or sizes_of(args.quick)
    if min(sizes) < 2:
        parser().error("--sizes: torch traces size 1 apart")
    if args.answer is not None:
        torch.set_num_threads(args.threads)
        return answer(args.answer, lambda: measured(args.form, ordered(sizes, args.order[0]), args.device, args.quick))
    results = Results("capture_sizes", "Capture sizes: milliseconds and memory to record a batch size", COLUMNS, args)
    for order in args.order or (ORDERS[1:2] if args.quick else ORDERS):
        _, error = attempt(partial(add_rows, order, sizes, args, results))
        if error is not None:
            results.add({"form": "multigraph", "order": order}, {}, error)
    return results.finish(lambda row: row["form"] == "multigraph")


if __name__ == "__main__":
    sys.exit(main())
