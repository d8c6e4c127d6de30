"""`mark`: a mark on a tensor's dimension, as torch has them, without what goes wrong with torch's.

torch's `mark_unbacked` starts the table of a tensor's specializations anew, so marking one dimension forgets what was
marked on another, and its list form drops `specialize_on`.  `mark` keeps all of it, and takes values and ranges where
torch takes callables alone.

Marks are attributes of one tensor object: a clone, a slice or a tensor on another device has none, and nobody hears of
it.  So the file and line of each call of `mark` is kept until a trace has met one of its tensors; `explain()` shows
the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from multigraph_backend import _compat, events
from multigraph_backend.declare.facts import Facts
from multigraph_backend.declare.predicates import predicate_from_json
from multigraph_backend.spelling import shown

Specialization = int | Mapping[str, int] | Callable[[int], object]


def mark(
    tensor: torch.Tensor,
    dim: int | Sequence[int],
    *,
    specialize_on: Sequence[Specialization] = (),
    unbacked: bool = False,
    min: int | None = None,
    max: int | None = None,
) -> None:
    """Mark dimensions of `tensor` as dynamic, and declare variants for them.

    `specialize_on`: each entry an integer, a form like `{"min": 1, "max": 512, "multiple_of": 16}`, or a callable of
    one integer.  `unbacked`: sizes 0 and 1 are no cases of their own (`torch._dynamo.decorators.mark_unbacked`).
    `min`, `max`: bounds that torch guards on; not together with `unbacked` before torch 2.13.  Earlier marks on other
    dimensions are kept.  Like torch's marks it is lost on clone and slice, and ignored where a trace has had that
    dimension marked before (another `specialize_on` makes no new trace).
    Raises ValueError for a dimension that the tensor does not have and for values that no size has, TypeError for
    anything of another type.
    """
    _check_types(tensor, dim, specialize_on, unbacked, min, max)
    if lacking := _compat.missing("marks"):
        events.warn_once("off: marks", "%s", dict(_compat.switched_off(inductor=False)).get("marks", lacking[0]))
        return
    # what declares variants stays with torch's own dispatch where it cannot be taken over
    checks = [] if _compat.missing("variants", inductor=False) else [_as_check(entry) for entry in specialize_on]
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    for one in (dim,) if isinstance(dim, int) else tuple(dim):
        if not -tensor.dim() <= one < tensor.dim():
            raise ValueError(f"the tensor has {tensor.dim()} dimensions, dimension {one} cannot be marked")
        index = one % tensor.dim()
        table: dict[int, Any] = dict(getattr(tensor, "_specialize_on", {}))
        bounds = {name: value for name, value in (("min", min), ("max", max)) if value is not None}
        if unbacked:
            _compat.mark_unbacked(tensor, index, specialize_on=checks, **bounds)
        else:
            _compat.mark_dynamic(tensor, index, specialize_on=checks, **bounds)
        tensor._specialize_on = {**table, **getattr(tensor, "_specialize_on", {})}  # type: ignore[attr-defined]
    if place not in _met and _traces:
        _late.add(place)
    _met.setdefault(place, False)
    tensor._multigraph_marks = {*getattr(tensor, "_multigraph_marks", ()), place}  # type: ignore[attr-defined]


_met: dict[str, bool] = {}  # place of a `mark` -> whether a trace had one of its tensors
_late: set[str] = set()  # places of marks before which graphs had been traced
_traces = 0


def meet(example_inputs: Sequence[Any]) -> None:
    """These are inputs of a trace."""
    global _traces
    _traces += 1
    for value in example_inputs:
        for place in getattr(value, "_multigraph_marks", ()):
            _met[place] = True


def unmet() -> tuple[str, ...]:
    """Places of marks ("file:line") of which no trace has had a tensor."""
    return tuple(place for place, met in list(_met.items()) if not met)


def late() -> tuple[str, ...]:
    """Those of `unmet` that came when graphs had been traced already, one of which may serve their calls."""
    return tuple(place for place in unmet() if place in _late)


def forget() -> None:
    """Start anew, with `torch._dynamo.reset()`."""
    global _traces
    _met.clear()
    _late.clear()
    _traces = 0


def _check_types(
    tensor: object, dim: object, specialize_on: object, unbacked: object, min: object, max: object
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"mark takes a tensor, got {shown(tensor)}")
    dims = dim if isinstance(dim, list | tuple | range) else [dim]
    if not all(_is_int(one) for one in dims):
        raise TypeError(f"mark: dim must be an int or a list of ints, got {shown(dim)}")
    if not isinstance(specialize_on, Sequence) or isinstance(specialize_on, str | bytes):
        wanted = repr(sorted(specialize_on)) if isinstance(specialize_on, set | frozenset) else f"[{specialize_on!r}]"
        raise TypeError(f"mark: specialize_on must be a list, got {shown(specialize_on)}; write {wanted}")
    if not isinstance(unbacked, bool):
        raise TypeError(f"mark: unbacked must be True or False, got {shown(unbacked)}")
    for name, bound in (("min", min), ("max", max)):
        if bound is not None and not _is_int(bound):
            raise TypeError(f"mark: {name} must be an int, got {shown(bound)}")
        if isinstance(bound, int) and bound < 0:
            raise ValueError(f"mark: {name} must be at least 0, a size is never negative; got {bound}")
    if isinstance(min, int) and isinstance(max, int) and min > max:
        raise ValueError(f"mark: min {min} is greater than max {max}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_check(entry: Specialization) -> Callable[[int], object]:
    if isinstance(entry, int) and not isinstance(entry, bool):
        facts = Facts(values=(entry,))
    elif isinstance(entry, Mapping):
        facts = predicate_from_json({"size": dict(entry)}).facts()["size"]
        if facts.unconstrained:
            raise ValueError(
                f"mark: {dict(entry)!r} holds for every size; write forms like {{'min': 1, 'max': 512}} or "
                "{'multiple_of': 16}"
            )
    elif callable(entry):
        return entry
    else:
        apart = f"; write {', '.join(map(repr, entry))}" if isinstance(entry, list | tuple) and entry else ""
        raise TypeError(
            f"specialize_on takes integers, forms like {{'multiple_of': 16}} and callables, not {entry!r}{apart}"
        )
    if facts.intersect(Facts(min=0)).empty:
        raise ValueError(f"mark: a size is never negative, and {facts.describe('size')} holds for no size")
    return facts.holds
