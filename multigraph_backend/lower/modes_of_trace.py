"""What calls of a captured graph set for those behind them while it is traced: autocast, grad mode, inference mode.

    enter = _enter_autocast("cpu", torch.bfloat16, True, None)
    y = linear(x, w1)                    # another step than z, for all that both look the same: its product is rounded
    _exit_autocast(enter)
    z = linear(y, w2)

In:  the nodes of a graph of Dynamo's.
Out: for each node the modes that the graph has set before it (`at_each_node`), as a value to compare; a walk through
the graph in which these calls are carried out (`Walk`).

Invariant: whatever a walk has set is as it was when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import Any, Self

import torch
from torch.fx import Graph, Node

from multigraph_backend import _compat


def sets_mode(node: Node) -> bool:
    """Whether `node` is a call that sets a mode, and nothing else."""
    return _enters(node) or _leaves(node) or _sets_grad(node)


def does_nothing(node: Node) -> bool:
    """Whether `node` is a call without effect on what is traced, and without result."""
    return node.op == "call_function" and node.target is _compat.log_api_usage_once


def _enters(node: Node) -> bool:
    return node.op == "call_function" and node.target in (_compat.enter_autocast, _compat.enter_inference_mode)


def _leaves(node: Node) -> bool:
    return node.op == "call_function" and node.target in (_compat.exit_autocast, _compat.exit_inference_mode)


def _sets_grad(node: Node) -> bool:
    return node.op == "call_function" and node.target is _compat.set_grad_enabled


def at_each_node(graph: Graph) -> dict[Node, Hashable]:
    """The modes on at each node beside those that are on now: those entered, outermost first, and the grad mode."""
    entered: dict[Node, Hashable] = {}
    grad: Any = torch.is_grad_enabled()
    found: dict[Node, Hashable] = {}
    for node in graph.nodes:
        if _enters(node):
            entered[node] = (getattr(node.target, "__name__", ""), str((node.args, node.kwargs)))
        elif _leaves(node):
            entered.pop(node.all_input_nodes[0], None)
        elif _sets_grad(node):
            grad = node.args[0]
        found[node] = (*entered.values(), grad)
    return found


class Walk:
    """A walk through a graph: calls that set modes are carried out by `set` in order, and undone at its end."""

    def __init__(self) -> None:
        self._entered: list[Any] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._undo.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))  # as it is now, again at the end
        return self

    def __exit__(self, *_: object) -> None:
        while self._entered:
            self._entered.pop().__exit__(None, None, None)
        self._undo.close()

    def set(self, node: Node, values: Mapping[Node, Any]) -> Any:
        """Carry out `node`; its value."""
        target: Any = node.target
        args: Any = torch.fx.node.map_arg(node.args, values.__getitem__)
        value = target(*args, **node.kwargs)
        if _enters(node):
            self._entered.append(value)
        elif _leaves(node):
            self._entered.remove(args[0])
        return value
