"""A program that compiles a small model, calls it and tells what that took; run in several processes by tests.

    python -m tests.support.warm_start '{"sizes": [5, 8, 48], "train": false, "save": null}'

It prints one line of JSON: for each call its seconds, and what torch and multigraph counted at the end.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import torch

import multigraph_backend
from multigraph_backend.region import warm_start


class Model(torch.nn.Module):
    """Sizes of its own that no batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).softmax(-1)


def run(sizes: list[int], train: bool = False, load: str | None = None, save: str | None = None) -> dict[str, Any]:
    """Call the model with batches of these sizes; after the first call wait for what is loaded ahead."""
    from torch._dynamo.utils import counters

    loaded = None if load is None else str(multigraph_backend.load_cache(load))
    torch.manual_seed(0)
    model = Model()
    compiled: Any = torch.compile(
        model,
        backend="multigraph",
        dynamic=True,
        options={"specialize": [{"x[0]": 8}, {"x[0]": {"multiple_of": 16}}]},
    )
    calls, settled = [], 0.0
    with contextlib.nullcontext() if train else torch.no_grad():
        for size in sizes:
            x = torch.randn(size, 24, requires_grad=train)
            began = time.perf_counter()
            y = compiled(x)
            if train:
                y.square().sum().backward()
            calls.append(time.perf_counter() - began)
            torch.testing.assert_close(y, model(x))
            if train:
                (expected,) = torch.autograd.grad(model(x).square().sum(), x)
                torch.testing.assert_close(x.grad, expected)
            if len(calls) == 1:
                began = time.perf_counter()
                assert warm_start.wait_until_warm()
                settled = time.perf_counter() - began
    saved = None if save is None else str(multigraph_backend.save_cache(save))
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    return {
        "calls": calls,
        "settled": settled,
        "loaded": loaded,
        "saved": saved,
        "stats": multigraph_backend.stats(),
        "aot_autograd": dict(counters["aot_autograd"]),
        "inductor": dict(counters["inductor"]),
        "states": {entry["condition"]: entry["state"] for entry in (*region["variants"], region["generic"])},
    }


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
