"""Random small training programs, layers of operations whose backwards save different things."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Operation = Callable[[torch.Tensor], torch.Tensor]


OPERATIONS: list[Operation] = [
    torch.tanh, F.gelu, F.silu, torch.sigmoid, lambda x: x.softmax(-1), lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.T.reshape(x.shape), lambda x: x * x.flip(0), lambda x: x.exp().log1p(), lambda x: x.T.sin().T,
    lambda x: torch.cat([x[:, 8:].cos(), x[:, :8].exp()], 1), lambda x: (x[:, ::2].sigmoid() * x[:, 1::2]).repeat(1, 2),
    lambda x: x.unflatten(1, (4, 4)).transpose(1, 2).tanh().reshape(x.shape), lambda x: x * x.mean(0).exp(),
    lambda x: x.expand(3, *x.shape).sin().sum(0), lambda x: F.max_pool1d(x[None], 3, 1, 1)[0],
    lambda x: x[torch.tensor([1, 0] * (x.shape[0] // 2))] * x, lambda x: F.relu(x) + x.abs().log1p(),
]  # fmt: skip


def program(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = [OPERATIONS[int(index)] for index in torch.randint(len(OPERATIONS), (4,), generator=generator)]

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight, operation in zip(weights, chosen, strict=True):
            x = operation(x @ weight) + x
        return x

    return function
