"""Steps of decoding while code of variants is loaded beside them: how much longer they take, and who holds them up.

The model is that of `examples/server`. A process compiles generic and eight variants in the background and leaves them
in torch's caches. Then, in processes of their own, nothing is compiled: the first call of each declared size asks for
its variant, a thread takes its code out of the caches, and meanwhile steps of a size for which nothing was declared go
on, one after another with 0.5 ms between them.

alone p50, p99   ms of a step before any variant was asked for
p50, p99, worst  ms of a step from then on, until the last variant is in use, rests between loads included
16 alone, 16     ms of sixteen steps in a row, what a short request takes: p99
ratio            of these two
hold             ms of the longest time for which a thread that sleeps 0.5 ms did not get the interpreter, in a process
                 without such steps; "99 %": all but 1 % of its turns were shorter
loads s          from the first variant asked for until the last is in use
loaded           variants that came from the caches; all eight, or the row is about something else

    python benchmarks/beside_loads.py --json beside_loads.json  needs transformers (`pip install "multigraph[server]"`)
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import CHECKOUT, Column, Results, answer, arguments, in_own_process, wait

import multigraph_backend
from multigraph_backend.region import background

sys.path.insert(0, str(CHECKOUT / "examples" / "server"))

COLUMNS = (
    Column("run", "run"),
    Column("alone_p50_ms", "alone p50", 2),
    Column("alone_p99_ms", "alone p99", 2),
    Column("p50_ms", "p50", 2),
    Column("p99_ms", "p99", 2),
    Column("worst_ms", "worst", 1),
    Column("alone_16_ms", "16 alone", 1),
    Column("beside_16_ms", "16", 1),
    Column("ratio", "ratio", 2),
    Column("hold_ms", "hold", 1),
    Column("hold_99_ms", "99 %", 2),
    Column("loads_s", "loads s", 2),
    Column("loaded", "loaded"),
)
RUNS = 5
SECONDS = 3000.0  # of one process
ALONE = 4.0  # seconds of steps before variants are asked for
MOST = 120.0  # seconds until they are in use
PAUSE = 0.0005


def served(device: str, quick: bool) -> tuple[Callable[[int, int], torch.Tensor], list[tuple[int, int]]]:
    """A call of so many rows and tokens, and the sizes that were declared."""
    import batching
    from slot_model import SlotModel, language_models

    torch._dynamo.config.specialize_float = True
    rows, tokens = ((1, 4), (16,)) if quick else (batching.BATCHES, batching.PROMPTS)
    model = SlotModel(language_models(device, quick)["draft" if quick else "chat"], batching.BATCHES[-1], 256)
    options: dict[str, Any] = {
        "specialize": [
            {"input_ids[0]": list(rows), "input_ids[1]": 1},
            {"input_ids[0]": 1, "input_ids[1]": list(tokens)},
        ],
        "compile": "background",
        "workers": {"gpu": True},
        "warm_start": False,
    }
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options=options)

    def call(rows: int, tokens: int) -> torch.Tensor:
        places = torch.arange(tokens, device=device).expand(rows, tokens).contiguous()
        logits: torch.Tensor = compiled(torch.zeros_like(places), places, torch.arange(rows, device=device))
        return logits

    return call, [*((count, 1) for count in reversed(rows)), *((1, count) for count in tokens)]


def until(done: Callable[[], bool], turn: Callable[[], float]) -> list[float]:
    """Milliseconds of turns, one after another."""
    found: list[float] = []
    last = time.perf_counter() + MOST
    while not done() and time.perf_counter() < last:
        found.append(1e3 * turn())
    return found


def measured(phase: str, device: str, quick: bool) -> dict[str, Any]:
    """`phase`: "compile" fills the caches; "steps" and "holds" load from them."""
    call, sizes = served(device, quick)

    def step() -> float:
        began = time.perf_counter()
        call(3, 1)[:, -1].argmax(-1).tolist()
        took = time.perf_counter() - began
        time.sleep(PAUSE)
        return took

    def tick() -> float:
        began = time.perf_counter()
        time.sleep(PAUSE)
        return time.perf_counter() - began - PAUSE

    with torch.inference_mode():
        for _ in range(3):  # generic's code and recordings, with one token and with more
            call(3, 1), call(3, 5), call(1, 5)
        wait()
        turn = step if phase == "steps" else tick
        began = time.perf_counter()
        alone = [] if phase == "compile" else until(lambda: time.perf_counter() - began > ALONE, turn)
        began = time.perf_counter()
        for size in sizes:
            call(*size)
        if phase == "compile":
            if not background.wait(SECONDS):
                raise RuntimeError("variants were not compiled in time")
            return {}
        beside = until(lambda: background.wait(0), turn)
        took = time.perf_counter() - began
        if not background.wait(0):
            raise RuntimeError(f"variants were not loaded in {MOST:.0f} s")
    if phase == "holds":
        return {"hold_ms": max(beside), "hold_99_ms": high(beside)}
    alone_16, beside_16 = high(in_a_row(alone)), high(in_a_row(beside))
    return {
        "alone_p50_ms": high(alone, 0.5),
        "alone_p99_ms": high(alone),
        "p50_ms": high(beside, 0.5),
        "p99_ms": high(beside),
        "worst_ms": max(beside),
        "alone_16_ms": alone_16,
        "beside_16_ms": beside_16,
        "ratio": beside_16 / alone_16,
        "loads_s": took,
        "loaded": multigraph_backend.stats()["loaded_ahead"],
    }


def high(values: Sequence[float], part: float = 0.99) -> float:
    return sorted(values)[int(part * len(values))]


def in_a_row(steps: Sequence[float], count: int = 16) -> list[float]:
    """Of each `count` steps that follow one another; of all, where there are fewer."""
    return [sum(steps[first : first + count]) for first in range(max(1, len(steps) - count + 1))]


def in_process(phase: str, device: str, quick: bool) -> dict[str, Any]:
    words = ["--phase", phase, "--device", device, *(["--quick"] if quick else [])]
    value, error = in_own_process(__file__, words, SECONDS)
    if error is not None:
        raise RuntimeError(error)
    said: dict[str, Any] = value
    return said


def row(device: str, quick: bool) -> dict[str, Any]:
    return in_process("steps", device, quick) | in_process("holds", device, quick)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase is not None:
        torch.set_num_threads(args.threads)
        return answer(args.answer, partial(measured, args.phase, args.device, args.quick))
    results = Results("beside_loads", "Steps beside loads: milliseconds", COLUMNS, args)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        in_process("compile", results.device, args.quick)
        for run in range(1 if args.quick else RUNS):
            results.row({"run": run + 1}, partial(row, results.device, args.quick))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
