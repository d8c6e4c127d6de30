"""What an attention's backward reads after it was packed lies in memory as it did before: operators of attention take
tensors however they lie, and keep plans by how some of them do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from multigraph_backend import Cast, Match, Rule, Scaled
from multigraph_backend.backend import multigraph
from multigraph_backend.saved_tensors.rules import Pack
from tests.support.saved_tensors.partitioned import everything, gradients, partition, text

HEADS, WIDTH = 4, 64


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    batch, tokens, _ = x.shape
    q, k, v = (x.tanh() @ w).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, tokens, WIDTH).sin()


class Layouts(TorchDispatchMode):
    """Strides of the tensors that the backward of an attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func) and "backward" in str(func):
            self.seen.append([arg.stride() for arg in args if isinstance(arg, torch.Tensor)])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dynamic", [False, True])
def test_only_what_an_attention_reads_is_held_to_its_place_in_memory(dynamic: bool) -> None:
    x, w = torch.randn(2, 8, WIDTH), torch.randn(WIDTH, 3 * WIDTH) / 8
    packed = partition(attention, everything(Cast("bfloat16")), dynamic=dynamic)
    for got, wanted in zip(gradients(packed.run, x, w), gradients(attention, x, w), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
    (backward,) = packed.backward
    held = [line for line in text(backward).splitlines() if "= inductor_force_stride_order(" in line]
    assert len(held) == 2  # query, key and value, which are one buffer, and the output; the sums of weights are kept
    assert packed.accounts[0].packed > len(held)


@pytest.mark.parametrize("pack", [Cast("bfloat16"), Scaled("int8")], ids=str)
def test_compiled_code_gives_an_attention_the_same_layouts_packed_or_not(pack: Pack) -> None:
    x, w = torch.randn(2, 8, WIDTH), (torch.randn(WIDTH, 3 * WIDTH) / 8).requires_grad_()
    layouts = []
    for rules in ([], [Rule(Match(min_bytes=0), pack)]):
        run = torch.compile(attention, backend=multigraph, options={"saved_tensors": rules})
        run(x, w).sum().backward()
        out = run(x, w)
        with Layouts() as seen:
            out.sum().backward()
        layouts.append(seen.seen)
    assert layouts[0] == layouts[1]
    assert len(layouts[0]) == 1
