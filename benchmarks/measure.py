"""How the benchmarks measure, so that all of them measure alike.

Compared forms take turns (`interleaved`): whatever drifts on a machine (clocks, temperature, a neighbour) hits all of
them, and a comparison is a median over paired passes, never a difference to a figure taken minutes before.

`device_passes` times the work itself. On the GPU a form's calls are recorded in a CUDA graph and its replays are timed
with events, so that launches and Python take no part. On the CPU it is the time of the call. `host_us` is what a call
costs the thread that makes it: calls that do not wait for the GPU. `end_to_end_us` is a call and the wait for it;
`gpu_us` is its work between two events, for forms that record by themselves and cannot be recorded again.

`Results` prints each row when it is there and writes the JSON file anew with it: a benchmark that is cut short leaves
what it had. A row that fails is a row with its error, and the rest goes on. `Goal`s are printed beside what they are
about, and nothing depends on them. What must not share a process runs in one of its own (`in_own_process`, `answer`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch

import multigraph_backend
from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime

CHECKOUT = Path(__file__).resolve().parents[1]

Call = Callable[..., Any]
Pass = Callable[[], float]  # runs a form some times and returns microseconds per call
Value = TypeVar("Value")
Inputs = Sequence[tuple[torch.Tensor, ...]]

MOST_INPUT_BYTES = 256 << 20  # of all input sets together: several times any cache
CYCLES_PER_US = 2000.0  # of a GPU, at most
REPLAY_US = 1500.0  # how long a timed replay should take at least, so that its start and end do not show


# ---------------------------------------------------------------- forms


def own_code(function: Call) -> Call:
    """The same function with a code object of its own: Dynamo keeps what it compiled per code object, and looking
    through the entries of another form would cost time."""
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def input_sets(make: Callable[[], tuple[torch.Tensor, ...]], most: int = 16) -> list[tuple[torch.Tensor, ...]]:
    """Sets of different inputs: many where they are small enough for a cache, never fewer than two."""
    first = make()
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    count = min(most, max(2, MOST_INPUT_BYTES // max(size, 1)))
    return [first, *(make() for _ in range(count - 1))]


def difference(output: torch.Tensor, reference: torch.Tensor) -> float:
    """‖output - reference‖ / ‖reference‖; NaN where either has one."""
    wanted = reference.double()
    return float((output.double() - wanted).norm() / wanted.norm())


def worst_difference(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The largest ‖output - reference‖ / ‖reference‖; infinite where a shape or a type differs, NaN where one has one.

    A reference much smaller than the others (a gradient that is zero but for rounding) is measured against a tenth of
    what is usual among them.
    """
    norms = [float(reference.double().norm()) for reference in references]
    usual = math.sqrt(statistics.fmean(norm * norm for norm in norms))
    worst = [0.0]
    for output, reference, norm in zip(outputs, references, norms, strict=True):
        if (output.shape, output.dtype) != (reference.shape, reference.dtype):
            return math.inf
        worst.append(float((output.double() - reference.double()).norm()) / (max(norm, usual / 10) or 1.0))
    return math.nan if any(map(math.isnan, worst)) else max(worst)


# ---------------------------------------------------------------- timing


def fresh_cache() -> Any:
    """A context in which Inductor's caches are empty, in a folder of their own."""
    import torch._inductor.utils as inductor_utils  # what compiles nothing does not load it

    # the same from 2.11 to 2.15; the older name is going
    made: Callable[[], Any] = getattr(inductor_utils, "fresh_cache", None) or inductor_utils.fresh_inductor_cache
    return made()


def cpu_seconds() -> float:
    """Of the processors, that this process has taken, and those that it has started and seen end."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection inside."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def interleaved(passes: Mapping[str, Pass], rounds: int) -> dict[str, list[float]]:
    """Every form once a round, each time in another order: none comes always after the same one.

    A pass leaves the device as warm as it was busy, and the next one runs with the clock that is left to it.
    """
    names = list(passes)
    taken: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    with undisturbed():
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                taken[name].append(passes[name]())
    return taken


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the differences of passes taken in the same round."""
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of passes taken in the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def unguarded(timed: Pass) -> Pass:
    """The same pass while torch checks no guards that all calls have met, as who replays by hand checks none."""

    def sealed() -> float:
        torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        try:
            return timed()
        finally:
            torch.compiler.set_stance("default")

    return sealed


def device_passes(forms: Mapping[str, Call], inputs: Inputs, device: str) -> dict[str, Pass]:
    """For each form, a pass that returns microseconds of work per call; all forms get the same number of calls.

    The forms must be warm: nothing may compile any more.
    """
    if device == "cpu":
        started = time.perf_counter()
        for form in forms.values():
            form(*inputs[0])
        calls = _enough(2000, (time.perf_counter() - started) * 1e6 / len(forms))
        return {name: _clocked(form, inputs, calls) for name, form in forms.items()}
    once = [_replay(recorded(form, inputs, 1), len(inputs)) for form in forms.values()]
    shortest = min(statistics.median(timed() for _ in range(5)) for timed in once) * len(inputs)
    del once
    repeats = _enough(REPLAY_US, shortest, most=64)
    return {name: _replay(recorded(form, inputs, repeats), repeats * len(inputs)) for name, form in forms.items()}


def host_us(form: Call, inputs: Inputs, calls: int = 8) -> Pass:
    """A pass that returns microseconds per call that does not wait: few calls, so that the queue never fills."""

    def timed() -> float:
        wait()
        started = time.perf_counter()
        for number in range(calls):
            form(*inputs[number % len(inputs)])
        taken = time.perf_counter() - started
        wait()
        return taken * 1e6 / calls

    return timed


def end_to_end_us(form: Call, inputs: Inputs, calls: int = 8, each: bool = True) -> Pass:
    """A pass that returns microseconds per call, from its start until its work is done; without `each`, of calls that
    follow one another, of which the last is waited for."""

    def timed() -> float:
        wait()
        started = time.perf_counter()
        for number in range(calls):
            form(*inputs[number % len(inputs)])
            if each:
                wait()
        wait()
        return (time.perf_counter() - started) * 1e6 / calls

    return timed


def gpu_us(form: Call, inputs: Inputs, lead_us: float, calls: int = 3) -> Pass:
    """A pass that returns microseconds of a call's work on the GPU, which has `lead_us` of other work to do first, so
    that the whole call is in its queue before it begins."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        taken = 0.0
        for number in range(calls):
            torch.cuda._sleep(int(lead_us * CYCLES_PER_US))
            start.record()
            form(*inputs[number % len(inputs)])
            end.record()
            end.synchronize()
            taken += float(start.elapsed_time(end)) * 1e3
        return taken / calls

    return timed


def wait() -> None:
    """Until the GPU has done what it was given, where there is one at work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _enough(wanted_us: float, one_us: float, most: int = 1 << 12) -> int:
    return max(1, min(most, math.ceil(wanted_us / max(one_us, 0.01))))


def _clocked(form: Call, inputs: Inputs, calls: int) -> Pass:
    def timed() -> float:
        started = time.perf_counter()
        for number in range(calls):
            form(*inputs[number % len(inputs)])
        return (time.perf_counter() - started) * 1e6 / calls

    return timed


def recorded(form: Call, inputs: Inputs, repeats: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeats` calls with each input set."""
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries get their workspace for this stream here, outside of the graph's memory
        for _ in range(2):
            for arguments in inputs:
                form(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(repeats):
            for arguments in inputs:
                form(*arguments)
    torch.cuda.synchronize()
    return graph


_streams: list[torch.cuda.Stream] = []


def _stream() -> torch.cuda.Stream:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


def _replay(graph: torch.cuda.CUDAGraph, calls: int) -> Pass:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()

    def timed() -> float:
        torch.cuda._sleep(400_000)  # cycles: the replay is in the queue before its start event fires
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    return timed


# ---------------------------------------------------------------- memory


def pool_bytes(segments: Sequence[Mapping[str, Any]] | None = None) -> int:
    """Bytes that private pools hold, those of recordings; `segments` as `torch.cuda.memory_snapshot` gives them."""
    if segments is None:
        segments = torch.cuda.memory_snapshot()
    return sum(int(entry["total_size"]) for entry in segments if tuple(entry["segment_pool_id"]) != (0, 0))


# ---------------------------------------------------------------- what ran


def assert_ran(form: Call, arguments: tuple[torch.Tensor, ...], kind: str) -> None:
    """One more call, which a variant (`variant_calls`) or the generic graph (`generic_calls`) must have run."""
    before = multigraph_backend.stats()
    form(*arguments)
    after = multigraph_backend.stats()
    if after[kind] != before[kind] + 1 or after["eager_calls"] or after["failures"]:
        raise RuntimeError(f"no {kind[:-6]} ran: {after}\n{multigraph_backend.explain()}")


# ---------------------------------------------------------------- the machine


def commit() -> str:
    """MULTIGRAPH_COMMIT, else git's name for this checkout, `-dirty` when files differ, else "unknown"."""
    named = os.environ.get("MULTIGRAPH_COMMIT", "").strip()
    if named:
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        asked = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def facts(device: str) -> dict[str, Any]:
    """What a figure depends on."""
    try:
        triton: str | None = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "device_type": device,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "calls": native.state() if device == "cuda" else None,
    }


def calls_are_native(device: str) -> None:
    """Wait until calls of recordings are native, where they will be: what is timed is what stays."""
    if device == "cuda":
        runtime.begin_native_calls()
        native.wait()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Column:
    """How a value of a row is shown, here and in docs/benchmarks.md: digits after the point, perhaps with a unit."""

    key: str
    title: str
    digits: int | None = None  # None: text, or an integer

    def text(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        if value is None:
            return "-"
        return f"{value:.{self.digits}f}" if self.digits is not None else str(value)


@dataclass(frozen=True)
class Goal:
    """A bound on a value of a row: a number, or the key of the value that is the bound."""

    title: str
    key: str
    bound: float | str
    at_least: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        bound = row.get(self.bound) if isinstance(self.bound, str) else self.bound
        sign = ">=" if self.at_least else "<="
        named = self.bound if bound is None else f"{bound:.4g}"
        value = row.get(self.key)
        if value is None or bound is None:
            return f"{self.title} {sign} {named} ?"
        met = value >= bound if self.at_least else value <= bound
        return f"{self.title} {sign} {named} {'met' if met else 'MISSED'}"


def goals_text(goals: Sequence[Goal], row: Mapping[str, Any]) -> str:
    """Each goal, and whether the row meets it ("?": not measured)."""
    return ", ".join(goal.text(row) for goal in goals)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows and few passes: does it run, not how fast")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write facts and rows there")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (1)")
    return parser


class Results:
    """The table on the screen and the JSON file of one run."""

    def __init__(self, name: str, title: str, columns: Sequence[Column], args: argparse.Namespace) -> None:
        self.device: str = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.rows: list[dict[str, Any]] = []
        self._columns = columns
        self._path: Path | None = args.json
        torch.set_num_threads(args.threads)
        calls_are_native(self.device)
        self._head = {
            "benchmark": name,
            "title": title,
            "quick": bool(args.quick),
            **facts(self.device),
            "columns": [asdict(column) for column in columns],
        }
        self._widths: list[int] = []
        shown = ("device", "torch", "triton", "python", "commit", "date", "threads")
        print(f"{title}\n" + ", ".join(f"{key} {self._head[key]}" for key in shown), flush=True)

    def row(self, about: Mapping[str, Any], measured: Callable[[], Mapping[str, Any]], headline: bool = False) -> None:
        """Measure and add one row; `headline` rows are those that docs/benchmarks.md shows."""
        values, error = attempt(measured)
        self.add(about, values or {}, error, headline=headline)

    def add(
        self, about: Mapping[str, Any], values: Mapping[str, Any], error: str | None = None, headline: bool = False
    ) -> None:
        """Add a row that was measured, or failed with `error`."""
        rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}
        row = {**about, **rounded, "headline": headline, "error": error}
        self.rows.append(row)
        self._print(row)
        self._write()

    def sort(self, key: Callable[[Mapping[str, Any]], Any]) -> None:
        """Put the rows that were added in this order, in the file."""
        self.rows.sort(key=key)

    def finish(self, ours: Callable[[Mapping[str, Any]], bool] = lambda row: True) -> int:
        """The exit status: 1 if a row failed that is `ours`, or if there is no row."""
        self._write()
        failed = sum(row["error"] is not None for row in self.rows)
        print(f"{len(self.rows)} rows, {failed} failed", flush=True)
        return int(not self.rows or any(row["error"] is not None for row in self.rows if ours(row)))

    def _print(self, row: Mapping[str, Any]) -> None:
        texts = [column.text(row) for column in self._columns]
        if not self._widths:
            self._widths = [max(len(column.title), 9 if column.digits is not None else 15) for column in self._columns]
            print(self._line([column.title for column in self._columns]), flush=True)
        error = "" if row["error"] is None else "   FAILED: " + row["error"].splitlines()[0]
        print(self._line(texts) + error, flush=True)

    def _line(self, texts: Sequence[str]) -> str:
        parts = []
        for column, width, text in zip(self._columns, self._widths, texts, strict=True):
            parts.append(f"{text:<{width}}" if column.digits is None else f"{text:>{width}}")
        return "  ".join(parts)

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_name(f".{self._path.name}.part")
        text = json.dumps({**self._head, "rows": self.rows}, indent=1) + "\n"
        # where the checkout and the libraries lie is nobody's business
        written.write_text(re.sub(r'[^\s"(]*/(?=site-packages/)', "", text.replace(f"{CHECKOUT}/", "")))
        written.replace(self._path)


def attempt(measured: Callable[[], Value]) -> tuple[Value | None, str | None]:
    """What was measured, or None and the error as text: what it is, then where."""
    try:
        return measured(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"


def in_own_process(
    script: str, words: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None
) -> tuple[Any, str | None]:
    """What `attempt` returned in a process that runs `script` with `words` and `--answer PATH` (`answer` writes it).
    `environ`: variables that it has beside those of this process."""
    around = {**os.environ, **(environ or {})}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        command = [sys.executable, script, *words, "--answer", str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=seconds, env=around
            )
        except subprocess.TimeoutExpired:
            return None, f"not done after {seconds:.0f} seconds"
        if path.exists():
            answered = json.loads(path.read_text())
            return answered["value"], answered["error"]
        said = done.stderr.strip().splitlines() or ["nothing said"]
        return None, "\n".join([f"ended with status {done.returncode}: {said[-1]}", *said[-20:]])


def answer(path: Path, measured: Callable[[], object]) -> int:
    """The other side of `in_own_process`; the exit status."""
    calls_are_native("cuda" if torch.cuda.is_available() else "cpu")
    value, error = attempt(measured)
    written = path.with_name(f".{path.name}.part")
    written.write_text(json.dumps({"value": value, "error": error}))
    written.replace(path)
    return 0
