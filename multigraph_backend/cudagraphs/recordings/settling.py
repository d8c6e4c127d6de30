"""Whether what a step reads where it lies has come to rest, before anything of it is recorded.

A recording reads parameters at the addresses that they had when it was made.  Most never move.  Those that a training
framework gathers anew at each step (FSDP2) lie wherever the allocator has room, and that changes over the first steps:
the optimizer makes its states, gradients get theirs, blocks are split.  What is recorded then is soon recorded again,
with all that follows it in the step, until inputs are copied that would have needed no copy.

So a step that warms up leaves a note of where the parameters of each of its calls lay.  A step whose first parameters
lie where no such step has begun warms up, too: in the pool, which leaves the allocator's ordinary memory to the
parameters.  And once they were seen to move, so does one that has been seen only once with its first parameters there,
or whose others moved between two such.  After some steps it is recorded all the same.  Parameters that are copied (see
`gathered`) need not come to rest.

    step 1   warms up   a at 0x100, b at 0x200
    step 2   a comes at 0x300: warms up     0x300, 0x400
    step 3   a at 0x300, but b may still move: warms up     0x300, 0x400
    step 4   a at 0x300, steps 2 and 3 were alike: recorded

A step whose first parameters lie where they lay is recorded at its second time, as any was before.  Of several models
of one class that take turns, each has first parameters of its own: one whose step is a single call is recorded at its
second turn, one whose step has more calls (it is trained) at its third, when two of its own were alike.

In:  the calls of steps that warm up.  Out: whether the next one is to warm up, too; and of inputs of backwards, which
may be anything that was saved, which lay where they lay.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from multigraph_backend.cudagraphs.devices.device import Device
from multigraph_backend.cudagraphs.recordings.gathered import Gathered
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece

#: steps that warm up although they could be recorded
MOST_STEPS = 8

#: of one call: which piece, and of its static inputs, by position, the addresses
_Call = tuple[int, dict[int, int]]
#: where the static inputs of a step's first call lay, by position
_First = tuple[tuple[int, int], ...]


class _Steps:
    """Steps that begin with one piece.

    last: by where the static inputs of the first call lay, the calls of the last such step; before: those of the one
    before that.  now: the calls of the last step of all, which began at `first`.  calls: its pieces, in order.
    passing: addresses of inputs of its forwards that are not static.  more: how many steps have warmed up although they
    could have been recorded.
    """

    def __init__(self) -> None:
        self.last: dict[_First, list[_Call]] = {}
        self.before: dict[_First, list[_Call] | None] = {}
        self.now: list[_Call] = []
        self.first: _First = ()
        self.calls: list[weakref.ref[KeyedPiece]] = []
        self.passing: set[int] = set()
        self.more = 0

    def begin(self) -> None:
        self.now, self.calls, self.passing = [], [], set()

    def called(self, call: _Call) -> None:
        if not self.now:
            self.first = first = tuple(call[1].items())
            self.before[first], self.last[first] = self.last.get(first), self.now
        self.now.append(call)


class Settling:
    """See the module's text."""

    def __init__(self, device: Device, gathered: Gathered) -> None:
        self._device, self._gathered = device, gathered
        self._by_first: weakref.WeakKeyDictionary[KeyedPiece, _Steps] = weakref.WeakKeyDictionary()
        self._now: _Steps | None = None

    def begin(self, keyed: KeyedPiece) -> None:
        """A step that begins with `keyed` warms up."""
        self._now = self._by_first.setdefault(keyed, _Steps())
        self._now.begin()

    def called(self, keyed: KeyedPiece, inputs: Sequence[Any], made: Collection[int]) -> None:
        """A call in that step; `made`: handles of storages that its other calls have made."""
        now = self._now
        if now is None:
            return
        lie = self._lie(keyed, inputs, made)
        if keyed.piece.spec.is_backward:  # what a forward was given may be saved, too
            lie = {index: address for index, address in lie.items() if address not in now.passing}
        else:
            static = keyed.piece.spec.static
            now.passing.update(address for index, address in keyed.addresses.items() if index not in static)
        now.called((id(keyed), lie))
        now.calls.append(weakref.ref(keyed))

    def moves(self, keyed: KeyedPiece, inputs: Sequence[Any]) -> bool:
        """Whether a step that begins with this call is to warm up once more."""
        steps = self._by_first.get(keyed)
        if steps is None or steps.more >= MOST_STEPS or keyed.piece.spec.groups:
            return False
        first = tuple(self._lie(keyed, inputs, ()).items())
        last = steps.last.get(first)
        if last is not None and (len(steps.last) == 1 or len(last) == 1 or last == steps.before[first]):
            return False
        if any((called := call()) is not None and called.piece.spec.groups for call in steps.calls):
            return False  # all ranks record collectives as often, and each sees addresses of its own
        steps.more += 1
        return True

    def recorded(self, keyed: KeyedPiece) -> None:
        """A step that begins with `keyed` is recorded: keep where inputs have come to rest, and nothing else."""
        steps = self._by_first.pop(keyed, None)
        if steps is None or steps.before.get(steps.first) != steps.now:
            return
        for call, (_, addresses) in zip(steps.calls, steps.now, strict=True):
            if (called := call()) is not None:
                called.rests.update(addresses.items())

    def _lie(self, keyed: KeyedPiece, inputs: Sequence[Any], made: Collection[int]) -> dict[int, int]:
        return {
            index: self._device.address(value)
            for index in sorted(keyed.piece.spec.static)
            if isinstance(value := inputs[index], torch.Tensor)
            and self._device.is_on_device(value)
            and not self._gathered.copies(value)
            and value.untyped_storage()._cdata not in made
        }
