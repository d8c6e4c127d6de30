"""Padded calls on a CUDA device: token counts at random are served by as many recordings as sizes are declared."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import multigraph_backend

CUDA = torch.device("cuda")
LISTED = [2, 4, 8, 16, 32, 64]


class Step(torch.nn.Module):
    """A decoding step over tokens: embedding, positions, norm, gated MLP, attention of each over its own state."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, width)
        self.norm, self.last = torch.nn.LayerNorm(width), torch.nn.Linear(width, 1000)
        self.up, self.gate = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(ids) + torch.sin(positions.float())[:, None])
        q, kv = h.view(-1, 4, 1, 32), state.view(-1, 4, 6, 32)
        h = h + torch.nn.functional.scaled_dot_product_attention(q, kv, kv).reshape(h.shape)
        return self.last(h + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h)))


def given(tokens: int) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(0, 1000, (tokens,), device=CUDA)
    made = ids, torch.arange(tokens, device=CUDA), torch.randn(tokens, 4 * 6 * 32, device=CUDA)
    for tensor in made:
        torch._dynamo.mark_dynamic(tensor, 0)
    return made


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_random_token_counts_make_at_most_one_recording_for_each_size(mode: Any) -> None:
    torch.manual_seed(0)
    model = Step().to(CUDA).eval()
    options = {"pad": {"ids[0]": LISTED}, "record_small": True}
    compiled = torch.compile(model, backend="multigraph", options=options)
    choose = random.Random(0)
    with mode():
        for _ in range(120):
            arguments = given(choose.randint(2, 64))
            torch.testing.assert_close(compiled(*arguments), model(*arguments), rtol=1e-3, atol=1e-3)
    (region,) = multigraph_backend.explain().regions
    assert region.padding is not None
    assert region.padding.state == "proven", region.padding
    assert region.padding.calls >= 80
    counted = multigraph_backend.stats()
    assert counted["failures"] == counted["eager_calls"] == 0, multigraph_backend.explain()
    assert 1 <= counted["recordings"] <= len(LISTED), multigraph_backend.explain()


def test_results_that_are_held_stay_what_they_are() -> None:
    """Outputs are views of what a recording writes: a later replay of the same size must not write over one."""
    torch.manual_seed(0)
    model = Step().to(CUDA).eval()
    options = {"pad": {"ids[0]": LISTED}, "record_small": True}
    compiled = torch.compile(model, backend="multigraph", options=options)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for tokens in (5, 6, 7, 8, 5, 6, 7, 5, 30, 17, 5, 6) * 3:
            arguments = given(tokens)
            held.append((compiled(*arguments), model(*arguments)))
            held = held[-9:]
            for got, wanted in held:
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert multigraph_backend.stats()["padded_calls"] >= 24


def test_inputs_that_are_changed_get_their_real_rows_back() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(n[:, None])
        return torch.tanh(x)

    compiled = torch.compile(function, backend="multigraph", options={"pad": {"x[0]": LISTED}, "record_small": True})
    with torch.no_grad():
        for tokens in (5, 6, 7, 8, 5, 6, 30, 17, 5):
            x, n = torch.randn(tokens, 64, device=CUDA), torch.randint(0, 9, (tokens,), device=CUDA)
            for tensor in (x, n):
                torch._dynamo.mark_dynamic(tensor, 0)
            mine = x.clone()
            torch._dynamo.mark_dynamic(mine, 0)
            torch.testing.assert_close(compiled(mine, n), function(x, n))
            torch.testing.assert_close(mine, x)
    assert multigraph_backend.stats()["padded_calls"] == 8  # all but the declared size


def test_a_trial_with_garbage_harms_no_process() -> None:
    """Floating-point garbage must not become an index: that would end every later use of the device."""
    table = torch.randn(64, 16, device=CUDA)

    def function(x: torch.Tensor) -> torch.Tensor:
        bins = (x.sigmoid() * 60).long()
        return torch.fft.fft(table[bins], dim=-1).real

    compiled = torch.compile(function, backend="multigraph", options={"pad": {"x[0]": LISTED}})
    with torch.no_grad():
        for tokens in (5, 9, 30):
            x = torch.randn(tokens, device=CUDA)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), function(x), rtol=1e-3, atol=1e-3)
        torch.cuda.synchronize()
    (region,) = multigraph_backend.explain().regions
    assert region.padding is not None
    assert (region.padding.state, region.padding.calls) == ("tried", 3), region.padding
