"""peft: LoRA on a causal language model, trained, switched to another adapter, and merged, under one compiled model."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.on_device import DEVICE, nothing_fell_back, same, settings


def adapted() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    model.add_adapter("other", lora)
    return model.to(DEVICE)


def test_lora_trains_switches_and_merges_as_eager_does() -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, **settings())
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1) for each in (model, twin)]
    for length in (8, 6):
        ids = torch.randint(0, 32, (2, length), device=DEVICE)
        for each, optimizer in zip((compiled, twin), optimizers, strict=True):
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        same(got, wanted)
    ids = torch.randint(0, 32, (2, 7), device=DEVICE)
    seen = []
    for change in (lambda m: m.set_adapter("other"), lambda m: m.set_adapter("default"), lambda m: m.merge_adapter()):
        change(model)
        change(twin)
        with torch.no_grad():
            seen.append(compiled(input_ids=ids).logits)
            same(seen[-1], twin(input_ids=ids).logits)
    assert not torch.allclose(seen[0], seen[1])  # the adapters differ
    assert nothing_fell_back()["generic_calls"] >= 5
