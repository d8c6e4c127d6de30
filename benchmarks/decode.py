"""A step of decoding beside a loop of CUDA graphs that is written by hand: all forms in one process, in turns.

The models are transformers' language models over the static cache of `examples/server`: its small one ("chat"), whose
steps take less than a millisecond, and one of the shapes of Llama 1B in bfloat16. A call is one token for each of 1, 8
or 64 conversations, and is waited for, as a loop that chooses the next token must.

multigraph          one trace, a variant for each number of rows, CUDA graphs on a GPU
multigraph, sealed  the same compiled in place (`model.compile`), without torch's own record of its overhead, and with
                    guards that all calls have met checked no more while it is timed
                    (`torch.compiler.set_stance(skip_guard_eval_unsafe=True)`), as a static loop checks none
multigraph, inputs guarded   as the first, with guards of what comes with a call alone, none of modules and parameters
                    (`"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe`)
multigraph, whole   as the first, every layer compiled (`"repeat": False`)
multigraph, ahead   what torch's `aot_compile` makes of multigraph: one for a single row and one for all other numbers
                    of rows, called without guards, and past Dynamo; the caller tells the two apart
inductor dynamic    torch.compile(dynamic=True)
reduce-overhead     torch.compile(dynamic=False, mode="reduce-overhead")
static loop         written by hand: Inductor's code for each size, captured in a CUDA graph of its own, its inputs
                    copied into tensors that stay; on the CPU the same without the capture

us            of a waited call: median over passes; "host us" of one that is not, "GPU us" of its work on the GPU
tokens/s      rows over that time
GPU/whole     GPU us over those of the form in which every layer is compiled, paired by turns
over static   tokens a second over the static loop's, the median of pairs of one round; "over dynamic" likewise
worst         largest relative difference from eager

    python benchmarks/decode.py --json decode.json         needs transformers (`pip install "multigraph[server]"`)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import (
    CHECKOUT,
    Column,
    Goal,
    Pass,
    Results,
    answer,
    arguments,
    end_to_end_us,
    goals_text,
    gpu_us,
    host_us,
    in_own_process,
    interleaved,
    own_code,
    paired_ratio,
    worst_difference,
)
from serving import StaticLoop

sys.path.insert(0, str(CHECKOUT / "examples" / "server"))

COLUMNS = (
    Column("model", "model"),
    Column("rows", "rows"),
    Column("form", "form"),
    Column("us", "us", 1),
    Column("host_us", "host us", 1),
    Column("gpu_us", "GPU us", 1),
    Column("gpu_over_whole", "GPU/whole", 3),
    Column("tokens_per_s", "tokens/s", 0),
    Column("over_static", "over static", 3),
    Column("over_dynamic", "over dynamic", 3),
    Column("worst", "worst", 7),
    Column("goals", "goals"),
)
SEALED = "multigraph, sealed"
INPUTS_GUARDED = "multigraph, inputs guarded"
AHEAD = "multigraph, ahead"
WHOLE = "multigraph, whole"
OURS = ("multigraph", SEALED, INPUTS_GUARDED, AHEAD, WHOLE)
STATIC = "static loop"
DYNAMIC = "inductor dynamic"
FORMS = (*OURS, DYNAMIC, "reduce-overhead", STATIC)
ROWS = (1, 8, 64)
LENGTH = 256  # positions of the cache
MODELS = {"cpu": ("chat",), "cuda": ("chat", "Llama 1B")}
SECONDS = 1500.0  # of one process
SHORT_US = 1000.0  # a static loop's step below which less is asked
WARM_UP = 12  # calls of each form and size

Call = Callable[..., torch.Tensor]


def language_model(name: str, device: str, quick: bool) -> Any:
    from slot_model import language_models
    from transformers import LlamaConfig, LlamaForCausalLM

    if name == "chat":
        return language_models(device, quick)["chat"]
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def compiled_as(form: str, model: Any, rows: tuple[int, ...], device: str, quick: bool) -> Call:
    """A form of its own code, over a slot model of its own that shares weights and cache."""
    from slot_model import SlotModel

    own: Any = type("SlotModel", (SlotModel,), {"forward": own_code(SlotModel.forward)})
    mine = own.__new__(own)
    mine.__dict__.update({name: value for name, value in model.__dict__.items() if name != "_compiled_call_impl"})
    backend = "aot_eager" if quick else "inductor"
    if form in OURS:
        options: dict[str, Any] = {
            "specialize": [{"input_ids[0]": list(rows), "input_ids[1]": 1}],
            "compiler": backend,
        }
        if form == WHOLE:
            options["repeat"] = False
        if form == INPUTS_GUARDED:
            options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        if form == SEALED:
            mine.compile(backend="multigraph", dynamic=True, options=options)
            return mine  # type: ignore[no-any-return]
        if form == AHEAD:
            return Ahead(mine, options, device)
        made: Call = torch.compile(mine, backend="multigraph", dynamic=True, options=options)
        return made
    if form == "reduce-overhead":
        made = (
            torch.compile(mine, dynamic=False, backend=backend)
            if quick
            else torch.compile(mine, dynamic=False, mode="reduce-overhead")
        )
        return made
    made = torch.compile(mine, backend=backend, dynamic=form == DYNAMIC)
    return StaticLoop(made, device) if form == STATIC else made


class Ahead:
    """A model that was compiled ahead of time, for one row and for several: Dynamo takes a size of 1 for a constant."""

    def __init__(self, model: Any, options: dict[str, Any], device: str) -> None:
        self._model = model
        self._one, self._several = (self._made(options, steps(rows, 256, device)[0]) for rows in (1, 3))

    def _made(self, options: dict[str, Any], example: tuple[torch.Tensor, ...]) -> Call:
        forward, options = self._model.forward, {**options, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        with torch._dynamo.config.patch(enable_aot_compile=True):  # off by default in torch 2.11
            compiled = torch.compile(forward, fullgraph=True, backend="multigraph", dynamic=True, options=options)
            made: Any = compiled.aot_compile((example, {}))  # type: ignore[attr-defined]
        made.disable_guard_check()
        return made  # type: ignore[no-any-return]

    def __call__(self, tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return (self._one if tokens.shape[0] == 1 else self._several)(self._model, tokens, *others)


def steps(rows: int, vocabulary: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Calls of so many rows, each at the next position, from the second half of the cache on."""
    chance = torch.Generator().manual_seed(rows)
    made = []
    for at in range(4):
        tokens = torch.randint(0, vocabulary, (rows, 1), generator=chance)
        places = torch.full((rows, 1), LENGTH // 2 + at)
        made.append((tokens.to(device), places.to(device), torch.arange(rows, device=device)))
    return made


def measured(name: str, rows: tuple[int, ...], device: str, quick: bool) -> list[dict[str, Any]]:
    from slot_model import SlotModel

    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.record_runtime_overhead = False
    torch.manual_seed(0)
    model = SlotModel(language_model(name, device, quick), ROWS[-1], LENGTH)
    vocabulary = model.model.config.vocab_size
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        forms = {form: compiled_as(form, model, rows, device, quick) for form in FORMS}
        first = steps(3, vocabulary, device)[0]
        for form in ("multigraph", SEALED, INPUTS_GUARDED, WHOLE, DYNAMIC):
            forms[form](*first)
        for count in reversed(rows):
            calls = steps(count, vocabulary, device)
            expected = [model(*call).clone() for call in calls]
            worst = {}
            for form, run in forms.items():
                mark = torch.compiler.cudagraph_mark_step_begin if form == "reduce-overhead" else lambda: None
                for number in range(WARM_UP):
                    mark()
                    run(*calls[number % len(calls)])
                outputs = []
                for call in calls:
                    mark()
                    outputs.append(run(*call).clone())
                worst[form] = worst_difference(outputs, expected)
            found += timed(name, count, forms, calls, worst, device, quick)
    return found


def timed(
    name: str,
    rows: int,
    forms: dict[str, Call],
    calls: Sequence[tuple[torch.Tensor, ...]],
    worst: dict[str, float],
    device: str,
    quick: bool,
) -> list[dict[str, Any]]:
    rounds = 2 if quick else 15

    def passes(make: Callable[[Call], Pass]) -> dict[str, list[float]]:
        made = {form: make(run) for form, run in forms.items()}
        made[SEALED] = partial(_without_guards, made[SEALED])
        return interleaved(made, rounds)

    waited = passes(lambda run: end_to_end_us(run, calls, 4 if quick else 16))
    hosts = passes(lambda run: host_us(run, calls, 4))
    on_gpu: dict[str, list[float]] = {}
    if device == "cuda":
        lead = 200 + 2 * max(statistics.median(values) for values in hosts.values())
        on_gpu = passes(lambda run: gpu_us(run, calls, lead))
    static = statistics.median(waited[STATIC])
    found = []
    for form, taken in waited.items():
        us = statistics.median(taken)
        row: dict[str, Any] = {
            "model": name,
            "rows": rows,
            "form": form,
            "us": us,
            "host_us": statistics.median(hosts[form]),
            "gpu_us": statistics.median(on_gpu[form]) if on_gpu else None,
            "tokens_per_s": rows * 1e6 / us,
            "over_static": 1 / paired_ratio(taken, waited[STATIC]),
            "over_dynamic": 1 / paired_ratio(taken, waited[DYNAMIC]),
            "worst": worst[form],
        }
        if form in OURS and device == "cuda":
            row["gpu_over_whole"] = paired_ratio(on_gpu[form], on_gpu[WHOLE])
            goals = [Goal("GPU/whole", "gpu_over_whole", 1.01)]
            goals += [Goal("over static", "over_static", 0.9 if static < SHORT_US else 0.97, at_least=True)]
            if rows == 1:
                goals.append(Goal("over dynamic", "over_dynamic", 2, at_least=True))
            row["goals"] = goals_text(goals, row)
        found.append(row)
    return found


def _without_guards(timed: Pass) -> float:
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        return timed()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS["cuda"], help="both, on a GPU; else the small one")
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, help="all; with --quick not the most")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = tuple(sorted(args.rows or (ROWS[:2] if args.quick else ROWS)))
    if args.model is not None:
        torch.set_num_threads(args.threads)
        return answer(args.answer, partial(measured, args.model, rows, args.device, args.quick))
    results = Results("decode", "A step of decoding: microseconds", COLUMNS, args)
    for name in args.models or MODELS[results.device]:
        words = ["--model", name, "--device", results.device, "--threads", str(args.threads), "--rows", *map(str, rows)]
        found, error = in_own_process(__file__, [*words, *(["--quick"] if args.quick else [])], SECONDS)
        if error is not None:
            results.add({"model": name}, {}, error)
        for row in found or []:
            results.add({}, row, headline=row["form"].startswith("multigraph"))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
