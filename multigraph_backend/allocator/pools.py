"""`pool()`: memory of the extension for one model, at any time, while the process's allocator stays what it is.

Three kinds, opened alike by `with`:

- torch's allocator is current: a `torch.cuda.MemPool` whose segments the extension supplies, each pool by functions of
  its own, so that each can have a limit.  The blocks in them are torch's: statistics, snapshots, IPC go on working, and
  reuse inside captures is torch's flag.
- the extension is installed: a pool of the extension.  torch's MemPool refuses a pluggable allocator.
- the extension cannot be used: torch's MemPool alone, or nothing where there is no GPU; one line says so.

A pool that was made with `sleeps` can give its pages back and have them again, at the same addresses (`Pool.sleep`).

Invariants: while a pool of torch's holds a segment of the extension, what frees that segment is there; while a pool
sleeps, nothing opens it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import torch

from multigraph_backend import _compat, events
from multigraph_backend.allocator import ended_pools, installing, library, sleeping
from multigraph_backend.allocator.library import Block, Library, Refused
from multigraph_backend.allocator.sleeping import Asleep, Keep, Sleeper
from multigraph_backend.allocator.statistics import segments_of

PoolId = tuple[int, int]

# torch numbers its pools from 1 in either place; ours are told apart from all of them
_OURS = 1 << 62
_numbers = itertools.count(1)


def new_id() -> PoolId:
    """The id of a pool of the extension that nothing else in this process has, also not a pool of torch's."""
    return _OURS + next(_numbers), 0


class _Kind(Protocol):
    """What a pool stands on."""

    id: PoolId | None
    mem_pool: torch.cuda.MemPool | None
    index: int

    def opened(self) -> contextlib.AbstractContextManager[None]: ...
    def reserved(self) -> tuple[int, int]: ...
    def lent(self) -> int: ...
    def ranges(self) -> tuple[sleeping.Range, ...]: ...
    def ranges_asleep(self) -> tuple[sleeping.Range, ...]:
        """Those, also after `close`, that sleep."""

    def sleep(self, keep: bool) -> int: ...
    def wake(self) -> int: ...
    def empty_cache(self) -> int: ...
    def close(self) -> None: ...


class Pool:
    """A pool of device memory; what the thread allocates inside `with` comes from it.  Made by `pool()`.

    It may be opened again and again, also one inside the other, and `torch.cuda.graph(graph, pool=pool.id)` captures
    into it.  Tensors may outlive it; its memory is given back when it is closed or gone, and they are gone.
    """

    def __init__(self, kind: _Kind, reason: str | None, sleeps: bool = False) -> None:
        self.reason = reason
        """Why the extension does not supply its memory; None if it does."""
        self._kind, self._sleeps = kind, sleeps
        self._lock = threading.Lock()  # of the two that follow
        self._open = 0
        self._asleep = False
        self._opened = threading.local()
        self._close = weakref.finalize(self, _end, kind)
        self._close.atexit = False

    @property
    def id(self) -> PoolId | None:
        """As `torch.cuda.graph` takes it; None without a GPU.  Raises `Asleep` while it sleeps."""
        self._awake()
        return self._kind.id

    @property
    def mem_pool(self) -> torch.cuda.MemPool | None:
        """torch's object, where torch's allocator is current.  Raises `Asleep` while it sleeps."""
        self._awake()
        return self._kind.mem_pool

    @property
    def reserved_bytes(self) -> int:
        """Bytes of segments that the extension supplies to it now; 0 where it supplies none, or while it sleeps."""
        return self._kind.reserved()[0]

    @property
    def max_reserved_bytes(self) -> int:
        """The most that these have been."""
        return self._kind.reserved()[1]

    @property
    def lent_bytes(self) -> int:
        """Bytes of it that serve others, with `use_on_oom`, or did and are still in use on the device.

        While it is not 0, no graph that was captured into the pool may be replayed: it would write over them.  Known
        where the extension is installed; 0 elsewhere, also where torch's own allocator has lent something.
        """
        return self._kind.lent()

    def __enter__(self) -> Pool:
        if not self._close.alive:
            raise RuntimeError(_CLOSED)
        opened = self._kind.opened()
        with self._lock:
            if self._asleep:
                raise Asleep(_WAKE_FIRST)
            self._open += 1
        try:
            opened.__enter__()
        except BaseException:
            self._closed()
            raise
        self._stack().append(opened)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._stack().pop().__exit__(kind, error, traceback)
        finally:
            self._closed()

    def _closed(self) -> None:
        with self._lock:
            self._open -= 1

    def _awake(self) -> None:
        if self._asleep:
            raise Asleep(_WAKE_FIRST)

    @property
    def asleep(self) -> bool:
        """Whether its pages are the device's now."""
        return self._asleep

    def sleep(self, keep: Keep = "host") -> int:
        """Give its pages back to the device and keep its addresses; bytes.  `wake()` brings them back.

        What lies in it (parameters, buffers, what a graph that was captured into it uses) may not be used before the
        wake, and is valid then, with its views, recordings and CUDA graphs.  Tensors may die meanwhile.  keep: "host"
        copies the contents to pinned memory of the host before, and back after; with "nothing" they are undefined after
        the wake (with MULTIGRAPH_DEBUG=poison: NaN).

        The device is waited for.  Raises `Asleep`, and has changed nothing, where it sleeps already, is open (`with`),
        is used by a capture that is under way, or by a call of compiled code, or where the host has no memory for the
        contents; RuntimeError where it was not made with `sleeps=True`, or the extension does not supply its memory.
        """
        keeps = sleeping.checked(keep)
        if not self._sleeps:
            raise RuntimeError("this pool cannot sleep: make it with pool(sleeps=True)")
        if self.reason is not None:
            raise RuntimeError(f"this pool cannot sleep, for its memory is not the extension's: {self.reason}")
        with self._lock:
            if not self._close.alive:
                raise RuntimeError(_CLOSED)
            if self._asleep:
                raise Asleep("the pool sleeps already")
            if self._open:
                raise Asleep("the pool is open: what is allocated now goes there")
            sleeper = Sleeper(self._kind.index, self._kind.ranges(), keeps)
            given = sleeping.fall_asleep(self._kind, sleeper, lambda: self._kind.sleep(keeps))
            self._asleep = True
            return given

    def wake(self) -> int:
        """Map new pages at the addresses of a pool that sleeps, with the contents that were kept; bytes.

        Raises `Asleep` where it does not sleep, or where the device has not enough memory free: then it sleeps on, what
        was kept is kept, and it can be tried again.  RuntimeError where it was closed: one that slept then never wakes.
        """
        with self._lock:
            if not self._close.alive:
                raise RuntimeError("this pool is closed: what is in it may only die" if self._asleep else _CLOSED)
            if not self._asleep:
                raise Asleep("the pool does not sleep")
            brought = self._kind.wake()
            self._asleep = False
            sleeping.woken(self._kind)
            return brought

    def empty_cache(self) -> int:
        """Give its cached segments back to the driver, also while it is held; bytes.

        Nothing of a pool that is open (`with`), or into which something was captured: a replay may use it again.
        Where torch's allocator is current it is `torch.cuda.empty_cache()`, which leaves pools that are held, and what
        that gave back of this one.  Pinned memory of the host that is kept for the next sleep goes too.
        """
        return self._kind.empty_cache()

    def close(self) -> None:
        """Give it up.  Its memory goes back as soon as no tensor is in it.  One that sleeps never wakes again: what is
        still in it may only die."""
        self._close()

    def __reduce__(self) -> Any:
        raise TypeError("a pool is its process's, and neither copied nor pickled: make another with allocator.pool()")

    def _stack(self) -> list[contextlib.AbstractContextManager[None]]:
        stack: list[contextlib.AbstractContextManager[None]] = self._opened.__dict__.setdefault("stack", [])
        return stack


def _end(kind: _Kind) -> None:
    kind.close()
    sleeping.ended(kind, kind.ranges_asleep)


_WAKE_FIRST = "the pool sleeps: wake it first"
_CLOSED = "this pool is closed"


def pool(
    *,
    use_on_oom: bool = False,
    sleeps: bool = False,
    limit: int | None = None,
    reuse_in_captures: bool = False,
    device: torch.device | int | None = None,
) -> Pool:
    """A pool of the extension's memory, for `with`.  Works at any time; starts CUDA.

    use_on_oom: when the device is out of memory, free blocks of this pool serve allocations outside of it, also those
    that graphs captured into it use: replay none of these while `Pool.lent_bytes` is not 0.
    sleeps: `Pool.sleep` can give its memory back for a while; its tensors cannot be shared with other processes then.
    limit: bytes of segments that it may hold; a pool of torch's without the extension has none.
    reuse_in_captures: switch on torch's own reuse inside captures (`graph_capture_record_stream_reuse`), for the whole
    process.  device: the current one.

    Raises ValueError for a limit that is no positive number, and for `sleeps` with `use_on_oom`, for memory that others
    use cannot sleep; RuntimeError where the driver maps no memory and the pool is to sleep.  Where the extension cannot
    be used, torch's allocator serves the pool and one line is logged.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"pool: limit is a number of bytes from 1 on or None, got {limit!r}")
    if sleeps and use_on_oom:
        raise ValueError("pool: one that sleeps cannot serve others at out-of-memory (use_on_oom)")
    if torch.version.cuda is None or installing._gpus() == 0:
        reason = "there is no GPU that torch may use"
        events.warn_once("allocator pool", "a pool of the allocator extension does nothing: %s", reason)
        return Pool(_Nothing(), reason, sleeps)
    torch.cuda.init()
    ended_pools.sweep(_index(device))
    if sleeps:
        sleeping.will_be_possible()
    index = _index(device)
    installed = installing.installed()
    if installed is not None:
        return Pool(_OfTheExtension(installed.library, index, use_on_oom, limit), None, sleeps)
    if reuse_in_captures:
        reuse_in_captures_of_torch()
    found = library.load()
    lacking: str | None = found.reason or installing.unusable(found.library)
    if found.library is not None and lacking is None:
        made = _OfTorch.with_segments(found.library, index, use_on_oom, limit, sleeps)
        if made is not None:
            return Pool(made, None, sleeps)
        lacking = "more pools than the extension can supply at a time"
    events.warn_once("allocator pool", "a pool's memory comes from torch, not from the extension: %s", lacking)
    return Pool(_OfTorch(index, use_on_oom), lacking, sleeps)


def reuse_in_captures_of_torch() -> bool:
    """Switch on torch's own reuse inside captures for this process; false where this torch has no such switch."""
    if _compat.missing("allocator"):
        return False
    # torch may take what is not named for its default, so what the user set is said again
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    said = [text for name in variables if (text := os.environ.get(name, "").strip())]
    try:
        _compat.set_allocator_settings(",".join([*said, "graph_capture_record_stream_reuse:True"]))
    except (RuntimeError, ValueError) as error:
        events.warn_once("allocator flag", "torch does not switch on reuse in captures: %s", error)
        return False
    return True


def _index(device: torch.device | int | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else device.index
    return torch.cuda.current_device() if index is None else index


class _Nothing:
    """No GPU."""

    index = 0
    id: PoolId | None = None
    mem_pool: torch.cuda.MemPool | None = None

    def opened(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reserved(self) -> tuple[int, int]:
        return 0, 0

    def lent(self) -> int:
        return 0

    def ranges(self) -> tuple[sleeping.Range, ...]:
        return ()

    ranges_asleep = ranges

    def sleep(self, keep: bool) -> int:
        return 0

    def wake(self) -> int:
        return 0

    def empty_cache(self) -> int:
        return 0

    def close(self) -> None:
        pass


# torch's allocators keep bare pointers to these
_kept: dict[int, Any] = {}
_keeping = threading.Lock()


class _OfTorch:
    """torch's MemPool; with a slot, its segments come from the extension.

    torch lets one of its pools be open once at a time.  Who opens this one where it is open already, further out or in
    another thread, gets a further MemPool over the same slot, which is kept for the next.
    """

    mem_pool: torch.cuda.MemPool | None

    def __init__(
        self, index: int, use_on_oom: bool, allocator: Any = None, loaded: Library | None = None, slot: int = -1
    ) -> None:
        self.index, self._library, self._slot = index, loaded, slot
        self._lock = threading.Lock()  # of the two that follow
        self._pools: list[torch.cuda.MemPool] = []
        self._open: set[PoolId] = set()
        self._make = functools.partial(torch.cuda.MemPool, allocator, use_on_oom=use_on_oom)
        self.mem_pool = self._shut_one()
        self.id: PoolId | None = self.mem_pool.id

    def _shut_one(self) -> torch.cuda.MemPool:
        """One that is open nowhere: the first, into which graphs are captured, if that is not."""
        for pool in self._pools:
            if pool.id not in self._open:
                return pool
        with torch.cuda.device(self.index):
            self._pools.append(ended_pools.noted(self._make()))
        return self._pools[-1]

    @classmethod
    def with_segments(
        cls, loaded: Library, index: int, use_on_oom: bool, limit: int | None, sleeps: bool = False
    ) -> _OfTorch | None:
        """None: all slots are taken."""
        allocate, release = ctypes.c_void_p(), ctypes.c_void_p()
        slot = loaded.call("mg_segments_open", limit or 0, ctypes.byref(allocate), ctypes.byref(release))
        if slot < 0:
            return None
        try:
            if sleeps:
                loaded.call("mg_segments_map", slot, index)
            with _keeping:
                if slot not in _kept:
                    _kept[slot] = _compat.custom_allocator(allocate.value, release.value)
                allocator = _kept[slot]
            return cls(index, use_on_oom, allocator, loaded, slot)
        except BaseException:
            loaded.call("mg_segments_close", slot)
            raise

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with self._lock:
            pool = self._shut_one()
            self._open.add(pool.id)
        try:
            with torch.cuda.use_mem_pool(pool, self.index):
                yield
        finally:
            with self._lock:
                self._open.discard(pool.id)

    def reserved(self) -> tuple[int, int]:
        if self._library is None:
            return 0, 0
        current, peak, count = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        refused = ctypes.c_uint64()
        outs = [ctypes.byref(out) for out in (current, peak, count, refused)]
        self._library.call("mg_segments_read", self._slot, *outs)
        return current.value - self._away()[1], peak.value

    def _away(self) -> tuple[bool, int]:
        """Whether it sleeps, and the bytes that the device has back of it."""
        assert self._library is not None
        asleep, away = ctypes.c_int(), ctypes.c_size_t()
        self._library.call("mg_segments_asleep", self._slot, ctypes.byref(asleep), ctypes.byref(away))
        return bool(asleep.value), away.value

    def lent(self) -> int:
        return 0

    def ranges(self) -> tuple[sleeping.Range, ...]:
        assert self._library is not None
        count = ctypes.c_size_t()
        self._library.call("mg_segments_list", self._slot, None, 0, ctypes.byref(count))
        blocks = (Block * count.value)()
        self._library.call("mg_segments_list", self._slot, blocks, count.value, ctypes.byref(count))
        return tuple((block.address, block.bytes) for block in blocks)

    def ranges_asleep(self) -> tuple[sleeping.Range, ...]:
        return self.ranges() if self._library is not None and self._away()[0] else ()

    def sleep(self, keep: bool) -> int:
        assert self._library is not None
        if _captures(self.index):
            raise Asleep("a capture is under way, and may use the pool")
        torch.cuda.synchronize(self.index)  # so that torch, too, notes what work is over
        of_torch = sum(
            segment["total_size"]
            for segment in _compat.raw_snapshot(None)["segments"]
            if tuple(segment["segment_pool_id"]) in {pool.id for pool in self._pools}
        )
        ours = sum(nbytes for _, nbytes in self.ranges())
        if of_torch > ours:
            raise Asleep(f"{of_torch - ours} bytes of the pool are segments of torch's own, which cannot sleep")
        given = ctypes.c_size_t()
        sleeping.called(self._library.call, "mg_segments_sleep", self._slot, int(keep), ctypes.byref(given))
        return given.value

    def wake(self) -> int:
        assert self._library is not None
        brought = ctypes.c_size_t()
        sleeping.called(self._library.call, "mg_segments_wake", self._slot, sleeping.fill(), ctypes.byref(brought))
        return brought.value

    def empty_cache(self) -> int:
        before = self.reserved()[0]
        torch.cuda.empty_cache()
        if self._library is not None:
            self._library.call("mg_segments_empty_host", ctypes.byref(ctypes.c_size_t()))
        return before - self.reserved()[0]

    def close(self) -> None:
        self.mem_pool = None
        ended_pools.end(self._pools, self.index)
        if self._library is not None:
            self._library.call("mg_segments_close", self._slot)


def _captures(index: int) -> bool:
    """Whether a capture is on, as far as torch can tell: on the current stream, or one of torch's pools of streams."""
    if _compat.is_capturing():
        return True
    with torch.cuda.device(index):
        for priority in (0, -1):
            for _ in range(32):  # they are handed out in turn
                with torch.cuda.stream(torch.cuda.Stream(index, priority=priority)):
                    if _compat.is_capturing():
                        return True
    return False


class _OfTheExtension:
    """A pool of the installed extension."""

    mem_pool: torch.cuda.MemPool | None = None

    def __init__(self, loaded: Library, index: int, use_on_oom: bool, limit: int | None) -> None:
        self._library, self.index = loaded, index
        self._device = loaded.call("mg_torch_make_device", index)
        if self._device is None:
            raise Refused(loaded.message())
        own = new_id()
        self.id: PoolId | None = own
        self._id = own
        self._begin()  # and without a release: that is how the pool is held
        self._call("mg_end_pool")
        if use_on_oom:
            self._call("mg_use_on_oom", 1)
        if limit is not None:
            self._call("mg_pool_limit", limit)

    def _call(self, name: str, *arguments: int) -> None:
        self._library.call(name, self._device, *self._id, *arguments)

    def _begin(self) -> None:
        self._library.call("mg_torch_begin_pool_on_thread", self.index, *self._id)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._call("mg_end_pool")
            self._call("mg_release_pool")

    def reserved(self) -> tuple[int, int]:
        segments = segments_of(self._library, self._device, self._id)
        now = sum(segment["total_size"] for segment in segments) - self._away()[1]
        self._peak = max(now, getattr(self, "_peak", 0))
        return now, self._peak

    def lent(self) -> int:
        lent = ctypes.c_size_t()
        self._library.call("mg_pool_lent", self._device, *self._id, ctypes.byref(lent))
        return lent.value

    def ranges(self) -> tuple[sleeping.Range, ...]:
        segments = segments_of(self._library, self._device, self._id)
        return tuple((segment["address"], segment["total_size"]) for segment in segments)

    def ranges_asleep(self) -> tuple[sleeping.Range, ...]:
        return self.ranges() if self._away()[0] else ()

    def _away(self) -> tuple[bool, int]:
        """Whether it sleeps, and the bytes that the device has back of it."""
        asleep, away = ctypes.c_int(), ctypes.c_size_t()
        self._library.call("mg_pool_asleep", self._device, *self._id, ctypes.byref(asleep), ctypes.byref(away))
        return bool(asleep.value), away.value

    def sleep(self, keep: bool) -> int:
        given = ctypes.c_size_t()
        arguments = (self._device, *self._id, int(keep), ctypes.byref(given))
        sleeping.called(self._library.call, "mg_pool_sleep", *arguments)
        return given.value

    def wake(self) -> int:
        brought = ctypes.c_size_t()
        arguments = (self._device, *self._id, sleeping.fill(), ctypes.byref(brought))
        sleeping.called(self._library.call, "mg_pool_wake", *arguments)
        return brought.value

    def empty_cache(self) -> int:
        given, of_the_host = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.call("mg_empty_pool", self._device, *self._id, ctypes.byref(given))
        self._library.call("mg_empty_host", self._device, ctypes.byref(of_the_host))
        return given.value

    def close(self) -> None:
        self._library.call("mg_torch_release_pool", self.index, *self._id)
