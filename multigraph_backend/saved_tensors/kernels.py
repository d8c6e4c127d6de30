"""Kernels that pack rows with a scale for each: a row is read once, and stays on the chip until its bytes are written.

The scale of a row is known when its last element was read; only then can the first one be packed.  Inductor keeps rows
of up to 1,024 elements in registers meanwhile (a persistent reduction), and reads longer ones twice, and what they are
computed from.  Of the kernels that such a pack is in, rows of up to `LONGEST` are kept, too, which is as much as
Inductor's own configurations of such kernels are made for.

In:  a compile by Inductor of a graph whose packs `surgery` has marked.
Out: Inductor's heuristics for it, with this one answer changed: it lets its choices be made by another handler.

Guarantees: a kernel in which no marked step is gets Inductor's own answer, and so does one whose rows several blocks
share, or whose sums are to be made in a given order.  What is packed is the same: the largest of a row is, in any
order.  A norm in the same kernel may sum its row in another one, and be rounded otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from multigraph_backend import _compat

LONGEST = 4096  # elements of a row
#: in `meta` of the steps of a pack
MARK = "multigraph_pack"


@contextlib.contextmanager
def rows_read_once(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Inside, Inductor compiles `gm` so; nothing changes where it has no packs, or this torch differs."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    packs = any(MARK in node.meta for graph in graphs for node in graph.nodes)
    if not packs or _compat.missing("rows of packs"):
        yield
        return
    choices = _compat.inductor_choices
    with choices._set_handler(_Choices(choices._get_handler(False))):
        yield


class _Choices:
    """The choices of `inner`, the handler that was there, but for one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        """Whether the kernel that `features` describes keeps its rows."""
        return bool(self._inner.should_use_persistent_reduction(features, cooperative_reduction)) or (
            not cooperative_reduction
            and bool(_compat.inductor_config.triton.persistent_reductions)
            and _packs_rows(features)
        )


def _packs_rows(features: Any) -> bool:
    if features.get_reduction_hint() is not _compat.ReductionHint.INNER or not features.reduction_numel.is_number:
        return False
    block: Any = getattr(features, "strict_reduction_rblock", lambda: None)()  # in what pieces sums are to be, or any
    if block is not None or int(features.reduction_numel) > LONGEST:
        return False
    return any(MARK in step.meta for node in features.scheduler_nodes() for step in node.node.get_origins())
