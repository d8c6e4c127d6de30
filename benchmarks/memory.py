"""What memory a process takes: peak reserved, what the device has less of, and the account, by form and program.

eager              nothing compiled
inductor           torch.compile, without CUDA graphs
stock              torch.compile(mode="reduce-overhead")
multigraph         torch.compile(backend="multigraph", options={"cudagraphs": "auto"})
multigraph, over the extension   the same, with the allocator extension as the process's allocator

two lengths        12 decoder blocks (width 1024, batch 8), AdamW, 40 steps in turn of 1024 and 512 tokens
accumulation       the same at 512 tokens, 10 steps of 4 micro-batches each
sizes, ORDER       8 decoder blocks, inference, 32 batch sizes of 16 tokens, three calls each: ascending, descending, at
                   random, and the largest alone
three models       three models of 4 blocks each, trained in turn, 10 steps each, gradients cleared after each step
three models, gradients kept
                   the same, but a model's gradients are cleared before its next step, and those of all are read at the
                   end: stock's recordings have written over them by then
at the edge        12 decoder blocks (width 1024, 256 tokens), AdamW, where something else holds 95 % of the device:
                   batches of 8, 10, 12, ... with three steps each, until memory runs out; "batch" is the last that ran
fsdp2              12 blocks (width 1024, batch 4, 1024 tokens), sharded over two GPUs and compiled one by one, AdamW,
                   10 steps; the numbers are the larger ones of the two ranks

Every form of every program has a process of its own, which runs nothing else, on a GPU that nobody else uses; with
several GPUs, as many run at once. A value is the median of three processes, or the larger of two that agree to 2 MiB,
for the third could not change that (of one for eager, which nothing is measured against). All of them find their code
in one cache, which runs beside each other have filled before: kernels that are tuned take memory, too.

"reserved" is what the allocator has reserved at most; "used" is the most by which the device's free memory went down
since the process had its context, looked at after each step: what decides whether something else fits beside it.
"graphs" is what the driver took for the graphs themselves, as far as that can be seen, "pool" and "live" what private
pools hold in the end, and what of it is alive; "step ms" is the median of the last half of the steps, as the host has
them, with what looks at the memory; the file has each form's `explain()`, too. Stock's loops raise without
step marks; it gets one before each call (for fsdp2 and accumulation, whose calls keep what others have made, before
each step), and nobody else. The losses, or outputs, of the last steps are compared with eager's.

    python benchmarks/memory.py --json memory.json
    python benchmarks/memory.py --program "two lengths" --only multigraph
    python benchmarks/memory.py --keep kept     what has been measured stays in the folder; the next call goes on there
    python benchmarks/memory.py --keep kept --fill     compiles what all of them need, and measures nothing
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from measure import Column, Goal, Results, answer, arguments, facts, goals_text, pool_bytes
from memory_programs import EDGE, FORMS, KEPT, PROGRAMS, SHARDED, SIZES, compiled_as, program

import multigraph_backend
from multigraph_backend import allocator

COLUMNS = (
    Column("program", "program"),
    Column("form", "form"),
    Column("reserved_mib", "reserved MiB", 0),
    Column("used_mib", "used MiB", 0),
    Column("end_mib", "used at the end", 0),
    Column("reserved_over_stock", "reserved/stock", 3),
    Column("over_stock", "used/stock", 3),
    Column("reserved_over_inductor", "reserved/Inductor", 3),
    Column("over_inductor", "used/Inductor", 3),
    Column("reserved_over_largest", "reserved/largest alone", 3),
    Column("over_largest", "used/largest alone", 3),
    Column("batch", "batch"),
    Column("recordings", "recordings"),
    Column("step_ms", "step ms", 2),
    Column("graph_mib", "graphs MiB", 1),
    Column("pool_mib", "pool MiB", 0),
    Column("live_mib", "live MiB", 1),
    Column("runs", "runs"),
    Column("goals", "goals"),
)
RANKS = 2
QUICK = PROGRAMS[:1]
#: programs whose code the others of their kind find in the cache
FILLED = ("two lengths", "accumulation", "sizes, ascending", "three models", EDGE, SHARDED)
BALLAST = 0.95  # of the device
FILLING = 12  # batches at the edge that have all the code that larger ones have
NO_MORE = (Goal("reserved over stock", "reserved_over_stock", 1.0), Goal("used over stock", "over_stock", 1.0))
GOALS = {
    "two lengths": (*NO_MORE, Goal("reserved over Inductor", "reserved_over_inductor", 1.1)),
    **{name: (*NO_MORE, Goal("reserved over the largest alone", "reserved_over_largest", 1.02)) for name in SIZES},
    EDGE: (Goal("batch over Inductor", "batch_over_inductor", 1.0, at_least=True),),
}
SECONDS = 300  # for the process of one form
AT_ONCE = 6  # processes on each GPU that fill the cache
AGREED_MIB = 2  # what two runs may differ by: a page of the driver's


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


# ---------------------------------------------------------------- one process


def take_ballast() -> None:
    """Memory of the device that torch's allocators do not know of, until the process ends."""
    free, total = torch.cuda.mem_get_info()
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    nbytes = ctypes.c_size_t(max(int(free - (1 - BALLAST) * total), 1))
    if status := driver.cuMemAlloc_v2(ctypes.byref(address), nbytes):
        raise RuntimeError(f"the driver gave no ballast: error {status}")


def measured(name: str, form: str, device: str, quick: bool, fills: bool = False) -> dict[str, Any]:
    """The values of one row, in a process that does nothing else.  `fills`: it is run for what it leaves in the cache,
    beside others, which need the device's memory."""
    extension = form.endswith("over the extension")
    if extension and not (status := allocator.install()):
        raise RuntimeError(f"the extension is not in use: {status.reason}")
    watch = Watch(device)
    if name == EDGE and device == "cuda" and not fills:
        take_ballast()
        watch = Watch(device)
    torch.manual_seed(0)
    numbers, times = [], [time.perf_counter()]
    steps = program(name)(compiled_as(form, device, dynamic=name != SHARDED), device, quick)
    for number in itertools.islice(steps, FILLING if fills and name == EDGE else None):
        numbers.append(number)
        watch.look()
        times.append(time.perf_counter())
    row: dict[str, Any] = {"numbers": numbers[-6:], "used_mib": watch.used / 2**20}
    if name not in (EDGE, KEPT):  # no steps of one kind
        took = [after - before for before, after in itertools.pairwise(times)]
        row["step_ms"] = 1000 * statistics.median(took[len(took) // 2 :])
    counts = multigraph_backend.stats()
    if device == "cuda":
        row["reserved_mib"] = allocator.max_memory_reserved() / 2**20
        row["pool_mib"] = pool_bytes(allocator.memory_snapshot()["segments"]) / 2**20
        if form.startswith("multigraph"):
            row["graph_mib"], row["live_mib"] = counts["graph_bytes"] / 2**20, counts["pool_live_bytes"] / 2**20
            row["account"] = str(multigraph_backend.explain()).splitlines()
        gc.collect()
        row["end_mib"] = watch.look() / 2**20
    row["recordings"] = counts["recordings"]
    if name == EDGE:
        row["batch"] = int(max(numbers, default=0))
        del row["numbers"]  # no losses
    return row


def told(job: Mapping[str, Any]) -> dict[str, Any]:
    """What the process of one form measures; of several ranks, this one's."""
    if job["rank"] is None:
        return measured(job["program"], job["form"], job["device"], job["quick"], job["fills"])
    import torch.distributed as dist

    if job["form"].endswith("over the extension"):  # before CUDA starts
        allocator.install()
    device = torch.device("cuda", job["rank"])
    torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl", rank=job["rank"], world_size=RANKS, timeout=limit, device_id=device)
    return measured(job["program"], job["form"], job["device"], job["quick"])


def process() -> None:
    """A process that waits for its job, with all that can be loaded without touching the device."""
    import torch._dynamo
    import torch._inductor.compile_fx

    line = sys.stdin.readline()
    if not line:  # there is no job left
        return
    job = json.loads(line)
    torch.set_num_threads(job["threads"])
    answer(Path(job["answer"]), lambda: told(job))
    if job["rank"] is not None:
        sys.stdout.flush()
        os._exit(0)  # stock's graphs hold collectives: the group's destruction would wait for them forever


# ---------------------------------------------------------------- processes

#: the values of a process, or why there are none
Answer = tuple[dict[str, Any] | None, str | None]


class Kept:
    """A folder for compiled code, for whose code is there, and for what processes have answered: of this commit, on a
    machine like this one."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.code, self._answers, self._about = folder / "code", folder / "answers", dict(about)

    @staticmethod
    def _file(*words: object) -> str:
        return ", ".join(map(str, words)).replace(" ", "_").replace(",", "") + ".json"

    def _path(self, name: str, form: str, number: int) -> Path:
        return self._answers / self._file(name, form, number)

    def answer(self, name: str, form: str, number: int) -> dict[str, Any] | None:
        path = self._path(name, form, number)
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        value: dict[str, Any] = found["value"]
        return value if found["about"] == self._about else None

    def keep(self, name: str, form: str, number: int, value: Mapping[str, Any]) -> None:
        self._write(self._path(name, form, number), {"about": self._about, "value": value})

    @staticmethod
    def _write(path: Path, value: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value))
        part.replace(path)

    def _filling(self, name: str, form: str) -> Path:
        return self.code / "filled" / self._file(name, form)

    def is_filled(self, name: str, form: str) -> bool:
        path = self._filling(name, form)
        return path.exists() and json.loads(path.read_text()) == self._about

    def filled(self, name: str, form: str) -> None:
        self._write(self._filling(name, form), self._about)


class Started:
    """A process that waits for its job, and what it said."""

    def __init__(self, folder: Path, number: int, cache: Path | None, **environment: str) -> None:
        self.path, self.log = folder / f"answer.{number}", folder / f"log.{number}"
        environ = {**os.environ, **environment}
        if cache is not None:
            environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--process"],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def tell(self, job: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the answer says so
            self.process.stdin.write(json.dumps({**job, "answer": str(self.path)}).encode() + b"\n")
            self.process.stdin.flush()

    def answered(self, seconds: float) -> Answer:
        """The values, or why there are none; the process has ended then, and its memory is the device's again."""
        try:
            status: int | None = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        self.end()
        if self.path.exists():
            found = json.loads(self.path.read_text())
            return found["value"], found["error"]
        if status is None:
            return None, f"not done after {seconds:.0f} seconds"
        said = self.log.read_text(errors="replace").strip().splitlines() or ["nothing said"]
        return None, "\n".join([f"ended with status {status}: {said[-1]}", *said[-20:]])

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Runner:
    """Runs jobs, one at a time on each GPU.  While one runs, the process of the next loads what it needs."""

    def __init__(self, gpus: Sequence[str | None], common: Mapping[str, Any], folder: Path, kept: Kept) -> None:
        self.gpus, self.common, self.folder, self.kept = gpus, common, folder, kept
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[str | None, Started] = {}
        self._all: list[Started] = []
        self._free: SimpleQueue[str | None] = SimpleQueue()
        for gpu in gpus:
            self._free.put(gpu)

    def _start(self, gpu: str | None, **environment: str) -> Started:
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        cache = None if self.common["quick"] else self.kept.code
        with self._lock:
            self._all.append(Started(self.folder, next(self._numbers), cache, **environment))
            return self._all[-1]

    def run(self, name: str, form: str, number: int) -> Answer:
        """The `number`th run of a program: alone on a GPU, whichever is free, or on all of them; once and for all."""
        if (known := self.kept.answer(name, form, number)) is not None:
            return known, None
        began = time.monotonic()
        row, error = self.run_on_ranks(form) if name == SHARDED else self.run_alone(name, form)
        if row is not None and error is None:
            self.kept.keep(name, form, number, row)
        said = "failed" if row is None else f"{row.get('reserved_mib', 0):.0f} MiB reserved"
        print(f"{name}, {form}, run {number}: {said}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return row, error

    def run_alone(self, name: str, form: str) -> Answer:
        gpu = self._free.get()
        try:
            started = self._waiting.pop(gpu, None) or self._start(gpu)
            started.tell({**self.common, "program": name, "form": form, "rank": None, "fills": False})
            if not self.common["quick"]:
                self._waiting[gpu] = self._start(gpu)
            return started.answered(SECONDS)
        finally:
            self._free.put(gpu)

    def run_beside(self, name: str, form: str, gpu: str | None) -> None:
        """A run beside others, for what it leaves in the cache."""
        began = time.monotonic()
        if name == SHARDED:
            _, error = self.run_on_ranks(form)
        else:
            started = self._start(gpu)
            started.tell({**self.common, "program": name, "form": form, "rank": None, "fills": True})
            _, error = started.answered(SECONDS)
        if error is None:
            self.kept.filled(name, form)
        said = "compiled" if error is None else f"not compiled: {error.splitlines()[0]}"
        print(f"{name}, {form}: {said}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def run_on_ranks(self, form: str) -> Answer:
        """One process on each of the first GPUs; of each number, the larger one."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = str(taken.getsockname()[1])
        # each sees all, as NCCL likes it
        started = [self._start(None, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for _ in range(RANKS)]
        for rank, entry in enumerate(started):
            entry.tell({**self.common, "program": SHARDED, "form": form, "rank": rank})
        found = [entry.answered(SECONDS) for entry in started]
        error = next((error for _, error in found if error is not None), None)
        values = [value for value, _ in found if value is not None]
        return (None, error) if error is not None else (_largest(values), None)

    def end(self) -> None:
        for started in self._all:
            started.end()
        self._waiting.clear()


def _largest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The larger of each number; all else is of the first."""
    return {
        key: max(row[key] for row in rows) if isinstance(value, int | float) else value
        for key, value in rows[0].items()
    }


def agree(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a third run could not change the median by more than a page."""
    keys = ("used_mib", "reserved_mib")
    return len(rows) == 2 and all(abs(rows[0].get(key, 0) - rows[1].get(key, 0)) <= AGREED_MIB for key in keys)


def series(run: Callable[[int], Answer], most: int) -> tuple[dict[str, Any], str | None]:
    """The medians of so many runs, or of two that agree; the first error ends it."""
    rows: list[dict[str, Any]] = []
    while len(rows) < most and not agree(rows):
        row, error = run(len(rows))
        if error is not None or row is None:
            return row or {}, error
        rows.append(row)
    middle = {
        key: statistics.median_high(row[key] for row in rows) if isinstance(value, int | float) else value
        for key, value in rows[0].items()
    }
    return {**middle, "runs": len(rows)}, None


# ---------------------------------------------------------------- rows


def wrong(row: dict[str, Any], eager: dict[str, Any]) -> str | None:
    pairs = zip(row.get("numbers", ()), eager.get("numbers", ()), strict=False)
    off = max((abs(a - b) / max(abs(b), 1e-6) for a, b in pairs), default=0.0)
    return None if off < 3e-2 else f"WrongNumbers: off by {off:.2e}"


def compare(name: str, rows: dict[str, dict[str, Any]], largest: dict[str, dict[str, Any]]) -> None:
    """Fill in ratios; `rows`: by form.  `largest`: those of the largest size alone."""
    if name == "sizes, largest":
        largest.update(rows)
    for form, row in rows.items():
        others = {"stock": rows.get("stock"), "inductor": rows.get("inductor")}
        if name.startswith("sizes"):
            others["largest"] = largest.get(form)
        for title, other in others.items():
            for key, ratio in (("used_mib", f"over_{title}"), ("reserved_mib", f"reserved_over_{title}")):
                if other and row.get(key) and other.get(key):
                    row[ratio] = row[key] / other[key]
        if (batch := (rows.get("inductor") or {}).get("batch")) and "batch" in row:
            row["batch_over_inductor"] = row["batch"] / batch


def forms(args: argparse.Namespace, device: str) -> list[str]:
    found = [form for form in FORMS if args.only is None or args.only in form]
    return [form for form in found if device == "cuda" or not form.endswith("over the extension")]


def visible(device: str) -> list[str | None]:
    """The GPUs, as the variable names them that shows a process one of them."""
    if device != "cuda":
        return [None]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    return [*(named.split(",") if named else map(str, range(torch.cuda.device_count())))]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--program", nargs="+", choices=PROGRAMS, help="which (all)")
    parser.add_argument("--only", metavar="TEXT", help=f"forms whose name has this in it: {'; '.join(FORMS)}")
    parser.add_argument("--repeats", type=int, default=3, help="processes of which a value is the median (3)")
    parser.add_argument("--keep", type=Path, help="a folder where a call that was cut off can go on")
    parser.add_argument("--fill", action="store_true", help="fill the cache of --keep alone")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)  # it waits for a job
    args = parser.parse_args()
    if args.process:
        process()
        return 0
    if args.fill and args.keep is None:
        parser.error("--fill needs the folder of --keep")
    results = Results("memory", "Memory: what a process takes of the device", COLUMNS, args)
    device, chosen = results.device, args.program or (QUICK if args.quick else PROGRAMS)
    common = {"device": device, "quick": args.quick, "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        about = {**facts(device), **common}
        del about["date"], about["cpu"]
        runner = Runner(visible(device), common, Path(folder), Kept(args.keep or Path(folder, "kept"), about))
        try:
            if args.fill:
                fill(runner, chosen, forms(args, device))
                return 0
            measure_all(runner, chosen, forms(args, device), 1 if args.quick else args.repeats, results)
        finally:
            runner.end()
    return results.finish(lambda row: str(row["form"]).startswith("multigraph"))


def fill(runner: Runner, chosen: Sequence[str], wanted: Sequence[str]) -> None:
    """Fill the cache with the code of all programs, in processes beside each other."""
    codes = [form for form in wanted if form != "eager" and not form.endswith("over the extension")]
    if not codes and any(form.endswith("over the extension") for form in wanted):
        codes = ["multigraph"]
    kept, gpus = runner.kept, len(runner.gpus)
    jobs = [
        (name, form)
        for name in FILLED
        for form in codes
        if (name != SHARDED or gpus >= RANKS)
        and not kept.is_filled(name, form)
        and any(other.split(",")[0] == name.split(",")[0] and kept.answer(other, form, 0) is None for other in chosen)
    ]
    with ThreadPoolExecutor(AT_ONCE * gpus) as filling:
        placed = [(*job, runner.gpus[number % gpus]) for number, job in enumerate(jobs)]
        list(filling.map(lambda job: runner.run_beside(*job), placed))


def measure_all(runner: Runner, chosen: Sequence[str], wanted: Sequence[str], repeats: int, results: Results) -> None:
    """The rows of all programs, in their order."""
    gpus, cuda = len(runner.gpus), results.device == "cuda"
    if cuda and repeats > 1:
        fill(runner, chosen, wanted)
    largest: dict[str, dict[str, Any]] = {}
    alone = [name for name in chosen if name != SHARDED]
    with ThreadPoolExecutor(gpus) as pool:
        pending = {
            (name, form): pool.submit(series, partial(runner.run, name, form), 1 if form == "eager" else repeats)
            for name in alone
            for form in wanted
        }
        for name in alone:
            add_rows(name, {form: pending[name, form].result() for form in wanted}, results, largest)
    if SHARDED not in chosen:
        return
    if not cuda or gpus < RANKS:
        there = f"{gpus} GPU{'s' if gpus > 1 else ''}" if cuda else "no GPU"
        results.add(
            {"program": SHARDED, "form": "-"}, {"goals": f"skipped: {RANKS} GPUs are needed, and there is {there}"}
        )
        return
    runner.end()
    found = {}
    for form in wanted:
        most = 1 if form == "eager" else repeats
        found[form] = series(partial(runner.run, SHARDED, form), most)
    add_rows(SHARDED, found, results, largest)


def add_rows(
    name: str,
    found: Mapping[str, tuple[dict[str, Any], str | None]],
    results: Results,
    largest: dict[str, dict[str, Any]],
) -> None:
    rows = {form: row for form, (row, _) in found.items()}
    compare(name, rows, largest)
    for form, row in rows.items():
        error = found[form][1] or wrong(row, rows.get("eager", {}))
        if form.startswith("multigraph") and results.device == "cuda":
            row["goals"] = goals_text(GOALS.get(name, NO_MORE), row)
        results.add({"program": name, "form": form}, row, error, headline=True)


if __name__ == "__main__":
    sys.exit(main())
