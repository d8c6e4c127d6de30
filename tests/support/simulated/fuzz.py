"""The long run of random programs over recordings on the simulated device.

    python tests/support/simulated/fuzz.py --seeds 1 20000 --json out.json     # from 1 to 19999
    python tests/support/simulated/fuzz.py --only 1234                         # one program, step by step
    python tests/support/simulated/fuzz.py --only 1234 --calls 7               # its first calls

Exits with 1 where a program is wrong; the JSON says which, and what all of them exercised.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from tests.support.simulated.random_programs import Wrong, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 500), metavar=("FIRST", "END"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after so long")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", type=int, default=None, metavar="SEED")
    parser.add_argument("--calls", type=int, default=None, help="with --only: how many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("multigraph_backend").setLevel(logging.CRITICAL)
    if args.only is not None:
        print(json.dumps(dict(sorted(run(args.only, args.calls, print).items())), indent=2))
        return 0
    summary = _run(args)
    print(json.dumps({name: value for name, value in summary.items() if name != "wrong"}, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if summary["wrong"] else 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    first, end = args.seeds
    counts: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    started, seed, commit = time.monotonic(), first, _commit()  # what was imported, not what lies there in the end
    run(first)  # imports what it needs
    gc.collect()
    gc.freeze()  # programs collect garbage: not what was there before
    while seed < end and time.monotonic() - started < args.seconds:
        try:
            counts += run(seed)
        except Wrong as error:
            text = str(error)
            wrong.append({"seed": seed, "what": text.splitlines()[0], "steps": text.splitlines()[1:]})
            print(f"seed {seed}: {text.splitlines()[0]}", file=sys.stderr, flush=True)
        seed += 1
        if (seed - first) % 1000 == 0:
            speed = (seed - first) / (time.monotonic() - started)
            print(f"{seed - first} programs, {speed:.1f}/s, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return {
        "commit": commit,
        "torch": torch.__version__,
        "seeds": [first, seed],
        "programs": seed - first,
        "number_wrong": len(wrong),
        "wrong": wrong,
        "seconds": round(time.monotonic() - started, 1),
        "exercised": dict(sorted(counts.items())),
    }


def _commit() -> str:
    def git(*command: str) -> str:
        root = Path(__file__).resolve().parents[3]
        return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    if named := os.environ.get("MULTIGRAPH_COMMIT"):  # a copy of the checkout, without its history
        return named
    changed = git("status", "--porcelain", "--untracked-files=no", "multigraph_backend", "tests/support/simulated")
    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
