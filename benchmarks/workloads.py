"""What the benchmarks run: programs and the sizes that they are run at.

A `Workload` is a program, one shape of its inputs that is measured, another shape that generic graphs are first
compiled at (in service, too, a generic graph was compiled for whatever came first), and the conditions under which a
variant serves the measured shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]
Conditions = dict[str, dict[str, Any]]  # the name of a kind -> one entry of "specialize"


@dataclass(frozen=True)
class Workload:
    """`conditions`: what is declared, by the name of its kind; each holds at `shape`."""

    name: str
    program: Callable[..., torch.Tensor]
    shape: Shape
    other: Shape
    inputs: Callable[[Shape], tuple[torch.Tensor, ...]]
    conditions: Conditions


class Attention(torch.nn.Module):
    """Causal attention, or of one new token over the keys and values of past ones."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        assert isinstance(mixed, torch.Tensor)
        return mixed


class Block(torch.nn.Module):
    """A decoder block: RMSNorm, attention, RMSNorm, SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(width, eps=1e-6), torch.nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        hidden = width * 11 // 4
        self.gate = torch.nn.Linear(width, hidden, bias=False)
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), past)
        h = self.norm2(x)
        y = x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))
        assert isinstance(y, torch.Tensor)
        return y


class Decoder(torch.nn.Module):
    """`past`: keys and values of all layers, batch x 2 layers x heads x context x size of a head; none: prefill."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        if past is not None and past.shape[1] != 2 * len(self.blocks):
            raise ValueError("past is of another number of layers")
        for number, block in enumerate(self.blocks):
            x = block(x, None if past is None else (past[:, 2 * number], past[:, 2 * number + 1]))
        return x


@functools.cache
def decoder(device: str, layers: int = 4) -> Decoder:
    """bfloat16 and 1024 wide on the GPU, float32 and 256 wide on the CPU."""
    torch.manual_seed(0)
    width = 1024 if device == "cuda" else 256
    return Decoder(layers, width, width // 64).to(device, dtype_on(device))


def mlp(device: str) -> torch.nn.Module:
    """Three linear layers."""
    torch.manual_seed(0)
    width = 1024 if device == "cuda" else 256
    linear = torch.nn.Linear
    layers = (linear(width, 2 * width), torch.nn.GELU(), linear(2 * width, 2 * width), torch.nn.GELU())
    return torch.nn.Sequential(*layers, linear(2 * width, width)).to(device, dtype_on(device))


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


# ---------------------------------------------------------------- workloads of variants.py


def prefill(device: str, batch: int, length: int) -> Workload:
    model = decoder(device)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        assert isinstance(y, torch.Tensor)
        return y

    def inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
        return (torch.randn(*shape, model.width, device=device, dtype=dtype_on(device)),)

    conditions: Conditions = {
        "Eq": {"x[0]": batch, "x[1]": length},
        "MultipleOf": {"x[1]": {"multiple_of": 16}},
        "Range": {"x[1]": {"min": length // 2, "max": length * 2}},
    }
    other = (_other(batch, 3), length + 40)
    return Workload("decoder prefill", program, (batch, length), other, inputs, conditions)


def decode(device: str, batch: int, context: int) -> Workload:
    model = decoder(device)

    def program(x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        y = model(x, past)
        assert isinstance(y, torch.Tensor)
        return y

    def inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
        rows, _, cached = shape
        kind: dict[str, Any] = {"device": device, "dtype": dtype_on(device)}
        past = (rows, 2 * len(model.blocks), model.heads, cached, model.width // model.heads)
        return torch.randn(rows, 1, model.width, **kind), torch.randn(past, **kind)

    conditions: Conditions = {"Eq": {"x[0]": batch, "past[3]": context}, "MultipleOf": {"past[3]": {"multiple_of": 16}}}
    if batch != 1:
        conditions["Eq of the batch"] = {"x[0]": batch}
    other = (_other(batch, 3), 1, context + 40)
    return Workload("decoder decode", program, (batch, 1, context), other, inputs, conditions)


def _rows_and_columns(
    name: str, program: Callable[..., torch.Tensor], device: str, rows: int, columns: int
) -> Workload:
    def inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
        return (torch.randn(shape, device=device),)

    conditions: Conditions = {
        "Eq": {"x[0]": rows, "x[1]": columns},
        "MultipleOf": {"x[1]": {"multiple_of": 16}},
        "Range": {"x[1]": {"min": columns // 2, "max": columns * 2}},
    }
    return Workload(name, program, (rows, columns), (_other(rows, 5), columns + 40), inputs, conditions)


def softmax_times_std(device: str, rows: int, columns: int) -> Workload:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, dim=-1) * x.std(dim=-1, keepdim=True)

    return _rows_and_columns("softmax x std", program, device, rows, columns)


def cumsum(device: str, rows: int, columns: int) -> Workload:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x * 2, dim=-1) + 1

    return _rows_and_columns("cumsum", program, device, rows, columns)


def matmul_chain(device: str, rows: int) -> Workload:
    model = mlp(device)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        assert isinstance(y, torch.Tensor)
        return y

    width = next(model.parameters()).shape[1]

    def inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
        return (torch.randn(*shape, width, device=device, dtype=dtype_on(device)),)

    conditions: Conditions = {
        "Eq": {"x[0]": rows},
        "MultipleOf": {"x[0]": {"multiple_of": 16}},
        "Range": {"x[0]": {"min": rows // 2, "max": rows * 2}},
    }
    return Workload("matmul chain", program, (rows,), (_other(rows, 5),), inputs, conditions)


def _other(size: int, more: int) -> int:
    """Another size of its kind: 1 stays, since torch traces it apart."""
    return size if size == 1 else size + more
