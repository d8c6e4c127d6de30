"""The allocator's wheel: what is in it, and what it does to a program that imports torch.

It is built from a copy of `allocator_ext`, installed into a folder of its own, and seen by a new process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.allocator.extension import declared_exports

pytestmark = pytest.mark.slow  # the wheel is compiled for it
CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "allocator_ext"
    shutil.copytree(CHECKOUT / "allocator_ext", source, ignore=shutil.ignore_patterns("__pycache__", "*.so", "build"))
    built = tmp_path_factory.mktemp("wheel")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(built), str(source)],
        capture_output=True, text=True, timeout=600, env=os.environ | {"PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was unpacked, as an installation is."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(folders: list[Path], code: str, **variables: str) -> tuple[dict[str, Any], str]:
    """What `code` put into the dictionary `facts`, and what was said."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MULTIGRAPH_")}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), **variables}
    script = f"import json, sys\nfacts = {{}}\n{code}\nprint(json.dumps(facts))"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, cwd=folders[0])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_wheel_is_for_any_python_3_on_linux(wheel: Path) -> None:
    assert wheel.name == "multigraph_allocator-0.1.0-py3-none-linux_x86_64.whl"


def test_it_holds_the_library_its_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        licence = archive.read("multigraph_allocator-0.1.0.dist-info/licenses/LICENSE").decode()
        headers = archive.read("multigraph_allocator-0.1.0.dist-info/METADATA").decode().split("\n\n")[0].splitlines()
        entries = archive.read("multigraph_allocator-0.1.0.dist-info/entry_points.txt").decode()
    package = {"multigraph_allocator/__init__.py", "multigraph_allocator/libmultigraph_allocator.so"}
    assert {name for name in names if ".dist-info/" not in name} == package
    assert licence == (CHECKOUT / "LICENSE").read_text()
    assert {"Name: multigraph-allocator", "License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(headers)
    assert {"Description-Content-Type: text/markdown", "Classifier: Environment :: GPU :: NVIDIA CUDA"} <= set(headers)
    # what installs it in a process is the backend's, and pip knows
    assert [line for line in headers if line.startswith("Requires-Dist:")] == ["Requires-Dist: multigraph>=0.1.0"]
    assert entries.split() == ["[torch.backends]", "multigraph_allocator", "=", "multigraph_allocator:autoload"]


def test_its_library_exports_what_is_declared_and_nothing_else(installed: Path) -> None:
    library = installed / "multigraph_allocator" / "libmultigraph_allocator.so"
    command = ["nm", "-D", "--defined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in listed.splitlines()} == declared_exports()


LOADED = """
import torch
facts["tiny"] = "multigraph_allocator" in sys.modules
facts["backend"] = sorted(name for name in sys.modules if name.startswith("multigraph_backend"))
"""


@pytest.mark.parametrize("variables", [{}, {"MULTIGRAPH_ALLOCATOR": "0"}], ids=["unset", "0"])
def test_without_the_variable_importing_torch_imports_one_tiny_module(
    installed: Path, variables: dict[str, str]
) -> None:
    facts, said = run([installed, CHECKOUT], LOADED, **variables)
    assert facts == {"tiny": True, "backend": []}
    assert said == ""


def test_with_the_variable_it_is_installed_or_says_why_not(installed: Path) -> None:
    code = "import torch\nfrom multigraph_backend import allocator\nstatus = allocator.status()\n"
    code += "facts.update(path=str(status.library), reason=status.reason, abi=status.abi, installed=bool(status))"
    facts, said = run([installed, CHECKOUT], code, MULTIGRAPH_ALLOCATOR="1")
    assert facts["path"] == str(installed / "multigraph_allocator" / "libmultigraph_allocator.so")
    assert facts["abi"] == 1
    if facts["installed"]:  # on a machine with a GPU
        assert said == ""
    else:
        assert said == f"the allocator extension is not in use, torch's own is: {facts['reason']}\n"
        assert facts["reason"].startswith(("torch ", "there is no CUDA driver", "there is no GPU"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", "MULTIGRAPH_ALLOCATOR=1 has no effect: ModuleNotFoundError"), ("yes", "is 1 or 0, not 'yes'")],
)
def test_torch_is_imported_whatever_the_variable_asks_for(installed: Path, value: str, expected: str) -> None:
    # the name of the backend's package leads nowhere, as where it is not installed
    code = "sys.modules['multigraph_backend'] = None\nimport torch\nfacts['sum'] = torch.ones(2).sum().item()"
    facts, said = run([installed], code, MULTIGRAPH_ALLOCATOR=value)
    assert facts == {"sum": 2.0}
    assert expected in said
    assert ("it needs the package multigraph" in said) == (value == "1")
