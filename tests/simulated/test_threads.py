"""Outputs are copies while several threads call, which is said, counted, and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from multigraph_backend import events
from multigraph_backend.cudagraphs import account
from multigraph_backend.cudagraphs.limits import Limits
from tests.support.simulated.pieces import Bench, assert_equal, call_right, values
from tests.support.simulated.random_programs import Threads

LONG = Limits(idle=1e6)


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


def in_pool(bench: Bench, output: torch.Tensor) -> bool:
    return bench.device._memory.of(output.untyped_storage()) is not None


class Shared:
    """A piece that this thread has recorded, and another thread that stays."""

    def __init__(self, limits: Limits) -> None:
        self.bench = Bench(limits)
        self.piece = self.bench.piece(double, 1, 1)
        self.threads = Threads()
        for _ in range(3):
            self.call()

    def call(self) -> bool:
        """Whether the output lies in the pool."""
        (y,) = call_right(self.piece, double, values())
        return in_pool(self.bench, y)

    def elsewhere(self, work: Callable[[], Any] | None = None) -> Any:
        return self.threads.run(1, work or self.call)


def test_a_warming_thread_that_has_ended_makes_no_copies_any_more(caplog: pytest.LogCaptureFixture) -> None:
    shared = Shared(LONG)
    bench = shared.bench
    with caplog.at_level(logging.DEBUG, "multigraph_backend"):  # a warning the first time in a process
        assert not shared.elsewhere()
    (said,) = [text for record in caplog.records if (text := record.getMessage()).startswith("threads ")]
    assert said.startswith("threads 'MainThread' and ")
    assert "all outputs are copies" in said
    assert (bench.tree.counts["shared"], events.stats()["shared_by_threads"]) == (1, 1)
    assert "  several threads called 1 times; now: all outputs are copies" in str(account.of(bench.tree))
    assert [shared.call() for _ in range(20)] == [False] * 20
    shared.threads.close()
    assert [shared.call() for _ in range(20)][-8:] == [True] * 8
    assert "  several threads called 1 times; now: no more" in str(account.of(bench.tree))
    assert bench.unrecorded(shared.piece) == {}
    assert bench.recorded() == 1


def test_a_thread_that_is_idle_makes_no_copies_until_it_comes_back() -> None:
    shared = Shared(Limits(idle=0.0))
    for round_ in range(3):
        assert not shared.elsewhere()
        assert [shared.call() for _ in range(20)][-8:] == [True] * 8
        assert shared.bench.tree.counts["shared"] == round_ + 1
    assert shared.bench.tree.callers._returns == 8, "each time that it comes back it is waited for longer"
    shared.threads.close()


def test_what_a_thread_holds_from_before_stays_what_it_is() -> None:
    shared = Shared(Limits(idle=0.0))
    x = values()
    mine = list(shared.piece([x]))
    assert in_pool(shared.bench, mine[0])

    def others() -> None:
        for _ in range(40):
            shared.call()
            assert_equal(mine, double(x))

    shared.elsewhere(others)
    assert shared.bench.tree.shared, "this thread's output lies where it was made"
    mine.clear()
    shared.elsewhere(lambda: [shared.call() for _ in range(20)])
    assert not shared.bench.tree.shared
    shared.threads.close()


def test_outputs_that_were_seen_held_stay_copies() -> None:
    shared = Shared(LONG)
    x = values()
    (held,) = shared.piece([x])
    for _ in range(2):
        shared.call()  # moves it
    assert shared.bench.clones() == 1
    shared.elsewhere()
    shared.threads.close()
    assert [shared.call() for _ in range(20)] == [False] * 20
    assert not shared.bench.tree.shared
    assert_equal((held,), double(x))


def test_threads_that_come_and_go_are_not_kept() -> None:
    shared = Shared(LONG)
    shared.elsewhere()
    for _ in range(20):
        thread = threading.Thread(target=shared.call)
        thread.start()
        thread.join()
        shared.call()
    for _ in range(16):
        shared.call()
    assert len(shared.bench.tree.callers._callers) <= 2
    shared.threads.close()


def test_a_driver_error_where_a_second_thread_begins_to_call_costs_it_nothing() -> None:
    shared = Shared(LONG)
    (y,) = shared.piece([values()])
    y.untyped_storage().resize_(1 << 12)  # its place in the pool gets a storage of its own before it serves again
    del y
    shared.bench.device.fail_at("storage_at")
    for _ in range(2):
        assert not shared.elsewhere()
    assert "storage_at" not in shared.bench.device._failures
    shared.threads.close()
