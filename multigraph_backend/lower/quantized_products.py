"""Products with int8 weights: kept from an operator that is slow on GPUs, and on the CPU wrong at some sizes.

    (x @ w.to(bfloat16).t()) * scale        w: int8, N x K; x: bfloat16, M x K; scale: bfloat16, N

Inductor (torch 2.11 to 2.15) calls `aten._weight_int8pack_mm` for that.  The kernel of GPUs uses no tensor cores and
reads the weight once for each row of x: compiled decoders of torchao's `Int8WeightOnlyConfig` are slower than the same
ones run eagerly, a hundred times at a thousand rows (docs/sharp-edges.md).  That of processors is a good one, but it
takes K in steps: where K is no multiple of those it reads on behind the weight, and gives a wrong number, or crashes.
The product with its two factors exchanged is the same number, and Inductor does not know it.

On a GPU, where x is one row, as in decoding, a product with a weight that is made of int8, by scales and zero points
of whatever form, is a sum over K for each of N: one kernel that reads the weight as it is, a byte for an element.  A
library's product has it made in a buffer first, which is read again: five bytes.

In: a graph that Inductor compiles.  Out: the same graph, changed in place.  The sums are in float32, as the library's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from multigraph_backend.lower.as_eager import call_before, compile_as_eager, graphs
from multigraph_backend.lower.order_of_changes import InnerCompile

_aten = torch.ops.aten
_Node = torch.fx.Node
_SHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_CONVERTED = torch.ops.prims.convert_element_type.default
#: between a weight and what it is made of
_MADE_BY = _SHAPES | {
    _CONVERTED, _aten.permute.default, _aten.t.default, _aten.expand.default, _aten.cat.default,
    _aten.sub.Tensor, _aten.mul.Tensor, _aten.add.Tensor,
}  # fmt: skip
_DEVICES = frozenset({"cuda"})
#: of K, where the operator may stand on the CPU: its kernels take fewer at a time, by processor
_STEP = 64


def compile_with_products(
    inner: InnerCompile | None, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Any:
    """Inductor's compile of one graph; `compile_as_eager` of what is left of it here."""
    for module in graphs(gm):
        keep_products(module)
    return compile_as_eager(inner, gm, example_inputs, **settings)


def keep_products(gm: torch.fx.GraphModule, devices: frozenset[str] = _DEVICES) -> None:
    """Change what Inductor has a slow kernel for, on these devices, and what it has a wrong one for.  `gm` alone,
    without graphs that it calls."""
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=_aten.mul.Tensor):
        product, scale = node.args
        if isinstance(product, _Node) and isinstance(scale, _Node) and _is_refused(product, devices):
            node.args = (scale, product)
            changed = True
    if _products(gm, devices):
        gm.graph.eliminate_dead_code()  # who else reads a weight is asked next
        for node in _products(gm, devices):
            changed |= _becomes_a_sum(node)
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _products(gm: torch.fx.GraphModule, devices: frozenset[str]) -> list[_Node]:
    """Of matrices with weights that are made of int8."""
    return [
        node
        for target in (_aten.mm.default, _aten.addmm.default)
        for node in gm.graph.find_nodes(op="call_function", target=target)
        if _is_made_of_int8(node.args[-1], devices)
    ]


def _is_refused(node: _Node, devices: frozenset[str]) -> bool:
    """Whether this is a product with a weight that comes as int8, and the operator is not to be called for it."""
    while node.target in _SHAPES and isinstance(node.args[0], _Node):
        node = node.args[0]
    if node.target not in (_aten.mm.default, _aten.bmm.default):
        return False
    weight = node.args[1]
    if _is_made_of_int8(weight, devices):
        return True
    if not isinstance(weight, _Node) or not _is_made_of_int8(weight, frozenset({"cpu"})):
        return False
    inner = weight.meta["val"].shape[-2]
    return not (isinstance(inner, int) and inner % _STEP == 0)


def _is_made_of_int8(weight: Any, devices: frozenset[str]) -> bool:
    """Whether a weight is an int8 tensor, or computed of one, element by element."""
    while isinstance(weight, _Node) and weight.target in _MADE_BY:
        of = weight.args[0]
        parts = [part for part in (of if isinstance(of, list | tuple) else weight.args) if isinstance(part, _Node)]
        weight = max(parts, key=_elements)  # scales and zero points are smaller
    value = weight.meta.get("val") if isinstance(weight, _Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.int8 and value.device.type in devices


def _elements(node: _Node) -> int:
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return math.prod(size for size in sizes if isinstance(size, int))


def _becomes_a_sum(node: _Node) -> bool:
    """The product of one row and what was N x K before it was transposed, and a bias."""
    *bias, row, weight = node.args
    assert isinstance(row, _Node)
    found, value = _before_transposing(weight), row.meta["val"]
    if found is None or not isinstance(value.shape[0], int) or value.shape[0] != 1 or not value.is_floating_point():
        return False
    if node.kwargs:  # factors of the product and the bias
        return False
    wide = call_before(node, _CONVERTED, row, torch.float32)
    parts = call_before(node, _aten.mul.Tensor, call_before(node, _CONVERTED, found, torch.float32), wide)
    total = call_before(node, _aten.unsqueeze.default, call_before(node, _aten.sum.dim_IntList, parts, [1]), 0)
    if bias:
        total = call_before(node, _aten.add.Tensor, total, call_before(node, _CONVERTED, bias[0], torch.float32))
    node.replace_all_uses_with(call_before(node, _CONVERTED, total, value.dtype))
    node.graph.erase_node(node)
    return True


def _before_transposing(weight: Any) -> _Node | None:
    """What `weight` is the transposed of, before or after it was converted; None: it is not that, or others read it."""
    turned = False
    while isinstance(weight, _Node) and len(weight.users) == 1:
        if weight.target is _aten.permute.default and not turned and weight.args[1] == [1, 0]:
            turned = True
        elif weight.target is not _CONVERTED:
            break
        weight = weight.args[0]
    return weight if turned and isinstance(weight, _Node) else None
