"""Inputs that are read where they lie, wherever that is: which are tried, and the captures that prove it or do not.

An input that comes at another address at each call is copied into a buffer of the recording, which costs the GPU a read
and a write of all of it.  Where two captures, one with the input elsewhere, show which parameters of which kernels hold
its address (`devices.patches`), these kernels are told at each launch where it lies, and nothing is copied:

    probe    captured with x' in place of x; its nodes are read, and it is thrown away
    capture  from the same state of the pool, with x itself; its nodes are read and compared, and it is kept

In:  a call that is recorded, and its plan.  Out: a recording that reads some inputs in place, or None: then all are
copied as ever, and `KeyedPiece.unpatched` says why.  What was refused is not tried again.

A copy at the beginning protects an input from what the recording writes later.  Without it this has to hold:

- The recording writes only to its own memory in the pool, to inputs that its code changes, and to temporaries that its
  code may use for something else.  These inputs are fixed, so where they lie is known, and an input that shares memory
  with one is copied first, at any launch (`Patches.written`).
- No input that is alive lies in the memory in the pool that it writes to.  Its input is alive while it is launched, for
  the list of inputs holds it.  What is alive in the pool belongs to a node on the path; at the capture each of their
  slots was alive, and its memory was kept out of the way, or dead, and then it is among `Node.dead`, or surely dead
  behind an earlier node.  A replay asks that these are dead.  What dies in the recording itself (`consumed`) is held by
  nothing but the inputs that are planned so, which is asked too: a further input over its memory counts against that.
- Whoever frees an input right behind the call, or uses it on another stream, is as with any kernel: the allocator gives
  memory to what is launched after it on the same stream.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from multigraph_backend import events
from multigraph_backend.cudagraphs.devices.device import Device, Layout
from multigraph_backend.cudagraphs.devices.patches import (
    Candidate,
    Described,
    Patched,
    Patches,
    Unreadable,
    apart,
    overlaps,
    proven,
)
from multigraph_backend.cudagraphs.recordings import out_of_memory
from multigraph_backend.cudagraphs.recordings.piece_spec import PieceSpec
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece
from multigraph_backend.cudagraphs.recordings.recording import (
    InputPlan,
    NotRecorded,
    OfInput,
    Output,
    Recording,
    overlaps_itself,
)
from multigraph_backend.cudagraphs.recordings.room import Room

log = logging.getLogger(__name__)

_ROUNDS = 2  # the second one is without what the first has refused
_NO_MEMORY = "there was no memory to try it out"
#: whether an input is read in place is not asked where each rank captures as often as others, or a generator is given
_COLLECTIVES, _GENERATORS = "the piece has collectives", "the piece is given a generator of random numbers"


class Capture(Protocol):
    """Captures by a plan, with other tensors in place of the patched inputs where there are any.  Raises
    `NotRecorded`."""

    def __call__(self, plan: InputPlan, elsewhere: Mapping[int, torch.Tensor] | None = None, /) -> Recording: ...


def candidates(device: Device, keyed: KeyedPiece, inputs: Sequence[Any], plan: InputPlan) -> tuple[int, ...]:
    """Positions of the inputs that are to be copied, and may be patched as far as is known before; why others are not
    is noted, if they are large enough."""
    if device.patching is None:
        return ()
    least, aligned = device.patching
    spec, written = keyed.piece.spec, _written(device, keyed.piece.spec, inputs, plan)
    found = []
    for index in plan.copied:
        if index in keyed.unpatched or inputs[index].numel() * inputs[index].element_size() < least:
            continue
        why = _unfit(device, spec, index, inputs[index], aligned, written)
        if plan.generators or spec.groups:
            why = _COLLECTIVES if spec.groups else _GENERATORS
        if why is None:
            found.append(index)
        else:
            keyed.unpatched[index] = why
            events.count("refused_patches")
    return tuple(found)


def _unfit(
    device: Device, spec: PieceSpec, index: int, value: torch.Tensor, aligned: int, written: Sequence[tuple[int, int]]
) -> str | None:
    layout, at = Layout.of(value), device.address(value)
    if index in spec.mutated or (index in spec.reused and index not in spec.given):
        return "the code may write to it"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a {type(value).__name__}"
    if value.is_conj() or value.is_neg():
        return "its bytes are not its values"
    if overlaps_itself(layout):
        return "it repeats elements"
    if not at or at % aligned:
        return f"it does not lie on {aligned} bytes"
    if overlaps(at, at + layout.span, written):
        return "it shares memory with an input that the code may write to"
    return None


def _written(device: Device, spec: PieceSpec, inputs: Sequence[Any], plan: InputPlan) -> tuple[tuple[int, int], ...]:
    """The memory of inputs that the recording may write to: all that is over the same storages."""
    storages = [
        inputs[index].untyped_storage()
        for index in plan.fixed
        if index in spec.mutated or (index in spec.reused and index not in spec.given)
    ]
    begins = [device.storage_address(storage) for storage in storages]
    return apart([(begin, begin + storage.nbytes()) for begin, storage in zip(begins, storages, strict=True)])


def attempt(
    device: Device,
    room: Room,
    keyed: KeyedPiece,
    inputs: Sequence[Any],
    plan: InputPlan,
    wanted: tuple[int, ...],
    capture: Capture,
) -> Recording | None:
    """A recording that reads `wanted`, or some of these, where they lie; None where all are to be copied, and the pool
    is then fit for another capture.  Raises `NotRecorded`."""
    for _ in range(_ROUNDS):
        if not wanted:
            return None
        patched = dataclasses.replace(
            plan, copied=tuple(index for index in plan.copied if index not in wanted), patched=wanted
        )
        found = _elsewhere(device, room, keyed, inputs, patched, capture)
        if found is None:
            return None
        there, entries, outputs = found
        made = _kept(keyed, patched, capture)
        try:
            here = _nodes(device, made)
        except Unreadable as why:
            _refuse(keyed, dict.fromkeys(wanted, str(why)))
            made.graph.reset()
            return None
        assert device.patching is not None
        result = proven(there, here, entries, device.patching.least)
        handed_out = _outputs(outputs, made.outputs)
        if handed_out is None:
            result = dataclasses.replace(result, refused=dict.fromkeys(wanted, "two captures hand out other outputs"))
        if handed_out is not None and not result.refused:
            made.outputs = handed_out
            layouts = [Layout.of(inputs[index]) for index in wanted]
            made.patches = Patches(
                tuple(
                    Patched(index, layout.size, layout.stride, layout.dtype, layout.span)
                    for index, layout in zip(wanted, layouts, strict=True)
                ),
                result.told,
                _written(device, keyed.piece.spec, inputs, plan),
                device.patching.aligned,
            )
            events.count("patched_recordings")
            return made
        _refuse(keyed, result.refused)
        made.graph.reset()
        del made
        wanted = tuple(index for index in wanted if index not in result.refused)
    _refuse(keyed, dict.fromkeys(wanted, "captures of it differ from time to time"))
    return None


def _elsewhere(
    device: Device, room: Room, keyed: KeyedPiece, inputs: Sequence[Any], plan: InputPlan, capture: Capture
) -> tuple[list[Described], list[Candidate], list[Output]] | None:
    """The nodes of a capture with the patched inputs elsewhere, where these lie there and here, and what it hands out;
    None where it cannot be made, and all are refused."""
    had, generation = room.reserved(), device.generation
    try:
        twins, memory = device.elsewhere([inputs[index] for index in plan.patched])
    except torch.OutOfMemoryError:
        _refuse(keyed, dict.fromkeys(plan.patched, _NO_MEMORY))
        return None
    room.beside(room.reserved() - had)
    entries = [
        Candidate(
            index,
            device.address(inputs[index]),
            device.address(twin),
            Layout.of(twin).span,
            twin.numel() * twin.element_size(),
        )
        for index, twin in zip(plan.patched, twins, strict=True)
    ]
    try:
        made = capture(plan, dict(zip(plan.patched, twins, strict=True)))
    except NotRecorded as why:
        if out_of_memory.is_behind(why):
            raise
        _refuse(keyed, dict.fromkeys(plan.patched, str(why)))
        if device.generation != generation:
            raise  # the state to capture in was of another pool
        return None
    try:
        return _nodes(device, made), entries, made.outputs
    except Unreadable as why:
        _refuse(keyed, dict.fromkeys(plan.patched, str(why)))
        return None
    finally:
        made.graph.reset()
        del twins, memory


def _kept(keyed: KeyedPiece, plan: InputPlan, capture: Capture) -> Recording:
    try:
        return capture(plan)
    except NotRecorded as why:
        if not out_of_memory.is_behind(why):
            _refuse(keyed, dict.fromkeys(plan.patched, str(why)))
        raise


def _nodes(device: Device, made: Recording) -> list[Described]:
    """Those of a capture but for the kernel that copies inputs, whose table lies anywhere.  Raises `Unreadable`."""
    return [node for node in device.nodes(made.graph) if not made.copying or node.handle != made.copying]


def _outputs(there: Sequence[Output], here: Sequence[Output]) -> list[Output] | None:
    """What is handed out, as both captures say; None where they contradict each other.  Of which input something is a
    view, the one with the inputs elsewhere knows: there no two share memory, as they may in one call and not in the
    next."""
    if [type(output) for output in there] != [type(output) for output in here]:
        return None
    return [other if isinstance(other, OfInput) else output for other, output in zip(there, here, strict=True)]


def _refuse(keyed: KeyedPiece, why: Mapping[int, str]) -> None:
    names = keyed.piece.spec.names
    keyed.unpatched.update(why)
    for index, text in why.items():
        events.count("refused_patches")
        log.info("%s: input %s is copied at each call: %s", keyed.piece.spec.label, names[index], text)


def why_copied(keyed: KeyedPiece, plan: InputPlan) -> dict[int, str]:
    """Of inputs that are copied, why they are not patched, where that was tried."""
    return {index: keyed.unpatched[index] for index in plan.copied if index in keyed.unpatched}
