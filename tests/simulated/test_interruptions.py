"""Ctrl-C, an alarm, an exception of another thread: wherever one arrives, it reaches the caller, and all goes on."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from multigraph_backend import cudagraphs
from multigraph_backend.cudagraphs.devices import bracket
from multigraph_backend.cudagraphs.recordings.piece import Piece
from tests.support.simulated.pieces import Bench, assert_equal, call_right, values

FOLDER = str(Path(cudagraphs.__file__).parent)


class Arrived(BaseException):
    """What arrives."""


class TooLate(Exception):
    """What a handler of a signal raises."""


def _raise_too_late(number: int, frame: FrameType | None) -> None:
    raise TooLate


class Deadline:
    """A handler that is an object."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise TooLate

    def arrived(self, prefix: str, number: int, frame: FrameType | None) -> None:
        raise TooLate(prefix)


@pytest.fixture
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


HANDLERS = [_raise_too_late, Deadline(), functools.partial(Deadline().arrived, "late")]


def interrupted_at(turn: int, interrupt: Callable[[], object]) -> tuple[Bench, Piece, list[int]]:
    """A piece whose code is interrupted when it runs for the `turn`th time."""
    turns: list[int] = []

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        turns.append(len(turns))
        y = x * 2
        if len(turns) == turn:
            interrupt()
        return (y + 1,)

    bench = Bench()
    return bench, bench.piece(code, 1, 1), turns


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


def goes_on(bench: Bench, piece: Piece) -> None:
    """Everything is right, and recorded."""
    held = []
    for _ in range(4):
        x = values()
        held.append((call_right(piece, double, x), double(x)))
        for outputs, expected in held:
            assert_equal(outputs, expected)
    assert (bench.recorded(), bench.unrecorded(piece)) == (1, {})
    bench.tree.forget()
    assert not bench.device._stream_captures


def test_what_arrives_in_a_capture_ends_it_and_reaches_the_caller() -> None:
    def interrupt() -> None:
        raise Arrived

    bench, piece, turns = interrupted_at(2, interrupt)
    call_right(piece, double, values())
    with pytest.raises(Arrived):
        piece([values()])
    assert len(turns) == 2, "it was not run again"
    assert bench.recorded() == 0
    goes_on(bench, piece)


@pytest.mark.parametrize("handler", HANDLERS, indirect=True, ids=["function", "object", "partial method"])
@pytest.mark.usefixtures("handler")
def test_an_error_that_the_handler_of_a_signal_raises_is_no_failed_recording() -> None:
    bench, piece, turns = interrupted_at(2, lambda: signal.raise_signal(signal.SIGUSR1))
    call_right(piece, double, values())
    with pytest.raises(TooLate):
        piece([values()])
    assert (len(turns), bench.tree.counts["failed"]) == (2, 0)
    goes_on(bench, piece)


def test_an_error_of_the_code_is_a_failed_recording() -> None:
    def interrupt() -> None:
        raise TooLate  # by no handler of a signal

    bench, piece, turns = interrupted_at(2, interrupt)
    for _ in range(2):
        call_right(piece, double, values())
    assert (len(turns), bench.tree.counts["failed"]) == (3, 1)


@pytest.mark.parametrize("spoilt", [False, True], ids=["pool kept", "new pool"])
@pytest.mark.parametrize("call", ["capture_begin", "allocate", "launch", "capture_end", "restore", "storage_at"])
def test_what_arrives_at_a_call_of_the_driver_leaves_everything_right(call: str, spoilt: bool) -> None:
    for after in range(3):
        bench = Bench()
        bench.device.failures_spoil_the_pool = spoilt
        piece = bench.piece(double, 1, 1)
        call_right(piece, double, values())
        bench.device.fail_at(call, after, Arrived())
        seen = 0
        for _ in range(3):
            try:
                call_right(piece, double, values())
            except Arrived:
                seen += 1
        assert seen == (call not in bench.device._failures)
        bench.device._failures.clear()
        assert not bench.device._stream_captures
        for _ in range(2):
            call_right(piece, double, values())
        assert bench.recorded() >= 1


class Streams:
    """A driver whose capture has to be ended: `trouble` says what each of its calls does, after its work or before."""

    def __init__(self, trouble: dict[str, list[BaseException | None]], after: bool) -> None:
        self.trouble, self.after, self.captures, self.calls = trouble, after, False, list[str]()

    def call(self, name: str, work: Callable[[], None] = lambda: None) -> None:
        self.calls.append(name)
        errors = self.trouble.get(name, [])
        error = errors.pop(0) if errors else None
        if self.after:
            work()
        if error is not None:
            raise error
        if not self.after:
            work()

    def begin(self) -> None:
        self.call("begin", lambda: setattr(self, "captures", True))

    def function(self) -> str:
        self.call("function")
        return "result"

    def end(self) -> None:
        self.call("end", lambda: setattr(self, "captures", False))

    def capturing(self) -> bool:
        self.call("capturing")
        return self.captures


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["begin", "function", "end"])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_capture_is_ended_whatever_arrives_while_it_is_ended(name: str, more: int, after: bool) -> None:
    first = Arrived("first")
    trouble: dict[str, list[BaseException | None]] = {name: [first], "capturing": [Arrived()] * more}
    trouble["end"] = [*trouble.get("end", []), *[KeyboardInterrupt()] * more]
    streams = Streams(trouble, after)
    outcome = bracket.captured(streams.begin, streams.function, streams.end, streams.capturing)
    assert not streams.captures
    assert outcome.problem is first


def test_what_comes_from_outside_is_told_before_an_error_of_the_code() -> None:
    arrived = Arrived()
    streams = Streams({"function": [RuntimeError("not permitted")], "end": [arrived]}, after=True)
    outcome = bracket.captured(streams.begin, streams.function, streams.end, streams.capturing)
    assert (outcome.problem, outcome.broken) == (arrived, True)


# ---------------------------------------------------------------- wherever Python looks for exceptions from outside


class AtTurn:
    """Raises `Arrived` at the `turn`th moment of this thread at which Python lets exceptions from outside arrive in the
    runtime: at the beginning of a function, and behind a call of one in C."""

    def __init__(self, turn: int) -> None:
        self.turn, self.turns, self.where = turn, 0, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "c_return") or not name.startswith((FOLDER, "<multigraph")):
            return
        if "simulated" in name or name.endswith("arena.py") or frame.f_code.co_name == "__del__":
            return  # what arrives in a `__del__` is lost, with a word on stderr
        self.turns += 1
        if self.turns == self.turn:
            self.where = f"{Path(name).name}:{frame.f_lineno}"
            raise Arrived(self.where)


def accumulate(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total.add_(x)
    return total * 2, x + 1


def _program(tracer: AtTurn) -> bool:
    """Two pieces one after the other, the last results held; whether the tracer's exception arrived."""
    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(accumulate, 2, 2, static=[0], mutated=[0])
    total = torch.zeros(8)
    held: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
    arrived = False
    for _ in range(5):
        x = values()
        before = total.clone()
        sys.setprofile(tracer)
        try:
            (y,) = first([x])
            z = second([total, y])
        except Arrived:
            arrived = True
            continue
        finally:
            sys.setprofile(None)
        expected = double(x), accumulate(before, double(x)[0])
        assert_equal((y, *z, total), (*expected[0], *expected[1], before))
        held.append(((y, *z), (*expected[0], *expected[1])))
        del held[:-2], y, z
        for outputs, wanted in held:
            assert_equal(outputs, wanted)
    assert not bench.device._stream_captures
    del held
    turns = bench.tree.turns
    assert (turns.owner, turns.aside, bench.tree._running, turns.choosing) == (None, {}, 0, False)
    bench.tree.forget()
    assert (bench.tree.root.children, bench.tree.path) == ({}, [])
    return arrived


def test_wherever_it_arrives_every_number_is_right_and_all_goes_on() -> None:
    count = AtTurn(0)
    assert not _program(count)
    assert count.turns > 500
    for turn in range(1, count.turns, 7):
        tracer = AtTurn(turn)
        try:
            assert _program(tracer) or not tracer.where
        except BaseException as error:
            raise AssertionError(f"interrupted at turn {turn}, {tracer.where}") from error
