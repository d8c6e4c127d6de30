"""What random programs found: orders of drops, failures, threads and streams that ordinary tests do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated.pieces import Bench, assert_equal, call_right, values


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


# ---------------------------------------------------------------- outputs that are no memory of the recording


def test_empty_outputs_of_different_calls_share_nothing() -> None:
    def some(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty((0, 3)), x + 1

    bench = Bench()
    piece = bench.piece(some, 1, 2)
    for _ in range(3):
        empty = call_right(piece, some, values())[0]
        assert empty.shape == (0, 3)
        other = call_right(piece, some, values())[0]
        torch.add(torch.ones(4), 1, out=empty)  # grows it
        torch.add(torch.ones(4), 2, out=other)
        assert_equal((empty, other), (torch.full((4,), 2.0), torch.full((4,), 3.0)))
    assert bench.unrecorded(piece) == {}


@pytest.mark.parametrize("stays", [False, True])
def test_an_output_over_one_of_several_inputs_that_share_memory(stays: bool) -> None:
    """Whichever of them it is described by, it is the memory that the plain code returns, in the same layout."""

    def parts(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y[1:], z.t(), x.view(-1, 2), y, z, x, y.sum()

    bench = Bench()
    piece = bench.piece(parts, 3, 7, static=[0, 1, 2] if stays else [])
    base = torch.randn(24)
    for round_ in range(6):
        if not stays:
            base = torch.randn(24)
        base.normal_()
        if stays or round_ % 3:
            x, y, z = base[2:14], base[5:12], base[8:20].view(3, 4)
        else:  # other parts than when it was recorded, and memory of their own
            x, y, z = base[4:16], base[3:10], torch.randn(30)[1:13].view(3, 4)
        outputs = call_right(piece, parts, x, y, z)
        for output, expected in zip(outputs[:6], parts(x, y, z)[:6], strict=True):
            assert (output.data_ptr(), output.stride()) == (expected.data_ptr(), expected.stride())
    assert bench.unrecorded(piece) == {}
    assert bench.replays() == 5
