"""Python floats that a compile knows, written into a graph as numbers.

Dynamo passes a float as a 0-dim tensor and takes its item.  Once the value is guarded on, no symbol is left that could
stand for it, so the number itself has to stand in the graph.  In: a module of a graph, its inputs, and what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.capture.graph import Input


def write_known_items(
    module: torch.fx.GraphModule,
    inputs: Sequence[Input],
    translate: Callable[[Any], Any],
    zeros: Mapping[int, float] | None = None,
) -> tuple[int, ...]:
    """Put Python floats that are known constants into the graph as numbers; positions of those that are zero.

    Dynamo passes a float as a 0-dim tensor and takes its item; once the value is guarded on, no symbol is left.
    `translate` gives an expression over Dynamo's symbols as it is known now.  It does not tell the sign of a zero:
    those among `zeros` are written, by position, and others are not.  Other 0-dim tensors are left alone: what is known
    of them, such as a size of the tensor that a view looks into, is not their item.
    """
    found = []
    for index, (node, entry) in enumerate(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if entry.layout is None or not entry.number:
            continue
        values = [
            value
            for name, expr in entry.layout.memo.items()
            if not name.endswith("storage_offset()")
            and (not isinstance(value := translate(expr), sympy.Basic) or value.is_number)
        ]
        if len(values) == 1:
            (value,) = values
            number = int(value) if getattr(value, "is_Integer", False) else float(value)
            if number == 0:
                found += [index] * any(user.users for user in node.users)
                if zeros is None or index not in zeros:
                    continue
                number = zeros[index]
            _write_item(module, node, number)
    module.recompile()
    return tuple(found)


def _write_item(module: torch.fx.GraphModule, node: torch.fx.Node, number: int | float) -> None:
    """Put `number` for the item of the 0-dim tensor `node`, also in bodies of higher-order operators that take it."""
    for user in list(node.users):
        if user.op == "call_method" and user.target == "item":
            replace_with_number(user, number)
            user.graph.erase_node(user)
        elif isinstance(user.target, _compat.HigherOrderOperator):
            for body, placeholder in _inside(module, user, node):
                _write_item(body, placeholder, number)
                body.recompile()


def _inside(
    module: torch.fx.GraphModule, call: torch.fx.Node, operand: torch.fx.Node
) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node]]:
    """The body of a higher-order operator, and what `operand` is called there; see `body_of`."""
    if (found := body_of(module, call)) is not None:
        body, operands = found
        yield from ((body, placeholder) for placeholder, given in operands.items() if given is operand)


def body_of(
    module: torch.fx.GraphModule, call: torch.fx.Node
) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, Any]] | None:
    """The body of a higher-order operator, and what each placeholder of its is given.

    Understood are operators with one body, whose operands come last.  A body that several calls share may get different
    operands from them, and is left alone: None.
    """
    named = [arg for arg in call.args if isinstance(arg, torch.fx.Node) and arg.op == "get_attr"]
    if len(named) != 1:
        return None
    target = str(named[0].target)
    body = getattr(module, target, None)
    calls = [user for entry in module.graph.find_nodes(op="get_attr", target=target) for user in entry.users]
    if not isinstance(body, torch.fx.GraphModule) or calls != [call]:
        return None
    placeholders = body.graph.find_nodes(op="placeholder")
    operands = call.args[len(call.args) - len(placeholders) :]
    return body, dict(zip(placeholders, operands, strict=True))


def replace_with_number(node: torch.fx.Node, number: int | float) -> None:
    """Let every user of `node` take a literal instead."""
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, lambda arg: number if arg is node else arg)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda arg: number if arg is node else arg)
