"""What the first call of a model costs: seconds, and the memory of the compile, beside stock's ways to have it cheaper.

Models of transformers with random weights, of real depth and little width, inference and training, each pair in a
process of its own, in which the forms follow one another. A form has a copy of the model, an empty cache folder and one
thread that compiles, after a throw-away compile of the same model by Inductor.

inductor                  torch.compile
inductor, deduplicated    the same with torch._dynamo.config.use_graph_deduplication: equal parts are one subgraph
inductor, by blocks       what regional compile is: each layer by itself, the rest of the model eager
multigraph                options={"repeat": False}: without bodies
multigraph, repeat        options={"repeat": "always"}: blocks that come again are compiled once
multigraph, auto          as it is by default: where no kernel is cut in two by that
multigraph, tiers         the same with "compile": "background"; later calls are timed when it is known whether the
                          code of the whole graph, which a worker compiles, is faster, and the faster one is there
multigraph, by blocks     each layer by itself
inductor, 8 sizes         eight batch sizes, a static compile each
multigraph, 8 sizes       the same sizes declared, each with its variant, and the generic graph
multigraph, 8 sizes, repeat    the same with "repeat": "always"; "auto": as it is by default

first s        of the first call, or of one for each size, to the end of its work, with its backward where there is one
cpu s          of that, seconds of this process's and the compilers' processors
cpu/Inductor   that over Inductor's of the same process; of sizes over that of its eight
peak MiB       the most memory that this process has meanwhile, above what it had before
call us        of a later call of the first size; the forms take turns
call/Inductor  paired by turns; not on a GPU, where multigraph's calls are replays and Inductor's are not
GPU us         of a later call's work on a GPU, of the replays
GPU/whole      that over multigraph's without bodies, paired by turns
error          to eager, of results and gradients, relative, of calls behind the first

    python benchmarks/first_calls.py --json first_calls.json
    python benchmarks/first_calls.py --models gpt2 t5 --passes training
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from measure import (
    Column,
    Results,
    answer,
    arguments,
    attempt,
    cpu_seconds,
    fresh_cache,
    gpu_us,
    in_own_process,
    interleaved,
    own_code,
    paired_ratio,
    wait,
    worst_difference,
)
from zoo import loss_of, tensors

import multigraph_backend
from multigraph_backend.region import background, tiers

COLUMNS = (
    Column("model", "model"),
    Column("passes", "passes"),
    Column("form", "form"),
    Column("seconds", "first s", 2),
    Column("cpu_seconds", "cpu s", 2),
    Column("over_inductor", "cpu/Inductor", 3),
    Column("peak_mib", "peak MiB", 0),
    Column("us", "call us", 0),
    Column("call_over_inductor", "call/Inductor", 3),
    Column("gpu_us", "GPU us", 0),
    Column("gpu_over_whole", "GPU/whole", 3),
    Column("error_to_eager", "error", 7),
)
PASSES = ("inference", "training")
SECONDS = 3000.0  # until a process counts as hanging
ROWS = (2, 3, 4, 5, 6, 7, 8, 9)  # batch sizes; 0 and 1 are graphs of their own

Inputs = Callable[[int], dict[str, torch.Tensor]]

_COMMON: dict[str, Any] = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 128, "d_ff": 128, "d_kv": 16, "head_dim": 16,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 64, "n_positions": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    "image_size": 32, "patch_size": 4, "num_labels": 10, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


@dataclass(frozen=True)
class Kind:
    """A class of transformers; `layers` is its depth, or None where `more` says it; `image`: it takes one."""

    name: str
    layers: int | None
    image: bool = False
    more: tuple[tuple[str, Any], ...] = ()


MODELS = {
    "gpt2": Kind("GPT2LMHeadModel", 12),
    "llama": Kind("LlamaForCausalLM", 16),
    "vit": Kind("ViTForImageClassification", 12, image=True),
    "convnext": Kind(
        "ConvNextForImageClassification",
        None,
        image=True,
        more=(("depths", [3, 3, 9, 3]), ("hidden_sizes", [16, 32, 64, 128]), ("patch_size", 2)),
    ),
    "t5": Kind("T5ForConditionalGeneration", 6),
    "mixtral": Kind("MixtralForCausalLM", 8),
}


def model_of(name: str, device: str, quick: bool) -> tuple[torch.nn.Module, Inputs]:
    kind = MODELS[name]
    made = getattr(importlib.import_module("transformers"), kind.name)
    config = made.config_class()
    depth = {} if kind.layers is None else dict.fromkeys(_DEPTH, 2 if quick else kind.layers)
    for key, value in {**_COMMON, **depth, **dict(kind.more)}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    for key in vars(config):
        if key.endswith(("dropout", "_pdrop", "drop_prob", "drop_path_rate", "dropout_rate")):
            setattr(config, key, 0.0)
    if isinstance(vars(config).get("layer_types"), list):
        config.layer_types = config.layer_types[:1] * (depth.get("num_hidden_layers") or 1)
    torch.manual_seed(0)
    module = made(config).to(device)
    if kind.image:
        return module, lambda rows: {"pixel_values": torch.randn(rows, 3, 32, 32, device=device)}

    def inputs(rows: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 512, (rows, 32), device=device)
        return {"input_ids": ids, **({"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {})}

    return module, inputs


# ---------------------------------------------------------------- forms

Call = Callable[..., Any]


def _whole(module: torch.nn.Module, **how: Any) -> Call:
    return torch.compile(own_code(lambda **given: module(**given)), **how)


def _by_blocks(module: torch.nn.Module, **how: Any) -> Call:
    """Each member of a list of equal modules is compiled by itself."""
    for part in list(module.modules()):
        if isinstance(part, torch.nn.ModuleList) and len(part) > 1 and len(set(map(type, part))) == 1:
            for layer in part:
                layer.compile(**how)
    return module


def _ours(**options: Any) -> dict[str, Any]:
    return {"backend": "multigraph", "options": {"on_failure": "raise", **options}}


#: the name of what holds the batch size is the model's first argument
def _sizes(argument: str, **options: Any) -> dict[str, Any]:
    return {**_ours(specialize=[{f"{argument}[0]": list(ROWS)}], **options), "dynamic": None}


@contextlib.contextmanager
def _deduplicated() -> Iterator[None]:
    with torch._dynamo.config.patch(use_graph_deduplication=True):
        yield


@dataclass(frozen=True)
class Form:
    """`make` compiles a model, given the name of its first argument; `around` is in force while it is called first;
    `settle` is given a call that is made until later ones are timed."""

    make: Callable[[torch.nn.Module, str], Call]
    sizes: tuple[int, ...] = ROWS[:1]
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    settle: Callable[[Callable[[], object]], None] = lambda call: None


def _until_tried(call: Callable[[], object]) -> None:
    """Until it is known which of two tiers stays; at most as long as that takes where there are two."""
    for _ in range(tiers.CALLS + 8):
        call()
    background.wait()
    for _ in range(tiers.MOST):
        counts = multigraph_backend.stats()
        if counts["whole_graphs_taken"] + counts["whole_graphs_refused"]:
            return
        call()


FORMS: dict[str, Form] = {
    "inductor": Form(lambda module, argument: _whole(module)),
    "inductor, deduplicated": Form(lambda module, argument: _whole(module), around=_deduplicated),
    "inductor, by blocks": Form(lambda module, argument: _by_blocks(module, backend="inductor")),
    "multigraph": Form(lambda module, argument: _whole(module, **_ours(repeat=False))),
    "multigraph, repeat": Form(lambda module, argument: _whole(module, **_ours(repeat="always"))),
    "multigraph, auto": Form(lambda module, argument: _whole(module, **_ours(repeat="auto"))),
    "multigraph, tiers": Form(
        lambda module, argument: _whole(module, **_ours(compile="background")), settle=_until_tried
    ),
    "multigraph, by blocks": Form(lambda module, argument: _by_blocks(module, **_ours())),
    "inductor, 8 sizes": Form(lambda module, argument: _whole(module, dynamic=False), ROWS),
    "multigraph, 8 sizes": Form(lambda module, argument: _whole(module, **_sizes(argument, repeat=False)), ROWS),
    "multigraph, 8 sizes, repeat": Form(
        lambda module, argument: _whole(module, **_sizes(argument, repeat="always")), ROWS
    ),
    "multigraph, 8 sizes, auto": Form(lambda module, argument: _whole(module, **_sizes(argument)), ROWS),
}
QUICK = ("inductor", "inductor, by blocks", "multigraph, repeat")
BESIDE = {name: "inductor, 8 sizes" if "sizes" in name else "inductor" for name in FORMS}


# ---------------------------------------------------------------- one process


def measured(device: str, name: str, training: bool, rounds: int, quick: bool, forms: list[str]) -> dict[str, Any]:
    """The values of each form's row, or an "error"."""
    torch._dynamo.config.recompile_limit = 4 * len(ROWS)
    original, inputs = model_of(name, device, quick)
    original.train(training)
    argument = next(iter(inputs(1)))

    def step(module: torch.nn.Module, run: Call, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        if not training:
            with torch.no_grad():
                return tensors(run(**given))
        module.zero_grad(set_to_none=True)
        found = tensors(run(**given))
        loss_of(found).backward()
        return [*(value.detach() for value in found), *(p.grad for p in module.parameters() if p.grad is not None)]

    def first(form: Form) -> tuple[dict[str, Any], Callable[[], Any]]:
        module = copy.deepcopy(original)
        with fresh_cache(), inductor_config.patch(compile_threads=1), form.around():
            run = form.make(module, argument)
            batches = [inputs(rows) for rows in form.sizes]
            wait()
            held = _lowest()
            started, before = time.perf_counter(), cpu_seconds()
            for given in batches:
                step(module, run, given)
            wait()
            row = {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": cpu_seconds() - before,
                "peak_mib": _most() - held,
            }
            given = inputs(form.sizes[0])
            row["error_to_eager"] = worst_difference(step(module, run, given), step(original, original, given))
            form.settle(partial(step, module, run, given))
        return row, partial(step, module, run, inputs(form.sizes[0]))

    first(FORMS["inductor"])  # imports, and what torch prepares once
    torch._dynamo.reset()
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for form in forms:
        made, error = attempt(partial(first, FORMS[form]))
        rows[form] = {"error": error}
        if made is not None:
            rows[form], calls[form] = made
    for call in calls.values():
        for _ in range(3):
            call()
    taken = interleaved({form: partial(_call_us, call) for form, call in calls.items()}, rounds)
    for form in taken:
        row = rows[form]
        row["us"] = statistics.median(taken[form])
        if (beside := BESIDE[form]) in taken:
            row["over_inductor"] = row["cpu_seconds"] / rows[beside]["cpu_seconds"]
            if device == "cpu":
                row["call_over_inductor"] = paired_ratio(taken[form], taken[beside])
    if device == "cuda":  # of code that is not recorded, more kernels may wait than a queue holds
        replayed = [form for form in taken if form.startswith("multigraph")]
        on_gpu = interleaved(
            {form: gpu_us(calls[form], [()], 200 + 2 * rows[form]["us"]) for form in replayed}, max(3, rounds // 4)
        )
        for form, found in on_gpu.items():
            rows[form]["gpu_us"] = statistics.median(found)
            if "multigraph" in on_gpu:
                rows[form]["gpu_over_whole"] = paired_ratio(found, on_gpu["multigraph"])
    return rows


def _call_us(call: Callable[[], Any]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(3):
        call()
    wait()
    return (time.perf_counter() - started) * 1e6 / 3


def _lowest() -> float:
    """What this process has now, in MiB; from here on the most is counted anew, where Linux lets it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _most() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="some of them (all)")
    parser.add_argument("--passes", choices=PASSES, help="one of the two (both)")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), help="some of them (all)")
    parser.add_argument("--rounds", type=int, default=20, help="of turns in which calls are timed")
    parser.add_argument("--answer", type=Path, help="one model, for the process that asks")
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = args.models or (["gpt2"] if args.quick else list(MODELS))
    forms = args.forms or list(QUICK if args.quick else FORMS)
    rounds = 2 if args.quick else args.rounds
    if args.answer is not None:
        torch.set_num_threads(args.threads)
        return answer(
            args.answer, partial(measured, device, names[0], args.passes == "training", rounds, args.quick, forms)
        )
    results = Results("first_calls", "First calls: what compiling whole models costs", COLUMNS, args)
    for name in names:
        for passes in [args.passes] if args.passes else PASSES[: 1 if args.quick else 2]:
            words = ["--device", device, "--threads", str(args.threads), "--passes", passes, "--models", name]
            words += ["--rounds", str(rounds), *(["--quick"] if args.quick else []), "--forms", *forms]
            rows, failed = in_own_process(os.fspath(Path(__file__).resolve()), words, SECONDS)
            for form in forms:
                row = (rows or {}).get(form, {})
                error = row.pop("error", None) or failed
                results.add({"model": name, "passes": passes, "form": form}, row, error)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
