"""What allocators hold for the same programs inside a CUDA graph capture, and what they cost.

stock             torch's allocator
stock, reuse      with graph_capture_record_stream_reuse:True
stock, expandable with expandable_segments:True
multigraph        the extension installed as it is by default: reuse on any stream, segments that grow in place
multigraph, stitched   with blocks that are made of pieces of several pages
multigraph, own stream   blocks go back to their own stream
multigraph, plain   reuse on any stream, plain segments
multigraph, strict   without reuse of what several streams used, for its time

ping-pong   32 steps over two streams with blocks of 64 MiB; late frees: four steps' blocks are dropped together
random      10,000 allocations and frees of 4 KiB to 4 MiB on 2 and 4 streams, half of the blocks used on two of them
no use      blocks that are recorded on a second stream and no kernel ever uses
alloc+free  nanoseconds of one block outside of captures, on one thread and on eight
training    a training step over batches of changing length: most that is reserved

Each form has a process of its own: an allocator cannot be changed. "reserved" is what the private pool of the capture
holds (all pools, for training), "live" what is alive at most, "bound" what any allocator needs that goes by frees, of a
checker that shares no code with the extension. ms is the time of the capture's operations, the less of two captures, ns
the least of the rounds. Each graph is replayed and its output compared with eager right after; random programs count
bytes that somebody else wrote. The goals are those of the specification. The exit status is about multigraph's rows
alone. On the CPU the bounds are all there is.

    python benchmarks/allocator.py --json allocator.json
    python benchmarks/allocator.py --only "multigraph" --programs ping-pong
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import workloads
from allocator_programs import MIB, Program, bounds, captured, expected, ping_pong, random_program, without_use
from measure import Column, Goal, Results, answer, arguments, attempt, goals_text, in_own_process, pool_bytes

from multigraph_backend import _compat, allocator

COLUMNS = (
    Column("program", "program"),
    Column("form", "form"),
    Column("reserved_mib", "reserved MiB", 1),
    Column("live_mib", "live MiB", 1),
    Column("bound_mib", "bound MiB", 1),
    Column("over_bound", "over bound", 2),
    Column("over_stock", "over stock", 2),
    Column("ms", "ms", 1),
    Column("ns", "ns", 0),
    Column("ns_8", "ns, 8 threads", 0),
    Column("goals", "goals"),
)

FORMS: dict[str, dict[str, str]] = {
    "stock": {},
    "stock, reuse": {"PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True"},
    "stock, expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "multigraph": {},
    "multigraph, stitched": {},
    "multigraph, own stream": {},
    "multigraph, plain": {},
    "multigraph, strict": {},
}
INSTALLED: dict[str, dict[str, Any]] = {  # what each form passes to install()
    "multigraph": {},
    "multigraph, stitched": {"stitch": True},
    "multigraph, own stream": {"reuse": "own_stream"},
    "multigraph, plain": {"expandable": False},
    "multigraph, strict": {"reuse": "strict"},
}
PROGRAMS = ("ping-pong", "late frees", "random, 2 streams", "random, 4 streams", "no use", "alloc+free", "training")
SECONDS = 120  # for the process of one form


def programs(quick: bool) -> dict[str, Program]:
    """Those that are captured, by name."""
    if quick:
        made = [ping_pong(4, MIB), ping_pong(8, MIB, kept=4), random_program(2, 300), random_program(4, 300)]
        made.append(without_use(3, MIB))
    else:
        made = [ping_pong(), ping_pong(kept=4), random_program(2), random_program(4), without_use()]
    return {program.name: program for program in made}


def skipped(form: str, program: str) -> bool:
    """Comparisons that say nothing."""
    if form == "multigraph, stitched":
        return not program.startswith("random")
    if program == "training":
        return form in ("stock, reuse", "multigraph, own stream", "multigraph, strict")
    if program == "alloc+free":
        return form not in ("stock", "multigraph", "multigraph, plain")
    return form == "stock, expandable" or (form == "multigraph, strict" and not program.startswith("random"))


# ---------------------------------------------------------------- one program in the process of a form


def measured(program: Program) -> dict[str, Any]:
    """Memory and time of a capture, and whether its replay is right.  Raises RuntimeError where it is wrong."""
    streams = [torch.cuda.Stream() for _ in range(program.streams)]
    clean()
    before = private_bytes()
    run = captured(program, streams)
    reserved = private_bytes() - before
    run.graph.replay()
    torch.cuda.synchronize()
    if run.input is not None and run.output is not None and not torch.equal(run.output, expected(program, run.input)):
        raise RuntimeError("the replay's output differs from eager's")
    values = {"reserved_mib": reserved / MIB, "ms": run.milliseconds}
    del run
    clean()
    values["ms"] = min(values["ms"], captured(program, streams).milliseconds)
    clean()
    if program.name.startswith("random"):
        again = captured(program, streams, checked=True)
        again.graph.replay()
        torch.cuda.synchronize()
        wrong = int(again.wrong.sum())
        if wrong:
            raise RuntimeError(f"{wrong} bytes were not what the block's own kernel had written")
    return values


def clean() -> None:
    """Nothing of an earlier program is left."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def private_bytes() -> int:
    """Bytes of private pools, whoever's they are."""
    return pool_bytes(allocator.memory_snapshot()["segments"])


def nanoseconds(threads: int, pairs: int, rounds: int) -> float:
    """Of one allocation and its free of 1 MiB through torch's own functions, outside of captures; the least."""
    allocate, free = _compat.raw_alloc, _compat.free_block
    stream = torch.cuda.current_stream().cuda_stream

    def loop() -> None:
        for _ in range(pairs):
            free(allocate(MIB, stream))

    def once() -> float:
        workers = [threading.Thread(target=loop) for _ in range(threads)]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return (time.perf_counter() - started) * 1e9 / (pairs * threads)

    once()
    return min(once() for _ in range(rounds))


def training(quick: bool) -> dict[str, Any]:
    """The most that is reserved by training steps over batches whose length changes, and what is live at most."""
    torch.manual_seed(0)
    layers, width, lengths = (1, 64, (16, 32)) if quick else (12, 768, (384, 128, 512, 256, 448, 64, 320, 192))
    model = workloads.Decoder(layers, width, width // 64).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for length in lengths * 2:
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(16, length, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return {
        "reserved_mib": allocator.max_memory_reserved() / MIB,
        "live_mib": allocator.max_memory_allocated() / MIB,
    }


def in_process(form: str, names: Sequence[str], quick: bool) -> dict[str, Any]:
    """All programs of one form: (values, error) by name."""
    if form in INSTALLED:
        status = allocator.install(**INSTALLED[form])
        if not status:
            raise RuntimeError(f"the extension is not in use: {status.reason}")
    torch.cuda.init()
    torch.cuda.current_blas_handle()
    captures = programs(quick)
    ways: dict[str, Callable[[], Mapping[str, Any]]] = {
        "alloc+free": lambda: {
            "ns": nanoseconds(1, 100 if quick else 20_000, 15),
            "ns_8": nanoseconds(8, 100 if quick else 4_000, 7),
        },
        "training": lambda: training(quick),
    }
    found: dict[str, Any] = {}
    for name in sorted(names, key=("training", "alloc+free").count, reverse=True):  # these first, while all is clean
        found[name] = attempt(ways[name] if name in ways else partial(measured, captures[name]))
        clean()
    return found


# ---------------------------------------------------------------- the rows


def goals_of(program: str, form: str) -> tuple[Goal, ...]:
    """What the specification asks of a row."""
    if form == "multigraph, stitched":
        return (Goal("over bound", "over_bound", 1.1), Goal("ms over strict", "ms_over_strict", 1.5))
    if form == "multigraph":
        return {
            "ping-pong": (Goal("reserved", "reserved_mib", 258),),
            "late frees": (Goal("reserved", "reserved_mib", "bound_mib"),),  # of those that go by frees; see DESIGN.md
            "no use": (Goal("over bound", "over_bound", 1.1),),
            "alloc+free": (Goal("over stock", "over_stock", 1.1),),
            "training": (Goal("over stock", "over_stock", 0.95), Goal("over expandable", "over_expandable", 1.02)),
        }.get(program, (Goal("over bound", "over_bound", 1.1), Goal("ms over strict", "ms_over_strict", 1.5)))
    return ()


def compare(program: str, rows: dict[str, dict[str, Any]], least: Mapping[str, Any]) -> None:
    """Fill in bounds and ratios; `rows`: by form."""
    strict = rows.get("multigraph, strict", {}).get("ms")
    key = "ns" if program == "alloc+free" else "reserved_mib"
    for values in rows.values():
        values.update({name: value for name, value in least.items() if name not in values})
        if "bound_mib" in values and "reserved_mib" in values:
            values["over_bound"] = values["reserved_mib"] / values["bound_mib"]
        for name, ratio in (("stock", "over_stock"), ("stock, expandable", "over_expandable")):
            stock = rows.get(name, {}).get(key)
            if stock and key in values:
                values[ratio] = values[key] / stock
        if strict and "ms" in values:
            values["ms_over_strict"] = values["ms"] / strict


def least_of(program: Program) -> dict[str, Any]:
    found = bounds(program)
    return {"live_mib": found.live / MIB, "bound_mib": found.own_stream / MIB, "bound_any_mib": found.any_stream / MIB}


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.answer is not None:
        return answer(args.answer, lambda: in_process(args.only[0], args.programs, args.quick))
    results = Results("allocator", "Allocator: what captures hold, and what an allocation costs", COLUMNS, args)
    captures = {name: program for name, program in programs(args.quick).items() if name in args.programs}
    least = {name: least_of(program) for name, program in captures.items()}
    for name, values in least.items():
        results.add({"program": name, "form": "bound"}, {**values, "reserved_mib": values["bound_mib"]})
    if results.device == "cpu":
        return results.finish()
    found: dict[str, dict[str, Any]] = {name: {} for name in args.programs}
    errors: dict[tuple[str, str], str] = {}
    for form in args.only:
        names = [name for name in args.programs if not skipped(form, name)]
        if not names:
            continue
        words = ["--only", form, "--programs", *names, *(["--quick"] if args.quick else [])]
        with variables(FORMS[form]):
            values, error = in_own_process(__file__, words, SECONDS)
        for name in names:
            value, why = (values or {}).get(name, (None, error))
            found[name][form] = dict(value or {})
            if why is not None:
                errors[name, form] = why
    for name, rows in found.items():
        compare(name, rows, least.get(name, {}))
        for form, row in rows.items():
            goals = goals_text(goals_of(name, form), row)
            about = {"program": name, "form": form}
            results.add(about, {**row, "goals": goals or None}, errors.get((name, form)), headline=True)
    return results.finish(ours=lambda row: str(row["form"]).startswith("multigraph"))


class variables:
    """Variables of the environment, for processes that are started inside."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        self.before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MULTIGRAPH_ALLOCATOR"}
        self.before = {name: os.environ.pop(name, None) for name in names}
        os.environ.update(self.values)

    def __exit__(self, *error: object) -> None:
        for name, value in self.before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM", help=", ".join(FORMS))
    made.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main())
