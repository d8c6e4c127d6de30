"""`pool()`: memory of the extension for one model, at any time, while the process's allocator stays what it is.

Three kinds, opened alike by `with`:

- torch's allocator is current: a `torch.cuda.MemPool` whose segments the extension supplies, each pool by functions of
  its own, so that each can have a limit.  The blocks in them are torch's: statistics, snapshots, IPC go on working, and
  reuse inside captures is torch's flag.
- the extension is installed: a pool of the extension.  torch's MemPool refuses a pluggable allocator.
- the extension cannot be used: torch's MemPool alone, or nothing where there is no GPU; one line says so.

Invariant: while a pool of torch's holds a segment of the extension, what frees that segment is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import torch

from multigraph_backend import _compat, events
from multigraph_backend.allocator import installing, library
from multigraph_backend.allocator.library import Library, Refused

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

    def opened(self) -> contextlib.AbstractContextManager[None]: ...
    def reserved(self) -> tuple[int, int]: ...
    def lent(self) -> int: ...
    def empty_cache(self) -> int: ...
    def close(self) -> None: ...


class Pool:
    """A pool of device memory; what the thread allocates inside `with` comes from it.  Made by `pool()`.

    It may be opened again and again, also one inside the other, and `torch.cuda.graph(graph, pool=pool.id)` captures
    into it.  Tensors may outlive it; its memory is given back when it is closed or gone, and they are gone.
    """

    def __init__(self, kind: _Kind, reason: str | None) -> None:
        self.reason = reason
        """Why the extension does not supply its memory; None if it does."""
        self._kind = kind
        self._opened = threading.local()
        self._close = weakref.finalize(self, kind.close)
        self._close.atexit = False

    @property
    def id(self) -> PoolId | None:
        """As `torch.cuda.graph` takes it; None without a GPU."""
        return self._kind.id

    @property
    def mem_pool(self) -> torch.cuda.MemPool | None:
        """torch's object, where torch's allocator is current."""
        return self._kind.mem_pool

    @property
    def reserved_bytes(self) -> int:
        """Bytes of segments that the extension supplies to it now; 0 where it supplies none."""
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
            raise RuntimeError("this pool is closed")
        opened = self._kind.opened()
        opened.__enter__()
        self._stack().append(opened)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack().pop().__exit__(kind, error, traceback)

    def empty_cache(self) -> int:
        """Give its cached segments back to the driver, also while it is held; bytes.

        Nothing of a pool into which something was captured: a replay may use it again.  Where torch's allocator is
        current it is `torch.cuda.empty_cache()`, which leaves pools that are held, and what that gave back of this one.
        """
        return self._kind.empty_cache()

    def close(self) -> None:
        """Give it up.  Its memory goes back as soon as no tensor is in it."""
        self._close()

    def _stack(self) -> list[contextlib.AbstractContextManager[None]]:
        stack: list[contextlib.AbstractContextManager[None]] = self._opened.__dict__.setdefault("stack", [])
        return stack


def pool(
    *,
    use_on_oom: bool = False,
    limit: int | None = None,
    reuse_in_captures: bool = False,
    device: torch.device | int | None = None,
) -> Pool:
    """A pool of the extension's memory, for `with`.  Works at any time; starts CUDA.

    use_on_oom: when the device is out of memory, free blocks of this pool serve allocations outside of it, also those
    that graphs captured into it use: replay none of these while `Pool.lent_bytes` is not 0.
    limit: bytes of segments that it may hold; a pool of torch's without the extension has none.
    reuse_in_captures: switch on torch's own reuse inside captures (`graph_capture_record_stream_reuse`), for the whole
    process.  device: the current one.

    Raises ValueError for a limit that is no positive number.  Where the extension cannot be used, torch's allocator
    serves the pool and one line is logged.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"pool: limit is a number of bytes from 1 on or None, got {limit!r}")
    if torch.version.cuda is None or installing._gpus() == 0:
        reason = "there is no GPU that torch may use"
        events.warn_once("allocator pool", "a pool of the allocator extension does nothing: %s", reason)
        return Pool(_Nothing(), reason)
    torch.cuda.init()
    index = _index(device)
    installed = installing.installed()
    if installed is not None:
        return Pool(_OfTheExtension(installed.library, index, use_on_oom, limit), None)
    if reuse_in_captures:
        reuse_in_captures_of_torch()
    found = library.load()
    lacking: str | None = found.reason or installing.unusable(found.library)
    if found.library is not None and lacking is None:
        made = _OfTorch.with_segments(found.library, index, use_on_oom, limit)
        if made is not None:
            return Pool(made, None)
        lacking = "more pools than the extension can supply at a time"
    events.warn_once("allocator pool", "a pool's memory comes from torch, not from the extension: %s", lacking)
    return Pool(_OfTorch(index, use_on_oom), lacking)


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

    id: PoolId | None = None
    mem_pool: torch.cuda.MemPool | None = None

    def opened(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reserved(self) -> tuple[int, int]:
        return 0, 0

    def lent(self) -> int:
        return 0

    def empty_cache(self) -> int:
        return 0

    def close(self) -> None:
        pass


# torch's allocators keep bare pointers to these
_kept: dict[int, Any] = {}
_keeping = threading.Lock()


class _OfTorch:
    """torch's MemPool; with a slot, its segments come from the extension."""

    mem_pool: torch.cuda.MemPool | None

    def __init__(
        self, index: int, use_on_oom: bool, allocator: Any = None, loaded: Library | None = None, slot: int = -1
    ) -> None:
        self._index, self._library, self._slot = index, loaded, slot
        with torch.cuda.device(index):
            self.mem_pool = torch.cuda.MemPool(allocator, use_on_oom=use_on_oom)
        self.id: PoolId | None = self.mem_pool.id

    @classmethod
    def with_segments(cls, loaded: Library, index: int, use_on_oom: bool, limit: int | None) -> _OfTorch | None:
        """None: all slots are taken."""
        allocate, release = ctypes.c_void_p(), ctypes.c_void_p()
        slot = loaded.call("mg_segments_open", limit or 0, ctypes.byref(allocate), ctypes.byref(release))
        if slot < 0:
            return None
        try:
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
        assert self.mem_pool is not None
        with torch.cuda.use_mem_pool(self.mem_pool, self._index):
            yield

    def reserved(self) -> tuple[int, int]:
        if self._library is None:
            return 0, 0
        current, peak, count = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        refused = ctypes.c_uint64()
        outs = [ctypes.byref(out) for out in (current, peak, count, refused)]
        self._library.call("mg_segments_read", self._slot, *outs)
        return current.value, peak.value

    def lent(self) -> int:
        return 0

    def empty_cache(self) -> int:
        before = self.reserved()[0]
        torch.cuda.empty_cache()
        return before - self.reserved()[0]

    def close(self) -> None:
        self.mem_pool = None
        if self._library is not None:
            self._library.call("mg_segments_close", self._slot)


class _OfTheExtension:
    """A pool of the installed extension."""

    mem_pool: torch.cuda.MemPool | None = None

    def __init__(self, loaded: Library, index: int, use_on_oom: bool, limit: int | None) -> None:
        self._library, self._index = loaded, index
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
        self._library.call("mg_torch_begin_pool_on_thread", self._index, *self._id)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._call("mg_end_pool")
            self._call("mg_release_pool")

    def reserved(self) -> tuple[int, int]:
        from multigraph_backend.allocator.statistics import segments_of

        now = sum(segment["total_size"] for segment in segments_of(self._library, self._device, self._id))
        self._peak = max(now, getattr(self, "_peak", 0))
        return now, self._peak

    def lent(self) -> int:
        lent = ctypes.c_size_t()
        self._library.call("mg_pool_lent", self._device, *self._id, ctypes.byref(lent))
        return lent.value

    def empty_cache(self) -> int:
        given = ctypes.c_size_t()
        self._library.call("mg_empty_pool", self._device, *self._id, ctypes.byref(given))
        return given.value

    def close(self) -> None:
        self._library.call("mg_torch_release_pool", self._index, *self._id)
