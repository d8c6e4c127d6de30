"""Where each input of a piece is to be in a recording: read in place, or copied, or the call is not recorded.

For each input the first line that fits decides:

    an output of a recording, alive in the pool     fixed: read where it is
    a parameter that is gathered anew, once one     copied (see `gathered`)
    has moved
    changed by the piece                            fixed where it is a parameter, a buffer or came at the same address
                                                    twice; else not recorded
    a parameter or buffer                           fixed where it lies.  At another address the piece is recorded again
                                                    for that one, up to a limit; then it is copied at each call
    any other small tensor, if such are few         copied: that costs a launch at most, and what comes twice in a
                                                    warm-up, be it the same tensor, may be another one ever after.
                                                    Many that stay are weights, of `torch.func.functional_call` say
    any other tensor                                fixed by the first recording if it came at the same address twice,
                                                    and was not seen to move behind such a recording, at whatever key;
                                                    else copied; not recorded where its elements share memory
    a generator; a number, None                     the same one; part of the key
    what is not on the device and is not read       as it comes
    anything else (a CPU tensor, a list)            not recorded

An example, `step(weight, x, hidden)` with `weight` static and `hidden` an output of the recording before:

    InputPlan(fixed=(0, 2), addresses=[0x7f..00, None, 0x7f..80], managed={2: slot}, copied=(1,), owned=(2,))

`owned` has `hidden` in it where only the list of inputs holds it: its memory serves again inside the recording.

What is copied by this plan, and large, is read where it lies instead where `patching` finds that right.

The limit is of recordings after the same one, and of those as deep in a step: where several pieces of a step have
parameters that move (FSDP2 gathers them anew), each address of one would else need recordings of all that follow.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from multigraph_backend import events
from multigraph_backend.cudagraphs.devices.device import Device, Layout
from multigraph_backend.cudagraphs.recordings.gathered import Gathered
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece, PieceState
from multigraph_backend.cudagraphs.recordings.recording import (
    FIRST_CALL,
    InputPlan,
    NotRecorded,
    overlaps_otherwise,
)
from multigraph_backend.cudagraphs.recordings.slot import Slot

log = logging.getLogger(__name__)

OTHERS_ALIVE = "something else is alive than before"
_FEW = 16  # small inputs: one launch copies them all


def look(device: Device, keyed: KeyedPiece, inputs: Sequence[Any]) -> None:
    """Note where the inputs lie: some may turn out to stay there."""
    keyed.addresses = keyed.piece.addresses = {
        index: device.address(value)
        for index, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and device.is_on_device(value)
    }


def plan(tree: Nodes, parent: Node, keyed: KeyedPiece, inputs: list[Any], first: bool, gathered: Gathered) -> InputPlan:
    """See the module's text; `first`: this is its first call.  Raises `NotRecorded`."""
    piece, device, limit = keyed.piece, tree.device, keyed.piece.spec.most
    slots = {slot.handle: slot for node in tree.path for slot in node.slots}
    before = keyed.addresses or piece.addresses  # of another key where this one is new
    look(device, keyed, inputs)
    depth = parent.depth + 1
    siblings = parent.children.get(keyed, ())
    tried, as_deep = len(siblings), keyed.recorded_at[depth]
    read_at = [node.recording.plan.addresses for node in siblings if node.recording is not None]
    small = _small_ones(keyed, before, inputs)
    fixed: list[int] = []
    copied: list[int] = []
    managed: dict[int, Slot] = {}
    generators: dict[int, torch.Generator] = {}
    parameters: dict[int, int] = {}
    for index in range(len(inputs)):  # no name may hold an input: their counts of references are read below
        kind = type(inputs[index])
        if isinstance(inputs[index], torch.Generator):
            generators[index] = inputs[index]
            continue
        if not isinstance(inputs[index], torch.Tensor):
            if inputs[index] is not None and kind not in (int, float, bool):
                raise NotRecorded(f"input {piece.spec.names[index]} is a {kind.__name__}", always=True, index=index)
            continue
        address = keyed.addresses.get(index)
        if address is None and index in piece.spec.unread:
            continue
        if address is None:
            keyed.failures += 1
            reason = f"input {piece.spec.names[index]} is a {kind.__name__} on {inputs[index].device}"
            raise NotRecorded(reason, always=keyed.failures >= piece.limits.failures, index=index)
        slot = slots.get(inputs[index].untyped_storage()._cdata) if slots else None
        if slot is not None and not slot.holds(address):  # its storage was resized, and is the user's own now
            slot = None
        lasts = address in tree.lasting
        stays = before.get(index) == address or lasts or (index, address) in keyed.rests
        if index not in piece.spec.static and any(known[index] not in (None, address) for known in read_at):
            piece.moving.add(index)
        if slot is not None:
            managed[index] = slot
            fixed.append(index)
        elif index not in piece.spec.mutated and gathered.copies(inputs[index]):
            _refuse_overlaps(piece, index, inputs[index])
            parameters[index] = inputs[index].untyped_storage()._cdata
            copied.append(index)
        elif index in piece.spec.mutated:
            if not stays and (index not in piece.spec.static or piece.spec.is_backward):
                if first:
                    raise NotRecorded(FIRST_CALL)
                raise NotRecorded(
                    f"it changes input {piece.spec.names[index]}, which is no parameter, buffer or output of a "
                    "recording and came at another address than before",
                    index=index,
                )
            if tried >= limit:
                reason = f"it changes input {piece.spec.names[index]}, which came at more than {limit} addresses"
                raise NotRecorded(reason, index=index)
            fixed.append(index)
        elif _may_be_fixed(keyed, index, index in small, stays, lasts, tried, limit) and not (
            as_deep >= limit and keyed.moves(index, depth, address)
        ):
            fixed.append(index)
        else:
            at_limit = max(tried, as_deep) >= limit
            if index in piece.spec.static and at_limit and index not in keyed.copied:
                _copy_from_now_on(keyed, index, limit)
            _refuse_overlaps(piece, index, inputs[index])
            copied.append(index)
    if tried >= 4 * limit:
        raise NotRecorded(f"{tried} recordings after the same one, and none fits this call")
    in_place = set(fixed)
    return InputPlan(
        tuple(fixed),
        [keyed.addresses[index] if index in in_place else None for index in range(len(inputs))],
        managed,
        tuple(copied),
        tuple(index for index, slot in managed.items() if _dies_here(device, slot, inputs)),
        generators,
        parameters,
    )


def _refuse_overlaps(piece: PieceState, index: int, value: torch.Tensor) -> None:
    if overlaps_otherwise(Layout.of(value)):
        reason = f"elements of input {piece.spec.names[index]} overlap in memory"
        raise NotRecorded(reason, always=True, index=index)


def _small_ones(keyed: KeyedPiece, before: Mapping[int, int], inputs: Sequence[Any]) -> Set[int]:
    """Inputs that are copied though they came at the address of `before`: small ones that are no parameters, if few."""
    spec = keyed.piece.spec
    found = {
        index
        for index, address in keyed.addresses.items()
        if before.get(index) == address
        and index not in spec.static
        and index not in spec.mutated
        and inputs[index].nbytes <= keyed.piece.limits.small_bytes
    }
    return found if len(found) <= _FEW else frozenset()


def _may_be_fixed(keyed: KeyedPiece, index: int, small: bool, stays: bool, lasts: bool, tried: int, limit: int) -> bool:
    if index not in keyed.piece.spec.static:
        may_move = small or keyed.piece.spec.fresh
        return stays and tried == 0 and index not in keyed.piece.moving and (lasts or not may_move)
    # what a backward takes for static may be a tensor that an unrecorded forward has saved
    return tried < limit and index not in keyed.copied and (stays or not keyed.piece.spec.is_backward)


def _copy_from_now_on(keyed: KeyedPiece, index: int, limit: int) -> None:
    piece = keyed.piece
    keyed.copied.add(index)
    events.warn_once(
        f"{piece.spec.label}: copied {piece.spec.names[index]}",
        "%s: input %s came at more than %d addresses; it is copied at each call from now on",
        piece.spec.label,
        piece.spec.names[index],
        limit,
    )


def _dies_here(device: Device, slot: Slot, inputs: Sequence[Any]) -> bool:
    """Whether nobody but the list of inputs holds what is over `slot`: no user can, and no other code does."""
    if slot.visible or slot.generation != device.generation:
        return False
    over = kept = 0
    for index in range(len(inputs)):
        if inputs[index] is slot.kept and slot.kept is not None:
            kept += 1
        elif isinstance(inputs[index], torch.Tensor) and inputs[index].untyped_storage()._cdata == slot.handle:
            over += 1
            if sys.getrefcount(inputs[index]) > 2:  # the list, and the call
                return False
    if sys.getrefcount(slot.kept) > slot.kept_refs + kept:
        return False
    return device.use_count(slot.handle) == slot.base + over


def note_again(keyed: KeyedPiece, siblings: Sequence[Node]) -> None:
    """Say, and keep for reports, why a piece is recorded again: which inputs lie elsewhere than in the last one."""
    piece, last = keyed.piece, siblings[-1].recording
    assert last is not None
    moved = [
        (index, f"{piece.spec.names[index]} from {old:#x} to {new:#x}")
        for index, old in enumerate(last.plan.addresses)
        # those that are copied from now on have no address in the plan
        if old is not None and (new := keyed.addresses.get(index)) is not None and old != new
    ]
    said = ", ".join(text for _, text in moved) or OTHERS_ALIVE
    piece.again.update([piece.spec.names[index] for index, _ in moved] or [OTHERS_ALIVE])
    log.info("%s is recorded again: %s", piece.spec.label, said)
    for index, _ in moved:
        if piece.spec.trace(index) is not None:
            log.info("%s is first used here:\n%s", piece.spec.names[index], piece.spec.trace(index))
