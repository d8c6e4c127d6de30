"""Equal processes come to an equal plan for a memory goal, by figures that the first has measured, and share code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.saved_tensors import goal_in_a_process


def run(goal: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    environment.pop("MULTIGRAPH_MANIFESTS", None)
    done = forked.run(goal_in_a_process.__file__, goal, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.slow
def test_a_second_process_has_the_plan_and_the_code_of_the_first_and_another_goal_neither(tmp_path: Path) -> None:
    first, second, third = run("3 MiB", tmp_path), run("3 MiB", tmp_path), run("4 MiB", tmp_path)
    assert first["plan"] == second["plan"] != third["plan"]
    assert first["plan"]["ways"]
    assert [entry["measured"] for entry in (first, second, third)] == [1, 0, 0]
    assert [entry["caches"]["hit"] for entry in (first, second, third)] == [0, 1, 0]
    assert third["plan"]["goal"] == 4 << 20
