"""Calls of bodies put into both graphs of a partition before what is saved is packed.

Elsewhere they are put in when Inductor is given a graph.  That is too late for packs: of an operator that stands for a
call nothing is known but its results, of a call what has made each, which rules ask for.

In:  the partitioner inside, and the bodies that its graphs call.  Out: the same contract; packs lie around the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower.block_operator import Bodies
from multigraph_backend.lower.traced_once import put_in

_Partitioner: Any = object if _compat.missing("changed inputs") else _compat.CustomPartitionerFn


class PuttingPartitioner(_Partitioner):  # type: ignore[misc]
    """`inner`, and then calls of `bodies` in place of the operators in both of its graphs; `cut_at` as in `put_in`."""

    def __init__(self, inner: Any, bodies: Bodies, cut_at: Callable[[Node], str | None] | None) -> None:
        self.inner, self.bodies, self.cut_at = inner, bodies, cut_at

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        parts = self.inner(gm, joint_inputs, **settings)
        for label, part in zip(("forward", "backward"), parts, strict=True):
            if (put := put_in(part, self.bodies, self.cut_at)).names:
                self.bodies.put[label] = put
        return parts

    def uuid(self) -> Any:
        return "bodies", self.inner.uuid()

    def __getstate__(self) -> dict[str, Any]:  # Inductor pickles its configuration for its caches' keys
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> PuttingPartitioner:  # and copies it; nothing in here changes
        return self
