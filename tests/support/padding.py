"""Random programs over two inputs with rows: some keep rows apart, some mix them, and nothing tells beforehand which.

In: a seeded generator.  Out: a `Program`: text of a function of `x` [rows, 6], `i` [rows] (integers) and tables, which
torch.compile takes as it is, and what it is called with.  A program is a list of steps; each names its operands among
the values so far.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# {a}, {b}: float values [rows, 6]; {n}: integers [rows]; results are of the shape that the name of the list says
ROWS = (
    "{a} + {b}", "{a} * {b} - 1", "torch.tanh({a})", "{a} @ w", "torch.softmax({a}, -1)",
    "{a}.sum(1, keepdim=True) + {b}",
    "{a} - {a}.mean(-1, keepdim=True)", "torch.nn.functional.layer_norm({a}, (6,), g)", "{a}.flip(1)",
    "table[{n}]", "torch.nn.functional.embedding({n}, table)", "{a}.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6)",
    "torch.cat([{a}[:, :3], {b}[:, 3:]], 1)", "torch.where({a} > 0, {a}, {b})", "{a}.cumsum(1)", "{a}.sort(1).values",
    "{a}.masked_fill({n}[:, None] > 3, 0.5)", "{a} + {n}[:, None]", "{a}.t().contiguous().t()",
    "torch.stack([{a}, {b}]).sum(0)", "torch.bmm({a}.view(-1, 2, 3), {b}.view(-1, 3, 2)).reshape(-1, 4) @ u",
    "{a}.gather(1, {n}[:, None].expand(-1, 6).clamp(0, 5))", "torch.nn.functional.pad({a}, (1, 0))[:, :6]",
    "put({a}, w)", "{a}.reshape(-1).view(-1, 6)",
    "torch.zeros_like({a}).scatter(1, {n}[:, None].clamp(0, 5), {b}[:, :1])", "{a}.clone().mul_(2).add_({b})",
    "{a} + torch.arange({a}.shape[0])[:, None]", "{a}[:, None].expand(-1, 2, -1).amax(1)",
    "{a}.unbind(1)[2][:, None] * {b}",
    "torch.cat([w, {a}])[6:]", "torch.cat([w[:2], {a}[1:]])[1:]", "{a}.chunk(2, 1)[0].repeat(1, 2)",
    "{a}[torch.arange({a}.shape[0]), {n}.clamp(0, 5)][:, None] + {b}", "filled({a}, {b})", "first({a}, {b})",
    "torch.nn.functional.conv1d({a}[:, None], g[None, None, :3], padding=1)[:, 0]", "{a}.unsqueeze(0).squeeze(0)",
    "attend({a}, {b})", "{a} / {a}.norm(dim=1, keepdim=True).clamp(min=1)",
    "{a}.topk(6, 1)[0]", "{a}.std(1, keepdim=True) + {b}",
)  # fmt: skip
MIXING = (
    "{a} - {b}.mean(0)", "{a}.cumsum(0)", "torch.softmax({a}, 0)", "{a}.flip(0)", "{a}.sort(0).values",
    "{a} / {a}.shape[0]",
    "{a} @ ({b}.t() @ {a})", "{a}.roll(1, 0)", "{a}[-1] + {b}", "{a}[{n}.clamp(0, 1)]", "{a} + {b}.amax()",
    "torch.cat([{a}[1:], {b}[:1]])", "{a}.t().reshape({a}.shape)", "{a}.view(2, -1)[0].sum() + {b}", "last({a}, {b})",
    "torch.cat([{a}, {b}])[: {a}.shape[0] + 1][1:]", "{a} * {n}.argmax()", "{a}.t().reshape(-1).view(-1, 6)",
    "{a} + torch.arange({a}.shape[0], 0, -1)[:, None]", "{a}.index_add(0, {n}.clamp(0, 1), {b})", "{a} * (n.sum() > 4)",
    "torch.linspace(0, 1, {a}.shape[0])[:, None] + {b}", "torch.cat([{a}, {b}]).view(-1, 2, 6)[:, 0] + {b}[:1]",
)  # fmt: skip


def filled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Writes into parts of a new tensor."""
    made = torch.empty_like(a)
    made[:, :2] = b[:, 4:]
    made[:, 2:] = a[:, :4]
    return made


def put(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Changes columns by their numbers."""
    made = a.clone()
    made[:, torch.tensor([1, 4])] = w[0, :2]
    return made


def first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Changes the first row."""
    made = a.clone()
    made[0] = b[1]
    return made


def last(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Changes the last row."""
    made = a.clone()
    made[-1] = b[0]
    return made


def attend(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Attention within each row."""
    q, k = a.view(-1, 1, 3, 2), b.view(-1, 1, 3, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, k).reshape(-1, 6)


_NAMES = {"torch": torch, "filled": filled, "put": put, "first": first, "last": last, "attend": attend}


@dataclass
class Program:
    """`function(x, n, w, u, g, table)`; `mixes`: whether a step of `MIXING` is part of what is returned."""

    source: str
    mixes: bool

    def function(self) -> Callable[..., Any]:
        namespace = dict(_NAMES)
        exec(compile(self.source, "<random program>", "exec"), namespace)
        return namespace["program"]  # type: ignore[return-value]

    def arguments(self, rows: int, seed: int) -> tuple[torch.Tensor, ...]:
        g = torch.Generator().manual_seed(seed)
        before = (seed + 1) % 3  # rows of a longer tensor that `x` is a window into; of a first call with 5 rows none
        x = torch.randn(before + rows + 1, 6, generator=g)[before:-1]
        n = torch.randint(0, 7, (rows,), generator=g)
        tables = (torch.randn(6, 6, generator=g) / 3, torch.randn(4, 6, generator=g), torch.randn(6, generator=g))
        return (x, n, *tables, torch.randn(7, 6, generator=g))


def draw(choose: random.Random, mixing: float) -> Program:
    """A program of some steps, each of which mixes rows with this probability."""
    lines, names, mixes = ["def program(x, n, w, u, g, table):"], ["x"], False
    for number in range(choose.randint(1, 5)):
        mixed = choose.random() < mixing
        step = choose.choice(MIXING if mixed else ROWS)
        mixes = mixes or mixed
        text = step.format(a=choose.choice(names[-2:]), b=choose.choice(names), n="n")
        lines.append(f"    v{number} = {text}")
        names.append(f"v{number}")
    returned = choose.choice([names[-1], f"{names[-1]}, {choose.choice(names)} * 2", f"({names[-1]}.sum(1), n + 1)",
                              f"{names[-1]}, x[:, 1:], x.view(-1, 2, 3)"])  # fmt: skip
    return Program("\n".join([*lines, f"    return {returned}", ""]), mixes)
