"""Programs of several ranks, each a process with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]


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


class Warm:
    """A process that has imported torch, and runs a program's ranks in forks of itself; see `warm.py`."""

    def __init__(self, program: Path) -> None:
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py"), str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=settings,
        )

    def run(self, words: Sequence[Sequence[str]], seconds: float) -> list[Ended]:
        """As the function of this name."""
        logs = [Path(self._folder.name) / f"rank{rank}" for rank in range(len(words))]
        asked = {"ranks": [list(entry) for entry in words], "logs": [str(log) for log in logs], "seconds": seconds}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        ended = [Ended(status, log.read_text(errors="replace")) for status, log in zip(statuses, logs, strict=True)]
        for log in logs:
            log.unlink()
        return ended

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()
