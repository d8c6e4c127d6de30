"""Random small training programs, packed and run as graphs: gradients are those of eager, up to what a pack rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from multigraph_backend.saved_tensors.rules import Cast, Scaled
from tests.support.saved_tensors.partitioned import everything, gradients, partition

Operation = Callable[[torch.Tensor], torch.Tensor]

OPERATIONS: list[Operation] = [
    torch.tanh, F.gelu, F.silu, torch.sigmoid, lambda x: x.softmax(-1), lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.T.reshape(x.shape), lambda x: x * x.flip(0), lambda x: x.exp().log1p(), lambda x: x.T.sin().T,
    lambda x: torch.cat([x[:, 8:].cos(), x[:, :8].exp()], 1), lambda x: (x[:, ::2].sigmoid() * x[:, 1::2]).repeat(1, 2),
    lambda x: x.unflatten(1, (4, 4)).transpose(1, 2).tanh().reshape(x.shape), lambda x: x * x.mean(0).exp(),
    lambda x: x.expand(3, *x.shape).sin().sum(0), lambda x: F.max_pool1d(x[None], 3, 1, 1)[0],
    lambda x: x[torch.tensor([1, 0] * (x.shape[0] // 2))] * x, lambda x: F.relu(x) + x.abs().log1p(),
]  # fmt: skip

BOUNDS = [
    (Cast("bf16"), 0.05), (Cast("e4m3"), 0.5), (Scaled("int8"), 0.2), (Scaled("int8", per=8), 0.2),
    (Scaled("e5m2"), 0.6), (Scaled("e4m3", stochastic=True), 0.6), (Scaled("int8", stochastic=True), 0.3),
]  # fmt: skip


def program(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = [OPERATIONS[int(index)] for index in torch.randint(len(OPERATIONS), (4,), generator=generator)]

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight, operation in zip(weights, chosen, strict=True):
            x = operation(x @ weight) + x
        return x

    return function


@pytest.mark.parametrize(("seed", "dynamic"), [(seed, seed % 2 == 1) for seed in range(2 * len(BOUNDS) - 4)])
def test_random_programs(seed: int, dynamic: bool) -> None:
    pack, bound = BOUNDS[seed % len(BOUNDS)]
    function = program(seed)
    torch.manual_seed(seed)
    args = (torch.randn(8, 16), *(torch.randn(16, 16) / 4 for _ in range(4)))
    made = partition(function, everything(pack), dynamic)
    got: Any = gradients(made.run, *args)
    expected = gradients(function, *args)
    torch.testing.assert_close(got[0], expected[0])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got[1:], expected[1:], strict=True)]
    assert 0 < max(errors) <= bound
    (said,) = made.accounts
    assert said.packed >= 3
    assert said.failed is None
    reasons = {str(entry.reason) for entry in said.tensors if entry.packed is None}
    assert not any("cannot be traced" in reason or "came back" in reason for reason in reasons), reasons
