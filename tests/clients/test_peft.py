"""peft: LoRA on a causal language model, trained, switched to another adapter, and merged, under one compiled model."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import multigraph_backend


def adapted() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(LlamaForCausalLM(config), settings)
    model.add_adapter("other", settings)
    return model


def test_lora_trains_switches_and_merges_as_eager_does() -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options={"compiler": "aot_eager"})
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1) for each in (model, twin)]
    for length in (8, 6):
        ids = torch.randint(0, 32, (2, length))
        for each, optimizer in zip((compiled, twin), optimizers, strict=True):
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)
    ids = torch.randint(0, 32, (2, 7))
    seen = []
    for change in (lambda m: m.set_adapter("other"), lambda m: m.set_adapter("default"), lambda m: m.merge_adapter()):
        change(model)
        change(twin)
        with torch.no_grad():
            seen.append(compiled(input_ids=ids).logits)
            torch.testing.assert_close(seen[-1], twin(input_ids=ids).logits)
    assert not torch.allclose(seen[0], seen[1])  # the adapters differ
    ran = multigraph_backend.stats()
    assert ran["generic_calls"] >= 5
    assert ran["failures"] == ran["eager_calls"] == 0
