"""What dispatch costs per call, by number and kind of declared variants.

All variants and the generic graph are "compiled" to one small Python function (`one_code`): what is left is dispatch.
(Code that differs per variant costs microseconds more where hundreds of variants take turns, with a dispatcher or
without: the caches of the CPU do not hold it all.) Sizes change at every call. In each row a model with declared
variants and the same model without any take turns; "over" is the median difference of passes taken in the same round.
Stock's dispatcher (torch's marks, equalities that never match, backend="eager") against stock without marks is measured
in the same way, in the same run.

missed      no variant matches: the generic graph runs
hit         a variant matches at every call (one equality: always the same size)
first seen  missed, and each size comes up once only: nothing can be remembered

    python benchmarks/dispatch.py --json dispatch.json
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Call, Column, Pass, Results, arguments, interleaved, own_code, paired_difference
from torch._dynamo.decorators import mark_dynamic
from torch._dynamo.utils import counters

import multigraph_backend
from multigraph_backend.backend import multigraph

LARGEST = 8192  # sizes are below
COLUMNS = (
    Column("backend", "dispatcher"),
    Column("kind", "conditions"),
    Column("count", "number"),
    Column("calls", "calls"),
    Column("us", "us a call", 2),
    Column("generic_us", "without", 2),
    Column("over_us", "over", 2),
)
HEADLINES = {("missed", 1), ("missed", 64), ("missed", 1024), ("hit", 1024), ("first seen", 1024)}


def conditions(kind: str, count: int, *, hit: bool) -> list[dict[str, Any]]:
    """`count` conditions on `x[0]`; sizes are below LARGEST, so that what shall be missed lies above it."""
    base = 2 if hit else LARGEST
    match kind:
        case "Eq":
            values = random.Random(1).sample(range(2, LARGEST), count) if hit else range(base, base + count)
            return [{"x[0]": int(value)} for value in values]
        case "Range":
            wide = (LARGEST - 2) // count
            return [{"x[0]": {"min": base + wide * i, "max": base + wide * (i + 1) - 1}} for i in range(count)]
        case "MultipleOf":
            return [{"x[0]": {"multiple_of": (3 + i) if hit else (LARGEST + i)}} for i in range(count)]
        case "mixed":
            parts = [conditions(name, count, hit=hit) for name in ("Eq", "Range", "MultipleOf")]
            return [parts[i % 3][i] for i in range(count)]
    raise ValueError(kind)


def holds(condition: Mapping[str, Any], size: int) -> bool:
    value = condition["x[0]"]
    if isinstance(value, int):
        return size == value
    multiple = value.get("multiple_of", 1)
    return bool(value.get("min", 0) <= size <= value.get("max", LARGEST) and size % multiple == 0)


def changing(sizes: Sequence[int], count: int) -> list[int]:
    """`count` of `sizes`, no two neighbours equal (where there is more than one)."""
    draw = random.Random(0)
    drawn = [draw.choice(sizes)]
    while len(drawn) < count:
        size = draw.choice(sizes)
        if size != drawn[-1] or len(set(sizes)) == 1:
            drawn.append(size)
    return drawn


def program() -> Call:
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    return own_code(plus_one)


def one_code(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., tuple[torch.Tensor]]:
    """The compiler of all graphs here: sizes and x in, x + 1 out."""
    return _plus_one


def _plus_one(*values: Any) -> tuple[torch.Tensor]:
    return (values[-1] + 1,)


def inputs(sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.zeros(size, 1) for size in sizes]


def passes(form: Call, chunks: Sequence[Sequence[torch.Tensor]]) -> Pass:
    """A pass calls `form` with the next chunk."""
    following: Iterator[Sequence[torch.Tensor]] = iter(chunks)

    def timed() -> float:
        chunk = next(following)
        started = time.perf_counter()
        for x in chunk:
            form(x)
        return (time.perf_counter() - started) * 1e6 / len(chunk)

    return timed


class Dispatch:
    """Rows of one run: `rounds` passes of `calls` calls each, after `warm` that nobody times."""

    def __init__(self, quick: bool) -> None:
        self.rounds, self.calls, self.warm = (6, 50, 3) if quick else (41, 300, 20)

    def chunks(self, sizes: Sequence[int], once: bool) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Inputs to warm up with, and those of each pass: always the same, or (`once`) no size ever again."""
        if not once:
            same = inputs(changing(sizes, self.calls))
            return same, [same] * self.rounds
        calls = min(self.calls, (len(sizes) - 50) // self.rounds)
        shuffled = inputs(random.Random(0).sample(list(sizes), 50 + calls * self.rounds))
        warm = shuffled[:50]
        return warm, [shuffled[50 + calls * number : 50 + calls * (number + 1)] for number in range(self.rounds)]

    def compare(self, with_: Call, without: Call, sizes: Sequence[int], once: bool = False) -> dict[str, float]:
        warm, chunks = self.chunks(sizes, once)
        for form in (with_, without):
            for _ in range(1 if once else self.warm):
                for x in warm:
                    form(x)
        traced = counters["stats"]["unique_graphs"]
        taken = interleaved({"with": passes(with_, chunks), "without": passes(without, chunks)}, self.rounds)
        if counters["stats"]["unique_graphs"] != traced:
            raise RuntimeError("Dynamo traced again while calls were timed")
        return {
            "us": statistics.median(taken["with"]),
            "generic_us": statistics.median(taken["without"]),
            "over_us": paired_difference(taken["with"], taken["without"]),
        }

    def ours(self, kind: str, count: int, calls: str) -> dict[str, float]:
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        hit = calls == "hit"
        declared = conditions(kind, count, hit=hit)
        sizes = [size for size in range(2, LARGEST) if any(holds(entry, size) for entry in declared) == hit]

        def compiled(specialize: list[dict[str, Any]]) -> Call:
            options: dict[str, Any] = {"specialize": specialize, "compiler": one_code, "on_failure": "raise"}
            return torch.compile(program(), backend=multigraph, dynamic=True, options=options)

        result = self.compare(compiled(declared), compiled([]), sizes, once=calls == "first seen")
        ran = multigraph_backend.stats()
        halves = ran["variant_calls"] == ran["generic_calls"] if hit else ran["variant_calls"] == 0
        if not halves or ran["regions"] != 2 or ran["eager_calls"] or ran["failures"]:
            raise RuntimeError(f"something else ran than {calls}: {ran}\n{multigraph_backend.explain()}")
        return result

    def stock(self, count: int, once: bool) -> dict[str, float]:
        torch._dynamo.reset()
        counters.clear()
        with_, without = (torch.compile(program(), backend="eager", dynamic=True) for _ in range(2))
        first = torch.zeros(LARGEST // 2, 1)
        mark_dynamic(first, 0, specialize_on=equalities(count))
        with_(first)
        result = self.compare(with_, without, range(2, LARGEST), once)
        if counters["stats"]["unique_graphs"] != 2:
            raise RuntimeError(f"{counters['stats']['unique_graphs']} graphs where there should be 2")
        return result


def equalities(count: int) -> list[Callable[[int], bool]]:
    """Lambdas that never match. Stock reads the source of each from its file, so they are written to one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"never_{count}.py"
        path.write_text("\n".join(f"check{i} = lambda n: n == {LARGEST + i}" for i in range(count)) + "\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        checks: list[Callable[[int], bool]] = [getattr(module, f"check{i}") for i in range(count)]
        _keep_source(path)
    return checks


def _keep_source(path: Path) -> None:
    """`inspect.getsource` finds the text also after the file is gone."""
    import linecache

    text = path.read_text()
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))


def main() -> int:
    args = arguments(__doc__).parse_args()
    args.device = "cpu"  # dispatch is work of the host
    results = Results("dispatch", "Dispatch: microseconds per call over a model without variants", COLUMNS, args)
    measured = Dispatch(args.quick)
    counts = (16,) if args.quick else (1, 16, 64, 1024)
    for calls in ("missed", "hit", "first seen"):
        for kind in ("Eq", "Range", "MultipleOf", "mixed"):
            for count in counts:
                about = {"backend": "multigraph", "kind": kind, "count": count, "calls": calls}
                headline = kind in ("Eq", "mixed") and (calls, count) in HEADLINES
                results.row(about, partial(measured.ours, kind, count, calls), headline)
    for calls in ("missed", "first seen"):
        for count in (16,) if args.quick else (1, 16, 64):
            about = {"backend": "stock", "kind": "Eq", "count": count, "calls": calls}
            results.row(about, partial(measured.stock, count, calls == "first seen"), calls == "missed")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
