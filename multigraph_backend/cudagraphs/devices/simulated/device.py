"""A device without a GPU, on which a mistake about memory is a wrong number, as it would be on a GPU.

The runtime of recordings must know which memory is alive at every moment; what it gets wrong is silent until a kernel
writes over a tensor that somebody still reads.  `SimulatedDevice` serves the `Device` interface with ordinary CPU
tensors, so that CI finds such a mistake.

The pool is one buffer.  Kernels of a recording read and write the buffer at the addresses that the capture gave them,
and nothing else; taken and freed ranges are filled with `POISON`.  A tensor of the pool that the user holds is a CPU
tensor that shows a range of the buffer (`memory.py`): memory that is overwritten while a tensor still uses it
shows as garbage in that tensor.  A replay fails where a GPU would read what is gone: memory outside of the pool that
has died, a pool that was left.  Work on a stream that has not waited for the last work on the pool is an error too.
With `Segments` blocks lie as in torch's pools, else where best fit puts them.

A capture runs nothing: what it sees and refuses is said in `capture.py`.

Not simulated: bytes that the user changes through one storage are seen through another that overlaps it from the next
call of the device on.  A recording keeps the memory outside of the pool that it uses, which adds one to `use_count`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices import bracket
from multigraph_backend.cudagraphs.devices.device import (
    Captured,
    CaptureFailed,
    Device,
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
from multigraph_backend.cudagraphs.devices.patches import KERNEL, Described, Limits, Patched, Patches, overlaps
from multigraph_backend.cudagraphs.devices.poison import others
from multigraph_backend.cudagraphs.devices.simulated.arena import ArenaState, Segments
from multigraph_backend.cudagraphs.devices.simulated.capture import NOT_CAPTURED, Recorder, Told
from multigraph_backend.cudagraphs.devices.simulated.loans import Loan
from multigraph_backend.cudagraphs.devices.simulated.memory import POISON, Mapped, Memory, Pool, bytes_of, tensor_over
from multigraph_backend.cudagraphs.devices.simulated.running import Runner
from multigraph_backend.native import Calls
from multigraph_backend.process import garbage
from multigraph_backend.process.interruptions import from_outside, without_frames

#: beyond every address that a process can have
_FIRST_POOL = 1 << 48
_POOL_DISTANCE = 1 << 40

#: what the driver takes for each kernel of a graph, and takes at once
KERNEL_BYTES, PAGE = 1 << 12, 2 << 20

#: the calls that `fail_at` knows
CALLS = ("capture_begin", "run_in_pool", "allocate", "launch", "capture_end", "replay", "copy", "restore", "storage_at",
         "move_out", "fresh_storage", "new_pool", "leave", "wait_for", "finish")  # fmt: skip
#: those of them that the driver refuses while the stream of captures captures
_REFUSED = frozenset({"capture_begin", "run_in_pool", "replay", "copy", "restore", "move_out", "fresh_storage",
                      "new_pool", "empty_cache", "finish"})  # fmt: skip
#: and of these what other threads than the one that captures may do on streams of their own
_ELSEWHERE = frozenset({"copy", "fresh_storage"})
#: those of them that allocate
_ALLOCATING = frozenset({"allocate", "move_out", "fresh_storage", "new_pool"})


@dataclass(frozen=True)
class _State:
    pool: Pool
    arena: ArenaState


def _nothing_told(leaf: Told) -> torch.Tensor:
    raise AssertionError("a recording whose kernels are told where inputs lie was launched without")


class SimulatedRecording:
    """A `Graph`: kernels over the bytes of a pool."""

    def __init__(self, device: SimulatedDevice, recorder: Recorder) -> None:
        self._device = device
        self._pool = recorder.pool
        self._kernels = recorder.kernels
        self._outside = recorder.outside
        self.number = next(device._numbers)
        device._instantiate(self, len(recorder.kernels) * KERNEL_BYTES)
        self.destroyed = False

    def nodes(self) -> list[Described]:
        """Its kernels, as a driver tells of them."""
        return [Described(number, KERNEL, *kernel.described()) for number, kernel in enumerate(self._kernels)]

    def tell(self, patches: Patches) -> None:
        """Let kernels be told at each launch where inputs lie; these are not held any more."""
        for entry in patches.told:
            words = {word.parameter: (word.which, word.offset) for word in entry.words}
            self._kernels[entry.node.handle].tell(words)
        self._outside = {memory for kernel in self._kernels for memory in kernel.outside()}

    def reset(self) -> None:
        self._device.log.append(("reset", self.number))
        self._kernels = []
        self.destroyed = True

    def replay(self, told: Callable[[Told], torch.Tensor] = _nothing_told) -> None:
        """`told`: the tensors of what its kernels are told."""
        device = self._device
        if self.destroyed:
            raise AssertionError(f"recording {self.number} was destroyed")
        device._driver("replay", self.number)
        if any(memory.dead() for memory in self._outside):
            raise AssertionError(f"recording {self.number} uses memory outside of the pool that has died")
        if self._pool.left:
            raise AssertionError(f"recording {self.number} lives in a pool that was left")
        if any(loan.pool is self._pool for loan in device.loans):
            raise AssertionError(f"recording {self.number} may write over memory that is lent")
        if self._pool is device._pool and device.unowned():
            raise AssertionError(f"recording {self.number} may write over blocks that nobody owns")
        device._catch_up(device.stream())
        self._pool.timeline.work(device.stream(), "replay")
        device._memory.gather()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for kernel in self._kernels:
                kernel.run(told)
        device._memory.scatter()


class SimulatedDevice:
    """A `Device`.  For tests beside it: `log`, `calls`, `fail_at`, `set_stream`, `behind`, `synchronize`, and the
    switches.

    As with CUDA, whoever begins a capture has to end it: until then its stream captures, and the driver refuses most
    calls.
    """

    def __init__(
        self,
        pool_bytes: int = 1 << 20,
        granularity: int = 64,
        segments: Segments | None = None,
        device_bytes: int = 1 << 62,
    ) -> None:
        self.index = 0
        self.generation = -1  # `new_pool` makes it 0
        self.same_addresses: Callable[[Sequence[Any], Sequence[int | None], Sequence[int]], bool] = self._same_addresses
        self.own_addresses = False
        self.use_count: Callable[[int], int] = _compat.storage_use_count
        self.storage_address: Callable[[torch.UntypedStorage], int] = self._storage_address
        self.copy: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = self._copy
        #: what was asked of the driver: (call, detail), the last some thousands
        self.log: deque[tuple[str, Any]] = deque(maxlen=10_000)
        #: set it to have each failed capture begin a new pool, as one on a GPU may
        self.failures_spoil_the_pool = False
        #: bytes of the driver that the graphs take which are there, and that it has taken for them
        self._graphs_live = self._graphs_held = 0
        #: set it to have inputs patched
        self.patching: Limits | None = None
        #: microseconds that `time_copies` tells of
        self.copies_us: float | None = 0.0
        #: set it to make `capturing` say that the user records on his own
        self.user_captures = False
        #: set it to have the device finish nothing any more, as `record_event` tells
        self.stuck = False
        #: bytes of the device that others hold, and that torch's allocator has cached outside of pools; a pool that was
        #: left is among these until somebody asks for them
        self.ballast = self.cached = 0
        #: whether the pool in use lends, and what pools have lent, to `borrow`
        self.lends = False
        self.loans: list[Loan] = []
        self._device_bytes = device_bytes
        self._capacity = pool_bytes
        self._granularity, self._segments = granularity, segments
        #: the most that all pools together have ever had
        self.most_reserved = 0
        self._numbers = itertools.count()
        #: by generation
        self._pools: dict[int, Pool] = {}
        self._memory = Memory()
        self._recording_in: int | None = None  # the thread whose current stream is the one of captures
        self._stream_captures = False
        self._serves: int | None = None  # the thread that the pool serves
        self._begun_by: int | None = None  # the thread that began its last capture
        self._failures: dict[str, tuple[int, BaseException | None]] = {}
        self._thread = threading.local()
        self._owners: list[Mapped] = []
        #: work of the user's, by stream, that the device has not come to
        self._behind: dict[int, list[Callable[[], object]]] = {}
        #: storages that were moved, and the streams that are ordered behind their copies
        self._moving: list[tuple[StorageWeakRef, set[int]]] = []
        self._pool: Pool
        self.new_pool()
        self.log.clear()

    # ---------------------------------------------------------------- for tests

    @property
    def captures(self) -> bool:
        """Whether the stream of captures captures."""
        return self._stream_captures

    def fail_at(self, call: str, after: int = 0, error: BaseException | None = None) -> None:
        """Let driver call `call` (one of `CALLS`) fail once, after it has worked `after` times; with `error`, if given,
        as Ctrl-C does that arrives just before."""
        if call not in CALLS:
            raise ValueError(f"no driver call {call!r}; there are {', '.join(CALLS)}")
        self._failures[call] = after, error

    def calls(self, call: str) -> list[Any]:
        """The details of each `call` in the log."""
        return [detail for name, detail in self.log if name == call]

    def set_stream(self, stream: int) -> None:
        """Make `stream` the current stream of this thread."""
        self._thread.stream = stream

    def behind(self, stream: int, work: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Work of the user's on `stream`, which the device comes to when something waits for that stream.

        `work` is called with tensors over the memory where `tensors` lie now.  The user's stream is taken to wait for
        what has made them; it knows nothing of copies that the runtime has made since.
        """
        for weak, ordered in self._moving:
            if stream not in ordered and any(tensor.untyped_storage()._cdata == weak.cdata for tensor in tensors):
                raise AssertionError(f"race: work on stream {stream} with a tensor that is still being moved")
        places = [self._memory.reference(tensor) for tensor in tensors]
        self._behind.setdefault(stream, []).append(lambda: work(*(place.tensor() for place in places)))

    def synchronize(self) -> None:
        """Let the device come to all that was launched, as the user's own wait does."""
        for stream in list(self._behind):
            self._catch_up(stream)
        self._moving.clear()

    def _catch_up(self, stream: int) -> None:
        if works := self._behind.pop(stream, None):
            self._memory.gather()
            with torch.no_grad():
                for work in works:
                    work()
            self._memory.scatter()

    # ---------------------------------------------------------------- tensors

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return is_plain(tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"

    def address(self, tensor: torch.Tensor) -> int:
        return self.storage_address(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.itemsize

    def _storage_address(self, storage: torch.UntypedStorage) -> int:
        mapped = self._memory.of(storage)
        return storage.data_ptr() if mapped is None else mapped.pool.base + mapped.offset

    def _same_addresses(self, tensors: Sequence[Any], addresses: Sequence[int | None], indices: Sequence[int]) -> bool:
        with _compat.without_torch_function():
            return all(self.address(tensors[index]) == addresses[index] for index in indices)

    def prepare(self, inputs: int, outputs: int) -> None:
        """Nothing is compiled for it."""

    def unloader(self, outputs: Sequence[torch.Tensor]) -> None:
        """Outputs are copied by `copy`."""

    def time_copies(self, stage: Callable[..., object], sources: Sequence[torch.Tensor]) -> Callable[[], float | None]:
        return lambda: self.copies_us

    def take(self, calls: Calls) -> None:
        """Tensors are made, and recordings launched, as before."""

    def within(self, sources: Sequence[torch.Tensor]) -> Within | None:
        return None

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
        if patches is None:
            return None
        assert isinstance(graph, SimulatedRecording)
        graph.tell(patches)

        def launch(inputs: list[Any]) -> None:
            if stager is not None:
                which = zip(copied, sources, strict=True)
                stager.copy(*[inputs[at] if source is None else source(inputs[at]) for at, source in which])
            given = {one.index: inputs[one.index] for one in patches.inputs}
            astray = [one.index for one in patches.inputs if not self._may_be_read(patches, one, given[one.index])]
            for index in astray:
                given[index] = given[index].clone(memory_format=torch.preserve_format)
            if astray and strayed is not None:
                strayed(astray)
            tensors = [given[one.index] for one in patches.inputs]

            def told(leaf: Told) -> torch.Tensor:
                layout, there = leaf.layout, self._memory.reference(tensors[leaf.which])
                before = there.layout.offset * there.layout.dtype.itemsize + leaf.offset
                return replace(there, layout=replace(layout, offset=before // layout.dtype.itemsize)).tensor()

            graph.replay(told)

        return launch

    def _may_be_read(self, patches: Patches, one: Patched, value: torch.Tensor) -> bool:
        at = self.address(value)
        lies = (tuple(value.size()), tuple(value.stride())) == (one.size, one.stride)
        return lies and at % patches.aligned == 0 and not overlaps(at, at + one.span, patches.written)

    def elsewhere(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], object]:
        found: list[torch.Tensor] = []
        passed: list[torch.Tensor] = []  # stay alive: what is made next lies elsewhere
        distances = {0}
        for tensor in tensors:
            while True:
                twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
                distance = self.address(twin) - self.address(tensor)
                if distance not in distances:
                    break
                passed.append(twin)
            distances.add(distance)
            found.append(twin)
        return found, None

    def nodes(self, graph: Graph) -> list[Described]:
        assert isinstance(graph, SimulatedRecording)
        return graph.nodes()

    def stager(self, buffers: Sequence[torch.Tensor], as_bytes: bool = True) -> Stager:
        kept = list(buffers)
        return Stager(lambda *sources: self._copy(kept, list(sources)))

    def _copy(self, destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._driver("copy", len(destinations))
        self._catch_up(self.stream())
        found = [self._memory.of(tensor.untyped_storage()) for tensor in (*destinations, *sources)]
        for pool in {mapped.pool for mapped in found if mapped is not None} or {self._pool}:
            if not self.user_captures:  # else it is part of the caller's graph, and he orders that
                pool.timeline.work(self.stream(), "copy")
        self._memory.gather()
        with torch.no_grad():
            for destination, source in zip(destinations, sources, strict=True):
                self._memory.reference(destination).tensor().copy_(self._memory.reference(source).tensor())
        self._memory.scatter()

    def make(self, layout: Layout, storage: torch.UntypedStorage) -> torch.Tensor:
        return tensor_over(layout, storage)

    def maker(self, layout: Layout) -> Callable[[torch.UntypedStorage], torch.Tensor]:
        return lambda storage: tensor_over(layout, storage)

    def maker_over(self, layout: Layout, storage: torch.UntypedStorage) -> Callable[[], torch.Tensor]:
        return lambda: tensor_over(layout, storage)

    def storage_at(self, address: int, nbytes: int) -> torch.UntypedStorage:
        if nbytes == 0:
            return torch.UntypedStorage(0, device="cpu")
        self._driver("storage_at", nbytes)
        for pool in self._pools.values():
            if pool.base <= address and address + nbytes <= pool.base + pool.arena.capacity:
                self._memory.gather()
                return self._memory.map(pool, address - pool.base, nbytes, None)
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not in a pool")

    def move_out(self, storage: torch.UntypedStorage) -> bool:
        mapped = self._memory.of(storage)
        if mapped is None or mapped.origin is None:
            return False
        self._driver("move_out", mapped.nbytes)
        self._catch_up(self.stream())
        self._moving.append((StorageWeakRef(storage), {self.stream()}))
        mapped.pool.timeline.work(self.stream(), "move_out")
        self._memory.gather()
        self._memory.scatter()
        del self._memory.mapped[storage._cdata]
        if mapped.frees:
            mapped.pool.free(mapped.offset)
        return True

    def fresh_storage(self, nbytes: int) -> torch.UntypedStorage:
        self._driver("fresh_storage", nbytes)
        storage = torch.UntypedStorage(nbytes, device="cpu")
        bytes_of(storage).fill_(POISON)
        return storage

    # ---------------------------------------------------------------- the pool

    def empty_state(self) -> PoolState:
        return _State(self._pool, ArenaState())

    def restore(
        self, state: PoolState, blocks: Collection[int], owned: Sequence[tuple[int, int]] = ()
    ) -> list[torch.UntypedStorage]:
        owners = [self.storage_at(address, nbytes) for address, nbytes in owned]
        self._driver("restore", tuple(sorted(blocks)))
        pool = self._pool
        if not isinstance(state, _State) or state.pool is not pool:
            raise AssertionError("restore to a state of another pool")
        if any(loan.pool is pool for loan in self.loans):
            raise AssertionError("restore while memory of the pool is lent")
        if self.unowned():
            raise AssertionError("restore while blocks that nobody owns are allocated in the pool")
        wanted = {address - pool.base for address in blocks}
        kept = {offset: nbytes for offset, nbytes in state.arena.blocks if offset in wanted}
        owning = [self._memory.mapped[storage._cdata] for storage in owners]
        if len(kept) < len(wanted):
            raise AssertionError(f"restore with blocks at offsets {sorted(wanted - set(kept))}, which the state lacks")
        if len({owner.offset for owner in owning} & set(kept)) < len(owning):
            raise AssertionError("restore with owners that are not over one of its blocks each")
        self._memory.gather()
        pool.poison([(0, pool.arena.capacity)], kept.items())
        pool.arena.restore(ArenaState(tuple(kept.items())))
        self._owners = owning
        self._memory.scatter()
        return owners

    def lend(self, on: bool) -> bool:
        self.log.append(("lend", on))
        self.lends = on
        return on

    def lent_bytes(self) -> int:
        return self._lent_by(self._pool)

    def _lent_by(self, pool: Pool) -> int:
        return sum(loan.nbytes for loan in self.loans if loan.pool is pool)

    def borrow(self, nbytes: int) -> Loan | None:
        """What an allocation outside of the pool gets of it at out-of-memory: None where it lends nothing so large."""
        if not self.lends:
            return None
        self._memory.gather()
        return Loan.of(self._pool, nbytes, self.loans)

    def poison(self, kept: Iterable[tuple[int, int]]) -> None:
        pool = self._pool
        self._memory.gather()
        ranges = others([(pool.base, pool.arena.capacity)], kept)
        pool.poison([(address - pool.base, nbytes) for address, nbytes in ranges], ())
        self._memory.scatter()

    def pool_bytes(self) -> int:
        return self._pool.held

    def reserved_bytes(self) -> int:
        return self.cached + sum(pool.held for pool in self._pools.values())

    def total_bytes(self) -> int:
        return self._device_bytes

    def free_bytes(self) -> int:
        return self._device_bytes - self.ballast - self.reserved_bytes()

    def cached_bytes(self) -> int:
        return self.cached + sum(pool.held - sum(pool.arena.blocks.values()) for pool in self._pools.values())

    def empty_cache(self) -> None:
        self._driver("empty_cache")
        self.cached = 0

    trim = empty_cache

    def use(self, nbytes: int) -> None:
        """Code that runs takes so much memory for a moment, from the pool where that serves what it allocates, else
        ordinary memory, which may be cached.  Raises `torch.OutOfMemoryError` where that is not there."""
        if self._serves == threading.get_ident():
            if not self._stream_captures:
                self._memory.gather()
            self._pool.arena.free(self._pool.allocate(nbytes))
        elif nbytes > self.cached + self.free_bytes():
            raise torch.OutOfMemoryError(f"simulated device: {nbytes} bytes are not free")
        else:
            self.cached = max(self.cached, nbytes)

    def _grew(self) -> None:
        self.most_reserved = max(self.most_reserved, self.reserved_bytes())

    def pools(self) -> tuple[HeldPool, ...]:
        return tuple(
            HeldPool(generation, (0, generation + 1), pool.held, self._lent_by(pool))
            for generation, pool in sorted(self._pools.items())
        )

    def graph_bytes(self) -> int:
        return self._graphs_held

    def _instantiate(self, recording: SimulatedRecording, nbytes: int) -> None:
        self._graphs_live += nbytes
        self._graphs_held = max(self._graphs_held, -(-self._graphs_live // PAGE) * PAGE)
        weakref.finalize(recording, self._destroyed, nbytes).atexit = False

    def _destroyed(self, nbytes: int) -> None:
        self._graphs_live -= nbytes

    def new_pool(self) -> None:
        self._driver("new_pool")
        if self.lends:
            raise AssertionError("a pool that lends is left")
        self.generation = max(self._pools, default=-1) + 1
        self._owners = []
        base = _FIRST_POOL + self.generation * _POOL_DISTANCE
        self._pool = self._pools[self.generation] = Pool(
            base, self._capacity, self._granularity, self._segments, self.free_bytes, self._grew
        )

    def generations(self) -> Collection[int]:
        return tuple(self._pools)

    def return_to(self, generation: int) -> None:
        self.generation, self._pool, self._owners = generation, self._pools[generation], []
        for later in [number for number in self._pools if number > generation]:
            self.leave(later)

    def leave(self, generation: int) -> None:
        if generation == self.generation:
            raise AssertionError("the pool in use is left")
        self._driver("leave", generation)
        pool = self._pools.pop(generation)
        self._memory.gather()
        alive = [
            (mapped.offset, mapped.nbytes)
            for mapped in self._memory.mapped.values()
            if mapped.frees and mapped.pool is pool
        ]
        alive += [(loan.offset, loan.nbytes) for loan in self.loans if loan.pool is pool]
        pool.poison([(0, pool.arena.capacity)], alive)
        pool.left = True
        self._memory.scatter()

    # ---------------------------------------------------------------- running and recording

    def run_in_pool(self, function: Callable[[], Any]) -> Any:
        self._driver("run_in_pool")
        self._catch_up(self.stream())
        self._pool.timeline.work(self.stream(), "run_in_pool")
        self._serves = threading.get_ident()
        try:
            with Runner(self._pool, self._memory):
                return function()
        finally:
            self._serves = None
            self._memory.gather()
            self._memory.scatter()

    def unowned(self) -> dict[int, int]:
        self._memory.gather()
        return {
            mapped.pool.base + mapped.offset: mapped.nbytes
            for mapped in self._memory.mapped.values()
            if mapped.frees and mapped.pool is self._pool
        }

    def capture(
        self,
        function: Callable[[], Any],
        outputs: Callable[[Any], Sequence[torch.Tensor]],
        random: bool = False,
        generators: Sequence[torch.Generator] = (),
        within: bool = False,
        read: bool = False,
    ) -> Captured:
        pool, arena = self._pool, self._pool.arena
        pool.timeline.check(self.stream(), "capture")
        if self._stream_captures:
            raise CaptureFailed(f"{NOT_CAPTURED}: a capture")
        self._memory.gather()
        state, high_water = arena.state(), arena.high_water
        recorder = Recorder(pool, self._memory, self._owners, self.is_on_device, self._driver)

        def begin() -> None:
            self._driver("capture_begin")
            self._stream_captures, self._begun_by = True, threading.get_ident()

        def run() -> Any:
            self._serves = threading.get_ident()
            with recorder:
                return function()

        def end() -> None:
            self._serves = None
            self._driver("capture_end")
            self._stream_captures = False

        self._recording_in = threading.get_ident()
        try:
            with garbage.paused():
                outcome = bracket.captured(begin, run, end, lambda: self._stream_captures)
        finally:
            self._recording_in = self._serves = None
        problem, result = outcome.problem, outcome.result
        del outcome
        blocks: dict[int, int] = {}
        if problem is None:
            try:
                blocks = recorder.finish(outputs(result))
            except BaseException as error:
                problem = error
        self._owners = []
        if problem is not None:
            del result
            try:
                for handle in recorder.made:
                    self._memory.mapped.pop(handle, None)
                arena.restore(state)
                arena.high_water = high_water
                if self.failures_spoil_the_pool:
                    self.new_pool()
                if from_outside(problem):
                    raise problem
                without_frames(problem)
                raise CaptureFailed(f"{type(problem).__name__}: {problem}") from problem
            finally:
                del problem  # it holds this frame
        # what was freed of others holds their bytes until the recording is replayed
        pool.poison(recorder.touched, recorder.freed)
        self._memory.scatter()
        return Captured(
            graph=SimulatedRecording(self, recorder),
            result=result,
            blocks={pool.base + offset: nbytes for offset, nbytes in blocks.items()},
            freed=frozenset(pool.base + offset for offset, _ in recorder.freed),
            state=_State(pool, arena.state()),
            peak=recorder.peak,
            grown=arena.high_water - high_water,
        )

    def capturing(self) -> bool:
        return self.user_captures or self._recording_in == threading.get_ident()

    # ---------------------------------------------------------------- streams

    def stream(self) -> int:
        stream: int = getattr(self._thread, "stream", 0)
        return stream

    def wait_for(self, stream: int) -> None:
        self._driver("wait_for", (self.stream(), stream))
        self._catch_up(stream)
        for _, ordered in self._moving:
            if stream in ordered:
                ordered.add(self.stream())
        for pool in self._pools.values():
            pool.timeline.wait(self.stream(), stream)

    def settle(self, seconds: float) -> bool:
        self.log.append(("settle", seconds))
        if not self.stuck:
            self.synchronize()
        return not self.stuck

    def finish(self) -> None:
        self._catch_up(self.stream())
        self._moving = [entry for entry in self._moving if self.stream() not in entry[1]]
        self._driver("finish")  # what fails is something that was launched before

    def record_event(self, stream: int) -> Callable[[], bool] | None:
        return None if self.user_captures else lambda: not self.stuck

    # ---------------------------------------------------------------- beneath

    def _driver(self, call: str, detail: Any = None) -> None:
        """What each call of the simulated driver passes: it is logged, and may fail."""
        self.log.append((call, detail))
        elsewhere = _ELSEWHERE if self._begun_by != threading.get_ident() else frozenset()
        if self._stream_captures and call in _REFUSED - elsewhere:
            raise DeviceFailed(f"{NOT_CAPTURED}: {call}")
        if call in self._failures:
            after, error = self._failures[call]
            self._failures[call] = after - 1, error
            if not after:
                del self._failures[call]
                if error is not None:
                    raise error
                raise (torch.OutOfMemoryError if call in _ALLOCATING else DeviceFailed)(f"injected failure of {call}")


if TYPE_CHECKING:
    _device: Device = SimulatedDevice()
