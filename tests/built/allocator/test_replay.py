"""Logs of allocations: what one says the allocator would have reserved."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.allocator.extension import MIB, Allocator, stress

CHECKOUT = Path(__file__).resolve().parents[3]
SAMPLE = Path(__file__).with_name("training_step.log")
MAKER = CHECKOUT / "scripts" / "allocator-log"


def made_log(*arguments: str) -> str:
    return subprocess.run([sys.executable, MAKER, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_sample_is_what_its_script_makes() -> None:
    assert made_log("sample") == SAMPLE.read_text()


def test_the_sample_under_each_rule(simulated: Path) -> None:
    def replayed(*options: str) -> dict[str, float]:
        found = stress(simulated / "replay", str(SAMPLE), *options)
        assert found["wrong"] == ""
        assert found["operations"] == sum(not line.startswith("#") for line in SAMPLE.read_text().splitlines())
        assert found["bound"] <= found["peak_live"] <= found["peak_active"] <= found["peak_reserved"]
        return found

    own, strict, expandable = replayed(), replayed("--reuse", "strict"), replayed("--expandable")
    assert own["bound"] == strict["bound"] == expandable["bound"]
    # the capture's blocks all wait for its end where nothing is proven
    assert strict["peak_reserved"] > own["peak_reserved"] + 400 * MIB
    assert own["proven"] == 31
    assert expandable["peak_reserved"] < own["peak_reserved"]
    assert 0 < expandable["fragmentation"] < own["fragmentation"] < strict["fragmentation"] < 1
    little = replayed("--capacity", "300")
    assert little["out_of_memory"] > 0
    assert little["peak_reserved"] <= 300 * MIB


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("allocate 1 512", "line 1: not understood"),
        ("# a comment\nallocat 1 512 0", "line 2: not understood"),
        ("allocate 1 512 zero", "line 1: not understood"),
        ("free 1", "line 1: no such block"),
        ("allocate 1 512 0\nallocate 1 512 0", "line 2: the block is live"),
        ("capture 0\ncapture 0", "line 2: the stream captures already"),
    ],
)
def test_a_log_that_makes_no_sense_is_told(simulated: Path, tmp_path: Path, lines: str, said: str) -> None:
    log = tmp_path / "wrong.log"
    log.write_text(lines + "\n")
    assert stress(simulated / "replay", str(log))["wrong"] == said


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_a_snapshot_becomes_a_log(simulated: Path, make: Callable[..., Allocator], tmp_path: Path, form: str) -> None:
    allocator = make(history=1000, index=1)
    one, two = allocator.stream(), allocator.stream()
    older = allocator.allocate(MIB, one)
    allocator.record_history(1000)
    first = allocator.allocate(30 * MIB, one)
    allocator.allocate(20 * MIB, two)
    allocator.free(older)
    allocator.free(first)
    path = tmp_path / "snapshot"
    path.write_bytes(
        json.dumps(allocator.snapshot()).encode() if form == "json" else pickle.dumps(allocator.snapshot())
    )
    log = made_log("convert", str(path), "--device", "1")
    assert log.splitlines()[1:] == [f"allocate 1 {30 * MIB} 0", f"allocate 2 {20 * MIB} 1", "free 1"]
    (tmp_path / "log").write_text(log)
    found = stress(simulated / "replay", str(tmp_path / "log"))
    assert found["bound"] == found["peak_reserved"] == 50 * MIB
