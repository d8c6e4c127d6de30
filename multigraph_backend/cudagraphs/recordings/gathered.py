"""Parameters that are gathered anew for each use, and freed behind it (FSDP2): which they are, and whether they move.

Such a parameter is the same storage at each step, whose memory is given back and comes from the allocator again, with
the values of all ranks.  Where that lies depends on all that the process allocates.  Often it comes to rest, and is
read where it lies (see `settling`).  Where it does not, each address of each of them would need recordings of its own,
and of all that follows in the step.

So once one of them, which a recording reads where it lay, comes elsewhere, all of them are copied at each call, also
those that have not moved yet: what a layer's parameters take to be copied is little beside what they are used for.
Recordings that read any of them in place are given up, and made once more.

In:  static inputs of the calls that no recording answers at once.  Out: which inputs are copied, and the addresses at
which nothing may be read any more.  A storage is held weakly, and its handle is that of no other one meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend.cudagraphs.devices.device import Device

_FEW = 256  # storages that are known before it is looked which of them are gone


class _Known:
    """One storage: where it lay last, whether it has lain elsewhere before or was empty, and where it was read."""

    __slots__ = ("address", "gathered", "read", "weak")

    def __init__(self, storage: torch.UntypedStorage, address: int) -> None:
        self.weak = StorageWeakRef(storage)
        self.address, self.gathered = address, False
        #: addresses of its memory, and of tensors over it, that recordings read in place
        self.read: set[int] = set()

    def held(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)


class Gathered:
    """See the module's text.  copied: whether all that are gathered are copied."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[int, _Known] = {}
        self._many = _FEW
        self.copied = False

    def look(self, inputs: Sequence[Any], static: Iterable[int]) -> bool:
        """Note where static inputs of a call lie.  Whether one that a recording reads in place moves, or, once such are
        copied, is found to be gathered."""
        moved = False
        for index in static:
            value = inputs[index]
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            if not self._device.is_on_device(value):
                continue
            storage = value.untyped_storage()
            address, known = self._device.storage_address(storage), self._known.get(storage._cdata)
            if known is None:
                self._known[storage._cdata] = _Known(storage, address)
                continue
            if known.address != address:
                known.address, known.gathered = address, True
            moved = moved or (known.gathered and bool(known.read) and (self.copied or address not in known.read))
        if len(self._known) > self._many:
            self._look_at_all()
        return moved

    def _look_at_all(self) -> None:
        """Forget those that are gone; those that are empty now are gathered for their next use."""
        for handle, known in list(self._known.items()):
            storage = known.held()
            if storage is None:
                del self._known[handle]
            elif not storage.nbytes():
                known.gathered = True
        self._many = max(_FEW, 2 * len(self._known))

    def copy_from_now_on(self) -> set[int]:
        """Nothing that is gathered is read in place any more.  The addresses at which recordings do so."""
        self.copied = True
        self._look_at_all()
        addresses: set[int] = set()
        for known in self._known.values():
            if known.gathered:
                addresses |= known.read
                known.read.clear()
        return addresses

    def read(self, inputs: Sequence[Any], indices: Iterable[int]) -> None:
        """A recording reads these inputs in place."""
        for index in indices:
            if (known := self._of(inputs[index])) is not None:
                known.read |= {known.address, self._device.address(inputs[index])}

    def copies(self, value: object) -> bool:
        """Whether this input is copied, as one that is gathered."""
        return self.copied and self.has(value)

    def has(self, value: object) -> bool:
        """Whether this input is known to be gathered."""
        known = self._of(value)
        return known is not None and known.gathered

    def same(self, inputs: Sequence[Any], handles: Mapping[int, int]) -> bool:
        """Whether these inputs are of the storages with these handles."""
        return all([inputs[index].untyped_storage()._cdata == handle for index, handle in handles.items()])  # noqa: C419

    def _of(self, value: object) -> _Known | None:
        if not self._known or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        return self._known.get(value.untyped_storage()._cdata)

    def forget(self) -> None:
        """All recordings are given up."""
        self._known.clear()
        self.copied = False
