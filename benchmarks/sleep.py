"""Sleep and wake: what they take, what they give back, and whether all is as it was, beside what stock can do.

pool, host         the parameters of a recorded model lie in `allocator.pool(sleeps=True)`; `sleep("host")`, `wake()`
pool, nothing      the same with keep="nothing", and the parameters copied in again from pinned memory after the wake
process, host      the extension is the process's allocator; `allocator.sleep(keep="host")`, `wake()`: parameters,
                   recordings and all else
stock              parameters copied to pinned memory of the host, their storages resized to nothing, `empty_cache()`;
                   then resized, which is at other addresses, and copied back. Recordings of the model are of no use
                   any more; it runs uncompiled here
stock, to()        `model.cpu()`, `empty_cache()`; `model.cuda()`: pageable memory, as most programs have it

Each form has a process of its own; stock's run 50 cycles at most. After each wake the model is called, and its output
compared bit by bit with the one before the first sleep. "sleep" and "wake" are seconds per GiB given back, medians of
all cycles but the first, which pins the host's memory ("first sleep"); "given" is the device's free memory after a
sleep less that before, over the bytes held there. "grown" is by how many MiB the used memory grew from the fifth cycle
to the last.

    python benchmarks/sleep.py --json sleep.json            1000 cycles of 2 GiB for each form
    python benchmarks/sleep.py --cycles 50 --gib 8 --only pool
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Column, Goal, Results, answer, arguments, goals_text, in_own_process

import multigraph_backend
from multigraph_backend import allocator
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("form", "form"),
    Column("gib", "GiB", 2),
    Column("cycles", "cycles"),
    Column("sleep_s", "sleep s/GiB", 4),
    Column("wake_s", "wake s/GiB", 4),
    Column("first_s", "first sleep s/GiB", 4),
    Column("given", "given/held", 4),
    Column("equal", "bitwise equal"),
    Column("grown_mib", "grown MiB", 1),
    Column("over_stock", "sleep + wake / stock", 3),
    Column("goals", "goals"),
)
FORMS = ("stock", "stock, to()", "pool, host", "pool, nothing", "process, host")
GOALS = (Goal("given", "given", 0.98, at_least=True), Goal("grown", "grown_mib", 8.0))
WIDTH = 4096
SECONDS = 3000.0  # of one form
MOST_OF_STOCK = 50  # cycles: they take many times as long


def made(gib: float, device: str) -> torch.nn.Sequential:
    """A model whose parameters take about so much."""
    width = WIDTH if device == "cuda" else 64
    count = max(1, round(gib * (1 << 30) / (4 * width * width))) if device == "cuda" else 2
    layers = (torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.GELU()) for _ in range(count))
    return torch.nn.Sequential(*layers).to(device).eval()


def measure(form: str, gib: float, cycles: int, device: str) -> Mapping[str, Any]:
    """One form in this process."""
    on_gpu = device == "cuda"
    if form == "process, host" and on_gpu:
        status = allocator.install()
        if not status:
            raise RuntimeError(str(status))
    torch.manual_seed(0)
    pool = allocator.pool(sleeps=True) if form.startswith("pool") else None
    if pool is not None:
        if on_gpu and pool.reason is not None:
            raise RuntimeError(pool.reason)
        with pool:
            model = made(gib, device)
    else:
        model = made(gib, device)
    x = torch.randn(16, next(model.parameters()).shape[1], device=device)
    run: Callable[[torch.Tensor], torch.Tensor] = model
    if not form.startswith("stock"):
        run = torch.compile(model, backend=multigraph, options={"record_small": True})
    with torch.no_grad():
        for _ in range(4):
            run(x)
        expected = run(x).clone()
    held = sum(parameter.nbytes for parameter in model.parameters())
    recorded = multigraph_backend.stats()["recordings"]
    if pool is not None and on_gpu:
        held = pool.reserved_bytes
    if form == "process, host" and on_gpu:
        allocator.empty_cache()
        held = allocator.memory_reserved()
    sleep, wake = _forms(form, model, pool, on_gpu)
    times: dict[str, list[float]] = {"sleep": [], "wake": []}
    given, used, equal = [], [], True
    for _ in range(cycles):
        before = _free(on_gpu)
        times["sleep"].append(_timed(sleep, on_gpu))
        given.append((_free(on_gpu) - before) / held)
        times["wake"].append(_timed(wake, on_gpu))
        with torch.no_grad():
            equal = equal and torch.equal(run(x), expected)
        used.append(-_free(on_gpu))
    if multigraph_backend.stats()["recordings"] != recorded:
        raise RuntimeError("something was recorded again after a wake")
    size = held / (1 << 30)
    return {
        "gib": size,
        "sleep_s": statistics.median(times["sleep"][1:] or times["sleep"]) / size,
        "wake_s": statistics.median(times["wake"][1:] or times["wake"]) / size,
        "first_s": times["sleep"][0] / size,
        "given": min(given) if on_gpu else None,
        "equal": "yes" if equal else "NO",
        "grown_mib": max(0, used[-1] - used[min(4, cycles - 1)]) / (1 << 20) if on_gpu else None,
    }


def _forms(
    form: str, model: torch.nn.Module, pool: allocator.Pool | None, on_gpu: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """How this form sleeps and wakes."""
    parameters = list(model.parameters())
    if form == "stock, to()":

        def to_cpu() -> None:
            model.cpu()
            _empty_cache(on_gpu)

        return to_cpu, lambda: model.to("cuda" if on_gpu else "cpu")
    kept = [torch.empty_like(parameter, device="cpu", pin_memory=on_gpu) for parameter in parameters]
    sizes = [parameter.untyped_storage().nbytes() for parameter in parameters]

    def put() -> None:
        with torch.no_grad():
            for parameter, copy in zip(parameters, kept, strict=True):
                copy.copy_(parameter, non_blocking=True)
        _wait(on_gpu)

    def put_back() -> None:
        with torch.no_grad():
            for parameter, copy in zip(parameters, kept, strict=True):
                parameter.copy_(copy, non_blocking=True)

    def stock_sleep() -> None:
        put()
        for parameter in parameters:
            parameter.untyped_storage().resize_(0)
        _empty_cache(on_gpu)

    def stock_wake() -> None:
        for parameter, size in zip(parameters, sizes, strict=True):
            parameter.untyped_storage().resize_(size)
        put_back()

    if form == "stock":
        return stock_sleep, stock_wake
    if not on_gpu:  # nothing sleeps there: does the script run
        return put, put_back
    if form == "process, host":
        return allocator.sleep, allocator.wake
    assert pool is not None
    if form == "pool, host":
        return pool.sleep, pool.wake
    put()

    def wake_and_load(pool: allocator.Pool = pool) -> None:
        pool.wake()
        put_back()

    return partial(pool.sleep, keep="nothing"), wake_and_load


def _timed(call: Callable[[], object], on_gpu: bool) -> float:
    _wait(on_gpu)
    began = time.perf_counter()
    call()
    _wait(on_gpu)
    return time.perf_counter() - began


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _free(on_gpu: bool) -> int:
    _wait(on_gpu)
    return int(torch.cuda.mem_get_info()[0]) if on_gpu else 0


def _empty_cache(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.empty_cache()


def main() -> int:
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--gib", type=float, default=2.0, help="of parameters (2)")
    parser.add_argument("--only", metavar="TEXT", help=f"forms whose name has this in it: {'; '.join(FORMS)}")
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cycles = 3 if args.quick else args.cycles
    gib = 0.25 if args.quick else args.gib
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.answer is not None:
        os.environ.pop("MULTIGRAPH_ALLOCATOR", None)
        return answer(args.answer, lambda: measure(args.form, gib, cycles, device))
    results = Results("sleep", "Sleep and wake: seconds per GiB, and what they give back", COLUMNS, args)
    stock: float | None = None
    for form in FORMS:
        if args.only is not None and args.only not in form and form != "stock":
            continue
        count = min(cycles, MOST_OF_STOCK) if form.startswith("stock") else cycles
        words = ["--form", form, "--cycles", str(count), "--gib", str(gib), "--device", device]
        row, error = in_own_process(str(Path(__file__).resolve()), words, SECONDS)
        values: dict[str, Any] = dict(row or {})
        if error is None:
            both = values["sleep_s"] + values["wake_s"]
            stock = both if form == "stock" else stock
            values["over_stock"] = None if stock is None else both / stock
            values["goals"] = goals_text(GOALS, values) if form.startswith(("pool", "process")) else "-"
        results.add({"form": form, "cycles": count}, values, error, headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
