"""What random programs found: orders of drops, failures, threads and streams that ordinary tests do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated.pieces import Bench, assert_equal, values


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


def ahead(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(), x * 3


def back(args: list[Any]) -> tuple[torch.Tensor]:
    """As compiled code does it: what is needed no more goes at once, and its memory serves again."""
    gradient, saved = args
    args.clear()
    scaled = saved * gradient
    del saved
    shifted = scaled + 1
    del scaled
    return (shifted * 2,)


@pytest.mark.parametrize("holder", ["a variable", "autograd"])
def test_a_saved_tensor_that_is_used_twice_stays_after_its_recording_was_made_for_once(holder: str) -> None:
    bench = Bench()
    forward = bench.piece(ahead, 1, 2, visible=[True, False])
    backward = bench.piece(double, 2, 1, static=[1], is_backward=True)
    backward.function = back

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            total, saved = forward([x])
            ctx.save_for_backward(saved)
            return total

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            args = [gradient, *ctx.saved_tensors]
            ctx.maybe_clear_saved_tensors()  # does nothing where the graph is retained
            return backward(args)[0]

    def step(uses: int) -> None:
        x = values().requires_grad_()
        if holder == "autograd":
            total = Both.apply(x)
            gradients = [torch.autograd.grad(total, x, retain_graph=use + 1 < uses)[0] for use in range(uses)]
        else:
            gradients = []
            _, saved = forward([x.detach()])
            for use in range(uses):
                args = [torch.ones(()), saved]
                if use + 1 == uses:
                    del saved
                gradients.append(backward(args)[0])
                del args
        for gradient in gradients:
            assert_equal((gradient,), ((x.detach() * 3 + 1) * 2,))

    for _ in range(4):
        step(1)
    node = next(node for node in bench.tree.root.below() if node.depth == 2)
    assert node.recording is not None
    assert node.recording.consumed
    replays = bench.replays()
    for uses in (2, 1, 2, 3, 1):
        step(uses)
    assert bench.unrecorded(forward, backward) == {}
    assert bench.replays() == replays + 5 + 9
