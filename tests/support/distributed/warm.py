"""Runs a program of several ranks over and over, each rank in a process forked from this one, which has imported torch.

    python tests/support/distributed/warm.py PROGRAM

Each line that comes in says {"ranks": [[word, ...], ...], "logs": [path, ...], "seconds": most}; the answer is a line
with the exit statuses, null where a rank had to be killed.  A rank's process ends as one does that was started on its
own: what the program raises reaches the interpreter.  Nothing here runs on a GPU, and this process has one thread.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))


def load() -> None:
    """What ranks of a test import, on the way to their first recording too."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    for name in ("recordings.piece", "runtime", "devices.simulated"):
        importlib.import_module(f"multigraph_backend.cudagraphs.{name}")
    for name in (
        "tests.support.splitter",
        "torch._inductor.cudagraph_trees",
        "torch.distributed._functional_collectives",
    ):
        importlib.import_module(name)
    make_fx(torch.sin, tracing_mode="fake")(torch.ones(4))
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot be forked"


def main(program: str) -> list[str] | None:
    """Serves until there is no further line.  In a forked process: returns the words of its rank."""
    for line in sys.stdin:
        asked = json.loads(line)
        ranks: dict[int, int] = {}
        for rank, (words, log) in enumerate(zip(asked["ranks"], asked["logs"], strict=True)):
            process = os.fork()
            if process == 0:
                os.setsid()
                for descriptor, path in ((0, os.devnull), (1, log)):
                    opened = os.open(path, os.O_RDWR | os.O_CREAT)
                    os.dup2(opened, descriptor)
                os.dup2(1, 2)
                return [program, *words]
            ranks[process] = rank
        print(json.dumps(ended(ranks, asked["seconds"])), flush=True)
    return None


def ended(ranks: dict[int, int], seconds: float) -> list[int | None]:
    """The exit status of each process, by its rank."""
    statuses: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while ranks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in ranks:
            statuses[ranks.pop(process)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for process, rank in ranks.items():
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                statuses[rank] = None
            ranks.clear()
        else:
            time.sleep(0.01)
    return [statuses[rank] for rank in sorted(statuses)]


if __name__ == "__main__":
    load()
    own: Any = main(sys.argv[1])
    if own is not None:
        sys.argv = own
        sys.path[0] = str(Path(own[0]).parent)
        runpy.run_path(own[0], run_name="__main__")
