"""Finetunes a small language model within a memory limit, by one option, and draws the memory of a step.

A decoder (tiny_lm.py) that was trained a little on the first half of Python's standard library is finetuned on the
second half, twice from the same weights on the same batches, with the same compiler:

    as it is    torch.compile(model, backend="multigraph")
    with goal   the same with options={"memory_goal": "40 MiB"}

Nothing is said of which tensors are packed, computed again or offloaded, and how: multigraph reckons what parameters,
gradients, the optimizer and the step itself need, and does what costs least until the rest fits. What it has chosen is
printed before the first step is done.

Of one step in the middle, each allocation and each free is noted (torch's profiler: on the CPU those of its allocator,
on CUDA those of the caching allocator). Beside them counts what lives longer than a step: weights and the optimizer's
state. The picture, an SVG, shows both steps and the limit.

    python examples/finetune.py
    python examples/finetune.py --limit "48 MiB" --picture memory.svg
    python examples/finetune.py --device cuda --width 512 --layers 8 --batch 64
"""

import argparse
import copy
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from outcome import exit_status
from progress import Progress
from tiny_lm import TinyLM, standard_library_text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

import multigraph_backend
from multigraph_backend.saved_tensors.reckoning import MemoryPlan

MIB = 2**20
LIMIT = 0.75  # of what a step needs as it is, where no limit is given
ALLOWED = 0.05  # how far the last losses may be apart, relatively
PHASES = ("forward", "backward", "optimizer")


class WithLoss(nn.Module):
    """Tokens to the loss: with the loss in the graph, its memory is reckoned with, too."""

    def __init__(self, lm: TinyLM) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, window: Tensor) -> Tensor:
        logits = self.lm(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@dataclass
class Step:
    """Bytes that were in use, from one event to the next, in each phase: (part of the phase that is over, bytes)."""

    phases: dict[str, list[tuple[float, int]]]

    @property
    def peak(self) -> int:
        return max(count for points in self.phases.values() for _, count in points)


@dataclass
class Run:
    step: Step
    losses: list[float]
    seconds: float  # of a step, the fastest
    plans: list[MemoryPlan]  # what multigraph has chosen, for each graph


# ---------------------------------------------------------------- training


def batches(text: Tensor, length: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    """Windows of the text, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        yield text[starts + torch.arange(length + 1)].long().to(device)


def steps(
    run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, windows: Iterator[Tensor]
) -> Iterator[float]:
    """One training step for each value asked for, which is its loss."""
    while True:
        window = next(windows)
        with record_function("forward"):
            loss = run(window)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def pretrained(text: Tensor, arguments: argparse.Namespace) -> TinyLM:
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    lm = TinyLM(width=arguments.width, layers=arguments.layers).to(device).train()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=2e-3, betas=(0.9, 0.98))
    going = steps(WithLoss(lm), optimizer, batches(text, lm.max_length, 4, device))
    with Progress("before", arguments.before, "steps") as progress:
        for step in range(arguments.before):
            progress.at(step + 1, f"loss {next(going):.3f}")
    return lm


def finetune(lm: TinyLM, options: dict[str, Any], text: Tensor, arguments: argparse.Namespace, name: str) -> Run:
    """Trains a copy of `lm`; a step in the middle is looked at."""
    device = torch.device(arguments.device)
    torch.compiler.reset()
    model = WithLoss(copy.deepcopy(lm))
    # recordings would keep their memory from one run to the next
    compiled = torch.compile(model, backend="multigraph", options={"cudagraphs": False, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    going = steps(compiled, optimizer, batches(text, lm.max_length, arguments.batch, device))
    losses, seconds, seen = list[float](), list[float](), Step({})
    with Progress(name, arguments.steps, "steps") as progress:
        for step in range(arguments.steps):
            progress.at(step, "the first step compiles" if step == 0 else f"loss {losses[-1]:.3f}")
            began = time.perf_counter()
            if step == arguments.steps // 2:
                loss, seen = watched(going, lasting(model, optimizer), device)
                losses.append(loss)
            else:
                losses.append(next(going))
                seconds.append(time.perf_counter() - began)
        progress.at(arguments.steps, f"loss {losses[-1]:.3f}")
    return Run(seen, losses, min(seconds[1:]), plans())


def plans() -> list[MemoryPlan]:
    """What multigraph has chosen, and what it comes to."""
    saved = [entry for region in multigraph_backend.explain().regions for entry in region.generic.saved]
    return [entry.memory for entry in saved if entry.memory is not None]


# ---------------------------------------------------------------- memory of a step


def lasting(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what is there before a step and after it."""
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *state]
    return sum(value.numel() * value.element_size() for value in tensors)


def watched(going: Iterator[float], base: int, device: torch.device) -> tuple[float, Step]:
    """One step: its loss, and its memory."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, profile_memory=True) as profiler:
        loss = next(going)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return loss, timeline(events, base, 1 if device.type == "cuda" else 0)


def timeline(events: Sequence[dict[str, Any]], base: int, kind: int) -> Step:
    """Bytes in use over a step, from the profiler's events; `kind`: of the device, as the profiler numbers them.

    A free of what was allocated before the step is none of the step's.
    """
    marks = {
        event["name"]: event for event in events if event["name"] in PHASES and event.get("cat") == "user_annotation"
    }
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == kind]
    changes.sort(key=lambda event: float(event["ts"]))
    phases: dict[str, list[tuple[float, int]]] = {}
    live: dict[int, int] = {}
    total, index = base, 0
    for phase in PHASES:
        begin, length = float(marks[phase]["ts"]), float(marks[phase]["dur"])
        points = phases[phase] = [(0.0, total)]
        while index < len(changes) and (at := float(changes[index]["ts"])) <= begin + length:
            address, count = changes[index]["args"]["Addr"], changes[index]["args"]["Bytes"]
            if count > 0:
                live[address] = count
                total += count
            else:
                total -= live.pop(address, 0)
            index += 1
            points.append((min(max((at - begin) / length, 0.0), 1.0), total))
        points.append((1.0, total))
    return Step(phases)


# ---------------------------------------------------------------- the picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 60, 20, 52, 44
SHARES = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1}  # of the width
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .faint { fill: #6e7781 } .axis { stroke: #d0d7de }
  .plain { fill: #8c959f; fill-opacity: .28; stroke: #6e7781 }
  .goal { fill: #0969da; fill-opacity: .28; stroke: #0969da }
  .limit { stroke: #bc4c00; stroke-dasharray: 6 4; stroke-width: 1.5 } .said { fill: #bc4c00 } .page { fill: #ffffff }
  .blue { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .faint { fill: #9198a1 } .axis { stroke: #3d444d } .page { fill: #0d1117 }
    .plain { fill: #9198a1; stroke: #9198a1 } .goal { fill: #4493f8; stroke: #4493f8 } .blue { fill: #4493f8 }
    .limit { stroke: #f0883e } .said { fill: #f0883e }
  }
"""


def picture(plain: Run, goal: Run, limit: float) -> str:
    """Both steps, one over the other, as SVG; the phases of both begin and end at the same places."""
    most = max(plain.step.peak, goal.step.peak, limit) * 1.06

    def down(count: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / most, 1)

    starts, at = {}, float(LEFT)
    for phase in PHASES:
        starts[phase] = at
        at += SHARES[phase] * (WIDTH - LEFT - RIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="memory of a training step, as it is and with a memory goal"><style>{STYLE}</style>',
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text x="{LEFT}" y="22">Memory of one training step, weights and optimizer included</text>',
        f'<text x="{LEFT}" y="41" class="faint">as it is: {megabytes(plain.step.peak)} at the peak</text>',
        f'<text x="{LEFT + 215}" y="41" class="blue">with a goal: {megabytes(goal.step.peak)}</text>',
    ]
    for line in ticks(most / MIB):
        y = down(line * MIB)
        parts += [
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>',
            f'<text class="faint" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{line:g}</text>',
        ]
    parts.append(f'<text class="faint" x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end">MiB</text>')
    for name, run in (("plain", plain), ("goal", goal)):
        parts.append(f'<path class="{name}" d="{outline(run.step, starts, down)}"/>')
    for phase in PHASES:
        middle = starts[phase] + SHARES[phase] * (WIDTH - LEFT - RIGHT) / 2
        end = starts[phase] + SHARES[phase] * (WIDTH - LEFT - RIGHT)
        parts += [
            f'<text class="faint" x="{middle:.0f}" y="{HEIGHT - 18}" text-anchor="middle">{escape(phase)}</text>',
            f'<line class="axis" x1="{end:.1f}" x2="{end:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        ]
    y = down(limit)
    parts += [
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>',
        f'<text class="said" x="{LEFT + 6}" y="{y - 6}">the goal: {megabytes(limit)}</text>',
    ]
    return "\n".join([*parts, "</svg>", ""])


def outline(step: Step, starts: dict[str, float], down: Callable[[float], float]) -> str:
    """The area under a step: memory stays what it is until it changes."""
    path = [f"M{LEFT} {down(0)}"]
    x = float(LEFT)
    for phase in PHASES:
        for part, count in step.phases[phase]:
            x = starts[phase] + part * SHARES[phase] * (WIDTH - LEFT - RIGHT)
            path += [f"H{x:.1f}", f"V{down(count)}"]
    return " ".join([*path, f"H{x:.1f}", f"V{down(0)}", "Z"])


def ticks(most: float) -> list[float]:
    """Round numbers from 0 up to `most`, four to ten of them."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(power * part for part in (1, 0.5, 0.25, 0.2) if most / (power * part) >= 4)
    return [step * index for index in range(int(most / step) + 1)]


# ---------------------------------------------------------------- what is said


def megabytes(count: float) -> str:
    return f"{count / MIB:.1f} MiB"


def report(plain: Run, goal: Run, limit: float) -> int:
    """Prints what was measured; returns the exit status: 0 if the goal is met, and the model learns as it does."""
    print(f"\n{'':<10} {'peak':>10} {'goal':>10}  {'':<12} {'step':>8} {'first loss':>10} {'last loss':>10}")
    for name, run in (("as it is", plain), ("with goal", goal)):
        fits = "fits" if run.step.peak <= limit else "does not fit"
        numbers = f"{run.seconds * 1e3:>5.0f} ms {run.losses[0]:>10.4f} {run.losses[-1]:>10.4f}"
        print(f"{name:<10} {megabytes(run.step.peak):>10} {megabytes(limit):>10}  {fits:<12} {numbers}")
    print("\n" + "\n".join(line for entry in goal.plans for line in entry.lines()))
    apart = abs(goal.losses[-1] - plain.losses[-1]) / plain.losses[-1]
    print(f"last losses apart: {apart:.2%}")
    checks = [
        (not goal.step.peak <= limit, "the step does not fit the limit"),
        (not plain.step.peak > limit, "it fits as it is, too: choose a lower --limit"),
        (not goal.losses[-1] < goal.losses[0], "it did not learn within the limit"),
        (not apart <= ALLOWED, f"the last losses are more than {ALLOWED:.0%} apart"),
    ]
    return exit_status(checks)


def main() -> int:
    parser = argparse.ArgumentParser(description="Finetune a small language model within a memory limit.")
    parser.add_argument("--limit", help=f'such as "48 MiB" (default: {LIMIT:.0%} of what a step needs as it is)')
    parser.add_argument("--picture", type=Path, default=Path("finetune.svg"), help="where to draw (finetune.svg)")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run (default 12)")
    parser.add_argument("--before", type=int, default=30, help="training steps before (default 30)")
    parser.add_argument("--batch", type=int, default=16, help="windows of 256 bytes in a step (default 16)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three narrow layers, few steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.width, arguments.batch = 3, 64, 8
        arguments.steps, arguments.before = 6, 4

    # torch up to 2.13 warns of its own use of TorchScript at the first compile
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    logging.basicConfig(format="%(message)s")
    began = time.perf_counter()
    text = standard_library_text()
    half = len(text) // 2
    lm = pretrained(text[:half], arguments)
    plain = finetune(lm, {}, text[half:], arguments, "as it is")
    goal = arguments.limit or int(LIMIT * plain.step.peak)
    within = finetune(lm, {"memory_goal": goal}, text[half:], arguments, "with goal")
    limit = within.plans[0].goal or 0
    status = report(plain, within, limit)
    arguments.picture.write_text(picture(plain, within, limit))
    print(f"{arguments.picture}: the memory of both steps")
    print(f"{time.perf_counter() - began:.0f} s in all, on {arguments.device}")
    return status


if __name__ == "__main__":
    sys.exit(main())
