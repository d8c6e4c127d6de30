"""timm: a vision transformer and a convolutional net, inference and a step of training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch

from tests.support.on_device import DEVICE, nothing_fell_back, same, settings

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_infers_and_trains_as_eager_does(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **MODELS[name]).to(DEVICE)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, **settings(specialize=[{"x[0]": 4}]))
    for rows in (3, 4):
        x, y = torch.randn(rows, 3, 32, 32, device=DEVICE), torch.randint(0, 5, (rows,), device=DEVICE)
        for each in (compiled, twin):
            torch.nn.functional.cross_entropy(each(x), y).backward()
        for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            same(got.grad, wanted.grad)
    model.eval()
    twin.eval()
    with torch.no_grad():
        x = torch.randn(4, 3, 32, 32, device=DEVICE)
        same(compiled(x), twin(x))
    ran = nothing_fell_back()
    assert ran["generic_calls"] == 1
    assert ran["variant_calls"] == 2
