"""Tests of libraries run where they would be used: on a GPU, compiled by Inductor and recorded; else on the CPU, by
aot_eager, which compiles nothing and so takes a second."""

from __future__ import annotations

from typing import Any

import torch

import multigraph_backend

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
COMPILER: dict[str, Any] = {} if ON_GPU else {"compiler": "aot_eager"}


def options(**more: Any) -> dict[str, Any]:
    """Options of multigraph for a test of a library."""
    return COMPILER | more


def settings(**more: Any) -> dict[str, Any]:
    """Arguments of torch.compile; `more` are options."""
    return {"backend": "multigraph", "dynamic": True, "options": options(**more)}


def same(got: Any, wanted: Any, **how: Any) -> None:
    """Equal to eager's: Inductor's kernels for a GPU sum in another order."""
    tolerance: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-4} if ON_GPU else {}
    torch.testing.assert_close(got, wanted, **(tolerance | how))


def nothing_fell_back() -> dict[str, int]:
    """The counts; raises where a compile failed, or a call ran eagerly."""
    ran = multigraph_backend.stats()
    assert ran["failures"] == ran["eager_calls"] == 0, str(multigraph_backend.explain())
    assert ran["regions"] > 0
    return ran


def replayed() -> None:
    """On a GPU: calls have been answered by recordings."""
    if ON_GPU:
        pieces = [piece for device in multigraph_backend.explain().recordings for piece in device.pieces]
        assert sum(piece.replays for piece in pieces) > 0, str(multigraph_backend.explain())
