"""Operators whose numbers Inductor gets wrong, computed as eager computes them.

    x // y     Inductor: floor(x / y), so 3 // 0.3 is 10      eager: 9, from the remainder

Such an operator is rare in a program, or in the form that goes wrong.  Where one comes, Inductor is told to call
eager's kernel for it, or is given a right composition of other operators; a graph that has none stays as it is, and
costs a few look-ups.  docs/sharp-edges.md says what the cases are, and which are left.

In: a graph that Inductor compiles.  Out: the same graph, changed in place, and the same contract as Inductor's own
function.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.lower.nested_regions import compile_with_regions
from multigraph_backend.lower.order_of_changes import InnerCompile

_aten = torch.ops.aten
_Node = torch.fx.Node
_POW = _aten.pow.Tensor_Scalar
_ODD_IN_FLOAT32 = 1 << 24  # from here on, not every odd number is there
#: operators of which an index below 0 is an error, and Inductor counts from the end
_FROM_THE_BEGIN = {"aten.index_select.default", "aten.index_add.default", "aten.index_copy.default"}


def compile_as_eager(
    inner: InnerCompile | None, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Any:
    """Inductor's compile of one graph, with eager's numbers; then as `compile_with_regions`."""
    for module in graphs(gm):
        give_eagers_numbers(module)
    return compile_with_regions(inner, gm, example_inputs, **settings)


def give_eagers_numbers(gm: torch.fx.GraphModule) -> None:
    """Change what Inductor would compute otherwise; `gm` alone, without graphs that it calls."""
    for target, goes_wrong in _KERNELS.items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if goes_wrong(node):
                node.meta["should_fallback"] = True  # Inductor asks for it, and its own tests set it (2.11 to 2.15)
    changed = False
    for target, rewrites in _REWRITTEN.items():
        for node in list(gm.graph.find_nodes(op="call_function", target=target)):
            changed |= rewrites(node)
    if not _compat.missing("eager's numbers"):
        for node in list(gm.graph.find_nodes(op="call_function", target=_compat.offsets_to_indices)):
            changed |= _keeps_inside(node)
    if changed:
        gm.recompile()


def graphs(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """`gm`, and the graphs that it calls."""
    return [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, _Node) else None


def _argument(node: _Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _is_float(node: _Node) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and bool(value.is_floating_point())


def _floors(node: _Node) -> bool:
    """`floor(x / y)`, where eager divides what is left without the remainder."""
    is_floor = "floor_divide" in str(node.target) or node.kwargs.get("rounding_mode") == "floor"
    return is_floor and _is_float(node)


def _floors_little(node: _Node) -> bool:
    """The same of two bytes a number, or with a number that is known at the call; others are rewritten."""
    at_call = any(isinstance(entry, _Node) and not isinstance(_value(entry), torch.Tensor) for entry in node.args)
    return _floors(node) and (at_call or _value(node).itemsize < 4)


def _leaves_little(node: _Node) -> bool:
    """A remainder of two bytes a number, or of a number by a tensor; others are rewritten (`_takes_fmod`)."""
    return _is_float(node) and bool(node.target is _aten.remainder.Scalar_Tensor or _value(node).itemsize < 4)


def _of_one_number(node: _Node) -> bool:
    """The variance of a single number: 0, also where that is NaN or infinite.  Corrected, it is NaN, as in eager."""
    value, dims = _value(node.args[0]), _argument(node, 1, "dim")
    correction = node.kwargs.get("correction")
    if not isinstance(value, torch.Tensor) or not isinstance(correction, int | float) or correction >= 1:
        return False
    sizes = [value.size(dim) for dim in dims] if dims and value.dim() else list(value.size())
    return all(isinstance(size, int) and size == 1 for size in sizes)  # a size with a symbol is not 1


def _is_a_root(node: _Node) -> bool:
    """Inductor has `sqrt(x)` for `x ** 0.5`, as eager has, but in float16 on the CPU: infinity of minus infinity."""
    value = _value(node)
    return bool(node.args[1] == 0.5) and isinstance(value, torch.Tensor) and _by_pow(value)


def _by_pow(value: torch.Tensor) -> bool:
    return value.dtype == torch.float16 and value.device.type == "cpu"


def _goes_wrong_as_float(node: _Node) -> bool:
    """An exponent that Inductor's code has in float32, where it is 0, or even, and was not: eager has it in float64."""
    exponent = node.args[1]
    if not isinstance(exponent, int | float) or not math.isfinite(exponent):
        return False
    rounded = torch.tensor(float(exponent), dtype=torch.float32).item()
    return rounded != exponent and (rounded == 0 or abs(exponent) >= _ODD_IN_FLOAT32)


def _is_no_power_of_inductors(node: _Node) -> bool:
    return _is_a_root(node) or (_is_float(node) and _goes_wrong_as_float(node))


def _cancels(node: _Node) -> bool:
    """`expm1` on the CPU is `exp(x) - 1`, `atanh` a logarithm of nearly 1: 0 of small numbers.

    Where a program names them; `elu`, which is decomposed to `expm1`, stays one kernel.
    """
    value = _value(node)
    asked_for = str(node.meta.get("original_aten", node.target)) == str(node.target)  # what is noted may be a copy
    return asked_for and isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _last_windows_are_counted_otherwise(node: _Node) -> bool:
    """Windows that reach beyond the padding (`ceil_mode`): the forward divides by less than Inductor's backward."""
    ceil_mode, counts_padding = _argument(node, 5, "ceil_mode", False), _argument(node, 6, "count_include_pad", True)
    return bool(ceil_mode and counts_padding) and _argument(node, 7, "divisor_override") is None


def _says_where(node: _Node) -> bool:
    """Max pooling whose indices are used, by windows that begin in the padding."""
    padding = _argument(node, 3, "padding", 0)
    padded = any(padding) if isinstance(padding, Sequence) else padding
    used = (user for user in node.users if user.target is operator.getitem and user.users)
    return bool(padded) and any(user.args[1] == 1 for user in used)


def _bound_does_not_fit(node: _Node) -> bool:
    """A bound that the integers have no place for: eager's kernel raises, Inductor's takes what is left of the bits."""
    value, bounds = _value(node), node.args[1:]
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return False
    known = [bound for bound in (*bounds, *node.kwargs.values()) if isinstance(bound, int)]
    limits = torch.iinfo(value.dtype)
    return not all(limits.min <= bound <= limits.max for bound in known)


#: whose kernel of eager's is called, where the node is one that goes wrong
_KERNELS: dict[Any, Callable[[_Node], bool]] = {
    _aten.floor_divide.default: _floors_little,
    _aten.floor_divide.Scalar: _floors_little,
    _aten.div.Tensor_mode: _floors_little,
    _aten.div.Scalar_mode: _floors_little,
    _aten.remainder.Scalar: _leaves_little,
    _aten.remainder.Tensor: _leaves_little,
    _aten.remainder.Scalar_Tensor: _leaves_little,
    _aten.var.correction: _of_one_number,
    _aten.var_mean.correction: _of_one_number,
    _POW: _is_no_power_of_inductors,
    _aten.clamp.default: _bound_does_not_fit,
    _aten.clamp_min.default: _bound_does_not_fit,
    _aten.clamp_max.default: _bound_does_not_fit,
    **({_aten.expm1.default: _cancels} if _compat.EXPM1_CANCELS else {}),
    _aten.atanh.default: _cancels,
    _aten.avg_pool2d_backward.default: _last_windows_are_counted_otherwise,
    _aten.avg_pool3d_backward.default: _last_windows_are_counted_otherwise,
    _aten.max_pool2d_with_indices.default: _says_where,
    _aten.max_pool3d_with_indices.default: _says_where,
}


def _takes_rsqrt(node: _Node) -> bool:
    """`x ** -0.5` is `rsqrt(x)` in eager: -inf of -0.0, and NaN of minus infinity; Inductor has `pow`."""
    value = _value(node.args[0])
    if node.args[1] != -0.5 or not isinstance(value, torch.Tensor) or not value.is_floating_point() or _by_pow(value):
        return False
    node.target, node.args = _aten.rsqrt.default, (node.args[0],)
    return True


def _takes_remainder_off(node: _Node) -> bool:
    """`x // y` from `x` without what a division that truncates leaves, over `y`, which is whole but for rounding."""
    if not _floors(node) or _floors_little(node):
        return False
    dtype = _value(node).dtype
    x, y = (_as(node, operand, dtype) for operand in node.args[:2])
    if not isinstance(x, _Node):
        x = call_before(node, _aten.full.default, [], x, dtype=dtype, device=_value(node).device)
    over = call_before(node, _aten.div.Tensor, x, y)
    left = call_before(node, _remainder(y), x, y)
    quotient = call_before(node, _aten.div.Tensor, call_before(node, _aten.sub.Tensor, x, left), y)
    one_less = call_before(node, _aten.sub.Tensor, quotient, 1)
    quotient = call_before(node, _aten.where.self, _is_of_other_sign(node, left, y), one_less, quotient)
    floor = call_before(node, _aten.floor.default, quotient)
    above = call_before(node, _aten.gt.Scalar, call_before(node, _aten.sub.Tensor, quotient, floor), 0.5)
    whole = call_before(node, _aten.where.self, above, call_before(node, _aten.add.Tensor, floor, 1), floor)
    # eager's 0 has the sign of `x / y`, and what is divided by 0 is that
    no_sign = call_before(node, _aten.eq.Scalar, quotient, 0)
    whole = call_before(node, _aten.where.self, no_sign, call_before(node, _aten.mul.Tensor, over, 0.0), whole)
    if isinstance(y, _Node) or abs(y) < 1:
        # of a quotient that is too large, `fmod` for whole vectors is NaN; and there is no `isinf` for them
        large = call_before(node, _aten.eq.Scalar, call_before(node, _aten.abs.default, over), math.inf)
        finite = call_before(node, _aten.lt.Scalar, call_before(node, _aten.abs.default, x), math.inf)
        large = call_before(node, _aten.logical_and.default, large, finite)
        whole = call_before(node, _aten.where.self, large, over, whole)
    if isinstance(y, _Node):
        whole = call_before(node, _aten.where.self, call_before(node, _aten.eq.Scalar, y, 0), over, whole)
    node.replace_all_uses_with(whole if isinstance(y, _Node) or y != 0 else over)
    node.graph.erase_node(node)
    return True


def _as(node: _Node, operand: Any, dtype: torch.dtype) -> Any:
    if not isinstance(operand, _Node) or _value(operand).dtype == dtype:
        return operand
    return call_before(node, torch.ops.prims.convert_element_type.default, operand, dtype)


def _remainder(y: Any) -> Any:
    return _aten.fmod.Tensor if isinstance(y, _Node) else _aten.fmod.Scalar


def _is_of_other_sign(node: _Node, left: _Node, y: Any) -> _Node:
    """Where what a division by `y` leaves is below 0 and `y` is not, or the other way round."""
    if not isinstance(y, _Node):
        return call_before(node, _aten.gt.Scalar if y < 0 else _aten.lt.Scalar, left, 0)
    below = [call_before(node, _aten.lt.Scalar, each, 0) for each in (left, y)]
    some = call_before(node, _aten.ne.Scalar, left, 0)
    return call_before(node, _aten.logical_and.default, some, call_before(node, _aten.logical_xor.default, *below))


def _takes_fmod(node: _Node) -> bool:
    """`x % y` from what a division that truncates leaves, not `x - floor(x / y) * y`: 1e10 % 3 is 1, not 0."""
    x, y = node.args
    if not _is_float(node) or _leaves_little(node):
        return False
    if not isinstance(_value(y), torch.Tensor) and not isinstance(y, int | float):  # a number that is known at the call
        node.meta["should_fallback"] = True
        return False
    left = call_before(node, _remainder(y), x, y)
    moves, moved = _is_of_other_sign(node, left, y), call_before(node, _aten.add.Tensor, left, y)
    node.replace_all_uses_with(call_before(node, _aten.where.self, moves, moved, left))
    node.graph.erase_node(node)
    return True


def _keeps_inside(node: _Node) -> bool:
    """The index of a maximum from its place in the window: in a window of minus infinities that is the first place.

    Where the window begins in the padding, this is no index of the input.  Eager begins with the first place inside.
    """
    places, kernel, sizes, strides, padding, dilation = node.args
    if not any(padding):  # type: ignore[arg-type]
        return False
    index: Any = None
    for dim, size in enumerate(sizes):  # type: ignore[arg-type]
        # where it is in this dimension alone: the others have one place
        alone = [[part if at == dim else 0 for at, part in enumerate(each)] for each in (strides, padding, dilation)]  # type: ignore[arg-type]
        where = call_before(node, node.target, places, kernel, [1] * len(alone[0]), *alone)
        if padding[dim]:  # type: ignore[index]
            first = call_before(node, _aten.remainder.Scalar, where, dilation[dim])  # type: ignore[index]
            where = call_before(node, _aten.where.self, call_before(node, _aten.lt.Scalar, where, 0), first, where)
        index = (
            where
            if dim == 0
            else call_before(node, _aten.add.Tensor, call_before(node, _aten.mul.Tensor, index, size), where)
        )
    node.replace_all_uses_with(index)
    node.graph.erase_node(node)
    return True


def _counts_from_the_end(node: _Node) -> bool:
    """An index below 0 of an operator that has no such index becomes one that is beyond every size."""
    if str(node.meta.get("original_aten")) not in _FROM_THE_BEGIN:
        return False
    return _guard(node, 1)


def _guard(node: _Node, place: int) -> bool:
    """The same for the argument there, an index or a list of some."""
    given: Any = node.args[place]
    guarded = [index and _beyond(node, index) for index in given] if isinstance(given, list) else _beyond(node, given)
    if guarded == given:
        return False
    node.update_arg(place, guarded)
    return True


def _beyond(node: _Node, index: _Node) -> _Node:
    value = _value(index)
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        return index
    below = call_before(node, _aten.lt.Scalar, index, 0)
    return call_before(node, _aten.where.ScalarSelf, below, torch.iinfo(value.dtype).max, index)


def call_before(node: _Node, target: Any, *args: Any, **kwargs: Any) -> _Node:
    """A call of `target` put before `node`."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    values = torch.fx.map_arg(args, lambda operand: operand.meta["val"])
    with _value(node).fake_mode:
        made.meta["val"] = target(*values, **kwargs)
    made.meta.update({key: node.meta[key] for key in ("stack_trace", "original_aten") if key in node.meta})
    return made


#: what is put into the graph in their place, where the node is one that goes wrong
_REWRITTEN: dict[Any, Callable[[_Node], bool]] = {
    _POW: _takes_rsqrt,
    _aten.remainder.Scalar: _takes_fmod,
    _aten.remainder.Tensor: _takes_fmod,
    _aten.floor_divide.default: _takes_remainder_off,
    _aten.floor_divide.Scalar: _takes_remainder_off,
    _aten.div.Tensor_mode: _takes_remainder_off,
    _aten.div.Scalar_mode: _takes_remainder_off,
    _aten.index.Tensor: _counts_from_the_end,
    _aten.index_put.default: _counts_from_the_end,
    **(
        {_aten.embedding.default: partial(_guard, place=1), _aten.gather.default: partial(_guard, place=2)}
        if _compat.GATHERS_FROM_THE_END
        else {}
    ),
}
