"""torchao: int8 and int4 weights keep variants, which is what a decoder of quantized weights is compiled for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

import multigraph_backend
from tests.support.quick_runs import positive, run


class Layer(torch.nn.Module):
    """The feed-forward half of a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)
        self.gate, self.up, self.down = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_keep_variants(bits: int) -> None:
    torch.manual_seed(0)
    model = Layer().eval()
    settings: dict[int, Any] = {8: Int8WeightOnlyConfig(), 4: IntxWeightOnlyConfig(weight_dtype=torch.int4)}
    quantize_(model, settings[bits])
    compiled = torch.compile(model, backend="multigraph", dynamic=True, options={"specialize": [{"x[1]": 8}]})
    with torch.no_grad():
        for length in (5, 8, 6, 8):
            x = torch.randn(2, length, 64)
            torch.testing.assert_close(compiled(x), model(x))
        fresh = Layer().eval()
        quantize_(fresh, settings[bits])
        model.load_state_dict(fresh.state_dict(), assign=True)  # other weights under the same code
        for length in (5, 8):
            x = torch.randn(2, length, 64)
            torch.testing.assert_close(compiled(x), fresh(x))
    ran = multigraph_backend.stats()
    assert ran["variant_calls"] == ran["generic_calls"] == 3
    assert ran["variants_compiled"] == ran["generic_compiled"] == 1
    assert ran["failures"] == ran["eager_calls"] == 0
    (graph,) = multigraph_backend.explain().to_dict()["regions"]
    assert any("of fixed sizes" in note for note in graph["notes"])


def test_the_benchmark_of_quantized_weights(tmp_path: Path) -> None:
    rows = run("quantized", tmp_path)
    calls = ("prefill, 8 x 16", "decode, 64", "decode, 8", "decode, 1")
    forms = ("eager", "inductor", "inductor per shape", "reduce-overhead", "multigraph")
    assert [(row["weights"], row["call"], row["form"]) for row in rows] == [
        (weights, call, form) for weights in ("Int8WeightOnly", "IntxWeightOnly") for call in calls for form in forms
    ]
    assert positive(rows, "us", "over_stock")
    assert all(float(row["worst"]) < 1e-4 for row in rows)
    ours = [row for row in rows if row["form"] == "multigraph"]
    assert [(row["in_variants"], row["failures"]) for row in ours] == [(1, 0)] * len(ours)
    assert ours[0]["counts"]["variants_compiled"] == len(calls)
    assert "generic_compiled" not in ours[0]["counts"]
