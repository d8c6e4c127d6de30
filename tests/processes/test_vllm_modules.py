"""vLLM's own modules for its mode 2 compile, save and load a model through multigraph.

MULTIGRAPH_VLLM names folders where wheels of vLLM were unpacked, which need not be installed (a wheel is for CUDA, its
Python modules are not):

    pip download --no-deps --only-binary=:all: vllm==0.33.0 && unzip vllm-*.whl 'vllm/*' -d vllm-0.33.0
    MULTIGRAPH_VLLM=$PWD/vllm-0.33.0 python -m pytest tests/processes/test_vllm_modules.py

Where it is not set these tests are not collected; where it is, a folder without vLLM fails.  What vLLM does is also
imitated in `tests/compiled/variants/test_ahead_of_time.py`, which needs none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import vllm_from_wheel

WHEELS = [Path(folder) for folder in os.environ.get("MULTIGRAPH_VLLM", "").split(os.pathsep) if folder]
SIZES = {"specialize": [{"input_ids[0]": [4, 1]}], "compiler": "aot_eager"}


def run(wheel: Path, shapes: str, root: Path, *rows: int, **environment: str) -> dict[str, Any]:
    command = [sys.executable, vllm_from_wheel.__file__, str(wheel), shapes, *map(str, rows)]
    chosen = {"VLLM_CACHE_ROOT": str(root), "MULTIGRAPH_OPTIONS": json.dumps({"Decoder": SIZES}), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | chosen)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "unable to save" not in done.stderr
    assert "load failure" not in done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["difference"] < 1e-6
    return said


@pytest.mark.parametrize("wheel", WHEELS, ids=str)
@pytest.mark.parametrize("shapes", ["backed", "unbacked", "backed_size_oblivious"])
def test_mode_2_saves_the_model_and_the_next_process_loads_it(wheel: Path, shapes: str, tmp_path: Path) -> None:
    first = run(wheel, shapes, tmp_path, 6, 4, 1, 7, VLLM_USE_AOT_COMPILE="1")
    assert first["counts"] == {"num_models_seen": 1, "num_aot_compiles": 1, "num_aot_artifacts_saved": 1}
    second = run(wheel, shapes, tmp_path, 6, 4, 1, 7, VLLM_USE_AOT_COMPILE="1")
    assert second["counts"] == {"num_models_seen": 1, "num_aot_artifacts_loaded": 1}
    # one token: Dynamo traces sizes of at least 2 where they are backed, and vLLM drops the guard that says so
    one = 0 if shapes == "backed" else 1
    calls = [{"input_ids[0] == 4": 1, "input_ids[0] == 1": one, "generic": 3 - one}]
    assert first["calls"] == second["calls"] == calls


@pytest.mark.parametrize("wheel", WHEELS, ids=str)
@pytest.mark.parametrize("hook", ["0", "1"])
def test_mode_2_without_what_is_saved(wheel: Path, hook: str, tmp_path: Path) -> None:
    """`VLLM_USE_AOT_COMPILE=0`, with and without vLLM's way of calling Dynamo's bytecode itself."""
    choices = {"VLLM_USE_AOT_COMPILE": "0", "VLLM_USE_BYTECODE_HOOK": hook}
    said = run(wheel, "unbacked", tmp_path, 6, 4, 1, 7, **choices)
    assert said["calls"] == [{"input_ids[0] == 4": 1, "input_ids[0] == 1": 1, "generic": 2}]
