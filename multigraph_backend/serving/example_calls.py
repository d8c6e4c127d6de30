"""Calls of other sizes, made from one call of the user's.

For a model called as `model(ids, mask=mask)` with `ids` and `mask` of sizes (4, 128), and a graph whose sizes are
`ids[0] = s0`, `ids[1] = s1`, `mask[0] = s0`, `mask[1] = s1`:

    call = ExampleCall(model.forward, (ids,), {"mask": mask})
    call.size("mask[1]")                                                 -> 128
    call.resized({"ids[0]": 8, "ids[1]": 128, "mask[0]": 8, "mask[1]": 128})

repeats rows of both from the first on.  Elements are those of the example, so that token numbers, positions and masks
stay what a model may be given.

Guarantees: tensors of a new call are new, however often they are in it; what has no size to change stays what it is.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multigraph_backend.capture import size_names

Path = tuple[tuple[str, Any], ...]  # steps from the arguments: ("item", key) and ("attribute", name)
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Place:
    """Where a name leads: dimension `dim` of a tensor, or an integer (`dim` is None)."""

    path: Path
    value: Any
    dim: int | None


class ExampleCall:
    """One call of `function`: `args` and `kwargs` as the user gives them."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = tuple(args), dict(kwargs)
        self._named, self._rest = _named(function, self.args, self.kwargs)

    def size(self, name: str) -> int | None:
        """The value of a size or integer argument in this call, None where it has none of that name."""
        place = self._place(name)
        if place is None:
            return None
        return int(place.value) if place.dim is None else int(place.value.shape[place.dim])

    def resized(self, sizes: Mapping[str, int]) -> Call:
        """The same call with other sizes and integers, by name; names that are not in it are left out."""
        tensors: dict[int, dict[int, int]] = {}
        numbers: dict[Path, int] = {}
        for name, size in sizes.items():
            place = self._place(name)
            if place is None:
                continue
            if place.dim is None:
                numbers[place.path] = size
            else:
                tensors.setdefault(id(place.value), {})[place.dim] = size
        again = _Again(tensors, numbers)
        args = tuple(again.of(value, (("item", at),)) for at, value in enumerate(self.args))
        return args, {name: again.of(value, (("item", name),)) for name, value in self.kwargs.items()}

    def dimension(self, name: str, tensor: torch.Tensor) -> int | None:
        """Which dimension of `tensor` a name stands for, None if it is not of that."""
        place = self._place(name)
        return place.dim if place is not None and place.value is tensor else None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors among the arguments, and in lists, tuples and dicts of them."""
        waiting: list[Any] = [*self.args, *self.kwargs.values()]
        while waiting:
            value = waiting.pop()
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list | tuple):
                waiting += value

    def _place(self, name: str) -> _Place | None:
        try:
            steps = list(_steps(ast.parse(size_names.normalized(name), mode="eval").body))
        except (SyntaxError, ValueError):
            return None
        (_, root), *steps = steps
        path: Path
        if root == self._rest[0] and steps and steps[0][0] == "item":  # of `*args`
            at = steps.pop(0)[1]
            rest = self.args[self._rest[1] :]
            if type(at) is not int or not 0 <= at < len(rest):
                return None
            path, value = (("item", self._rest[1] + at),), rest[at]
        elif root in self._named:
            path, value = self._named[root]
        else:
            return None
        for number, (kind, key) in enumerate(steps):
            if isinstance(value, torch.Tensor):
                last = number == len(steps) - 1
                fits = kind == "item" and type(key) is int and -value.dim() <= key < value.dim()
                return _Place(path, value, key % value.dim()) if last and fits else None
            try:
                value = value[key] if kind == "item" else getattr(value, key)
            except (LookupError, TypeError, AttributeError):
                return None
            if kind == "attribute":  # what lies in an object of the user's is not made anew
                return None
            path = (*path, (kind, key))
        return _Place(path, value, None) if type(value) is int else None


def _named(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, tuple[Path, Any]], tuple[str | None, int]]:
    """The arguments by the names that the function has for them, each with its path; and the name of its `*args`, with
    the number of arguments before."""
    named: dict[str, tuple[Path, Any]] = {name: ((("item", name),), value) for name, value in kwargs.items()}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return named, (None, 0)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in by_position]
    named.update((name, ((("item", at),), args[at])) for at, name in enumerate(names[: len(args)]))
    rest = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL), None)
    return named, (rest, len(names))


def _steps(node: ast.expr) -> Iterator[tuple[str, Any]]:
    """`batch['ids'][0]` -> the name, then each index and attribute.  Raises ValueError for anything else."""
    if isinstance(node, ast.Name):
        yield "name", node.id
    elif isinstance(node, ast.Attribute):
        yield from _steps(node.value)
        yield "attribute", node.attr
    elif isinstance(node, ast.Subscript):
        yield from _steps(node.value)
        yield "item", ast.literal_eval(node.slice)
    else:
        raise ValueError("no name of a size")


class _Again:
    """Values once more, with other sizes; no closure, which would hold them all until garbage is collected."""

    def __init__(self, tensors: Mapping[int, Mapping[int, int]], numbers: Mapping[Path, int]) -> None:
        self._tensors, self._numbers = tensors, numbers
        self._made: dict[int, torch.Tensor] = {}

    def of(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made:
                self._made[id(value)] = _of_sizes(value, self._tensors.get(id(value), {}))
            return self._made[id(value)]
        if isinstance(value, dict):
            return _like(value, {key: self.of(entry, (*path, ("item", key))) for key, entry in value.items()})
        if isinstance(value, list | tuple):
            return _like(value, [self.of(entry, (*path, ("item", key))) for key, entry in enumerate(value)])
        return self._numbers.get(path, value)


def _like(value: Any, entries: Any) -> Any:
    """`entries` as what `value` is: a plain container, a named tuple, or a subclass that is made like its base."""
    kind = type(value)
    if hasattr(kind, "_fields"):
        return kind(*entries)
    return kind(entries)


def _of_sizes(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """A new tensor with these sizes, by dimension: the elements again and again, in the same order in memory."""
    made = tensor.detach()
    for dim, size in sizes.items():
        old = made.shape[dim]
        if old == 0:
            shape = [*made.shape[:dim], size, *made.shape[dim + 1 :]]
            made = made.new_zeros(shape)
        elif size != old:
            made = made.index_select(dim, torch.arange(size, device=made.device) % old)
    order = sorted(range(made.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
    new = torch.empty_permuted(made.shape, order, dtype=made.dtype, device=made.device)  # no view, as users have them
    return new.copy_(made).requires_grad_(tensor.requires_grad)
