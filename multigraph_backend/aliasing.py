"""Which inputs of a call share memory.

Code that mutates its inputs is compiled for one way of sharing; the same questions are asked when it is compiled and
at its calls, so they are asked here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multigraph_backend import _compat
from multigraph_backend.capture import CapturedGraph


def user_tensors(graph: CapturedGraph) -> list[int]:
    """Positions of the tensor inputs that are no parameters or buffers, and no Python floats."""
    return [
        index
        for index, entry in enumerate(graph.inputs)
        if entry.layout is not None and not entry.static and not entry.number
    ]


def shared_storages(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Which of these tensors share a storage: their positions, by group; empty when none does."""
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def any_overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two different ones of these tensors have an element in common.  The same tensor twice is one."""
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    return len(distinct) > 1 and bool(_compat.compute_overlapping_tensors(distinct, symbolic=False))


def overlapping(over: Sequence[torch.Tensor], apart: Sequence[torch.Tensor]) -> bool:
    """Whether, among all of these, it is just the tensors of `over` that overlap another one in memory."""
    found = _compat.compute_overlapping_tensors([*over, *apart], symbolic=False)
    return sorted(found) == list(range(len(over)))
