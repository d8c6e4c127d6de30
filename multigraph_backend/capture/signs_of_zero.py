"""The sign of a Python float that is zero, where a graph computes with it and with sizes.

A float that is 0.0 or -0.0 has a compile of its own, in which it stands as a number (`known_numbers`).  What the graph
computes of it and of a size is an expression of sympy's then, and that has no sign of zero: `-0.0 * n` is 0.  So what
has a known sign is written into the graph as a number, too:

    mul = operator.mul(-0.0, s77)                 s77 is a size
    add = operator.add(x, mul)            ->      add = operator.add(x, -0.0)

In:  a module of a graph, its numbers written, and what stands for its inputs.  Out: the same module, changed in place;
and where a sign cannot be told, which computation that is: such a compile would be wrong.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.capture.known_numbers import body_of, replace_with_number

POSITIVE, NOT_NEGATIVE, NEGATIVE, UNKNOWN = "positive", "not negative", "negative", "unknown"
_NOT_NEGATIVE = (POSITIVE, NOT_NEGATIVE)
#: of numbers alone; all others that a graph computes of numbers are comparisons, or may be of tensors
_ARITHMETIC: frozenset[Any] = frozenset({
    operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.add, operator.sub,
    operator.neg, operator.pos, operator.abs, operator.imul, operator.itruediv, operator.iadd, operator.isub,
    torch.sym_float, torch.sym_max, torch.sym_min, math.pow, math.sqrt,
})  # fmt: skip
_PRODUCTS = frozenset({operator.mul, operator.imul})
_QUOTIENTS = frozenset({operator.truediv, operator.itruediv})
_SUMS = frozenset({operator.add, operator.sub, operator.iadd, operator.isub})

_SIZES = frozenset({torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default})

Number = int | float


def keep(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """See the module's text.  `inputs`: of the module, in order.  What cannot be told, as text; None: all is."""
    signs = {
        node: _sign_of_input(value)
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    }
    lost = _keep(module, signs)
    if lost is None:
        return None
    return f"the sign of a zero is not known of {getattr(lost.target, '__name__', lost.target)}{lost.args}"


def _keep(module: torch.fx.GraphModule, signs: dict[torch.fx.Node, str]) -> torch.fx.Node | None:
    """`signs`: of placeholders that are numbers."""
    for node in list(module.graph.nodes):
        if node.op == "call_method" and node.target == "item":
            signs[node] = UNKNOWN
        elif (node.op == "call_method" and node.target in ("size", "numel", "dim")) or (
            node.op == "call_function" and node.target in _SIZES
        ):
            signs[node] = NOT_NEGATIVE
        elif node.op == "call_function" and node.target is operator.getitem and _has_sign(node.args[0], signs):
            signs[node] = signs[node.args[0]]  # a size out of several
        elif isinstance(node.target, _compat.HigherOrderOperator):
            if (lost := _keep_inside(module, node, signs)) is not None:
                return lost
        elif node.op == "call_function" and node.target in _ARITHMETIC and _of_numbers(node, signs):
            known = _known(node, signs)
            if isinstance(known, Number):
                replace_with_number(node, known)
            elif known is not None:
                signs[node] = known
            elif _sign_is_nothing(node):
                signs[node] = UNKNOWN
            else:
                return node  # type: ignore[no-any-return]
    return None


def _sign_is_nothing(node: torch.fx.Node) -> bool:
    """Whether a zero over something is used in sums with numbers that are not zero alone, as in `1 - decay / rate`.

    A zero times a float has all floats as constants in any case: torch would have them so for good."""
    over = node.target in _QUOTIENTS and isinstance(node.args[0], Number) and node.args[0] == 0
    return over and all(
        user.target in _SUMS and any(isinstance(arg, Number) and arg != 0 for arg in user.args) for user in node.users
    )


def _keep_inside(
    module: torch.fx.GraphModule, call: torch.fx.Node, signs: Mapping[torch.fx.Node, str]
) -> torch.fx.Node | None:
    """The same in the body of a higher-order operator; the call itself where it gets a zero and is not understood."""
    if (found := body_of(module, call)) is None:
        return call if any(isinstance(arg, float) and arg == 0 for arg in call.args) else None
    body, operands = found
    for placeholder, given in operands.items():
        if isinstance(given, float):
            replace_with_number(placeholder, given)
    inside = {placeholder: signs[given] for placeholder, given in operands.items() if _has_sign(given, signs)}
    lost = _keep(body, inside)
    body.recompile()
    return lost


def _sign_of_input(value: int | torch.SymInt) -> str:
    expr = _compat.sympy_expr(value)
    if isinstance(expr, int):
        return POSITIVE if expr > 0 else NEGATIVE if expr < 0 else NOT_NEGATIVE
    assert isinstance(expr, sympy.Basic)
    return POSITIVE if expr.is_positive else NOT_NEGATIVE if expr.is_nonnegative else UNKNOWN


def _of_numbers(node: torch.fx.Node, signs: Mapping[torch.fx.Node, str]) -> bool:
    return not node.kwargs and all(isinstance(arg, Number) or _has_sign(arg, signs) for arg in node.args)


def _has_sign(arg: Any, signs: Mapping[torch.fx.Node, str]) -> bool:
    return isinstance(arg, torch.fx.Node) and arg in signs


def _known(node: torch.fx.Node, signs: Mapping[torch.fx.Node, str]) -> Number | str | None:
    """The number that a node computes, or its sign; None where it may be a zero whose sign nobody knows."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    if all(isinstance(arg, Number) for arg in node.args):
        try:
            found = target(*node.args)
        except (ArithmeticError, ValueError):  # as the program's own
            return UNKNOWN
        return found if isinstance(found, Number) else UNKNOWN
    zeros = [arg for arg in node.args if isinstance(arg, float) and arg == 0]
    others = [_sign(arg, signs) for arg in node.args if not (isinstance(arg, float) and arg == 0)]
    if not zeros:
        return _sign_of(target, others)
    if target in _SUMS:  # 0 less 0 alone has a sign that is not that of 0
        taken_off = target in (operator.sub, operator.isub) and node.args[0] is zeros[0]
        if not taken_off:
            return others[0]
        return NEGATIVE if others == [POSITIVE] else POSITIVE if others == [NEGATIVE] else None
    numerator = target in _QUOTIENTS and node.args[0] is zeros[0]
    if (target in _PRODUCTS or numerator) and others[0] in _NOT_NEGATIVE:
        return zeros[0]
    if (target in _PRODUCTS or numerator) and others[0] == NEGATIVE:
        return -zeros[0]
    return None


def _sign(arg: Any, signs: Mapping[torch.fx.Node, str]) -> str:
    if isinstance(arg, Number):
        return POSITIVE if arg > 0 else NEGATIVE if arg < 0 else NOT_NEGATIVE
    return signs[arg]


def _sign_of(target: Callable[..., Any], operands: Sequence[str]) -> str:
    """The sign of what is computed of operands none of which is a zero that is a float."""
    if target in (torch.sym_float, operator.pos):
        return operands[0]
    if target is operator.neg:
        return NEGATIVE if operands[0] == POSITIVE else UNKNOWN
    if all(sign in _NOT_NEGATIVE for sign in operands):
        if target in _PRODUCTS | _QUOTIENTS | {operator.add, operator.iadd, torch.sym_max, torch.sym_min}:
            return POSITIVE if all(sign == POSITIVE for sign in operands) else NOT_NEGATIVE
        return UNKNOWN
    if target in _PRODUCTS | _QUOTIENTS and {*operands} <= {POSITIVE, NEGATIVE}:
        return NEGATIVE if list(operands).count(NEGATIVE) % 2 else POSITIVE
    return UNKNOWN
