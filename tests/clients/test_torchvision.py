"""torchvision: a ResNet, whose running statistics a training step changes, and a detector, which Dynamo breaks up."""

from __future__ import annotations

import copy

import torch
import torchvision

from tests.support.on_device import DEVICE, nothing_fell_back, same, settings


def test_a_resnet_trains_with_its_statistics_and_infers() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5).to(DEVICE, torch.float64)  # behind many norms
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, **settings(specialize=[{"x[0]": 4}]))
    for rows in (3, 4):
        x = torch.randn(rows, 3, 64, 64, device=DEVICE, dtype=torch.float64)
        for each in (compiled, twin):
            each(x).square().mean().backward()
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        same(got.grad, wanted.grad, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    same(list(model.buffers()), list(twin.buffers()))
    ran = nothing_fell_back()
    assert ran["generic_calls"] == ran["variant_calls"] == 1


def test_the_backbone_of_a_detector() -> None:
    torch.manual_seed(0)
    detector = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    ).eval().to(DEVICE)  # fmt: skip
    twin = copy.deepcopy(detector)
    detector.backbone.compile(**settings())
    with torch.no_grad():
        x = [torch.rand(3, 64, 48, device=DEVICE)]
        (got,), (wanted,) = detector(x), twin(x)
    same(got, wanted)
    assert nothing_fell_back()["generic_calls"] == 1
