"""Programs whose backward writes into what was saved, and how often it was compiled again or given copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import multigraph_backend

Function = Callable[..., Any]


def writes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Inductor's backward of it writes into what was saved: there is nothing else of that size."""
    return (x @ w).sin().exp().softmax(-1)


def also_saves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return writes((x @ w).tanh(), w)


def compiled(function: Function, **options: Any) -> Function:
    run: Function = torch.compile(function, backend="multigraph", options=options, dynamic=True)
    return run


def counted() -> tuple[int, int]:
    stats = multigraph_backend.stats()
    assert stats["failures"] == stats["eager_calls"] == 0
    return stats["retained_backwards"], stats["copied_backwards"]
