"""Bodies put in place of their operators around a partitioner, where Inductor's own compile of a graph is too late.

`PuttingPartitioner`, where what is saved is packed: calls are put into both graphs of a partition before it is.  Of an
operator that stands for a call nothing is known but its results, of a call what has made each, which rules ask for.
`InliningPartitioner`, with `"repeat": "auto"`: what bodies do is put into the joint graph.  What is saved for backward
is then decided of the graph as a whole, as it is where every block is traced.

In:  the partitioner inside, and the bodies that its graphs call.  Out: the same contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower.block_operator import Bodies
from multigraph_backend.lower.traced_once import inline_before_parting, put_in

_Partitioner: Any = object if _compat.missing("changed inputs") else _compat.CustomPartitionerFn


class _Around(_Partitioner):  # type: ignore[misc]
    """What both have in common: they are a part of the key of Inductor's caches, as what they do and what is inside."""

    does: str

    def __init__(self, inner: Any, bodies: Bodies) -> None:
        self.inner, self.bodies = inner, bodies

    def uuid(self) -> Any:
        return self.does, self.inner.uuid()

    def __getstate__(self) -> dict[str, Any]:  # Inductor pickles its configuration for its caches' keys
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Around:  # and copies it; nothing in here changes
        return self


class PuttingPartitioner(_Around):
    """`inner`, and then calls of `bodies` in place of the operators in both of its graphs; `cut_at` as in `put_in`."""

    does = "bodies"

    def __init__(self, inner: Any, bodies: Bodies, cut_at: Callable[[Node], str | None] | None) -> None:
        super().__init__(inner, bodies)
        self.cut_at = cut_at

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        parts = self.inner(gm, joint_inputs, **settings)
        for label, part in zip(("forward", "backward"), parts, strict=True):
            if (put := put_in(part, self.bodies, self.cut_at)).names:
                self.bodies.put[label] = put
        return parts


class InliningPartitioner(_Around):
    """`inner`, given what the `bodies` do in place of the operators that stand for them."""

    does = "inlined"

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        inline_before_parting(gm, self.bodies)
        return self.inner(gm, joint_inputs, **settings)
