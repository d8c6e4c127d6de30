"""`multigraph_backend.allocator` over the simulated driver: which library it takes, and what it reads from it."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multigraph_backend.allocator import library, statistics
from tests.support.allocator.extension import ANY_STREAM, MIB, Allocator, Refused

Make = Callable[..., Allocator]


def look(path: Path | str) -> library.Found:
    return library.look({library.PATH_VARIABLE: str(path)})


def compiled(folder: Path, source: str) -> Path:
    (folder / "other.c").write_text(source)
    built = folder / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, folder / "other.c"], check=True, timeout=60)
    return built


# ---------------------------------------------------------------- which library


def test_the_library_as_it_is_delivered_is_taken(library: Path) -> None:
    found = look(library)
    assert found.library is not None
    assert (found.reason, found.path, found.abi) == (None, library, 1)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    found = look(tmp_path / "none.so")
    assert found.library is None
    assert found.reason == f"the extension is not built: there is no {tmp_path / 'none.so'}"


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    reason = look(tmp_path / "text.so").reason
    assert reason is not None
    assert reason.startswith("text.so cannot be loaded: ")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("int nothing() { return 0; }", "libother.so cannot be loaded: "),
        (
            "int mg_abi_version() { return 99; }",
            "libother.so has ABI version 99, and this multigraph knows 1: install both alike",
        ),
        (f"int mg_abi_version() {{ return {library.ABI_VERSION}; }}", "libother.so lacks a function: "),
    ],
    ids=["another library", "another version", "a function is missing"],
)
def test_a_library_that_does_not_fit(tmp_path: Path, source: str, expected: str) -> None:
    found = look(compiled(tmp_path, source))
    assert found.library is None
    assert str(found.reason).startswith(expected)


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGE", "multigraph_allocator_of_a_test")
    (tmp_path / "multigraph_allocator_of_a_test.py").write_text("raise OSError('broken\\nin two lines')")
    assert str(library.look({}).reason).startswith("the extension is not installed: pip install multigraph-allocator")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = "the package multigraph_allocator_of_a_test cannot be imported: OSError: broken"
    assert library.look({}).reason == said


# ---------------------------------------------------------------- what is read


@pytest.fixture
def loaded(simulated: Path) -> library.Library:
    found = look(simulated / "libmultigraph_allocator_sim.so").library
    assert found is not None
    return found


def handle(allocator: Allocator) -> int:
    value = allocator._device.value
    assert value is not None
    return value


def test_statistics(make: Make, loaded: library.Library) -> None:
    allocator = make(reuse=ANY_STREAM)
    one, two = allocator.stream(), allocator.stream()
    first, second = allocator.allocate(3 * MIB - 100, one), allocator.allocate(2 * MIB, two)
    allocator.free(first)
    stats = statistics.stats_of(loaded, handle(allocator))
    level = [stats[f"allocated_bytes.all.{name}"] for name in ("current", "peak", "allocated", "freed")]
    assert level == [2 * MIB, 5 * MIB, 5 * MIB, 3 * MIB]
    assert stats["requested_bytes.all.peak"] == 5 * MIB - 100
    assert stats["segment.all.current"] == 2
    assert stats["reserved_bytes.all.current"] == 40 * MIB
    # the counts come by another way, and are told apart
    own = allocator.stats
    assert {name: stats[f"multigraph.{name}"] for name in ("parked", "proven", "freed_in_captures")} == {
        "parked": own.parked, "proven": own.proven, "freed_in_captures": own.freed_in_captures,
    }  # fmt: skip
    allocator.free(second)


def test_counts_of_reuse_in_a_capture(make: Make, loaded: library.Library) -> None:
    allocator = make()
    main, side = allocator.stream(), allocator.stream()
    allocator.begin_pool(1, lambda stream: True)
    allocator.begin_capture(main)
    allocator.join(side, main)
    block = allocator.allocate(4 * MIB, main)
    allocator.record_stream(block, side)
    allocator.kernel(side)
    allocator.free(block)
    allocator.join(main, side)
    again = allocator.allocate(4 * MIB, main)
    assert again == block
    stats = statistics.stats_of(loaded, handle(allocator))
    assert (stats["multigraph.freed_in_captures"], stats["multigraph.proven"]) == (1, 1)
    allocator.end_capture(main)
    allocator.end_pool(1)
    allocator.free(again)


def test_a_snapshot_has_torch_s_words_and_goes_through_pickle(make: Make, loaded: library.Library) -> None:
    allocator = make(history=10, capacity=64 * MIB)
    one, two = allocator.stream(), allocator.stream()
    waiting, live = allocator.allocate(MIB, one), allocator.allocate(3 * MIB, one)
    allocator.kernel(two)
    allocator.record_stream(waiting, two)
    allocator.free(waiting)
    before = statistics.snapshot_of(loaded, handle(allocator))["segments"]
    states = {block["address"]: block["state"] for segment in before for block in segment["blocks"]}
    assert (states[live], states[waiting]) == ("active_allocated", "active_awaiting_free")
    with pytest.raises(Refused, match="out of memory"):
        allocator.allocate(200 * MIB, one)
    snapshot = pickle.loads(pickle.dumps(statistics.merged([{}, statistics.snapshot_of(loaded, handle(allocator))])))
    none, history = snapshot["device_traces"]
    assert none == []
    assert [entry["action"] for entry in history] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed", "segment_free", "oom",
    ]  # fmt: skip
    assert all({"size", "stream", "frames", "time_us"} <= entry.keys() for entry in history)
    assert all("addr" in entry for entry in history[:-1])
    assert "device_free" in history[-1]
    allocator.free(live)


def test_a_pool_s_segments_are_told_apart(make: Make, loaded: library.Library) -> None:
    allocator = make()
    stream = allocator.stream()
    allocator.begin_pool(5, lambda _: True)
    pooled = allocator.allocate(30 * MIB, stream)
    allocator.end_pool(5)
    plain = allocator.allocate(30 * MIB, stream)
    (segment,) = statistics.segments_of(loaded, handle(allocator), (0, 5))
    assert (segment["address"], segment["total_size"]) == (pooled, 30 * MIB)
    allocator.free(pooled)
    allocator.free(plain)


def test_a_call_that_is_refused_says_why(make: Make, loaded: library.Library) -> None:
    allocator = make()
    with pytest.raises(library.Refused, match="there is no such pool"):
        loaded.call("mg_end_pool", handle(allocator), 1, 2)


# ---------------------------------------------------------------- segments for torch's pools


def opened(loaded: library.Library, limit: int) -> tuple[int, Callable[..., Any], Callable[..., Any]]:
    allocate, release = ctypes.c_void_p(), ctypes.c_void_p()
    slot = loaded.call("mg_segments_open", limit, ctypes.byref(allocate), ctypes.byref(release))
    assert slot >= 0
    size_t, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    assert allocate.value is not None
    assert release.value is not None
    return (
        slot,
        ctypes.CFUNCTYPE(pointer, size_t, number, pointer)(allocate.value),
        ctypes.CFUNCTYPE(None, pointer, size_t, number, pointer)(release.value),
    )


def read(loaded: library.Library, slot: int) -> list[int]:
    sizes = [ctypes.c_size_t() for _ in range(3)]
    refused = ctypes.c_uint64()
    loaded.call("mg_segments_read", slot, *(ctypes.byref(out) for out in (*sizes, refused)))
    return [out.value for out in (*sizes, refused)]


def test_segments_are_counted_limited_and_given_back(make: Make, loaded: library.Library) -> None:
    allocator = make(capacity=64 * MIB)
    allocator.stream()  # and its simulator is the thread's
    before = allocator.driver_bytes
    slot, allocate, release = opened(loaded, 8 * MIB)
    other, allocate_other, release_other = opened(loaded, 0)
    assert other != slot
    first, second = allocate(2 * MIB, 0, None), allocate(6 * MIB, 0, None)
    assert allocate(2 * MIB, 0, None) is None  # the limit
    assert read(loaded, slot) == [8 * MIB, 8 * MIB, 2, 1]
    big = allocate_other(40 * MIB, 0, None)  # another pool's limit is no limit of this one
    assert big is not None
    assert allocate_other(40 * MIB, 0, None) is None  # the device
    assert allocator.driver_bytes == before + 48 * MIB
    release(first, 2 * MIB, 0, None)
    assert read(loaded, slot) == [6 * MIB, 8 * MIB, 1, 1]
    loaded.call("mg_segments_close", slot)
    again, *_ = opened(loaded, 0)
    assert again != slot  # it still has a segment
    release(second, 6 * MIB, 0, None)
    release_other(big, 40 * MIB, 0, None)
    assert allocator.driver_bytes == before
    for number in (again, other):
        loaded.call("mg_segments_close", number)
    reopened, *_ = opened(loaded, 0)
    assert reopened == min(slot, other, again)
    loaded.call("mg_segments_close", reopened)
