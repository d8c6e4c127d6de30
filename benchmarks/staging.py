"""Inputs of a recording into its buffers: one launch of our kernel against torch's multi-tensor copy.

"host" is microseconds that a call takes the host, "gpu" what the copy takes the GPU; "stock" is `torch._foreach_copy_`
of the same tensors. Both sides copy from a fresh set of sources at each call, and every buffer is compared with its
source afterwards. "kernel": whether ours was at work; elsewhere, and on the CPU, our side is torch's copy too.

    python benchmarks/staging.py --json staging.json
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import torch
from measure import Column, Results, arguments, gpu_us, host_us, input_sets, interleaved, paired_ratio

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices import staging

COLUMNS = (
    Column("inputs", "inputs"),
    Column("kib", "KiB each", 0),
    Column("kernel", "kernel"),
    Column("ours_host", "host", 2),
    Column("stock_host", "stock host", 2),
    Column("host_ratio", "host ratio", 2),
    Column("ours_gpu", "gpu", 2),
    Column("stock_gpu", "stock gpu", 2),
    Column("gpu_ratio", "gpu ratio", 2),
)
COUNTS = (1, 2, 4, 8, 16, 32, 64)
SIDES = (64, 256)  # of square float32 matrices
LEAD_US = 100.0  # of other work before a copy that is timed on the GPU


def measure(device: str, count: int, side: int, rounds: int) -> Mapping[str, Any]:
    """Of `count` inputs of `side` x `side` elements."""
    buffers = {name: [torch.empty(side, side, device=device) for _ in range(count)] for name in ("ours", "stock")}
    if device == "cuda":
        staging.prepare(0, count)
    ours = staging.stager(0, buffers["ours"], lambda: _compat.raw_stream(0), _compat.foreach_copy).copy

    def stock(*sources: torch.Tensor) -> None:
        _compat.foreach_copy(buffers["stock"], list(sources))

    inputs = input_sets(lambda: tuple(torch.randn(side, side, device=device) for _ in range(count)))
    forms = {"ours": ours, "stock": stock}
    for name, form in forms.items():
        for sources in inputs:
            form(*sources)
            if not all(map(torch.equal, buffers[name], sources)):
                raise RuntimeError(f"{name}: a buffer differs from its source")
    host = interleaved({name: host_us(form, inputs) for name, form in forms.items()}, rounds)
    found: dict[str, Any] = {
        "kernel": "no" if isinstance(ours, functools.partial) else "yes",
        "ours_host": statistics.median(host["ours"]),
        "stock_host": statistics.median(host["stock"]),
        "host_ratio": paired_ratio(host["ours"], host["stock"]),
    }
    if device == "cuda":
        gpu = interleaved({name: gpu_us(form, inputs, LEAD_US) for name, form in forms.items()}, rounds)
        found |= {
            "ours_gpu": statistics.median(gpu["ours"]),
            "stock_gpu": statistics.median(gpu["stock"]),
            "gpu_ratio": paired_ratio(gpu["ours"], gpu["stock"]),
        }
    return found


def main() -> int:
    args = arguments(__doc__).parse_args()
    results = Results("staging", "Staging: microseconds to copy the inputs of a recording", COLUMNS, args)
    rounds = 3 if args.quick else 40
    for side in SIDES[:1] if args.quick else SIDES:
        for count in COUNTS[1:3] if args.quick else COUNTS:
            about = {"inputs": count, "kib": side * side * 4 / 1024}
            headline = side == SIDES[0] and count in (2, 8, 32)
            results.row(about, functools.partial(measure, results.device, count, side, rounds), headline)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
