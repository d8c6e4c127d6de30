"""torch's own ways to train: scripts that name Inductor themselves, run as they are with everything redirected, alone
and under DDP; and FSDP2 by its recipe, with checkpoints, compiled by blocks and as a whole.

The scripts lie in `tests/support/clients`; the losses that they print are those of eager.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.processes import free_port
from tests.support.on_device import COMPILER, ON_GPU

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = CHECKOUT / "tests" / "support" / "clients"
RANKS = 2
#: what a process leaves behind at its end
COUNTED = """
import atexit, json, os, pathlib, multigraph_backend
place = pathlib.Path(__file__).with_name(f"counted.{os.getpid()}")
atexit.register(lambda: place.write_text(json.dumps(multigraph_backend.stats())))
"""


def printed(
    *words: str, ranks: int = 1, folder: Path, compiled: bool = False, redirected: bool = False
) -> dict[str, Any]:
    """The last line of a script's output as JSON.  `compiled`: multigraph has compiled in each rank, and nothing ran
    eagerly; on a GPU it was recorded, where what is redirected trains: FSDP2's parameters move for some steps first."""
    (folder / "sitecustomize.py").write_text(COUNTED if compiled else "")
    paths = [str(folder), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MULTIGRAPH_OPTIONS": json.dumps({"*": COMPILER}),
    }
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    if redirected:
        command += ["-m", "multigraph_backend", "run"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environ, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    if compiled:
        counts = [json.loads(path.read_text()) for path in folder.glob("counted.*")]
        of_ranks = [count for count in counts if count["regions"]]
        assert len(of_ranks) == ranks, lines
        assert all(count["failures"] == count["eager_calls"] == 0 for count in of_ranks), of_ranks
        assert not (ON_GPU and redirected) or all(count["recordings"] for count in of_ranks), of_ranks
    return found


def close(got: dict[str, Any], wanted: dict[str, Any], rtol: float) -> None:
    assert got["device"] == wanted["device"] == ("cuda" if ON_GPU else "cpu")
    for name in wanted.keys() - {"device", "sample"}:
        torch.testing.assert_close(got[name], wanted[name], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("script", ["train_language_model.py", pytest.param("train_vision.py", marks=pytest.mark.slow)])
def test_a_script_that_names_inductor_trains_redirected(script: str, tmp_path: Path) -> None:
    wanted = printed(str(SCRIPTS / script), folder=tmp_path)
    got = printed(str(SCRIPTS / script), "--compile", folder=tmp_path, compiled=True, redirected=True)
    close(got, wanted, 2e-3)


if not ON_GPU or torch.cuda.device_count() >= RANKS:

    @pytest.mark.slow
    def test_a_script_that_names_inductor_trains_redirected_under_ddp(tmp_path: Path) -> None:
        script = str(SCRIPTS / "train_language_model.py")
        wanted = printed(script, ranks=RANKS, folder=tmp_path)
        got = printed(script, "--compile", ranks=RANKS, folder=tmp_path, compiled=True, redirected=True)
        close(got, wanted, 2e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("mixed", [False, True])
    @pytest.mark.parametrize("how", ["blocks", "whole"])
    def test_the_recipe_of_fsdp2(how: str, mixed: bool, tmp_path: Path) -> None:
        words = [str(SCRIPTS / "train_fsdp2.py"), *(["--mixed"] if mixed else [])]
        wanted = printed(*words, ranks=RANKS, folder=tmp_path)
        got = printed(*words, "--compile", how, ranks=RANKS, folder=tmp_path, compiled=True)
        close(got, wanted, 2e-2 if mixed else 1e-4)
