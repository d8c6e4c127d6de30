"""What became of each saved tensor, as plain data: for `explain()`, for counters, and for caches of compiled code.

In: what a compile decided.  Out: `SavedTensors`, one for each partition of a graph, collected by the compile that is
running and kept with its code.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from multigraph_backend import events
from multigraph_backend.saved_tensors.reckoning import GoalMissed, MemoryPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that is saved for backward.

    `packed`: how, or None where it is kept, and then `reason` says why.  Bytes as they are for the sizes of the first
    call: `bytes_saved` on the device, `bytes_on_host` on the host.  `with_`: the tensor that lies in the same memory
    and is packed in its place.  `pack_before`, `unpack_before`: steps of the forward and the backward graph, none of
    the latter where it is only multiplied.  `held`: who else may hold the memory of what is packed, so that it is free
    later, or never.
    """

    name: str
    op: str
    module: str
    dtype: str
    shape: str
    bytes: int
    bytes_saved: int
    packed: str | None = None
    reason: str | None = None
    with_: str | None = None
    pack_before: str | None = None
    unpack_before: tuple[str, ...] = ()
    bytes_on_host: int = 0
    held: str | None = None


@dataclass(frozen=True)
class SavedTensors:
    """All saved tensors of one graph, and the estimated peaks (bytes above what the caller holds).

    `order`: in forward and in backward "placed", "placed, repeated" or "stock"; `failed`: why nothing was packed
    although something was to be; `budget`: what was asked for, and what became of it; `memory`: what became of a memory
    goal; `unmatched`: rules that decide about no tensor of this graph, because none is as they say or others come
    before.
    """

    tensors: tuple[SavedTensor, ...]
    order: tuple[str, str] | None = None
    forward_peak: int = 0
    backward_peak: int = 0
    stock_forward_peak: int = 0
    stock_backward_peak: int = 0
    unpacked_forward_peak: int = 0
    unpacked_backward_peak: int = 0
    failed: str | None = None
    budget: str | None = None
    memory: MemoryPlan | None = None
    unmatched: tuple[str, ...] = ()

    @property
    def packed(self) -> int:
        return sum(entry.packed is not None for entry in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors)

    @property
    def bytes_saved(self) -> int:
        return sum(entry.bytes_saved for entry in self.tensors)

    def lines(self) -> list[str]:
        """The account as text, one line a tensor."""
        lines = [
            f"saved tensors: {self.packed} of {len(self.tensors)} packed, "
            f"{_mib(self.bytes)} -> {_mib(self.bytes_saved)}"
        ]
        if self.order is not None:
            lines[0] += (
                f"; estimated peak forward {_mib(self.unpacked_forward_peak)} -> {_mib(self.forward_peak)} "
                f"({self.order[0]}; stock's order {_mib(self.stock_forward_peak)}), "
                f"backward {_mib(self.unpacked_backward_peak)} -> {_mib(self.backward_peak)} "
                f"({self.order[1]}; stock's order {_mib(self.stock_backward_peak)})"
            )
        if self.budget:
            lines.append(f"  {self.budget}")
        if self.memory is not None:
            lines += [f"  {line}" for line in self.memory.lines()]
        if self.failed:
            lines.append(f"  nothing is packed: {self.failed}")
        lines += [f"  decides about nothing here: rule {rule}" for rule in self.unmatched]
        for entry in self.tensors:
            line = f"  {entry.name} {entry.dtype}{entry.shape} by {entry.op}"
            line += f" in {entry.module}" if entry.module else ""
            line += f": {_mib(entry.bytes)}"
            if entry.packed is None:
                line += f", kept: {entry.reason}"
            else:
                line += f" -> {_mib(entry.bytes_saved)}"
                line += f" and {_mib(entry.bytes_on_host)} on the host" if entry.bytes_on_host else ""
                line += f", {entry.packed}"
                line += f", in the memory of {entry.with_}" if entry.with_ else ""
                line += f"; packed before {entry.pack_before}"
                line += f", unpacked before {', '.join(entry.unpack_before)}" if entry.unpack_before else ""
                line += f"; it is {entry.held}" if entry.held else ""
            lines.append(line)
        return lines


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


@dataclass
class _Collected:
    """Of one compile: all accounts, and those that are to be counted when it is done."""

    all: list[SavedTensors] = field(default_factory=list)
    added: list[SavedTensors] = field(default_factory=list)


_collected: ContextVar[_Collected | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[SavedTensors]]:
    """The accounts of all partitions made, or found in a cache, inside the body and in its thread.

    What is added there is counted when the body is done, not where it raises: what failed saves nothing.
    """
    here = _Collected()
    token = _collected.set(here)
    try:
        yield here.all
    finally:
        _collected.reset(token)
    for account in here.added:
        _count(account)


def add(account: SavedTensors) -> None:
    """One more account for the compile that is running, to be counted; a goal that is missed is said now."""
    if account.memory is not None:
        log.info("%s", "\n".join(account.memory.lines()))
        if (said := account.memory.complaint()) is not None:
            events.warn_once(said, "%s", said)
    pass_on(account)
    here = _collected.get()
    if here is None:
        _count(account)
    else:
        here.added.append(account)


def pass_on(account: SavedTensors) -> None:
    """The same without counting: it was counted, or there is nothing to count."""
    here = _collected.get()
    if here is not None:
        here.all.append(account)


def refuse_missed(accounts: Sequence[SavedTensors]) -> None:
    """Raises `GoalMissed` where a memory goal is not met, or nothing could be done for it."""
    for entry in accounts:
        said = None if entry.memory is None else entry.memory.complaint()
        if said is None and entry.failed:
            said = f"nothing is packed for the memory goal: {entry.failed}"
        if said is not None:
            raise GoalMissed(said)


def _count(account: SavedTensors) -> None:
    for entry in account.tensors:
        events.count("packed_tensors" if entry.packed is not None else "kept_tensors")


def latest() -> SavedTensors | None:
    """The account of the last partition of the compile that is running."""
    here = _collected.get()
    return here.all[-1] if here is not None and here.all else None
