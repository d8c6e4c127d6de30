"""What a server's processes go through, at length: killed workers and parents, full disks, races, clocks that jump.

    scripts/serving-soak --seconds 300 --json serving_soak.json

Processes share one folder of caches.  Each serves calls of random sizes by a small model that compiles in the
background, pads, and starts warm, and holds every result against eager's.  Beside them

- workers are killed with SIGKILL at random times, and so are the processes themselves, in whose place others begin;
- some begin where no file may grow beyond a few kilobytes: for those who write, a disk that is full;
- some begin with a clock that jumps by days, to and fro;
- some have caches of their own, so that there is always something to compile.

Said at the end: calls, wrong ones, errors, kills; of those that lived long, how much their memory grew in the second
half of their life; whether workers outlived their parents.  The exit status is 0 where nothing was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
WORKER = b"multigraph_backend.lower.worker"
SMALL = 8 << 10  # bytes that a file may have where the disk is "full"
GROWS = 64.0  # MiB by which a process may grow in the second half of its life
KINDS = ("plain", "own caches", "full disk", "clock")


# ---------------------------------------------------------------- one server


def serve(folder: str, seed: int, seconds: float, kind: str) -> None:
    """Calls until the time is over; prints each second what came of them, for it may be killed."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder if kind != "own caches" else f"{folder}-of-{seed}"
    began = time.monotonic()
    rng = random.Random(seed)
    if kind == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))
    if kind == "clock":
        real = time.time
        time.time = lambda: real() + rng.choice((0.0, -3e5, 3e5))
    import torch

    import multigraph_backend

    torch.set_num_threads(1)
    torch.manual_seed(seed)

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.second(torch.relu(self.first(x))).softmax(-1)
            return scores

    model = Scores().eval()
    options: dict[str, Any] = {
        "specialize": [{"x[0]": 8}, {"x[0]": {"multiple_of": 16}}],
        "pad": {"x[0]": [8, 16, 32, 48, 64]},
        "compile": "background",
        "workers": {"count": 1},
    }
    run = torch.compile(model, backend="multigraph", dynamic=True, options=options)
    said: Counter[str] = Counter()
    sizes: list[float] = []
    looked = 0.0

    def tell() -> None:
        stats = multigraph_backend.stats()
        half = sizes[len(sizes) // 2 :]
        told = {
            "kind": kind,
            "said": dict(said),
            "grew": round(half[-1] - half[0], 1) if len(half) > 20 else None,
            "stats": {name: value for name, value in stats.items() if value},
        }
        print(json.dumps(told), flush=True)

    with torch.no_grad():
        while time.monotonic() - began < seconds:
            x = torch.randn(rng.choice((0, 1, 2, 5, 8, 16, 17, 32, 48, 63, 70)), 24)
            try:
                y = run(x)
            except Exception as error:
                said[f"error: {type(error).__name__}: {str(error)[:200]}"] += 1
                continue
            said["calls"] += 1
            said["wrong"] += not torch.allclose(y, model(x), rtol=1e-4, atol=1e-5)
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                sizes.append(resident())
                tell()
    tell()


def resident() -> float:
    """Of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---------------------------------------------------------------- what happens to them


@dataclass
class Server:
    process: subprocess.Popen[str]
    output: Path
    kind: str


@dataclass
class Soak:
    """All of them, and what became of them."""

    folder: Path
    rng: random.Random
    until: float
    servers: list[Server] = field(default_factory=list)
    begun: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    ended: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        self.begun += 1
        seconds = max(5.0, self.until - time.monotonic())
        kind = KINDS[self.begun % len(KINDS)]
        output = self.folder / f"said-{self.begun}"
        command = [sys.executable, "-m", "tests.support.soak_serving", "--serve", str(self.folder / "caches")]
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, "--seed", str(self.begun), "--seconds", str(seconds), "--kind", kind],
                cwd=CHECKOUT,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.servers.append(Server(process, output, kind))

    def kill_a_worker(self) -> None:
        if found := [pid for pid, _ in workers_of({server.process.pid for server in self.servers})]:
            kill(self.rng.choice(found))
            self.counts["workers killed"] += 1

    def kill_a_server(self) -> None:
        server = self.servers.pop(self.rng.randrange(len(self.servers)))
        mine = [pid for pid, _ in workers_of({server.process.pid})]
        kill(server.process.pid)
        server.process.wait()
        self.counts["servers killed"] += 1
        over = time.monotonic() + 10
        while any(map(lives, mine)) and time.monotonic() < over:
            time.sleep(0.05)
        self.counts["workers that outlived their parent"] += sum(map(lives, mine))
        if (told := last_said(server.output.read_text())) is not None:
            self.ended.append(told)
        self.begin()

    def hear(self) -> None:
        for server in self.servers:
            status = server.process.wait(120)
            text = server.output.read_text()
            told = None if status else last_said(text)
            self.ended.append(told or {"kind": server.kind, "died": status, "text": text[-2000:]})

    def result(self) -> dict[str, Any]:
        calls: Counter[str] = Counter()
        for said in self.ended:
            calls.update(said.get("said", {}))
        grew = [said["grew"] for said in self.ended if said.get("grew") is not None]
        return {
            **self.counts,
            "servers": self.begun,
            "died": [said for said in self.ended if "died" in said],
            "calls": calls.pop("calls", 0),
            "wrong": calls.pop("wrong", 0),
            "errors": dict(calls),
            "most_grown_mib": max(grew, default=None),
            "variant_calls": sum(said.get("stats", {}).get("variant_calls", 0) for said in self.ended),
            "padded_calls": sum(said.get("stats", {}).get("padded_calls", 0) for said in self.ended),
            "worker_compiles": sum(said.get("stats", {}).get("worker_compiles", 0) for said in self.ended),
            "loaded_ahead": sum(said.get("stats", {}).get("loaded_ahead", 0) for said in self.ended),
        }


def last_said(text: str) -> dict[str, Any] | None:
    """What a server has told last, as far as that is whole."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(told := json.loads(line), dict):
                return told
    return None


def workers_of(parents: set[int]) -> list[tuple[int, int]]:
    """Workers that live, with their parents."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents and WORKER in (entry / "cmdline").read_bytes():
                found.append((int(entry.name), parent))
        except OSError:
            continue
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def soak(seconds: float, servers: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Soak(Path(folder), rng, time.monotonic() + seconds)
        for _ in range(servers):  # all at once: they race for the same code
            made.begin()
        while time.monotonic() < made.until - 5:
            time.sleep(rng.uniform(0.05, 8.0))  # a compile takes some seconds: some end, and some do not
            made.kill_a_worker()
            if rng.random() < 0.2:
                made.kill_a_server()
        made.hear()
        return made.result()


def right(result: dict[str, Any]) -> bool:
    grown = result["most_grown_mib"]
    return (
        result["calls"] > 0
        and not (result["wrong"] or result["errors"] or result["died"])
        and not result.get("workers that outlived their parent")
        and (grown is None or grown < GROWS)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="plain", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.seed, args.seconds, args.kind)
        return 0
    result = soak(args.seconds, args.servers, args.seed)
    print(json.dumps(result, indent=2))
    if args.json is not None:
        import torch

        from tests.support.commit import commit

        versions = {"torch": torch.__version__, "python": sys.version.split()[0], "commit": commit()}
        said = {"soak": "serving", "seconds": args.seconds, "seed": args.seed, "at_once": args.servers, **versions}
        args.json.write_text(json.dumps({**said, **result}, indent=2) + "\n")
    return 0 if right(result) else 1


if __name__ == "__main__":
    sys.exit(main())
