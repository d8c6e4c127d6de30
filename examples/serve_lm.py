"""A small language model served through multigraph: one trace, a variant for each shape that matters.

Trains a byte-level decoder for a minute on the sources of Python's standard library, then serves prompts in changing
batch sizes and lengths, the way a server does: prompts padded to a multiple of 16, a key-value cache of fixed size,
one token a row while decoding. Three forms of the same model answer every request:

    eager        the module itself
    generic      torch.compile(model, backend="multigraph", dynamic=True): one graph for all sizes
    multigraph   the same with options={"specialize": SPECIALIZE}: variants beside the generic graph

and what comes out is compared with eager each time. At the end: the text, which graph served which shape and how
quickly, what was compiled for how long, and multigraph's own account.

    scripts/demo                  or, with everything installed: python examples/serve_lm.py
    scripts/demo --seconds 20 --requests 12
"""

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from progress import Progress
from tiny_lm import CachedLM, TinyLM, standard_library_text, train
from torch import Tensor

import multigraph_backend

SPECIALIZE: list[dict[str, Any]] = [
    {"tokens[1]": 1},  # decoding; Dynamo traces size 1 apart, multigraph shows it under this name
    {
        "tokens[0]": 4,
        "tokens[1]": {"multiple_of": 64},
    },  # the usual batch, in blocks that fill vector registers
    {"tokens[1]": 128},  # one common prompt length, any batch
    {"tokens[0]": {"min": 6}, "tokens[1]": {"max": 64}},  # many short prompts
]
MAX_BATCH = 8
# (rows, padded length) of the requests, in turn. No batch of 1: Dynamo traces it apart, and this is a short demo.
SHAPES = [(4, 64), (2, 128), (3, 48), (6, 32), (4, 128), (3, 128), (8, 64), (2, 96), (4, 64), (5, 80)]
PROMPTS = ["def read(self", "class Error(", "    return self.", "import os\nimport "]
TOLERANCE = 1e-3


@dataclass
class Served:
    """What is known of one class of shapes, e.g. `prefill 4x64`."""

    ran: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by form of the model, calls that compiled nothing


class Forms:
    """The three forms of one model, each with a cache of its own, fed the same tokens and compared."""

    def __init__(self, lm: TinyLM, device: torch.device) -> None:
        models = {form: CachedLM(lm, MAX_BATCH).to(device).eval() for form in ("eager", "generic", "multigraph")}
        options: dict[str, Any] = {"specialize": SPECIALIZE}
        self.device = device
        self.calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "eager": models["eager"],
            "generic": torch.compile(models["generic"], backend="multigraph", dynamic=True),
            "multigraph": torch.compile(models["multigraph"], backend="multigraph", dynamic=True, options=options),
        }
        self.served: dict[str, Served] = {}
        self.largest_difference = 0.0
        self.compared = 0

    def __call__(self, shape: str, tokens: Tensor, start: Tensor, lengths: Sequence[int]) -> Tensor:
        """Runs all three forms and returns multigraph's logits; `lengths` are the rows' lengths without padding."""
        served = self.served.setdefault(shape, Served())
        logits = {form: self._timed(form, served, tokens, start) for form in self.calls}
        for row, length in enumerate(lengths):
            for form in ("generic", "multigraph"):
                apart = (logits[form][row, :length] - logits["eager"][row, :length]).abs().max().item()
                self.largest_difference = max(self.largest_difference, apart)
                self.compared += 1
        return logits["multigraph"]

    def _timed(self, form: str, served: Served, tokens: Tensor, start: Tensor) -> Tensor:
        before, calls_before = compiles(), calls_by_graph()
        began = time.perf_counter()
        logits = self.calls[form](tokens, start)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if compiles() == before:
            served.seconds.setdefault(form, []).append(seconds)
        if form == "multigraph":
            served.ran.update((calls_by_graph() - calls_before).keys() or ["eager"])
        return logits


def compiles() -> int:
    stats = multigraph_backend.stats()
    return stats["generic_compiled"] + stats["variants_compiled"]


def calls_by_graph() -> Counter[str]:
    """How often each graph ran so far: variants by their condition, and `generic`."""
    calls: Counter[str] = Counter()
    for region in multigraph_backend.explain().to_dict()["regions"]:
        for variant in region["variants"]:
            calls[variant["condition"]] += variant["calls"]
        calls["generic"] += region["generic"]["calls"]
    return calls


def serve(
    forms: Forms,
    prompts: Sequence[bytes],
    padded: int,
    new_tokens: int,
    generator: torch.Generator,
    note: Callable[[str], None],
) -> list[bytes]:
    """Answers one batch of prompts: a prefill of `padded` tokens a row, then one token at a time."""
    rows, lengths = len(prompts), [len(prompt) for prompt in prompts]
    tokens = torch.zeros(rows, padded, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(list(prompt))
    shape, new = f"prefill {rows}x{padded}", [bytearray() for _ in prompts]
    note(shape)
    start = torch.zeros(rows, dtype=torch.long, device=forms.device)
    logits = forms(shape, tokens.to(forms.device), start, lengths)
    ends = torch.tensor(lengths, device=forms.device)
    last = logits[torch.arange(rows, device=forms.device), ends - 1]
    for step in range(new_tokens):
        likely = (last.float().cpu() / 0.7).softmax(-1)
        chosen = torch.multinomial(likely, 1, generator=generator)
        for row, byte in enumerate(chosen[:, 0].tolist()):
            new[row].append(byte)
        note(f"decode {rows}x1")
        last = forms(f"decode {rows}x1", chosen.to(forms.device), ends + step, [1] * rows)[:, -1]
    return [bytes(answer) for answer in new]


def snippets(text: Tensor, rows: int, padded: int, chance: random.Random) -> list[bytes]:
    """Prompts for a request: pieces of the text, a little shorter than the padded length."""
    prompts = []
    for _ in range(rows):
        length, at = chance.randint(padded - 15, padded), chance.randrange(len(text) - padded)
        prompts.append(bytes(text[at : at + length].tolist()))
    return prompts


def milliseconds(seconds: list[float]) -> str:
    return f"{median(seconds) * 1000:.1f}" if seconds else "-"


def report(forms: Forms, answers: Sequence[tuple[str, bytes]]) -> int:
    """Prints what a user wants to see; returns the exit status."""
    print("\n== what the model writes")
    for prompt, answer in answers:
        print("\n".join(f"  {line}" for line in f"{prompt}|{answer.decode(errors='replace')}".splitlines()))
        print("  --")

    regions = multigraph_backend.explain().to_dict()["regions"]
    called: Counter[str] = Counter()
    compiled: dict[str, float] = {}
    for region in regions:
        for variant in region["variants"]:
            called[variant["condition"]] += variant["calls"]
            compiled[variant["condition"]] = compiled.get(variant["condition"], 0.0) + variant["compile_seconds"]

    print("\n== which graph served which shape (median milliseconds of the calls that did not compile)")
    print(f"{'shape':<14} {'calls':>5} {'eager':>8} {'generic':>8} {'multigraph':>10}  ran, and its compile seconds")
    for shape, served in sorted(forms.served.items()):
        times = [milliseconds(served.seconds.get(form, [])) for form in ("eager", "generic", "multigraph")]
        ran = "; ".join(f"{graph}, {compiled[graph]:.1f} s" if graph in compiled else graph for graph in served.ran)
        print(f"{shape:<14} {sum(served.ran.values()):>5} {times[0]:>8} {times[1]:>8} {times[2]:>10}  {ran}")

    print("\n== multigraph_backend.explain()")
    print(multigraph_backend.explain())

    stats = multigraph_backend.stats()
    print("\n== in short")
    print(f"variants called: {sum(map(bool, called.values()))} of {len(called)}")
    print(", ".join(f"{key} {value}" for key, value in stats.items()))
    print(f"failures: {stats['failures']}")
    print(f"largest difference from eager: {forms.largest_difference:.1e} over {forms.compared} outputs")
    if stats["eager_calls"]:
        print("some calls ran eagerly; explain() above says why (no C++ compiler, perhaps)")
    if forms.largest_difference > TOLERANCE:
        print(f"that is more than {TOLERANCE}: wrong", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small language model, then serve it through multigraph.")
    parser.add_argument("--seconds", type=float, default=60, help="training time (default 60)")
    parser.add_argument("--requests", type=int, default=20, help="batches to serve (default 20)")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to write for each prompt (default 24)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a small model, 5 s of training, 10 requests")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.requests, arguments.new_tokens = 5, 10, 4

    # torch up to 2.13 warns of its own use of TorchScript at the first compile
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    torch.manual_seed(arguments.seed)
    generator, chance = torch.Generator().manual_seed(arguments.seed), random.Random(arguments.seed)
    device = torch.device(arguments.device)
    began = time.perf_counter()

    text = standard_library_text()
    lm = TinyLM(layers=2 if arguments.quick else 4).to(device)
    size = sum(parameter.numel() for parameter in lm.parameters())
    print(f"{size / 1e6:.1f} M parameters on {device} ({os.cpu_count()} cores), torch {torch.__version__}")
    with Progress("training", arguments.seconds, "s") as progress:
        for steps, seconds, loss in train(lm, text, arguments.seconds, generator):
            progress.at(seconds, f"{steps} steps, loss {loss:.2f}")

    forms = Forms(lm, device)
    answers: list[tuple[str, bytes]] = []
    with torch.no_grad(), Progress("serving", arguments.requests, "requests") as progress:
        for number in range(arguments.requests):
            rows, padded = SHAPES[number % len(SHAPES)]
            shown = number == 0
            prompts = [p.encode() for p in PROMPTS] if shown else snippets(text, rows, padded, chance)

            def note(shape: str, done: int = number) -> None:
                progress.at(done, shape if shape in forms.served else f"{shape}, a new shape: may compile")

            new_tokens = 48 if shown and not arguments.quick else arguments.new_tokens
            new = serve(forms, prompts, padded, new_tokens, generator, note)
            if shown:
                answers = list(zip(PROMPTS, new, strict=True))
        progress.at(arguments.requests, "done")

    status = report(forms, answers)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return status


if __name__ == "__main__":
    sys.exit(main())
