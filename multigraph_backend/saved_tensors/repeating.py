"""What may be computed twice: operators of torch that give the same each time.

Invariant: what passes `why_not` draws no random numbers and changes nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

MOST = 64  # operations that are repeated for one tensor


def why_not(node: Node) -> str | None:
    """Why `node` cannot be computed again, None if it can."""
    if node.op != "call_function":
        return f"it is made of {node.name}, which the backward does not have"
    if node.target is operator.getitem:
        return None
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or getattr(node.target, "namespace", "") not in ("aten", "prims"):
        return f"it is made by {node.target}, which may give something else when it is repeated"
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return f"it is made by {node.target}, which draws random numbers"
    if schema.is_mutable:
        return f"it is made by {node.target}, which changes something"
    return None
