"""accelerate, and transformers' Trainer on top of it: with the plugin, and as they are with torch's variable."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo import config as dynamo_config
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from multigraph_backend import redirect
from multigraph_backend.integrations import accelerate_plugin
from tests.support.on_device import DEVICE, ON_GPU, nothing_fell_back, options, same


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def trained(**settings: Any) -> list[torch.Tensor]:
    """Two steps of two accumulated batches each."""
    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one, with the plugin of its first user
    accelerator = Accelerator(cpu=not ON_GPU, gradient_accumulation_steps=2, **settings)
    torch.manual_seed(1)
    model = small()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for rows in (4, 6, 4, 5):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.randn(rows, 4, device=DEVICE)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_plugin_names_multigraph() -> None:
    expected = trained()
    plugin = accelerate_plugin(options=options(), dynamic=True)
    got = trained(dynamo_plugin=plugin)
    same(got, expected)
    assert nothing_fell_back()["generic_calls"] >= 4


def test_its_own_setting_is_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", json.dumps({"*": options()}))
    expected = trained()
    with dynamo_config.patch(debug_backend_override=redirect.EVERYTHING):
        got = trained(dynamo_backend="inductor")
    same(got, expected)
    assert nothing_fell_back()["generic_calls"] >= 4


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(6) * (index + 1) % 32
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("how", ["model.compile", "torch_compile"])
def test_the_trainer(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compiling the model before, and by its own switch, redirected; with accumulated gradients."""
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", json.dumps({"*": options()}))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    twin = copy.deepcopy(model)

    def train(model: Any, **settings: Any) -> list[torch.Tensor]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            report_to=[], use_cpu=not ON_GPU, save_strategy="no", disable_tqdm=True, logging_strategy="no", **settings,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
        return [parameter.detach() for parameter in model.parameters()]

    expected = train(twin)
    if how == "model.compile":
        model.compile(backend="multigraph")
        got = train(model)
    else:
        with dynamo_config.patch(debug_backend_override=redirect.EVERYTHING):
            got = train(model, torch_compile=True)
    same(got, expected)
    assert nothing_fell_back()["generic_calls"] >= 4
