"""What the runtime of recordings needs of a device: an interface, so that it runs without a GPU too.

`cuda.py` serves it with CUDA, `simulated/` with CPU tensors whose recordings live in a real arena, where a
mistake about what is alive shows up as a wrong number.  Everything that touches a driver or an allocator is behind this
interface; what decides (`recordings/tree.py`) and what is generated (`recordings/replay.py`) is above it.

Tensors are torch tensors on both sides.  A *storage* is a `torch.UntypedStorage`; its *handle* is its `_cdata`, which
names it in the calls that must be cheap.  An *address* is a number of bytes in the device's memory.

A recording's outputs live in the device's *pool* at addresses that do not change.  The runtime owns those blocks by
address: once `capture` has returned, no storage frees pool memory by dying; `free` does, and `restore` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from multigraph_backend.cudagraphs.devices.patches import Described, Limits, Patches
from multigraph_backend.native import Calls


class CaptureFailed(Exception):
    """A recording could not be made.  The device is as it was before, and what is in the pool too."""


class DeviceFailed(Exception):
    """A call of the driver failed outside of a capture."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage: sizes, strides and offset in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        size, stride = tuple(map(int, tensor.size())), tuple(map(int, tensor.stride()))
        return cls(size, stride, int(tensor.storage_offset()), tensor.dtype)

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last element."""
        if 0 in self.size:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether kernels see all there is of `tensor`: of its own class, or of one that changes what Python does with it
    and nothing beneath (weights of vLLM and bitsandbytes, say)."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def overrides_functions(tensor: torch.Tensor) -> bool:
    """Whether what Python asks of `tensor` is answered by its class, in `__torch_function__`."""
    own = type(tensor).__torch_function__
    return type(tensor) is not torch.Tensor and own is not torch.nn.Parameter.__torch_function__


class Graph(Protocol):
    """One recording as the driver knows it."""

    def replay(self) -> None:
        """Launch it on the current stream of the calling thread."""

    def reset(self) -> None:
        """Destroy it; it may still be running, and is never launched again."""


class PoolState(Protocol):
    """What the pool's allocator looked like at one moment; opaque."""


@dataclass
class Captured:
    """What `capture` returns.

    `result`: what the captured function returned.  `blocks`: address and bytes of each block that is still allocated
    in the pool because of this capture (outputs), now owned by the runtime.  `freed`: addresses of blocks whose owners
    (see `restore`) died during the capture.  `state`: the pool right after.

    `peak`: bytes of the pool that it had allocated at once, at most; what was alive before is not counted.  An upper
    bound where the allocator does not tell.  `grown`: bytes by which the allocator's reserved memory grew meanwhile.
    """

    graph: Graph
    result: Any
    blocks: dict[int, int]
    freed: frozenset[int]
    state: PoolState
    peak: int = 0
    grown: int = 0


@dataclass(frozen=True)
class HeldPool:
    """One pool as its allocator knows it.

    `id`: as snapshots of memory name it.  `held`: bytes reserved of the device.  `lent`: those that serve others now.
    """

    generation: int
    id: tuple[int, int]
    held: int
    lent: int


#: what is copied of an input: the part of it that has each element once, from its first element on; None: all of it
Source = Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class Stager:
    """What copies the inputs of a recording into its buffers.

    `copy`: hot: a function of tensors, one for each buffer and in its layout, that copies each into its buffer.
    `kernel`: where that is one launch of a kernel, what the device launches; opaque.
    """

    copy: Callable[..., object]
    kernel: Any = None


class Within(Protocol):
    """What copies inputs within a recording; see `Device.within`.  `node`: the driver's handle of it, once launched."""

    @property
    def node(self) -> int: ...

    def launch(self, buffers: Sequence[torch.Tensor]) -> None:
        """In the capture: be the next thing that it does.  Raises RuntimeError where that cannot be."""

    def finished(self, buffers: Sequence[torch.Tensor]) -> Stager:
        """After the capture: what copies into `buffers`, which lie over the same memory."""


class Device(Protocol):
    """A device and its pool for recordings.  All calls but `same_addresses` and `use_count` come under one lock.

    The callables below that are marked hot are looked up once and called per call of a compiled function.
    """

    index: int

    # ---------------------------------------------------------------- tensors

    #: hot: (tensors, addresses, indices) -> whether tensors[i] lies at addresses[i] for each i in indices
    same_addresses: Callable[[Sequence[Any], Sequence[int | None], Sequence[int]], bool]
    #: hot: handle of a storage -> how many tensors and storage objects refer to it
    use_count: Callable[[int], int]
    #: whether addresses are those that tensors tell of, as native code reads them
    own_addresses: bool
    #: hot: where a storage's first byte lies
    storage_address: Callable[[torch.UntypedStorage], int]
    #: hot: (destinations, sources): copies each source into its destination in few launches
    copy: Callable[[list[torch.Tensor], list[torch.Tensor]], object]

    def take(self, calls: Calls) -> None:
        """Use native calls from now on, in what is made for recordings."""

    def prepare(self, inputs: int, outputs: int) -> None:
        """Make ready what `stager` and `unloader` use for recordings that copy up to so many inputs, and hand out
        copies of up to so many outputs; may compile."""

    def stager(self, buffers: Sequence[torch.Tensor], as_bytes: bool = True) -> Stager:
        """What copies inputs into `buffers`.  `as_bytes`: whether an input's bytes are its values, as they are not of
        one that is marked as conjugate or negative."""

    def unloader(self, outputs: Sequence[torch.Tensor]) -> Callable[..., object] | None:
        """hot: what copies `outputs`, runs of words that stay where they are, to the storages that it is given, one for
        each, in one launch; None where `copy` does it."""

    def within(self, sources: Sequence[torch.Tensor]) -> Within | None:
        """What copies inputs that lie as `sources` do as a part of the recording that is captured next; None where they
        are copied before it."""

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
        """hot: a function of inputs that copies those at the positions `copied`, each as `sources` says, with `stager`
        and launches `graph` in one native call; None where there is none.  `random`: its code draws random numbers.
        `patches`: what kernels are told of other inputs; there is a function then.  An input that does not lie as they
        say is copied to where it does, after `strayed` was called with the positions of all such."""

    # ---------------------------------------------------------------- inputs that are read where they lie

    #: which inputs may be patched (see `patches`); None where kernels of a recording cannot be told where they lie
    patching: Limits | None

    def elsewhere(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], object]:
        """Tensors that lie as these do, at other addresses on `patching.aligned` bytes, each at another distance from
        its own, and what keeps their memory.  Nothing is ever read or written there: they may overlap."""

    def nodes(self, graph: Graph) -> list[Described]:
        """What the driver knows of a graph that was captured to be read, or with a part that is changed.  Raises
        `patches.Unreadable`."""

    def time_copies(self, stage: Callable[..., object], sources: Sequence[torch.Tensor]) -> Callable[[], float | None]:
        """Copy `sources` with `stage`, a stager; a function that tells how many microseconds of the device's own time
        it took, None while that is not known."""

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a dense tensor in this device's memory, which recordings may read; see `is_plain`."""

    def address(self, tensor: torch.Tensor) -> int:
        """Where its first element lies."""

    def make(self, layout: Layout, storage: torch.UntypedStorage) -> torch.Tensor:
        """One tensor as `maker` makes them, where no more of its layout are to be made."""

    def maker(self, layout: Layout) -> Callable[[torch.UntypedStorage], torch.Tensor]:
        """hot: a function that makes a new tensor of `layout` over a storage, as if freshly allocated (no autograd
        history, not a view of anything)."""

    def maker_over(self, layout: Layout, storage: torch.UntypedStorage) -> Callable[[], torch.Tensor]:
        """hot: as `maker` over this one storage, which it holds; for what autograd calls, so never under
        `torch.inference_mode`."""

    def storage_at(self, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage over memory of the pool, which it neither owns nor frees.  Two of them may overlap."""

    def move_out(self, storage: torch.UntypedStorage) -> bool:
        """Give `storage`, and so every tensor that shares it, memory of its own outside of the pool, with the bytes it
        has now; its old block stays as it is.  False if this storage cannot be moved (nothing has changed then);
        storages that came out of a capture can."""

    def fresh_storage(self, nbytes: int) -> torch.UntypedStorage:
        """hot: new memory outside of the pool."""

    # ---------------------------------------------------------------- the pool

    def empty_state(self) -> PoolState:
        """The pool without any block."""

    def restore(
        self, state: PoolState, blocks: Collection[int], owned: Sequence[tuple[int, int]] = ()
    ) -> list[torch.UntypedStorage]:
        """Make the pool's allocator what it was at `state`, with the blocks at the addresses `blocks` allocated and no
        others (`blocks` are among those of `state`).  Bytes are not touched where a block stays allocated.

        `owned`: address and bytes of some of `blocks`.  Returns an *owner* for each, a storage over it, which is held
        by nobody else: during the next capture, and then only, its death frees the block, for the rest of the capture
        to use.

        Raises `DeviceFailed`; a new pool is begun then.
        """

    def lend(self, on: bool) -> bool:
        """Whether free memory of the pool in use, which `restore` has just brought about, serves allocations outside of
        it from now on, on any stream, where they would fail otherwise; False too where it cannot."""

    def lent_bytes(self) -> int:
        """Bytes of the pool in use that do so, with those that were freed and that the device may still use."""

    def poison(self, kept: Iterable[tuple[int, int]]) -> None:
        """Fill the pool with bytes that make wrong numbers, but for `kept`, ranges of address and bytes."""

    def pool_bytes(self) -> int:
        """Bytes that the pool has reserved."""

    def reserved_bytes(self) -> int:
        """The same, and what the allocator has reserved for others; a quick question."""

    def total_bytes(self) -> int:
        """All memory of the device that this process may use."""

    def free_bytes(self) -> int:
        """Of that, what nobody has reserved."""

    def cached_bytes(self) -> int:
        """Bytes that the allocator has reserved, for pools or others, and that no block is allocated in."""

    def empty_cache(self) -> None:
        """Give back to the device what is cached outside of pools that are in use.  The device has been waited for."""

    def trim(self) -> None:
        """The same before a recording grows a pool, as far as nothing is kept in the cache for a purpose."""

    #: which pool is in use, counted from 0.  A failed capture may leave a pool in which nothing can be recorded any
    #: more; `capture` then begins a new one.  What was recorded in the old one lives on there, out of the way of others
    generation: int

    def pools(self) -> tuple[HeldPool, ...]:
        """All pools that are there, by generation.  Quick while nobody has reserved memory since the last time."""

    def graph_bytes(self) -> int:
        """Bytes by which the device's free memory fell while graphs were instantiated, in all: what the driver took for
        them.  It takes whole pages, of 2 MiB mostly, and keeps them for later graphs; so most graphs cost nothing that
        can be seen, and nothing is told of one."""

    def new_pool(self) -> None:
        """Begin an empty pool, of a generation after all that are there; the old one stays until `leave`."""

    def generations(self) -> Collection[int]:
        """The pools that are there: the one in use, and those that were not left."""

    def return_to(self, generation: int) -> None:
        """Go on in an old pool that was not left, and leave all that were begun since, with nothing alive in them."""

    def leave(self, generation: int) -> None:
        """Give an old pool's memory back: nothing recorded in it is left, and nothing in it is alive."""

    # ---------------------------------------------------------------- running and recording

    def run_in_pool(self, function: Callable[[], Any]) -> Any:
        """Run `function` with all that it allocates on the calling thread coming from the pool, which `restore` has put
        into the state to begin in.  Nothing of that is owned: its storages free it by dying, as ever.  Until all of it
        is free, which `unowned` tells, nothing may be captured, restored or replayed here.

        Raises what `function` raises.
        """

    def unowned(self) -> Mapping[int, int]:
        """Address and bytes of each block that is allocated in the pool and not owned by the runtime; not a quick
        question."""

    def capture(
        self,
        function: Callable[[], Any],
        outputs: Callable[[Any], Sequence[torch.Tensor]],
        random: bool = False,
        generators: Sequence[torch.Generator] = (),
        within: bool = False,
        read: bool = False,
    ) -> Captured:
        """Record what `function` launches; nothing of it runs.  What it allocates comes from the pool, and what it
        frees goes back there; of the result's tensors, `outputs` names those that keep their memory.  `random`: it
        draws random numbers, so the device's generator cannot serve other threads meanwhile.  `generators`: others that
        it draws from.  `within`: a part of it is changed at each launch.
        `read`: its nodes are looked at, and it is never launched.

        Raises `CaptureFailed` with the cause when anything in it fails, or when memory of the pool is still held by
        something other than `outputs`.  The pool, or a new one, is then fit for `restore` and another capture.
        """

    def capturing(self) -> bool:
        """hot: whether the caller is recording on the current stream himself."""

    # ---------------------------------------------------------------- streams

    def stream(self) -> int:
        """hot: the current stream of the calling thread, as a number."""

    def wait_for(self, stream: int) -> None:
        """Let the current stream wait for all that was launched on `stream` so far."""

    def record_event(self, stream: int) -> Callable[[], bool] | None:
        """Record an event behind what was launched on `stream` so far: a function that tells whether the device has
        come to it, and waits for nothing; None where that cannot be known (the stream is being recorded).  Neither
        disturbs a capture of anybody.  The calling thread is multigraph's own, and stays on this device."""

    def settle(self, seconds: float) -> bool:
        """Wait for all that was launched on any stream, for so long at most; whether it is done.  False at once while
        a stream is being recorded, as far as that can be known: it would spoil that."""

    def finish(self) -> None:
        """Wait for what was launched on the current stream."""
