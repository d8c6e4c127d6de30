"""A model that trains, compiled ahead of time with rules for what it saves, in two processes.

    python saved_training.py save FILE | load FILE

Prints one line of JSON: how far gradients are from eager's, how many tensors were packed, what was loaded to run it.
"""

from __future__ import annotations

import json
import sys

import torch

import multigraph_backend
from multigraph_backend import Match, Rule, Scaled


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu().tanh()).softmax(-1)


def main(what: str, path: str) -> None:
    torch.manual_seed(0)
    model = Model()
    torch._dynamo.config.enable_aot_compile = True  # off by default in torch 2.11

    def gradients(called: object, x: torch.Tensor) -> list[torch.Tensor]:
        assert callable(called)
        model.zero_grad()
        called(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    if what == "save":
        x = torch.randn(96, 64)
        torch._dynamo.mark_dynamic(x, 0)
        options = {"specialize": [{"x[0]": 128}], "saved_tensors": [Rule(Match(dtype="float32"), Scaled("int8"))]}
        made = torch.compile(model.forward, fullgraph=True, backend="multigraph", dynamic=True, options=options)
        compiled = made.aot_compile(((x,), {}))
        compiled(model, torch.randn(128, 64)).sum().backward()
        compiled.save_compiled_function(path)
    else:
        with open(path, "rb") as file:
            compiled = torch.compiler.load_compiled_function(file, f_globals=globals())
    furthest = 0.0
    for rows in (128, 96, 128):
        x = torch.randn(rows, 64)
        pairs = zip(gradients(lambda x: compiled(model, x), x), gradients(model, x), strict=True)
        furthest = max(furthest, *(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs))
    stats = multigraph_backend.stats()
    said = {name: stats[name] for name in ("packed_tensors", "failures", "eager_calls")}
    print(json.dumps({**said, "furthest": furthest, "compiler": "multigraph_backend.lower.inductor" in sys.modules}))


if __name__ == "__main__":
    main(*sys.argv[1:])
