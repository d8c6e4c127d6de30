"""A server's figures: requests that come at random, continuous batching, forms of the same model.

multigraph          one trace, a variant for each declared size, CUDA graphs on a GPU
multigraph, sealed  the same in place (`model.compile`), without torch's own record of its overhead; once all is
                    compiled, guards that all calls have met are checked no more
                    (`torch.compiler.set_stance(skip_guard_eval_unsafe=True)`), as a static loop checks none
inductor dynamic    torch.compile(dynamic=True)
inductor per shape  torch.compile(dynamic=False): a trace and a compile for each size
reduce-overhead     the same with mode="reduce-overhead": stock's CUDA graphs
static loop         written by hand: Inductor's code for each size, captured in a CUDA graph of its own, its inputs
                    copied into tensors that stay; on the CPU the same without the capture

The model, the cache and the batching are those of `examples/server`, without HTTP, in one thread. Each form has a
process of its own, twice, with one cache folder: what is cold, and what is warm. What is sealed finds the code of the
first form, and is called in the second process alone: until then they are the same.

first s     from the call of torch.compile (which imports Inductor where it is told "inductor"; elsewhere the first call
            does) to the first token of the first request, nothing compiled yet; "warm": in the second process
ready s     until every declared size has been called; "warm" likewise
collect s   Python's full garbage collection once all sizes have been called: what a request would wait for it. Then the
            process's objects are frozen (`gc.freeze()`), as servers do, so that none falls into what is timed
tokens/s    all requests at once, the median of rounds; every answer is held against eager's ("wrong": how many differ)
p50, p99    seconds of a request, Poisson arrivals at 0.7 of that throughput (of this form), of as many rounds
late        recordings that were made meanwhile, after every declared size had been called (multigraph's)
decode us   one step of decoding, without what surrounds it: at 1 row, and at the most rows
stall s     the longest step while nothing was warmed up, with the same arrivals
generic     p99 of generic alone, nothing declared, in a process that begins with its first call; "compiling": the same
            arrivals, as many, while workers compile the variants ("compile": "background"), until all are in use or
            60 s are over; both at 0.7 of generic's throughput
MiB         the process's memory on the GPU, or its largest resident size on the CPU

    python benchmarks/serving.py --json serving.json       needs transformers (`pip install "multigraph[server]"`)

With --quick nothing generates code (aot_eager): whether it runs, not how fast.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import CHECKOUT, Column, Goal, Results, answer, arguments, goals_text, in_own_process, wait

import multigraph_backend

sys.path.insert(0, str(CHECKOUT / "examples" / "server"))

COLUMNS = (
    Column("form", "form"),
    Column("first_s", "first s", 2),
    Column("warm_first_s", "warm", 2),
    Column("ready_s", "ready s", 2),
    Column("warm_ready_s", "warm", 2),
    Column("collect_s", "collect s", 2),
    Column("tokens_per_s", "tokens/s", 0),
    Column("p50_s", "p50 s", 4),
    Column("p99_s", "p99 s", 4),
    Column("recorded_late", "late"),
    Column("decode_1_us", "decode 1 us", 0),
    Column("decode_most_us", "decode most us", 0),
    Column("stall_s", "stall s", 3),
    Column("p99_generic_s", "generic", 4),
    Column("p99_compiling_s", "compiling", 4),
    Column("compiling_over_generic", "ratio", 2),
    Column("mib", "MiB", 0),
    Column("wrong", "wrong"),
    Column("goals", "goals"),
)
SEALED = "multigraph, sealed"
FORMS = ("multigraph", SEALED, "inductor dynamic", "inductor per shape", "reduce-overhead", "static loop")
SECONDS = 3000.0  # of one process
ROUNDS = 7  # of 200 requests; one takes about half a second on a GPU
COMPILING = 60.0  # seconds at most that requests come while workers compile

Call = Callable[..., torch.Tensor]


class StaticLoop:
    """A compiled call for each size, captured with inputs that stay where they are."""

    def __init__(self, compiled: Call, device: str) -> None:
        self.compiled, self.device = compiled, device
        self.sizes: dict[tuple[torch.Size, ...], tuple[list[torch.Tensor], Callable[[], torch.Tensor]]] = {}

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        key = tuple(arg.shape for arg in args)
        if key not in self.sizes:
            self.sizes[key] = self._captured([arg.clone() for arg in args])
        inputs, run = self.sizes[key]
        for mine, arg in zip(inputs, args, strict=True):
            mine.copy_(arg)
        return run()

    def _captured(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
        for _ in range(2):
            output = self.compiled(*inputs)
        if self.device != "cuda":
            return inputs, lambda: self.compiled(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.compiled(*inputs)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return inputs, replay


def declared(quick: bool) -> dict[str, Any]:
    """The options that declare every size of a batch and of a prompt."""
    import batching

    sizes = [
        {"input_ids[0]": list(batching.BATCHES), "input_ids[1]": 1},
        {"input_ids[0]": 1, "input_ids[1]": list(batching.PROMPTS)},
    ]
    return {"specialize": sizes, "compiler": "aot_eager" if quick else "inductor"}


def compiled_as(form: str, phase: str, model: torch.nn.Module, device: str, quick: bool) -> Call:
    backend = "aot_eager" if quick else "inductor"
    if form == "eager":
        return model
    if form in ("multigraph", SEALED):
        options = declared(quick) | ({"specialize": []} if phase == "generic" else {})
        if phase == "compiling":
            options |= {"compile": "background", "workers": {"gpu": True}}
        if form == SEALED:
            torch._dynamo.config.record_runtime_overhead = False
            model.compile(backend="multigraph", dynamic=True, options=options)
            return model
        made: Call = torch.compile(model, backend="multigraph", dynamic=True, options=options)
        return made
    if form == "reduce-overhead" and not quick:
        made = torch.compile(model, dynamic=False, mode="reduce-overhead")
        return made
    made = torch.compile(model, backend=backend, dynamic=form == "inductor dynamic")
    return StaticLoop(made, device) if form == "static loop" else made


def language_models(device: str, quick: bool) -> dict[str, Any]:
    """The server's models; a process that has asked for them calls its sizes, fewer where it is `quick`."""
    import batching
    import slot_model as of_server

    if quick:
        batching.PROMPTS, batching.BATCHES = (16,), (1, 4)
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.specialize_float = True
    found: dict[str, Any] = of_server.language_models(device, quick)
    return found


def slot_model(model: Any) -> Any:
    import batching
    from slot_model import SlotModel

    return SlotModel(model, batching.BATCHES[-1], 256)


def conversations(
    form: str, device: str, quick: bool, phase: str = "warm", made: Callable[..., Call] | None = None
) -> tuple[Any, float]:
    """With the moment at which torch.compile was called.  `made`: makes of the model what is called, as `compiled_as`
    does where it is left out."""
    import batching

    model = slot_model(language_models(device, quick)["draft" if quick else "chat"])
    began = time.perf_counter()
    compiled = made or partial(compiled_as, form, phase)
    return batching.Conversations(form, model, compiled(model, device, quick), device), began


def requests(count: int, most_prompt: int) -> list[Any]:
    from batching import Request
    from load import zipf

    chance = random.Random(0)
    return [
        Request([chance.randrange(256) for _ in range(zipf(chance, 4, most_prompt))], zipf(chance, 2, 32))
        for _ in range(count)
    ]


def serve(served: Any, asked: list[Any], rate: float | None) -> tuple[float, list[float], float]:
    """Seconds in all, of each request, and of the longest step; all at once, or `rate` requests a second."""
    chance, at, arrivals = random.Random(1), 0.0, []
    for request in asked:
        at += 0.0 if rate is None else chance.expovariate(rate)
        arrivals.append((at, request))
    began, longest, done = time.perf_counter(), 0.0, {}
    for request in asked:
        request.answer.add_done_callback(lambda _, request=request: done.update({id(request): time.perf_counter()}))
    pending = list(arrivals)
    while len(done) < len(asked):
        while pending and began + pending[0][0] <= time.perf_counter():
            served.waiting.append(pending.pop(0)[1])
        step = time.perf_counter()
        if served.advance():
            longest = max(longest, time.perf_counter() - step)
        elif pending:
            time.sleep(max(0.0, began + pending[0][0] - time.perf_counter()))
    took = time.perf_counter() - began
    return took, [done[id(request)] - began - at for at, request in arrivals], longest


def call_all_sizes(served: Any) -> None:
    """Every declared size, often enough to be recorded."""
    import batching

    device = served.device
    for rows, tokens in [(rows, 1) for rows in reversed(batching.BATCHES)] + [(1, n) for n in batching.PROMPTS]:
        places = torch.arange(tokens, device=device).expand(rows, tokens).contiguous()
        for _ in range(3):
            served.compiled(torch.zeros_like(places), places, torch.arange(rows, device=device))


def decode_us(served: Any, rows: int, calls: int) -> float:
    zeros = torch.zeros(rows, 1, dtype=torch.long, device=served.device)
    slots, seconds = torch.arange(rows, device=served.device), []
    for _ in range(calls):
        began = time.perf_counter()
        served.compiled(zeros, zeros.clone(), slots)
        if served.device == "cuda":
            wait()
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds)


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def arrivals(served: Any, count: int, most: int, rate: float, rounds: int | None) -> dict[str, Any]:
    """With generic's code and recordings made: `rounds` of requests; None: until all variants are in use."""
    call_all_sizes(served)
    seconds: list[float] = []
    until = time.perf_counter() + COMPILING
    for done in itertools.count(1):
        ready = rounds is None and _all_compiled()  # then this is one more, in which the last are called and recorded
        seconds += serve(served, requests(count, most), rate)[1]
        if ready or done == rounds or (rounds is None and time.perf_counter() > until):
            break
    return {"p99": p99(seconds), "rounds": done, "compiled_in_time": rounds is not None or ready}


def _all_compiled() -> bool:
    regions = multigraph_backend.explain().regions
    return all(variant.state != "compiling" for region in regions for variant in region.variants)


def freeze() -> float:
    """Seconds of a full garbage collection, after which what has survived it is never looked through again."""
    began = time.perf_counter()
    gc.collect()
    seconds = time.perf_counter() - began
    gc.freeze()
    return seconds


def measured(
    form: str, phase: str, device: str, quick: bool, rate: float | None, rounds: int | None = None
) -> dict[str, Any]:
    """`phase`: "cold" and "warm" begin with nothing compiled in the process; "stall" has arrivals at `rate` instead.
    "compiling" and "generic" have such arrivals when generic is ready, the latter `rounds` of them."""
    import batching

    served, began = conversations(form, device, quick, phase)
    count, most = (6, 16) if quick else (200, batching.PROMPTS[-1])
    with torch.inference_mode():
        if phase == "stall":
            return {"stall_s": serve(served, requests(count, most), rate)[2]}
        if phase == "compiling" or (phase == "generic" and rate is not None):
            assert rate is not None
            return arrivals(served, count, most, rate, rounds)
        first = requests(1, most)[0]
        first.new_tokens = 1
        serve(served, [first], None)
        said: dict[str, Any] = {"first_s": time.perf_counter() - began}
        call_all_sizes(served)
        said["ready_s"] = time.perf_counter() - began
        if phase == "cold":
            return said
        if form == SEALED:
            torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        said["collect_s"] = freeze()
        recorded = multigraph_backend.stats()["recordings"]
        taken = []
        for _ in range(1 if quick or form == "eager" else ROUNDS):  # of eager the answers are asked for alone
            asked = requests(count, most)
            taken.append(serve(served, asked, None)[0])
        said["answers"] = [request.answer.result() for request in asked]
        said["tokens_per_s"] = sum(len(tokens) for tokens in said["answers"]) / statistics.median(taken)
        said["rate"] = rate = 0.7 * count / statistics.median(taken)
        if phase == "generic":
            return {"rate": rate}
        seconds = [took for _ in taken for took in serve(served, requests(count, most), rate)[1]]
        said["p50_s"], said["p99_s"] = statistics.median(seconds), p99(seconds)
        if form in ("multigraph", SEALED):
            said["recorded_late"] = multigraph_backend.stats()["recordings"] - recorded
        calls = 5 if quick else 200
        said["decode_1_us"] = decode_us(served, 1, calls)
        said["decode_most_us"] = decode_us(served, batching.BATCHES[-1], calls)
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        said["mib"] = (total - free) / 2**20
    else:
        said["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return said


def row(
    form: str, device: str, quick: bool, expected: list[list[int]], caches: Path, stalls: bool, compiling: bool
) -> dict[str, Any]:
    cache = caches / form.split(",")[0].replace(" ", "-")  # torch's C++ compiler takes no path with a space
    told = partial(in_process, form, device, quick)
    cold = {} if quick or cache.exists() else told("cold", cache)
    warm = told("warm", cache)
    stall = {}
    if stalls and form != SEALED:
        with tempfile.TemporaryDirectory() as empty:
            stall = told("stall", Path(empty), warm["rate"])
    wrong = sum(mine != theirs for mine, theirs in zip(warm.pop("answers"), expected, strict=True))
    if wrong > len(expected) // 20:  # a tie of two tokens may fall otherwise
        raise AssertionError(f"{wrong} of {len(expected)} answers are not eager's")
    renamed = {f"warm_{key}": warm.pop(key) for key in ("first_s", "ready_s")}
    beside = while_compiling(device) if form == "multigraph" and compiling and not quick else {}
    return {**cold, **warm, **renamed, **stall, **beside, "wrong": wrong}


def while_compiling(device: str) -> dict[str, Any]:
    """Requests while workers compile the variants, and the same arrivals at generic alone."""
    told = partial(in_process, "multigraph", device, False)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        rate = told("generic", Path(one))["rate"]
        came = told("compiling", Path(other), rate)
        alone = told("generic", Path(one), rate, came["rounds"])  # the same arrivals, from the same beginning
    found = {key: came[key] for key in ("rounds", "compiled_in_time")}
    found |= {"p99_compiling_s": came["p99"], "p99_generic_s": alone["p99"]}
    found["compiling_over_generic"] = found["p99_compiling_s"] / found["p99_generic_s"]
    found["goals"] = goals_text([Goal("ratio", "compiling_over_generic", 1.2)], found)
    return found


def in_process(
    form: str,
    device: str,
    quick: bool,
    phase: str,
    cache: Path,
    rate: float | None = None,
    rounds: int | None = None,
) -> dict[str, Any]:
    words = ["--form", form, "--phase", phase, "--device", device, *(["--quick"] if quick else [])]
    for name, number in (("--rate", rate), ("--rounds", rounds)):
        words += [] if number is None else [name, str(number)]
    value, error = in_own_process(__file__, words, SECONDS, {"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    if error is not None:
        raise RuntimeError(error)
    said: dict[str, Any] = value
    return said


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=FORMS, help="all; quick: multigraph and static loop")
    parser.add_argument("--while-compiling", action="store_true", help="requests while variants compile, nothing else")
    parser.add_argument("--no-stall", action="store_true", help="leave out the process that nothing was warmed up in")
    parser.add_argument("--no-compiling", action="store_true", help="leave out requests while variants compile")
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.form is not None:
        torch.set_num_threads(args.threads)
        return answer(
            args.answer, partial(measured, args.form, args.phase, args.device, args.quick, args.rate, args.rounds)
        )
    results = Results("serving", "Serving: continuous batching, requests that come at random", COLUMNS, args)
    if args.while_compiling:
        results.row({"form": "multigraph"}, partial(while_compiling, results.device), headline=True)
        return results.finish()
    with tempfile.TemporaryDirectory() as cache:
        expected = in_process("eager", results.device, args.quick, "warm", Path(cache))["answers"]
    with tempfile.TemporaryDirectory() as caches:
        for form in args.only or (("multigraph", "static loop") if args.quick else FORMS):
            said = (results.device, args.quick, expected, Path(caches), not args.no_stall, not args.no_compiling)
            results.row({"form": form}, partial(row, form, *said), headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
