"""Saved tensors on their way to the host and back: a copy stream, pinned buffers, copies that wait for copies.

    copy = transfers.offload(x)                      in forward
    transfers.wait([copy])                           later; until then x stays as it is
    transfers.prefetch([copy, another], device)      in backward
    x = transfers.reload(copy, dtype, device)        when it is needed

A copy to the host begins when the work before it is done, and the caller does not wait for it before `wait`.  A copy
from the host begins with `prefetch`, and the caller waits for it in `reload`, which begins it if nobody has.

In: tensors, and a `CopyStream` for their device.  Out: bytes on the host in buffers of a pool, and tensors again.

Invariant: a buffer serves again when no tensor is left over it.  All copies of a device run one after the other, so a
buffer is filled anew only after what was in it has been read.  A copy that was begun for an earlier use of a buffer is
never handed out for a later one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from multigraph_backend import _compat, events

USUAL_BYTES_PER_SECOND = 20e9  # of a link between host and device, where it cannot be measured
_MEASURED_BYTES = 64 << 20


class CopyStream(Protocol):
    """Copies between a device and the host, one after the other, on a stream beside the one of the calling thread."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin a copy behind all that is on the caller's stream so far; returns a token of it at once."""

    def wait(self, token: Any, at: Any = None) -> None:
        """Have the caller's stream, or the stream `at`, wait for that copy before what comes on it from now on."""

    def finish(self, token: Any) -> None:
        """Return when that copy is done."""

    def at(self) -> Any:
        """The caller's current stream: memory that is made there is used again on it, and nowhere else."""

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Bytes on the host that copies may run from and to beside everything else."""

    def bytes_per_second(self) -> tuple[float, float]:
        """To the host and from it."""


class CudaStream:
    """See `CopyStream`: a CUDA stream, events, pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._speed: tuple[float, float] | None = None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record(self.at())
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        done.record(self._stream)
        return done

    def wait(self, token: torch.cuda.Event, at: torch.cuda.Stream | None = None) -> None:
        (at or self.at()).wait_event(token)

    def finish(self, token: torch.cuda.Event) -> None:
        token.synchronize()

    def at(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # copies from and to other memory are right, and hold up the caller
            reason = (str(error).splitlines() or [""])[0]
            events.warn_once("no pinned memory", "saved tensors are offloaded to memory that is not pinned: %s", reason)
            return torch.empty(nbytes, dtype=torch.uint8)

    def bytes_per_second(self) -> tuple[float, float]:
        if self._speed is None:
            if self.capturing():
                return USUAL_BYTES_PER_SECOND, USUAL_BYTES_PER_SECOND
            with torch.cuda.device(self.device), _compat.disable_current_modes():
                there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=self.device)
                here = self.host_memory(_MEASURED_BYTES)
                self._speed = _measured(here, there), _measured(there, here)
        return self._speed


def _measured(to: torch.Tensor, source: torch.Tensor) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    to.copy_(source, non_blocking=True)
    before.record()
    to.copy_(source, non_blocking=True)
    after.record()
    after.synchronize()
    seconds = float(before.elapsed_time(after)) / 1e3
    return _MEASURED_BYTES / max(seconds, 1e-9)


@dataclass(eq=False)
class _Buffer:
    """Memory on the host.  `own`: how many refer to it when nobody else does; `done`: the last copy into it;
    `on_its_way`: where, into what, and by which copy it is on its way back.
    """

    memory: torch.Tensor
    own: int = 0
    done: Any = None
    on_its_way: tuple[Any, torch.Tensor, Any] | None = None

    @property
    def handle(self) -> int:
        return int(self.memory.untyped_storage()._cdata)

    @property
    def free(self) -> bool:
        return int(_compat.storage_use_count(self.handle)) <= self.own


@dataclass
class _Sized:
    """The buffers of one size, and where to look for a free one first."""

    buffers: list[_Buffer] = field(default_factory=list)
    next: int = 0


class Transfers:
    """The copies of one device."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self._lock = threading.Lock()
        self._sized: dict[int, _Sized] = {}
        self._buffers: dict[int, _Buffer] = {}  # by the handle of their storage
        self.copies = self.prefetched = 0

    @property
    def host_bytes(self) -> int:
        """Of all buffers, in use or not."""
        return sum(buffer.memory.nbytes for buffer in self._buffers.values())

    def offload(self, x: torch.Tensor) -> torch.Tensor:
        """The bytes of `x` on the host; `x` stays as it is until they are waited for."""
        with self._lock:
            buffer = self._take(x.nbytes)
            # no view of the buffer, so that it has a version counter of its own
            host: torch.Tensor = torch.empty(0, dtype=torch.uint8)
            host = host.set_(buffer.memory.untyped_storage(), 0, (x.nbytes,), (1,)).view(host_shape(x))
            plain = x.contiguous()
            buffer.done = self.stream.copy(host, plain.view(torch.uint8))
            if plain is not x and plain.data_ptr() != x.data_ptr():
                self.stream.wait(buffer.done)  # `plain` is freed when this returns
            self.copies += 1
        return host

    def wait(self, copies: Sequence[torch.Tensor]) -> None:
        """What `copies` are of is free after this call.  Where somebody may read them at once, they are there."""
        with self._lock:
            now = _compat.top_saved_tensors_hooks(True) and not self.stream.capturing()
            for copy in copies:
                if (buffer := self._find(copy)) is not None:
                    self.stream.wait(buffer.done)
                    if now:
                        self.stream.finish(buffer.done)

    def prefetch(self, copies: Sequence[torch.Tensor], device: torch.device) -> None:
        """Begin to copy `copies` back, one after the other; each takes memory of `device` from now on."""
        with self._lock:
            here = self.stream.at()
            for copy in copies:
                if (buffer := self._find(copy)) is not None:
                    self._begin(buffer, copy, device, here)

    def reload(self, copy: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What `copy` is of, on the device again."""
        with self._lock:
            buffer = self._find(copy)
            if buffer is None:  # somebody has put another tensor in its place: hooks of the user's
                return _as(copy.to(device), dtype)
            here = self.stream.at()
            if buffer.on_its_way is not None and buffer.on_its_way[0] != here:
                self._give_up(buffer)
            self.prefetched += buffer.on_its_way is not None
            self._begin(buffer, copy, device, here)
            assert buffer.on_its_way is not None
            made: torch.Tensor
            _, made, token = buffer.on_its_way
            buffer.on_its_way = None
            self.stream.wait(token)
        return _as(made, dtype)

    def _begin(self, buffer: _Buffer, copy: torch.Tensor, device: torch.device, here: Any) -> None:
        if buffer.on_its_way is None:
            made = torch.empty(copy.shape, dtype=torch.uint8, device=device)
            buffer.on_its_way = (here, made, self.stream.copy(made, copy))

    def _give_up(self, buffer: _Buffer) -> None:
        """A copy that was prefetched and is not needed: its memory is free, and what comes there waits for the copy."""
        if buffer.on_its_way is not None:
            at, _, token = buffer.on_its_way
            self.stream.wait(token, at)
            buffer.on_its_way = None

    def _find(self, copy: torch.Tensor) -> _Buffer | None:
        return self._buffers.get(copy.untyped_storage()._cdata)

    def _take(self, nbytes: int) -> _Buffer:
        sized = self._sized.setdefault(nbytes, _Sized())
        for step in range(len(sized.buffers)):
            at = (sized.next + step) % len(sized.buffers)
            buffer = sized.buffers[at]
            if buffer.free:
                sized.next = at + 1
                self._give_up(buffer)
                if self.stream.capturing():  # the user's recording writes into it at each replay
                    sized.buffers.remove(buffer)
                return buffer
        if self.stream.capturing():
            raise RuntimeError(
                "a tensor is offloaded inside a CUDA graph capture, and there is no buffer for it yet: run the step "
                "once before it is captured"
            )
        buffer = _Buffer(self.stream.host_memory(nbytes))
        buffer.own = int(_compat.storage_use_count(buffer.handle))
        sized.buffers.append(buffer)
        self._buffers[buffer.handle] = buffer
        return buffer


def _as(bytes_of: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements again; torch views no empty ones as wider elements."""
    if bytes_of.nbytes:
        return bytes_of.view(dtype)
    return bytes_of.new_empty((*bytes_of.shape[:-1], bytes_of.shape[-1] // dtype.itemsize), dtype=dtype)


def host_shape(x: torch.Tensor) -> tuple[Any, ...]:
    """The shape of the bytes of `x`, which has a dimension."""
    return (*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


STREAMS: dict[str, Callable[[torch.device], CopyStream]] = {"cuda": CudaStream}

_transfers: dict[torch.device, Transfers] = {}
_lock = threading.Lock()


def of(device: torch.device) -> Transfers:
    """The transfers of `device`, which is of a type in `STREAMS`."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _transfers:
            _transfers[device] = Transfers(STREAMS[device.type](device))
        return _transfers[device]


def forget() -> None:
    """Let go of all streams and buffers; what is on its way must have arrived."""
    with _lock:
        _transfers.clear()
