"""bitsandbytes: models whose weights it holds in 8 and 4 bits, under adapters, and as transformers loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

from multigraph_backend import Cast, Match, Rule
from tests.support.on_device import DEVICE, nothing_fell_back, same, settings

KINDS: dict[str, Any] = {
    "int8": lambda: Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0),
    "nf4": lambda: Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32),
    "fp4": lambda: Linear4bit(64, 64, quant_type="fp4", compute_dtype=torch.float32, compress_statistics=False),
}


class Layer(torch.nn.Module):
    """The feed-forward half of a decoder layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)
        self.gate, self.up, self.down = (KINDS[kind]() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layers_keep_variants(kind: str) -> None:
    """int8's own code breaks the graph, between parts that are compiled."""
    torch.manual_seed(0)
    model = Layer(kind).eval().to(DEVICE)
    compiled = torch.compile(model, **settings(specialize=[{"x[1]": 8}]))
    with torch.no_grad():
        model(torch.randn(2, 3, 64, device=DEVICE))  # lays out its weights, on a CPU
        for length in (5, 8, 6, 8, 8, 8):
            x = torch.randn(2, length, 64, device=DEVICE)
            same(compiled(x), model(x), rtol=2e-3, atol=2e-3)
    ran = nothing_fell_back()
    assert ran["variants_compiled"] == 1
    assert ran["variant_calls"] == 4


def test_adapters_over_frozen_weights_train_with_saved_tensors_packed() -> None:
    """QLoRA."""
    torch.manual_seed(0)
    model = Layer("nf4").to(DEVICE)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    down, up = (torch.randn(64, 64, device=DEVICE).mul_(0.1).requires_grad_() for _ in range(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(x @ down) @ up
        loss: torch.Tensor = model(x).square().mean()
        return loss

    rules = [Rule(Match(min_bytes=0), Cast("bfloat16"))]
    compiled = torch.compile(step, backend="multigraph", dynamic=True, options={"saved_tensors": rules})
    for rows in (8, 5, 8, 8):
        x = torch.randn(rows, 64, device=DEVICE)
        wanted = torch.autograd.grad(step(x), (down, up))
        got = torch.autograd.grad(compiled(x), (down, up))
        same(got, wanted, rtol=2e-2, atol=1e-3)
    assert nothing_fell_back()["packed_tensors"] > 0


def test_a_language_model_as_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization, device_map={"": DEVICE}, dtype=torch.float32
    ).eval()
    assert isinstance(model.model.layers[0].mlp.up_proj, Linear4bit)
    compiled = torch.compile(model, **settings(specialize=[{"input_ids[1]": 8}]))
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=DEVICE), use_cache=False)  # lays out its weights, on a CPU
        for length in (5, 8, 6, 8):
            ids = torch.randint(64, (2, length), device=DEVICE)
            same(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, rtol=2e-3, atol=2e-3)
    assert nothing_fell_back()["variant_calls"] == 2
