"""Staging and its reverse: what the kernel is told, what torch copies instead, and the kernel itself in Triton's
interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices import staging


@pytest.fixture
def copy_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernel's module, run by Triton's interpreter on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = "multigraph_backend.cudagraphs.devices.copy_kernel"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name)


class Bench:
    """Stagers on the CPU, with a kernel for up to eight sources, and how often each way was gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, copy_words: Any) -> None:
        self.launched = self.by_torch = 0
        self.copy_words = copy_words
        self.made: list[Callable[..., object]] = []
        launch = _compat.TritonLaunch(self.run, ("function", "metadata"))
        monkeypatch.setattr(staging, "_launches", {(0, 8): launch, (0, 4): launch, (1, 64): launch})
        self.sizes: list[int] = []

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, metadata, at, sources, *constants = rest
        assert (function, metadata, stream, y, z) == ("function", "metadata", 7, 1, 1)
        (table,) = [stage.__globals__["table"] for stage in self.made if stage.__globals__["table"].data_ptr() == at]
        self.sizes.append(len(sources))
        self.launched += 1
        self.copy_words[(x,)](table, sources, *constants)

    def copy(self, buffers: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.by_torch += 1
        torch._foreach_copy_(buffers, sources)

    def stager(self, buffers: list[torch.Tensor]) -> Callable[..., object]:
        made = staging.stager(0, buffers, lambda: 7, self.copy).copy
        if hasattr(made, "__globals__"):
            self.made.append(made)
        return made

    def unloader(self, outputs: list[torch.Tensor]) -> Callable[..., object] | None:
        def slow(*storages: torch.UntypedStorage) -> None:
            self.copy([over(storage, of) for storage, of in zip(storages, outputs, strict=True)], outputs)

        made = staging.unloader(0, outputs, lambda: 7, slow)
        if made is not None:
            self.made.append(made)
        return made


def over(storage: torch.UntypedStorage, of: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=of.dtype).set_(storage, 0, of.size())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, copy_kernel: ModuleType) -> Bench:
    return Bench(monkeypatch, copy_kernel.copy_words)


def like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


SOURCES = {
    "one": lambda: [torch.randn(5, 7)],
    "more than a program copies": lambda: [torch.randn(3 * staging.BLOCK + 5), torch.randn(staging.BLOCK)],
    "eight of all types": lambda: [
        torch.randn(4, 4, dtype=torch.float64),
        torch.randn(6).half(),
        torch.randn(2).bfloat16(),
        torch.randint(0, 9, (3,)),
        torch.rand(8) > 0.5,
        torch.randint(-9, 9, (4,), dtype=torch.int8),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor(2.5),
    ],
    "dense in another order": lambda: [torch.randn(4, 6).t(), torch.randn(2, 3, 4).permute(2, 0, 1)],
    "one is empty": lambda: [torch.randn(0, 3), torch.randn(3)],
}


@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_one_launch_copies_every_byte_of_new_values(bench: Bench, made: Callable[[], list[torch.Tensor]]) -> None:
    buffers = [like(tensor) for tensor in made()]
    stage = bench.stager(buffers)
    for _ in range(2):
        sources = made()
        stage(*sources)
        for buffer, source in zip(buffers, sources, strict=True):
            torch.testing.assert_close(buffer, source, rtol=0, atol=0)
    assert (bench.launched, bench.by_torch) == (2, 0)


def test_nothing_beside_the_buffers_is_written(bench: Bench) -> None:
    arena = torch.zeros(64, dtype=torch.int32)
    start = -arena.data_ptr() // 4 % 4
    buffers = [arena[start : start + 5], arena[start + 8 : start + 11]]
    bench.stager(buffers)(torch.ones(5, dtype=torch.int32), torch.ones(3, dtype=torch.int32))
    assert arena.sum() == 8
    assert [int(buffer.sum()) for buffer in buffers] == [5, 3]
    assert bench.launched == 1


UNSERVED = {
    "bytes that are no whole words": lambda: [torch.randn(4), torch.rand(7) > 0.5],
    "gaps": lambda: [torch.randn(4, 8)[:, :3]],
    "nothing at all": lambda: [torch.randn(0)],
    "much data": lambda: [torch.randn(staging.MOST_BYTES // 4 + 1)],
    "more sources than the largest kernel takes": lambda: [torch.randn(4) for _ in range(9)],
}


@pytest.mark.parametrize("made", UNSERVED.values(), ids=UNSERVED)
def test_what_the_kernel_does_not_serve_is_copied_by_torch(
    bench: Bench, made: Callable[[], list[torch.Tensor]]
) -> None:
    sources = made()
    buffers = [like(tensor) for tensor in sources]
    bench.stager(buffers)(*sources)
    assert all(torch.equal(buffer, source) for buffer, source in zip(buffers, sources, strict=True))
    assert (bench.launched, bench.by_torch) == (0, 1)


def test_a_call_whose_sources_lie_badly_is_copied_by_torch(bench: Bench) -> None:
    stage = bench.stager([buffer := torch.zeros(8), other := torch.zeros(8)])
    base = torch.arange(16.0)
    stage(base[:8], base[1:9])
    assert (bench.launched, bench.by_torch) == (0, 1)
    stage(base[:8], base[4:12])
    assert (bench.launched, bench.by_torch) == (1, 1)
    assert torch.equal(buffer, base[:8])
    assert torch.equal(other, base[4:12])


def test_the_smallest_kernel_of_the_device_that_takes_all_is_used(bench: Bench) -> None:
    for count in (1, 4, 5, 8):
        bench.stager([torch.zeros(4) for _ in range(count)])(*[torch.ones(4) for _ in range(count)])
    assert bench.sizes == [4, 4, 8, 8]
    assert staging.sizes() == [1, 2, 4, 8, 16, 32, 64]


def test_a_call_reads_marks_and_addresses_and_nothing_else() -> None:
    assert staging.source(3, 4) == (
        "def stage(s0, s1, s2):\n"
        "    if s0.is_conj() or s0.is_neg() or s1.is_conj() or s1.is_neg() or s2.is_conj() or s2.is_neg():\n"
        "        return slow(s0, s1, s2)\n"
        "    a0 = s0.data_ptr()\n"
        "    a1 = s1.data_ptr()\n"
        "    a2 = s2.data_ptr()\n"
        "    if (a0 | a1 | a2) & 15:\n"
        "        return slow(s0, s1, s2)\n"
        "    launch(programs, 1, 1, stream(), *handles, at, (a0, a1, a2, a0,), *constants)"
    )


def test_every_word_has_one_program() -> None:
    buffers = [torch.empty(staging.BLOCK * 2 + 1), torch.empty(3)]
    table = staging.rows(buffers)
    rows = [tuple(table[at : at + staging.ROW]) for at in range(0, len(table), staging.ROW)]
    first, second = (buffer.data_ptr() for buffer in buffers)
    words, block = staging.BLOCK * 2 + 1, staging.BLOCK
    places = [(0, 0, words, first), (0, block, words, first), (0, 2 * block, words, first), (1, 0, 3, second)]
    assert rows == [(*place, 0) for place in places]
    read = staging.rows(buffers, read=True)
    assert read == [number for place in places for number in (*place, 1)]


def test_torch_copies_where_another_device_is_current(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setitem(vars(_compat), "current_device", lambda: current[0])
    buffers = [torch.zeros(64)]
    stage = bench.stager(buffers)
    for current[0], ways in ((0, (1, 0)), (1, (1, 1)), (0, (2, 1))):
        source = torch.randn(64)
        stage(source)
        assert torch.equal(buffers[0], source)
        assert (bench.launched, bench.by_torch) == ways


@pytest.mark.parametrize("sizes", [(5,), (3 * staging.BLOCK + 5, staging.BLOCK), (1, 2, 3, 4, 5, 6, 7, 8), (0, 3)])
def test_outputs_are_copied_out_of_where_they_stay(bench: Bench, sizes: tuple[int, ...]) -> None:
    outputs = [torch.zeros(size) for size in sizes]
    unload = bench.unloader(outputs)
    assert unload is not None
    for _ in range(2):
        for output in outputs:
            output.normal_()
        before = [output.clone() for output in outputs]
        targets = [torch.UntypedStorage(4 * size) for size in sizes]
        unload(*targets)
        for target, output, value in zip(targets, outputs, before, strict=True):
            assert torch.equal(output, value)
            assert torch.equal(over(target, output), value)
    assert (bench.launched, bench.by_torch) == (2, 0)


class At:
    """A storage, as far as a copy out of a recording looks at it."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def test_storages_that_lie_badly_are_left_to_the_slow_way(bench: Bench) -> None:
    seen: list[tuple[object, ...]] = []
    outputs = [torch.ones(4), torch.ones(4)]
    unload = staging.unloader(0, outputs, lambda: 7, lambda *storages: seen.append(storages))
    assert unload is not None
    one, other = At(64), At(4)
    unload(one, other)
    assert (seen, bench.launched) == ([(one, other)], 0)


def test_a_copy_out_of_a_recording_reads_addresses_and_nothing_else() -> None:
    assert staging.source(2, 2, several=True, marks=False) == (
        "def stage(s0, s1):\n"
        "    if current() != device:\n"
        "        return slow(s0, s1)\n"
        "    a0 = s0.data_ptr()\n"
        "    a1 = s1.data_ptr()\n"
        "    if (a0 | a1) & 15:\n"
        "        return slow(s0, s1)\n"
        "    launch(programs, 1, 1, stream(), *handles, at, (a0, a1,), *constants)"
    )


def test_outputs_that_the_kernel_does_not_serve_are_copied_otherwise(bench: Bench) -> None:
    assert bench.unloader([torch.zeros(7, dtype=torch.uint8)]) is None
    assert bench.unloader([torch.zeros(staging.MOST_BYTES // 4 + 1)]) is None
    assert bench.unloader([torch.zeros(4) for _ in range(9)]) is None
    assert bench.unloader([torch.zeros(0)]) is None


def test_what_is_marked_as_conjugate_or_negative_is_copied_by_its_values(bench: Bench) -> None:
    x = torch.randn(8, dtype=torch.complex64)
    for source in (x.conj(), x, x.conj().imag):
        buffer = torch.zeros(source.shape, dtype=source.dtype)
        before = bench.by_torch
        bench.stager([buffer])(source)
        assert torch.equal(buffer, source)
        assert bench.by_torch - before == (source.is_conj() or source.is_neg())
