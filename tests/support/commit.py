"""Which commit a long run is of, for the file that says what it found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit(*folders: str) -> str:
    """This checkout's commit; " with changes" where `multigraph_backend` or one of `folders` has some.

    `MULTIGRAPH_COMMIT` names it where the files are a copy without their history.
    """
    if named := os.environ.get("MULTIGRAPH_COMMIT"):
        return named
    changed = _git("status", "--porcelain", "--untracked-files=no", "multigraph_backend", *folders)
    return (_git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
