"""`mark`: stock marks without their traps.

torch's `mark_unbacked` starts the table of a tensor's specializations anew, so marking one dimension forgets what was
marked on another, and its list form drops `specialize_on`.  `mark` keeps all of it, and takes values and ranges where
torch takes callables alone.

Marks are attributes of one tensor object: a clone, a slice or a tensor on another device has none, and nobody hears of
it.  So the place of each `mark` is kept until a trace has met one of its tensors; `explain()` shows the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from multigraph_backend import _compat, trace
from multigraph_backend.facts import Facts
from multigraph_backend.predicates import predicate_from_json

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
    Raises ValueError for a dimension that the tensor does not have.
    """
    if lacking := _compat.missing("marks"):
        trace.warn_once("off: marks", "%s", dict(_compat.switched_off()).get("marks", lacking[0]))
        return
    # what declares variants stays with torch's own dispatch where it cannot be taken over
    checks = [] if _compat.missing("variants") else [_as_check(entry) for entry in specialize_on]
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
    _met.setdefault(place, False)
    tensor._multigraph_marks = {*getattr(tensor, "_multigraph_marks", ()), place}  # type: ignore[attr-defined]


_met: dict[str, bool] = {}  # place of a `mark` -> whether a trace had one of its tensors


def meet(example_inputs: Sequence[Any]) -> None:
    """These are inputs of a trace."""
    for value in example_inputs:
        for place in getattr(value, "_multigraph_marks", ()):
            _met[place] = True


def unmet() -> tuple[str, ...]:
    """Places of marks ("file:line") of which no trace has had a tensor."""
    return tuple(place for place, met in list(_met.items()) if not met)


def forget() -> None:
    """Start anew, with `torch._dynamo.reset()`."""
    _met.clear()


def _as_check(entry: Specialization) -> Callable[[int], object]:
    if isinstance(entry, int) and not isinstance(entry, bool):
        return Facts(values=(entry,)).holds
    if isinstance(entry, Mapping):
        return predicate_from_json({"size": dict(entry)}).facts()["size"].holds
    if callable(entry):
        return entry
    raise TypeError(f"specialize_on takes integers, forms like {{'multiple_of': 16}} and callables, not {entry!r}")
