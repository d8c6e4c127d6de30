"""Random training programs with norms, softmaxes, attention, gates and masks, packed by random rules, run as graphs.

In: a seed.  Out: what was seen, counted; or `Wrong`.

What is saved is known by its shape: activations have rows of some width, a gate has four numbers a row, a mask is bool,
and what is left, at most two numbers a row or one a column, are statistics.  So the machine needs not know what makes
one:

    statistics are as wide as they were, unless a rule names them; activations and gates are packed
    masks of any width are bits, where a rule says so
    blocks are blocks where the rows are a multiple of them, else the account says that they are rows, and why
    the account names the rules that decide about nothing
    gradients are those of eager, up to what the pack rounds
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table

from multigraph_backend.saved_tensors.account import SavedTensor
from multigraph_backend.saved_tensors.rules import Bits, Cast, Match, Pack, Rule, Scaled
from tests.support.saved_tensors.partitioned import Partitioned, gradients, partition

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PLAIN: Sequence[Operation] = (
    lambda x, w: x.tanh(),
    lambda x, w: F.gelu(x),
    lambda x, w: (x @ w).sin(),
    lambda x, w: F.silu(x @ w) * x,
)
STATISTICS: Sequence[Operation] = (
    lambda x, w: F.layer_norm(x @ w, x.shape[-1:]),
    lambda x, w: F.layer_norm(x @ w, x.shape[-1:], w[0], w[1]),
    lambda x, w: F.rms_norm(x @ w, x.shape[-1:], w[0]),
    lambda x, w: F.group_norm(x @ w, 2),
    lambda x, w: F.softmax(x @ w, -1).sin(),
    lambda x, w: F.log_softmax(x @ w, -1).sin(),
    lambda x, w: (x - (x @ w).logsumexp(-1, keepdim=True)).cos(),
    lambda x, w: F.normalize(x @ w, dim=-1),
    lambda x, w: ((x - x.mean(0)) * (x.var(0) + 1).rsqrt()).tanh(),
    lambda x, w: _attended(x @ w),
    lambda x, w: _attended(x @ w).tanh(),
)
GATES: Sequence[Operation] = (
    lambda x, w: x * (x @ w[:, :4]).sigmoid().repeat(1, x.shape[1] // 4),
    lambda x, w: x * (x @ w[:, :4]).tanh().unsqueeze(-1).expand(*x.shape[:1], 4, x.shape[1] // 4).flatten(1),
)
MASKS: Sequence[Operation] = (
    lambda x, w: torch.where(x @ w > 0, x, x * 0.1),
    lambda x, w: x.masked_fill(x > 0.5, 0.25) * x,
)
# with the error of gradients that it may make
PACKS: Sequence[tuple[Pack, float]] = (
    (Cast("bf16"), 0.1), (Cast("e4m3"), 1.0), (Scaled("int8"), 0.3), (Scaled("int8", per=8), 0.3),
    (Scaled("e4m3", per=5), 0.6),
)  # fmt: skip


def _attended(x: torch.Tensor) -> torch.Tensor:
    """Eight tokens that attend to each other, two heads."""
    split = x.view(-1, 8, 2, x.shape[1] // 2).transpose(1, 2)
    return F.scaled_dot_product_attention(split, split, split).transpose(1, 2).reshape(x.shape)


class Wrong(AssertionError):
    """Something was rounded that nobody named, or not done and not said."""


@dataclass(frozen=True)
class Program:
    rows: int
    width: int
    operations: tuple[Operation, ...]
    decomposed: bool
    pack: Pack
    bound: float
    named: bool  # a rule packs statistics
    bits: bool
    rules: tuple[Rule, ...]
    idle: tuple[Rule, ...]  # those of them that decide about nothing

    def run(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight, operation in zip(weights, self.operations, strict=True):
            x = operation(x, weight) + x
        return x

    def is_statistic(self, shape: Sequence[int]) -> bool:
        return 1 < math.prod(shape) <= 2 * self.rows


def draw(seed: int) -> Program:
    rng = random.Random(f"packs:{seed}")
    kinds = rng.choices((PLAIN, STATISTICS, GATES, MASKS), (1, 4, 1, 2), k=rng.choice((2, 2, 3)))
    rows, width = rng.choice((24, 40, 17_000)), rng.choice((12, 16, 20))
    pack, bound = rng.choice(PACKS)
    named, bits = rng.random() < 0.2, rng.random() < 0.5
    size = None if rows > 10_000 and rng.random() < 0.7 else 0  # a rule that gives no size is for large ones alone
    rules = [Rule(Match(min_bytes=size), pack)]
    idle = []
    if named:
        rules.insert(0, Rule(Match(role="statistic", min_bytes=0), Cast("bf16")))
    if bits:
        rules.insert(0, Rule(Match(dtype="bool", min_bytes=0), Bits()))
    if rng.random() < 0.3:
        idle.append(Rule(Match(op="aten::no_such", min_bytes=0), Cast("e5m2")))
        rules.insert(rng.randrange(len(rules) + 1), idle[-1])
    if rng.random() < 0.3:  # behind what decides already
        idle.append(Rule(Match(min_bytes=size, dtype="float32"), Cast("e5m2")))
        rules.append(idle[-1])
    operations = tuple(rng.choice(kind) for kind in kinds)
    decomposed = rng.random() < 0.5
    if pack == Cast("e4m3") and rng.random() < 0.5:  # whose weight gradients are multiplied where the width is 16
        rows, multiplied = 48 if rows < 10_000 else 17_008, Cast("e4m3", multiply=True)
        rules = [replace(rule, pack=multiplied) if rule.pack == pack else rule for rule in rules]
        pack = multiplied
    return Program(rows, width, operations, decomposed, pack, bound, named, bits, tuple(rules), tuple(idle))


def play(seed: int) -> Counter[str]:
    """Raises `Wrong`."""
    program = draw(seed)
    generator = torch.Generator().manual_seed(seed)
    args = [torch.randn(program.rows, program.width, generator=generator)]
    args += [torch.randn(program.width, program.width, generator=generator) / 4 for _ in program.operations]
    made = partition(program.run, program.rules, decompositions=select_decomp_table() if program.decomposed else None)
    got, expected = gradients(made.run, *args), gradients(program.run, *args)
    for value, wanted in zip(got, expected, strict=True):
        error = float((value - wanted).norm() / wanted.norm().clamp(min=1e-3))
        if not error <= program.bound:
            raise Wrong(f"seed {seed}: an error of {error:.3f}\n{program}")
    try:
        return _as_it_is_said(program, made)
    except Wrong as error:
        raise Wrong(f"seed {seed}: {error}\n{program}") from None


def _as_it_is_said(program: Program, made: Partitioned) -> Counter[str]:
    counts: Counter[str] = Counter()
    (said,) = made.accounts
    if said.failed is not None:
        raise Wrong(said.failed)
    for entry in said.tensors:
        counts += _one(program, entry)
    (backward,) = made.backward
    for node in backward.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or not program.is_statistic(value.shape) or program.named:
            continue
        if value.dtype.is_floating_point and value.dtype.itemsize < 4 and value.dtype != torch.bool:
            raise Wrong(f"{node} of {tuple(value.shape)} goes to the backward as {value.dtype}")
    (packing,) = [rule for rule in program.rules if rule.pack == program.pack and rule.match.role is None]
    for rule in program.idle:
        if said.tensors and str(rule) not in said.unmatched:
            raise Wrong(f"{rule} decides about nothing, and nobody is told")
    if counts["packed"] and str(packing) in said.unmatched:
        raise Wrong(f"{packing} is said to decide about nothing")
    counts["idle rules"] += len(program.idle)
    return counts


def _one(program: Program, entry: SavedTensor) -> Counter[str]:
    shape = [int(size) for size in entry.shape.strip("[]").split(",") if size.strip()]
    mine = "rule names" in str(entry.reason)  # an input, a parameter or an output
    if entry.dtype == "bool":
        if program.bits and entry.packed != "bits" and not mine:
            raise Wrong(f"the mask {entry.name} of {entry.shape} is {entry.packed}: {entry.reason}")
        return Counter({"bits" if program.bits else "masks": 1})
    if entry.dtype != "float32" or math.prod(shape) == 1:
        return Counter()
    if program.is_statistic(shape):
        if entry.packed is not None and not program.named:
            raise Wrong(f"{entry.name} of {entry.shape} is {entry.packed}, and no rule names it")
        if entry.packed is None and program.named and not mine and "recomputed" not in str(entry.reason):
            raise Wrong(f"{entry.name} of {entry.shape} is named, and kept: {entry.reason}")
        return Counter({"statistics packed" if program.named else "statistics": 1})
    if entry.packed is None:
        if not mine and "small" not in str(entry.reason) and "smaller" not in str(entry.reason):
            raise Wrong(f"{entry.name} of {entry.shape} is kept: {entry.reason}")
        return Counter({"kept": 1})
    if isinstance(program.pack, Scaled) and program.pack.per != "row" and len(shape) == 2:
        row = program.width if program.width in shape else 4  # as it lies in memory; a transpose is no other
        fits = row % program.pack.per == 0
        if fits != ("block" in entry.packed) or fits == ("multiple" in entry.packed):
            raise Wrong(f"{entry.name} of {entry.shape} is said to be {entry.packed!r}")
        return Counter({"packed": 1, "blocks" if fits else "rows for blocks": 1})
    return Counter({"packed": 1})
