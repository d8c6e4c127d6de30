"""Random small training programs, packed and run as graphs: gradients are those of eager, up to what a pack rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multigraph_backend.saved_tensors.rules import Cast, Scaled
from tests.support.saved_tensors.partitioned import everything, gradients, partition
from tests.support.saved_tensors.random_programs import program

BOUNDS = [
    (Cast("bf16"), 0.05), (Cast("e4m3"), 0.5), (Scaled("int8"), 0.2), (Scaled("int8", per=8), 0.2),
    (Scaled("e5m2"), 0.6), (Scaled("e4m3", stochastic=True), 0.6), (Scaled("int8", stochastic=True), 0.3),
]  # fmt: skip


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
