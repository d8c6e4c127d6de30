"""Every ending of `endings.py` many times over, each run with a time limit; the exit status says whether one hung.

    python tests/support/distributed/soak_endings.py --runs 100 --jobs 2 --warm --json endings.json
    python tests/support/distributed/soak_endings.py --runs 20 --device cuda --seconds 90 --jobs 4 --json endings.json

A run has ended when all its ranks have, by themselves and with the status that this ending should have.  With `--warm`
their processes are forked from one that has imported torch, which takes most of a run on a CPU; not on a GPU.
"""

from __future__ import annotations

import queue
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.distributed import endings, processes

#: Python's own for an interrupt that nobody catches, by signal or as a shell has it; torch's hook for errors
_INTERRUPTED = (-2, 130, 1)


PROGRAM = processes.HERE / "endings.py"


class Run(NamedTuple):
    """What is wrong with how the ranks ended, None if nothing is; whether one had to be ended; seconds."""

    problem: str | None
    hung: bool
    seconds: float


def problem(ending: str, ranks: list[processes.Ended]) -> str | None:
    """What is wrong with how the ranks ended, None if nothing is."""
    for rank, ended in enumerate(ranks):
        wanted = {"exception": (1,), "sys.exit": (7,), "SIGINT": _INTERRUPTED}.get(ending, (0,))
        if (ending, rank) == ("one rank killed", 0):
            wanted = (-9,)
        if "recorded " not in ended.said or "nothing was recorded" in ended.said:
            return f"rank {rank} recorded nothing: {ended.said}"
        if ended.status is None:
            return f"rank {rank} hangs: {ended.said}"
        if ended.status not in wanted:
            return f"rank {rank} ended with {ended.status}, not {wanted[0]}: {ended.said}"
        if ending == "SIGINT" and "KeyboardInterrupt" not in ended.said:
            return f"rank {rank} was not interrupted: {ended.said}"
    return None


def once(ending: str, size: int, device: str, seconds: float, warm: processes.Warm | None = None) -> Run:
    """One run of `size` ranks."""
    port = str(processes.free_port())
    words = [[ending, str(rank), str(size), port, "--device", device] for rank in range(size)]
    began = time.monotonic()
    ranks = processes.run(PROGRAM, words, seconds) if warm is None else warm.run(words, seconds)
    hung = any(rank.status is None for rank in ranks)
    return Run(problem(ending, ranks), hung, time.monotonic() - began)


def run(ending: str, size: int, device: str, seconds: float) -> str | None:
    """What is wrong with one run, None if nothing is."""
    return once(ending, size, device, seconds).problem


def main() -> int:
    sys.path.insert(0, str(processes.CHECKOUT / "benchmarks"))
    from measure import Column, Goal, Results, arguments, goals_text

    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=1, help="of each ending (1)")
    parser.add_argument("--size", type=int, default=2, help="ranks (2)")
    parser.add_argument("--seconds", type=float, default=60, help="of one run at most (60)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--warm", action="store_true", help="processes forked from one that has imported torch")
    parser.add_argument("--only", metavar="TEXT", default="", help="endings whose name has this in it")
    args = parser.parse_args()
    columns = (
        Column("ending", "ending"),
        Column("ranks", "ranks"),
        Column("runs", "runs"),
        Column("hung", "hung"),
        Column("wrong", "ended otherwise"),
        Column("median", "median seconds", 1),
        Column("worst", "worst seconds", 1),
        Column("goals", "goals"),
    )
    results = Results("endings", "Several ranks: runs of every ending, and how many hang", columns, args)
    if args.warm and results.device == "cuda":
        parser.error("--warm: a process that is forked cannot use CUDA as this one may")
    warm: queue.SimpleQueue[processes.Warm | None] = queue.SimpleQueue()
    for _ in range(args.jobs):
        warm.put(processes.Warm(PROGRAM) if args.warm else None)

    def one(ending: str) -> Run:
        used = warm.get()
        try:
            return once(ending, args.size, results.device, args.seconds, used)
        finally:
            warm.put(used)

    with ThreadPoolExecutor(args.jobs) as pool:
        for ending in [name for name in endings.ENDINGS if args.only in name]:
            runs = list(pool.map(one, [ending] * args.runs))
            problems = [entry.problem for entry in runs if entry.problem is not None]
            row = {
                "runs": len(runs),
                "hung": sum(entry.hung for entry in runs),
                "wrong": len(problems) - sum(entry.hung for entry in runs),
                "median": statistics.median(entry.seconds for entry in runs),
                "worst": max(entry.seconds for entry in runs),
            }
            row["goals"] = goals_text((Goal("hung", "hung", 0), Goal("otherwise", "wrong", 0)), row)
            error = "\n".join(problems) if problems else None
            results.add({"ending": ending, "ranks": args.size}, row, error, headline=True)
    while not warm.empty():
        if (used := warm.get()) is not None:
            used.close()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
