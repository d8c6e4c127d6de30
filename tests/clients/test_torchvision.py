"""torchvision: a ResNet, whose running statistics a training step changes, and a detector, which Dynamo breaks up."""

from __future__ import annotations

import copy

import torch
import torchvision

import multigraph_backend

AOT = {"compiler": "aot_eager"}


def test_a_resnet_trains_with_its_statistics_and_infers() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options={**AOT, "specialize": [{"x[0]": 4}]})
    for rows in (3, 4):
        x = torch.randn(rows, 3, 64, 64)
        for each in (compiled, twin):
            each(x).square().mean().backward()
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()))
    ran = multigraph_backend.stats()
    assert ran["generic_calls"] == ran["variant_calls"] == 1
    assert ran["failures"] == ran["eager_calls"] == 0


def test_the_backbone_of_a_detector() -> None:
    torch.manual_seed(0)
    detector = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    ).eval()
    twin = copy.deepcopy(detector)
    detector.backbone.compile(backend="multigraph", dynamic=True, options=AOT)
    with torch.no_grad():
        x = [torch.rand(3, 64, 48)]
        (got,), (wanted,) = detector(x), twin(x)
    torch.testing.assert_close(got, wanted)
    assert multigraph_backend.stats()["generic_calls"] == 1
    assert multigraph_backend.stats()["eager_calls"] == 0
