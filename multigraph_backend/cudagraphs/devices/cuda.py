"""CUDA, as the runtime of recordings needs it: the one place that talks to the driver and to torch's allocator.

Where recordings live is `memory_pool`'s matter.  A storage whose block the pool has adopted can still be resized, which
gives it, and all tensors that share it, other memory: that is how what a user keeps is moved out of the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from multigraph_backend import _compat, native
from multigraph_backend.allocator import installing, statistics
from multigraph_backend.cudagraphs.devices import bracket, poison, staging
from multigraph_backend.cudagraphs.devices.device import (
    Captured,
    CaptureFailed,
    DeviceFailed,
    Graph,
    HeldPool,
    Layout,
    PoolState,
    Source,
    Stager,
    Within,
    is_plain,
)
from multigraph_backend.cudagraphs.devices.extension_pool import ExtensionPool
from multigraph_backend.cudagraphs.devices.memory_pool import (
    MemoryPool,
    State,
    TorchPool,
    capture_anchor,
    generator_set_free,
    give_up,
)
from multigraph_backend.cudagraphs.devices.patches import Described, Limits, Patched, Patches, Unreadable, overlaps
from multigraph_backend.native import Calls
from multigraph_backend.process import garbage
from multigraph_backend.process.captures import beside_captures
from multigraph_backend.process.interruptions import from_outside, without_frames

log = logging.getLogger(__name__)


class CudaDevice:
    """See `device.Device`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = -1
        self._device = torch.device("cuda", index)
        self._capture_stream = torch.cuda.Stream(index)
        self._left: dict[int, MemoryPool] = {}
        self._pooled: frozenset[int] = frozenset()
        self._owned_bytes = 0  # of the owners that the last `restore` made
        self._graph_bytes = 0
        self._calls: Calls | None = None
        self._launches = self._patches = False  # natively; natively, and with parameters of captured kernels set
        self.patching: Limits | None = None
        self._pool: MemoryPool
        self.same_addresses = _compat.same_addresses
        self.own_addresses = True
        self.use_count = _compat.storage_use_count
        self.storage_address: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr
        self.copy: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = _copy
        self.capturing = _compat.is_capturing
        self.stream: Callable[[], int] = functools.partial(_compat.raw_stream, index)
        self.new_pool()

    # ---------------------------------------------------------------- tensors

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return is_plain(tensor) and tensor.device == self._device and tensor.layout == torch.strided

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def maker(self, layout: Layout) -> Callable[[torch.UntypedStorage], torch.Tensor]:
        if self._calls is not None:
            return self._calls.Maker(self._like(layout), None)
        return self._maker(layout)

    def make(self, layout: Layout, storage: torch.UntypedStorage) -> torch.Tensor:
        return self._maker(layout)(storage)

    def _like(self, layout: Layout) -> torch.Tensor:
        """A tensor of that layout, over memory of no size, which nobody reads."""
        nothing = self.fresh_storage(0)
        with torch.inference_mode(False):
            return self.make(layout, nothing)

    def _maker(self, layout: Layout) -> Callable[[torch.UntypedStorage], torch.Tensor]:
        metadata = {
            "size": layout.size,
            "stride": layout.stride,
            "storage_offset": layout.offset,
            "dtype": layout.dtype,
            "device": self._device,
        }
        return functools.partial(_compat.make_cuda_tensor, metadata)

    def maker_over(self, layout: Layout, storage: torch.UntypedStorage) -> Callable[[], torch.Tensor]:
        if self._calls is not None:
            return self._calls.Maker(self._like(layout), storage)
        with torch.inference_mode(False):
            first = self.make(layout, storage)  # another like it is made quicker than one of what is known of it
        return functools.partial(_compat.tensor_like, first, layout.size, layout.stride, 0)

    def storage_at(self, address: int, nbytes: int) -> torch.UntypedStorage:
        return cast(torch.UntypedStorage, _compat.storage_at(address, self._device, nbytes))

    def move_out(self, storage: torch.UntypedStorage) -> bool:
        if not storage.resizable():
            return False
        with torch.cuda.device(self.index):
            storage.resize_(storage.nbytes())  # allocates, copies on the current stream, and lets go of the old memory
        return True

    def prepare(self, inputs: int, outputs: int) -> None:
        staging.prepare(self.index, inputs)
        staging.prepare(self.index, outputs)

    def take(self, calls: Calls) -> None:
        self._calls = calls
        try:
            calls.drive(_DRIVER, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
            self._launches, self._patches = True, calls.sets_parameters()
            self.patching = _PATCHING if native.wanted(native.PATCHES) and calls.reads_nodes() else None
        except (OSError, TypeError, ValueError) as error:
            log.info("recordings are launched by way of Python: %s", error)

    def within(self, sources: Sequence[torch.Tensor]) -> Within | None:
        if self._calls is None or not self._patches:
            return None
        made = staging.within(self.index, sources)
        return None if made is None else _Within(self, made, self._calls)

    def launcher(
        self,
        graph: Graph,
        random: bool,
        copied: Sequence[int],
        sources: Sequence[Source],
        stager: Stager | None,
        patches: Patches | None = None,
        strayed: Callable[[Sequence[int]], object] | None = None,
    ) -> Callable[[list[Any]], object] | None:
        kernel: staging.Kernel | None = None if stager is None or not stager.kernel else stager.kernel
        if kernel is not None and not kernel.function:
            kernel = None
        before = stager if kernel is None else None  # what copies, where that is no kernel that is launched here
        if self._calls is None or not self._launches or (before is not None and patches is None):
            return None
        recorded, positions = cast(torch.cuda.CUDAGraph, graph), tuple(copied)
        copies = None if kernel is None else (
            kernel.function, kernel.programs, kernel.threads, kernel.shared, kernel.table.data_ptr(), staging.ALIGNED,
            kernel.size, positions, kernel.node,
        )  # fmt: skip
        made = functools.partial(
            self._calls.Launch,
            graph=recorded.raw_cuda_graph_exec(),
            device=self.index,
            copies=copies,
            replay=recorded.replay,
            by_torch=random,
            hooks=_compat.replay_hooks(recorded),
            keeps=(recorded, stager),
        )
        which = tuple(zip(copied, sources, strict=True))
        if patches is None and (kernel is None or not kernel.node):
            return made(otherwise=functools.partial(_by_torch, recorded, which, stager))
        counts = () if kernel is None else tuple(zip(copied, kernel.counts, strict=True))
        if patches is None:
            return made(otherwise=functools.partial(_aligned, self.index, counts, made(otherwise=_refused)))
        again = made(otherwise=_refused, patches=self._told(patches, by_others=True))
        aligned = functools.partial(_aligned, self.index, counts, again, patches=patches, strayed=strayed)
        launch = made(otherwise=aligned, patches=self._told(patches, by_others=False))
        return launch if before is None else functools.partial(_copied_first, which, before.copy, launch)

    def _told(self, patches: Patches, by_others: bool) -> tuple[Any, ...]:
        """`patches` as native calls take them; `by_others`: there is another one that tells the same kernels."""
        inputs = tuple(
            (one.index, self._like(Layout(one.size, one.stride, 0, one.dtype)), one.span, patches.aligned)
            for one in patches.inputs
        )
        nodes = tuple(
            (entry.node.handle, entry.node.same, entry.node.values, tuple(map(tuple, entry.words)))
            for entry in patches.told
        )
        return inputs, nodes, patches.written, by_others

    def elsewhere(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], object]:
        assert self.patching is not None
        layouts = [Layout.of(tensor) for tensor in tensors]
        aligned, most = self.patching.aligned, len(tensors)
        room = max(layout.span for layout in layouts) + aligned * (most + 1) ** 2
        memory = torch.empty(room, dtype=torch.uint8, device=self._device)
        at = -(-memory.data_ptr() // aligned) * aligned
        found: list[torch.Tensor] = []
        distances: set[int] = set()
        for tensor, layout in zip(tensors, layouts, strict=True):
            while at - tensor.data_ptr() in distances | {0}:
                at += aligned
            distances.add(at - tensor.data_ptr())
            lying = Layout(layout.size, layout.stride, 0, layout.dtype)
            found.append(self.make(lying, self.storage_at(at, layout.span)))
            at += aligned
        return found, memory

    def nodes(self, graph: Graph) -> list[Described]:
        assert self._calls is not None
        try:
            return list(map(Described._make, self._calls.nodes(cast(torch.cuda.CUDAGraph, graph).raw_cuda_graph())))
        except (RuntimeError, ValueError) as error:
            raise Unreadable(_first_line(error)) from error

    def stager(self, buffers: Sequence[torch.Tensor], as_bytes: bool = True) -> Stager:
        if not as_bytes:
            return staging.by_torch(buffers, self.copy)
        return staging.stager(self.index, buffers, self.stream, self.copy)

    def unloader(self, outputs: Sequence[torch.Tensor]) -> Callable[..., object] | None:
        makers, copied = [self.maker(Layout.of(output)) for output in outputs], list(outputs)

        def slow(*storages: torch.UntypedStorage) -> None:
            self.copy([make(storage) for make, storage in zip(makers, storages, strict=True)], copied)

        return staging.unloader(self.index, outputs, self.stream, slow)

    def time_copies(self, stage: Callable[..., object], sources: Sequence[torch.Tensor]) -> Callable[[], float | None]:
        with torch.cuda.device(self.index):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stage(*sources)  # a kernel's first launch loads it, which takes milliseconds
            before.record()
            stage(*sources)
            after.record()
        return lambda: before.elapsed_time(after) * 1e3 if after.query() else None

    def fresh_storage(self, nbytes: int) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()

    # ---------------------------------------------------------------- the pool

    def new_pool(self) -> None:
        with garbage.paused(), torch.cuda.device(self.index):
            # the capture of its anchor also sets right what a failed one leaves behind in the random number generators
            for pause in (*_TRIES, None):
                try:
                    pool = self._make_pool()
                    break
                except Exception as error:  # another thread may just have waited for the whole device
                    if pause is None or from_outside(error) or isinstance(error, torch.OutOfMemoryError):
                        raise
                time.sleep(pause)
        if self.generation >= 0:
            self._left[self.generation] = self._pool
        self._pool = pool
        self.generation = max((self.generation, *self._left)) + 1

    def _make_pool(self) -> MemoryPool:
        """A pool of the allocator that the process has."""
        installed = installing.installed()
        if installed is None:
            return TorchPool(self.index, self._capture_stream)
        stream = self._capture_stream
        return ExtensionPool(installed.library, self.index, lambda pool: capture_anchor(pool, self.index, stream))

    def generations(self) -> Collection[int]:
        return self.generation, *self._left

    def return_to(self, generation: int) -> None:
        self._left[self.generation] = self._pool
        self._pool, self.generation = self._left.pop(generation), generation
        for later in [number for number in self._left if number > generation]:
            self.leave(later)

    def leave(self, generation: int) -> None:
        if not self.capturing():
            # where the pool's memory is unmapped, and not freed, torch waits for the stream that it was allocated on
            self._capture_stream.wait_stream(torch.cuda.current_stream(self.index))
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.index))
            with contextlib.suppress(OSError):  # memory goes back to the driver
                stack.enter_context(beside_captures())
            self._left[generation].leave()  # which may fail, and is tried again then
            del self._left[generation]

    def empty_state(self) -> PoolState:
        return self._pool.empty

    def restore(
        self, state: PoolState, blocks: Collection[int], owned: Sequence[tuple[int, int]] = ()
    ) -> list[torch.UntypedStorage]:
        assert isinstance(state, State)
        self._owned_bytes = sum(nbytes + _ROUNDING for _, nbytes in owned)
        try:
            return self._pool.restore(state, blocks, owned)
        except BaseException as error:
            self.new_pool()
            if from_outside(error):
                raise
            raise DeviceFailed(_first_line(error)) from error

    def lend(self, on: bool) -> bool:
        return self._pool.lend(on)

    def lent_bytes(self) -> int:
        return self._pool.lent()

    def pool_bytes(self) -> int:
        return self._pool.held()

    def reserved_bytes(self) -> int:
        return self._totals().reserved

    def pools(self) -> tuple[HeldPool, ...]:
        there = sorted({**self._left, self.generation: self._pool}.items())
        return tuple(HeldPool(generation, pool.id, pool.held(), pool.lent()) for generation, pool in there)

    def graph_bytes(self) -> int:
        return self._graph_bytes

    def _totals(self) -> _Totals:
        """Quick: nothing is walked, and nothing waited for."""
        if installing.installed() is None:
            nested = torch.cuda.memory_stats_as_nested_dict(self.index)
            return _Totals(*(nested[level]["all"][number] for level, number in _NAMES))
        flat = statistics.memory_stats(self.index)
        return _Totals(*(flat.get(f"{level}.all.{number}", 0) for level, number in _NAMES))

    def _free_memory(self) -> int | None:
        """Bytes that the device has left, None where the driver does not say."""
        try:
            with beside_captures():  # one may be on in this thread
                return torch.cuda.mem_get_info(self.index)[0]
        except (OSError, RuntimeError):
            return None

    def total_bytes(self) -> int:
        return int(self._fraction() * torch.cuda.get_device_properties(self.index).total_memory)

    def free_bytes(self) -> int:
        with beside_captures():
            free, total = torch.cuda.mem_get_info(self.index)
        fraction = self._fraction()
        return free if fraction == 1.0 else min(free, int(fraction * total) - self.reserved_bytes())

    def _fraction(self) -> float:
        """The part of the device that torch's allocator may take (`set_per_process_memory_fraction`)."""
        pluggable = torch.cuda.get_allocator_backend() == "pluggable"
        return 1.0 if pluggable else torch.cuda.get_per_process_memory_fraction(self.index)

    def cached_bytes(self) -> int:
        return self.reserved_bytes() - statistics.memory_allocated(self.index)

    def empty_cache(self) -> None:
        statistics.empty_cache()

    def trim(self) -> None:
        if torch.cuda.get_allocator_backend() == "native":
            torch.cuda.empty_cache()

    def poison(self, kept: Iterable[tuple[int, int]]) -> None:
        for address, nbytes in poison.others(self._pool.segments(), kept):
            self.make(Layout((nbytes,), (1,), 0, torch.uint8), self.storage_at(address, nbytes)).fill_(poison.BYTE)

    # ---------------------------------------------------------------- running and recording

    def run_in_pool(self, function: Callable[[], Any]) -> Any:
        # on the stream of captures: the allocator keeps what is free apart by stream, and they are to find it
        current = torch.cuda.current_stream(self.index)
        with torch.cuda.device(self.index), _own_workspaces():
            self._capture_stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._capture_stream), self._pool.allocating():
                    return function()
            finally:
                current.wait_stream(self._capture_stream)

    def unowned(self) -> dict[int, int]:
        adopted = self._pool.adopted
        return {address: nbytes for address, nbytes in self._pool.blocks().items() if address not in adopted}

    def capture(
        self,
        function: Callable[[], Any],
        outputs: Callable[[Any], Sequence[torch.Tensor]],
        random: bool = False,
        generators: Sequence[torch.Generator] = (),
        within: bool = False,
        read: bool = False,
    ) -> Captured:
        try:
            return self._capture(function, outputs, random, generators, within, read)
        except CaptureFailed as error:
            cause = error.__cause__
            if cause is None or not from_outside(cause):
                raise
        except BaseException as error:  # a call of the driver around the capture failed, or was interrupted: what it
            self.new_pool()  # has done is not known
            if from_outside(error):
                raise
            raise CaptureFailed(_first_line(error)) from error
        try:
            raise cause
        finally:
            del cause  # it holds this frame

    def _capture(
        self,
        function: Callable[[], Any],
        outputs: Callable[[Any], Sequence[torch.Tensor]],
        random: bool,
        generators: Sequence[torch.Generator],
        within: bool,
        read: bool,
    ) -> Captured:
        graph = torch.cuda.CUDAGraph(keep_graph=within or read)  # nodes have names while what was captured is kept
        for generator in generators:
            graph.register_generator_state(generator)
        self._have_blas_handle()
        with _undisturbed(self.index), contextlib.ExitStack() as stack:
            current, uses = torch.cuda.current_stream(self.index), self._pool.uses()
            self._capture_stream.wait_stream(current)
            before = after = self._totals()
            taken = 0

            def begin() -> None:
                free = None if random else stack.enter_context(generator_set_free(self.index, current))
                graph.capture_begin(pool=cast(Any, self._pool.id), capture_error_mode="thread_local")
                if free is not None:
                    free()

            def end() -> None:
                nonlocal after, taken
                totals, left = self._totals(), self._free_memory()
                graph.capture_end()  # makes the driver's graph
                if within and not read:
                    graph.instantiate()
                now, after = self._free_memory(), self._totals()
                if left is not None and now is not None and after.reserved_taken == totals.reserved_taken:
                    taken = max(left - now, 0)  # else another thread's allocation came in between

            with torch.cuda.stream(self._capture_stream):
                outcome = bracket.captured(begin, function, end, self.capturing)
                if outcome.broken:
                    give_up(graph, self._pool, uses)
            current.wait_stream(self._capture_stream)
        problem, broken, result = outcome.problem, outcome.broken, outcome.result
        del outcome
        live_out: dict[int, torch.UntypedStorage] = {}
        if problem is None:
            try:
                live_out = {
                    storage.data_ptr(): storage for storage in (out.untyped_storage() for out in outputs(result))
                }
            except BaseException as error:
                problem = error
            live_out.pop(0, None)
        freed = self._freed(live_out) if problem is None else frozenset[int]()
        if problem is None and not self._pool.holds_only(self._pool.adopted | set(live_out)):
            problem = RuntimeError("memory of the recording is still held by something that is not an output of it")
        if problem is not None:
            result = None
            live_out.clear()
            self._let_go(problem, broken)
            if not from_outside(problem):
                without_frames(problem)
            raise CaptureFailed(_first_line(problem)) from problem
        state = self._pool.adopt(live_out.values())
        blocks = {address: storage.nbytes() for address, storage in live_out.items()}
        self._graph_bytes += taken
        peak = max(before.most_until(after) + self._owned_bytes, sum(blocks.values()))
        grown = max(after.reserved - before.reserved, 0)
        return Captured(cast(Graph, graph), result, blocks, freed, state, peak, grown)

    def _freed(self, live_out: Collection[int]) -> frozenset[int]:
        """What the recorded function has freed of what was owned before.

        Another thread that looks at frames, as profilers that sample do, holds what they hold for a moment: it is
        given one to let go.
        """
        freed = self._pool.freed()
        for pause in _PAUSES:
            if self._pool.holds_only(self._pool.adopted | set(live_out)):
                break
            time.sleep(pause)
            freed |= self._pool.freed()
        return freed

    def _have_blas_handle(self) -> None:
        """Have torch make this thread's handle of cuBLAS, which it could not while capturing.

        With it comes a workspace of tens of MiB, so it is made in the pool, where the recording finds that memory.
        """
        having: set[int] = _handles.__dict__.setdefault("devices", set())
        if self.index not in having:
            stream = self._capture_stream
            with torch.cuda.device(self.index), torch.cuda.stream(stream), self._pool.allocating():
                torch.cuda.current_blas_handle()
            having.add(self.index)

    def _let_go(self, problem: BaseException, broken: bool) -> None:
        """After a failed capture: free what it allocated, or go on in another pool where this one is spoilt."""
        error: BaseException | None = problem
        while error is not None:  # frames of the failed function hold its tensors
            _clear_frames(error)
            error = error.__cause__ or error.__context__
        self._pool.disown()
        if not broken and not self._pool.holds_only(self._pool.adopted):
            gc.collect()
            broken = not self._pool.holds_only(self._pool.adopted)
        if broken:
            self.new_pool()

    def wait_for(self, stream: int) -> None:
        torch.cuda.current_stream(self.index).wait_stream(self._stream_of(stream))

    def _stream_of(self, handle: int) -> torch.cuda.Stream:
        if not handle:  # torch would take a new one from its pool
            return torch.cuda.default_stream(self.index)
        return torch.cuda.ExternalStream(handle, device=self._device)

    def record_event(self, stream: int) -> Callable[[], bool] | None:
        torch.cuda.set_device(self.index)  # a thread that comes from another device would make a context there
        event = torch.cuda.Event()
        with beside_captures(), torch.cuda.stream(self._stream_of(stream)):
            if self.capturing():
                return None
            event.record()

        def done() -> bool:
            with beside_captures():
                return bool(event.query())

        return done

    def settle(self, seconds: float) -> bool:
        finished = []

        def wait() -> None:
            torch.cuda.set_device(self.index)
            with beside_captures():
                if _captures(self._streams()):
                    return
                torch.cuda.synchronize(self.index)
            finished.append(True)

        thread = threading.Thread(target=_quietly, args=(wait,), name="multigraph-settle", daemon=True)
        thread.start()
        thread.join(seconds)
        return bool(finished)

    def finish(self) -> None:
        try:
            with beside_captures():
                torch.cuda.current_stream(self.index).synchronize()
        except OSError as error:
            raise DeviceFailed(_first_line(error)) from error

    def _streams(self) -> frozenset[int]:
        """All streams of torch's pools: captures by way of torch are on one of them."""
        if not self._pooled:
            count = 32  # of one priority; they are handed out in turn
            made = [torch.cuda.Stream(self.index, priority=priority) for priority in (0, -1) for _ in range(count)]
            self._pooled = frozenset(stream.cuda_stream for stream in made)
        return self._pooled


def _copy(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(sources) == 1:  # which a multi-tensor copy gives to few blocks of the GPU
        destinations[0].copy_(sources[0])
    else:
        _compat.foreach_copy(destinations, sources)


class _Within:
    """See `device.Within`."""

    def __init__(self, device: CudaDevice, made: staging.Within, calls: Calls) -> None:
        self._device, self._made, self._calls = device, made, calls

    def launch(self, buffers: Sequence[torch.Tensor]) -> None:
        index = self._device.index
        try:
            self._made.launch(buffers, self._device.stream(), lambda: self._calls.last_node(index))
        except RuntimeError:
            self._device._patches = False  # the next capture, and all others, are made without
            raise

    @property
    def node(self) -> int:
        return self._made.node

    def finished(self, buffers: Sequence[torch.Tensor]) -> Stager:
        return self._made.finished(buffers, self._device.stager(buffers))


def _by_torch(
    graph: torch.cuda.CUDAGraph, copied: Sequence[tuple[int, Source]], stager: Stager | None, inputs: Sequence[Any]
) -> None:
    if stager is not None:
        stager.copy(*[inputs[at] if source is None else source(inputs[at]) for at, source in copied])
    graph.replay()


def _copied_first(
    copied: Sequence[tuple[int, Source]],
    copy: Callable[..., object],
    launch: Callable[[list[Any]], object],
    inputs: list[Any],
) -> None:
    copy(*[inputs[at] if source is None else source(inputs[at]) for at, source in copied])
    launch(inputs)


def _aligned(
    index: int,
    copied: Sequence[tuple[int, int]],
    launch: Callable[[list[Any]], object],
    inputs: Sequence[Any],
    patches: Patches | None = None,
    strayed: Callable[[Sequence[int]], object] | None = None,
) -> None:
    """Launch once more, with the device current, and with copies of inputs that do not lie as the kernel reads them:
    each is one run of so many elements, in whatever order these stand, whose bytes may not be its values.  Likewise of
    those that are patched: what is copied here goes back to the allocator right behind the launch, as the program's own
    do, and serves what is launched after it on this stream."""
    held = list(inputs)
    with torch.cuda.device(index), torch.no_grad():
        for at, count in copied:
            if held[at].data_ptr() % staging.ALIGNED or held[at].is_conj() or held[at].is_neg():
                held[at] = held[at].as_strided((count,), (1,)).resolve_conj().resolve_neg().clone()
        if patches is not None:
            astray = [one for one in patches.inputs if not _may_be_read(patches, one, held[one.index])]
            for one in astray:
                value = held[one.index]
                lying = torch.empty_strided(one.size, one.stride, dtype=one.dtype, device=value.device)
                held[one.index] = lying.copy_(value)
            if strayed is not None and astray:
                strayed([one.index for one in astray])
        launch(held)


def _may_be_read(patches: Patches, one: Patched, value: torch.Tensor) -> bool:
    """As `may_be_read` of the native calls, which is asked once more behind it."""
    at = value.data_ptr()
    return (
        not value.is_conj()
        and not value.is_neg()
        and at % patches.aligned == 0
        and (tuple(value.size()), tuple(value.stride())) == (one.size, one.stride)
        and not overlaps(at, at + one.span, patches.written)
    )


def _refused(inputs: Sequence[Any]) -> None:
    torch.cuda.current_stream().synchronize()  # where the device has failed, torch says how
    raise RuntimeError("CUDA's driver refused to launch a recording whose inputs are copied within it")


_DRIVER = "libcuda.so.1"
#: what a kernel may take for granted of an address is what torch's allocator gives each tensor; a MiB is copied by a
#: GPU in about the time in which the host tells one kernel where it lies
_PATCHING = Limits(least=1 << 20, aligned=256)
_TRIES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)  # seconds between tries to make a pool
_PAUSES = (0.001, 0.003, 0.01, 0.02)  # seconds, in which other threads let go of a recording's memory
_ROUNDING = 511  # bytes by which a block may be larger than what was asked for
#: what `_Totals` has, by torch's names
_NAMES = (("reserved_bytes", "current"), ("reserved_bytes", "allocated"), ("allocated_bytes", "current"),
          ("allocated_bytes", "peak"), ("allocated_bytes", "allocated"))  # fmt: skip


class _Totals(NamedTuple):
    """What the allocator says of a device as a whole, in bytes; what is taken is counted since the process began."""

    reserved: int
    reserved_taken: int
    allocated: int
    allocated_most: int
    allocated_taken: int

    def most_until(self, later: _Totals) -> int:
        """How much was allocated at once since then, at most, where nothing of before was freed."""
        return max(min(later.allocated_taken - self.allocated_taken, later.allocated_most - self.allocated), 0)


def _quietly(function: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        function()


_handles = threading.local()  # `devices`: those of which this thread has a handle of cuBLAS


def _captures(streams: Iterable[int]) -> bool:
    """Whether any of `streams` is being recorded; to wait for the whole device would spoil that.

    Raises OSError where the driver does not say.
    """
    asked = ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing
    found = ctypes.c_int()
    for stream in streams:
        if status := asked(ctypes.c_void_p(stream), ctypes.byref(found)):
            raise OSError(f"cuStreamIsCapturing returned {status}")
        if found.value:
            return True
    return False


@contextlib.contextmanager
def _undisturbed(index: int) -> Iterator[None]:
    """Around a capture: no garbage collection (it may free what must not be freed then), and cuBLAS workspaces inside
    the recording and nowhere else."""
    with garbage.paused(), torch.cuda.device(index), _own_workspaces():
        yield


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Workspaces of cuBLAS that are made inside go at the end, and it finds none of before."""
    _compat.clear_cublas_workspaces()
    try:
        yield
    finally:
        _compat.clear_cublas_workspaces()


def _clear_frames(error: BaseException) -> None:
    traceback = error.__traceback__
    while traceback is not None:
        with contextlib.suppress(RuntimeError):  # a frame that is still running
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
