"""What a pack function returns, taken apart into tensors and put together again.

In: anything a pack function may return: tensors, numbers, None, nested tuples, lists, dicts, named tuples, objects with
attributes, tensor subclasses made of plain tensors, the same tensor several times.  Out: the distinct tensors in it,
and a `Structure` that builds the same thing over other tensors.

Invariant: what is not a tensor is a constant of the compile; an object that could hide a tensor is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multigraph_backend import _compat

_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format,
)  # fmt: skip

Build = Callable[[Sequence[torch.Tensor]], Any]


class CannotTakeApart(TypeError):
    """A pack function returned something whose tensors cannot be found."""


@dataclass(frozen=True)
class Structure:
    """How to build a value over the tensors that stand at the places of those it was taken apart into."""

    build: Build


def take_apart(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """The tensors in `value`, each once, and how it is built from them.  Raises CannotTakeApart."""
    tensors: list[torch.Tensor] = []
    return tensors, Structure(_builder(value, tensors))


def _builder(value: Any, tensors: list[torch.Tensor]) -> Build:
    if isinstance(value, torch.Tensor) and _compat.is_traceable_wrapper_subclass(value):
        return _subclass_builder(value, tensors)
    if isinstance(value, torch.Tensor):
        place = next((index for index, known in enumerate(tensors) if known is value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        return lambda found: found[place]
    if isinstance(value, tuple | list) and type(value) is not torch.Size:
        parts = [_builder(entry, tensors) for entry in value]
        if type(value) in (tuple, list):
            kind: Any = type(value)
            return lambda found: kind([part(found) for part in parts])
        if hasattr(value, "_fields"):
            named: Any = type(value)
            return lambda found: named(*(part(found) for part in parts))
        raise CannotTakeApart(f"the pack function returned a {type(value).__name__}; return a tuple, a list or a dict")
    if type(value) is dict:
        entries = {key: _builder(entry, tensors) for key, entry in value.items()}
        return lambda found: {key: entry(found) for key, entry in entries.items()}
    if isinstance(value, (*_CONSTANTS, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return lambda found: value
    if hasattr(value, "__dict__") and not callable(value):
        attributes = {name: _builder(entry, tensors) for name, entry in vars(value).items()}

        def rebuild(found: Sequence[torch.Tensor]) -> Any:
            again = copy.copy(value)
            again.__dict__.update({name: attribute(found) for name, attribute in attributes.items()})
            return again

        return rebuild
    raise CannotTakeApart(
        f"the pack function returned a {type(value).__name__}, in which tensors cannot be found; return tensors, "
        "numbers, None, or tuples, lists and dicts of them"
    )


def _subclass_builder(value: Any, tensors: list[torch.Tensor]) -> Build:
    names, context = value.__tensor_flatten__()
    inner = {name: _builder(getattr(value, name), tensors) for name in names}
    kind, size, stride = type(value), value.size(), value.stride()
    return lambda found: kind.__tensor_unflatten__(
        {name: part(found) for name, part in inner.items()}, context, size, stride
    )
