"""Do ordinary architectures run, and are they right? Some fifty models from torchvision, timm and transformers.

Of the usual size where they are small, else of a few layers; random weights, dropout off, fetched from nowhere. Each
in a process of its own, float32 without TF32:

inference      four batch sizes in turn, the caller holds the last output
training       gradients of two backward passes, the outputs held, then an optimizer's step; in training mode

Every step runs eagerly first, with the same weights and inputs, and outputs and gradients are compared. "worst" is the
largest relative difference. A step is wrong above 1e-3; where one is, or raises, torch.compile's own code runs the same
loop ("inductor"), and what counts is three times its difference. "in graphs": percent of the kernels of one more step
that a CUDA graph launched, in training of a forward, the loss, which is eager, and its backward. "stock" is
torch.compile(mode="reduce-overhead"), its steps that raised or were wrong.

    python benchmarks/zoo.py --json zoo.json --jobs 16
    python benchmarks/zoo.py --only resnet18 MixtralForCausalLM --no-stock
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Call, Column, Results, answer, arguments, in_own_process, worst_difference
from models import kernels, profiled_kernels

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("model", "model"),
    Column("mode", "mode"),
    Column("steps", "steps"),
    Column("raised", "raised"),
    Column("wrong", "wrong"),
    Column("worst", "worst"),
    Column("in_graphs", "in graphs %", 1),
    Column("stock_raised", "stock raised"),
    Column("stock_wrong", "stock wrong"),
    Column("inductor", "inductor"),
    Column("why", "why"),
)
MODES = ("inference", "training")
SIZES = (4, 2, 3, 8)
STEPS = 6
BOUND = 1e-3
SECONDS = 420  # of one process


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """`inputs` makes those of so many rows."""

    module: torch.nn.Module
    inputs: Callable[[int], dict[str, torch.Tensor]]


def image(library: str, name: str, size: int, device: str) -> Model:
    if library == "timm":
        module = importlib.import_module("timm").create_model(name, pretrained=False, num_classes=10)
    else:
        none = {"weights": None, **({"weights_backbone": None} if library else {})}
        module = getattr(importlib.import_module(f"torchvision.models{library}"), name)(**none)
    module = module.to(device)
    argument = next(iter(inspect.signature(module.forward).parameters))
    return Model(module, lambda rows: {argument: torch.randn(rows, 3, size, size, device=device)})


# what the configurations of transformers call these
_SMALL: dict[str, Any] = {
    "hidden_size": 128, "d_model": 128, "n_embd": 128, "dim": 128, "embedding_size": 128,
    "intermediate_size": 256, "d_ff": 256, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "hidden_dim": 256,
    "ffn_dim": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "d_kv": 32, "head_dim": 32,
    "vocab_size": 1000, "max_position_embeddings": 64, "n_positions": 64, "max_target_positions": 64,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "state_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "use_cache": False, "image_size": 64, "patch_size": 16, "num_labels": 10, "word_embed_proj_dim": 128,
    "attention_window": 16,
}  # fmt: skip
_OFF = ("dropout", "_pdrop", "drop_prob", "drop_path", "dropout_rate", "drop_path_rate", "dropout_prob", "layerdrop")


def transformer(name: str, device: str) -> Model:
    """`name` is a class of transformers; its configuration shrinks wherever it knows a field."""
    made = importlib.import_module("transformers")
    kind = getattr(made, name)
    config = kind.config_class()
    for key, value in _SMALL.items():
        if isinstance(getattr(config, key, None), int | float | bool | None.__class__) and hasattr(config, key):
            with contextlib.suppress(Exception):
                setattr(config, key, value)
    for key in list(vars(config)):
        if key.endswith(_OFF) and isinstance(getattr(config, key), float | int):
            setattr(config, key, 0.0)
    if isinstance(vars(config).get("layer_types"), list):
        config.layer_types = config.layer_types[:2]
    module = kind(config).to(device)
    if kind.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 64)
        return Model(module, lambda rows: {"pixel_values": torch.randn(rows, 3, side, side, device=device)})

    def inputs(rows: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 1000, (rows, 32), device=device)
        return {"input_ids": ids, **({"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {})}

    return Model(module, inputs)


_VISION = {
    "": ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "densenet121", "vgg11_bn",
         "squeezenet1_1", "shufflenet_v2_x0_5", "regnet_y_400mf", "mnasnet0_5", "convnext_tiny", "swin_t", "vit_b_32"),
    ".segmentation": ("lraspp_mobilenet_v3_large", "fcn_resnet50"),
    "timm": ("mixer_s32_224", "mobilevit_xxs", "convnextv2_atto", "poolformer_s12", "xcit_nano_12_p16_224",
             "edgenext_xx_small", "ghostnet_100", "gmlp_s16_224", "resmlp_12_224", "pit_ti_224",
             "tf_efficientnetv2_b0"),
}  # fmt: skip
_TEXT = (
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "GemmaForCausalLM", "PhiForCausalLM", "StableLmForCausalLM", "MixtralForCausalLM",
    "BloomForCausalLM", "FalconForCausalLM", "T5ForConditionalGeneration", "BartForConditionalGeneration",
    "DistilBertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM", "AlbertForMaskedLM", "MPNetForMaskedLM",
    "DebertaV2ForMaskedLM", "FNetForMaskedLM", "ConvBertForMaskedLM", "MobileBertForMaskedLM", "MambaForCausalLM",
    "XGLMForCausalLM", "ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification",
    "CLIPVisionModelWithProjection",
)  # fmt: skip
_SIDES = {"lraspp_mobilenet_v3_large": 128, "fcn_resnet50": 64}  # of images, 224 otherwise

MODELS: dict[str, Callable[[str], Model]] = {
    **{
        name: partial(image, library, name, _SIDES.get(name, 224))
        for library, names in _VISION.items()
        for name in names
    },
    **{name: partial(transformer, name) for name in _TEXT},
}


def model_of(name: str, mode: str, device: str) -> Model:
    torch.manual_seed(0)
    model = MODELS[name](device)
    model.module.train(mode == "training")
    for module in model.module.modules():
        for attribute in ("p", "drop_prob"):
            if "drop" in type(module).__name__.lower() or "depth" in type(module).__name__.lower():
                with contextlib.suppress(AttributeError):
                    setattr(module, attribute, 0.0)
    return model


def tensors(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors that a model returned."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


# ---------------------------------------------------------------- loops


class Loop:
    """A form's steps beside eager's: how far off each was, and how many raised."""

    def __init__(self, form: Call, model: Model) -> None:
        self.form, self.model = form, model
        self.off: list[float] = []
        self.raised = 0
        self.why: str | None = None
        self.held: Any = None

    def run(self, step: Callable[[Loop, int], list[tuple[list[torch.Tensor], list[torch.Tensor]]]], steps: int) -> None:
        for number in range(steps):
            try:
                pairs = step(self, number)
            except Exception as error:
                self.raised += 1
                self.why = self.why or f"{type(error).__name__}: {error}".splitlines()[0][:300]
                continue
            self.off.append(max((worst_difference(given, wanted) for given, wanted in pairs), default=0.0))

    def wrong(self, bound: float) -> int:
        return sum(not off < bound for off in self.off)  # NaN is wrong too


def inference(loop: Loop, number: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    given = loop.model.inputs(SIZES[number % len(SIZES)])
    with torch.no_grad():
        wanted = tensors(loop.model.module(**given))
        got = tensors(loop.form(**given))
    pairs = [(got, wanted)] + ([loop.held] if loop.held is not None else [])
    loop.held = got, wanted
    return pairs


def training(loop: Loop, number: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    batches = [loop.model.inputs(4) for _ in range(2)]
    optimizer = torch.optim.SGD(loop.model.module.parameters(), lr=1e-3)

    def step(form: Call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        optimizer.zero_grad()
        outputs = []
        for given in batches:
            outputs.append(tensors(form(**given)))
            loss_of(outputs[-1]).backward()
        found = [p.grad for p in loop.model.module.parameters() if p.grad is not None]
        return [output.detach() for each in outputs for output in each], found

    wanted, wanted_gradients = step(loop.model.module)
    wanted_gradients = [gradient.clone() for gradient in wanted_gradients]
    got, got_gradients = step(loop.form)
    if len(got_gradients) != len(wanted_gradients):
        raise RuntimeError(f"{len(got_gradients)} gradients, and eagerly {len(wanted_gradients)}")
    pairs = [(got, wanted), (got_gradients, wanted_gradients)] + ([loop.held] if loop.held is not None else [])
    loop.held = got, wanted
    optimizer.step()
    return pairs


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


def compiled(form: str, module: torch.nn.Module) -> Call:
    if form == "multigraph":
        return torch.compile(module, backend=multigraph, options={"on_failure": "raise"})
    return torch.compile(module, mode="reduce-overhead" if form == "stock" else None)


def loop_of(form: str, name: str, mode: str, device: str) -> Loop:
    torch._dynamo.reset()
    model = model_of(name, mode, device)
    loop = Loop(compiled(form, model.module), model)
    loop.run(inference if mode == "inference" else training, STEPS)
    return loop


def measured(form: str, name: str, mode: str, device: str) -> dict[str, Any]:
    """One form's loop over one model, and Inductor's where there is something to explain."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    loop = loop_of(form, name, mode, device)
    worst, bound = max(loop.off, default=0.0), BOUND
    told: dict[str, Any] = {"steps": STEPS, "raised": loop.raised, "why": loop.why, "worst": f"{worst:.1e}"}
    if form == "multigraph" and device == "cuda" and not loop.raised:
        told["in_graphs"] = share(loop.model, loop.form, mode)
        told["counts"] = {key: value for key, value in multigraph_backend.stats().items() if value}
    if loop.raised or loop.wrong(bound):
        held = loop_of("inductor", name, mode, device)
        theirs = max(held.off, default=0.0)
        bound = max(bound, 3 * theirs)
        told["inductor"] = f"raised {held.raised}: {held.why}" if held.raised else f"{theirs:.1e}"
        told["inductor_raised"] = held.raised
    told["wrong"] = loop.wrong(bound)
    if told["wrong"]:
        told["why"] = told["why"] or f"off by {worst:.1e}"
    return told


def share(model: Model, form: Call, mode: str) -> float | None:
    events: list[Mapping[str, Any]] = []
    given = model.inputs(4)
    model.module.zero_grad()
    with profiled_kernels(events), torch.set_grad_enabled(mode == "training"):
        output = tensors(form(**given))
        if mode == "training":
            loss_of(output).backward()
    return kernels(events).percent()


# ---------------------------------------------------------------- all


def row_of(name: str, mode: str, number: int, args: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """What is said of a model, by a process for each form."""
    words = ["--only", name, "--modes", mode, "--device", args.device, "--threads", str(args.threads)]
    ask = partial(in_own_process, str(Path(__file__).resolve()), seconds=SECONDS)
    row, error = ask([*words, "--gpu", str(number), "--form", "multigraph"])
    row = row or {}
    if error is None and (row["raised"] or row["wrong"]) and not row.get("inductor_raised"):
        error = row["why"]
    if not args.no_stock and args.device == "cuda":
        stock, ended = ask([*words, "--gpu", str(number), "--form", "stock"])
        told = stock or {"raised": "ended", "why": str(ended).splitlines()[0][:300]}
        row |= {f"stock_{key}": told.get(key) for key in ("raised", "wrong", "why")}
    return row, error


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each mode: how many models, the sums of what went wrong with multigraph alone and with stock, the median of
    the share in graphs."""
    found = []
    for mode in MODES:
        ran = [row for row in rows if row["mode"] == mode and not row.get("inductor_raised")]
        shares = [row["in_graphs"] for row in ran if row.get("in_graphs") is not None]
        summary: dict[str, Any] = {
            key: sum(row[key] if isinstance(row[key], int) else STEPS for row in ran if row.get(key) is not None)
            for key in ("steps", "raised", "wrong", "stock_raised", "stock_wrong")
            if any(row.get(key) is not None for row in ran)
        }
        summary["in_graphs"] = statistics.median(shares) if shares else None
        if ran:
            found.append(({"model": f"{len(ran)} models", "mode": mode}, summary))
    return found


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--only", nargs="+", metavar="NAME", choices=tuple(MODELS), help="all")
    made.add_argument("--modes", nargs="+", choices=MODES, help="both")
    made.add_argument("--jobs", type=int, default=1, help="models at a time (1)")
    made.add_argument("--no-stock", action="store_true", help="multigraph and Inductor alone")
    for name, kind in (("--form", str), ("--gpu", int), ("--answer", Path)):
        made.add_argument(name, type=kind, help=argparse.SUPPRESS)  # of a process of one form
    return made


def main() -> int:
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # recordings and a profiler that comes and goes do not agree
    args = parser().parse_args()
    if args.answer is not None:
        torch.set_num_threads(args.threads)
        if args.device == "cuda":
            torch.cuda.set_device(args.gpu % torch.cuda.device_count())
            with profiled_kernels([]):  # it is set up before anything is recorded
                torch.zeros(1, device="cuda")
        return answer(args.answer, partial(measured, args.form, args.only[0], args.modes[0], args.device))
    results = Results("zoo", "Ordinary architectures against eager, and stock's", COLUMNS, args)
    args.device = results.device
    names: Sequence[str] = args.only or list(MODELS)
    with ThreadPoolExecutor(args.jobs) as pool:
        asked = {}
        for number, (mode, name) in enumerate(itertools.product(args.modes or MODES, names)):
            asked[pool.submit(row_of, name, mode, number, args)] = {"model": name, "mode": mode}
        for done in as_completed(asked):
            results.add(asked[done], *done.result())
    results.sort(lambda row: (MODES.index(row["mode"]), names.index(row["model"])))
    for about, row in summaries(results.rows):
        results.add(about, row, headline=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
