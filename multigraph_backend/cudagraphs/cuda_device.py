"""CUDA, as the runtime of recordings needs it: the one place that talks to the driver and to torch's allocator.

The pool is a `torch.cuda.MemPool` of torch's own caching allocator.  Its state is saved and set back by the calls that
torch made for its own trees.  These know blocks by the storages that free them; here the runtime owns blocks by
address: right after a capture the pool is set to the state it is in, which takes the deleters off the outputs' storages
and leaves the blocks allocated.  Such a storage can still be resized, which gives it, and all tensors that share it,
other memory: that is how what a user keeps is moved out of the way.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend import _compat
from multigraph_backend.cudagraphs import staging
from multigraph_backend.cudagraphs.device import Captured, CaptureFailed, Graph, Layout, PoolState


@dataclass(frozen=True)
class _State:
    raw: Any
    addresses: frozenset[int]


@dataclass(frozen=True)
class _Left:
    """A pool in which nothing new is recorded, and what keeps it."""

    pool: torch.cuda.MemPool
    anchor: torch.cuda.CUDAGraph
    owned: set[int]


class CudaDevice:
    """See `device.Device`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = -1
        self._device = torch.device("cuda", index)
        self._capture_stream = torch.cuda.Stream(index)
        self._flag = torch.zeros(1, device=self._device)
        self._left: dict[int, _Left] = {}
        self._pool: torch.cuda.MemPool
        self._anchor: torch.cuda.CUDAGraph
        self.same_addresses = _compat.same_addresses
        self.use_count = _compat.storage_use_count
        self.copy = _compat.foreach_copy
        self.capturing = _compat.is_capturing
        self.stream: Callable[[], int] = functools.partial(_compat.raw_stream, index)
        self.new_pool()

    # ---------------------------------------------------------------- tensors

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return plain and tensor.device == self._device and tensor.layout == torch.strided

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def storage_address(self, storage: torch.UntypedStorage) -> int:
        return storage.data_ptr()

    def maker(self, layout: Layout) -> Callable[[torch.UntypedStorage], torch.Tensor]:
        metadata = {
            "size": layout.size,
            "stride": layout.stride,
            "storage_offset": layout.offset,
            "dtype": layout.dtype,
            "device": self._device,
        }
        return functools.partial(_compat.make_cuda_tensor, metadata)

    def storage_at(self, address: int, nbytes: int) -> torch.UntypedStorage:
        return cast(torch.UntypedStorage, _compat.storage_at(address, self._device, nbytes))

    def move_out(self, storage: torch.UntypedStorage) -> bool:
        if not storage.resizable():
            return False
        with torch.cuda.device(self.index):
            storage.resize_(storage.nbytes())  # allocates, copies on the current stream, and lets go of the old memory
        return True

    def prepare(self, inputs: int) -> None:
        staging.prepare(self.index, inputs)

    def stager(self, buffers: Sequence[torch.Tensor]) -> Callable[..., object]:
        return staging.stager(self.index, buffers, self.stream, self.copy)

    def time_copies(self, stage: Callable[..., object], sources: Sequence[torch.Tensor]) -> Callable[[], float | None]:
        with torch.cuda.device(self.index):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            stage(*sources)
            after.record()
        return lambda: before.elapsed_time(after) * 1e3 if after.query() else None

    def fresh_storage(self, nbytes: int) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()

    # ---------------------------------------------------------------- the pool

    def new_pool(self) -> None:
        if self.generation >= 0:
            self._left[self.generation] = _Left(self._pool, self._anchor, self._owned)
        self.generation += 1
        with torch.cuda.device(self.index):
            self._pool = torch.cuda.MemPool()
            self._owned: set[int] = set()
            self._owners: list[tuple[int, StorageWeakRef]] = []
            # a pool lives as long as a graph that was captured in it; and capturing anything at all sets right what a
            # failed capture leaves behind in the random number generators
            self._anchor = torch.cuda.CUDAGraph()
            self._capture_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._capture_stream):
                self._anchor.capture_begin(pool=cast(Any, self._pool.id), capture_error_mode="thread_local")
                try:
                    self._flag.zero_()
                finally:
                    self._anchor.capture_end()
            self._empty = _State(_compat.pool_state(self.index, self._pool.id), frozenset())

    def leave(self, generation: int) -> None:
        left = self._left.pop(generation)
        for address in left.owned:
            _compat.free_block(address)

    def empty_state(self) -> PoolState:
        return self._empty

    def restore(self, state: PoolState, blocks: Collection[int], owners: Sequence[torch.UntypedStorage] = ()) -> None:
        assert isinstance(state, _State)
        for address in self._owned:
            _compat.free_block(address)
        self._owned.clear()
        _compat.set_pool_state(self.index, state.raw, [], [storage._cdata for storage in owners])
        self._owned = set(state.addresses)
        for address in state.addresses.difference(blocks):
            _compat.free_block(address)
            self._owned.discard(address)
        self._owners = [(storage.data_ptr(), StorageWeakRef(storage)) for storage in owners]

    def pool_bytes(self) -> int:
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self._pool.id))

    # ---------------------------------------------------------------- recording

    def capture(
        self,
        function: Callable[[], Any],
        outputs: Callable[[Any], Sequence[torch.Tensor]],
        random: bool = False,
        generators: Sequence[torch.Generator] = (),
    ) -> Captured:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        problem: BaseException | None = None
        broken = False
        result: Any = None
        with _undisturbed(self.index), contextlib.ExitStack() as stack:
            current = torch.cuda.current_stream(self.index)
            self._capture_stream.wait_stream(current)
            with torch.cuda.stream(self._capture_stream):
                try:
                    free = None if random else stack.enter_context(_generator_set_free(self.index))
                    graph.capture_begin(pool=cast(Any, self._pool.id), capture_error_mode="thread_local")
                    if free is not None:
                        free()
                    result = function()
                except Exception as error:
                    problem = error
                try:
                    graph.capture_end()
                except Exception as error:
                    problem, broken = problem or error, True
                    for clean_up in (_compat.stop_allocating_to_pool, _compat.release_pool):
                        with contextlib.suppress(Exception):  # torch has done so where it got that far
                            clean_up(self.index, self._pool.id)
            current.wait_stream(self._capture_stream)
        kept: dict[int, torch.UntypedStorage] = {}
        if problem is None:
            try:
                kept = {storage.data_ptr(): storage for storage in (out.untyped_storage() for out in outputs(result))}
            except Exception as error:
                problem = error
        freed = frozenset(address for address, owner in self._owners if owner.expired())
        self._owned -= freed
        if problem is None:
            kept.pop(0, None)
            if not _compat.pool_holds_only(self.index, self._pool.id, self._owned | set(kept)):
                problem = RuntimeError("memory of the recording is still held by something that is not an output of it")
        if problem is not None:
            result = None
            kept.clear()
            self._let_go(problem, broken)
            raise CaptureFailed(_first_line(problem)) from problem
        stale = [storage._cdata for storage in kept.values()]
        stale += [owner.cdata for address, owner in self._owners if address not in freed]
        self._owners = []
        raw = _compat.pool_state(self.index, self._pool.id)
        _compat.set_pool_state(self.index, raw, stale, [])
        self._owned |= set(kept)
        blocks = {address: storage.nbytes() for address, storage in kept.items()}
        return Captured(cast(Graph, graph), result, blocks, freed, _State(raw, frozenset(self._owned)))

    def _let_go(self, problem: BaseException, broken: bool) -> None:
        """After a failed capture: free what it allocated, or go on in another pool where this one is spoilt."""
        error: BaseException | None = problem
        while error is not None:  # frames of the failed function hold its tensors
            _clear_frames(error)
            error = error.__cause__ or error.__context__
        alive = [owner.cdata for _, owner in self._owners if not owner.expired()]
        self._owners = []
        if alive:
            _compat.set_pool_state(self.index, _compat.pool_state(self.index, self._pool.id), alive, [])
        # blocks that dead owners have freed are allocated again by the next `restore`; nothing is recorded before it
        if not broken and not _compat.pool_holds_only(self.index, self._pool.id, self._owned):
            gc.collect()
            broken = not _compat.pool_holds_only(self.index, self._pool.id, self._owned)
        if broken:
            self.new_pool()

    def wait_for(self, stream: int) -> None:
        torch.cuda.current_stream(self.index).wait_stream(torch.cuda.ExternalStream(stream, device=self._device))


@contextlib.contextmanager
def _undisturbed(index: int) -> Iterator[None]:
    """Around a capture: no garbage collection (it may free what must not be freed then), and cuBLAS workspaces inside
    the recording and nowhere else."""
    collecting = gc.isenabled()
    gc.disable()
    with torch.cuda.device(index):
        torch.cuda.current_blas_handle()  # cannot be made while capturing, and each thread has its own
        _compat.clear_cublas_workspaces()
        try:
            yield
        finally:
            _compat.clear_cublas_workspaces()
            if collecting:
                gc.enable()


@contextlib.contextmanager
def _generator_set_free(index: int) -> Iterator[Callable[[], None]]:
    """Around a capture that draws no random numbers: other threads may.

    A capture takes the device's generator for itself.  After the call of what this yields, at the capture's begin, it
    keeps the state that it took, and until the end all others draw from a copy.
    """
    generator = torch.cuda.default_generators[index]
    taken, copy = generator.graphsafe_get_state(), generator.clone_state()
    freed = False

    def free() -> None:
        nonlocal freed
        freed = True
        generator.graphsafe_set_state(copy)

    try:
        yield free
    finally:
        if freed:
            generator.graphsafe_set_state(taken)
            taken.set_state(copy.get_state())


def _clear_frames(error: BaseException) -> None:
    traceback = error.__traceback__
    while traceback is not None:
        with contextlib.suppress(RuntimeError):  # a frame that is still running
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
