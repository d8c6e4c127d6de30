"""Token counts as they come: padded by the option, by the caller, or not at all.

sizes given         inputs of declared sizes, each the next one above a count: what padding can be at best
multigraph, pad     `options={"pad": ...}`, inputs of any count from 1 to 512
padded by hand      the same inputs; the caller copies them to the next declared size, and slices what comes back
as they come        multigraph without the option: on a GPU a recording for each count
inductor dynamic    torch.compile(dynamic=True)

Each call is waited for, the forms are called in turns of 100, with the same counts in the same order, once all
declared sizes were called three times. Those as they come run behind the others, for they make more recordings than a
device keeps, and the others' would be given up for them. "p99 ratio" is to the inputs that have declared sizes, "by
hand" to what the caller pads. "recordings" are those of a process that has this form alone: beside others, recordings
of all give way to the largest, and are made again. Outputs of the last turn are compared with eager's. The model is a
step over flat tokens: an embedding, positions, and blocks of a norm and a gated MLP (width 512).

    python benchmarks/padding.py --json padding.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import Column, Goal, Results, answer, arguments, goals_text, in_own_process, wait

import multigraph_backend

COLUMNS = (
    Column("form", "form"),
    Column("p50_us", "p50 us", 1),
    Column("p99_us", "p99 us", 1),
    Column("p99_ratio", "p99 ratio", 2),
    Column("p99_over_hand", "by hand", 2),
    Column("recordings", "recordings"),
    Column("padded_calls", "padded calls"),
    Column("worst", "worst error"),
    Column("goals", "goals"),
)
GIVEN = "sizes given"
BEHIND = "as they come"
HAND = "padded by hand"
FORMS = (GIVEN, "multigraph, pad", HAND, "inductor dynamic", BEHIND)
RECORDED = FORMS[:3]
MOST, TURN = 512, 100
SIZES = [1 << power for power in range(10)]
GOALS = (Goal("p99 over padded by hand", "p99_over_hand", 1.1), Goal("recordings", "recordings", len(SIZES)))
SECONDS = 600.0  # of one process

Inputs = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.gate = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = self.norm(h)
        done: torch.Tensor = h + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return done


class Step(torch.nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.last = torch.nn.Linear(width, 1000)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids) + torch.sin(positions.float())[:, None]
        for block in self.blocks:
            h = block(h)
        scores: torch.Tensor = self.last(h)
        return scores


def above(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def given(count: int, device: str) -> Inputs:
    return torch.randint(0, 1000, (count,), device=device), torch.arange(count, device=device)


def by_hand(compiled: Call) -> Call:
    def call(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count, size = len(ids), above(len(ids))
        if size == count:
            return compiled(ids, positions)
        padded = [torch.nn.functional.pad(value, (0, size - count)) for value in (ids, positions)]
        return compiled(*padded)[:count]

    return call


def compiled_as(form: str, model: torch.nn.Module, quick: bool) -> Call:
    made: Call
    if form == "inductor dynamic":
        made = torch.compile(model, backend="aot_eager" if quick else "inductor", dynamic=True)
        return made
    pad = {"pad": {"ids[0]": SIZES}} if form == "multigraph, pad" else {}
    options: dict[str, Any] = {
        "name": form,
        "record_small": True,
        "compiler": "aot_eager" if quick else "inductor",
        **pad,
    }
    made = torch.compile(model, backend="multigraph", dynamic=True, options=options)
    return by_hand(made) if form == HAND else made


class Form:
    def __init__(self, name: str, model: torch.nn.Module, device: str, quick: bool) -> None:
        self.name, self.device, self.quick = name, device, quick
        self.call = compiled_as(name, model, quick)
        self.seconds: list[float] = []
        self.recordings = self.padded = 0
        self.worst = 0.0

    def counting(self, calls: Callable[[], None]) -> None:
        before = multigraph_backend.stats()
        calls()
        after = multigraph_backend.stats()
        self.recordings += after["recordings"] - before["recordings"]
        self.padded += after["padded_calls"] - before["padded_calls"]

    def warm_up(self, sizes: Sequence[int]) -> None:
        for size in sorted(sizes, reverse=True):
            for _ in range(3):
                self.call(*given(size, self.device))
        wait()

    def turn(self, inputs: Sequence[Inputs], model: torch.nn.Module, check: bool) -> None:
        for ids, positions in inputs:
            count = above(len(ids)) if self.name == GIVEN else len(ids)
            entry = given(count, self.device) if count != len(ids) else (ids, positions)
            wait()
            began = time.perf_counter()
            output = self.call(*entry)
            wait()
            self.seconds.append(time.perf_counter() - began)
            if check:
                self.worst = max(self.worst, float((output - model(*entry)).abs().max()))
            del output

    def values(self) -> dict[str, Any]:
        found = sorted(self.seconds)
        return {
            "p50_us": 1e6 * statistics.median(found),
            "p99_us": 1e6 * found[int(0.99 * len(found))],
            "recordings": self.recordings,
            "padded_calls": self.padded,
            "worst": f"{self.worst:.1e}",
        }


def called(names: Sequence[str], device: str, quick: bool) -> list[Form]:
    """These forms, each after all of its calls."""
    torch._dynamo.config.recompile_limit = 64  # all forms are of one code
    torch.manual_seed(0)
    model = Step(*((1, 16) if quick else (8, 512))).to(device).eval()
    chance = random.Random(0)
    turns, turn = (1, 6) if quick else (20, TURN)
    sizes = SIZES[:4] if quick else SIZES
    with torch.inference_mode():
        forms = [Form(name, model, device, quick) for name in names]
        for form in forms:
            form.counting(lambda form=form: form.warm_up(sizes))  # type: ignore[misc]
        counts = [[chance.randint(1, sizes[-1]) for _ in range(turn)] for _ in range(turns)]
        for taking_turns in (
            [form for form in forms if form.name != BEHIND],
            [form for form in forms if form.name == BEHIND],
        ):
            for number, of_turn in enumerate(counts):
                for form in taking_turns:
                    inputs = [given(count, device) for count in of_turn]
                    last = number == turns - 1
                    form.counting(lambda form=form, inputs=inputs, last=last: form.turn(inputs, model, last))  # type: ignore[misc]
    return forms


def alone(name: str, device: str, quick: bool) -> int:
    """Recordings that a form makes in a process of its own."""
    words = ["--form", name, "--device", device, *(["--quick"] if quick else [])]
    value, error = in_own_process(__file__, words, SECONDS)
    if error is not None:
        raise RuntimeError(error)
    return int(value)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.form is not None:
        return answer(args.answer, lambda: called([args.form], args.device, args.quick)[0].recordings)
    results = Results("padding", "Padding: token counts as they come", COLUMNS, args)
    device, quick = results.device, args.quick
    rows = {form.name: form.values() for form in called(FORMS, device, quick)}
    for name, row in rows.items():
        row["p99_ratio"] = row["p99_us"] / rows[GIVEN]["p99_us"]
        row["p99_over_hand"] = row["p99_us"] / rows[HAND]["p99_us"]
        if name in RECORDED:
            row["recordings"] = alone(name, device, quick)
        if name == "multigraph, pad" and device == "cuda":
            row["goals"] = goals_text(GOALS, row)
        wrong = float(row["worst"]) > (1e-3 if device == "cuda" else 1e-4)
        results.add({"form": name}, row, "WrongNumbers" if wrong else None, headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
