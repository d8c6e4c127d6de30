"""The long run: many cases, in fresh processes of some cases each: a crash or a hang costs one case and is named.

    python tests/support/fuzz/run.py --cases 10000 --compiler aot_eager --jobs 2 --json fuzz.json
    python tests/support/fuzz/run.py --show 1234                # the program of a seed, as a file that runs alone
    python tests/support/fuzz/run.py --only 1234                # one case, here

Beside `fuzz.json` (the summary) lies `fuzz.json.journal`, one line a case; a run that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.commit import commit
from tests.support.fuzz.programs import generate, script

GOOD = ("right", "discarded", "torch")


def main() -> int:
    args = _arguments()
    if args.show is not None:
        print(script(generate(args.show, args.profile), args.compiler, args.backend))
        return 0
    if args.only is not None:
        args.seed, args.cases = args.only, 1
        return _work(args)
    return _work(args) if args.worker else _Run(args).run()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--compiler", choices=("aot_eager", "inductor", "eager"), default="aot_eager")
    parser.add_argument("--backend", choices=("multigraph", "stock"), default="multigraph")
    parser.add_argument("--profile", help="what to draw; of stock: marks alone", default=None)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=50, help="cases a process")
    parser.add_argument("--case-timeout", type=float, default=None, help="seconds until a case counts as hanging")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--show", type=int, default=None, metavar="SEED")
    parser.add_argument("--only", type=int, default=None, metavar="SEED")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.profile = args.profile or ("stock" if args.backend == "stock" else "default")
    args.case_timeout = args.case_timeout or (600.0 if args.compiler == "inductor" else 120.0)
    return args


def _work(args: argparse.Namespace) -> int:
    """In the process of a batch: one line of JSON before and one after each case."""
    import logging

    import torch

    from tests.support.fuzz.differential import run_case

    torch.set_num_threads(1)
    for name in ("torch._guards", "torch._dynamo", "torch._inductor", "multigraph_backend"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    gc.disable()  # tracing makes very many objects; collected between cases
    bad = 0
    for seed in range(args.seed, args.seed + args.cases):
        print(json.dumps({"start": seed}), flush=True)
        program = generate(seed, args.profile)
        verdict = run_case(program, args.compiler, args.backend)
        features = [*sorted(program.body.features), f"dynamic={program.dynamic}"] + ["trainable"] * program.trainable
        print(json.dumps({**verdict.to_dict(), "features": features}), flush=True)
        bad += verdict.outcome not in GOOD
        if seed % 10 == 0:
            gc.collect()
    return min(bad, 1)


class _Run:
    """The parent: hands out batches, keeps the journal, writes the summary."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.journal = Path(f"{args.json}.journal") if args.json else None
        self.records: dict[int, dict[str, Any]] = {}
        wanted = range(args.seed, args.seed + args.cases)
        if self.journal is not None and self.journal.exists():
            for line in self.journal.read_text().splitlines():
                record = json.loads(line)
                if record["seed"] in wanted and record["profile"] == args.profile:
                    self.records[record["seed"]] = record
        self.before = len(self.records)
        self.commit = commit("tests/support/fuzz")  # what is imported, not what lies there in the end
        self.todo = [seed for seed in wanted if seed not in self.records]

    def run(self) -> int:
        spans = _spans(self.todo, self.args.batch)
        with tempfile.TemporaryDirectory(prefix="fuzz-cache-") as cache, ThreadPoolExecutor(self.args.jobs) as pool:
            list(pool.map(lambda span: self._batch(span[0], span[1], cache), spans))
        print(file=sys.stderr)
        summary = self.summary()
        print(json.dumps({k: v for k, v in summary.items() if k != "features"}, indent=2))
        if self.args.json:
            self.args.json.write_text(json.dumps(summary, indent=2) + "\n")
        return 1 if summary["failing"] else 0

    def _batch(self, first: int, count: int, cache: str) -> None:
        """A batch; where its process ends early the case at fault is recorded and the rest runs in a new process."""
        end = first + count
        while first < end:
            first = self._process(first, end, cache)

    def _process(self, first: int, end: int, cache: str) -> int:
        a = self.args
        command = [sys.executable, __file__, "--worker", "--seed", str(first), "--cases", str(end - first)]
        command += ["--compiler", a.compiler, "--backend", a.backend, "--profile", a.profile]
        # one compile thread, one cache: as many processes as --jobs and no state from an earlier run
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        errors = collections.deque[str](maxlen=40)
        drain = threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True)
        drain.start()
        hung = threading.Event()
        current = first

        def stop() -> None:
            hung.set()
            child.kill()

        assert child.stdout is not None
        done = False
        timer = threading.Timer(a.case_timeout + 60, stop)
        timer.start()
        for line in child.stdout:
            timer.cancel()
            timer = threading.Timer(a.case_timeout, stop)
            timer.start()
            record = json.loads(line) if line.startswith("{") else {}
            if "start" in record:
                current, done = record["start"], False
            elif "outcome" in record:
                done = True
                self._record(record)
        timer.cancel()
        child.wait()
        drain.join(timeout=5)
        if done and current == end - 1:
            return end
        if not done:
            outcome = "hang" if hung.is_set() else "crash"
            detail = f"exit status {child.returncode}\n" + "".join(errors)
            self._record({"seed": current, "profile": a.profile, "outcome": outcome, "detail": detail[-3000:]})
        return current + 1

    def _record(self, record: dict[str, Any]) -> None:
        record = {"commit": self.commit, **record}
        with self.lock:
            self.records[record["seed"]] = record
            if self.journal is not None:
                with self.journal.open("a") as f:
                    f.write(json.dumps(record) + "\n")
            counts = collections.Counter(r["outcome"] for r in self.records.values())
            text = "  ".join(f"{k} {v}" for k, v in sorted(counts.items()))
            line = f"{len(self.records)}/{self.args.cases}  {self._speed():.2f}/s  {text}"
            if sys.stderr.isatty():
                print(f"\r{line}  ", end="", flush=True, file=sys.stderr)
            elif len(self.records) % 50 == 0:
                print(line, flush=True, file=sys.stderr)

    def _speed(self) -> float:
        return (len(self.records) - self.before) / max(time.monotonic() - self.started, 1e-9)

    def summary(self) -> dict[str, Any]:
        import torch

        records = [self.records[seed] for seed in sorted(self.records)]
        features = collections.Counter(f for r in records for f in r.get("features", ()))
        return {
            "commit": ", ".join(dict.fromkeys(r["commit"] for r in records)),
            "torch": torch.__version__,
            "compiler": self.args.compiler,
            "backend": self.args.backend,
            "profile": self.args.profile,
            "seeds": [self.args.seed, self.args.seed + self.args.cases],
            "cases": len(records),
            "outcomes": dict(sorted(collections.Counter(r["outcome"] for r in records).items())),
            "calls_checked": sum(r.get("checked", 0) for r in records),
            "calls_matched": sum(r.get("matched", 0) for r in records),
            "cases_per_second": round(self._speed(), 2),
            "failing": [
                {k: r.get(k) for k in ("seed", "outcome", "call", "detail")}
                for r in records
                if r["outcome"] not in GOOD
            ],
            "features": dict(sorted(features.items())),
        }


def _spans(seeds: list[int], batch: int) -> list[tuple[int, int]]:
    """Runs of consecutive seeds, none longer than a batch."""
    spans: list[tuple[int, int]] = []
    for seed in seeds:
        if spans and spans[-1][0] + spans[-1][1] == seed and spans[-1][1] < batch:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((seed, 1))
    return spans


if __name__ == "__main__":
    sys.exit(main())
