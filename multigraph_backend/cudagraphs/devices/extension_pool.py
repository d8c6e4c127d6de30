"""Where recordings live while the extension is the process's allocator: a pool of its own, with states to come back to.

In and out: as `memory_pool.MemoryPool` says.  torch cannot save and restore pools of a pluggable allocator, and the
extension can: states are numbers of its own, and blocks are dropped and brought back by address.

Which storages free a block is torch's matter, and there are two ways in.  A storage that is to free nothing any more is
detached: torch takes its deleter away and frees the block at once, and that free the extension ignores, for the block
was adopted just before.  A storage that is to free a block is allocated: the extension answers with the block, which is
live already (a *claim*).

Invariant: outside of a capture all live blocks of the pool are adopted, so that no free of them is on its way.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend import _compat
from multigraph_backend.allocator.library import Block, Library, Refused
from multigraph_backend.allocator.pools import new_id
from multigraph_backend.cudagraphs.devices.memory_pool import State


class _Saved:
    """The extension's number of a state, which it forgets when this is gone."""

    def __init__(self, loaded: Library, device: int, number: int) -> None:
        self.number = number
        weakref.finalize(self, _forget, loaded, device, number).atexit = False


def _forget(loaded: Library, device: int, number: int) -> None:
    with contextlib.suppress(Refused):
        loaded.call("mg_torch_pool_forget", device, number)


class ExtensionPool:
    """See `MemoryPool`.  A call that the extension refuses raises `Refused`, with its reason, and has changed nothing.

    It refuses to save and to restore while a block of the pool is freed and waits, or while another capture of the
    process is under way which the pool's memory may have to do with.
    """

    def __init__(self, loaded: Library, index: int, held: Callable[[ExtensionPool], object]) -> None:
        """`held`: called once with the pool; what it returns is kept until the pool is left."""
        self.index = index
        self.adopted: set[int] = set()
        self._library, self._owners = loaded, list[tuple[int, StorageWeakRef]]()
        self._device: int | None = loaded.call("mg_torch_make_device", index)
        if self._device is None:
            raise Refused(loaded.message())
        self.id = new_id()
        loaded.call("mg_torch_begin_pool_on_thread", index, *self.id)
        self._call("mg_end_pool")  # and no release: that is how a pool is held
        self._is_held = True
        try:
            self._held: object = held(self)
            self.empty = self._now()
        except BaseException:
            self.leave()
            raise

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(name, self._device, *self.id, *arguments)

    # ---------------------------------------------------------------- states

    def restore(
        self, state: State, blocks: Collection[int], owned: Sequence[tuple[int, int]] = ()
    ) -> list[torch.UntypedStorage]:
        self.disown()  # of a capture that never came
        self._library.call("mg_torch_pool_restore", self._device, state.raw.number)
        self.adopted.clear()
        self.adopted.update(state.addresses)
        for address in state.addresses.difference(blocks):
            self._library.call("mg_torch_drop", self._device, address)
            self.adopted.discard(address)
        owners: list[torch.UntypedStorage] = []
        try:
            for address, nbytes in owned:
                owners.append(self._owner(address, nbytes))
        except BaseException:
            self._detach({owner._cdata: owner.data_ptr() for owner in owners})
            raise
        self._owners = [(owner.data_ptr(), StorageWeakRef(owner)) for owner in owners]
        return owners

    def _owner(self, address: int, nbytes: int) -> torch.UntypedStorage:
        if address not in self.adopted:
            raise RuntimeError(f"no block at {address:#x} is there to be owned")
        self._library.call("mg_torch_claim", self.index, address, nbytes)
        try:
            storage = torch.UntypedStorage(nbytes, device=torch.device("cuda", self.index))
        finally:
            self._library.call("mg_torch_claim", self.index, 0, 0)
        if storage.data_ptr() != address:
            raise RuntimeError("torch allocated a storage that was to lie over a block of the pool elsewhere")
        return storage

    def _now(self) -> State:
        number = ctypes.c_uint64()
        self._call("mg_torch_pool_save", ctypes.byref(number))
        assert self._device is not None
        return State(_Saved(self._library, self._device, number.value), frozenset(self.adopted))

    # ---------------------------------------------------------------- blocks and who frees them

    def freed(self) -> frozenset[int]:
        freed = frozenset(address for address, owner in self._owners if owner.expired())
        self.adopted -= freed
        return freed

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        self._library.call("mg_torch_begin_pool_on_thread", self.index, *self.id)
        try:
            yield
        finally:
            self._call("mg_end_pool")
            self._call("mg_release_pool")

    def blocks(self) -> dict[int, int]:
        return dict(self._runs("mg_pool_blocks"))

    def holds_only(self, addresses: Collection[int]) -> bool:
        return self.blocks().keys() == set(addresses)

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> State:
        live_out = {storage._cdata: storage for storage in storages}
        addresses = {handle: storage.data_ptr() for handle, storage in live_out.items()}
        self._detach(self._live_owners() | addresses)
        self.adopted.update(addresses.values())
        return self._now()

    def disown(self) -> None:
        # blocks that dead owners have freed are live again after the next `restore`; nothing is recorded before it
        self._detach(self._live_owners())

    def _live_owners(self) -> dict[int, int]:
        live = {owner.cdata: address for address, owner in self._owners if not owner.expired()}
        self._owners = []
        return live

    def _detach(self, addresses: Mapping[int, int]) -> None:
        """Let these storages, by handle, free their blocks no more."""
        for handle, address in addresses.items():
            self._library.call("mg_torch_adopt", self._device, address)
            _compat.free_and_detach(handle)

    # ---------------------------------------------------------------- the pool as a whole

    def uses(self) -> int:
        users = ctypes.c_int()
        self._call("mg_pool_users", ctypes.byref(users))
        return users.value

    def stop(self, uses: int) -> None:
        with contextlib.suppress(Refused):  # where torch has done so, or had not begun to allocate here
            self._call("mg_end_pool")
        while self.uses() > uses:
            self._call("mg_release_pool")

    def segments(self) -> list[tuple[int, int]]:
        return self._runs("mg_pool_segments")

    def held(self) -> int:
        return sum(nbytes for _, nbytes in self.segments())

    def lend(self, on: bool) -> bool:
        self._call("mg_use_on_oom", int(on))
        return on

    def lent(self) -> int:
        lent = ctypes.c_size_t()
        self._call("mg_pool_lent", ctypes.byref(lent))
        return lent.value

    def _runs(self, name: str) -> list[tuple[int, int]]:
        count = ctypes.c_size_t()
        self._call(name, None, 0, ctypes.byref(count))
        while True:
            room = count.value
            runs = (Block * room)()
            self._call(name, runs, room, ctypes.byref(count))
            if count.value <= room:  # else another thread's capture has allocated
                return [(run.address, run.bytes) for run in runs[: count.value]]

    def leave(self) -> None:
        for address in self.adopted:
            with contextlib.suppress(Refused):  # an owner of a capture that never came may have freed it
                self._library.call("mg_torch_drop", self._device, address)
        self.adopted.clear()
        if self._is_held:
            self._is_held = False
            self._library.call("mg_torch_release_pool", self.index, *self.id)
            self._held = None  # the anchor's graph, which is a user of the pool as well
            # to the device: another pool has no use for it. What a graph still keeps goes when the cache is emptied
            with contextlib.suppress(Refused):
                self._call("mg_empty_pool", ctypes.byref(ctypes.c_size_t()))
