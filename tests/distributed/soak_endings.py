"""Every ending of `endings.py` many times over, each run with a time limit; the exit status says whether one hung.

python tests/distributed/soak_endings.py --runs 100
python tests/distributed/soak_endings.py --runs 20 --device cuda --seconds 90
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed import endings, processes


def problem(ending: str, ranks: list[processes.Ended]) -> str | None:
    """What is wrong with how the ranks ended, None if nothing is."""
    wanted = {"exception": 1, "sys.exit": 7, "SIGINT": -2}.get(ending, 0)
    for rank, ended in enumerate(ranks):
        status = -9 if (ending, rank) == ("one rank killed", 0) else wanted
        if "recorded " not in ended.said or "nothing was recorded" in ended.said:
            return f"rank {rank} recorded nothing: {ended.said}"
        if ended.status is None:
            return f"rank {rank} hangs: {ended.said}"
        if ended.status != status and (ending, ended.status) != ("SIGINT", 1):  # torch's own hook for exceptions says 1
            return f"rank {rank} ended with {ended.status}, not {status}: {ended.said}"
    return None


def run(ending: str, size: int, device: str, seconds: float) -> str | None:
    port = str(processes.free_port())
    words = [[ending, str(rank), str(size), port, "--device", device] for rank in range(size)]
    return problem(ending, processes.run(processes.HERE / "endings.py", words, seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--size", type=int, default=2, help="ranks (2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60, help="of one run at most (60)")
    parser.add_argument("--only", metavar="TEXT", default="", help="endings whose name has this in it")
    args = parser.parse_args()
    failed = 0
    for ending in [name for name in endings.ENDINGS if args.only in name]:
        began = time.monotonic()
        for _ in range(args.runs):
            said = run(ending, args.size, args.device, args.seconds)
            if said is not None:
                failed += 1
                print(f"{ending}: {said}", flush=True)
        print(f"{ending}: {args.runs} runs in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
