"""transformers by naming the backend: generate with a static cache and a CompileConfig, pipelines, a training loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import multigraph_backend

AOT = {"compiler": "aot_eager"}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def nothing_fell_back() -> None:
    ran = multigraph_backend.stats()
    assert ran["failures"] == ran["eager_calls"] == 0, str(multigraph_backend.explain())
    assert ran["regions"] > 0


@pytest.mark.parametrize("where", ["argument", "generation_config"])
def test_generate_with_a_static_cache(model: Any, where: str) -> None:
    compile_config = CompileConfig(backend="multigraph", mode=None, options=AOT, fullgraph=False)
    compile_config._compile_all_devices = True  # on GPUs it is so by itself
    prompt = torch.tensor([[1, 5, 9, 13], [1, 8, 2, 40]])
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = copy.deepcopy(model).generate(prompt, **settings, disable_compile=True)
    if where == "argument":
        got = model.generate(prompt, **settings, compile_config=compile_config)
    else:
        got = model.generate(prompt, generation_config=GenerationConfig(**settings, compile_config=compile_config))
    assert torch.equal(got, expected)
    nothing_fell_back()


def test_a_compiled_forward_with_labels_trains_as_eager_does(model: Any) -> None:
    twin = copy.deepcopy(model)
    model.compile(backend="multigraph", dynamic=True, options={**AOT, "specialize": [{"input_ids[1]": 8}]})
    for length in (8, 6, 8):
        ids = torch.randint(0, 64, (2, length))
        for each in (model, twin):
            each(input_ids=ids, labels=ids).loss.backward()
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, msg=lambda text, name=name: f"{name}: {text}")
    nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 2
