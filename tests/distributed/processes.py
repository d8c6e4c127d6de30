"""Programs of several ranks, each a process with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]


@dataclass(frozen=True)
class Ended:
    """One rank: its exit status, None where it had to be killed; what it said."""

    status: int | None
    said: str


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def run(
    program: Path, words: Sequence[Sequence[str]], seconds: float, environ: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run `program` once for each of `words`, all at the same time, at most `seconds`; then who is left is killed."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    settings = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        **(environ or {}),
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(program), *rank],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=settings,
            start_new_session=True,
        )
        for rank in words
    ]
    deadline = time.monotonic() + seconds
    ended = []
    for process in started:
        hung = False
        try:
            said, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            hung = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        ended.append(Ended(None if hung else process.returncode, said))
    return ended
