"""Sums with a zero that is known: kept from being taken for what they are added to.

    x + 0.0     where x is -0.0: 0.0, and its reciprocal is infinity       Inductor: x, and minus infinity

Inductor leaves such a sum out (torch 2.15 where the zero is a number, older ones where it is a tensor of zeros).  A
program that is called with 0.0 for a float has a compile of its own for that, so here the zero is a constant where
stock's code adds what it is given.  The sum is spelled so that nobody leaves it out: `torch.add(x, 0.0, alpha=2)`.

In: a captured graph, its numbers written.  Out: the same graph, changed in place.  What adds -0.0 changes nothing.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

_Node = torch.fx.Node
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow}
#: what is called, by function or as a method; whether the second operand is taken off, and whether it is in place
_SUMS: dict[object, tuple[bool, bool]] = {
    operator.add: (False, False), torch.add: (False, False), "add": (False, False),
    operator.iadd: (False, True), "add_": (False, True),
    operator.sub: (True, False), torch.sub: (True, False), "sub": (True, False),
    operator.isub: (True, True), "sub_": (True, True),
}  # fmt: skip
#: what gives no tensors: methods, and functions of torch
_METHODS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "item", "tolist"}
_FUNCTIONS = {torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min}


def keep_sums(module: torch.fx.GraphModule) -> None:
    """Spell sums with a zero so that they stay, in `module` and the graphs that it calls."""
    for each in module.modules():
        if isinstance(each, torch.fx.GraphModule):
            kept = [_keep(node) for node in list(each.graph.nodes)]
            if any(kept):
                each.recompile()


def _keep(node: _Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target not in _SUMS:
        return False
    if node.kwargs or len(node.args) != 2:  # with a factor it stays
        return False
    taken_off, in_place = _SUMS[node.target]
    left, right = node.args
    if not taken_off and not in_place and _number(left) is not None:
        left, right = right, left
    zero = _number(right)
    if zero is None or zero != 0 or not isinstance(left, _Node) or not _is_tensor(left):
        return False
    if (math.copysign(1.0, zero) < 0) != taken_off:  # x + -0.0 and x - 0.0 are x
        return False
    operands = (left, 0.0 if isinstance(zero, float) else 0)
    with node.graph.inserting_before(node):
        if in_place:
            made = node.graph.call_method("add_", operands, {"alpha": 2})
        else:
            made = node.graph.call_function(torch.add, operands, {"alpha": 2})
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return True


def _number(value: Any) -> int | float | None:
    """A number that is written, or computed of such."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, _Node) and value.op == "call_function" and value.target in _ARITHMETIC and not value.kwargs:
        parts = [_number(part) for part in value.args]
        if None not in parts:
            try:
                found = value.target(*parts)
            except (ArithmeticError, ValueError):
                return None
            return found if isinstance(found, int | float) else None
    return None


def _is_tensor(node: _Node) -> bool:
    """Whether what is added to is a tensor; False where that is not sure.  A captured graph has no values to ask."""
    if node.op == "placeholder":
        return node.type is torch.Tensor
    if node.op == "get_attr":
        return True
    if node.op == "call_method":
        return node.target not in _METHODS
    module = getattr(node.target, "__module__", None) or ""
    if module in ("_operator", "operator"):
        return node.target in _ARITHMETIC and any(isinstance(part, _Node) and _is_tensor(part) for part in node.args)
    ours = module.startswith("torch") or getattr(torch, getattr(node.target, "__name__", ""), None) is node.target
    return ours and node.target not in _FUNCTIONS
