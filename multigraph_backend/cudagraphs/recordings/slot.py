"""The memory of one storage that a recording hands out, and how to tell whether anybody still holds it.

Compiled code returns tensors whose memory the recording writes again at its next replay.  So it must be known whether
one that was handed out is still there.  No user is asked to tell: all tensors over one slot share one storage object,
and its use counts, compared with those of a moment when nothing was handed out, are the answer.

In:  the storage of an output, right after the capture.  Out: `alive`, `lies`, `holds`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from multigraph_backend.cudagraphs.devices.device import Device

_NO_BASELINE = 1 << 60  # counts that none exceeds: nothing was handed out yet


class Slot:
    """The memory of one storage that a recording hands out, at an address that stays in the pool of `generation`.

    `visible`: whether a user may hold it (else only compiled code does).  `copied`: outputs over it are handed out as
    copies, because it was seen alive when its memory was needed.  `movable`: whether what is alive over it can be moved
    to other memory.  All tensors that are handed out share `storage`, so its counts tell whether any is alive.

    A user can resize what he was handed out: then `storage` lies elsewhere, and this memory is free of him.
    """

    __slots__ = ("address", "base", "copied", "generation", "handle", "movable", "nbytes", "refs", "storage", "visible")

    def __init__(self, address: int, storage: torch.UntypedStorage, visible: bool, generation: int = 0) -> None:
        self.address, self.generation = address, generation
        self.nbytes = storage.nbytes()
        self.visible = visible
        self.copied = False
        self.movable = True
        self.storage = storage
        self.handle: int = storage._cdata
        self.base = self.refs = _NO_BASELINE

    def put(self, storage: torch.UntypedStorage) -> None:
        """Let `storage`, which cannot be moved, be the one over this memory: what was handed out has been moved."""
        # in one statement, for an exception from outside may arrive between two
        self.storage, self.handle, self.base, self.refs, self.movable, self.copied = (
            storage, storage._cdata, _NO_BASELINE, _NO_BASELINE, False, self.visible,
        )  # fmt: skip

    def take_baseline(self, use_count: Callable[[int], int]) -> None:
        """Take the counts of now for those of a moment when nothing is handed out."""
        self.base = use_count(self.handle)
        self.refs = sys.getrefcount(self.storage)

    def alive(self, use_count: Callable[[int], int]) -> bool:
        """Whether a tensor, or a storage object, that was handed out still exists."""
        return use_count(self.handle) > self.base or sys.getrefcount(self.storage) > self.refs

    def lies(self, device: Device) -> bool:
        """Whether `storage` is still over this memory, and no other."""
        return device.storage_address(self.storage) == self.address and self.storage.nbytes() == self.nbytes

    def holds(self, address: int) -> bool:
        """Whether `address` is in this memory."""
        return self.address <= address < self.address + self.nbytes
