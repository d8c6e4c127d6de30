"""Recordings while memory that they read sleeps, and recordings that give way, on the simulated device."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import multigraph_backend
from multigraph_backend.allocator import Asleep, sleeping
from multigraph_backend.allocator.sleeping import Sleeper
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.recordings.asleep import never
from tests.support.simulated.pieces import Bench, assert_equal, call_right, values


def weighted(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * w + 1,)


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2,)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A tree that hears of what sleeps, as those of the runtime do."""
    made = Bench()
    monkeypatch.setattr(runtime, "_trees", {made.device.index: made.tree})
    assert not sleeping.asleep(made.device.index)
    yield made
    sleeping._asleep.clear()


def sleeper(bench: Bench, *tensors: torch.Tensor) -> Sleeper:
    return Sleeper(bench.device.index, tuple((bench.device.address(each), each.nbytes) for each in tensors))


def fall_asleep(key: object, which: Sleeper) -> None:
    assert sleeping.fall_asleep(key, which, lambda: 7) == 7


def test_a_recording_whose_parameter_sleeps_is_not_replayed_and_others_are(bench: Bench) -> None:
    one, two = values(), values()
    piece = bench.piece(weighted, 2, 1, static=(1,))
    other = bench.piece(weighted, 2, 1, static=(1,))
    for _ in range(4):
        call_right(piece, weighted, values(), one)
        call_right(other, weighted, values(), two)
    recorded, replays = bench.recorded(), bench.replays()
    fall_asleep("pool", sleeper(bench, one))
    for _ in range(3):
        with pytest.raises(Asleep, match="weighted: called while memory that it reads sleeps; wake it first"):
            piece([values(), one])
        call_right(other, weighted, values(), two)
    assert bench.replays() == replays + 3
    sleeping.woken("pool")
    for _ in range(3):
        call_right(piece, weighted, values(), one)
    assert (bench.recorded(), bench.replays()) == (recorded, replays + 6)  # nothing was recorded again


def test_one_behind_a_recording_that_was_given_up_is_not_replayed_either(bench: Bench) -> None:
    w = values()
    first, second = bench.piece(double, 1, 1), bench.piece(weighted, 2, 1, static=(1,))
    for _ in range(4):
        call_right(second, weighted, call_right(first, double, values())[0], w)
    held = call_right(first, double, values())[0]
    bench.tree.drop([first])
    assert bench.tree.size == 0  # and what is behind `first` is found as long as that is on the path
    replays = bench.replays()
    call_right(second, weighted, held, w)
    fall_asleep("pool", sleeper(bench, w))
    with pytest.raises(Asleep, match="called while memory that it reads sleeps"):
        second([held, w])
    assert bench.replays() == replays + 1
    sleeping.woken("pool")
    call_right(second, weighted, held, w)
    assert bench.replays() == replays + 2


def test_code_that_was_not_recorded_yet_is_refused_too(bench: Bench) -> None:
    w = values()
    piece = bench.piece(weighted, 2, 1, static=(1,))
    fall_asleep("pool", sleeper(bench, w))
    with pytest.raises(Asleep):
        piece([values(), w])
    with pytest.raises(Asleep):
        bench.tree.as_it_is(piece.function, [values(), w])
    sleeping.woken("pool")
    for _ in range(3):
        call_right(piece, weighted, values(), w)


def test_while_all_sleeps_nothing_runs_and_nothing_is_given_up(bench: Bench) -> None:
    w = values()
    piece = bench.piece(weighted, 2, 1, static=(1,))
    for _ in range(3):
        (held,) = call_right(piece, weighted, values(), w)
    expected = held.clone()
    fall_asleep("process", Sleeper(bench.device.index, None))
    log = len(bench.device.log)
    with pytest.raises(Asleep, match="all memory of the device sleeps"):
        piece([values(), w])
    bench.tree.forget()
    bench.tree.drop([bench.piece(weighted, 2, 1)])
    with pytest.raises(Asleep):
        multigraph_backend.release()
    assert not bench.tree.give_way()
    assert len(bench.device.log) == log  # the device was asked for nothing
    sleeping.woken("process")
    assert not bench.tree.forgets  # what was asked for meanwhile is done
    assert bench.tree.size == 0
    assert_equal((held,), (expected,))
    call_right(piece, weighted, values(), w)


def test_two_that_sleep_wake_one_after_the_other(bench: Bench) -> None:
    one, two = values(), values()

    def sum_of(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * a + b,)

    piece = bench.piece(sum_of, 3, 1, static=(1, 2))
    for _ in range(3):
        call_right(piece, sum_of, values(), one, two)
    fall_asleep("one", sleeper(bench, one))
    fall_asleep("two", sleeper(bench, two))
    sleeping.woken("one")
    with pytest.raises(Asleep):
        piece([values(), one, two])
    sleeping.woken("two")
    replays = bench.replays()
    call_right(piece, sum_of, values(), one, two)
    assert bench.replays() == replays + 1


def test_a_sleep_that_fails_leaves_everything_awake(bench: Bench) -> None:
    w = values()
    piece = bench.piece(weighted, 2, 1, static=(1,))
    for _ in range(3):
        call_right(piece, weighted, values(), w)

    def refuse() -> int:
        raise Asleep("the host has no memory")

    with pytest.raises(Asleep, match="the host"):
        sleeping.fall_asleep("pool", sleeper(bench, w), refuse)
    replays = bench.replays()
    call_right(piece, weighted, values(), w)
    assert bench.replays() == replays + 1


def test_memory_does_not_sleep_under_a_call(bench: Bench) -> None:
    w = values()
    begun, goes_on = threading.Event(), threading.Event()

    def slow(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        begun.set()
        assert goes_on.wait(10)
        return weighted(x, w)

    piece = bench.piece(slow, 2, 1)
    thread = threading.Thread(target=piece, args=([values(), w],))
    thread.start()
    assert begun.wait(10)
    with pytest.raises(Asleep, match="a call of compiled code is under way"):
        fall_asleep("pool", sleeper(bench, w))
    goes_on.set()
    thread.join()
    fall_asleep("pool", sleeper(bench, w))
    assert sleeping.asleep(bench.device.index)


def test_collectives_over_memory_that_is_to_sleep(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    w = values()
    piece = bench.piece(weighted, 2, 1, static=(1,), groups=("group",))
    for _ in range(3):
        call_right(piece, weighted, values(), w)
    with pytest.raises(Asleep, match="NCCL may have registered memory that is to sleep; set NCCL_GRAPH_REGISTER=0"):
        fall_asleep("pool", sleeper(bench, w))
    call_right(piece, weighted, values(), w)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    fall_asleep("pool", sleeper(bench, w))


def test_what_is_in_a_pool_that_ended_asleep_is_refused_until_it_is_gone(bench: Bench) -> None:
    w = values()
    piece = bench.piece(weighted, 2, 1, static=(1,))
    for _ in range(3):
        call_right(piece, weighted, values(), w)
    fall_asleep("pool", sleeper(bench, w))
    left: list[sleeping.Range] = [(0, 1)]
    sleeping.ended("pool", lambda: left)
    with pytest.raises(Asleep, match="called while memory that it reads sleeps"):
        piece([values(), w])
    other = values()
    call_right(piece, weighted, values(), other)
    left.clear()
    for _ in range(3):
        call_right(piece, weighted, values(), other)
    assert any(node.holds is never for node in bench.tree.root.below())


# ---------------------------------------------------------------- recordings that go


def test_release_gives_all_recordings_up_and_the_next_calls_record_again(bench: Bench) -> None:
    w = values()
    piece = bench.piece(weighted, 2, 1, static=(1,))
    for _ in range(4):
        (held,) = call_right(piece, weighted, values(), w)
    expected = held.clone()
    recorded = bench.recorded()
    had = bench.device.reserved_bytes()
    assert multigraph_backend.release() > 0
    assert bench.device.reserved_bytes() < had
    assert bench.tree.size == 0
    assert_equal((held,), (expected,))  # it was moved
    for _ in range(3):
        call_right(piece, weighted, values(), w)
    assert bench.recorded() == recorded + 1


def test_recordings_give_way_and_what_is_alive_stays(bench: Bench) -> None:
    w = values()
    piece = bench.piece(weighted, 2, 1, static=(1,))
    for _ in range(4):
        (held,) = call_right(piece, weighted, values(), w)
    expected, address = held.clone(), bench.device.address(held)
    assert bench.tree.give_way()
    assert bench.device.address(held) == address
    assert not bench.tree.give_way()  # nothing is left
    for _ in range(3):
        call_right(piece, weighted, values(), w)
    assert_equal((held,), (expected,))
    taken, gone = threading.Event(), threading.Event()

    def hold() -> None:
        with bench.tree.lock:
            taken.set()
            gone.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)
    assert not bench.tree.give_way()  # and it waits for nobody
    gone.set()
    thread.join()
    assert bench.tree.give_way()
