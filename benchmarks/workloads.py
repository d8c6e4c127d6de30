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


class WideAttention(torch.nn.Module):
    """Causal attention, with or without biases and rotated positions, and with fewer heads of keys and values."""

    def __init__(self, width: int, heads: int, shared: int, bias: bool, rotated: bool) -> None:
        super().__init__()
        self.heads, self.shared, self.size, self.rotated = heads, shared, width // heads, rotated
        self.queries = torch.nn.Linear(width, width, bias=bias)
        self.others = torch.nn.Linear(width, 2 * self.size * shared, bias=bias)
        self.out = torch.nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q = self.queries(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.others(x).view(batch, length, 2, self.shared, self.size).permute(2, 0, 3, 1, 4)
        if self.rotated:
            q, k = self._turned(q), self._turned(k)
        if self.shared != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.shared, dim=1) for part in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        assert isinstance(mixed, torch.Tensor)
        return mixed

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        angles = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] / 10000.0**steps
        sin, cos = angles.sin().repeat(1, 2).to(x.dtype), angles.cos().repeat(1, 2).to(x.dtype)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


class WideBlock(torch.nn.Module):
    """A block of GPT-2 (LayerNorm, biases, GELU) or of Llama (RMSNorm, SwiGLU, shared keys and values)."""

    def __init__(self, width: int, heads: int, hidden: int, shared: int, llama: bool) -> None:
        super().__init__()
        norm: Callable[[int], torch.nn.Module] = torch.nn.RMSNorm if llama else torch.nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = WideAttention(width, heads, shared, bias=not llama, rotated=llama)
        self.up = torch.nn.Linear(width, hidden, bias=not llama)
        self.gate = torch.nn.Linear(width, hidden, bias=False) if llama else None
        self.down = torch.nn.Linear(hidden, width, bias=not llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        if self.gate is None:
            h = torch.nn.functional.gelu(self.up(h), approximate="tanh")
        else:
            h = torch.nn.functional.silu(self.gate(h)) * self.up(h)
        y = x + self.down(h)
        assert isinstance(y, torch.Tensor)
        return y


class LanguageModel(torch.nn.Module):
    """Token ids, batch x length -> the loss of predicting each from those before."""

    def __init__(self, words: int, layers: int, width: int, heads: int, hidden: int, shared: int, llama: bool) -> None:
        super().__init__()
        self.width, self.words = width, words
        self.embed = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(WideBlock(width, heads, hidden, shared, llama) for _ in range(layers))
        self.norm: torch.nn.Module = torch.nn.RMSNorm(width) if llama else torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, words, bias=False)
        torch.nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: torch.Tensor, around: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """`around`: called with a block and its input in place of the block."""
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = block(x) if around is None else around(block, x)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


# words, width, heads, hidden, heads of keys and values, of Llama's kind; layers; batch, length
LANGUAGE_MODELS: dict[str, tuple[tuple[int, int, int, int, int, bool], int, tuple[int, int]]] = {
    "gpt2-medium": ((50257, 1024, 16, 4096, 16, False), 24, (8, 1024)),
    "llama-1b": ((128256, 2048, 32, 8192, 8, True), 16, (2, 2048)),
    "small": ((256, 64, 4, 128, 2, True), 2, (2, 64)),
}


def language_model(name: str, layers: int | None = None) -> LanguageModel:
    """Of the size of that name, with random weights."""
    (words, *rest), usual, _ = LANGUAGE_MODELS[name]
    width, heads, hidden, shared, llama = rest
    return LanguageModel(words, layers or usual, width, heads, hidden, shared, bool(llama))


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
