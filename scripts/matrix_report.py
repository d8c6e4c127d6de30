"""The last word of scripts/matrix: one line for each torch version, the same as JSON, and whether all passed.

    python scripts/matrix_report.py RESULT.json "2.11.0 2.13.0" 2.11.0:40:310:.matrix/2.11.0/bin/python ...

First the versions that were asked for, then what ran: version, seconds to set up, seconds of the suite,
interpreter. The counts come from .matrix/VERSION.xml, which pytest wrote; a version without one did not run,
and fails the matrix.
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit that was tested, with `-dirty` when the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    asked = subprocess.run(command, capture_output=True, text=True)
    return asked.stdout.strip() or "uncommitted"


def counts(report: Path) -> dict[str, int]:
    suite = ElementTree.parse(report).getroot()[0]
    number = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return {
        "passed": number["tests"] - failed - number["skipped"],
        "failed": failed,
        "skipped": number["skipped"],
    }


def torch_of(python: str) -> dict[str, str]:
    code = "import platform, torch; print(torch.__version__, platform.python_version())"
    torch_version, python_version = subprocess.check_output([python, "-c", code], text=True).split()
    return {"torch": torch_version, "python": python_version}


def main(result: Path, versions: list[str], runs: list[str]) -> int:
    by_version = {run.split(":")[0]: run.split(":", 3)[1:] for run in runs}
    rows: list[dict[str, Any]] = []
    for version in versions:
        row: dict[str, Any] = {"version": version, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0}
        report = Path(f".matrix/{version}.xml")
        if version in by_version and report.exists():
            setup, seconds, python = by_version[version]
            row |= counts(report) | torch_of(python) | {"setup_seconds": int(setup), "seconds": int(seconds)}
        rows.append(row)
        print(
            f"torch {row.get('torch', version):<14} {row['passed']} passed, {row['failed']} failed, "
            f"{row['skipped']} skipped, {row['seconds']} s" + ("" if row["passed"] else "  <- did not run")
        )
    result.write_text(json.dumps({"commit": commit(), "versions": rows}, indent=1) + "\n")
    return int(any(row["failed"] or not row["passed"] for row in rows))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit('usage: python scripts/matrix_report.py RESULT.json "VERSIONS" VERSION:SETUP:SECONDS:PYTHON')
    sys.exit(main(Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3:]))
