"""Nodes of a graph as Python code that lets go of each tensor after its last use.

Compiled code owns its inputs: it is called with a list, empties it, and every tensor dies where it is used last, so
that its memory serves again.  A call with arguments cannot do that, for the caller holds them until it returns.

In:  nodes in the order in which they run, and pieces of text between them.
Out: a function of one list, that clears it and returns a tuple.

Views and sizes run nothing: they are made wherever they are needed, from what they look at.  The result of an operator
in place is the tensor that it changed, so nothing but the operator itself stands for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from multigraph_backend.cudagraphs.partition import cuts

Boxed = Callable[[list[Any]], Sequence[Any]]


def value_of(node: Node) -> Node:
    """The node itself, or the one whose value it changes in place and returns."""
    while node.op == "call_function" and _in_place(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def inputs_of(node: Node) -> list[Node]:
    return list(dict.fromkeys(value_of(arg) for arg in node.all_input_nodes))


def is_light(node: Node) -> bool:
    """Whether a node runs nothing on any device: a view, a part of one, or arithmetic on sizes."""
    if node.op != "call_function":
        return False
    if cuts.is_view(node):
        return True
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_light(source)
    op, value = cuts.operator_of(node), node.meta.get("val")
    if value is None or cuts.has_tensors(value) or node.meta.get("unbacked_bindings"):
        return False
    return op is None or cuts.shown(node).startswith("aten.sym_")


def bases(node: Node) -> list[Node]:
    """What is needed to make a node's value: itself, or what a light one is made of."""
    node = value_of(node)
    if not is_light(node):
        return [node]
    return list(dict.fromkeys(base for arg in inputs_of(node) for base in bases(arg)))


def _in_place(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(schema.returns) != 1 or not schema.arguments or not node.args:
        return False
    changed, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return changed is not None and returned is not None and changed.is_write and returned.is_write


def variable(node: Node) -> str:
    return f"v_{node.name}"


@dataclass
class _Line:
    """What is used for the last time by `before` is given up before `after` runs."""

    before: str
    uses: list[str]
    after: str = ""


class StraightCode:
    """One function while it is written.  `inputs`: variables that the list is unpacked into."""

    def __init__(self, gm: GraphModule, name: str, inputs: Sequence[str]) -> None:
        self.gm, self.name, self.inputs = gm, name, list(inputs)
        self.namespace: dict[str, Any] = {}
        self._defined = set(inputs)
        self._lines: list[_Line] = []

    def run(self, node: Node) -> None:
        """Call what `node` calls."""
        for arg in inputs_of(node):
            self._ensure(arg)
        function = f"f_{node.name}"
        self.namespace[function] = node.target
        args = [self._text(arg) for arg in node.args]
        args += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        uses = [variable(arg) for arg in inputs_of(node) if arg.op != "get_attr"]
        call = f"{function}({', '.join(args)})"
        if value_of(node) is node:
            call = f"{variable(node)} = {call}"
            uses.append(variable(node))
            self._defined.add(variable(node))
        self._lines.append(_Line(call, uses))

    def call_piece(
        self, number: int, inputs: Sequence[Node], measured: Sequence[tuple[Node, str]], outputs: Sequence[Node]
    ) -> None:
        """Call a piece with a list that nothing else holds; `measured` is asked of tensors, such as `size(0)`."""
        for node in inputs:
            self._ensure(node)
        uses = [variable(node) for node in inputs]
        given = uses + [f"{variable(node)}.{text}" for node, text in measured]
        targets = [variable(node) for node in outputs]
        call = f"pieces[{number}](inputs)"
        after = f"{', '.join(targets)}{',' if targets else ''} = {call}" if targets else call
        self._lines.append(_Line(f"inputs = [{', '.join(given)}]", uses, after))
        self._lines.append(_Line("", targets))
        self._defined.update(targets)

    def finish(self, results: Any) -> tuple[str, Callable[..., Any]]:
        """Return `results`, nodes and numbers.  The source, and what makes the function of `pieces`."""
        nodes: list[Node] = []
        _each_node(results, nodes.append)
        for node in nodes:
            self._ensure(node)
        returned = self._text(tuple(results))
        kept = {variable(node) for node in nodes}
        body = [f"[{', '.join(self.inputs)}] = inputs", "inputs.clear()"]
        last: dict[str, int] = dict.fromkeys(self.inputs, -1)
        for at, line in enumerate(self._lines):
            last.update(dict.fromkeys(line.uses, at))
        for at in range(-1, len(self._lines)):
            if at >= 0 and self._lines[at].before:
                body.append(self._lines[at].before)
            dead = [name for name, use in last.items() if use == at and name not in kept]
            if dead:
                body.append(f"del {', '.join(dead)}")
            if at >= 0 and self._lines[at].after:
                body.append(self._lines[at].after)
        body.append(f"return {returned}")
        source = "\n        ".join([f"def make(pieces):\n    def {self.name}(inputs):", *body])
        source += f"\n    return {self.name}\n"
        exec(compile(source, f"<multigraph {self.name}>", "exec"), self.namespace)
        make: Callable[..., Any] = self.namespace["make"]
        return source, make

    def _ensure(self, node: Node) -> None:
        if node.op == "get_attr":
            value: Any = self.gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            self.namespace[variable(node)] = value
        elif variable(node) not in self._defined:
            if not is_light(node):
                raise ValueError(f"{node.name} is used in {self.name} and is not there")
            self.run(node)

    def _text(self, value: Any) -> str:
        """`value`, with nodes in it, as an expression."""
        if isinstance(value, Node):
            return variable(value_of(value))
        if isinstance(value, tuple):
            return f"({''.join(self._text(item) + ', ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._text(item) for item in value)}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._text(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        name = f"c{len(self.namespace)}"
        self.namespace[name] = value
        return name


def _each_node(value: Any, see: Callable[[Node], object]) -> None:
    if isinstance(value, Node):
        see(value_of(value))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            _each_node(item, see)
