"""The last word of scripts/gpu: one line for each part that ran, the same as JSON, and whether all went well.

    python scripts/gpu_summary.py PARTS.tsv SUMMARY.json

PARTS.tsv has a line for each part: name, exit status, seconds, the last line of its log.
"""

import contextlib
import csv
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def described() -> str:
    """Git's name for this checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def clients() -> dict[str, str]:
    """The versions of the libraries that tests/clients are for, as far as they are there."""
    found = {}
    for path in sorted((Path(__file__).parents[1] / "tests" / "clients").glob("test_*.py")):
        name = path.stem.removeprefix("test_").replace("_", "-")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main(parts_file: Path, summary_file: Path) -> int:
    with parts_file.open(newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    parts = [
        {"name": name, "status": int(status), "seconds": int(seconds), "last_line": last}
        for name, status, seconds, last in rows
    ]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    summary = {
        "commit": os.environ.get("MULTIGRAPH_COMMIT") or described(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpus": gpus,
        **({"libraries": clients()} if any(row[0].startswith("clients-") for row in rows) else {}),
        "parts": parts,
    }
    summary_file.write_text(json.dumps(summary, indent=1) + "\n")

    print(f"torch {torch.__version__}, Python {platform.python_version()}, {', '.join(gpus) or 'no GPU'}")
    for name, status, seconds, last in rows:
        ended = "ok" if status == "0" else "timed out" if status == "124" else f"failed ({status})"
        print(f"{name:<28} {ended:<12} {seconds:>5} s  {last}")
    return int(any(part["status"] for part in parts))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/gpu_summary.py PARTS.tsv SUMMARY.json")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
