"""Which inputs of a call share memory.

Code that mutates its inputs is compiled for one way of sharing; the same questions are asked when it is compiled and
at its calls, so they are asked here.  Parameters and buffers take part: an input may be a window into one of them in
some calls only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch

from multigraph_backend import _compat, native
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.capture.structure import is_wrapper, made_of, plain_parts

# groups of tensors that share memory: positions of inputs; tensors that the graph holds count on from there
Sharing = tuple[tuple[int, ...], ...]


def shared_storages(tensors: Sequence[torch.Tensor]) -> Sharing:
    """Which of these tensors share a storage: their positions, by group; empty when none does."""
    keys = _storages(tensors)
    if len(set(keys)) == len(keys):
        return ()
    groups: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def sharing(graph: CapturedGraph, args: Sequence[Any]) -> Sharing:
    """Which tensors share a storage in a call, as far as it matters: with the user's, or with one that is written to.

    Parameters that share memory among themselves (weights of a flat buffer) are left out, unless one is changed.
    """
    tensors = (*args, *graph.held)
    positions = [*graph.tensor_inputs, *range(len(args), len(tensors))]
    groups = shared_storages([tensors[index] for index in positions])
    if not groups:
        return ()
    found = (tuple(positions[member] for member in group) for group in groups)
    matters = {*graph.user_inputs, *graph.written}
    return tuple(group for group in found if not matters.isdisjoint(group))


def written_alone(graph: CapturedGraph) -> Callable[[Sequence[Any]], bool]:
    """The check of a call that nothing which the graph writes to shares its storage with anything else of the call.

    It stands before each call, so of a storage that one tensor alone uses nothing more is asked.  It is native where
    calls are.
    """
    count = len(graph.inputs)
    written_at = [index for index in graph.tensor_inputs if index in graph.written]
    others_at = [index for index in graph.tensor_inputs if index not in graph.written]
    written_held = [tensor for index, tensor in enumerate(graph.held, count) if index in graph.written]
    other_held = [tensor for index, tensor in enumerate(graph.held, count) if index not in graph.written]
    if (calls := native.ready()) is not None:
        return calls.Alone(written_at, others_at, written_held, other_held)
    written, others = _getter(written_at), _getter(others_at)
    sole_use = _sole_use()

    def alone(args: Sequence[Any]) -> bool:
        changing = (*written(args), *written_held)
        keys = _storages(changing)
        changed = set(keys)
        if len(changed) < len(keys):
            return False
        reading = (*others(args), *other_held)
        if not {*map(id, changing)}.isdisjoint(map(id, reading)):  # one tensor, passed twice, is one use
            return False
        changed = {key for key in changed if not sole_use(key)}
        return not changed or changed.isdisjoint(_storages(reading))

    return alone


@functools.cache
def _sole_use() -> Callable[[int], bool]:
    """Whether one tensor is all that uses a storage, by its handle; never, where this torch does not count uses."""
    if _compat.SYMBOLS["storage_use_count"].problem() is not None:
        return lambda key: False
    uses = _compat.storage_use_count
    tensor = torch.empty(1)
    sole = uses(tensor.untyped_storage()._cdata)  # the question itself is a use
    return lambda key: uses(key) <= sole


def writes_beside_wrappers(graph: CapturedGraph) -> bool:
    """Whether the graph writes to memory that a parameter which is a tensor subclass could be made of."""
    return bool(graph.written) and any(entry.wrapper is not None for entry in graph.inputs)


def wrappers_apart(graph: CapturedGraph, args: Sequence[Any]) -> Callable[[Sequence[Any]], bool]:
    """The check of a call that no parameter which is a tensor subclass is made of memory that the graph writes to: what
    it is made of may be exchanged between two calls, and Dynamo does not see that.

    It stands before each call, so the parts are read by the names that they have in `args` (Dynamo guards these names
    and the parts' classes), and their storages are asked only where something else uses what is written to.
    """
    count = len(graph.inputs)
    written = _getter([index for index in graph.tensor_inputs if index in graph.written])
    written_held = [tensor for index, tensor in enumerate(graph.held, count) if index in graph.written]
    wrappers = [index for index, entry in enumerate(graph.inputs) if entry.wrapper is not None]
    readers = [(index, _reader(args[index])) for index in wrappers]
    sole_use = _sole_use()

    def apart(args: Sequence[Any]) -> bool:
        parts: list[torch.Tensor] = []
        for index, read in readers:
            parts += read(args[index])
        changing = (*written(args), *written_held)
        if not {*map(id, changing)}.isdisjoint(map(id, parts)):
            return False
        shared = [key for key in _storages(changing) if not sole_use(key)]
        return not shared or {*shared}.isdisjoint(_storages(parts))

    return apart


def _reader(wrapper: Any) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """What reads the plain tensors that subclasses like this one are made of."""
    paths = plain_parts(wrapper)
    if len(paths) > 1:
        return attrgetter(*paths)
    return lambda wrapper: tuple(attrgetter(path)(wrapper) for path in paths)


def parts_apart(
    inputs: Sequence[Any], held: Sequence[torch.Tensor], written: Collection[int]
) -> Callable[[Sequence[Any]], bool] | None:
    """The check of a call that nothing which is written to shares memory by way of what a tensor subclass is made of:
    AOTAutograd compares subclasses as wholes.  None where that cannot be.

    `written`: positions among `inputs`, on which those of `held` follow.
    """
    everything = (*inputs, *held)
    tensors = [index for index, value in enumerate(everything) if isinstance(value, torch.Tensor)]
    wrappers = {index for index in tensors if is_wrapper(everything[index])}
    if not wrappers or not written:
        return None

    def apart(args: Sequence[Any]) -> bool:
        everything = (*args, *held)
        used: dict[int, tuple[bool, bool]] = {}  # by storage: whether a part lies there, and whether it is written to
        for index in tensors:
            value, opened, is_written = everything[index], index in wrappers, index in written
            parts = [part for _, part in made_of(value)] if opened else [value]
            for part in parts:
                if not isinstance(part, torch.Tensor) or (opened and is_wrapper(part)):
                    continue
                key = part.untyped_storage()._cdata
                inside, changed = used.get(key, (False, False))
                if key in used and (inside or opened) and (changed or is_written):
                    return False
                used[key] = inside or opened, changed or is_written
        return True

    return apart


def any_overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two different ones of these tensors have an element in common.  The same tensor twice is one."""
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    return len(distinct) > 1 and bool(_compat.compute_overlapping_tensors(distinct, symbolic=False))


def overlapping(over: Sequence[torch.Tensor], apart: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors of `over` are exactly those, among all of these, that overlap another one in memory."""
    found = _compat.compute_overlapping_tensors([*over, *apart], symbolic=False)
    return sorted(found) == list(range(len(over)))


def _storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def _getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda args: tuple(args[index] for index in positions)
