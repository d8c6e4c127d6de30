"""Whether anything is allocated into a pool, as torch's allocator shows it, on an allocator that stands for torch's."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigraph_backend import _compat
from multigraph_backend.allocator import ended_pools


class Stream:
    """`busy`: it has work; `captures`: it is being captured."""

    current: Stream

    def __init__(self, number: int) -> None:
        self.number, self.busy, self.captures = number, False, False
        self.asked = 0

    def query(self) -> bool:
        assert not self.captures, "that spoils the capture"
        self.asked += 1
        return not self.busy


class Allocator:
    """torch's, as far as it is asked here: blocks that another stream has used wait for an event on that."""

    def __init__(self, streams: int = 4) -> None:
        self.streams = [Stream(number) for number in range(streams)]
        self.turns = itertools.cycle(self.streams)
        self.own = Stream(-1)
        self.current = self.own
        self.is_open = self.full = False
        self.blocks: dict[int, str] = {}
        self.waiting: list[tuple[int, Stream]] = []
        self.addresses = itertools.count(512, 512)

    def empty(self, size: int, *, dtype: torch.dtype, device: str) -> Any:
        assert (size, dtype, device) == (1, torch.uint8, "cuda")
        if not self.is_open:
            for entry in [entry for entry in self.waiting if not entry[1].busy]:
                self.waiting.remove(entry)
                self.blocks[entry[0]] = "inactive"
        if self.full:
            raise torch.OutOfMemoryError("full")
        return Block(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def snapshot(self, pool: None) -> Any:
        return {"segments": [{"blocks": [{"address": key, "state": state} for key, state in self.blocks.items()]}]}


class Block:
    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.address, self.used_by = allocator, next(allocator.addresses), list[Stream]()
        allocator.blocks[self.address] = "active_allocated"
        weakref.finalize(self, Block.freed, allocator, self.address, self.used_by)

    @staticmethod
    def freed(allocator: Allocator, address: int, used_by: list[Stream]) -> None:
        allocator.blocks[address] = "active_pending_free" if used_by else "inactive"
        allocator.waiting += [(address, stream) for stream in used_by]

    def data_ptr(self) -> int:
        return self.address

    def record_stream(self, stream: Stream) -> None:
        assert stream is not self.allocator.own
        self.used_by.append(stream)


class Pool:
    pass


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    cuda = SimpleNamespace(
        device=lambda index: contextlib.nullcontext(),
        Stream=lambda: next(made.turns),
        stream=made.stream,
        current_stream=lambda: made.current,
        MemPool=Pool,
    )
    stands_in = SimpleNamespace(empty=made.empty, uint8=torch.uint8, cuda=cuda, OutOfMemoryError=torch.OutOfMemoryError)
    monkeypatch.setattr(ended_pools, "torch", stands_in)
    monkeypatch.setattr(ended_pools, "beside_captures", contextlib.nullcontext)
    monkeypatch.setattr(ended_pools, "_spare", {})
    monkeypatch.setattr(ended_pools, "_over", {})
    monkeypatch.setattr(ended_pools, "_all", weakref.WeakSet())
    monkeypatch.setitem(vars(_compat), "is_capturing", lambda: made.current.captures)
    monkeypatch.setitem(vars(_compat), "raw_snapshot", made.snapshot)
    return made


def test_what_is_open_is_seen_and_nothing_else(allocator: Allocator) -> None:
    assert [ended_pools.allocates_into_a_pool(0) for _ in range(3)] == [False] * 3
    allocator.is_open = True
    assert ended_pools.allocates_into_a_pool(0)
    assert ended_pools.allocates_into_a_pool(0)
    allocator.is_open = False
    assert not ended_pools.allocates_into_a_pool(0)
    assert list(allocator.blocks.values()).count("active_allocated") == 1  # for the next question


def test_streams_that_are_busy_are_passed_over(allocator: Allocator) -> None:
    for stream in allocator.streams[:3]:
        stream.busy = True
    assert not ended_pools.allocates_into_a_pool(0)
    allocator.streams[3].busy = True
    assert ended_pools.allocates_into_a_pool(0)  # it cannot be told, so nothing goes


def test_a_capture_is_seen_and_not_asked(allocator: Allocator) -> None:
    allocator.streams[1].captures = allocator.streams[0].busy = True
    assert ended_pools.allocates_into_a_pool(0)
    assert allocator.streams[1].asked == 0
    allocator.streams[1].captures, allocator.own.captures = False, True
    assert ended_pools.allocates_into_a_pool(0)


def test_it_is_known_where_memory_has_run_out(allocator: Allocator) -> None:
    ended_pools.begin(0)
    allocator.full = True
    assert not ended_pools.allocates_into_a_pool(0)
    assert ended_pools.allocates_into_a_pool(0)  # nothing was left for another question
    allocator.full = False
    assert not ended_pools.allocates_into_a_pool(0)


def test_pools_that_are_over_go_as_soon_as_they_can(allocator: Allocator) -> None:
    pools: Any = [ended_pools.begin(0), ended_pools.begin(0)]
    seen = [weakref.ref(pool) for pool in pools]
    allocator.is_open = True
    ended_pools.end(pools, 0)
    assert pools == []
    ended_pools.begin(0)
    assert all(pool() is not None for pool in seen)
    allocator.is_open = False
    ended_pools.sweep(1)
    assert all(pool() is not None for pool in seen)
    ended_pools.sweep(0)
    assert [pool() for pool in seen] == [None, None]


def test_the_interpreter_s_end_takes_no_pool(allocator: Allocator) -> None:
    pool: Any = ended_pools.begin(0)
    ended_pools._leave_to_the_process()
    seen = weakref.ref(pool)
    del pool
    left = seen()
    assert left is not None
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(left))  # what this test took
    del left
    assert seen() is None
