"""Operators whose numbers Inductor gets wrong have eager's numbers on a CUDA device, too."""

from __future__ import annotations

import torch

import multigraph_backend

INF, NAN = float("inf"), float("nan")


def test_floor_divisions_are_eagers_with_their_signs() -> None:
    edges = torch.tensor([0.0, -0.0, 1.0, -0.3, 0.3, 3.0, -7.5, INF, -INF, NAN, 1e5, 9.0], device="cuda")
    x, y = torch.cartesian_prod(edges, edges).repeat(2, 1).unbind(1)

    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x // y, x // 0.3, x // -3, x // 0.0, 5 // y, x % y, x % 0.3, (x.double() // y), x.half() // y.half()]

    run = torch.compile(program, backend="multigraph", options={"on_failure": "raise"})
    for found, expected in zip(run(x, y), program(x, y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
        signs = (each.signbit() & ~each.isnan() for each in (found, expected))
        assert torch.equal(*signs)
    ran = multigraph_backend.stats()
    assert ran["failures"] == ran["eager_calls"] == 0
