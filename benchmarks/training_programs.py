"""What saved_tensors.py trains: a stack of decoder blocks, or a language model, as a program of its inputs.

A part of benchmarks/saved_tensors.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import workloads
from measure import Call, own_code

Around = Callable[..., torch.Tensor]

# how far from eager's a gradient may be, by what is packed: a mistake is off by about 1
BOUNDS = {
    torch.float32: {"": 1e-3, "fp8": 0.1, "fp8 products": 0.15, "int8": 0.05},
    torch.bfloat16: {"": 0.05, "fp8": 0.15, "fp8 products": 0.2, "int8": 0.08},
}
LANGUAGE = 4  # how much farther in a language model: gradients of its norms and embeddings are small sums of much


class Stack:
    """The decoder blocks and their inputs: what one block gives has `least` bytes."""

    def __init__(self, device: str, layers: int | None, quick: bool) -> None:
        torch.manual_seed(0)
        large = device == "cuda" and not quick
        default, width, self.batch, self.length = (12, 1024, 8, 1024) if large else (1, 64, 2, 64)
        if device == "cpu" and not quick:
            default, width, self.batch, self.length = 4, 256, 4, 256
        self.layers, self.device, self.dtype = layers or default, device, workloads.dtype_on(device)
        self.model = workloads.Decoder(self.layers, width, width // 64).to(device, self.dtype)
        self.parameters = tuple(self.model.parameters())
        self.least = self.batch * self.length * width * self.dtype.itemsize

    def inputs(self) -> tuple[torch.Tensor, ...]:
        shape = (self.batch, self.length, self.model.width)
        return (torch.randn(shape, device=self.device, dtype=self.dtype),)

    def program(self, around: Around | None = None) -> Call:
        """The loss of a batch; `around` is called with a block and its input in place of the block."""
        model = self.model

        def program(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            assert isinstance(y, torch.Tensor)
            return y.pow(2).mean()

        def by_block(x: torch.Tensor) -> torch.Tensor:
            assert around is not None
            for block in model.blocks:
                x = around(block, x)
            return x.pow(2).mean()

        return own_code(program if around is None else by_block)

    def first_blocks(self) -> int:
        return max(1, self.layers // 12)

    def bound(self, pack: str) -> float:
        """How far gradients may be from eager's."""
        return BOUNDS[self.dtype].get(pack, BOUNDS[self.dtype][""])


class Language(Stack):
    """A language model and token ids, in place of the stack."""

    def __init__(self, name: str, device: str, layers: int | None) -> None:
        torch.manual_seed(0)
        _, usual, (self.batch, self.length) = workloads.LANGUAGE_MODELS[name]
        self.layers, self.device, self.dtype = layers or usual, device, workloads.dtype_on(device)
        with torch.device(device):
            self.language = workloads.language_model(name, layers).to(self.dtype)
        self.parameters = tuple(self.language.parameters())
        self.least = self.batch * self.length * self.language.width * self.dtype.itemsize

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (torch.randint(self.language.words, (self.batch, self.length + 1), device=self.device),)

    def program(self, around: Around | None = None) -> Call:
        model = self.language

        def program(ids: torch.Tensor) -> torch.Tensor:
            loss = model(ids, around)
            assert isinstance(loss, torch.Tensor)
            return loss

        return own_code(program)

    def bound(self, pack: str) -> float:
        return LANGUAGE * super().bound(pack)
