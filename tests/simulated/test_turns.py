"""No lock while code of the user runs: it may wait for a thread that calls compiled code, and gets there."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from multigraph_backend.cudagraphs import account, runtime
from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.output_code import RecordedCode, Wanted
from multigraph_backend.cudagraphs.partition.graph_spec import Cut, GraphSpec, PartitionSpec
from multigraph_backend.cudagraphs.recordings.recording import NotAllRecorded
from multigraph_backend.cudagraphs.recordings.turns import OUT_OF_TURN, Awaited, Call
from tests.support.simulated.pieces import PIECE, SPEC, Bench, assert_equal, boxed, call_right, values

SOON = Limits(patience=0.02)


def elsewhere(work: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `work` returns in a thread of its own, waited for."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it never returns"
    result, error = found[0]
    if error is not None:
        raise error
    return result


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


class Cut2:
    """Two pieces around an operator of the user's, as Inductor's code calls them."""

    constants: dict[str, Any] | None = None

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.between = between
        self.made: list[torch.Tensor] = []
        self.partitions = [boxed(lambda x: (x * 2,)), boxed(lambda y: (y - 3,))]

    def recursively_apply_fns(self, wrappers: list[Any]) -> None:
        self.partitions = [wrap(piece) for wrap, piece in zip(wrappers, self.partitions, strict=True)]

    def __call__(self, inputs: list[Any]) -> Any:
        (x,) = inputs
        inputs.clear()
        (y,) = self.partitions[0]([x])
        y = self.between(y)
        self.made.append(y)
        return self.partitions[1]([y])


def cut_code(
    bench: Bench,
    between: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    required: bool = False,
) -> RecordedCode:
    monkeypatch.setattr(runtime, "unavailable", lambda: None)
    monkeypatch.setattr(runtime, "tree", lambda index: bench.tree)
    first = dataclasses.replace(PIECE, outputs=(None,), visible=(False,))
    second = PartitionSpec(1, (None,), (0,), (), (), (True,), ("buf1",))
    cuts = (Cut("a Python custom operator", ("my::op",)),)
    spec: GraphSpec = dataclasses.replace(SPEC, pieces=(first, second), whole=False, cuts=cuts)
    spec.verify()
    return RecordedCode(Cut2(between), spec, "parted", Wanted(required, False, 5), inference=True)


def test_a_cut_operator_waits_for_a_thread_that_calls_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SOON)
    other = bench.piece(double, 1, 1)

    def between(y: torch.Tensor) -> torch.Tensor:
        x = values()
        assert_equal(elsewhere(lambda: other([x])), double(x))
        return y.sin()

    made = cut_code(bench, between, monkeypatch)
    for _ in range(5):
        x = values()
        (z,) = elsewhere(lambda x=x: made([x]))
        torch.testing.assert_close(z, (x * 2).sin() - 3, rtol=0, atol=0)
    assert bench.recorded() == 2
    assert bench.unrecorded(*made.pieces) == {}
    assert bench.unrecorded(other) == {OUT_OF_TURN: 5}


def test_a_cut_operator_waits_for_a_thread_that_calls_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SOON)

    def between(y: torch.Tensor) -> torch.Tensor:
        if not nested[0]:
            nested[0] = True
            x = values()
            (z,) = elsewhere(lambda: made([x]))
            torch.testing.assert_close(z, (x * 2).sin() - 3, rtol=0, atol=0)
            nested[0] = False
        return y.sin()

    nested = [False]

    made = cut_code(bench, between, monkeypatch)
    for _ in range(4):
        x = values()
        (z,) = elsewhere(lambda x=x: made([x]))
        torch.testing.assert_close(z, (x * 2).sin() - 3, rtol=0, atol=0)
    assert bench.recorded() == 2
    assert bench.unrecorded(*made.pieces) == {OUT_OF_TURN: 8}


@pytest.mark.parametrize("at", [1, 2], ids=["unrecorded", "captured"])
def test_the_code_of_a_piece_waits_for_a_thread_that_calls_compiled_code(at: int) -> None:
    bench = Bench(SOON)
    other = bench.piece(double, 1, 1)
    ran: list[int] = []

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        ran.append(len(ran))
        if len(ran) == at:
            for _ in range(3):
                elsewhere(lambda: call_right(other, double, values()))
        return (x * 3,)

    piece = bench.piece(code, 1, 1)
    for _ in range(4):
        x = values()
        assert_equal(elsewhere(lambda x=x: piece([x])), (x * 3,))
    assert len(ran) == 2
    for _ in range(3):
        call_right(other, double, values())
    assert bench.recorded() == 2
    # nothing is replayed or captured beside it: a capture would fail if libraries were set up meanwhile, or it is one
    assert bench.unrecorded(other) == {OUT_OF_TURN: 3}


def test_nobody_waits_again_for_code_that_was_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SOON)
    other = bench.piece(double, 1, 1)
    made = cut_code(bench, lambda y: elsewhere(lambda: other([y.clone()]))[0], monkeypatch)
    for number in range(4):
        x = values()
        assert_equal(elsewhere(lambda x=x: made([x])), (x * 4 + 1 - 3,))
        if number == 0:
            bench.tree.limits = Limits(patience=1e6)  # `elsewhere` would not wait so long


def test_what_else_a_thread_may_ask_for_is_answered_in_the_midst_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SOON)
    gone = bench.piece(double, 1, 1, groups=("0",))
    asked: list[Any] = []

    def between(y: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 4:
            tree = bench.tree
            asked.append(elsewhere(lambda: str(account.of(tree))))
            asked.append(elsewhere(tree.collectives.held))
            asked.append(elsewhere(lambda: tree.collectives.launched(1.0)) is not None)
            asked.append(elsewhere(lambda: tree.collectives.release("a reason", 1.0)))
            elsewhere(tree.forget)
            assert tree.size, "that is left for later"
            elsewhere(lambda: tree.drop([gone]))
        return y.sin()

    calls: list[int] = []
    for _ in range(2):
        call_right(gone, double, values())
    made = cut_code(bench, between, monkeypatch)
    sizes = []
    for _ in range(6):
        x = values()
        (z,) = elsewhere(lambda x=x: made([x]))
        torch.testing.assert_close(z, (x * 2).sin() - 3, rtol=0, atol=0)
        sizes.append(bench.tree.size)
    assert asked[0].startswith("recordings on device 0: 3")
    assert asked[1:] == [True, True, 1]
    assert sizes == [1, 3, 3, 0, 2, 2]


def test_two_threads_that_do_not_wait_for_each_other_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Limits(patience=60))
    made = cut_code(bench, torch.sin, monkeypatch)
    start, errors = threading.Barrier(4), list[BaseException]()

    def work() -> None:
        try:
            start.wait()
            for _ in range(20):
                x = values()
                (z,) = made([x])
                torch.testing.assert_close(z, (x * 2).sin() - 3, rtol=0, atol=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bench.unrecorded(*made.pieces) == {}
    assert bench.recorded() <= 4, "each piece behind the other, not behind those of other calls"


def test_where_all_has_to_be_recorded_a_call_out_of_turn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigraph_backend.cudagraphs.recordings.tree._PATIENCE", 0.02)
    bench = Bench(SOON)
    other = bench.piece(double, 1, 1, required=True, label="strict")

    def between(y: torch.Tensor) -> torch.Tensor:
        with pytest.raises(NotAllRecorded, match=f"strict: cudagraphs='require', but .*: {OUT_OF_TURN}"):
            elsewhere(lambda: other([values()]))
        return y.sin()

    x = values()
    (z,) = cut_code(bench, between, monkeypatch)([x])
    torch.testing.assert_close(z, (x * 2).sin() - 3, rtol=0, atol=0)


def test_a_call_waits_for_the_streams_of_all_code_that_ran_as_it_is() -> None:
    bench = Bench(SOON)
    quick = bench.piece(double, 1, 1)
    for _ in range(3):
        call_right(quick, double, values())

    def on_seven() -> None:
        bench.device.set_stream(7)
        call_right(quick, double, values())

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        elsewhere(on_seven)  # replayed while this runs
        return (x - 1,)

    slow = bench.piece(code, 1, 1)
    bench.device.set_stream(5)
    x = values()
    assert_equal(slow([x]), (x - 1,))
    bench.device.log.clear()
    bench.device.set_stream(7)
    call_right(quick, double, values())
    assert bench.device.calls("wait_for") == [(7, 5)]
    call_right(quick, double, values())
    assert bench.device.calls("wait_for") == [(7, 5)]


def test_what_code_reads_as_it_is_stays_where_it_is() -> None:
    bench = Bench(SOON)
    maker, other = bench.piece(double, 1, 1), bench.piece(double, 1, 1, label="other")
    for _ in range(2):
        call_right(maker, double, values())
    x = values()
    (held,) = maker([x])
    address = bench.device.address(held)

    def code(y: torch.Tensor) -> tuple[torch.Tensor]:
        before = bench.device.address(held)
        z = values()
        assert_equal(elsewhere(lambda: maker([z])), double(z))
        assert bench.device.address(held) == before == address
        elsewhere(lambda: other([z]))
        return (y + 1,)

    reader = bench.piece(code, 1, 1)
    assert_equal(reader([held]), (double(x)[0] + 1,))
    assert_equal((held,), double(x))


def _late(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_a_call_waits_for_its_turn() -> None:
    bench = Bench(Limits(patience=60))
    piece = bench.piece(double, 1, 1)
    for _ in range(2):
        call_right(piece, double, values())
    began, end = threading.Event(), threading.Event()

    def keep() -> None:
        call = Call(bench.tree.turns)
        assert call.begin(Awaited(), 0.0)
        began.set()
        end.wait()
        call.end()

    thread = threading.Thread(target=keep)
    thread.start()
    began.wait()
    before = signal.signal(signal.SIGALRM, _late)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            piece([values()])
    finally:
        signal.signal(signal.SIGALRM, before)
    end.set()
    thread.join()
    assert bench.tree.turns.owner is None
    for _ in range(2):
        elsewhere(lambda: call_right(piece, double, values()))
    assert bench.unrecorded(piece) == {}
