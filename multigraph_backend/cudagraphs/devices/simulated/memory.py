"""The memory of a simulated device: pools, CPU storages that stand for ranges of them, and memory outside.

A storage *mapped* to a range is a cache of it.  `gather` before a pool is read: bytes that the user changed in mapped
storages go to the pool, also those of storages that have died since.  `scatter` after a pool was written: mapped
storages show what it holds.  In between, pool and storages agree but for what the user writes.

A storage that a capture has allocated is one of torch's own, which a user can resize, as on a GPU: then it lies
elsewhere, and stands for its range no more.  What was written last through one that has died is lost; a storage over
memory of the pool (`storage_at`) outlives that.

A kernel knows a tensor as a `Reference`: a place in a pool, or in memory outside, which is used where it lies.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices.device import Layout
from multigraph_backend.cudagraphs.devices.simulated.arena import Arena, Segments, Timeline

#: what memory holds that nothing was written to: NaN in every floating-point type
POISON = 0xFF


class Pool:
    """The memory that recordings share.  `held`: bytes that it has taken of the device, which `free` tells the rest of;
    they stay until the pool is left, also those that a failed capture has taken."""

    def __init__(
        self,
        base: int,
        capacity: int,
        granularity: int,
        segments: Segments | None,
        free: Callable[[], int],
        grew: Callable[[], object],
    ) -> None:
        self.base, self.held, self._free, self._grew = base, 0, free, grew
        self.arena = Arena(capacity, granularity, segments)
        self.memory = bytearray([POISON]) * capacity
        self.storage = torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()
        self.timeline = Timeline()
        self.left = False

    def allocate(self, nbytes: int) -> int:
        """A block's offset.  Raises `torch.OutOfMemoryError`."""
        arena, before = self.arena, self.arena.mark()
        try:
            offset = arena.allocate(nbytes)
        except MemoryError as error:
            raise torch.OutOfMemoryError(f"simulated device: {error}") from None
        if arena.bytes - self.held > self._free():
            arena.free(offset)
            arena.return_to(before)
            raise torch.OutOfMemoryError(f"simulated device: {nbytes} bytes are not free")
        if arena.bytes > self.held:
            self.held = arena.bytes
            self._grew()
        return offset

    def free(self, offset: int) -> None:
        """Give a block back that nobody owned; what it held is garbage now."""
        nbytes = self.arena.free(offset)
        self.memory[offset : offset + nbytes] = bytes([POISON]) * nbytes

    def poison(self, ranges: Iterable[tuple[int, int]], kept: Iterable[tuple[int, int]]) -> None:
        """Write over `ranges`, but not over `kept`."""
        contents = [(offset, self.memory[offset : offset + nbytes]) for offset, nbytes in kept]
        for offset, nbytes in ranges:
            self.memory[offset : offset + nbytes] = bytes([POISON]) * nbytes
        for offset, content in contents:
            self.memory[offset : offset + len(content)] = content


@dataclass
class Mapped:
    """A CPU storage, at `at`, that stands for a range of the pool.

    The weak reference keeps the storage's handle from being used again.  `seen` is what both sides agreed on last;
    `own`, of a storage that cannot be resized, its memory, which outlives it.
    """

    weak: StorageWeakRef
    at: int
    own: bytearray | None
    seen: bytes
    pool: Pool
    offset: int
    origin: str | None  # the operation that allocated it; None for `storage_at`
    frees: bool = False  # whether its death, or a move, frees its block of the pool: nobody else owns that

    @property
    def nbytes(self) -> int:
        return len(self.seen)

    def storage(self) -> torch.UntypedStorage | None:
        """None if it has died."""
        return torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)

    def resized(self) -> bool:
        """Whether it lies elsewhere now."""
        storage = self.storage()
        return storage is not None and storage.data_ptr() != self.at

    def content(self) -> bytes:
        """What it holds; `seen` if nobody can know."""
        if self.own is not None:
            return bytes(self.own)
        storage = self.storage()  # held while its memory is read
        if storage is None or storage.data_ptr() != self.at:
            return self.seen
        return ctypes.string_at(self.at, self.nbytes)

    def write_back(self) -> None:
        content = self.content()
        if content != self.seen:
            for index, (now, before) in enumerate(zip(content, self.seen, strict=True)):
                if now != before:
                    self.pool.memory[self.offset + index] = now
            self.seen = content

    def refresh(self) -> None:
        now = bytes(self.pool.memory[self.offset : self.offset + self.nbytes])
        if now == self.seen:
            return
        if self.own is not None:
            self.own[:] = now
        elif (storage := self.storage()) is not None and storage.data_ptr() == self.at:
            ctypes.memmove(self.at, now, len(now))
        self.seen = now

    def reference(self, layout: Layout) -> Reference:
        if self.offset % layout.dtype.itemsize:
            raise AssertionError(f"a tensor of {layout.dtype} in a storage at offset {self.offset} of the pool")
        return Reference(self.pool, replace(layout, offset=layout.offset + self.offset // layout.dtype.itemsize))


def tensor_over(layout: Layout, storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.no_grad():
        empty = torch.empty(0, dtype=layout.dtype, device="cpu")
        return empty.set_(storage, layout.offset, layout.size, layout.stride)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return tensor_over(Layout((storage.nbytes(),), (1,), 0, torch.uint8), storage)


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """Counts that grow with each tensor and each storage object over the memory of `tensor`."""
    storage = tensor.untyped_storage()
    return _compat.storage_use_count(storage._cdata), sys.getrefcount(storage)


class Outside:
    """Memory outside of the pool that recordings use, kept, so that nothing else comes to lie at its address.

    Only who resizes the storage takes it from there; whatever lies at the address then is what recordings use."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.keep, self.at = bytes_of(storage), storage.data_ptr()

    def lies(self) -> bool:
        return self.keep.untyped_storage().data_ptr() == self.at

    def dead(self) -> bool:
        """Whether only the recordings are left that use it: on a GPU it would be gone."""
        used = _references(self.keep) != _references(bytes_of(torch.UntypedStorage(1)))
        return self.keep.numel() > 0 and self.lies() and not used

    def storage(self) -> torch.UntypedStorage:
        """Over what lies there, also where that is another tensor's by now, as the device's check of addresses says."""
        if self.lies():
            return self.keep.untyped_storage()
        there = (ctypes.c_char * self.keep.numel()).from_address(self.at)
        return torch.frombuffer(there, dtype=torch.uint8).untyped_storage()


@dataclass(frozen=True)
class Reference:
    """A tensor as a kernel knows it: where it lies, not who holds it."""

    memory: Pool | Outside
    layout: Layout

    @property
    def address(self) -> int:
        """Of its first element."""
        begin = self.memory.base if isinstance(self.memory, Pool) else self.memory.at
        return begin + self.layout.offset * self.layout.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        memory = self.memory
        return tensor_over(self.layout, memory.storage if isinstance(memory, Pool) else memory.storage())


class Memory:
    """What is mapped, by the handle of its storage, and what recordings use outside of the pools."""

    def __init__(self) -> None:
        self.mapped: dict[int, Mapped] = {}
        self._outside: weakref.WeakValueDictionary[int, Outside] = weakref.WeakValueDictionary()

    def map(self, pool: Pool, offset: int, nbytes: int, origin: str | None) -> torch.UntypedStorage:
        """A new storage that stands for a range of `pool`."""
        content = pool.memory[offset : offset + nbytes]
        own = content if origin is None else None
        if own is not None:
            storage = torch.frombuffer(own, dtype=torch.uint8).untyped_storage()
        else:
            storage = torch.UntypedStorage(nbytes, device="cpu")
            ctypes.memmove(storage.data_ptr(), bytes(content), nbytes)
        self.mapped[storage._cdata] = Mapped(
            StorageWeakRef(storage), storage.data_ptr(), own, bytes(content), pool, offset, origin
        )
        return storage

    def of(self, storage: torch.UntypedStorage) -> Mapped | None:
        mapped = self.mapped.get(storage._cdata)
        return mapped if mapped is not None and mapped.at == storage.data_ptr() else None

    def gather(self) -> None:
        for handle, mapped in list(self.mapped.items()):
            died = mapped.weak.expired()
            mapped.write_back()
            if died or mapped.resized():
                del self.mapped[handle]
                if mapped.frees:
                    mapped.pool.free(mapped.offset)

    def scatter(self) -> None:
        for mapped in self.mapped.values():
            mapped.refresh()

    def reference(self, tensor: torch.Tensor) -> Reference:
        storage, layout = tensor.untyped_storage(), Layout.of(tensor)
        mapped = self.of(storage)
        if mapped is not None:
            return mapped.reference(layout)
        outside = self._outside.get(storage._cdata)
        if outside is None or not outside.lies():
            outside = self._outside[storage._cdata] = Outside(storage)
        return Reference(outside, layout)
