"""What the tests on a GPU share: compiling so that even the smallest program is recorded, comparing, counting."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from multigraph_backend.backend import multigraph
from multigraph_backend.cudagraphs import runtime

CUDA = torch.device("cuda")


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options.setdefault("record_small", True)
    return torch.compile(function, backend=multigraph, options=options)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def fresh() -> None:
    """Let go of all compiled code and its recordings."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()


def tree_counts(name: str) -> int:
    return sum(tree.counts[name] for tree in runtime.trees())
