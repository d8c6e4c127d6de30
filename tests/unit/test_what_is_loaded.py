"""What is loaded when: Inductor by a compile that uses it, and by nothing else."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, sys, torch
bare = set(sys.modules)
{0}
def of(package):
    return sorted(name for name in sys.modules if name == package or name.startswith(package + "."))
new = len(set(sys.modules) - bare)
loaded = dict(inductor=of("torch._inductor"), dynamo=of("torch._dynamo"), new=new, said=globals().get("said"))
print(json.dumps(loaded))
"""
COMPILE = """
linear = torch.nn.Linear(4, 4)
def f(x):
    return linear(x).relu() * 2
compiled = torch.compile(f, dynamic=True, **{0})
for rows in (3, 8, 8):
    compiled(torch.randn(rows, 4)).sum().backward()
"""


@functools.cache
def loaded_by(program: str) -> dict[str, Any]:
    """What is loaded in a fresh interpreter that has run `program`."""
    command = [sys.executable, "-c", PROGRAM.format(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return loaded


EVERY_NAME = "import multigraph_backend\nfor name in multigraph_backend.__all__: getattr(multigraph_backend, name)"


@pytest.mark.parametrize(
    "program", ["import multigraph_backend.backend", EVERY_NAME, "import multigraph_backend.doctor"]
)
def test_importing_the_package_loads_nothing_of_torchs_compilers(program: str) -> None:
    bare, loaded = loaded_by(""), loaded_by(program)
    assert (loaded["inductor"], loaded["dynamo"]) == (bare["inductor"], bare["dynamo"])
    assert loaded["new"] > bare["new"]


def test_a_compile_by_another_compiler_loads_no_more_of_inductor_than_dynamo_does() -> None:
    stock = loaded_by(COMPILE.format({"backend": "eager"}))
    options = {"compiler": "eager", "specialize": [{"x[0]": 8}]}
    said = "\nimport multigraph_backend\nsaid = multigraph_backend.stats()"
    ours = loaded_by(COMPILE.format({"backend": "multigraph", "options": options}) + said)
    assert (ours["said"]["variant_calls"], ours["said"]["generic_calls"], ours["said"]["failures"]) == (2, 1, 0)
    assert "torch._inductor.compile_fx" not in ours["inductor"]
    assert set(ours["inductor"]) <= set(stock["inductor"])
