"""Copying the inputs of a recording into its buffers, and outputs out of it, in one launch of a kernel of our own.

torch's multi-tensor copy reads sizes, strides and types of every tensor at every call, and gives one block of the GPU
65,536 elements to copy (`benchmarks/staging.py` has what both take).  Of a recording all that is known beforehand but
where the sources lie, so here a call passes their addresses and nothing else: a table in the device's memory tells each
program of the kernel which source it reads, which words of it, and where they go.

In:  the buffers, once.  Out: a function of sources, tensors of the same layouts, that copies them into the buffers; and
what it launches, for who launches it natively.  Outputs go the other way: their place in the recording is in the table,
and a call passes the addresses of what they are copied to (`unloader`).
What the kernel does not serve goes to torch's copy: layouts with gaps, bytes that make no whole words, sources that do
not lie on 16 bytes or are marked as conjugate or negative, much data, calls while another device is current, and
machines where Triton cannot compile.

Kernels are compiled by `prepare`, in a compile, for round numbers of sources; a call never compiles.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from multigraph_backend import _compat, events
from multigraph_backend.allocator import sleeping
from multigraph_backend.cudagraphs.devices.device import Layout, Stager

log = logging.getLogger(__name__)

WORD = torch.int32
ALIGNED = 16  # bytes
BLOCK = 1024  # words that one program copies
MOST_SOURCES = 64  # of one launch
MOST_BYTES = 16 << 20  # above, the table, a row for each 4 KiB, would not be small any more
#: of the table, per program: number of the source, first word, word behind the last, address of the buffer, and whether
#: it is the buffer that is read
ROW = 5

_lock = threading.Lock()
#: per device and number of sources
_launches: dict[tuple[int, int], _compat.TritonLaunch] = {}


def sizes() -> list[int]:
    """Numbers of sources that kernels are compiled for."""
    return [1 << power for power in range(MOST_SOURCES.bit_length())]


def prepare(index: int, sources: int) -> None:
    """Compile the kernel for up to `sources` sources on CUDA device `index`, where that can be done."""
    if sources < 1:
        return
    size = min(size for size in sizes() if size >= min(sources, MOST_SOURCES))
    with _lock:
        if (index, size) in _launches:
            return
        try:
            with torch.cuda.device(index):
                _launches[index, size] = _compat.triton_launch(_compiled(size))
        except Exception as error:  # no compiler, no driver of Triton's, another Triton
            reason = f"{type(error).__name__}: {error}"
            events.warn_once("staging", "inputs of recordings are copied by torch: no kernel could be made: %s", reason)
            log.debug("no kernel for %d sources", size, exc_info=True)


def by_torch(buffers: Sequence[torch.Tensor], copy: Callable[..., object]) -> Stager:
    """As `stager`, by torch's copy, which also sees marks of its sources."""
    return Stager(functools.partial(_by_torch, copy, list(buffers)))


@dataclass(frozen=True)
class Kernel:
    """A launch of the kernel for one recording: `function` is the driver's, `size` the number of sources that it takes,
    `table` the one that its programs read, `counts` the elements of each source.  `node`: the driver's handle of it
    where it is a part of the recording; else 0."""

    function: int
    programs: int
    threads: int
    shared: int
    table: torch.Tensor
    size: int
    counts: tuple[int, ...]
    node: int = 0


def stager(
    index: int, buffers: Sequence[torch.Tensor], stream: Callable[[], int], copy: Callable[..., object]
) -> Stager:
    """What copies into `buffers`.  `stream` tells the current one, `copy` is torch's multi-tensor copy of a list into
    another."""
    slow = by_torch(buffers, copy).copy
    with _lock:
        fits = [size for device, size in _launches if device == index and size >= len(buffers)]
        launch = _launches[index, min(fits)] if fits else None
    if launch is None or not served(buffers):
        return Stager(slow)
    names = _names(launch, rows(buffers), index, buffers[0].device, stream, slow)
    text = source(len(buffers), min(fits), "current" in names)
    exec(compile(text, "<multigraph staging of a recording>", "exec"), names)
    counts = tuple(buffer.numel() for buffer in buffers)
    how = launch.function, names["programs"], launch.threads, launch.shared
    kernel = Kernel(*how, names["table"], min(fits), counts)
    return Stager(names["stage"], kernel)


def unloader(
    index: int, outputs: Sequence[torch.Tensor], stream: Callable[[], int], slow: Callable[..., object]
) -> Callable[..., object] | None:
    """What copies `outputs`, which stay where they are, to where it is given storages of that many bytes; None where
    the kernel does not serve them.  `slow`: does the same, for storages that lie badly, and other current devices."""
    with _lock:
        fits = [size for device, size in _launches if device == index and size >= len(outputs)]
        launch = _launches[index, min(fits)] if fits else None
    if launch is None or not served(outputs):
        return None
    names = _names(launch, rows(outputs, read=True), index, outputs[0].device, stream, slow)
    text = source(len(outputs), min(fits), "current" in names, marks=False)
    exec(compile(text, "<multigraph copies out of a recording>", "exec"), names)
    made: Callable[..., object] = names.pop("stage")
    return made


def _names(
    launch: _compat.TritonLaunch,
    table: list[int],
    index: int,
    device: torch.device,
    stream: Callable[[], int],
    slow: Callable[..., object],
) -> dict[str, Any]:
    """What the text of `source` refers to."""
    names: dict[str, Any] = {
        "launch": launch.run,
        "handles": launch.handles,
        "programs": len(table) // ROW,
        "stream": stream,
        "slow": slow,
        "constants": (ROW, ALIGNED, BLOCK),
        "table": torch.tensor(table, dtype=torch.int64, device=device),
    }
    names["at"] = names["table"].data_ptr()
    sleeping.survives(names["table"], torch.tensor(table, dtype=torch.int64))
    if torch.cuda.device_count() > 1:  # a launch goes to the device that is current
        names.update(current=_compat.current_device, device=index)
    return names


class Within:
    """The kernel as the first thing that a recording does.  Each launch of it is told where its sources lie by setting
    the parameters of that node, which takes the host less than a launch, and the device no gap between two.

    `made` says whether that can be; then `launch` comes in the capture, and `finished` after it.
    """

    def __init__(self, index: int, kernel: _compat.TritonLaunch, size: int, rows: int) -> None:
        self._kernel, self._size = kernel, size
        self._table = torch.empty(rows * ROW, dtype=torch.int64, device=torch.device("cuda", index))
        self.node = 0

    def launch(self, buffers: Sequence[torch.Tensor], stream: int, last_node: Callable[[], int]) -> None:
        """Capture the kernel, which would copy `buffers` to themselves, on the current stream, `stream`.  Raises
        RuntimeError where the driver does not tell which node it has become."""
        addresses = [buffer.data_ptr() for buffer in buffers]
        sources = (*addresses, *addresses[:1] * (self._size - len(addresses)))
        programs = self._table.numel() // ROW
        handles, constants = self._kernel.handles, (ROW, ALIGNED, BLOCK)
        self._kernel.run(programs, 1, 1, stream, *handles, self._table.data_ptr(), sources, *constants)
        self.node = last_node()
        if not self.node:
            raise RuntimeError("the driver does not tell which node of the graph copies the inputs")

    def finished(self, buffers: Sequence[torch.Tensor], stager: Stager) -> Stager:
        """After the capture: `stager`, for the same buffers, as a part of the recording."""
        table = torch.tensor(rows(buffers), dtype=torch.int64)
        self._table.copy_(table)
        sleeping.survives(self._table, table)
        kernel: Kernel = stager.kernel
        return Stager(stager.copy, replace(kernel, table=self._table, node=self.node))


def within(index: int, sources: Sequence[torch.Tensor]) -> Within | None:
    """What copies inputs that lie as `sources` do within a recording, None where the kernel does not serve them."""
    with _lock:
        fits = [size for device, size in _launches if device == index and size >= len(sources)]
        launch = _launches[index, min(fits)] if fits else None
    if launch is None or not launch.function or not _runs_of_words(sources):
        return None
    words = [source.numel() * source.element_size() // WORD.itemsize for source in sources]
    return Within(index, launch, min(fits), sum(-(-count // BLOCK) for count in words))


def served(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel can copy into `buffers`."""
    return _runs_of_words(buffers) and not any(buffer.data_ptr() % ALIGNED for buffer in buffers)


def _runs_of_words(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each is one run of whole words, and they are not much."""
    total = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes != Layout.of(tensor).span or nbytes % WORD.itemsize:
            return False
        total += nbytes
    return 0 < total <= MOST_BYTES


def rows(buffers: Sequence[torch.Tensor], read: bool = False) -> list[int]:
    """The table: a row for each program of the kernel, one after the other.  `read`: the buffers are what is copied."""
    table: list[int] = []
    for number, buffer in enumerate(buffers):
        words = buffer.numel() * buffer.element_size() // WORD.itemsize
        for first in range(0, words, BLOCK):
            table += [number, first, words, buffer.data_ptr(), int(read)]
    return table


def source(count: int, size: int, several: bool = False, marks: bool = True) -> str:
    """The text of a function of `count` sources for a kernel of `size`; the first stands for those that are missing.
    `several`: whether there are devices besides the one that it is for.  `marks`: sources are tensors, and may be
    marked as conjugate or negative; else they are storages."""
    sources = ", ".join(f"s{number}" for number in range(count))
    addresses = [f"a{number}" for number in range(count)]
    lines = [f"def stage({sources}):"]
    if several:
        lines += ["    if current() != device:", f"        return slow({sources})"]
    if marks:
        marked = " or ".join(f"s{number}.is_conj() or s{number}.is_neg()" for number in range(count))
        lines += [f"    if {marked}:", f"        return slow({sources})"]
    lines += [f"    a{number} = s{number}.data_ptr()" for number in range(count)]
    passed = [*addresses, *addresses[:1] * (size - count)]
    lines += [
        f"    if ({' | '.join(addresses)}) & {ALIGNED - 1}:",
        f"        return slow({sources})",
        f"    launch(programs, 1, 1, stream(), *handles, at, ({', '.join(passed)},), *constants)",
    ]
    return "\n".join(lines)


def _by_torch(copy: Callable[..., object], buffers: list[torch.Tensor], *sources: torch.Tensor) -> None:
    copy(buffers, list(sources))


def _compiled(size: int) -> Any:
    from multigraph_backend.cudagraphs.devices.copy_kernel import copy_words

    address = (1 << 40) + 1  # a number of 64 bits that no multiple is known of
    return copy_words.warmup(torch.int64, (address,) * size, ROW, ALIGNED, BLOCK, grid=(1,))
