"""Several GPUs, one process each: what a step takes, beside stock's and a capture by hand, and how ranks start cold.

decoder    tensor-parallel decoder, 4 layers, d = 4096, 16 tokens, two functional all-reduces a layer
dtensor    four tensor-parallel MLPs through DTensor, d = 4096, 16 tokens
ddp        a training step of 12 blocks, d = 1024, 4 x 1024 tokens, compiled as a whole and block by block
fsdp       the same under FSDP2
ddp zeroed, fsdp zeroed    the same, gradients set to zero behind each step instead of to None
ddp marked, fsdp marked    the same, every form's steps marked (`cudagraph_mark_step_begin`), elsewhere stock's alone
cold       seconds to the decoder's first result with empty caches, for 1, 2, ... ranks

eager                  the program itself
inductor               torch.compile
stock                  torch.compile(mode="reduce-overhead")
by hand                Inductor's code in a torch.cuda.graph, its input copied before each replay
multigraph             torch.compile(backend="multigraph")

All forms of a work share their processes and take turns, rank by rank in the same order; "us" is the median over passes
of some calls in a row and the wait for them, on rank 0. "Stock's best" is the fastest of eager, inductor and stock.
Each form's result is compared with eager's first. Ranks write their answer and end at once: stock would wait forever
for its graphs.

"recorded later" and "unrecorded" count what multigraph's forms recorded, and ran unrecorded, while they were timed;
"copied MiB" is what their replays copied for a step: inputs that do not stay where they are.

    python benchmarks/distributed.py --json distributed.json
    python benchmarks/distributed.py --work decoder --ranks 4
    python benchmarks/distributed.py --work cold --share 2      twice as many ranks as GPUs
    python benchmarks/distributed.py --quick --device cpu
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_programs import Block, Size, inference_form, inference_program, size_of, training_form
from measure import (
    Call,
    Column,
    Goal,
    Results,
    answer,
    arguments,
    attempt,
    difference,
    goals_text,
    interleaved,
    paired_ratio,
    wait,
)

import multigraph_backend
from multigraph_backend.cudagraphs import runtime

WORKS = ("decoder", "dtensor", "ddp", "fsdp", "cold")
VARIED = tuple(f"{work} {how}" for work in ("ddp", "fsdp") for how in ("zeroed", "marked"))  # where they are asked for
FORMS = ("eager", "inductor", "by hand", "multigraph", "stock")
TRAINING_FORMS = (
    "eager",
    *(f"{form}, {part}" for form in ("inductor", "multigraph", "stock") for part in ("whole", "blocks")),
)


def chosen(forms: Sequence[str], only: Sequence[str] | None) -> tuple[str, ...]:
    """Eager, which the others are compared with, and those asked for."""
    return tuple(form for form in forms if only is None or form == "eager" or form in only)


COLUMNS = (
    Column("work", "work"),
    Column("ranks", "ranks"),
    Column("form", "form"),
    Column("us", "us", 1),
    Column("over_hand", "over by hand", 3),
    Column("over_stock", "over stock's best", 3),
    Column("share", "ranks a GPU"),
    Column("seconds", "cold seconds", 2),
    Column("over_one", "over one rank", 2),
    Column("recordings", "recordings"),
    Column("later", "recorded later"),
    Column("unrecorded", "unrecorded"),
    Column("copied_mib", "copied MiB", 1),
    Column("goals", "goals"),
)
FASTER = Goal("over stock", "over_stock", 1.0)
TRAINING_GOALS = (Goal("over stock's best", "over_stock", 0.9),)
GOALS = {
    "decoder": (Goal("over by hand", "over_hand", 1.02), FASTER),
    "dtensor": (FASTER,),
    **dict.fromkeys(("ddp", "fsdp", *VARIED), TRAINING_GOALS),
}
COLD_GOALS = (Goal("over one rank", "over_one", 1.15),)


# ---------------------------------------------------------------- the forms of a work, checked


def inference(work: str, size: Size, device: str, names: Sequence[str], results: dict[str, dict[str, Any]]) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    program = inference_program(work, size, device, dtype)
    torch.manual_seed(1)
    inputs = [torch.randn(size.tokens, size.width, device=device, dtype=dtype) for _ in range(4)]
    forms: dict[str, Call] = {}
    with torch.no_grad():
        expected = [program(x).clone() for x in inputs]
        for name in names:
            if device == "cpu" and name in ("by hand", "stock"):
                continue

            def warm(name: str = name) -> Call:
                form = inference_form(name, program, inputs[0])
                for _ in range(4):
                    for x, wanted in zip(inputs, expected, strict=True):
                        off = difference(form(x), wanted)
                        if not off < 3e-2:  # NaN is wrong too
                            raise RuntimeError(f"wrong numbers: {off:.2e} from eager's")
                return form

            add_form(name, warm, forms, results)
        passes = {name: timed(partial(run_all, form, inputs), size.calls, len(inputs)) for name, form in forms.items()}
        take(passes, size, results)


def run_all(form: Call, inputs: Sequence[torch.Tensor]) -> None:
    for x in inputs:
        form(x)


def training(work: str, size: Size, device: str, names: Sequence[str], results: dict[str, dict[str, Any]]) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    base = torch.nn.Sequential(*(Block(size.width) for _ in range(size.layers))).to(device, dtype)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(4, size.tokens, size.width, device=device, dtype=dtype)
    forms: dict[str, Call] = {}
    expected: list[float] = []
    for name in names:
        if device == "cpu" and name.startswith("stock"):
            continue

        def warm(name: str = name) -> Call:
            step = training_form(name, base, work, x)
            losses = [float(step()) for _ in range(6)]
            if not expected:
                expected.extend(losses)
            off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
            if not off < 2e-2:
                raise RuntimeError(f"wrong numbers: losses {losses}, and eagerly {expected}")
            return step

        add_form(name, warm, forms, results)
    take({name: timed(step, size.calls, 1) for name, step in forms.items()}, size, results)


# ---------------------------------------------------------------- measuring on all ranks alike


def agreed(error: str | None) -> str | None:
    """The first error of any rank."""
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, error, group=control())
    return next((entry for entry in every if entry is not None), None)


_control: list[Any] = []


def control() -> Any:
    """A group over gloo, for what ranks say to each other beside the work."""
    if not _control:
        _control.append(dist.new_group(backend="gloo"))
    return _control[0]


def add_form(name: str, warm: Callable[[], Call], forms: dict[str, Call], results: dict[str, dict[str, Any]]) -> None:
    before = multigraph_backend.stats()["recordings"]
    form, error = attempt(warm)
    wait()
    recordings = multigraph_backend.stats()["recordings"] - before
    if name.startswith("multigraph") and torch.cuda.is_initialized() and not recordings:
        error = error or f"RuntimeError: nothing was recorded:\n{multigraph_backend.explain()}"
    error = agreed(error)
    results[name] = {"error": error, "recordings": recordings}
    if error is None and form is not None:
        forms[name] = form


def timed(call: Callable[[], object], calls: int, each: int) -> Callable[[], float]:
    def one() -> float:
        wait()
        dist.barrier(group=control())
        began = time.perf_counter()
        for _ in range(max(1, calls // each)):
            call()
        wait()
        return (time.perf_counter() - began) * 1e6 / (max(1, calls // each) * each)

    return one


def counted(one: Callable[[], float], row: dict[str, Any], steps: int) -> Callable[[], float]:
    """A pass that notes what recordings did meanwhile."""
    row.update(later=0, unrecorded=0, copied_mib=0.0)

    def run() -> float:
        before, copied = multigraph_backend.stats(), copied_bytes()
        us = one()
        after = multigraph_backend.stats()
        row["later"] += after["recordings"] - before["recordings"]
        row["unrecorded"] += after["unrecorded_pieces"] - before["unrecorded_pieces"]
        row["copied_mib"] = max(copied_bytes() - copied, 0) / steps / (1 << 20)
        return us

    return run


def copied_bytes() -> int:
    """What replays have copied into their recordings, of those recordings that are there."""
    nodes = [node for tree in runtime.trees() for node in tree.root.below()]
    return sum(
        node.calls * sum(b.nbytes for b in node.recording.buffers) for node in nodes if node.recording is not None
    )


def take(passes: Mapping[str, Callable[[], float]], size: Size, results: dict[str, dict[str, Any]]) -> None:
    watched = {
        name: counted(one, results[name], size.calls) if name.startswith("multigraph") else one
        for name, one in passes.items()
    }
    taken = interleaved(watched, size.rounds)
    stock = [name for name in passes if name != "by hand" and not name.startswith("multigraph")]
    best = min(stock, key=lambda name: statistics.median(taken[name])) if stock else None
    for name, values in taken.items():
        row = results[name]
        row["us"] = statistics.median(values)
        if best is not None:
            row["over_stock"] = paired_ratio(values, taken[best])
        if "by hand" in taken:
            row["over_hand"] = paired_ratio(values, taken["by hand"])


# ---------------------------------------------------------------- one rank


def rank_program(args: argparse.Namespace) -> int:
    rank, ranks = args.rank
    torch.set_num_threads(args.threads)
    work, size = args.work[0], size_of(args.work[0], args.quick)
    settings: dict[str, Any] = {}
    if args.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        settings = {"device_id": device} if args.share == 1 else {}
    backend = "nccl" if args.device == "cuda" and args.share == 1 else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120), **settings)
    results: dict[str, dict[str, Any]] = {}

    def measured() -> dict[str, dict[str, Any]]:
        if work == "cold":
            results["multigraph"] = cold(size, args.device)
        elif work.startswith(("ddp", "fsdp")):
            training(work, size, args.device, chosen(TRAINING_FORMS, args.only), results)
        else:
            inference(work, size, args.device, chosen(FORMS, args.only), results)
        return results

    answer(args.answer.with_suffix(f".{rank}"), measured)
    sys.stdout.flush()
    os._exit(0)  # stock's graphs hold collectives: the group's destruction would wait for them forever


def cold(size: Size, device: str) -> dict[str, Any]:
    """Seconds to the first result, with caches that are empty and shared by all ranks."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    program = inference_program("decoder", size, device, dtype)
    x = torch.randn(size.tokens, size.width, device=device, dtype=dtype)
    with torch.no_grad():
        expected = program(x)
        wait()
        dist.barrier(group=control())
        began = time.perf_counter()
        output = torch.compile(program, backend="multigraph", dynamic=False, options={"on_failure": "raise"})(x)
        wait()
        seconds = time.perf_counter() - began
    off = difference(output, expected)
    if not off < 3e-2:
        raise RuntimeError(f"wrong numbers: {off:.2e} from eager's")
    return {"seconds": seconds, "error": None, "waited": multigraph_backend.stats()["waited_for_ranks"]}


@contextlib.contextmanager
def _ranks(work: str, ranks: int, args: argparse.Namespace, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if work == "cold":
        environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    started = []
    for rank in range(ranks):
        words = ["--work", work, "--rank", str(rank), str(ranks), "--answer", str(folder / "answer")]
        words += [
            "--device",
            args.device,
            "--share",
            str(args.share),
            "--threads",
            str(args.threads),
            *(["--quick"] if args.quick else []),
        ]
        words += [word for name in args.only or () for word in ("--only", name)]
        with (folder / f"log.{rank}").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve()), *words],
                    env=environ,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def on_ranks(work: str, ranks: int, args: argparse.Namespace, seconds: float) -> list[dict[str, dict[str, Any]]]:
    """What each rank measured.  Raises RuntimeError where one did not."""
    import json

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deadline = time.monotonic() + seconds
        with _ranks(work, ranks, args, folder) as started:
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.1))
        found = []
        for rank in range(ranks):
            path = folder / f"answer.{rank}"
            if not path.exists():
                log = (folder / f"log.{rank}").read_text(errors="replace").splitlines()[-12:]
                raise RuntimeError(f"rank {rank} has no answer after {seconds:.0f} s: " + "\n".join(log))
            told = json.loads(path.read_text())
            if told["error"] is not None:
                raise RuntimeError(f"rank {rank}: {told['error']}")
            found.append(told["value"])
        return found


# ---------------------------------------------------------------- all


def add_rows(work: str, ranks: int, args: argparse.Namespace, results: Results, seconds: float) -> None:
    found, error = attempt(lambda: on_ranks(work, ranks, args, seconds)[0])
    for form, row in (found or {"multigraph": {"error": error}}).items():
        failed = row.pop("error")
        if form.startswith("multigraph") and args.device == "cuda":
            row["goals"] = goals_text(GOALS[work], row)
        results.add({"work": work, "ranks": ranks, "form": form}, row, failed, headline=True)


def add_cold(counts: Sequence[int], args: argparse.Namespace, results: Results, seconds: float) -> None:
    one: float | None = None
    for ranks in counts:
        told, error = attempt(partial(on_ranks, "cold", ranks, args, seconds))
        row: dict[str, Any] = {}
        if told is not None:
            row["seconds"] = max(rank["multigraph"]["seconds"] for rank in told)
            one = one or row["seconds"]
            row["over_one"] = row["seconds"] / one
            if ranks > 1:
                row["goals"] = goals_text(COLD_GOALS, row)
        about = {"work": "cold", "ranks": ranks, "form": "multigraph"}
        results.add({**about, "share": args.share} if args.share > 1 else about, row, error, headline=True)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--work", nargs="+", choices=(*WORKS, *VARIED), help="all of the first kind")
    made.add_argument("--ranks", type=int, metavar="N", help="one for each GPU (2, where there are as many)")
    made.add_argument(
        "--share", type=int, default=1, metavar="N", help="ranks on each GPU, over gloo; for cold starts (1)"
    )
    made.add_argument("--only", action="append", metavar="FORM", help="eager and the form of this name (all)")
    made.add_argument("--seconds", type=float, default=100, help="of the processes of one work at most (100)")
    made.add_argument("--rank", nargs=2, type=int, help=argparse.SUPPRESS)  # of a process: its rank, how many there are
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> int:
    args = parser().parse_args()
    if args.rank is not None:
        return rank_program(args)
    results = Results("distributed", "Several GPUs: a step on all ranks, beside stock's", COLUMNS, args)
    args.device = results.device
    gpus = torch.cuda.device_count() * args.share if args.device == "cuda" else 2
    ranks = args.ranks or min(gpus, 2)
    if ranks > gpus and args.device == "cuda":
        parser().error(f"--ranks: there are GPUs for {gpus}")
    if args.share > 1 and args.work != ["cold"]:
        parser().error("--share: for --work cold alone")
    for work in args.work or (WORKS[:1] if args.quick else WORKS):
        if work == "cold":
            add_cold([count for count in (1, 2, 4) if count <= ranks], args, results, args.seconds)
        else:
            add_rows(work, ranks, args, results, args.seconds)
    return results.finish(lambda row: str(row["form"]).startswith("multigraph"))


if __name__ == "__main__":
    sys.exit(main())
