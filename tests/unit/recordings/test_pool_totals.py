"""What an allocator's totals say of a pool and of a capture, without asking it about each block."""

from __future__ import annotations

import pytest

from multigraph_backend.cudagraphs.devices import memory_pool
from multigraph_backend.cudagraphs.devices.cuda import _Totals
from multigraph_backend.cudagraphs.devices.memory_pool import Reserved, TorchPool


def test_segments_are_walked_when_memory_was_reserved_or_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TorchPool.__new__(TorchPool)
    pool.index, pool._looked_at, pool._held = 0, None, 0
    segments, walks = [(0, 10), (64, 20)], 0
    now: Reserved | None = Reserved(100, 100, 0)

    def walked(self: TorchPool) -> list[tuple[int, int]]:
        nonlocal walks
        walks += 1
        return list(segments)

    monkeypatch.setattr(memory_pool, "reserved", lambda index: now)
    monkeypatch.setattr(TorchPool, "segments", walked)
    assert [pool.held(), pool.held(), walks] == [30, 30, 1]
    del segments[1:]
    now = Reserved(100, 120, 20)  # as much as before, and others
    assert [pool.held(), pool.held(), walks] == [10, 10, 2]
    now = None  # a forked process
    assert [pool.held(), walks] == [10, 2]


def test_the_peak_of_a_capture_is_bounded_from_above() -> None:
    def totals(now: int, most: int, taken: int) -> _Totals:
        return _Totals(reserved=0, reserved_taken=0, allocated=now, allocated_most=most, allocated_taken=taken)

    before = totals(now=100, most=500, taken=1000)
    assert before.most_until(totals(now=120, most=500, taken=1050)) == 50  # no more than was allocated in all
    assert before.most_until(totals(now=120, most=500, taken=9000)) == 400  # nor than the process ever had
    assert before.most_until(totals(now=120, most=800, taken=9000)) == 700  # its peak moved: that is it
    assert before.most_until(before) == 0
