"""Small models, and how a packed training step is held against eager: both gradients, and that packing happened."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import multigraph_backend
from multigraph_backend import Match, Rule
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.rules import Pack

ROUNDING = 1e-5


class Block(torch.nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        return x + F.gelu(self.out(mixed))


class Grouped(torch.nn.Module):
    """Attention whose keys and values several heads share, so that they are repeated for it."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.queries = torch.nn.Linear(width, width)
        self.others = torch.nn.Linear(width, 2 * width * groups // heads)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q = self.queries(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
        k, v = self.others(x).view(batch, tokens, 2 * self.groups, -1).transpose(1, 2).chunk(2, 1)
        repeated = (batch, self.groups, self.heads // self.groups, tokens, width // self.heads)
        k, v = (part.unsqueeze(2).expand(repeated).flatten(1, 2) for part in (k * k.sin(), v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        return x + F.gelu(self.out(mixed))


class Mlp(torch.nn.Module):
    """Two layers: quick to compile, and three tensors to pack."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.first(x))).sin() + 1


def rules(pack: Pack, **match: Any) -> list[Rule]:
    """One rule for every intermediate, however small."""
    return [Rule(Match(**{"min_bytes": 0, **match}), pack)]


def compiled(model: Callable[..., Any], packs: Sequence[Rule], **options: Any) -> Callable[..., Any]:
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", True)
    given = {"saved_tensors": list(packs), **options}
    result: Callable[..., Any] = torch.compile(
        model, backend="multigraph", dynamic=dynamic, fullgraph=fullgraph, options=given
    )
    return result


def step(
    model: torch.nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor, seed: int = 3
) -> list[torch.Tensor]:
    """The output and all gradients of one training step, parameters first."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = run(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), *(value.clone() for value in gradients), x.grad]


def assert_step(model: torch.nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor, bound: float) -> None:
    """The output is eager's, and each gradient within a relative `bound` of eager's; not all of them equal it.

    A `bound` of 0: nothing is packed, and gradients differ by the compiler's rounding alone.
    """
    eager = copy.deepcopy(model)
    expected = step(eager, eager, x)
    got = step(model, run, x)
    torch.testing.assert_close(got[0], expected[0])
    errors = []
    for gradient, wanted in zip(got[1:], expected[1:], strict=True):
        errors.append(float((gradient - wanted).norm() / wanted.norm().clamp(min=1e-30)))
    assert max(errors) <= max(bound, ROUNDING), errors
    assert bound == 0 or max(errors) > ROUNDING, "packing changed nothing, so nothing was packed"


def accounts() -> list[SavedTensors]:
    """What became of saved tensors in all compiled code that is alive."""
    found: list[SavedTensors] = []
    for region in multigraph_backend.explain().regions:
        for variant in (*region.variants, region.generic):
            found.extend(variant.saved)
    return found
