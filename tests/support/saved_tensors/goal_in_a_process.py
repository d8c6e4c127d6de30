"""A program that trains one step within a memory goal; run in several processes by tests.

    python goal_in_a_process.py GOAL

Prints one line of JSON: the plan, whether the speeds of the machine were measured, and what torch's caches had.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from torch._dynamo.utils import counters

import multigraph_backend
from multigraph_backend.saved_tensors import speeds


def main(goal: str) -> None:
    measured = []
    measure = speeds._measured
    speeds._measured = lambda device: [measured.append(device), measure(device)][1]  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(64, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    run = torch.compile(model, backend="multigraph", options={"memory_goal": goal})
    run(torch.randn(4096, 64)).square().mean().backward()
    optimizer.step()
    ((saved,),) = [region.generic.saved for region in multigraph_backend.explain().regions]
    assert saved.memory is not None
    caches = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}
    print(json.dumps({"plan": dataclasses.asdict(saved.memory), "measured": len(measured), "caches": caches}))


if __name__ == "__main__":
    main(sys.argv[1])
