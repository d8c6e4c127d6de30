"""How a server's process starts: to its first token, and until every declared size has been called.

The process is that of `examples/server`: its three models, or those of them that are named, and the calls of
`serving.py`. Each form runs in a process with empty caches, and then, in turns with the other forms, in several that
find what it has left: torch's caches, and multigraph's manifest. Their median counts.

eager              nothing is compiled
inductor dynamic   torch.compile(dynamic=True): one piece of code for each number of dimensions that is 1
multigraph         the sizes that requests are padded to, declared: a variant for each, and generic
multigraph, saved  the same, saved by the first process (torch's `aot_compile`: graphs, and which variants were used):
                   the second traces nothing, and loads all code when it calls what it has loaded

first s    from the start of the process, its imports and the models, to the first token of the first request
ready s    until every declared size of each model has been called three times, so often that it is recorded on a GPU
compiled   graphs that AOTAutograd's cache did not have, in that process
warm/cold  ready of later processes over that of the first
over eager  first s of later processes over that of processes that compile nothing, the median of pairs of one turn;
           "over Inductor" likewise over Inductor's later ones
own        what ready of both is above eager's later processes, as a ratio: without what every process needs

Bytecode of modules is kept, as everywhere but where a variable forbids it; where torch was installed without its own,
the processes share a folder for all of it.

    python benchmarks/starts.py --json starts.json         needs transformers (`pip install "multigraph[server]"`)

With --quick nothing generates code (aot_eager): whether it runs, not how fast.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import serving
import torch
from measure import Column, Goal, Results, answer, arguments, goals_text, in_own_process, paired_ratio
from torch._dynamo.utils import counters

COLUMNS = (
    Column("form", "form"),
    Column("cold_first_s", "cold first s", 2),
    Column("cold_ready_s", "ready s", 2),
    Column("cold_compiled", "compiled"),
    Column("processes", "processes"),
    Column("first_s", "warm first s", 2),
    Column("ready_s", "ready s", 2),
    Column("compiled", "compiled"),
    Column("warm_over_cold", "warm/cold", 3),
    Column("own_over_cold", "own", 3),
    Column("over_eager", "over eager", 2),
    Column("over_inductor", "over Inductor", 2),
    Column("goals", "goals"),
)
EAGER, INDUCTOR, OURS, SAVED = FORMS = ("eager", "inductor dynamic", "multigraph", "multigraph, saved")
MODELS = ("chat", "draft", "code")
GOALS = {
    "cuda": (Goal("warm/cold", "warm_over_cold", 0.10), Goal("first over eager", "over_eager", 1.1)),
    "cpu": (Goal("warm/cold", "warm_over_cold", 0.05), Goal("first over eager", "over_eager", 1.1)),
}
SECONDS = 900.0  # of one process

Call = Callable[..., torch.Tensor]


class Saved:
    """A slot model compiled ahead of time, a file for each kind of call: Dynamo takes a size of 1 for a constant.

    `folder` has the files, or gets them (`save`).
    """

    def __init__(self, model: torch.nn.Module, device: str, quick: bool, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._made: dict[str, Any] = {}
        for name, (rows, tokens) in {"prefill": (1, 8), "step": (3, 1), "step of one": (1, 1)}.items():
            path = folder / name
            if path.exists():
                self._made[name] = torch.compiler.load_compiled_function(io.BytesIO(path.read_bytes()))
            else:
                self._made[name] = self._compiled(rows, tokens, device, quick)
            self._made[name].disable_guard_check()

    def _compiled(self, rows: int, tokens: int, device: str, quick: bool) -> Any:
        options = {**serving.declared(quick), "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        places = torch.arange(tokens, device=device).expand(rows, tokens).contiguous()
        example = torch.zeros_like(places), places, torch.arange(rows, device=device)
        forward: Any = self._model.forward
        made: Any = torch.compile(forward, fullgraph=True, backend="multigraph", dynamic=True, options=options)
        with torch.inference_mode():  # as it is called
            return made.aot_compile((example, {}))

    def __call__(self, input_ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows, tokens = input_ids.shape
        run = self._made["prefill" if tokens > 1 else "step" if rows > 1 else "step of one"]
        made: torch.Tensor = run(self._model, input_ids, *others)
        return made

    def save(self) -> None:
        """What is not there yet."""
        for name, made in self._made.items():
            if not (path := self._folder / name).exists():
                made.save_compiled_function(str(path))


def compiled_as(form: str, folder: Path, model: torch.nn.Module, device: str, quick: bool) -> Call:
    if form == SAVED:
        return Saved(model, device, quick, folder)
    return serving.compiled_as(form, "warm", model, device, quick)


def seconds_since_the_process_began() -> float:
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def measured(form: str, names: Sequence[str], device: str, quick: bool, folder: Path) -> dict[str, Any]:
    """In a process of its own."""
    torch._dynamo.config.enable_aot_compile = True  # off by default in torch 2.11
    models = serving.language_models(device, quick)
    import batching

    def conversations(name: str) -> Any:
        (place := folder / name).mkdir(exist_ok=True)
        model = serving.slot_model(models[name])
        return batching.Conversations(name, model, compiled_as(form, place, model, device, quick), device)

    said: dict[str, Any] = {}
    with torch.inference_mode():
        served = [conversations(name) for name in names]
        first = serving.requests(1, batching.PROMPTS[-1])[0]
        first.new_tokens = 1
        serving.serve(served[0], [first], None)
        said["first_s"] = seconds_since_the_process_began()
        for each in served:
            serving.call_all_sizes(each)
        said["ready_s"] = seconds_since_the_process_began()
        said["compiled"] = sum(counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("miss", "bypass"))
        if form == SAVED:
            for each in served:
                each.compiled.save()
        said["answers"] = [answer for each in served for answer in _answers(each)]
    return said


def _answers(served: Any) -> list[list[int]]:
    asked = serving.requests(12, 16)
    serving.serve(served, asked, None)
    return [request.answer.result() for request in asked]


def without_bytecode() -> bool:
    """Whether each process compiles torch's modules."""
    return not Path(importlib.util.cache_from_source(str(torch.__file__))).exists()


class Process:
    """One form: a folder that its processes share, what the first has needed, and what later ones have."""

    def __init__(self, form: str, models: Sequence[str], device: str, quick: bool, bytecode: Mapping[str, str]) -> None:
        """`bytecode`: variables that say where that lies."""
        self.form, self._ties = form, len(models)
        self._words = ["--form", form, "--device", device, "--models", *models, *(["--quick"] if quick else [])]
        self._place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self._place.name)
        (folder / "saved").mkdir()
        self._words += ["--folder", str(folder / "saved")]
        self._environ = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            **bytecode,
        }
        self.cold: dict[str, Any] = {}
        self.warm: list[dict[str, Any]] = []

    def start(self) -> dict[str, Any]:
        value, error = in_own_process(__file__, self._words, SECONDS, self._environ)
        if error is not None:
            raise RuntimeError(error)
        told: dict[str, Any] = value
        return told

    def row(self, expected: list[list[int]]) -> dict[str, Any]:
        """Medians of the later processes, beside what the first has needed."""
        for told in (self.cold, *self.warm):
            off = sum(mine != theirs for mine, theirs in zip(told["answers"], expected, strict=True))
            if off > self._ties:  # a tie of two tokens may fall otherwise, in each model
                raise AssertionError(f"{off} of {len(told['answers'])} answers are not eager's")
        said = {f"cold_{key}": self.cold[key] for key in ("first_s", "ready_s", "compiled")}
        for key in ("first_s", "ready_s", "compiled"):
            said[key] = statistics.median(told[key] for told in self.warm)
        said["each_first_s"] = [told["first_s"] for told in self.warm]
        return {**said, "processes": len(self.warm), "warm_over_cold": said["ready_s"] / said["cold_ready_s"]}

    def close(self) -> None:
        self._place.cleanup()


def all_started(forms: Sequence[str], args: argparse.Namespace, device: str) -> dict[str, Process | Exception]:
    """Each form's first process, then the later ones of all in turns; in place of a form that fails, its failure."""
    # a process that has ended may have left one of its own that still writes bytecode
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", **({"PYTHONPYCACHEPREFIX": folder.name} if without_bytecode() else {})}
    found: dict[str, Process | Exception] = {}
    models = args.models or (MODELS[1:2] if args.quick else MODELS)
    for turn in range(1 + args.processes):
        for form in forms:
            if turn == 0:
                found[form] = Process(form, models, device, args.quick, bytecode)
            process = found[form]
            if isinstance(process, Exception):
                continue
            try:
                told = process.start()
                seconds = f"first {told['first_s']:.2f} s, ready {told['ready_s']:.2f} s, {told['compiled']} compiled"
                print(f"{form}, {'later' if turn else 'cold'}: {seconds}", file=sys.stderr)
            except Exception as error:
                process.close()
                found[form] = error
                continue
            if turn == 0:
                process.cold = told
            else:
                process.warm.append(told)
    folder.cleanup()
    return found


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=FORMS, help="all; eager always")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="all; with --quick the smallest")
    parser.add_argument("--processes", type=int, default=3, help="later processes of each form, in turns (3)")
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.form is not None:
        torch.set_num_threads(args.threads)
        run = partial(measured, args.form, args.models, args.device, args.quick, args.folder)
        return answer(args.answer, run)
    results = Results("starts", "How a process starts, cold and with what an earlier one has left", COLUMNS, args)
    forms = FORMS if args.only is None else (EAGER, *(name for name in FORMS[1:] if name in args.only))
    started = all_started(forms, args, results.device)
    first: dict[str, dict[str, Any]] = {}

    def row(form: str) -> dict[str, Any]:
        process, eager = started[form], started[EAGER]
        if isinstance(process, Exception):
            raise process
        if isinstance(eager, Exception):
            raise RuntimeError("there is no eager process to compare with") from eager
        told = first[form] = process.row(eager.cold["answers"])
        base = first[EAGER]
        if form != EAGER:
            own = told["ready_s"] - base["ready_s"], told["cold_ready_s"] - base["ready_s"]
            told["own_over_cold"] = own[0] / own[1]
        for key, other in (("over_eager", EAGER), ("over_inductor", INDUCTOR)):
            if form != other and other in first:
                told[key] = paired_ratio(told["each_first_s"], first[other]["each_first_s"])
        if form in (OURS, SAVED) and not args.quick:
            told["goals"] = goals_text(GOALS[results.device], told)
        return told

    for form in forms:
        results.row({"form": form}, partial(row, form), headline=True)
    for process in started.values():
        if isinstance(process, Process):
            process.close()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
