"""A stand-in for a GPU's copy stream: copies run as late as it allows, so that what comes too early shows.

A copy is done when somebody waits for it, or for a later one, and not before: a source that was written over in
between, a target that is read without waiting, a buffer that serves again too soon all give wrong numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from multigraph_backend.saved_tensors.offload import transfers

CPU = torch.device("cpu")


class LateStream:
    """See `transfers.CopyStream`."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._told: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._last = 0
        self.finished = 0
        self.speed = (1e9, 1e9)
        self._memory: list[torch.Tensor] = []  # what is on the host
        self.recording = False
        self.place: Any = "here"

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> int:
        assert to.dtype == source.dtype
        assert to.shape == source.shape
        self._last += 1
        self._told.append((self._last, self._unowned(to), self._unowned(source)))
        return self._last

    def wait(self, token: int, at: Any = None) -> None:
        while self._told and self._told[0][0] <= token:
            _, to, source = self._told.popleft()
            to.copy_(source)

    def finish(self, token: int) -> None:
        self.finished += 1
        self.wait(token)

    def at(self) -> Any:
        return self.place

    def capturing(self) -> bool:
        return self.recording

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self._memory.append(torch.full((nbytes,), 0x7F, dtype=torch.uint8))
        return self._memory[-1].view(-1)

    @property
    def host(self) -> int:
        """How many buffers there are on the host."""
        return len(self._memory)

    def _unowned(self, given: torch.Tensor) -> torch.Tensor:
        """Memory of the host without a hold on it: a copy that waits is no reason not to use a buffer again."""
        address = given.data_ptr()
        if not any(known.data_ptr() <= address < known.data_ptr() + known.nbytes for known in self._memory):
            return given.detach()
        raw = (ctypes.c_uint8 * given.nbytes).from_address(address)
        return torch.frombuffer(raw, dtype=torch.uint8).view(given.shape)

    def bytes_per_second(self) -> tuple[float, float]:
        return self.speed

    @property
    def waiting(self) -> int:
        return len(self._told)


@contextlib.contextmanager
def late_stream() -> Iterator[transfers.Transfers]:
    """Tensors on the CPU can be offloaded inside the body, by copies that run late."""
    transfers.forget()
    transfers.STREAMS["cpu"] = LateStream  # type: ignore[index]
    try:
        yield transfers.of(CPU)
    finally:
        transfers.STREAMS.pop("cpu", None)  # type: ignore[attr-defined]
        transfers.forget()
