"""Are recorded models right? Ordinary loops over real models, compared with eager, without any step marks.

inference      batch sizes change from call to call, and the caller holds the last output while it makes the next call
training       gradients are accumulated over two or three backward passes, the losses held; then an optimizer's step
checkpointed   the same with activation checkpointing

GPT-2, Llama, BERT and ViT from transformers, of four layers with random weights and dropout off, and a decoder of this
repository; fetched from nowhere. The same weights run eagerly first, at each step, and all outputs, losses and
gradients are compared; float32 without TF32, or bfloat16.

steps         done, with how many that raised ("raised") or gave other numbers ("wrong"); "worst": relative difference
in graphs     percent of the CUDA kernels of a steady step (in training: its first forward and backward) that a CUDA
              graph launched, as torch.profiler sees it
warnings      different ones, in Python's way or in torch's or multigraph's log

Stock is torch.compile(mode="reduce-overhead"), each loop in a process of its own, for some end it. The exit status is
about multigraph's exceptions and numbers alone.

    python benchmarks/models.py --json models.json
    python benchmarks/models.py --models llama vit --modes training --dtype bfloat16 --no-stock
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import workloads
from measure import (
    Call,
    Column,
    Goal,
    Results,
    answer,
    arguments,
    attempt,
    goals_text,
    in_own_process,
    wait,
    worst_difference,
)
from torch.utils.checkpoint import checkpoint

import multigraph_backend
from multigraph_backend.backend import multigraph

COLUMNS = (
    Column("model", "model"),
    Column("mode", "mode"),
    Column("dtype", "dtype"),
    Column("steps", "steps"),
    Column("raised", "raised"),
    Column("wrong", "wrong"),
    Column("worst", "worst"),
    Column("warnings", "warnings"),
    Column("in_graphs", "in graphs %", 1),
    Column("stock_raised", "stock raised"),
    Column("stock_wrong", "stock wrong"),
    Column("stock_in_graphs", "stock %", 1),
    Column("goals", "goals"),
    Column("stock_said", "stock said"),
)
GOALS = (
    Goal("raised", "raised", 0),
    Goal("wrong", "wrong", 0),
    Goal("in graphs", "in_graphs", 95, at_least=True),
)

MODES = ("inference", "training", "checkpointed")
SIZES = (4, 2, 3, 8)  # of batches, in turn
STEPS = 20
SECONDS = 300  # for one of stock's processes

# how far from eager is right: outputs and losses, gradients
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (3e-2, 5e-2)}

# torch's advice on speed; full precision is wanted here
DESERVED = ("TensorFloat32 tensor cores",)


# ---------------------------------------------------------------- models


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor


class OwnDecoder(torch.nn.Module):
    """The benchmarks' decoder, called as a model of transformers is."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = workloads.Decoder(2, 64, 2)
        self.checkpointed = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any]) -> None:
        self.checkpointed = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        for block in self.decoder.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and self.training else block(x)
        loss = None if labels is None else torch.nn.functional.mse_loss(x.float(), labels.float())
        return Output(loss, x)


@dataclass(frozen=True)
class Model:
    """`batch` makes the inputs of so many rows, with labels where a loss is wanted."""

    module: torch.nn.Module
    batch: Callable[[int, bool], dict[str, torch.Tensor]]


def _text(module: torch.nn.Module, device: str) -> Model:
    def batch(rows: int, labels: bool) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 1000, (rows, 32), device=device)
        return {"input_ids": ids, "labels": ids.clone()} if labels else {"input_ids": ids}

    return Model(module, batch)


def _transformers() -> Any:
    """Imported where it is needed: not every machine has it."""
    return importlib.import_module("transformers")


def gpt2(device: str) -> Model:
    made = _transformers()
    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    size = {
        "n_layer": 4,
        "n_embd": 256,
        "n_head": 4,
        "vocab_size": 1000,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return _text(made.GPT2LMHeadModel(made.GPT2Config(**size, **off, use_cache=False)), device)


def llama(device: str) -> Model:
    made = _transformers()
    size = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return _text(made.LlamaForCausalLM(made.LlamaConfig(**size, **heads, use_cache=False)), device)


def bert(device: str) -> Model:
    made = _transformers()
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return _text(
        made.BertForMaskedLM(made.BertConfig(**size, **off, vocab_size=1000, max_position_embeddings=64)), device
    )


def vit(device: str) -> Model:
    made = _transformers()
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    module = made.ViTForImageClassification(made.ViTConfig(**size, **off, image_size=64, patch_size=16, num_labels=10))

    def batch(rows: int, labels: bool) -> dict[str, torch.Tensor]:
        pixels = torch.randn(rows, 3, 64, 64, device=device, dtype=module.dtype)
        classes = {"labels": torch.randint(0, 10, (rows,), device=device)} if labels else {}
        return {"pixel_values": pixels, **classes}

    return Model(module, batch)


def decoder(device: str) -> Model:
    module = OwnDecoder()

    def batch(rows: int, labels: bool) -> dict[str, torch.Tensor]:
        dtype = next(module.parameters()).dtype
        names = ("x", "labels") if labels else ("x",)
        return {name: torch.randn(rows, 32, 64, device=device, dtype=dtype) for name in names}

    return Model(module, batch)


MODELS: dict[str, Callable[[str], Model]] = {make.__name__: make for make in (gpt2, llama, bert, vit, decoder)}


def model_of(name: str, mode: str, dtype: torch.dtype, device: str) -> Model:
    torch.manual_seed(0)
    model = MODELS[name](device)
    module = model.module.to(device, dtype).train(mode != "inference")
    if mode == "checkpointed":
        enable: Any = module.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


# ---------------------------------------------------------------- loops


@dataclass
class Tally:
    """What became of the steps of one loop."""

    steps: int = 0
    raised: int = 0
    wrong: int = 0
    worst: float = 0.0
    error: str | None = None  # the first

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step, in which at most one exception or one wrong number is counted."""
        self.steps += 1
        try:
            yield
        except WrongNumbers as error:
            self.wrong += 1
            self.error = self.error or f"step {self.steps}: WrongNumbers: {error}"
        except Exception as error:
            self.raised += 1
            self.error = self.error or f"step {self.steps}: {type(error).__name__}: {error}"

    def compare(self, what: str, given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], bound: float) -> None:
        """Raises WrongNumbers."""
        off = worst_difference([each.detach() for each in given], wanted)
        self.worst = max(self.worst, off) if math.isfinite(off) else self.worst
        if not off < bound:  # NaN is wrong too
            raise WrongNumbers(f"{what} differ from eager's by {off:.2e}")


class WrongNumbers(RuntimeError):
    """Something is not what eager gives."""


class Loop:
    """Steps as a user writes them. `form` is called as the model is; `profiled` runs what a steady step's share of
    recorded kernels is measured of."""

    def __init__(self, form: Call, model: Model, dtype: torch.dtype) -> None:
        self.form, self.model = form, model
        self.bound, self.gradient_bound = BOUNDS[dtype]
        self.tally = Tally()

    def run(self, steps: int, profiled: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """`steps` steps, then one more whose kernels are looked at, if none raised."""
        for number in range(steps):
            self.one(number, contextlib.nullcontext)
            if self.tally.raised and number == 0:
                return  # it does not compile
        if not self.tally.raised:
            self.one(steps, profiled)
            self.tally.steps = steps

    def one(self, number: int, profiled: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        raise NotImplementedError


class Inference(Loop):
    held: Any = None  # the last output, as a caller holds it, and what it must be

    def one(self, number: int, profiled: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        inputs = self.model.batch(SIZES[number % len(SIZES)], False)
        with self.tally.step(), torch.no_grad():
            wanted = self.model.module(**inputs).logits
            with profiled():
                output = self.form(**inputs)
            self.tally.compare("outputs", [output.logits], [wanted], self.bound)
            if self.held is not None:
                self.tally.compare("held outputs", [self.held[0].logits], [self.held[1]], self.bound)
            self.held = (output, wanted)


class Training(Loop):
    held: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # the last losses, and what they must be

    def __init__(self, form: Call, model: Model, dtype: torch.dtype) -> None:
        super().__init__(form, model, dtype)
        self.optimizer = torch.optim.SGD(model.module.parameters(), lr=1e-2)

    def one(self, number: int, profiled: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        batches = [self.model.batch(4, True) for _ in range(2 + number % 2)]
        with self.tally.step():
            eager = self._accumulated(self.model.module, batches, contextlib.nullcontext)
            wanted, wanted_gradients = [loss.detach() for loss in eager], self._gradients()
            del eager
            losses = self._accumulated(self.form, batches, profiled)
            gradients = self._gradients()
            self.tally.compare("losses", losses, wanted, self.bound)
            if self.held is not None:
                self.tally.compare("held losses", *self.held, self.bound)
            if gradients.keys() != wanted_gradients.keys():
                missing = sorted(gradients.keys() ^ wanted_gradients.keys())
                raise WrongNumbers(f"gradients missing, or too many: {', '.join(missing[:3])}")
            given = list(gradients.values())
            self.tally.compare("gradients", given, list(wanted_gradients.values()), self.gradient_bound)
            self.held = (losses, wanted)
            self.optimizer.step()

    def _accumulated(
        self,
        form: Call,
        batches: Sequence[Mapping[str, torch.Tensor]],
        profiled: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        losses = []
        for number, batch in enumerate(batches):
            # later passes add to gradients, eagerly: no part of the compiled model
            with profiled() if number == 0 else contextlib.nullcontext():
                loss = form(**batch).loss
                loss.backward()
            losses.append(loss)
        return losses

    def _gradients(self) -> dict[str, torch.Tensor]:
        named = self.model.module.named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Kernels:
    """Kernels that ran, and how many of them a CUDA graph launched; the names of the others."""

    count: int
    in_graphs: int
    outside: Mapping[str, int] = field(default_factory=dict)

    def percent(self) -> float | None:
        return 100 * self.in_graphs / self.count if self.count else None


def kernels(events: Iterable[Mapping[str, Any]]) -> Kernels:
    """From the events of a profile in Chrome's format: a kernel has the correlation of the call that launched it."""
    events = list(events)
    launches = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and str(event.get("name")).startswith(("cudaGraphLaunch", "cuGraphLaunch"))
    }
    ran = [event for event in events if event.get("cat") == "kernel"]
    outside = Counter(str(event["name"]) for event in ran if event["args"]["correlation"] not in launches)
    return Kernels(len(ran), len(ran) - outside.total(), dict(outside.most_common()))


@contextlib.contextmanager
def profiled_kernels(into: list[Mapping[str, Any]]) -> Iterator[None]:
    """Add the profiler's events of what runs inside."""
    wait()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        yield
        wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        into.extend(json.loads(path.read_text())["traceEvents"])


# ---------------------------------------------------------------- warnings


class Said(logging.Handler):
    """First lines of the warnings that come while it is entered, each with how often."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()
        self._records: dict[int, logging.LogRecord] = {}
        self._caught: list[warnings.WarningMessage] = []

    def emit(self, record: logging.LogRecord) -> None:
        if id(record) in self._records:  # several loggers may pass it on
            return
        self._records[id(record)] = record
        self._add(f"{record.name}: {record.getMessage()}")

    def __enter__(self) -> Said:
        caught = self._stack.enter_context(warnings.catch_warnings(record=True))
        assert caught is not None
        self._caught = caught
        warnings.simplefilter("always")
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", hidden)  # as Python does by itself
        names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
        loggers = [logging.getLogger(name) for name in ("torch", "multigraph_backend", *names)]
        for logger in loggers:
            if not logger.propagate or "." not in logger.name:
                logger.addHandler(self)
                self._stack.callback(logger.removeHandler, self)
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()
        for warning in self._caught:
            self._add(f"{warning.category.__name__}: {warning.message}")

    def _add(self, text: str) -> None:
        if not any(known in text for known in DESERVED):
            self.lines[text.strip().splitlines()[0][:200]] += 1


# ---------------------------------------------------------------- rows


def compiled(model: Model, form: str, device: str, dynamic: bool | None) -> Call:
    if form == "stock":
        return torch.compile(model.module, mode="reduce-overhead", dynamic=dynamic)
    options: dict[str, Any] = {"on_failure": "raise"}
    if device == "cuda":
        options["cudagraphs"] = "auto"
    return torch.compile(model.module, backend=multigraph, dynamic=dynamic, options=options)


def measured(form: str, name: str, mode: str, dtype: torch.dtype, device: str, args: argparse.Namespace) -> Any:
    """The values of one loop over one model."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    gc.collect()
    before = multigraph_backend.stats()
    events: list[Mapping[str, Any]] = []
    with Said() as said:
        model = model_of(name, mode, dtype, device)
        call = compiled(model, form, device, None if args.dynamic == "auto" else True)
        loop = (Inference if mode == "inference" else Training)(call, model, dtype)
        loop.run(args.steps, partial(profiled_kernels, events) if device == "cuda" else contextlib.nullcontext)
    seen, tally, now = kernels(events), loop.tally, multigraph_backend.stats()
    return {
        "steps": tally.steps,
        "raised": tally.raised,
        "wrong": tally.wrong,
        "worst": f"{tally.worst:.1e}",
        "said": tally.error,
        "warnings": len(said.lines),
        "warned": dict(said.lines.most_common(20)),
        "kernels": seen.count,
        "in_graphs": seen.percent(),
        "outside": dict(list(seen.outside.items())[:20]),
        "counts": {key: now[key] - before[key] for key in now if now[key] != before[key]},
    }


def add_row(name: str, mode: str, args: argparse.Namespace, results: Results) -> None:
    """multigraph's loop here, stock's in a process of its own."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    row, error = attempt(partial(measured, "multigraph", name, mode, dtype, results.device, args))
    row = row or {}
    error = error or row.pop("said", None)
    if not args.no_stock:
        words = ["--models", name, "--modes", mode, "--dtype", args.dtype, "--device", results.device]
        words += ["--steps", str(args.steps), "--dynamic", args.dynamic, "--threads", str(args.threads)]
        stock, stock_error = in_own_process(str(Path(__file__).resolve()), words, SECONDS)
        row |= {f"stock_{key}": value for key, value in (stock or {}).items() if key != "counts"}
        said = stock_error or row.get("stock_said")
        row["stock_said"] = None if said is None else said.splitlines()[0].split(" Stack trace")[0][:160]
    if results.device == "cuda":
        row["goals"] = goals_text(GOALS, row)
    results.add({"model": name, "mode": mode, "dtype": args.dtype}, row, error, headline=True)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), help="all; quick: decoder")
    made.add_argument("--modes", nargs="+", choices=MODES, help="all; quick: inference and checkpointed")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--steps", type=int, help=f"of each loop ({STEPS})")
    made.add_argument("--dynamic", choices=("auto", "true"), default="auto", help="as torch.compile has it")
    made.add_argument("--no-stock", action="store_true", help="multigraph alone")
    made.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # of the process of one of stock's loops
    return made


def main() -> int:
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # recordings and a profiler that comes and goes do not agree
    args = parser().parse_args()
    args.steps = args.steps or (3 if args.quick else STEPS)
    names = args.models or (["decoder"] if args.quick else list(MODELS))
    if args.device != "cpu" and torch.cuda.is_available():
        with profiled_kernels([]):  # it is set up before anything is recorded
            torch.zeros(1, device="cuda")
    if args.answer is not None:
        torch.set_num_threads(args.threads)
        dtype = getattr(torch, args.dtype)
        return answer(args.answer, partial(measured, "stock", names[0], args.modes[0], dtype, args.device, args))
    results = Results("models", "Models: recorded loops against eager, and stock's", COLUMNS, args)
    for name in names:
        for mode in args.modes or ((MODES[0], MODES[2]) if args.quick else MODES):
            add_row(name, mode, args, results)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
