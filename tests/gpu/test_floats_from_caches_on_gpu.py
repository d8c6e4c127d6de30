"""Recorded code that computes with Python floats comes out of torch's caches: in a second process nothing is compiled,
and it is right, recorded, for whatever value a float has there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, math, sys
import torch
from torch._dynamo.utils import counters
import multigraph_backend

def scaled(x, by):
    return x * by + by

def told(x, by, more):
    return (x * by).softmax(-1), by * 2 + more, x.sum() / more

def chosen(x, by):
    return x * 2 if by > 1 else x * by

def limited(x, at_most):
    return x.clamp(max=at_most).cumsum(0)

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(32, 32)

    def forward(self, x, by):
        return (self.inner(x) * by).square().mean() / by

def same(found, expected):
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True, check_device=False)

def inference(floats, all_of_them):
    with torch.no_grad():
        for f, count in ((scaled, 1), (chosen, 1), *(((told, 2), (limited, 1)) if all_of_them else ())):
            run = torch.compile(f, backend="multigraph", dynamic=True, options={"record_small": True})
            for value in floats:
                for _ in range(3):
                    x = torch.randn(48, 32, device="cuda")
                    numbers = [value + 0.25 * place for place in range(count)]
                    same(run(x, *numbers), f(x, *numbers))

def training(floats):
    torch.manual_seed(0)
    model = Scaled().cuda()
    run = torch.compile(model, backend="multigraph", dynamic=True, options={"record_small": True})
    for value in floats:
        for _ in range(3):
            x = torch.randn(48, 32, device="cuda")
            model.zero_grad(); run(x, value).backward()
            found = [p.grad.clone() for p in model.parameters()]
            model.zero_grad(); model(x, value).backward()
            for mine, p in zip(found, model.parameters()):
                torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-4, equal_nan=True)

floats = json.loads(sys.argv[1])
inference(floats, len(floats) > 1)
training(floats)
stats = multigraph_backend.stats()
caches = counters["aot_autograd"]
print(json.dumps({
    "missed": caches["autograd_cache_miss"], "bypassed": caches["autograd_cache_bypass"],
    "hits": caches["autograd_cache_hit"],
    **{name: stats[name] for name in ("recordings", "failures", "failed_recordings", "eager_calls")},
}))
"""


def test_a_second_process_compiles_nothing_and_records(tmp_path: Path) -> None:
    first = _in_process(tmp_path, [2.5, 3.75, 0.0, 1.0])
    second = _in_process(tmp_path, [5.5, -3.25, 0.5, -0.0, 1e-3])
    assert first["missed"] >= 5, str(first)
    assert first["bypassed"] == 0, str(first)
    assert second["hits"] >= 5, str(second)
    assert second["recordings"] >= 5, str(second)
    for done in (first, second):
        assert (done["failures"], done["failed_recordings"], done["eager_calls"]) == (0, 0, 0), str(done)


@pytest.mark.parametrize(("known", "other"), [(2.5, 4.5), (-1.5, -2.0)])
def test_the_same_program_with_another_value_asks_the_caches_alone(tmp_path: Path, known: float, other: float) -> None:
    _in_process(tmp_path, [known])
    second = _in_process(tmp_path, [other])
    assert (second["missed"], second["bypassed"]) == (0, 0), str(second)
    assert second["hits"] > 0, str(second)
    assert second["recordings"] > 0, str(second)


def _in_process(folder: Path, floats: list[float]) -> dict[str, int]:
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    environ["MULTIGRAPH_MANIFESTS"] = str(folder / "manifests")  # the names of code with floats are there
    words = [sys.executable, "-c", PROGRAM, json.dumps(floats)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found
