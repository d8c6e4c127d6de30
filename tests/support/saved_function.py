"""A program in two processes: one compiles a model ahead of time and saves it, the other loads and calls it.

    python saved_function.py save FILE | load FILE | STANCE FILE

A stance of torch's: it is loaded, and called under that. Prints one line of JSON: what was compiled and called, and
what torch's caches had.
"""

from __future__ import annotations

import json
import sys

import torch
from torch._dynamo.utils import counters

import multigraph_backend
from multigraph_backend.region import registry


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, times: int, by: float) -> torch.Tensor:
        return self.b(torch.relu(self.a(x) * by)) * times


def main(what: str, path: str) -> None:
    torch.manual_seed(0)
    model = Model()
    torch._dynamo.config.enable_aot_compile = True  # off by default in torch 2.11
    differences = []

    def check(called: object, rows: int, by: float) -> None:
        assert callable(called)
        x = torch.randn(rows, 16)
        differences.append(float((called(model, x, 3, by) - model(x, 3, by)).abs().max()))

    with torch.no_grad():
        if what == "save":
            x = torch.randn(6, 16)
            torch._dynamo.mark_dynamic(x, 0)
            options = {"specialize": [{"x[0]": [4, 8]}]}
            made = torch.compile(model.forward, fullgraph=True, backend="multigraph", dynamic=True, options=options)
            compiled = made.aot_compile(((x, 3, 2.5), {}))
            check(compiled, 4, 2.5)
            compiled.save_compiled_function(path)
        else:
            with open(path, "rb") as file:
                compiled = torch.compiler.load_compiled_function(file, f_globals=globals())
            with torch.compiler.set_stance("default" if what == "load" else what):
                check(compiled, 7, -1.5)  # for generic
                multigraph_backend.wait_until_warm()
                for rows, by in ((4, 7.25), (6, 2.5)):
                    check(compiled, rows, by)
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    (graph,) = (living.captured for living in registry.living())
    every = (*region["variants"], region["generic"])
    states = {entry["condition"]: entry["state"] for entry in region["variants"]}
    print(
        json.dumps(
            {
                "furthest": max(differences),
                "states": states | {"generic": region["generic"]["state"]},
                "stats": {name: value for name, value in multigraph_backend.stats().items() if value},
                "failures": multigraph_backend.stats()["failures"],
                "eager_calls": multigraph_backend.stats()["eager_calls"],
                "caches": dict(counters["aot_autograd"]),
                "past_inductor": [entry["past_inductor"] for entry in every if entry["state"] == "ready"],
                "graph": graph is not None and "module" in vars(graph),
                "compiler": "multigraph_backend.lower.inductor" in sys.modules,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
