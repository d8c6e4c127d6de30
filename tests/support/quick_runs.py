"""A quick run of a benchmark, in a process of its own, for tests that look at its rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support import forked

CHECKOUT = Path(__file__).resolve().parents[2]

FACTS = {"benchmark", "title", "quick", "commit", "date", "torch", "triton", "python", "device", "columns", "rows"}


def run(name: str, folder: Path, *words: str, nested: bool = True) -> list[dict[str, Any]]:
    """The rows of a quick run on the CPU with more `words`, none of which failed; `nested` as in `forked.run`."""
    path = folder / "out" / f"{name}.json"
    command = [str(CHECKOUT / "benchmarks" / f"{name}.py"), "--quick", "--device", "cpu", *words]
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "MULTIGRAPH_COMMIT": "abc",
        "OMP_WAIT_POLICY": "passive",
    }
    done = forked.run(*command, "--json", str(path), cwd=folder, env=environment, nested=nested)
    said = f"{done.stdout}\n{done.stderr}"
    assert path.exists(), said
    written = json.loads(path.read_text())
    assert written.keys() >= FACTS
    assert (written["benchmark"], written["commit"], written["quick"]) == (name, "abc", True)
    rows: list[dict[str, Any]] = written["rows"]
    assert [row["error"] for row in rows] == [None] * len(rows), said
    assert done.returncode == 0, said
    assert f"{len(rows)} rows, 0 failed" in done.stdout
    assert list(path.parent.iterdir()) == [path]
    shown = {column["key"] for column in written["columns"]}
    assert all(shown & row.keys() for row in rows)
    return rows


def positive(rows: list[dict[str, Any]], *keys: str) -> bool:
    return all(row[key] > 0 for row in rows for key in keys)
