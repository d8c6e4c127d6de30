"""Whether generated code lets what is being offloaded stay until it is settled.

A copy to the host runs beside the code that has asked for it.  `settle` names its source as `kept`, so that Inductor
does not use that memory for something else before.  This holds where the buffer that `settle` is given is the one that
`offload` was given.  Inductor may make two buffers of one tensor: then one is kept, and the other is written over while
it is copied.  That was seen where operators prescribe strides.  So the code is read.

In:  the source of a forward graph that offloads.
Out: nothing; `NotKept` where it does not hold, or cannot be read off the source.

Invariant: buffers are compared by name.  Another name for the same memory counts as another buffer, for that is how
Inductor writes that memory is used again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from multigraph_backend.saved_tensors.offload.operators import OFFLOAD, SETTLE


class NotKept(RuntimeError):
    """Code may write over what it offloads; the text says what it offloads and what it keeps."""


def check(source: str) -> None:
    """Raises `NotKept`."""
    try:
        assigned = list(_assignments(ast.parse(source)))
    except SyntaxError:
        raise NotKept("the compiled code offloads tensors, and is not in Python: what it keeps is not known") from None
    names = {name: value.id for name, value in assigned if isinstance(value, ast.Name)}
    offloaded = {name: _buffer(call.args[0]) for name, call in _calls(assigned, str(OFFLOAD))}
    if not offloaded:
        raise NotKept("the compiled code is to offload tensors, and no call in it does")
    for _, settle in _calls(assigned, str(SETTLE)):
        kept, copies = (argument.elts if isinstance(argument, ast.List) else None for argument in settle.args[:2])
        if kept is None or copies is None or len(kept) != len(copies):
            raise NotKept(f"what is kept for copies to the host is not understood: {ast.unparse(settle)}")
        for held, copy in zip(kept, copies, strict=True):
            copied = offloaded.pop(_first_name(_buffer(copy), names), None)
            if copied != _buffer(held):
                raise NotKept(f"the compiled code offloads {copied or 'what is not known'} and keeps {_buffer(held)}")
    if offloaded:
        raise NotKept(f"the compiled code offloads {', '.join(offloaded.values())} and keeps nothing for it")


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _calls(assigned: list[tuple[str, ast.expr]], operator: str) -> Iterator[tuple[str, ast.Call]]:
    for name, value in assigned:
        if isinstance(value, ast.Call) and ast.unparse(value.func) == f"torch.ops.{operator}":
            yield name, value


def _buffer(expression: ast.expr) -> str:
    """The buffer of a view, or of itself."""
    if isinstance(expression, ast.Call) and expression.args and ast.unparse(expression.func) == "reinterpret_tensor":
        return _buffer(expression.args[0])
    return ast.unparse(expression)


def _first_name(name: str, names: dict[str, str]) -> str:
    """Of what is handed on under other names; a name is given once."""
    while name in names:
        name = names[name]
    return name
