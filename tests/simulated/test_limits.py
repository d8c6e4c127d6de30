"""Limits of memory hold: what is worth less gives way, a share of the device stays free, and recordings give way where
memory runs out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings import cost, room
from multigraph_backend.cudagraphs.recordings.out_of_memory import HINT
from multigraph_backend.cudagraphs.recordings.room import NO_ROOM, RAN_OUT, TIGHT
from multigraph_backend.process import garbage, rank
from tests.support.simulated.pieces import Bench, assert_equal, call_right, values

UNIT = 64  # bytes of the smallest block, and of what `double` returns for a row of 16
ROW = UNIT // 4


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


def grown(n: int, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.repeat(n),)


class Clock:
    """Time that only a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(room.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def held(bench: Bench) -> int:
    """Bytes of all pools."""
    return sum(pool.held for pool in bench.device._pools.values())


# ---------------------------------------------------------------- bytes of the pool


class Workspace:
    """Code that takes `units` of memory besides, while it runs."""

    def __init__(self, bench: Bench, units: int, scale: float = 2.0) -> None:
        self.bench, self.units, self.scale, self.runs = bench, units, scale, 0

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        self.runs += 1
        if self.units:
            self.bench.device.use(self.units * UNIT)
        return (x * self.scale,)

    def right(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * self.scale,)


def worth(monkeypatch: pytest.MonkeyPatch, saved: float) -> None:
    """Every replay saves so many microseconds."""
    monkeypatch.setattr(cost, "saved_us", lambda code_us, trial: saved)


def test_a_fraction_of_the_device_is_a_limit_of_the_pools_bytes() -> None:
    bench = Bench(Limits(pool_bytes=0.25, keep_free=0), granularity=UNIT, device_bytes=UNIT * 80)
    piece = bench.piece(grown, 2, 1)
    x = torch.randn(ROW)
    for _ in range(3):
        for n in range(1, 31):
            call_right(piece, grown, n, x)
            assert held(bench) <= UNIT * 20
    assert bench.tree.size >= 15
    assert list(bench.unrecorded(piece)) == [NO_ROOM]


class Contest:
    """Two pieces that fit into the limit alone and not together: the second follows the first, whose output is held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        worth(monkeypatch, 1e5)  # recording again is nothing against it
        self.bench = bench = Bench(Limits(pool_bytes=12 * UNIT, keep_free=0), granularity=UNIT)
        self.first, self.second = bench.piece(grown, 2, 1, label="first"), bench.piece(grown, 2, 1, label="second")
        self.x = torch.randn(ROW)

    def call(self, piece: Any, n: int) -> tuple[Any, ...]:
        return call_right(piece, grown, n, self.x)

    def recorded(self) -> set[str]:
        return {node.keyed.piece.spec.label for node in self.bench.tree.root.below() if node.keyed is not None}


def holes(bench: Bench, units: int) -> None:
    """Let the pool's next capture find so many units of its memory unusable, as another's holes make them."""
    device = bench.device
    allocate = type(device._pool).allocate

    def with_holes(nbytes: int, pool: Any = device._pool) -> int:
        if pool is device._pool and pool.held < units * UNIT + nbytes:
            pool.held = units * UNIT + nbytes
        return allocate(pool, nbytes)

    device._pool.allocate = with_holes  # type: ignore[method-assign]


def test_what_has_been_called_more_often_stays_and_what_comes_to_be_gets_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contest = Contest(monkeypatch)
    bench = contest.bench
    for _ in range(8):
        contest.call(contest.first, 8)
    assert contest.recorded() == {"first"}
    # the second would fit alone: in this pool it finds holes alone, and the pool outgrows its limit
    holes(bench, 8)
    contest.call(contest.second, 5)
    contest.call(contest.second, 5)
    assert contest.recorded() == set()  # a fresh pool, in which the first is recorded again
    assert held(bench) == 0
    contest.call(contest.first, 8)
    contest.call(contest.first, 8)
    assert contest.recorded() == {"first"}
    captures = len(bench.device.calls("capture_begin"))
    contest.call(contest.second, 5)
    assert contest.recorded() == {"first"}, "it is put off, and is not tried at each call"
    assert len(bench.device.calls("capture_begin")) == captures
    for _ in range(70):
        contest.call(contest.second, 5)
    assert "second" in contest.recorded(), "by now it is worth more"
    assert bench.tree.counts["gave way"] == 1
    for _ in range(3):
        contest.call(contest.first, 8)
        assert held(bench) <= 12 * UNIT
    assert bench.unrecorded(contest.second)[NO_ROOM] > 0


def test_the_value_of_a_recording_is_what_its_replays_save() -> None:
    trial = cost.Trial(100.0, lambda: 5.0)
    assert cost.saved_us(100.0, None) == pytest.approx(80.0)  # an estimate: most of its code are launches
    assert cost.saved_us(100.0, trial) == pytest.approx(80.0)  # not replayed yet
    for microseconds in (40.0, 15.0, 20.0):
        trial.ran(microseconds)
    assert cost.saved_us(100.0, trial) == 80.0  # 15 for a replay and 5 for copies
    assert cost.saved_us(10.0, cost.Trial(10.0, lambda: None)) == pytest.approx(8.0)
    slow = cost.Trial(10.0, lambda: None)
    slow.ran(50.0)
    assert cost.saved_us(10.0, slow) == 0.0


# ---------------------------------------------------------------- what is left to others


def test_a_process_with_little_free_memory_records_nothing_and_takes_nothing_in_the_pool(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(granularity=UNIT, device_bytes=1000 * UNIT)
    bench.device.ballast = 960 * UNIT
    piece = bench.piece(double, 1, 1)
    for _ in range(6):
        (y,) = call_right(piece, double, values(ROW))
        assert bench.device.address(y) < 1 << 48
    assert bench.unrecorded(piece) == {TIGHT: 5}
    assert held(bench) == 0
    assert bench.tree.counts["warm-ups elsewhere"] == 1
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"double runs unrecorded: {TIGHT}"]
    # the ballast goes; it is looked at seldom
    bench.device.ballast = 0
    call_right(piece, double, values(ROW))
    assert bench.recorded() == 0
    clock.now += 600
    for _ in range(3):
        call_right(piece, double, values(ROW))
    assert bench.recorded() == 1


def test_free_memory_is_asked_for_seldom_where_there_is_little(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(granularity=UNIT, device_bytes=1000 * UNIT)
    bench.device.ballast = 960 * UNIT
    piece = bench.piece(double, 1, 1)
    asked: list[float] = []
    free = bench.device.free_bytes
    monkeypatch.setattr(bench.device, "free_bytes", lambda: asked.append(clock.now) or free())  # type: ignore[func-returns-value]
    for _ in range(400):
        clock.now += 0.5
        call_right(piece, double, values(ROW))
    assert 4 <= len(set(asked)) <= 10


def test_a_first_call_takes_memory_of_the_pool_only_where_half_of_the_device_is_free() -> None:
    bench = Bench(granularity=UNIT, device_bytes=1000 * UNIT)
    bench.device.ballast = 700 * UNIT
    piece = bench.piece(double, 1, 1)
    call_right(piece, double, values(ROW))
    assert bench.tree.counts["warm-ups in the pool"] == 0
    for _ in range(3):
        call_right(piece, double, values(ROW))
    assert bench.recorded() == 1
    assert bench.replays() == 3


@pytest.mark.parametrize("others", [False, True], ids=["alone", "ranks"])
def test_what_is_only_cached_goes_back_before_a_recording_takes_more(
    monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """Inputs of a larger size have left it, say.  Another rank may be waited for, and then nothing is given back."""
    monkeypatch.setattr(rank, "live", lambda: others)
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    call_right(piece, double, values(ROW))
    bench.device.cached = cached = 4 * room._TRIMMED
    for _ in range(3):
        call_right(piece, double, values(ROW))
    assert bench.recorded() == 1
    assert bench.device.cached == (cached if others else 0)
    assert bench.device.most_reserved < cached + bench.device.pool_bytes() or others


def test_it_is_given_back_only_while_that_costs_little_beside_what_captures_do(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, given_back = Bench(), 0
    trim = bench.device.trim
    seconds = 0.0
    monkeypatch.setattr(room.time, "perf_counter", lambda: seconds)

    def slow() -> None:
        nonlocal seconds, given_back
        seconds += 1.0
        given_back += 1
        trim()

    def at(size: int) -> None:
        def capturing(x: torch.Tensor) -> tuple[torch.Tensor]:
            nonlocal seconds
            seconds += 2.5
            return double(x)

        piece = bench.piece(capturing, 1, 1)
        for _ in range(3):
            bench.device.cached = 2 * room._TRIMMED
            call_right(piece, double, values(size))

    monkeypatch.setattr(bench.device, "trim", slow)
    for size in range(9):
        at(ROW * (1 + size))
    assert bench.recorded() == 9
    assert given_back == 3  # before the first capture, and when ten times as long had been captured


def test_what_torch_has_cached_counts_as_free_and_is_given_back_first() -> None:
    bench = Bench(granularity=UNIT, device_bytes=1000 * UNIT)
    piece = bench.piece(double, 1, 1)
    call_right(piece, double, values(ROW))
    bench.device.ballast, bench.device.cached = 600 * UNIT, 390 * UNIT
    call_right(piece, double, values(ROW))
    assert bench.recorded() == 1
    assert bench.device.cached == 0
    assert len(bench.device.calls("empty_cache")) == 1


def test_a_recording_that_leaves_too_little_is_not_kept_and_its_memory_goes_back(clock: Clock) -> None:
    bench = Bench(granularity=UNIT, device_bytes=1000 * UNIT)
    small, large = Workspace(bench, 4), Workspace(bench, 100)
    one, other = bench.piece(small, 1, 1, label="small"), bench.piece(large, 1, 1, label="large")
    for _ in range(3):
        call_right(one, small.right, values(ROW))
    bench.device.ballast = 860 * UNIT
    for _ in range(3):
        call_right(other, large.right, values(ROW))
        assert bench.device.free_bytes() + bench.device.cached >= 50 * UNIT
    assert bench.unrecorded(other) == {TIGHT: 2}
    for _ in range(3):
        call_right(one, small.right, values(ROW))
    assert bench.tree.size == 1
    assert held(bench) <= 8 * UNIT
    # it is not tried again for as long as it is known not to fit
    captures = len(bench.device.calls("capture_begin"))
    clock.now += 600
    call_right(other, large.right, values(ROW))
    assert len(bench.device.calls("capture_begin")) == captures
    bench.device.ballast = 0
    clock.now += 600
    for _ in range(2):
        call_right(other, large.right, values(ROW))
    assert bench.tree.size == 2


def test_what_outgrows_the_share_behind_a_held_output_serves_one_call(clock: Clock) -> None:
    bench = Bench(granularity=UNIT, device_bytes=1000 * UNIT)
    small, large = Workspace(bench, 0), Workspace(bench, 1)
    one, other = bench.piece(small, 1, 1), bench.piece(large, 1, 1)
    for ballast, units in ((0, 1), (860 * UNIT, 100)):
        (h,) = call_right(one, small.right, values(ROW))
        bench.device.ballast, large.units = ballast, units
        (y,) = call_right(other, large.right, h)
        runs = large.runs
        del h, y
    assert runs == 2, "it was captured, and did not run as it is"
    assert len(bench.device.calls("replay")) == 2
    assert bench.tree.size == 0
    for _ in range(3):
        (h,) = call_right(one, small.right, values(ROW))
        call_right(other, large.right, h)
        del h
    assert bench.unrecorded(other)[TIGHT] == 3
    assert held(bench) <= 4 * UNIT


def test_nothing_is_kept_free_where_the_user_says_so() -> None:
    bench = Bench(Limits(keep_free=0), granularity=UNIT, device_bytes=1000 * UNIT)
    bench.device.ballast = 990 * UNIT
    piece = bench.piece(double, 1, 1)
    for _ in range(3):
        call_right(piece, double, values(ROW))
    assert bench.recorded() == 1


# ---------------------------------------------------------------- out of memory


def test_a_capture_that_runs_out_of_memory_leaves_what_it_took_to_the_call(clock: Clock) -> None:
    bench = Bench(Limits(keep_free=0), granularity=UNIT, device_bytes=100 * UNIT)
    bench.device.ballast = 38 * UNIT
    code = Workspace(bench, 60)  # a recording has a copy of its input besides, and that is too much
    piece = bench.piece(code, 1, 1)
    for _ in range(5):
        call_right(piece, code.right, values(ROW * 4))
        clock.now += 1.5
    assert bench.unrecorded(piece) == {RAN_OUT: 4}
    assert bench.tree.counts["failed"] == 3, "it is tried seldom"
    assert bench.tree.size == 0
    assert held(bench) == 0
    assert piece.by_key[()].refused is None, "it may be recorded when there is more"
    bench.device.ballast = 0
    clock.now += 600
    for _ in range(3):
        call_right(piece, code.right, values(ROW * 4))
    assert bench.tree.size == 1


@pytest.mark.parametrize("chained", [True, False])
def test_the_pool_goes_whatever_the_error_of_a_capture_was_raised_from(chained: bool) -> None:
    bench = Bench(Limits(keep_free=0), granularity=UNIT, device_bytes=100 * UNIT)
    filled, _ = fill(bench, 10)

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        if bench.device.captures:
            try:
                raise MemoryError("a library's own")
            except MemoryError as error:  # its frames are the call's, and have the recording that came before
                raise torch.OutOfMemoryError("a library's") from (error if chained else None)
        return double(x)

    piece = bench.piece(code, 1, 1)
    call_right(piece, double, values(ROW))
    before = filled([values(ROW)])
    call_right(piece, double, values(ROW))
    assert bench.unrecorded(piece) == {RAN_OUT: 1}
    assert held(bench) > 0
    del before
    with garbage.paused():
        bench.tree.make_way()
        assert held(bench) == 0


def test_a_capture_that_runs_out_of_memory_is_tried_again_where_some_was_only_cached() -> None:
    bench = Bench(Limits(keep_free=0), granularity=UNIT, device_bytes=100 * UNIT)
    code = Workspace(bench, 60)
    piece = bench.piece(code, 1, 1)
    call_right(piece, code.right, values(ROW * 4))
    bench.device.ballast, bench.device.cached = 30 * UNIT, 9 * UNIT
    assert bench.device.free_bytes() < 4 * UNIT
    call_right(piece, code.right, values(ROW * 4))
    assert bench.tree.size == 1
    assert bench.device.cached == 0


def fill(bench: Bench, units: int) -> Any:
    """A piece whose recording holds so much of the pool."""
    large = Workspace(bench, units, 3.0)
    piece = bench.piece(large, 1, 1, label="large")
    for _ in range(3):
        call_right(piece, large.right, values(ROW))
    assert held(bench) >= units * UNIT
    return piece, large


@pytest.mark.parametrize("ample", [True, False], ids=["in the pool", "elsewhere"])
def test_code_that_runs_out_of_memory_is_run_again_when_recordings_have_given_way(ample: bool) -> None:
    bench = Bench(Limits(keep_free=0 if ample else 1), granularity=UNIT, device_bytes=100 * UNIT)
    filled, large = fill(bench, 52)
    bench.device.cached = 30 * UNIT if ample else 0  # the pool cannot have it
    code = Workspace(bench, 75)
    piece = bench.piece(code, 1, 1, repeatable=True)
    call_right(piece, code.right, values(ROW))
    assert code.runs == 2
    assert bench.tree.counts["warm-ups in the pool"] == 1 + ample
    assert bench.tree.counts["ran out of memory"] == 1
    assert held(bench) == 0
    for _ in range(3):
        call_right(filled, large.right, values(ROW))
        call_right(piece, code.right, values(ROW))


def test_what_is_alive_stays_valid_when_recordings_give_way() -> None:
    bench = Bench(Limits(keep_free=1), granularity=UNIT, device_bytes=100 * UNIT)
    filled, large = fill(bench, 52)
    x = values(ROW)
    (kept,) = filled([x])
    code = Workspace(bench, 70)
    piece = bench.piece(code, 1, 1, repeatable=True)
    with pytest.raises(torch.OutOfMemoryError):
        piece([values(ROW)])
    assert_equal((kept,), large.right(x))
    del kept
    call_right(piece, code.right, values(ROW))


@pytest.mark.parametrize("repeatable", [False, True])
def test_code_that_may_have_changed_something_is_not_run_again(repeatable: bool) -> None:
    bench = Bench(Limits(keep_free=1), granularity=UNIT, device_bytes=100 * UNIT)
    filled, large = fill(bench, 52)
    counted: list[int] = []

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        counted.append(1)
        bench.device.use(70 * UNIT)
        return (x * 2,)

    piece = bench.piece(code, 1, 1, repeatable=repeatable)
    if repeatable:
        piece([values(ROW)])
        assert len(counted) == 2
        return
    with pytest.raises(torch.OutOfMemoryError) as raised:
        piece([values(ROW)])
    assert len(counted) == 1
    assert raised.value.__notes__ == [HINT]
    assert raised.value.__traceback__ is not None
    piece([values(ROW)])  # recordings have given way: the user's next attempt succeeds
    call_right(filled, large.right, values(ROW))


def test_code_whose_inputs_are_gone_is_not_run_again() -> None:
    bench = Bench(Limits(keep_free=1), granularity=UNIT, device_bytes=100 * UNIT)
    fill(bench, 52)
    runs: list[int] = []

    def code(inputs: list[torch.Tensor]) -> tuple[torch.Tensor]:
        runs.append(1)
        y = inputs.pop() * 2
        bench.device.use(70 * UNIT)
        return (y,)

    piece = bench.piece(double, 1, 1, repeatable=True)
    piece.function = code
    with pytest.raises(torch.OutOfMemoryError) as raised:
        piece([torch.randn(ROW)])  # held by nobody else
    assert len(runs) == 1
    assert raised.value.__notes__ == [HINT]


def test_an_error_without_recordings_is_the_callers_as_it_is() -> None:
    bench = Bench(Limits(keep_free=0), granularity=UNIT, device_bytes=100 * UNIT)
    code = Workspace(bench, 170)
    piece = bench.piece(code, 1, 1, repeatable=True, copies=True)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        piece([values(ROW)])
    assert code.runs == 1
    assert not hasattr(raised.value, "__notes__")
