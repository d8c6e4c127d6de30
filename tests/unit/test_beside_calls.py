"""What threads of workers do in this process while calls go on: one at a time, in slices or with a rest at the end."""

from __future__ import annotations

import threading
import time

import pytest

from multigraph_backend import events
from multigraph_backend.lower import workers
from multigraph_backend.process import giving_way
from multigraph_backend.region import background


class Owner:
    pass


def small() -> None:
    """What a thread calls while it works."""


def work(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        small()


@pytest.fixture
def unsliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a debugger looks."""
    monkeypatch.setattr(giving_way, "_watch", lambda *_: False)


def rests(monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int) -> list[float]:
    slept: list[float] = []
    owner = Owner()
    counter = events.call_counter("variant_calls", owner)
    with monkeypatch.context() as patched:
        patched.setattr(background, "_rest", slept.append)
        with background._beside_calls():
            work(seconds)
            for _ in range(calls):
                counter.tick()
    return slept


@pytest.mark.parametrize("limit", [None, 0.02])
def test_it_rests_in_between_while_calls_come(monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    slept: list[float] = []
    owner = Owner()
    counter = events.call_counter("variant_calls", owner)
    monkeypatch.setattr(background, "_rest", slept.append)
    with background._beside_calls(limit):
        way = giving_way.of_this_thread()
        assert way is not None
        for _ in range(20):
            work(2 * giving_way.SLICE)
            counter.tick()
    if limit is None:
        assert way.rested >= 10 * giving_way.REST
    else:
        assert 0 < way.rested < limit / 2 + giving_way.REST
    assert not slept


def test_it_does_not_rest_while_it_is_waited_for() -> None:
    owner = Owner()
    counter = events.call_counter("variant_calls", owner)
    with background.waited_for(), background._beside_calls():
        way = giving_way.of_this_thread()
        assert way is not None
        for _ in range(10):
            work(2 * giving_way.SLICE)
            counter.tick()
    assert not way.rested
    assert workers.pool.gives_way


@pytest.mark.usefixtures("unsliced")
def test_it_rests_longer_than_it_worked_where_calls_came(monkeypatch: pytest.MonkeyPatch) -> None:
    (slept,) = rests(monkeypatch, 0.02, 3)
    assert slept >= 4 * 0.02


@pytest.mark.usefixtures("unsliced")
def test_no_rest_is_longer_than_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rests(monkeypatch, 0.6, 1) == [2.0]


@pytest.mark.usefixtures("unsliced")
def test_it_does_not_rest_where_none_came(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rests(monkeypatch, 0.02, 0) == []


@pytest.mark.usefixtures("unsliced")
def test_what_fails_rests_too_and_lets_the_next_one_in(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    owner = Owner()
    counter = events.call_counter("generic_calls", owner)
    monkeypatch.setattr(background, "_rest", slept.append)

    def fails() -> None:
        with background._beside_calls():
            counter.tick()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert len(slept) == 1
    with background._beside_calls():
        pass


def test_there_is_one_at_a_time() -> None:
    inside = most = 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with background._beside_calls():
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
