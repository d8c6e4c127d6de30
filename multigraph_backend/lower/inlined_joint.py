"""Blocks that are traced once put back into a joint graph before it is parted into forward and backward.

What is saved for backward is then decided of the graph as a whole, as it is where every block is traced.

In:  the partitioner inside, and the bodies whose operators stand in joint graphs.  Out: the same contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from multigraph_backend import _compat
from multigraph_backend.lower.block_operator import Bodies
from multigraph_backend.lower.traced_once import inline_before_parting

_Partitioner: Any = object if _compat.missing("changed inputs") else _compat.CustomPartitionerFn


class InliningPartitioner(_Partitioner):  # type: ignore[misc]
    """`inner`, given what the `bodies` do in place of the operators that stand for them."""

    def __init__(self, inner: Any, bodies: Bodies) -> None:
        self.inner, self.bodies = inner, bodies

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any) -> Any:
        inline_before_parting(gm, self.bodies)
        return self.inner(gm, joint_inputs, **settings)

    def uuid(self) -> Any:
        return "inlined", self.inner.uuid()

    def __getstate__(self) -> dict[str, Any]:  # Inductor pickles its configuration for its caches' keys
        return {"key": self.uuid()}

    def __deepcopy__(self, memo: dict[int, Any]) -> InliningPartitioner:  # and copies it; nothing in here changes
        return self
