"""Programs of several ranks, each a process with a time limit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
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


_lock = threading.Lock()
_given: set[int] = set()


def free_port() -> int:
    """A port that is free, and the one after it too.  Given to nobody else of this process, and below those that the
    system gives to connections."""
    with _lock:
        while True:
            port = random.randrange(10_000, 32_000, 2)
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                for number in (port, port + 1):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
                if port not in _given:
                    _given.add(port)
                    return port


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
