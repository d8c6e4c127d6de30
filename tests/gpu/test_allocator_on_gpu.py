"""The allocator extension on a GPU: as the process's allocator, under compilers, and behind pools of torch's allocator.

The checks are in `allocator_checks_*.py`; each group has a process, for an allocator cannot be changed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu.allocator_process import all_checks

ROOT = Path(__file__).resolve().parents[2]

if importlib.util.find_spec("multigraph_allocator") is None:  # else each group would find that by itself
    raise RuntimeError(
        "the allocator extension is not there: `scripts/build_allocator .here`, or `scripts/gpu --allocator`"
    )


@functools.cache
def group(name: str) -> dict[str, Any]:
    """What the group's process found."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
    environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    environ["MULTIGRAPH_ALLOCATOR"] = "1" if name == "installed" else "0"  # the other way in is install()
    command = [sys.executable, "-c", f"from tests.support.gpu.allocator_process import main; main({name!r})"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, env=environ, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ran"')]
    assert lines, f"ended with status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(lines[-1])
    assert "start" not in found["failed"], found["failed"]["start"]
    return found


@pytest.mark.parametrize(
    ("name", "check"), [(name, check) for name, checks in all_checks().items() for check in checks]
)
def test_allocator(name: str, check: str) -> None:
    found = group(name)
    assert check in found["ran"]
    assert check not in found["failed"], found["failed"][check]


def test_the_tests_of_recordings_over_the_extension() -> None:
    environ = os.environ | {"MULTIGRAPH_ALLOCATOR": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_recordings_on_gpu.py"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=900, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_memory_was_given_back_inside_captures() -> None:
    counts = group("installed")["counts"]
    assert counts["multigraph.proven"] > 500
    assert counts["multigraph.freed_in_captures"] >= counts["multigraph.proven"]
    assert counts["multigraph.verify_failures"] == 0
