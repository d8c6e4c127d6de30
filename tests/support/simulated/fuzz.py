"""The long run of random programs over recordings on the simulated device.

    python tests/support/simulated/fuzz.py --seeds 1 20000 --jobs 8 --json out.json     # from 1 to 19999
    python tests/support/simulated/fuzz.py --only 1234                                   # one program, step by step
    python tests/support/simulated/fuzz.py --only 1234 --calls 7                         # its first calls

Exits with 1 where a program is wrong; the JSON says which, and what all of them exercised.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime
from tests.support.commit import commit
from tests.support.simulated.random_programs import Wrong, run

CHUNK = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 500), metavar=("FIRST", "END"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", type=int, default=None, metavar="SEED")
    parser.add_argument("--calls", type=int, default=None, help="with --only: how many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("multigraph_backend").setLevel(logging.CRITICAL)
    if args.only is not None:
        _native_calls()
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
    of = commit("tests/support/simulated")  # what is imported, not what lies there in the end
    began, programs, said = time.monotonic(), 0, 0
    chunks = [range(seed, min(seed + CHUNK, end)) for seed in range(first, end, CHUNK)]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), _begin) as pool:
        for done, exercised, found in pool.map(_chunk, chunks, itertools.repeat(time.time() + args.seconds)):
            programs, counts = programs + done, counts + exercised
            wrong += found
            for one in found:
                print(f"seed {one['seed']}: {one['what']}", file=sys.stderr, flush=True)
            if programs >= said + 1000:
                said, speed = programs, programs / (time.monotonic() - began)
                print(f"{programs} programs, {speed:.1f}/s, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return {
        "commit": of,
        "torch": torch.__version__,
        "seeds": [first, end],
        "programs": programs,
        "number_wrong": len(wrong),
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
        "exercised": dict(sorted(counts.items())),
    }


def _native_calls() -> None:
    """Have calls native where a program asks for that, as in tests; without a compiler none are."""
    runtime.begin_native_calls()
    native.wait()


def _begin() -> None:
    """In each process, once."""
    torch.set_num_threads(1)
    logging.getLogger("multigraph_backend").setLevel(logging.CRITICAL)
    _native_calls()
    run(0)  # imports what it needs
    gc.collect()
    gc.freeze()  # programs collect garbage: not what was there before


def _chunk(seeds: Iterable[int], until: float) -> tuple[int, Counter[str], list[dict[str, Any]]]:
    """-> (how many programs ran, what they exercised, those that are wrong)."""
    counts: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    programs = 0
    for seed in seeds:
        if time.time() > until:
            break
        programs += 1
        try:
            counts += run(seed)
        except Wrong as error:
            what, *steps = str(error).splitlines()
            wrong.append({"seed": seed, "what": what, "steps": steps})
    return programs, counts, wrong


if __name__ == "__main__":
    sys.exit(main())
