"""A byte-level language model small enough to train in a minute on two cores, and a form of it that serves.

The text is what every machine with Python has: the sources of its standard library. `TinyLM` is a plain
decoder (causal attention, rotary positions); `CachedLM` puts a key-value cache of fixed size around it, so that
one `forward(tokens, start)` is both the prefill of a whole prompt and, with one token a row, a step of decoding.
Only the two sizes of `tokens` ever change, and these are what examples/serve_lm.py specializes.
"""

import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes


class LayerCache(nn.Module):
    """What attention has seen so far in one layer: keys and values, [batch, length, heads, head width]."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: int, length: int, heads: int, head_width: int) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, length, heads, head_width), persistent=False)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: turns the two halves of each head against each other, by angles [batch, length, half]."""
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, positions: Tensor, angles: Tensor, cache: LayerCache | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(2)
        q, k = rotate(q, angles), rotate(k, angles)
        visible = None
        if cache is not None:
            rows = torch.arange(batch, device=x.device)[:, None]
            cache.keys.index_put_((rows, positions), k)
            cache.values.index_put_((rows, positions), v)
            k, v = cache.keys[:batch], cache.values[:batch]
            # a token sees what stands at or before its own place; what a shorter prompt's padding left is later
            places = torch.arange(k.shape[1], device=x.device)
            visible = (places <= positions[:, :, None])[:, None]
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible,
            is_causal=visible is None,
        )
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.before_mlp(x))
        return x


class TinyLM(nn.Module):
    speeds: Tensor

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, max_length: int = 256) -> None:
        super().__init__()
        self.width, self.heads, self.max_length = width, heads, max_length
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        half = width // heads // 2
        self.register_buffer("speeds", 1000 ** -(torch.arange(half) / half), persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, start: Tensor | None = None, caches: nn.ModuleList | None = None) -> Tensor:
        """Logits for every token; `start` is the place of each row's first one (0 where there is no cache)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if start is not None:
            positions = start[:, None] + positions
        angles = positions[:, :, None] * self.speeds
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, positions, angles, None if caches is None else caches[i])
        logits: Tensor = self.head(self.norm(x))
        return logits


class CachedLM(nn.Module):
    """`TinyLM` with room for `max_batch` conversations; the weights are shared, the cache is its own."""

    def __init__(self, lm: TinyLM, max_batch: int) -> None:
        super().__init__()
        self.lm = lm
        self.caches = nn.ModuleList(
            LayerCache(max_batch, lm.max_length, lm.heads, lm.width // lm.heads) for _ in lm.blocks
        )

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        logits: Tensor = self.lm(tokens, start, self.caches)
        return logits


def standard_library_text(most_bytes: int = 8_000_000) -> Tensor:
    """The sources of the standard library, one after another, as a tensor of bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= most_bytes:
            break
    return torch.frombuffer(text[:most_bytes], dtype=torch.uint8)


def train(
    lm: TinyLM, text: Tensor, seconds: float, generator: torch.Generator, batch: int = 4, rate: float = 3e-3
) -> Iterator[tuple[int, float, float]]:
    """Trains for about `seconds`; yields (steps done, seconds spent, loss averaged over the last steps).

    The learning rate follows the clock (short warm-up, then a cosine to near zero), so that any length of time
    ends in a finished model.
    """
    device = lm.head.weight.device
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05)
    columns = torch.arange(lm.max_length + 1)
    began, steps, average = time.perf_counter(), 0, math.log(VOCABULARY)
    lm.train()
    while (spent := time.perf_counter() - began) < seconds:
        part = spent / seconds
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (steps + 1) / 20, 0.02 + 0.5 * (1 + math.cos(math.pi * part)))
        starts = torch.randint(len(text) - lm.max_length - 1, (batch, 1), generator=generator)
        window = text[starts + columns].long().to(device)
        logits = lm(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        steps += 1
        average += (loss.item() - average) * max(0.05, 1 / steps)
        yield steps, time.perf_counter() - began, average
    lm.eval()
