"""Large inputs that lie elsewhere at each call: what a recorded call costs, patched, copied, and in other hands.

patched    multigraph: kernels of the recording are told at each launch where the inputs lie
copied     multigraph without that, as with MULTIGRAPH_DISABLE=patched_inputs: inputs are copied into the recording
stock      torch.compile(mode="reduce-overhead")
hand-made  Inductor's code under torch.cuda.graph, by hand: one multi-tensor copy into fixed buffers, one replay
inductor   torch.compile, nothing recorded

The program adds up the inputs, each with a factor of its own. Every call gets the next of several sets of inputs.
"host us" is what a call takes the host, "GPU us" what its work takes the GPU, "told" how many kernels are told. Each
form's numbers are compared with eager's on each set of inputs, before it is timed and afterwards.

    python benchmarks/moving_inputs.py --json moving_inputs.json
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from measure import (
    Call,
    Column,
    Results,
    arguments,
    gpu_us,
    host_us,
    input_sets,
    interleaved,
    own_code,
    paired_ratio,
    undisturbed,
    wait,
)

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.cudagraphs import runtime

FORMS = ("patched", "copied", "stock", "hand-made", "inductor")
COLUMNS = (
    Column("inputs", "inputs"),
    Column("mib", "MiB each", 2),
    Column("form", "form"),
    Column("host", "host us", 1),
    Column("gpu", "GPU us", 1),
    Column("host_over_copied", "host/copied", 2),
    Column("gpu_over_copied", "GPU/copied", 2),
    Column("told", "told"),
)
SIZES = ((8, 4.0), (1, 1.0), (1, 16.0), (4, 64.0), (32, 2.0))
QUICK = ((2, 1.0),)
LEAD_US = 300.0

Inputs = Sequence[tuple[torch.Tensor, ...]]


def program(*xs: torch.Tensor) -> torch.Tensor:
    total = xs[0]
    for number, x in enumerate(xs[1:], 2):
        total = total + x * number
    return total * 0.5


def _with(patching: bool, inputs: Inputs) -> tuple[Call, int]:
    """multigraph's form, recorded with inputs patched or not; and how many kernels are told."""
    form = torch.compile(own_code(program), backend=multigraph, options={"on_failure": "raise", "record_small": True})
    form(*inputs[0])
    devices = [tree.device for tree in runtime.trees()]
    before = [device.patching for device in devices]
    try:
        for device in devices:
            device.patching = device.patching if patching else None
        for number in range(1, 7):  # the same set twice would be taken for one that stays
            form(*inputs[number % len(inputs)])
    finally:
        for device, limits in zip(devices, before, strict=True):
            device.patching = limits
    nodes = [node for tree in runtime.trees() for node in tree.root.below() if node.recording is not None]
    patches = nodes[-1].recording.patches if nodes and nodes[-1].recording is not None else None
    return form, 0 if patches is None else len(patches.told)


def _by_hand(inputs: Inputs) -> Call:
    call = torch.compile(own_code(program))
    buffers = [tensor.clone() for tensor in inputs[0]]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*buffers)
    graph = torch.cuda.CUDAGraph()
    with undisturbed():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output: torch.Tensor = call(*buffers)

    def replay(*xs: torch.Tensor) -> torch.Tensor:
        torch._foreach_copy_(buffers, xs)
        graph.replay()
        return output

    return replay


def _check(name: str, form: Call, inputs: Inputs) -> None:
    for xs in inputs:
        given, wanted = form(*xs), program(*xs)
        wait()
        if not torch.allclose(given, wanted, rtol=1e-4, atol=1e-4):
            raise RuntimeError(f"{name}: it differs from eager")
        del given  # one that is held when the next call runs is moved, and its recording hands out copies from then on


@torch.no_grad()
def measure(device: str, count: int, mib: float, rounds: int) -> dict[str, Mapping[str, Any]]:
    """Of `count` inputs of `mib` MiB each, by form."""
    torch._dynamo.reset()
    multigraph_backend.release()
    gc.collect()
    rows = int(mib * (1 << 20) / 4 / 1024)
    inputs = input_sets(lambda: tuple(torch.randn(rows, 1024, device=device) for _ in range(count)), most=4)
    told: dict[str, int] = {}
    forms: dict[str, Call] = {}
    for name, patching in (("patched", True), ("copied", False)):
        forms[name], told[name] = _with(patching, inputs)
    others: dict[str, Callable[[], Call]] = {"inductor": lambda: torch.compile(own_code(program))}
    if device == "cuda":
        others["stock"] = lambda: torch.compile(own_code(program), mode="reduce-overhead")
        others["hand-made"] = lambda: _by_hand(inputs)
    for name, make in others.items():
        forms[name] = make()
    for name, form in forms.items():
        for _ in range(3):
            _check(name, form, inputs)
    host = interleaved({name: host_us(form, inputs) for name, form in forms.items()}, rounds)
    found: dict[str, dict[str, Any]] = {
        name: {
            "host": statistics.median(host[name]),
            "host_over_copied": paired_ratio(host[name], host["copied"]),
            "told": told.get(name, 0),
        }
        for name in forms
    }
    if device == "cuda":
        gpu = interleaved({name: gpu_us(form, inputs, LEAD_US) for name, form in forms.items()}, rounds)
        for name in forms:
            found[name] |= {
                "gpu": statistics.median(gpu[name]),
                "gpu_over_copied": paired_ratio(gpu[name], gpu["copied"]),
            }
    for name, form in forms.items():
        _check(name, form, inputs)
    return dict(found)


def main() -> int:
    args = arguments(__doc__).parse_args()
    results = Results("moving_inputs", "Large inputs at new addresses: microseconds of a recorded call", COLUMNS, args)
    for count, mib in QUICK if args.quick else SIZES:
        about: dict[str, Any] = {"inputs": count, "mib": mib}
        headline = (count, mib) == SIZES[0]
        try:
            found = measure(results.device, count, mib, 3 if args.quick else 40)
        except Exception as error:
            results.add(about, {}, f"{type(error).__name__}: {error}")
            continue
        for form in FORMS:
            if form in found:
                results.row({**about, "form": form}, functools.partial(found.__getitem__, form), headline)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
