"""The built wheel in a clean environment: what a user gets from `pip install`, whatever the checkout holds.

The environment sees the torch of the running interpreter, but multigraph only from the wheel: its own
site-packages come first, PYTHONPATH is gone, and everything runs outside of the checkout.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import multigraph_backend

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # from a copy, so that neither an old build/ gets into the wheel nor a new one into the checkout
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("multigraph_backend", "tests", "examples", "scripts"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=ignored)
    built = tmp_path_factory.mktemp("wheel")
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    _run([*pip_wheel, "--wheel-dir", str(built), str(source)], source)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    (site_packages,) = home.glob("lib/python*/site-packages")
    torch_is_in = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (site_packages / "torch_of_the_running_interpreter.pth").write_text("\n".join(torch_is_in) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    _run([*pip, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)], home)
    return python


def _run(command: list[str], cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MULTIGRAPH_OPTIONS")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _facts(python: Path, cwd: Path, code: str) -> dict[str, Any]:
    """Runs `code`, which fills the dictionary `facts`, in a new process of the clean environment."""
    script = f"import json\nfacts = {{}}\n{code}\nprint(json.dumps(facts))"
    found: dict[str, Any] = json.loads(_run([str(python), "-c", script], cwd).splitlines()[-1])
    return found


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        headers = archive.read(metadata).decode().split("\n\n")[0].splitlines()
    assert "multigraph_backend/py.typed" in names
    assert "multigraph_backend/backend.py" in names
    assert "multigraph_backend/native/calls.cc" in names
    assert {f"multigraph_backend/page/{name}" for name in ("template.html", "style.css", "script.js")} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"multigraph_backend", f"multigraph-{multigraph_backend.__version__}.dist-info"}
    assert f"Version: {multigraph_backend.__version__}" in headers
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"Name: multigraph", "License-Expression: Apache-2.0", "Requires-Python: >=3.11"} <= set(headers)


def test_package_and_entry_point_come_from_the_wheel(python: Path, tmp_path: Path) -> None:
    facts = _facts(
        python,
        tmp_path,
        """
import importlib.metadata, multigraph_backend, torch
facts["package"] = multigraph_backend.__file__
facts["distribution"] = str(importlib.metadata.distribution("multigraph").locate_file(""))
facts["listed"] = "multigraph" in torch._dynamo.list_backends()
facts["found"] = torch._dynamo.lookup_backend("multigraph") is not None
""",
    )
    environment = str(python.parent.parent)
    assert facts["package"].startswith(environment)
    assert facts["distribution"].startswith(environment)
    assert facts["listed"]
    assert facts["found"]


def test_import_is_light(python: Path, tmp_path: Path) -> None:
    # the import must cost a program nothing that never compiles: no compiler stack, no measurable time
    facts = _facts(
        python,
        tmp_path,
        """
import sys, time, torch
facts["torch_brings"] = [n for n in ("torch._inductor", "torch._dynamo") if n in sys.modules]
began = time.perf_counter()
import multigraph_backend
facts["seconds"] = time.perf_counter() - began
facts["loaded"] = [n for n in ("torch._inductor", "torch._dynamo") if n in sys.modules]
""",
    )
    assert facts["torch_brings"] == []
    assert facts["loaded"] == []
    assert facts["seconds"] < 0.5


def test_compiles_by_name(python: Path, tmp_path: Path) -> None:
    facts = _facts(
        python,
        tmp_path,
        """
import torch

def f(x):
    return (x * 2).sin().sum(1)

compiled = torch.compile(f, backend="multigraph", dynamic=True, options={"specialize": [{"x[0]": 8}]})
facts["close"] = []
for rows in (8, 5, 8):
    x = torch.randn(rows, 6)
    facts["close"].append(torch.allclose(compiled(x), f(x), atol=1e-6))
import multigraph_backend
facts["stats"] = multigraph_backend.stats()
""",
    )
    assert facts["close"] == [True] * 3
    assert facts["stats"]["variant_calls"] == 2
    assert facts["stats"]["generic_calls"] == 1
    assert facts["stats"]["failures"] == 0
