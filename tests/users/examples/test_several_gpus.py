"""The examples of several ranks as a user runs them: through torchrun, over gloo, judged by what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def printed(example: str, folder: Path) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    command = [*torchrun, str(EXAMPLES / example), "--quick", "--device", "cpu"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert done.stdout.count("rank 0 of 2") == 1  # rank 0 alone speaks
    assert "rank 1 of 2" not in done.stdout
    return done.stdout


def number(text: str, what: str) -> float:
    found = re.search(rf"^{what}: ([\d.e+-]+)$", text, re.MULTILINE)
    assert found is not None, f"no {what!r} in\n{text}"
    return float(found[1])


@pytest.mark.slow
def test_a_tensor_parallel_decoder_is_served_and_ends_without_destroying_its_group(tmp_path: Path) -> None:
    text = printed("serve_tp.py", tmp_path)
    assert number(text, "worst difference from the whole model") < 1e-3
    calls = {name: int(count) for name, count in re.findall(r"^  (\S.*?) +ready +(\d+) calls", text, re.MULTILINE)}
    assert calls == {"x[0] == 16": 8, "x[0] % 64 == 0": 4, "generic": 4}
    assert "4 collectives of" in text
    assert "all_reduce(float32[1024], sum) in group '0'" in text


@pytest.mark.slow
def test_a_model_trains_under_fsdp2(tmp_path: Path) -> None:
    text = printed("train_fsdp.py", tmp_path)
    assert number(text, "last loss") < number(text, "first loss")
    (calls,) = re.findall(r"^  generic +ready +(\d+) calls", text, re.MULTILINE)
    assert int(calls) == 24  # two blocks of one class, 12 steps
