"""torchao: int8 and int4 weights keep variants, which is what a decoder of quantized weights is compiled for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

import multigraph_backend
from multigraph_backend import Cast, Match, Rule
from tests.support.on_device import DEVICE, ON_GPU, nothing_fell_back, replayed, same, settings
from tests.support.quick_runs import positive, run


class Layer(torch.nn.Module):
    """The feed-forward half of a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)
        self.gate, self.up, self.down = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_keep_variants(bits: int) -> None:
    torch.manual_seed(0)
    model = Layer().eval().to(DEVICE)
    configs: dict[int, Any] = {8: Int8WeightOnlyConfig(), 4: IntxWeightOnlyConfig(weight_dtype=torch.int4)}
    quantize_(model, configs[bits])
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options={"specialize": [{"x[1]": 8}]})
    with torch.no_grad():
        for length in (5, 8, 6, 8):
            x = torch.randn(2, length, 64, device=DEVICE)
            same(compiled(x), model(x))
        fresh = Layer().eval().to(DEVICE)
        quantize_(fresh, configs[bits])
        model.load_state_dict(fresh.state_dict(), assign=True)  # other weights under the same code
        for length in (5, 8):
            x = torch.randn(2, length, 64, device=DEVICE)
            same(compiled(x), fresh(x))
    ran = nothing_fell_back()
    assert ran["variant_calls"] == ran["generic_calls"] == 3
    assert ran["variants_compiled"] == ran["generic_compiled"] == 1
    (graph,) = multigraph_backend.explain().to_dict()["regions"]
    assert any("of fixed sizes" in note for note in graph["notes"])
    with torch.no_grad():
        for _ in range(3):
            same(compiled(x), fresh(x))
    nothing_fell_back()
    replayed()


def test_an_adapter_over_quantized_weights_trains_with_saved_tensors_packed() -> None:
    """As QLoRA has it: what is frozen is quantized, what is trained is not."""
    torch.manual_seed(0)
    model = Layer().to(DEVICE)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    down, up = (torch.randn(64, 64, device=DEVICE).mul_(0.1).requires_grad_() for _ in range(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) + torch.tanh(x @ down) @ up).square().mean()
        return loss

    rules = [Rule(Match(min_bytes=0), Cast("bfloat16"))]
    compiled = torch.compile(step, backend="multigraph", dynamic=True, options={"saved_tensors": rules})
    for rows in (8, 5, 8, 8, 8):
        x = torch.randn(rows, 64, device=DEVICE)
        wanted = torch.autograd.grad(step(x), (down, up))
        got = torch.autograd.grad(compiled(x), (down, up))
        same(got, wanted, rtol=2e-2, atol=1e-3)
    nothing_fell_back()
    assert "packed" in str(multigraph_backend.explain())
    replayed()


if ON_GPU:

    def test_training_in_fp8_is_what_inductor_makes_of_it() -> None:
        """torchao's own fp8 products; they are meant to be compiled, so stock's compile is what they are held to."""
        from torchao.float8 import convert_to_float8_training

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
        model = convert_to_float8_training(model.to(DEVICE, torch.bfloat16))
        twin = copy.deepcopy(model)
        ours, theirs = torch.compile(model, **settings()), torch.compile(twin, dynamic=True)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]
        for rows in (32, 48, 32, 32, 48):
            x = torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16)
            losses = []
            for each, optimizer in zip((ours, theirs), optimizers, strict=True):
                loss = each(x).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            same(*losses, rtol=1e-2)
        same(list(model.parameters()), list(twin.parameters()), rtol=2e-2, atol=2e-3)
        nothing_fell_back()
        replayed()


def test_the_benchmark_of_quantized_weights(tmp_path: Path) -> None:
    rows = run("quantized", tmp_path)
    calls = ("prefill, 8 x 16", "decode, 64", "decode, 8", "decode, 1")
    forms = ("eager", "inductor", "inductor per shape", "reduce-overhead", "multigraph")
    assert [(row["weights"], row["call"], row["form"]) for row in rows] == [
        (weights, call, form) for weights in ("Int8WeightOnly", "IntxWeightOnly") for call in calls for form in forms
    ]
    assert positive(rows, "us", "over_stock")
    assert all(float(row["worst"]) < 1e-4 for row in rows)
    ours = [row for row in rows if row["form"] == "multigraph"]
    assert [(row["in_variants"], row["failures"]) for row in ours] == [(1, 0)] * len(ours)
    assert ours[0]["counts"]["variants_compiled"] == len(calls)
    assert "generic_compiled" not in ours[0]["counts"]
