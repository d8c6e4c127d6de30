"""A private symbol of torch that has another name turns its feature off, and nothing else: each is renamed in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multigraph_backend import _compat
from tests.support import hidden_symbols


def hidden(way: str, cache: Path, timeout: int) -> dict[str, dict[str, Any]]:
    """What became of the program, or of the question, by the symbol that was hidden."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, hidden_symbols.__file__, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return {entry.get("hidden", "died"): entry for entry in said}


def check_run(said: dict[str, dict[str, Any]]) -> None:
    """Right numbers, which the program compares itself, and one clear line."""
    nothing = said.pop("nothing")
    assert (nothing["lines"], nothing["stats"]["generic_calls"], nothing["stats"]["failures"]) == ([], 6, 0), nothing
    assert (nothing["refused"], nothing["stats"]["retained_backwards"]) == ([None, None], 2), nothing
    assert nothing["stats"]["kept_tensors"] + nothing["stats"]["packed_tensors"] > 0
    assert {name: entry["error"] for name, entry in said.items() if "error" in entry} == {}
    substituted = said.pop(".grapharg", None)  # the source of an input is found in another place, too
    assert substituted is None or (substituted["lines"], substituted["stats"]["variant_calls"]) == ([], 1)
    unclear = {
        name: entry["lines"]
        for name, entry in said.items()
        if len(entry["lines"]) != 1 or " differs: " not in entry["lines"][0]
    }
    assert unclear == {}
    for name in ("keeps_graph", *hidden_symbols.IN_BACKWARDS):  # a backward that writes is torch's, which says so
        assert said[name]["refused"][0], said[name]
    # code from a cache, whose graph torch would not refuse, copies at each call
    assert (said["keeps_graph"]["refused"][1], said["keeps_graph"]["stats"]["copied_backwards"]) == (None, 2)


def test_each_symbol_that_is_missing_turns_its_feature_off_with_one_line(tmp_path: Path) -> None:
    said = hidden("ask", tmp_path, 600)
    rows = _compat.expected()
    assert {name: entry["error"] for name, entry in said.items() if "error" in entry} == {}
    assert len(said) > 250
    for name, entry in said.items():
        row = rows.get(name.partition(".")[0])
        if row is None:  # a trace shows it
            continue
        assert row.feature in entry["problems"], (name, entry)
        if "variants" not in entry["problems"]:
            assert any(line.startswith("torch ") and " differs: " in line for line in entry["lines"]), (name, entry)


@pytest.mark.slow
def test_programs_are_right_and_one_line_says_what_is_missing(tmp_path: Path) -> None:
    said = hidden("run", tmp_path, 900)
    assert len(said) > 15
    check_run(said)


@pytest.mark.slow
def test_programs_are_right_without_any_of_the_symbols(tmp_path: Path) -> None:
    check_run(hidden("run-all", tmp_path, 3000))
