"""Masks of attention hold infinities, which packs do not know: they are kept unless a rule names them, and a layer that
is one of several calls says its own name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from multigraph_backend import Cast, Keep, Match, Offload, Rule, Scaled
from tests.support.saved_tensors.models import accounts

KEPT = "it is a mask of an attention, with infinities, which no rule names"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        z: torch.Tensor = x + self.out(y.transpose(1, 2).flatten(-2))
        return z


class Decoder(nn.Module):
    """Each layer makes the numbers of its mask anew, as of a mask of bools."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(layers)), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x = layer(x, seen)
        y: torch.Tensor = self.norm(x).cumsum(-1).sin().mean()
        return y


def gradients(run: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    run(x).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def packed(*rules: Rule, layers: int = 2, **more: Any) -> tuple[list[float], list[tuple[str, str | None, str]]]:
    """How far each gradient is from eager's; of each mask its module, its pack and why it is kept."""
    torch.manual_seed(0)
    model, x = Decoder(layers), torch.randn(2, 12, 16)
    wanted = gradients(model, model, x)
    run = torch.compile(model, backend="multigraph", options={"saved_tensors": list(rules), **more})
    got = gradients(run, model, x)
    errors = [float((one - two).norm() / two.norm()) for one, two in zip(got, wanted, strict=True)]
    said = [said for said in accounts() if said.tensors][-1]
    masks = [entry for entry in said.tensors if entry.op == "aten::where" or "mask" in (entry.reason or "")]
    return errors, [(entry.module, entry.packed, entry.reason or "") for entry in masks]


@pytest.mark.parametrize(
    ("repeat", "pack"),
    [(False, Scaled("int8", per="row")), pytest.param("always", Cast("float8_e4m3fn"), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_rule_for_everything_leaves_masks_alone(repeat: bool | str, pack: Any) -> None:
    """Through such a pack each gradient would be NaN."""
    layers = 4 if repeat else 2
    errors, masks = packed(Rule(Match(min_bytes=0), pack), layers=layers, repeat=repeat)
    assert max(errors) < 0.2
    assert masks
    assert {(pack, reason) for _, pack, reason in masks} == {(None, KEPT)}
    if repeat:
        assert [module for module, _, _ in masks] == [f"layers.{number}" for number in range(layers)]


@pytest.mark.usefixtures("by_operator")
def test_a_rule_that_names_masks_packs_them_and_a_keep_need_not() -> None:
    """bfloat16 has infinities, and what is offloaded keeps its bits."""
    errors, masks = packed(Rule(Match(role="mask", min_bytes=0), Cast("bfloat16")))
    assert max(errors) < 1e-5
    assert {pack for _, pack, _ in masks} == {"cast to bfloat16"}
    errors, masks = packed(Rule(Match(role="mask", min_bytes=0), Offload()))
    assert max(errors) < 1e-5
    errors, masks = packed(
        Rule(Match(op="aten::where", min_bytes=0), Keep()), Rule(Match(min_bytes=0), Cast("bfloat16"))
    )
    assert max(errors) < 0.05
    assert {reason for _, _, reason in masks} == {"rule: op=aten::where, min_bytes=0: keep"}


def test_a_budget_may_compute_a_mask_again() -> None:
    errors, _ = packed(Rule(Match(min_bytes=0), Scaled("int8", per="row")), saved_tensors_budget=0.2)
    assert max(errors) < 0.2
