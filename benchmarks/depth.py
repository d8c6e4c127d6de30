"""What a further equal layer costs to compile: as it stands, as a call of a body (`repeat`), and with Inductor.

A decoder of Llama's kind (RMSNorm, rotated queries and keys, SwiGLU) of some depths, inference and training, each depth
in a process of its own. Every first call has empty caches, after a throw-away compile of another program, and one
thread compiles: a machine's other cores do not hide what is done twice.

first s     of the first call, to the end of its work, with its backward where there is one
cpu s       of that, seconds of this process's and the compilers' processors: what the machine did beside does not count
cpu/Inductor  that over Inductor's
cpu s/layer the same for a further layer, from the smallest depth on; of "trace alone", which compiles nothing, it is
            what Dynamo takes for one, whatever is compiled afterwards
call us     of a later call; the forms take turns.  On a GPU multigraph's calls are replays, the others' are not
call/whole  to multigraph without bodies, paired by turns: of its own forms alone like for like on a GPU
GPU us      of a later call's work on a GPU, of the replays; GPU/whole as above
steps       of the graphs, and how many of them Inductor was given once instead of again
error       to eager, of results and gradients, relative

    python benchmarks/depth.py --layers 4 16 32 --json depth.json
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import workloads
from measure import (
    Column,
    Goal,
    Results,
    answer,
    arguments,
    cpu_seconds,
    fresh_cache,
    goals_text,
    gpu_us,
    in_own_process,
    interleaved,
    own_code,
    paired_ratio,
    wait,
    worst_difference,
)

import multigraph_backend

COLUMNS = (
    Column("passes", "passes"),
    Column("layers", "layers", 0),
    Column("form", "form"),
    Column("seconds", "first s", 2),
    Column("cpu_seconds", "cpu s", 2),
    Column("over_inductor", "cpu/Inductor", 3),
    Column("cpu_per_layer", "cpu s/layer", 3),
    Column("us", "call us", 0),
    Column("over_whole", "call/whole", 3),
    Column("gpu_us", "GPU us", 0),
    Column("gpu_over_whole", "GPU/whole", 3),
    Column("steps", "steps", 0),
    Column("spared", "not again", 0),
    Column("error_to_eager", "error", 7),
    Column("goals", "goals"),
)
PASSES = ("inference", "training")
FORMS: dict[str, dict[str, Any]] = {
    "multigraph": {"backend": "multigraph", "options": {"on_failure": "raise", "repeat": False}},
    "multigraph, repeat": {"backend": "multigraph", "options": {"on_failure": "raise", "repeat": "always"}},
    "multigraph, auto": {"backend": "multigraph", "options": {"on_failure": "raise", "repeat": "auto"}},
    "inductor": {"backend": "inductor"},
    "trace alone": {"backend": "eager"},
}
#: of forms with bodies, at 32 layers and more
GOALS = {
    "inference": (Goal("cpu/Inductor", "over_inductor", 0.25), Goal("GPU/whole", "gpu_over_whole", 1.01)),
    "training": (Goal("cpu/Inductor", "over_inductor", 0.3), Goal("GPU/whole", "gpu_over_whole", 1.01)),
}
SECONDS = 3000.0  # until a process counts as hanging


def measured(device: str, layers: int, training: bool, rounds: int, dynamic: bool) -> dict[str, dict[str, Any]]:
    """The values of each form's row."""
    torch.manual_seed(0)
    model = workloads.LanguageModel(256, layers, 64, 4, 128, 2, True).to(device, workloads.dtype_on(device))
    ids = torch.randint(0, 256, (2, 65), device=device)
    for dim in range(ids.dim()) if dynamic else ():
        torch._dynamo.maybe_mark_dynamic(ids, dim)

    def program(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        return loss

    def step(run: Callable[..., Any]) -> list[torch.Tensor]:
        if not training:
            with torch.no_grad():
                return [run(ids)]
        model.zero_grad(set_to_none=True)
        loss = run(ids)
        loss.backward()
        return [loss.detach(), *(value.grad for value in model.parameters() if value.grad is not None)]

    expected = step(program)
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[..., Any]] = {}
    for name, form in FORMS.items():
        torch.compile(own_code(_other), **form)(torch.randn(4, 4, device=device))
        known = _repeated()
        with fresh_cache(), inductor_config.patch(compile_threads=1):
            runs[name] = torch.compile(own_code(program), fullgraph=True, **form)
            wait()
            started, before = time.perf_counter(), cpu_seconds()
            results = step(runs[name])
            wait()
            rows[name] = {"seconds": time.perf_counter() - started, "cpu_seconds": cpu_seconds() - before}
        said = " ".join(entry for entry in _repeated() if entry not in known)
        counted = re.findall(r"(\d+) of (\d+) steps compiled", said)
        rows[name]["steps"] = sum(int(steps) for _, steps in counted) or None
        rows[name]["spared"] = sum(int(steps) - int(compiled) for compiled, steps in counted)
        rows[name]["error_to_eager"] = worst_difference(results, expected)
        rows[name]["said"] = said
    for run in runs.values():
        for _ in range(3):
            step(run)
    taken = interleaved({name: partial(_call_us, step, run) for name, run in runs.items()}, rounds)
    for name, row in rows.items():
        row["us"] = statistics.median(taken[name])
        row["over_whole"] = paired_ratio(taken[name], taken["multigraph"])
    if device == "cuda":  # of code that is not recorded, more kernels may wait than a queue holds
        replayed = {
            name: gpu_us(partial(step, run), [()], 200 + 2 * rows[name]["us"])
            for name, run in runs.items()
            if name.startswith("multigraph")
        }
        on_gpu = interleaved(replayed, max(3, rounds // 4))
        for name, found in on_gpu.items():
            rows[name]["gpu_us"] = statistics.median(found)
            rows[name]["gpu_over_whole"] = paired_ratio(found, on_gpu["multigraph"])
    return rows


def _repeated() -> list[str]:
    """What is said of repeated blocks so far."""
    return [region.generic.repeated for region in multigraph_backend.explain().regions if region.generic.repeated]


def _other(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).relu()


def _call_us(step: Callable[..., Any], run: Callable[..., Any]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(3):
        step(run)
    wait()
    return (time.perf_counter() - started) * 1e6 / 3


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", help="depths (4 16 32)")
    parser.add_argument("--passes", choices=PASSES, help="one of the two (both)")
    parser.add_argument("--dynamic", action="store_true", help="both sizes of the input are dynamic")
    parser.add_argument("--rounds", type=int, default=40, help="of turns in which calls are timed")
    parser.add_argument("--answer", type=Path, help="one depth, for the process that asks")
    args = parser.parse_args()
    depths = args.layers or ([2, 3] if args.quick else [4, 16, 32])
    rounds = 3 if args.quick else args.rounds
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.answer is not None:
        torch.set_num_threads(args.threads)
        return answer(
            args.answer, partial(measured, device, depths[0], args.passes == "training", rounds, args.dynamic)
        )
    results = Results("depth", "Depth: what a further equal layer costs to compile", COLUMNS, args)
    for passes in [args.passes] if args.passes else PASSES[: 1 if args.quick else 2]:
        smallest: dict[str, tuple[int, float]] = {}
        for layers in sorted(depths):
            words = ["--device", device, "--threads", str(args.threads), "--passes", passes, "--layers", str(layers)]
            words += ["--rounds", str(rounds), *(["--quick"] if args.quick else [])]
            words += ["--dynamic"] if args.dynamic else []
            rows, error = in_own_process(os.fspath(Path(__file__).resolve()), words, SECONDS)
            for form in FORMS:
                row = (rows or {}).get(form, {})
                if row:
                    least, cpu = smallest.setdefault(form, (layers, row["cpu_seconds"]))
                    further = (row["cpu_seconds"] - cpu) / (layers - least) if layers > least else None
                    row["cpu_per_layer"] = further
                    row["over_inductor"] = row["cpu_seconds"] / rows["inductor"]["cpu_seconds"]
                    if layers >= 32 and form in ("multigraph, repeat", "multigraph, auto"):
                        row["goals"] = goals_text(GOALS[passes], row)
                results.add({"passes": passes, "layers": layers, "form": form}, row, error, layers == max(depths))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
