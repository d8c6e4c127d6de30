"""Lightning and Fabric by naming the backend, with a metric of torchmetrics in the loop."""

from __future__ import annotations

import copy
from typing import Any

import lightning
import torch
import torchmetrics

from tests.support.on_device import DEVICE, nothing_fell_back, same, settings


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        predicted = self.net(x)
        self.error.update(predicted.detach(), y)
        return torch.nn.functional.mse_loss(predicted, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(model: Any) -> None:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(10, 4), torch.randn(10, 1))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator=DEVICE.type, devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, 4))


def test_a_compiled_module_is_fitted_as_eager_is() -> None:
    torch.manual_seed(0)
    module = Regression()
    twin = copy.deepcopy(module)
    fit(twin)
    fit(torch.compile(module, **settings()))
    same(list(module.parameters()), list(twin.parameters()))
    same(module.error.compute(), twin.error.compute())
    assert nothing_fell_back()["generic_calls"] >= 3


def test_fabric_takes_a_compiled_model() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, device=DEVICE)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4, device=DEVICE)
    twin(x).square().mean().backward()
    fabric = lightning.Fabric(accelerator=DEVICE.type, devices=1)
    compiled, optimizer = fabric.setup(torch.compile(model, **settings()), torch.optim.SGD(model.parameters(), 0.0))
    fabric.backward(compiled(x).square().mean())
    optimizer.step()
    same(model.weight.grad, twin.weight.grad)
    assert nothing_fell_back()["generic_calls"] == 1
