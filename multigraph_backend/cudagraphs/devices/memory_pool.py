"""Where recordings live: a pool of a device's memory whose allocator can be put into an earlier state.

In:  captures, which allocate here, and the states, blocks and owners that the runtime of recordings knows.
Out: states to come back to, which blocks are still allocated, what the pool has reserved.

The runtime owns blocks by address: what a capture leaves allocated is adopted, and then no storage frees it by dying;
`restore` and `leave` do.  `MemoryPool` is what any allocator has to serve; `TorchPool` serves it with torch's own, and
`extension_pool` with the extension where that is the process's allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend import _compat
from multigraph_backend.allocator import ended_pools
from multigraph_backend.cudagraphs.devices import bracket


@dataclass(frozen=True)
class State:
    """What the pool's allocator looked like at one moment; `addresses` of the blocks that were allocated."""

    raw: Any
    addresses: frozenset[int]


class MemoryPool(Protocol):
    """One pool of one device.  All calls come under the lock of the device's recordings."""

    #: as graphs are told of it when they are captured
    id: tuple[int, int]
    #: without any block
    empty: State
    #: addresses of the blocks that the runtime owns: no storage frees them
    adopted: set[int]

    def restore(
        self, state: State, blocks: Collection[int], owned: Sequence[tuple[int, int]] = ()
    ) -> list[torch.UntypedStorage]:
        """See `device.Device.restore`."""

    def freed(self) -> frozenset[int]:
        """Addresses of blocks that the deaths of owners have freed since the last `restore`, now owned no more."""

    def holds_only(self, addresses: Collection[int]) -> bool:
        """Whether these blocks are allocated and no others are."""

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what the calling thread allocates on the device comes from here, and its storages free it."""

    def blocks(self) -> dict[int, int]:
        """Address and bytes of each block that is allocated."""

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> State:
        """Own the blocks of `storages`, and those of owners that live; the state of now."""

    def disown(self) -> None:
        """After a failed capture: no storage frees anything any more."""

    def uses(self) -> int:
        """How many graphs, and captures that are on, keep it, and the pool itself."""

    def stop(self, uses: int) -> None:
        """After a capture that did not end as it should: nothing is allocated here any more, and the number of users is
        `uses` again, what it was before the capture."""

    def segments(self) -> list[tuple[int, int]]:
        """Address and bytes of each run of memory that is reserved."""

    def held(self) -> int:
        """Bytes of these; a quick question while nobody reserves memory of the device or gives any back."""

    def lend(self, on: bool) -> bool:
        """Whether what is free here serves others at out-of-memory from now on."""

    def lent(self) -> int:
        """Bytes of it that serve others now, or did and may still be in use on the device."""

    def leave(self) -> None:
        """Free all that is adopted.  The pool serves no further captures."""


@contextlib.contextmanager
def generator_set_free(index: int, stream: torch.cuda.Stream) -> Iterator[Callable[[], None]]:
    """Around a capture that draws no random numbers: other threads may.

    A capture takes the device's generator for itself.  After the call of what this yields, at the capture's begin, it
    keeps the state that it took, and until the end all others draw from a copy, which goes on where that had come to.
    `stream` is one that does not capture, as torch asks of whoever copies a state.

    Before that call torch raises in a thread that draws.  Short turns of Python's threads until then make that no
    rarer: tried with six threads that draw.
    """
    generator = torch.cuda.default_generators[index]
    taken = generator.graphsafe_get_state()
    copies: list[torch.Generator] = []

    def free() -> None:
        with torch.cuda.stream(stream):
            copies.append(generator.clone_state())
        generator.graphsafe_set_state(copies[0])

    try:
        yield free
    finally:
        if copies:
            generator.graphsafe_set_state(taken)
            taken.set_state(copies[0].get_state())


Anchor = tuple[torch.cuda.CUDAGraph, torch.Tensor]  # and what it writes to


def capture_anchor(pool: MemoryPool, index: int, stream: torch.cuda.Stream) -> Anchor:
    """A graph of the least that there is, captured in `pool` of device `index` on `stream`, and what it writes to.

    While both are kept, so is the pool; and a capture that ends well sets right what a failed one has left behind in
    torch.  Raises what the capture raises, as it does where another thread waits for the whole device: then nothing is
    captured in this pool any more, for torch's allocator of pinned memory takes its id for one in use.
    """
    flag = torch.zeros(1, device=torch.device("cuda", index))
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    anchor, uses = torch.cuda.CUDAGraph(), pool.uses()
    with torch.cuda.stream(stream), generator_set_free(index, current) as free:

        def begin() -> None:
            anchor.capture_begin(pool=cast(Any, pool.id), capture_error_mode="thread_local")
            free()

        problem = bracket.captured(begin, flag.zero_, anchor.capture_end, _compat.is_capturing).problem
        if problem is not None:
            give_up(anchor, pool, uses)
    if problem is not None:
        try:
            raise problem
        finally:
            del problem  # it holds this frame
    return anchor, flag


def give_up(graph: torch.cuda.CUDAGraph, pool: MemoryPool, uses: int) -> None:
    """Undo what is left in torch of a capture of `graph` in `pool` that failed; it had `uses` users before."""
    graph.reset()  # lets go of the pool as far as it has it
    pool.stop(uses)
    _spoilt.append(graph)


# kept: the allocator of pinned memory may go on asking them what they capture
_spoilt: list[torch.cuda.CUDAGraph] = []


class Reserved(NamedTuple):
    """Bytes that torch's allocator has reserved of a device: now, and of all time what it took and what it gave back.
    As long as these are what they were, nobody's segments have changed."""

    now: int
    taken: int
    given_back: int


def reserved(index: int) -> Reserved | None:
    """See `Reserved`; a quick question, which walks nothing.  None where CUDA is of no use, as in a forked process."""
    told = torch.cuda.memory_stats_as_nested_dict(index)
    if not told:
        return None
    found = told["reserved_bytes"]["all"]
    return Reserved(found["current"], found["allocated"], found["freed"])


class TorchPool:
    """A `torch.cuda.MemPool`, with the calls that torch made for its own trees.

    Those know blocks by the storages that free them.  To set the pool to the state that it is in takes the deleters off
    the storages that are named, and leaves the blocks allocated.
    """

    def __init__(self, index: int, stream: torch.cuda.Stream) -> None:
        """`stream`: of captures; one is made at once and kept, for a pool lives as long as a graph in it."""
        self.index = index
        self._pool = ended_pools.begin(index)
        self.id: tuple[int, int] = self._pool.id
        self.adopted: set[int] = set()
        self._owners: list[tuple[int, StorageWeakRef]] = []
        self._looked_at: Reserved | None = None
        self._held = 0
        try:
            self._anchor = capture_anchor(self, index, stream)
        except BaseException:
            ended_pools.end([self.__dict__.pop("_pool")], index)
            raise
        self.empty = State(self._now(), frozenset())

    def restore(
        self, state: State, blocks: Collection[int], owned: Sequence[tuple[int, int]] = ()
    ) -> list[torch.UntypedStorage]:
        device = torch.device("cuda", self.index)
        owners = [_compat.storage_at(address, device, nbytes) for address, nbytes in owned]
        for address in self.adopted:
            _compat.free_block(address)
        self.adopted.clear()
        _compat.set_pool_state(self.index, state.raw, [], [storage._cdata for storage in owners])
        self.adopted.update(state.addresses)
        for address in state.addresses.difference(blocks):
            _compat.free_block(address)
            self.adopted.discard(address)
        self._owners = [(storage.data_ptr(), StorageWeakRef(storage)) for storage in owners]
        return owners

    def freed(self) -> frozenset[int]:
        freed = frozenset(address for address, owner in self._owners if owner.expired())
        self.adopted -= freed
        return freed

    def holds_only(self, addresses: Collection[int]) -> bool:
        return bool(_compat.pool_holds_only(self.index, self.id, set(addresses)))

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._pool, self.index)

    def blocks(self) -> dict[int, int]:
        return {
            block["address"]: block["size"]
            for segment in self._segments()
            for block in segment["blocks"]
            if block["state"] != "inactive"  # those that wait for a stream are taken too
        }

    def adopt(self, storages: Iterable[torch.UntypedStorage]) -> State:
        live_out = list(storages)
        self._take_over([storage._cdata for storage in live_out])
        self.adopted.update(storage.data_ptr() for storage in live_out)
        return State(self._now(), frozenset(self.adopted))

    def disown(self) -> None:
        # blocks that dead owners have freed are allocated again by the next `restore`; nothing is recorded before it
        self._take_over([])

    def _take_over(self, handles: list[int]) -> None:
        handles = handles + [owner.cdata for _, owner in self._owners if not owner.expired()]
        self._owners = []
        if handles:
            _compat.set_pool_state(self.index, self._now(), handles, [])

    def _now(self) -> Any:
        return _compat.pool_state(self.index, self.id)

    def uses(self) -> int:
        return self._pool.use_count()

    def stop(self, uses: int) -> None:
        with contextlib.suppress(Exception):  # it raises where torch has done so, or had not begun to allocate here
            _compat.stop_allocating_to_pool(self.index, self.id)
        while self._pool.use_count() > uses:
            _compat.release_pool(self.index, self.id)

    def segments(self) -> list[tuple[int, int]]:
        return [(segment["address"], segment["total_size"]) for segment in self._segments()]

    def held(self) -> int:
        now = reserved(self.index)  # first: another thread may reserve memory meanwhile, and is seen the next time
        if now is not None and now != self._looked_at:
            self._held = sum(nbytes for _, nbytes in self.segments())
            self._looked_at = now
        return self._held

    def lend(self, on: bool) -> bool:
        return False  # torch's has blocks that were allocated on one stream serve no other

    def lent(self) -> int:
        return 0

    def _segments(self) -> list[Any]:
        # of everything: asked for one pool by its id, torch 2.11 drops references that it does not hold, and the
        # numbers of that id are freed while they are in use
        found = _compat.raw_snapshot(None)["segments"]
        return [segment for segment in found if tuple(segment["segment_pool_id"]) == self.id]

    def leave(self) -> None:
        for address in self.adopted:
            _compat.free_block(address)
        self.adopted.clear()
        # in this order: when the pool's object goes, torch gives back what no graph keeps any more; what a graph still
        # keeps then stays reserved until the cache is emptied or memory is short
        self._anchor[0].reset()
        if "_pool" in self.__dict__:
            ended_pools.end([self.__dict__.pop("_pool")], self.index)
