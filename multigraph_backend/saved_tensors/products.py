"""Weight gradients in fp8: a product of the backward that reads what was cast to fp8 multiplies it as it is saved.

    backward   u = bf16(p.t());                               dw = dy.t() @ u      p: what `Cast` saved of u
    becomes    s = amax(|dy|) / 57344;  q = e5m2(dy.t() / s);  dw = scaled_mm(q, p.t(), s, 1)

The hardware multiplies fp8 with fp8 where the sum runs along the rows of both in memory.  The sum of a weight gradient
runs over the rows of what is saved, so that is saved transposed, once, and the gradient is transposed while it is
rounded.  Gradients are small and of any size, so they have a scale, one for the tensor, and e5m2, which has more
exponents (the recipe of Transformer Engine and of torchao for gradients; what is saved has no scale, as in any `Cast`).

In: the buffer of a unit whose `Cast` asks for it, and its members in the backward graph; later the placeholder of what
is saved.  Out: the products that can be, or why there are none; the backward with these in place of the others.

Invariants: a product is taken only where its operand is, element for element, the unit's buffer as a matrix, or that
transposed.  Where a gradient is infinite or NaN, the whole product is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from multigraph_backend import _compat
from multigraph_backend.saved_tensors import graphs

GRADIENT = torch.float8_e5m2
_STEP = 16  # bytes: the hardware reads rows of such pieces
_CAPABLE = (8, 9)
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_ONE = "multigraph_scale_of_one"
#: views that say where elements lie, and leave their bits and their signs
_LAYOUTS = {
    getattr(torch.ops.aten, name)
    for name in ("view", "_unsafe_view", "permute", "t", "transpose", "unsqueeze", "squeeze", "alias", "detach")
}


@dataclass(frozen=True)
class Product:
    """A step of the backward, `mm`, that reads the buffer of a unit.

    left: whether it is the left operand, transposed (`x.t() @ dy`); else it is the right one (`dy.t() @ x`)
    """

    name: str
    left: bool


def layout_alone(node: Node) -> bool:
    """Whether a view is one of where elements lie."""
    return getattr(node.target, "overloadpacket", None) in _LAYOUTS and node.target != torch.ops.aten.view.dtype


def find(source: torch.Tensor, placeholders: Sequence[Node]) -> tuple[Product, ...] | str:
    """The products that can multiply a unit's buffer `source` as it is saved, or why there are none; `placeholders`:
    the unit's members, in the backward, by way of views of its layout alone."""
    if not all(isinstance(size, int) for size in source.shape):
        return "its sizes differ from call to call"
    if source.dim() < 2 or not source.is_contiguous():
        return "it is no matrix, row by row"
    if not hasattr(torch.ops.aten, "_scaled_mm"):
        return "this torch has no such product"
    if source.device.type == "cuda" and torch.cuda.get_device_capability(source.device) < _CAPABLE:
        return "its device does not multiply fp8"
    columns = int(source.shape[-1])
    rows = source.numel() // columns if columns else 0
    if not rows or rows % _STEP or columns % _STEP:
        return f"as a matrix it is {rows} x {columns}, not multiples of {_STEP}"
    found = [product for node in placeholders for product in _read_by(node, rows, columns)]
    return tuple(dict.fromkeys(found)) or "no product of the backward sums over its rows"


def _read_by(placeholder: Node, rows: int, columns: int) -> Iterator[Product]:
    """The products over the buffer of which `placeholder` is a view."""
    value = graphs.tensor(placeholder)
    if value is None or value.numel() != rows * columns:
        return
    reached = [placeholder]
    for node in reached:
        for user in node.users:
            if graphs.viewed(user) is node:
                reached += [user] if layout_alone(user) else []
            elif user.target is torch.ops.aten.mm.default and not user.kwargs:
                left, right = user.args
                other = right if left is node else left
                if other is not node and not _is_saved(other) and _fits(user, node, left is node, rows, columns):
                    yield Product(user.name, left is node)


def _is_saved(operand: Any) -> bool:
    """Whether it is no gradient, but something that may itself be packed."""
    above = graphs.root(operand)
    return above.op == "placeholder" and "tangents" not in str(above.target)  # as torch's partitioners name them


def _fits(product: Node, operand: Node, left: bool, rows: int, columns: int) -> bool:
    value, made = graphs.tensor(operand), graphs.tensor(product)
    other = graphs.tensor(product.args[1 if left else 0])  # type: ignore[arg-type]
    if value is None or made is None or other is None or made.dtype not in _TYPES or other.dtype != made.dtype:
        return False
    # of a view that has all elements of the buffer, its strides say which is where
    as_it_lies = (rows, columns), (columns, 1)
    transposed = (columns, rows), (1, columns)
    if (tuple(value.shape), tuple(value.stride())) != (transposed if left else as_it_lies):
        return False
    across = other.shape[1 if left else 0]
    return value.storage_offset() == 0 and isinstance(across, int) and across > 0 and across % _STEP == 0


# ---------------------------------------------------------------- carried out


def multiply(graph: Graph, products: Sequence[Product], saved: Node) -> None:
    """Put the products over `saved`, the placeholder of the transposed matrix, in place of those of `graph`."""
    turn = torch.ops.aten.permute.default
    named = {node.name: node for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)}
    for product in products:
        node = named[product.name]
        gradient = node.args[1 if product.left else 0]
        assert isinstance(gradient, Node)
        one = _one(graph, saved)
        with graph.inserting_before(node):
            # either way it lies with what is summed over side by side
            lies = gradient if not product.left else _call(graph, node, turn, gradient, [1, 0])
            rounded, scale = _rounded(graph, node, lies)
            turned = _call(graph, node, turn, rounded if product.left else saved, [1, 0])
            operands = (saved, turned, one, scale) if product.left else (rounded, turned, scale, one)
            made = _call(graph, node, torch.ops.aten._scaled_mm.default, *operands, out_dtype=node.meta["val"].dtype)
        node.replace_all_uses_with(made)
        _erase(graph, node)


def _rounded(graph: Graph, before: Node, gradient: Node) -> tuple[Node, Node]:
    """The gradient in fp8, row by row, and its scale, of no dimension."""
    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
    most = torch.finfo(GRADIENT).max

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return _call(graph, before, target, *args, **kwargs)

    # the largest in its own type: what is converted for both is kept for both
    largest = call(aten.amax.default, call(aten.abs.default, gradient))
    if largest.meta["val"].dtype != torch.float32:
        largest = call(convert, largest, torch.float32)
    # so that its reciprocal is a normal number, too
    scale = call(
        aten.div.Tensor, call(aten.clamp_min.default, largest, torch.finfo(torch.float32).tiny * most * 2), most
    )
    finite = call(aten.lt.Scalar, largest, math.inf)
    nothing = call(aten.full.default, [], math.nan, dtype=torch.float32, device=before.meta["val"].device)
    scale = call(aten.where.self, finite, scale, nothing)
    wide = gradient if gradient.meta["val"].dtype == torch.float32 else call(convert, gradient, torch.float32)
    inside = call(aten.mul.Tensor, wide, call(aten.reciprocal.default, scale))
    narrow = call(convert, inside, GRADIENT)
    # a contiguous copy alone would lie as the compiler would rather have it
    rows = [int(narrow.meta["val"].shape[1]), 1]
    return call(_compat.force_stride_order, narrow, rows), scale


def _one(graph: Graph, like: Node) -> Node:
    """A scale of 1, one for all products of a graph."""
    for node in graph.nodes:
        if node.meta.get(_ONE):
            return node  # type: ignore[no-any-return]
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        one = _call(
            graph, like, torch.ops.aten.full.default, [], 1.0, dtype=torch.float32, device=like.meta["val"].device
        )
    one.meta[_ONE] = True
    return one


def _call(graph: Graph, origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    made = graph.call_function(target, args, kwargs)
    with origin.meta["val"].fake_mode:
        made.meta["val"] = target(*torch.fx.map_arg(args, lambda node: node.meta["val"]), **kwargs)
    for entry in ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag", "autograd_backward"):
        if entry in origin.meta and origin.op == "call_function":
            made.meta[entry] = origin.meta[entry]
    return made


def _erase(graph: Graph, node: Node) -> None:
    """`node`, which nothing reads, and what nothing reads then of what it was unpacked by."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for above in inputs:
        if above.op == "call_function" and not above.users and not above.is_impure():
            _erase(graph, above)
