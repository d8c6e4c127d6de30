"""Which values of a forward graph are statistics: what a row, a channel or an attention is scaled and shifted by.

    mean = x.mean(-1, keepdim=True)              from reductions alone
    rstd = (x.var(-1, keepdim=True) + eps).rsqrt()
    y = (x - mean) * rstd                        and spread over what was reduced

They are small beside what they scale, and an error in one is an error in all of that: in the exponents of attention,
in each element of a row.  So they have a role of their own, and are kept unless a rule names it.  What makes one is
what it is computed of and used for; how many bytes it has says nothing.

In: a partitioned forward graph.  Out: its nodes that are statistics.

- Results of an operator of attention, norm or softmax behind its first one, smaller than that: the sums of weights,
  means, deviations.  Operators that only make statistics ("batch_norm_stats") have nothing else.
- What is computed of reductions, element by element, from nothing else but numbers and parameters, and is spread over
  something larger later on: norms and softmaxes that were taken apart.  A mean that goes into a matmul is none.
- A single number that is computed so, such as the count that a loss is divided by.

Invariant: a view of a statistic, and a statistic in another type, is one.
"""

from __future__ import annotations

import operator
import re

import torch
from torch.fx import Graph, Node

from multigraph_backend.saved_tensors import graphs

#: operators whose further results are statistics of what the first is computed with
_ABOUT = re.compile(r"attention|attn|norm|softmax")
#: operators all of whose results are
_ONLY = re.compile(r"norm_(gather_)?stats")
#: they hand a value on to, or gather it from, other ranks
_PASSED_ON = re.compile(r"^(_c10d_functional|c10d_functional)::(all_reduce|wait_tensor)")


def of(graph: Graph) -> set[Node]:
    """The statistics of a forward graph."""
    found: set[Node] = set()
    reduced: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _by_operator(node):
            found.add(node)
        elif graphs.reduces(node) or _of_reductions(node, reduced | found):
            reduced.add(node)
    known = reduced | found
    values = [node for node in reduced if (value := graphs.tensor(node)) is not None and _number(value)]
    return found | {node for node in values if _size(node) == 1 or _spread(node, known)}


def _by_operator(node: Node) -> bool:
    """A further result of an operator that normalizes or attends."""
    if node.target is not operator.getitem:
        return False
    made, index = node.args
    value = graphs.tensor(node)
    if not isinstance(made, Node) or made.op != "call_function" or value is None or not _number(value):
        return False
    name = str(made.target)
    if _ONLY.search(name):
        return True
    parts = made.meta.get("val")
    whole = parts[0] if isinstance(parts, tuple | list) and parts else None
    if not _ABOUT.search(name) or index == 0 or not isinstance(whole, torch.Tensor):
        return False
    return graphs.tensor_bytes(value) // value.element_size() < graphs.tensor_bytes(whole) // whole.element_size()


def _of_reductions(node: Node, known: set[Node]) -> bool:
    """Computed element by element, of `known` ones and of numbers and parameters that are no larger."""
    inputs = node.all_input_nodes
    if not any(entry in known for entry in inputs):
        return False
    if node.target is operator.getitem:
        return True
    passed = graphs.viewed(node) is not None or bool(_PASSED_ON.match(_name(node)))
    if not (graphs.elementwise(node) or passed):
        return False
    if _size(node) > max(_size(entry) for entry in inputs if entry in known):
        return False
    return all(entry in known or entry.op in ("placeholder", "get_attr") or _constant(entry) for entry in inputs)


def _spread(node: Node, known: set[Node]) -> bool:
    """Whether something larger is computed of it, or of what is `known` to follow from it, element by element."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            view = graphs.viewed(user) is not None
            if (view or graphs.elementwise(user)) and _size(user) > _size(node):
                return True
            if view or user in known:
                waiting.append(user)
    return False


def _constant(node: Node) -> bool:
    """Numbers as tensors."""
    return graphs.number(node) or (node.op == "call_function" and "full" in str(node.target))


def _number(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _size(node: Node) -> int:
    """Elements."""
    value = graphs.tensor(node)
    return 0 if value is None else graphs.tensor_bytes(value) // value.element_size()


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)
