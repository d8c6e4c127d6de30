"""Products with int8 weights on a GPU: kept from a kernel that is slower than what it stands for.

    (x @ w.to(bfloat16).t()) * scale        w: int8, N x K; x: bfloat16, M x K; scale: bfloat16, N

Inductor (torch 2.11 to 2.15) calls `aten._weight_int8pack_mm` for that.  Processors have a good kernel for it.  That of
GPUs uses no tensor cores and reads the weight once for each row of x: compiled decoders of torchao's
`Int8WeightOnlyConfig` are slower than the same ones run eagerly, a hundred times at a thousand rows
(docs/sharp-edges.md).  The product with its two factors exchanged is the same number, and Inductor does not know it.

Where x is one row, as in decoding, the product is a sum over K for each of N: one kernel that reads the weight as it
is, a byte for an element.  A library's product has it converted into a buffer first, which is read again: five bytes.

In: a graph that Inductor compiles.  Out: the same graph, changed in place.  The sums are in float32, as the library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multigraph_backend.lower.as_eager import call_before, compile_as_eager, graphs
from multigraph_backend.lower.order_of_changes import InnerCompile

_aten = torch.ops.aten
_Node = torch.fx.Node
_SHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_LAYOUTS = {_aten.permute.default, _aten.t.default, _aten.expand.default, _aten.cat.default}
_CONVERTED = torch.ops.prims.convert_element_type.default
_DEVICES = frozenset({"cuda"})


def compile_with_products(
    inner: InnerCompile | None, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Any:
    """Inductor's compile of one graph; `compile_as_eager` of what is left of it here."""
    for module in graphs(gm):
        keep_products(module)
    return compile_as_eager(inner, gm, example_inputs, **settings)


def keep_products(gm: torch.fx.GraphModule, devices: frozenset[str] = _DEVICES) -> None:
    """Change what Inductor has a slow kernel for, on these devices; `gm` alone, without graphs that it calls."""
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=_aten.mul.Tensor):
        product, scale = node.args
        if isinstance(product, _Node) and isinstance(scale, _Node) and _is_of_int8(product, devices):
            node.args = (scale, product)
            changed = True
    for node in list(gm.graph.find_nodes(op="call_function", target=_aten.mm.default)):
        if _is_of_int8(node, devices):
            changed |= _becomes_a_sum(node)
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _is_of_int8(node: _Node, devices: frozenset[str]) -> bool:
    """Whether this is a product with a weight that comes as int8."""
    while node.target in _SHAPES and isinstance(node.args[0], _Node):
        node = node.args[0]
    if node.target not in (_aten.mm.default, _aten.bmm.default):
        return False
    weight: Any = node.args[1]
    while isinstance(weight, _Node) and weight.target in {*_LAYOUTS, *_SHAPES, _CONVERTED}:
        weight = weight.args[0]
        weight = weight[0] if isinstance(weight, list | tuple) else weight
    value = weight.meta.get("val") if isinstance(weight, _Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.int8 and value.device.type in devices


def _becomes_a_sum(node: _Node) -> bool:
    """The product of one row and what was N x K before it was transposed."""
    row, weight = node.args
    assert isinstance(row, _Node)
    found = _before_transposing(weight)
    value = row.meta["val"]
    if found is None or not isinstance(value.shape[0], int) or value.shape[0] != 1 or not value.is_floating_point():
        return False
    wide = call_before(node, _CONVERTED, row, torch.float32)
    parts = call_before(node, _aten.mul.Tensor, call_before(node, _CONVERTED, found, torch.float32), wide)
    total = call_before(node, _CONVERTED, call_before(node, _aten.sum.dim_IntList, parts, [1]), value.dtype)
    node.replace_all_uses_with(call_before(node, _aten.unsqueeze.default, total, 0))
    node.graph.erase_node(node)
    return True


def _before_transposing(weight: Any) -> _Node | None:
    """The int8 that `weight` is the transposed and converted of, in either order; None: it is not that."""
    seen = []
    while isinstance(weight, _Node) and weight.target in (_CONVERTED, _aten.permute.default):
        seen.append(weight)
        weight = weight.args[0]
    transposed = [each for each in seen if each.target is _aten.permute.default]
    if not isinstance(weight, _Node) or len(seen) != 2 or len(transposed) != 1 or transposed[0].args[1] != [1, 0]:
        return None
    return weight
