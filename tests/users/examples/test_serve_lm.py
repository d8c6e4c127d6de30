"""The demo as a user runs it: a process of its own, judged by what it prints."""

import os
import re
from pathlib import Path

import pytest

from tests.support import forked

CHECKOUT = Path(__file__).resolve().parents[3]


def _printed(cwd: Path, **environment: str) -> str:
    demo = str(CHECKOUT / "examples" / "serve_lm.py")
    done = forked.run(demo, "--quick", "--device", "cpu", cwd=cwd, env=os.environ | environment, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert "training: 5/5 s" in done.stderr
    assert "serving: 10/10 requests" in done.stderr
    return done.stdout


def _number(printed: str, what: str) -> float:
    found = re.search(rf"^{what}: ([\d.e+-]+)", printed, re.MULTILINE)
    assert found is not None, f"no {what!r} in\n{printed}"
    return float(found[1])


def _shapes(printed: str) -> dict[str, str]:
    """Class of shapes to the graphs that served it."""
    table = printed.split("== which graph served which shape")[1].split("\n\n")[0]
    rows = re.findall(r"^((?:prefill|decode) \d+x\d+) +\d+ +\S+ +\S+ +\S+  (.+)$", table, re.MULTILINE)
    return {shape: re.sub(r", [\d.]+ s", "", ran) for shape, ran in rows}


def test_demo_serves_each_shape_with_its_variant(tmp_path: Path) -> None:
    printed = _printed(tmp_path)
    shapes = _shapes(printed)
    assert {ran for shape, ran in shapes.items() if shape.startswith("decode")} == {"tokens[1] == 1"}
    assert shapes["prefill 4x64"] == shapes["prefill 4x128"] == "tokens[0] == 4 and tokens[1] % 64 == 0"
    assert shapes["prefill 2x128"] == shapes["prefill 3x128"] == "tokens[1] == 128"
    assert shapes["prefill 6x32"] == shapes["prefill 8x64"] == "tokens[0] >= 6 and tokens[1] <= 64"
    assert shapes["prefill 3x48"] == shapes["prefill 2x96"] == shapes["prefill 5x80"] == "generic"
    assert "variants called: 4 of 4" in printed
    assert _number(printed, "failures") == 0
    assert _number(printed, "largest difference from eager") < 1e-4
    assert "eager_calls 0" in printed
    # the prompts are shown with what the model wrote after them
    assert "  def read(self|" in printed


@pytest.mark.slow
def test_demo_goes_on_without_a_compiler(tmp_path: Path) -> None:
    printed = _printed(tmp_path, CXX="/nowhere/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert set(_shapes(printed).values()) == {"eager"}
    assert _number(printed, "failures") > 0
    assert _number(printed, "largest difference from eager") == 0
    assert "some calls ran eagerly" in printed
