"""Parameters that are DTensors: what compiled code relies on of them, asked at each call.

Of a DTensor, Dynamo's guards say how it is divided and not of which size it is; what they say of the part that a rank
has is another matter from version to version.  Dynamo traces anew where they fail; a form that is compiled late has no
such guards.  So each form asks for itself whether the DTensors of a call are as those of its compile: mesh, placements,
sizes, strides and types, their own and those of their parts.

For a weight of 16 by 8, `Shard(0)` over two ranks, a form holds where that weight is 16 by 8, divided so over that
mesh, and 8 by 8 here.  Another part of that layout is as good; another layout is another form's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.capture.graph import CapturedGraph


def is_dtensor(value: object) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")  # who has one has imported it
    return distributed is not None and isinstance(value, distributed.DTensor)


def is_mesh_of(example: torch.Tensor, part: str) -> bool:
    """Whether the part of that name is a DTensor's mesh, which torch counts among its parts from 2.13 on."""
    return part == "device_mesh" and is_dtensor(example)


def alike(graph: CapturedGraph, args: Sequence[Any]) -> Callable[[Sequence[Any]], bool] | None:
    """The check of a call that its DTensors are as those of `args`, of which it keeps nothing alive; None where there
    are none."""
    expected = [
        (index, type(args[index]), *_made_of(args[index], copy.copy))
        for index, entry in enumerate(graph.inputs)
        if entry.is_dtensor
    ]
    if not expected:
        return None

    def check(args: Sequence[Any]) -> bool:
        for index, kind, said, parts in expected:
            value = args[index]
            if type(value) is not kind or _made_of(value, _itself) != (said, parts):
                return False
        return True

    return check


def _itself(value: Any) -> Any:
    return value


def _made_of(value: Any, kept: Callable[[Any], Any]) -> tuple[Any, tuple[Any, ...]]:
    """What a subclass says of itself, a DTensor of its sizes too, with `kept` around each entry; what it is made of."""
    names, said = value.__tensor_flatten__()
    if kept is not _itself:
        said = tuple(map(kept, said)) if isinstance(said, tuple) else kept(said)
    return said, tuple([_described(getattr(value, name), kept) for name in names])


def _described(value: Any, kept: Callable[[Any], Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    layout = type(value), value.dtype, value.device, value.requires_grad, value.size(), value.stride()
    if not _compat.is_traceable_wrapper_subclass(value):
        return layout
    return (*layout, *_made_of(value, kept))
