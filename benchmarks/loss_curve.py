"""Whether training learns the same with packed saved tensors: losses on real text, from the same start.

A small byte-level language model is trained on the sources of Python's own library, which are on any machine, once for
each form, on the same batches with the same optimizer. What is compared is the mean of the last losses.

last loss          mean over the last tenth of the steps
over unpacked      that over the same of the form that packs nothing

A part of benchmarks/saved_tensors.py, which calls it for `--loss-curve STEPS`.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import torch
import workloads
from measure import Column, Goal, Results, attempt, goals_text

import multigraph_backend
from multigraph_backend import Cast, Keep, Match, Rule, Scaled
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("form", "form"),
    Column("steps", "steps"),
    Column("first_loss", "first loss", 4),
    Column("last_loss", "last loss", 4),
    Column("over_unpacked", "over unpacked", 4),
    Column("packed", "packed"),
    Column("goals", "goals"),
)
FORMS: dict[str, list[Rule]] = {
    "unpacked": [],
    "fp8": [Rule(Match(), Cast("float8_e4m3fn"))],
    "fp8 products": [Rule(Match(), Cast("float8_e4m3fn", multiply=True))],
    "fp8, statistics too": [
        Rule(Match(role="statistic"), Cast("float8_e4m3fn")),
        Rule(Match(), Cast("float8_e4m3fn")),
    ],
    "fp8, scaled": [Rule(Match(), Scaled("float8_e4m3fn"))],
    "fp8, attention kept": [Rule(Match(module="*.attention"), Keep()), Rule(Match(), Cast("float8_e4m3fn"))],
    "int8": [Rule(Match(), Scaled("int8", per=64))],
    "int8, stochastic": [Rule(Match(), Scaled("int8", per=64, stochastic=True))],
}
LEARNS = 0.6  # of the first loss, at most, at the end: a flat curve compares nothing
APART = 1.02


def text() -> torch.Tensor:
    """Bytes."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def train(rules: list[Rule], steps: int, device: str, quick: bool) -> tuple[list[float], int]:
    """Losses, and how many tensors were packed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers, width, batch, length = (1, 64, 4, 64) if quick or device == "cpu" else (4, 512, 16, 512)
    model = workloads.LanguageModel(256, layers, width, width // 32, 4 * width, width // 32, True).to(device)
    before = multigraph_backend.stats()["packed_tensors"]
    options: dict[str, Any] = {"saved_tensors": rules, "on_failure": "raise", "cudagraphs": False}
    run = torch.compile(lambda ids: model(ids), backend=multigraph, fullgraph=True, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    data, draw = text(), torch.Generator().manual_seed(1)
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        starts = torch.randint(len(data) - length - 1, (batch, 1), generator=draw)
        ids = data[starts + torch.arange(length + 1)].long().to(device)
        loss = run(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], multigraph_backend.stats()["packed_tensors"] - before


def row_of(name: str, steps: int, device: str, quick: bool, unpacked: list[float]) -> dict[str, Any]:
    """One form; `unpacked`: the last loss of the first one, once it is known."""
    losses, packed = train(FORMS[name], steps, device, quick)
    if (packed > 0) != bool(FORMS[name]):
        raise RuntimeError(f"{packed} tensors are packed\n{multigraph_backend.explain()}")
    last = statistics.fmean(losses[-max(1, steps // 10) :])
    unpacked[:] = unpacked or [last]
    every = max(1, steps // 40)
    return {
        "steps": steps,
        "first_loss": losses[0],
        "last_loss": last,
        "over_unpacked": last / unpacked[0],
        "over_first": last / losses[0],
        "packed": packed,
        "curve": [round(loss, 4) for loss in losses[::every]],
    }


def main(args: argparse.Namespace) -> int:
    """The exit status."""
    results = Results("loss_curve", "Saved tensors: losses of training on text, packed or not", COLUMNS, args)
    if results.device == "cuda" and not args.quick:
        print(f"{len(FORMS)} forms, some {len(FORMS) * 40} seconds on a large GPU", flush=True)
    goals = (Goal("over unpacked", "over_unpacked", APART), Goal("over first", "over_first", LEARNS))
    unpacked: list[float] = []
    for name in FORMS:
        row, error = attempt(partial(row_of, name, args.loss_curve, results.device, args.quick, unpacked))
        if row is not None and results.device == "cuda":
            row["goals"] = goals_text(goals, row)
        results.add({"form": name}, row or {}, error, headline=True)
    return results.finish()
