"""Counts are exact under threads, survive their owners, and start anew when asked."""

from __future__ import annotations

import gc
import logging
import threading

import pytest

from multigraph_backend import events


class Owner:
    pass


def test_no_call_is_lost_when_threads_race() -> None:
    owner = Owner()
    counter = events.call_counter("variant_calls", owner)

    def work() -> None:
        for _ in range(5000):
            counter.tick()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    reads = [counter.value for _ in range(100)]
    for thread in threads:
        thread.join()
    assert counter.value == 40000
    assert reads == sorted(reads)
    assert events.stats()["variant_calls"] == 40000


def test_calls_of_an_owner_that_is_gone_still_count() -> None:
    owner = Owner()
    events.call_counter("generic_calls", owner).tick()
    before = events.stats()["generic_calls"]
    del owner
    gc.collect()
    assert before == events.stats()["generic_calls"] == 1


def test_a_reset_starts_every_count_at_zero_and_keeps_the_owner_s_own() -> None:
    owner = Owner()
    counter = events.call_counter("generic_calls", owner)
    counter.tick()
    events.count("regions")
    events.reset_stats()
    assert set(events.stats().values()) == {0}
    counter.tick()
    assert events.stats()["generic_calls"] == 1
    assert counter.value == 2


def test_a_warning_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="multigraph_backend"):
        for _ in range(3):
            events.warn_once("a test's own key", "said %s", "once")
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "DEBUG"]
