"""transformers by naming the backend: generate with a static cache and a CompileConfig, by a pipeline, in continuous
batches; each implementation of attention; a training loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CompileConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
)

from tests.support.on_device import DEVICE, ON_GPU, nothing_fell_back, options, replayed, same


@pytest.fixture
def model() -> Any:
    return made()


def made(attention: str = "sdpa", size: int = 8) -> Any:
    """A causal language model; `size` of a head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=4 * size, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE)


def compile_config(**more: Any) -> Any:
    config = CompileConfig(backend="multigraph", mode=None, options=options(**more), fullgraph=False)
    config._compile_all_devices = True  # on GPUs it is so by itself
    return config


@pytest.mark.parametrize("where", ["argument", "generation_config"])
def test_generate_with_a_static_cache(model: Any, where: str) -> None:
    prompt = torch.tensor([[1, 5, 9, 13], [1, 8, 2, 40]], device=DEVICE)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = copy.deepcopy(model).generate(prompt, **settings, disable_compile=True)
    if where == "argument":
        got = model.generate(prompt, **settings, compile_config=compile_config())
    else:
        got = model.generate(prompt, generation_config=GenerationConfig(**settings, compile_config=compile_config()))
    assert torch.equal(got, expected)
    nothing_fell_back()
    replayed()


def test_generate_twice_with_longer_prompts_beams_and_samples(model: Any) -> None:
    twin = copy.deepcopy(model)
    ways: list[dict[str, Any]] = [
        {"max_new_tokens": 5, "do_sample": False},
        {"max_new_tokens": 4, "do_sample": False, "num_beams": 2},
        {"max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_k": 8},
    ]
    for length in (3, 7):
        for way in ways:
            prompt = torch.randint(1, 64, (2, length), device=DEVICE)
            mask = torch.ones_like(prompt)
            mask[0, 0] = 0  # padded on the left
            settings = {**way, "attention_mask": mask, "cache_implementation": "static"}
            torch.manual_seed(7)
            expected = twin.generate(prompt, **settings, disable_compile=True)
            torch.manual_seed(7)
            got = model.generate(prompt, **settings, compile_config=compile_config())
            assert torch.equal(got, expected), way
    nothing_fell_back()
    replayed()


@pytest.mark.parametrize("attention", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_each_attention_answers_as_eager_does(attention: str) -> None:
    """Of causal and padded inputs; flex attention is compiled by whoever compiles the model, and needs larger heads on
    a GPU."""
    model = made(attention, 16)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    model.compile(backend="multigraph", dynamic=True, options=options())
    for length in (8, 12, 9, 12, 12):
        ids = torch.randint(1, 64, (2, length), device=DEVICE)
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        with torch.no_grad():
            got = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            wanted = twin(input_ids=ids, attention_mask=mask, use_cache=False).logits
        same(got[mask.bool()], wanted[mask.bool()], rtol=1e-3, atol=1e-4)
    ran = nothing_fell_back()
    assert ran["generic_calls"] >= 5


@pytest.mark.slow
def test_a_pipeline_over_a_compiled_model(model: Any) -> None:
    words = ["[PAD]", "[BOS]", "[UNK]", *(f"w{number}" for number in range(61))]
    tokens = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", bos_token="[BOS]", unk_token="[UNK]", padding_side="left"
    )
    twin = copy.deepcopy(model)
    model.compile(backend="multigraph", dynamic=True, options=options())
    texts = ["w3 w4 w5", "w9 w1", "w8 w8 w8 w2 w1"]
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "batch_size": 2}
    said = [
        TextGenerationPipeline(model=each, tokenizer=tokenizer, device=DEVICE)(texts, **settings)
        for each in (model, twin)
    ]
    assert said[0] == said[1]
    assert nothing_fell_back()["generic_calls"] >= 4


@pytest.mark.parametrize("graphs", [False, True] if ON_GPU else [False])
def test_continuous_batches(graphs: bool) -> None:
    """With graphs, those are transformers' own, and what is compiled becomes part of them."""
    configuration = pytest.importorskip("transformers.generation.configuration_utils")
    model = made("sdpa")
    prompts = [[1, 5, 9, 13], [1, 8], [1, 4, 4, 4, 4, 4, 7], [1, 40, 41]]
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)

    def batches(**more: Any) -> dict[str, list[int]]:
        how = configuration.ContinuousBatchingConfig(
            use_cuda_graph=graphs, num_blocks=64, block_size=16, max_batch_tokens=64, max_memory_percent=0.2, **more
        )
        done = made("sdpa") if not more else model
        found = done.generate_batch(prompts, generation_config=generation, continuous_batching_config=how)
        return {str(output.prompt_ids): list(output.generated_tokens) for output in found.values()}

    expected = batches()
    got = batches(varlen_compile_config=compile_config())
    assert len(got) == len(prompts)
    assert got == expected
    assert nothing_fell_back()["generic_calls"] + nothing_fell_back()["variant_calls"] > 0


def test_a_compiled_forward_with_labels_trains_as_eager_does(model: Any) -> None:
    twin = copy.deepcopy(model)
    model.compile(backend="multigraph", dynamic=True, options=options(specialize=[{"input_ids[1]": 8}]))
    for length in (8, 6, 8):
        ids = torch.randint(0, 64, (2, length), device=DEVICE)
        for each in (model, twin):
            each(input_ids=ids, labels=ids).loss.backward()
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        same(got.grad, wanted.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert nothing_fell_back()["variant_calls"] == 2
