"""A small language model that trains within a memory limit with packed saved tensors, and does not fit without.

Trains the decoder of tiny_lm.py twice from the same start on the same batches, with the same compiler:

    plain     torch.compile(lm, backend="multigraph"): what the backward needs is saved as it is
    packed    the same with options={"saved_tensors": RULES}: saved as int8, with a scale for each 64 numbers

and prints what each needed at its peak, beside the limit, and its first and last loss. Peaks are measured, of all that
a run holds: parameters, their gradients, the optimizer's state, activations.

On CUDA the limit is one: `torch.cuda.set_per_process_memory_fraction` is in force while the packed run trains, and then
once more the plain one, which runs out of memory. On the CPU torch has no limit to set, so the bytes that torch's
allocator hands out and takes back are counted, each of them, as torch's profiler reports them.

    python examples/train_packed.py
    python examples/train_packed.py --device cuda --width 512 --layers 8 --batch 64
"""

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outcome import exit_status
from progress import Progress
from tiny_lm import TinyLM, standard_library_text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import multigraph_backend
from multigraph_backend import Match, Rule, Scaled

RULES = [Rule(Match(dtype="float32"), Scaled("int8", per=64))]
MIB = 2**20
LIMIT = 0.8  # of the plain run's peak, where no limit is given
ALLOWED = 0.1  # how far the last losses may be apart, relatively


@dataclass
class Peak:
    bytes: int = 0


@dataclass
class Run:
    """What one training run needed and reached."""

    peak: int
    losses: list[float]
    saved: list[str]  # in short, what was packed: multigraph's own account


@contextlib.contextmanager
def measured(device: torch.device, peak: Peak) -> Iterator[None]:
    """The most memory that tensors took inside the body at one time, into `peak`."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        yield
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_reserved(device)  # what a limit counts
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    peak.bytes = highest(event for event in events if event["name"] == "[memory]")


def highest(events: Iterable[dict[str, Any]]) -> int:
    """The highest number of bytes that are live at once, of the profiler's allocations (positive) and frees.

    A free of what was allocated before is none of the run's.
    """
    live: dict[int, int] = {}
    total = most = 0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        address, count = event["args"]["Addr"], event["args"]["Bytes"]
        if count > 0:
            live[address] = count
            total += count
            most = max(most, total)
        else:
            total -= live.pop(address, 0)
    return most


def batches(text: Tensor, length: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    """Windows of the text, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        yield text[starts + torch.arange(length + 1)].long().to(device)


def train(options: dict[str, Any], text: Tensor, arguments: argparse.Namespace, progress: Progress) -> Run:
    """Trains a new model; all that it allocates is measured, and gone when this returns."""
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.compiler.reset()
    peak, losses = Peak(), list[float]()
    with measured(device, peak):
        lm = TinyLM(width=arguments.width, layers=arguments.layers).to(device).train()
        # recordings would keep their memory from one run to the next
        compiled = torch.compile(lm, backend="multigraph", options={"cudagraphs": False, **options})
        optimizer = torch.optim.AdamW(lm.parameters(), lr=2e-3, betas=(0.9, 0.98))
        windows = batches(text, lm.max_length, arguments.batch, device)
        for step in range(arguments.steps):
            progress.at(step, "the first step compiles" if step == 0 else f"loss {losses[-1]:.3f}")
            window = next(windows)
            logits = compiled(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            del logits
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        progress.at(arguments.steps, f"loss {losses[-1]:.3f}")
        saved = packed_tensors()
    return Run(peak.bytes, losses, saved)


def packed_tensors() -> list[str]:
    found = [saved for region in multigraph_backend.explain().regions for saved in region.generic.saved]
    return [
        f"packed tensors: {saved.packed} of {len(saved.tensors)}, "
        f"{megabytes(saved.bytes)} are saved as {megabytes(saved.bytes_saved)}"
        for saved in found
    ]


def megabytes(count: float) -> str:
    return f"{count / MIB:.1f} MiB"


def limited(device: torch.device, limit: float) -> None:
    """From now on, a lack of memory beyond `limit` bytes (CUDA)."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(limit / torch.cuda.mem_get_info(device)[1], 1.0), device)


def runs_out(text: Tensor, arguments: argparse.Namespace) -> bool:
    """Whether the plain run lacks memory under the limit that is in force."""
    try:
        with Progress("plain, within the limit", arguments.steps, "steps") as progress:
            train({}, text, arguments, progress)
    except torch.cuda.OutOfMemoryError as error:
        print(f"plain within the limit: {str(error).splitlines()[0]}")
        return True
    return False


def report(plain: Run, packed: Run, limit: float, out_of_memory: bool | None) -> int:
    """Prints what was measured; returns the exit status: 0 if packing is what makes the model fit, and it learns."""
    print(f"\n{'':<8} {'peak':>10} {'limit':>10}  {'':<12} {'first loss':>10} {'last loss':>10}")
    for name, run in (("plain", plain), ("packed", packed)):
        fits = "fits" if run.peak <= limit else "does not fit"
        numbers = f"{run.losses[0]:>10.4f} {run.losses[-1]:>10.4f}"
        print(f"{name:<8} {megabytes(run.peak):>10} {megabytes(limit):>10}  {fits:<12} {numbers}")
    print("\n".join(packed.saved))
    apart = abs(packed.losses[-1] - plain.losses[-1]) / plain.losses[-1]
    print(f"last losses apart: {apart:.2%}")
    checks = [
        (not packed.peak <= limit, "the packed run does not fit the limit"),
        (not plain.peak > limit, "the plain run fits too: choose a lower --limit"),
        (out_of_memory is False, "the plain run did not run out of memory within the limit"),
        (not packed.losses[-1] < packed.losses[0], "the packed run did not learn"),
        (not apart <= ALLOWED, f"the last losses are more than {ALLOWED:.0%} apart"),
    ]
    return exit_status(checks)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small language model with packed saved tensors.")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run (default 40)")
    parser.add_argument("--batch", type=int, default=16, help="windows of 256 bytes in a step (default 16)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, help=f"MiB (default: {LIMIT:.0%} of what the plain run needs)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one layer, 8 steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.steps = 1, 8

    # torch up to 2.13 warns of its own use of TorchScript at the first compile
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    device, began = torch.device(arguments.device), time.perf_counter()
    text = standard_library_text()

    with Progress("plain", arguments.steps, "steps") as progress:
        plain = train({}, text, arguments, progress)
    limit = arguments.limit * MIB if arguments.limit else LIMIT * plain.peak
    if device.type == "cuda":
        limited(device, limit)
    with Progress("packed", arguments.steps, "steps") as progress:
        packed = train({"saved_tensors": RULES}, text, arguments, progress)
    out_of_memory = runs_out(text, arguments) if device.type == "cuda" else None

    status = report(plain, packed, limit, out_of_memory)
    print(f"{time.perf_counter() - began:.0f} s in all, on {device}")
    return status


if __name__ == "__main__":
    sys.exit(main())
