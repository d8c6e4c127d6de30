"""Does it pay to make blocks of pieces of pages (`install(stitch=True)`)?  Traces of models, with it and without.

multigraph, stitched   the extension as the process's allocator, its captures' pages mapped one by one and again
multigraph             the same without; pages are mapped up to 20 MiB at a time
stock                  torch's allocator
stock, expandable      with expandable_segments:True

training        12 decoder blocks, width 1024, two lengths and eight, as multigraph's recordings capture them: forward
                and backward of each size in one pool, the first call of all unrecorded in the same pool
sizes           8 decoder blocks, 32 batch sizes in three orders, recorded; prefill and decode: both, at random
whole steps     the same decoder at eight lengths, eager: forward, backward and AdamW in one graph for each, captured
                by hand; accumulation: at one length, with four backward passes; images: ResNet-50 at four sizes
experts         layers of eight experts whose numbers of tokens depend on the data, a capture for each of eight
                draws, on one stream and on two
sharded         a step over sharded parameters: gathers and reductions on a second stream
large blocks    256 blocks of 40 MiB in a capture, 10 GiB
no captures     the eight lengths outside of graphs

The traces are taken from the programs run without memory (`allocation_traces.py`), anywhere. On the CPU they are
played to the extension over its simulated driver, and to torch's rules (`stock_rules.py`): "reserved" is the most of
all segments, "bound" the most bytes that are alive at a time, "calls" the driver's calls about memory, "handles" what
is kept of them at the end. On a GPU the same traces are played with real allocations, each form of each program in a
process of its own: "ms" is the time of all allocations and frees, "again" that of a second time in the same pool;
"GB/s" of kernels that add to 1 GiB of it.

    python benchmarks/stitching.py --json stitching.json
    python benchmarks/stitching.py --only images --traces FOLDER    # which keeps the traces, or has them
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import allocation_traces
import torch
from allocation_traces import CAPTURES, Event
from measure import CHECKOUT, Column, Results, answer, arguments, attempt, in_own_process
from stock_rules import StockRules

from multigraph_backend import allocator

COLUMNS = (
    Column("program", "program"),
    Column("form", "form"),
    Column("reserved_mib", "reserved MiB", 1),
    Column("bound_mib", "bound MiB", 1),
    Column("over_bound", "over bound", 4),
    Column("stitched", "stitched"),
    Column("calls", "calls"),
    Column("handles", "handles"),
    Column("ms", "ms", 1),
    Column("again_ms", "again ms", 1),
    Column("gb_s", "GB/s", 0),
)
STITCHED, PLAIN, STOCK, EXPANDABLE = FORMS = ("multigraph, stitched", "multigraph", "stock", "stock, expandable")
QUICK = ("whole steps", "experts, two streams", "large blocks", "no captures")  # nothing of these is compiled
MIB = 1 << 20
SECONDS = 300  # for the process of one form


# ---------------------------------------------------------------- traces


def traces(names: Sequence[str], quick: bool, folder: Path) -> Iterator[tuple[str, Path | None, str | None]]:
    """Of each program: where its trace is, made now if it was not there, or why there is none."""
    for name, make in allocation_traces.programs(quick).items():
        if name not in names:
            continue
        path = folder / f"{name.replace(', ', '_').replace(' ', '_')}{'_quick' if quick else ''}.log"
        error = None
        if not path.exists():
            made, error = attempt(make)
            if made is not None:
                path.write_text(allocation_traces.log(made.events))
        yield name, None if error else path, error


def read(path: Path) -> list[Event]:
    return [(word, *map(int, numbers)) for word, *numbers in map(str.split, path.read_text().splitlines())]


def bound(events: Sequence[Event]) -> int:
    """The most bytes that are alive, of blocks rounded up to 512."""
    sizes: dict[int, int] = {}
    live = most = 0
    for event in events:
        if event[0] == "allocate":
            sizes[event[1]] = -(-event[2] // 512) * 512
            live += sizes[event[1]]
            most = max(most, live)
        elif event[0] == "free":
            live -= sizes.pop(event[1])
    return most


# ---------------------------------------------------------------- on the simulated driver


def built(folder: Path) -> Path:
    """The program that plays traces to the extension."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    source = str(CHECKOUT / "allocator_ext")
    options = ["-DMULTIGRAPH_STRESS=ON", "-DCMAKE_UNITY_BUILD=ON"]
    for command in (
        ["cmake", "-S", source, "-B", str(folder), "-G", "Ninja", *options],
        ["cmake", "--build", str(folder), "--parallel", "2", "--target", "replay"],
    ):
        subprocess.run(["env", f"PATH={path}", *command], check=True, capture_output=True, timeout=600)
    return folder / "replay"


def simulated(form: str, trace: Path, replay: Path) -> dict[str, Any]:
    if form in (STOCK, EXPANDABLE):
        rules = StockRules(expandable=form == EXPANDABLE)
        return {"reserved_mib": rules.play(read(trace)) / MIB, "calls": rules.driver_calls}
    command = [str(replay), str(trace), "--reuse", "any", "--expandable", *(["--stitch"] if form == STITCHED else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    found = json.loads(done.stdout)
    if found["wrong"] or found["out_of_memory"]:
        raise RuntimeError(found["wrong"] or "out of memory")
    return {
        "reserved_mib": found["peak_reserved"] / MIB,
        "stitched": found["stitched"],
        "calls": found["driver_calls"],
        "handles": found["handles"],
    }


# ---------------------------------------------------------------- on a GPU


def in_process(form: str, trace: Path) -> dict[str, Any]:
    """The trace with real allocations, twice, in the process of a form."""
    if form in (STITCHED, PLAIN):
        status = allocator.install(stitch=form == STITCHED)
        if not status:
            raise RuntimeError(f"the extension is not in use: {status.reason}")
    torch.cuda.init()
    torch.cuda.current_blas_handle()
    events = read(trace)
    played = Played(events)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocator.reset_peak_memory_stats()
    before = allocator.memory_stats()["reserved_bytes.all.current"]
    first = played.once()
    values = {
        "reserved_mib": (allocator.memory_stats()["reserved_bytes.all.peak"] - before) / MIB,
        "stitched": allocator.memory_stats().get("multigraph.stitched"),
        "ms": first,
        "again_ms": played.once(),
    }
    return {**values, "gb_s": played.bandwidth()}


class Played:
    """A trace's pool and streams."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.pool: Any = allocator.pool() if allocator.status().installed else torch.cuda.MemPool()
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.small = [torch.zeros(1, device="cuda") for _ in self.streams]
        self.graphs: list[torch.cuda.CUDAGraph] = []
        for stream, each in zip(self.streams, self.small, strict=True):
            with torch.cuda.stream(stream):
                each.add_(1)
        torch.cuda.synchronize()

    def _opened(self) -> contextlib.AbstractContextManager[object]:
        return self.pool if isinstance(self.pool, allocator.Pool) else torch.cuda.use_mem_pool(self.pool)

    def once(self) -> float:
        """Milliseconds of all allocations and frees."""
        taken = 0.0
        clock = time.perf_counter
        blocks: dict[int, torch.Tensor] = {}
        opened: contextlib.AbstractContextManager[object] | None = None
        graph: torch.cuda.CUDAGraph | None = None
        current = torch.cuda.current_stream()
        # outside of captures a pool is opened for what runs as it is: the events say so before a capture begins
        captured = {at for at, event in enumerate(self.events) if event[0] == "begin" and self._captures(at)}
        on = -1
        try:
            for at, (word, *rest) in enumerate(self.events):
                if word == "allocate":
                    number, nbytes, stream = rest
                    if stream != on:
                        torch.cuda.set_stream(self.streams[stream])
                        on = stream
                    began = clock()
                    blocks[number] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                    taken += clock() - began
                elif word == "free":
                    began = clock()
                    del blocks[rest[0]]
                    taken += clock() - began
                elif word == "kernel":
                    with torch.cuda.stream(self.streams[rest[0]]):
                        self.small[rest[0]].add_(1)
                elif word == "record":
                    blocks[rest[0]].record_stream(self.streams[rest[1]])
                elif word == "join":
                    self.streams[rest[0]].wait_stream(self.streams[rest[1]])
                elif word == "begin" and at not in captured and opened is None:
                    opened = self._opened()
                    opened.__enter__()
                elif word == "end" and opened is not None:
                    opened.__exit__(None, None, None)
                    opened = None
                elif word == "capture":
                    torch.cuda.synchronize()
                    torch.cuda.set_stream(self.streams[rest[0]])
                    on = rest[0]
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")
                elif word == "captured":
                    torch.cuda.set_stream(self.streams[rest[0]])
                    on = rest[0]
                    assert graph is not None
                    graph.capture_end()
                    self.graphs.append(graph)
                elif word == "run":
                    torch.cuda.synchronize()
        finally:
            torch.cuda.set_stream(current)
        blocks.clear()
        torch.cuda.synchronize()
        return taken * 1e3

    def _captures(self, at: int) -> bool:
        while self.events[at][0] == "begin":
            at += 1
        return bool(self.events[at][0] == "capture")

    def bandwidth(self, nbytes: int = 1 << 30) -> float | None:
        """Of a kernel that reads and writes what the captures' pool has, as its graph is replayed."""
        stream, graph = self.streams[CAPTURES], torch.cuda.CUDAGraph()
        if bound(self.events) < nbytes:
            return None
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")
            parts = [torch.empty(8 * MIB, dtype=torch.float32, device="cuda") for _ in range(nbytes // (32 * MIB))]
            for part in parts:
                part.add_(1)
            graph.capture_end()
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(20):
            started.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            best = min(best, float(started.elapsed_time(ended)))
        return 2 * nbytes / best / 1e6


def measured(form: str, trace: Path) -> tuple[dict[str, Any] | None, str | None]:
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if form == EXPANDABLE else {}
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MULTIGRAPH_ALLOCATOR")
    kept = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(conf)
    try:
        return in_own_process(__file__, ["--form", form, "--trace", str(trace)], SECONDS)
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# ---------------------------------------------------------------- the rows


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.answer is not None:
        return answer(args.answer, lambda: in_process(args.form, args.trace))
    results = Results("stitching", "Stitching: what traces of models reserve, and what it costs", COLUMNS, args)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        replay = built(folder / "build") if results.device == "cpu" else folder
        if args.traces is not None:
            args.traces.mkdir(parents=True, exist_ok=True)
        for name, trace, error in traces(args.only or _names(args.quick), args.quick, args.traces or folder):
            for form in FORMS:
                about: Mapping[str, Any] = {"program": name, "form": form}
                if trace is None:
                    results.add(about, {}, error)
                    continue
                if results.device == "cpu":
                    values, why = attempt(partial(simulated, form, trace, replay))
                else:
                    values, why = measured(form, trace)
                least = bound(read(trace)) / MIB
                if values is not None:
                    values = {**values, "bound_mib": least, "over_bound": values["reserved_mib"] / least}
                results.add(about, values or {}, why, headline=True)
    return results.finish()


def _names(quick: bool) -> Sequence[str]:
    return QUICK if quick else list(allocation_traces.programs(False))


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    names = _names(False)
    made.add_argument("--only", nargs="+", choices=names, metavar="PROGRAM", help=", ".join(names))
    made.add_argument("--traces", type=Path, metavar="FOLDER", help="where traces are kept")
    made.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    made.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main())
