"""What compiling costs, cold: the generic graph and each variant, against stock's compile of the same shape.

Every figure is of one compile in an empty cache folder, with torch's in-memory caches cleared, in a process that has
compiled before, so that starting up hurts nobody. Ours and stock's take turns, and change places every other time.

seconds     ours: from the call to the end of its work; a variant's is the call that needs it, after generic is there
stock       the same of torch.compile(dynamic=False) of that shape, or dynamic=True for generic
compile s   ours: the compile alone, as explain() reports it
no trace    stock: without Dynamo's trace, which a variant does not need; "compile/no trace" is the strict comparison

    python benchmarks/compile_time.py --json compile_time.json
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import workloads
from measure import Call, Column, Results, arguments, attempt, fresh_cache, own_code
from torch._dynamo.utils import calculate_time_spent

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("model", "model"),
    Column("passes", "passes"),
    Column("condition", "graph"),
    Column("shape", "shape"),
    Column("seconds", "seconds", 2),
    Column("stock_seconds", "stock", 2),
    Column("over_stock", "ours/stock", 2),
    Column("compile_seconds", "compile s", 2),
    Column("stock_compile_seconds", "no trace", 2),
    Column("compile_over_stock", "compile/no trace", 2),
)

PASSES = ("forward", "forward+backward")

Declared = dict[str, Any]


@dataclass(frozen=True)
class Graph:
    """One row: what is declared (nothing: the generic graph), and the shape of the call that needs it."""

    name: str
    declared: Declared | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """`graphs[0]` is generic; a shape may be served by none but its own condition."""

    name: str
    module: torch.nn.Module
    inputs: Callable[[tuple[int, ...]], torch.Tensor]
    graphs: tuple[Graph, ...]

    def program(self) -> Call:
        module = self.module

        def program(x: torch.Tensor) -> Any:
            return module(x)

        return own_code(program)


def models(device: str, quick: bool) -> list[Callable[[], Model]]:
    """What makes the models: not before they are needed."""

    def filled(module: torch.nn.Module) -> Callable[[tuple[int, ...]], torch.Tensor]:
        width = next(module.parameters()).shape[-1]
        return lambda shape: torch.randn(*shape, width, device=device, dtype=workloads.dtype_on(device))

    def mlp() -> Model:
        module = workloads.mlp(device)
        graphs = (
            Graph("generic", None, (37,)),
            Graph("Eq", {"x[0]": 64}, (64,)),
            Graph("MultipleOf", {"x[0]": {"multiple_of": 16}}, (48,)),
            Graph("Range", {"x[0]": {"min": 1000, "max": 4000}}, (1001,)),
        )
        return Model("mlp", module, filled(module), graphs[:2] if quick else graphs)

    def decoder() -> Model:
        module = workloads.decoder(device)
        graphs = (
            Graph("generic", None, (3, 100)),
            Graph("Eq", {"x[0]": 4, "x[1]": 128}, (4, 128)),
            Graph("MultipleOf", {"x[1]": {"multiple_of": 16}}, (3, 160)),
            Graph("Range", {"x[1]": {"min": 200, "max": 400}}, (3, 250)),
        )
        return Model("decoder, 4 layers", module, filled(module), graphs)

    return [mlp] if quick else [mlp, decoder]


# ---------------------------------------------------------------- one compile


def timed_call(model: Model, form: Call, graph: Graph, backward: bool) -> float:
    """Seconds of a call, with its backward, to the end of its work."""
    x = model.inputs(graph.shape)
    model.module.zero_grad(set_to_none=True)
    _wait()
    started = time.perf_counter()
    if backward:
        form(x).sum().backward()
    else:
        with torch.no_grad():
            form(x)
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ours(model: Model, backward: bool) -> dict[str, dict[str, float]]:
    """Generic, then each variant, of one trace; every compile in an empty cache."""
    _forget()
    declared = [graph.declared for graph in model.graphs if graph.declared is not None]
    options: dict[str, Any] = {"specialize": declared, "on_failure": "raise"}
    form = torch.compile(model.program(), backend=multigraph, fullgraph=True, dynamic=True, options=options)
    taken: dict[str, dict[str, float]] = {}
    for graph in model.graphs:
        with fresh_cache():
            seconds = timed_call(model, form, graph, backward)
        taken[graph.name] = {"seconds": seconds}
    ran = multigraph_backend.stats()
    if ran["variants_compiled"] != len(declared) or ran["failures"] or ran["eager_calls"]:
        raise RuntimeError(f"other compiles than expected: {ran}\n{multigraph_backend.explain()}")
    regions = multigraph_backend.explain().regions
    for number, graph in enumerate(model.graphs):
        reports = [(region.generic, *region.variants)[number] for region in regions]
        if sum(report.calls for report in reports) != 1:
            raise RuntimeError(f"{graph.name} did not serve its own call alone\n{multigraph_backend.explain()}")
        taken[graph.name]["compile_seconds"] = sum(report.compile_seconds for report in reports)
        taken[graph.name]["traces"] = len(regions)
    return taken


def stock(model: Model, backward: bool) -> dict[str, dict[str, float]]:
    """Each shape compiled for itself, the first with dynamic shapes; every compile in an empty cache."""
    taken: dict[str, dict[str, float]] = {}
    for graph in model.graphs:
        _forget()
        form = torch.compile(model.program(), fullgraph=True, dynamic=graph.declared is None)
        before = calculate_time_spent()
        with fresh_cache():
            seconds = timed_call(model, form, graph, backward)
        after = calculate_time_spent()
        taken[graph.name] = {"stock_seconds": seconds}
        whole, lowering = (
            after.get(key, 0.0) - before.get(key, 0.0) for key in ("entire_frame_compile", "backend_compile")
        )
        if whole > 0 and lowering > 0:
            taken[graph.name]["stock_compile_seconds"] = seconds - (whole - lowering)
    return taken


def _forget() -> None:
    torch._dynamo.reset()
    multigraph_backend.reset_stats()
    gc.collect()


# ---------------------------------------------------------------- rows


def compare(model: Model, backward: bool, repeats: int) -> dict[str, dict[str, float]]:
    """Medians over `repeats` of the values of each row."""
    runs: list[dict[str, dict[str, float]]] = []
    for number in range(repeats):
        sides = (ours, stock) if number % 2 == 0 else (stock, ours)
        taken = [side(model, backward) for side in sides]
        runs.append({graph.name: taken[0][graph.name] | taken[1][graph.name] for graph in model.graphs})
    rows: dict[str, dict[str, float]] = {}
    for graph in model.graphs:
        values = [run[graph.name] for run in runs]
        row = {key: statistics.median(value[key] for value in values if key in value) for key in values[0]}
        row["over_stock"] = row["seconds"] / row["stock_seconds"]
        if "stock_compile_seconds" in row:
            row["compile_over_stock"] = row["compile_seconds"] / row["stock_compile_seconds"]
        rows[graph.name] = row
    return rows


def throw_away(device: str, passes: list[str]) -> None:
    """Compiles nobody looks at: compilers found, worker processes started, libraries loaded, for both sides."""
    model = models(device, True)[0]()
    for name in passes:
        for side in (ours, stock):
            side(model, name == PASSES[1])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, help="of each compile (3)")
    parser.add_argument("--passes", choices=PASSES, help="one of the two (both)")
    parser.add_argument("--only", metavar="TEXT", help="models whose name has this in it")
    args = parser.parse_args()
    results = Results("compile_time", "Compile time: cold seconds, and stock's", COLUMNS, args)
    repeats = args.repeats or (1 if args.quick else 3)
    passes = [args.passes] if args.passes else list(PASSES[:1] if args.quick else PASSES)
    if not args.quick:
        _, failed = attempt(partial(throw_away, results.device, passes))
        if failed is not None:
            print(f"the throw-away compiles failed: {failed}", flush=True)
    for make in models(results.device, args.quick):
        model = make()
        if args.only and args.only not in model.name:
            continue
        for name in passes:
            rows, error = attempt(partial(compare, model, name == PASSES[1], repeats))
            for graph in model.graphs:
                shape = "x".join(str(size) for size in graph.shape)
                about = {"model": model.name, "passes": name, "condition": graph.name, "shape": shape}
                headline = "decoder" in model.name and graph.name in ("generic", "Eq", "MultipleOf")
                results.add({**about, "declared": graph.declared}, (rows or {}).get(graph.name, {}), error, headline)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
