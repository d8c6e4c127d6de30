"""The memory of one storage that a recording hands out, and how to tell whether anybody still holds it.

Compiled code returns tensors whose memory the recording writes again at its next replay.  So it must be known whether
one that was handed out is still there.  No user is asked to tell: all tensors over one slot share one storage object,
and its use counts, compared with those of a moment when nothing was handed out, are the answer.

In:  the storage of an output, right after the capture.  Out: `alive`, `lies`, `holds`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from multigraph_backend.cudagraphs.devices.device import Device

_NO_BASELINE = 1 << 60  # counts that none exceeds: nothing was handed out yet


class Slot:
    """The memory of one storage that a recording hands out, at an address that stays in the pool of `generation`.

    `visible`: whether a user may hold it (else only compiled code does).  `copied`: outputs over it are handed out as
    copies, because it was seen alive when its memory was needed.  `movable`: whether what is alive over it can be moved
    to other memory.  All tensors that are handed out share `storage`, so its counts tell whether any is alive.

    `kept`: the one tensor that is handed out over it, again and again, where no user can hold it (one that is saved for
    a backward); `kept_refs`: its references while nobody else does.

    A user can resize what he was handed out: then `storage` lies elsewhere, and this memory is free of him.
    """

    __slots__ = ("address", "base", "copied", "generation", "handle", "kept", "kept_refs", "movable", "nbytes", "refs",
                 "storage", "visible")  # fmt: skip

    def __init__(self, address: int, storage: torch.UntypedStorage, visible: bool, generation: int = 0) -> None:
        self.address, self.generation = address, generation
        self.nbytes = storage.nbytes()
        self.visible = visible
        self.copied = False
        self.movable = True
        self.storage = storage
        self.handle: int = storage._cdata
        self.base = self.refs = self.kept_refs = _NO_BASELINE
        self.kept: torch.Tensor | None = None

    def put(self, storage: torch.UntypedStorage) -> None:
        """Let `storage`, which cannot be moved, be the one over this memory: what was handed out has been moved."""
        # in one statement, for an exception from outside may arrive between two
        self.storage, self.handle, self.base, self.refs, self.movable, self.copied, self.kept, self.kept_refs = (
            storage, storage._cdata, _NO_BASELINE, _NO_BASELINE, False, self.visible, None, _NO_BASELINE,
        )  # fmt: skip

    def take_baseline(self, use_count: Callable[[int], int]) -> None:
        """Take the counts of now for those of a moment when nothing is handed out."""
        self.base = use_count(self.handle)
        self.refs = sys.getrefcount(self.storage)
        self.kept_refs = _NO_BASELINE if self.kept is None else sys.getrefcount(self.kept)

    def alive(self, use_count: Callable[[int], int]) -> bool:
        """Whether a tensor, or a storage object, that was handed out still exists.

        Whoever holds `kept`, autograd too, holds a reference to it as Python counts them.
        """
        return (
            use_count(self.handle) > self.base
            or sys.getrefcount(self.storage) > self.refs
            or sys.getrefcount(self.kept) > self.kept_refs
        )

    def lies(self, device: Device) -> bool:
        """Whether `storage` is still over this memory, and no other."""
        return device.storage_address(self.storage) == self.address and self.storage.nbytes() == self.nbytes

    def holds(self, address: int) -> bool:
        """Whether `address` is in this memory."""
        return self.address <= address < self.address + self.nbytes


class HandedOut:
    """Where what a recording hands out has to lie, as far as that changes: lists that generated code holds.

    A user who resizes an output, or sets its `data`, moves it.  `kept`: tensors that are handed out again and again,
    `kept_at` their addresses, `numbers` their positions.  `shown`: slots whose tensor was kept once, and that users
    have come to see since, `shown_at` the addresses of their storages.
    """

    __slots__ = ("_device", "_once", "kept", "kept_at", "numbers", "shown", "shown_at")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._once: set[int] = set()  # addresses of slots whose tensor was kept
        self.kept: list[torch.Tensor] = []
        self.shown: list[Slot] = []
        self.kept_at, self.shown_at, self.numbers = list[int](), list[int](), list[int]()

    def fill(self, slots: Sequence[Slot]) -> None:
        """Take what there is over `slots` now."""
        self.kept[:] = [slot.kept for slot in slots if slot.kept is not None]
        self.kept_at[:] = [self._device.address(tensor) for tensor in self.kept]
        self.numbers[:] = range(len(self.kept))
        self._once.update(slot.address for slot in slots if slot.kept is not None)
        self.shown[:] = [slot for slot in slots if slot.kept is None and slot.address in self._once]
        self.shown_at[:] = [slot.address for slot in self.shown]

    def kept_lie_elsewhere(self) -> bool:
        """Whether a tensor that is handed out again is no more where it was."""
        return not self._device.same_addresses(self.kept, self.kept_at, self.numbers)
