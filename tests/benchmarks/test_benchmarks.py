"""Each benchmark as scripts/gpu runs it: a process of its own that writes JSON. How fast anything is, is not asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]

FACTS = {"benchmark", "title", "quick", "commit", "date", "torch", "triton", "python", "device", "columns", "rows"}


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a quick run on the CPU, none of which failed."""
    path = folder / "out" / f"{name}.json"
    command = [sys.executable, str(CHECKOUT / "benchmarks" / f"{name}.py"), "--quick", "--device", "cpu"]
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "MULTIGRAPH_COMMIT": "abc",
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run(
        [*command, "--json", str(path)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
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


def test_dispatch(tmp_path: Path) -> None:
    rows = run("dispatch", tmp_path)
    kinds = ("Eq", "Range", "MultipleOf", "mixed")
    ours = [("multigraph", kind, 16, calls) for calls in ("missed", "hit", "first seen") for kind in kinds]
    stock = [("stock", "Eq", 16, calls) for calls in ("missed", "first seen")]
    assert [(row["backend"], row["kind"], row["count"], row["calls"]) for row in rows] == [*ours, *stock]
    assert positive(rows, "us", "generic_us")
    assert all(isinstance(row["over_us"], float) for row in rows)


def test_variants(tmp_path: Path) -> None:
    rows = run("variants", tmp_path)
    assert Counter((row["workload"], row["shape"]) for row in rows) == {
        ("softmax x std", "8x1008"): 3,
        ("matmul chain", "32"): 3,
    }
    assert {row["condition"] for row in rows} == {"Eq", "MultipleOf", "Range"}
    assert positive(rows, "us", "generic_us", "static_us", "dynamic_us", "over_static", "over_generic", "over_dynamic")


def test_compile_time(tmp_path: Path) -> None:
    rows = run("compile_time", tmp_path)
    assert [(row["model"], row["passes"], row["condition"]) for row in rows] == [
        ("mlp", "forward", "generic"),
        ("mlp", "forward", "Eq"),
    ]
    assert positive(rows, "seconds", "stock_seconds", "over_stock", "compile_seconds", "stock_compile_seconds")
