"""Memory of recordings that serves others between replays, on the simulated device: what is lent is never written over,
outputs are right, and recordings are used again once it is back."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from multigraph_backend.allocator.sleeping import Asleep
from multigraph_backend.cudagraphs.devices.device import DeviceFailed
from multigraph_backend.cudagraphs.devices.simulated.loans import Loan
from multigraph_backend.cudagraphs.recordings import lending
from multigraph_backend.cudagraphs.recordings.piece_state import PieceState
from tests.support.simulated.pieces import Bench, assert_equal, call_right, values

NBYTES = 4096


def wide(x: torch.Tensor) -> tuple[torch.Tensor]:
    """What it makes in between is 16 times what it takes, and dead when it has run."""
    made = x.repeat(16)
    return ((made * 2).reshape(16, -1).sum(0),)


def narrow(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 3 + 1,)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def recorded(bench: Bench) -> tuple[list[torch.Tensor], object]:
    """An input of 64 numbers, and a piece that is recorded for it."""
    piece = bench.piece(wide, 1, 1)
    x = values(64)
    for _ in range(4):
        call_right(piece, wide, x)
    assert bench.recorded() == 1
    return [x], piece


def lent(bench: Bench, nbytes: int = NBYTES) -> Loan:
    assert bench.tree.lend()
    loan = bench.device.borrow(nbytes)
    assert loan is not None
    return loan


def test_what_is_lent_is_in_the_way_of_replays_until_it_is_back(bench: Bench) -> None:
    (x,), piece = recorded(bench)
    loan, replays = lent(bench), bench.replays()
    for _ in range(3):
        call_right(piece, wide, x)  # type: ignore[arg-type]
        assert loan.intact()
    assert bench.replays() == replays
    assert bench.unrecorded(piece) == {lending.LENT: 3}  # type: ignore[arg-type]
    loan.over()
    for _ in range(3):
        call_right(piece, wide, x)  # type: ignore[arg-type]
    assert (bench.replays(), bench.recorded()) == (replays + 3, 1)
    assert not bench.device.lends


def test_where_nothing_was_taken_the_next_call_is_replayed(bench: Bench) -> None:
    (x,), piece = recorded(bench)
    replays = bench.replays()
    assert bench.tree.lend()
    call_right(piece, wide, x)  # type: ignore[arg-type]
    assert (bench.replays(), bench.recorded()) == (replays + 1, 1)
    assert not bench.device.lends


def test_a_loan_that_the_device_still_uses_is_waited_for(bench: Bench) -> None:
    (x,), piece = recorded(bench)
    loan, replays = lent(bench), bench.replays()
    bench.device.behind(3, loan.over)  # freed by now, on a stream that the device has not come to
    call_right(piece, wide, x)  # type: ignore[arg-type]
    assert bench.replays() == replays + 1
    assert not bench.device.loans


def test_what_was_moved_meanwhile_is_built_again(bench: Bench) -> None:
    piece = bench.piece(wide, 1, 1)
    for _ in range(3):
        call_right(piece, wide, values(64))
    held = call_right(piece, wide, values(64))
    loan = lent(bench)
    bench.device.fail_at("finish")
    with pytest.raises(DeviceFailed):  # what is held was moved by then, and its recording is not built again
        bench.tree.forget()
    loan.over()
    del held
    for _ in range(3):
        call_right(piece, wide, values(64))


def behind_one_that_was_given_up(bench: Bench) -> tuple[torch.Tensor, PieceState]:
    """An output that is alive, of a recording that was given up, and a piece that is recorded behind it."""
    recorded(bench)
    first, second = bench.piece(narrow, 1, 1), bench.piece(wide, 1, 1)
    for _ in range(4):
        call_right(second, wide, call_right(first, narrow, values(64))[0])
    held = call_right(first, narrow, values(64))[0]
    bench.tree.drop([first])
    assert bench.tree.size == 1  # what is behind `first` is found as long as that is on the path
    return held, second


def test_what_is_recorded_behind_one_that_was_given_up_is_not_replayed_while_memory_is_lent(bench: Bench) -> None:
    held, second = behind_one_that_was_given_up(bench)
    replays = bench.replays()
    call_right(second, wide, held)
    assert bench.replays() == replays + 1
    loan = lent(bench)
    call_right(second, wide, held)
    assert loan.intact()
    assert bench.unrecorded(second)[lending.LENT] == 1


@pytest.mark.parametrize("built", [True, False])
def test_what_is_recorded_behind_one_that_was_given_up_leaves_the_pool_to_loans_that_stay(
    bench: Bench, built: bool
) -> None:
    held, second = behind_one_that_was_given_up(bench)
    if not built:
        (node,) = bench.tree.path[-1].children[second.keyed_for([held])]
        node.unbuild()
    loan = lent(bench)
    for _ in range(lending.MOST_CALLS + 3):
        call_right(second, wide, held)
        assert loan.intact()


def test_outputs_that_are_alive_are_not_lent(bench: Bench) -> None:
    piece, x = bench.piece(wide, 1, 1), values(64)
    for _ in range(3):
        call_right(piece, wide, x)
    output = call_right(piece, wide, x)[0]
    expected = output.clone()
    assert bench.tree.lend()
    loans = []
    while (loan := bench.device.borrow(64)) is not None:
        loans.append(loan)
    assert loans
    assert_equal([output], [expected])
    call_right(piece, wide, x)
    assert_equal([output], [expected])
    assert all(loan.intact() for loan in loans)
    for loan in loans:
        loan.over()
    call_right(piece, wide, x)
    assert_equal([output], [expected])


def test_loans_that_stay_get_the_pool_and_recordings_begin_anew(bench: Bench) -> None:
    (x,), piece = recorded(bench)
    loan, generation = lent(bench), bench.device.generation
    for _ in range(lending.MOST_CALLS + 3):
        call_right(piece, wide, x)  # type: ignore[arg-type]
    assert bench.device.generation > generation
    replays = bench.replays()
    call_right(piece, wide, x)  # type: ignore[arg-type]
    assert bench.replays() == replays + 1
    assert loan.intact()
    assert bench.recorded() == 2


def test_nothing_warms_up_in_a_pool_that_could_not_be_left_to_its_loans(bench: Bench) -> None:
    (x,), piece = recorded(bench)
    other = bench.piece(narrow, 1, 1)
    loan, generation = lent(bench), bench.device.generation
    bench.device.fail_at("new_pool")
    for _ in range(lending.MOST_CALLS):
        call_right(piece, wide, x)  # type: ignore[arg-type]
    assert (bench.tree.size, bench.device.generation, bench.device.lends) == (0, generation, False)
    call_right(other, narrow, x)  # its first
    assert loan.intact()
    assert bench.tree.counts["warm-ups in the pool"] == 1  # of the other piece, before
    for _ in range(3):
        call_right(other, narrow, x)
        assert loan.intact()
    assert bench.device.generation > generation
    assert bench.recorded() == 2


def test_what_lends_already_or_has_nothing_says_so(bench: Bench) -> None:
    assert not bench.tree.lend()  # nothing is recorded
    recorded(bench)
    assert bench.tree.lend()
    assert not bench.tree.lend()
    assert bench.tree.give_way()  # so the second time recordings are given up
    assert not bench.device.lends
    assert bench.tree.size == 0


def test_nothing_is_lent_while_a_call_is_under_way_or_by_another_thread_s_lock(bench: Bench) -> None:
    found = []

    def asks(x: torch.Tensor) -> tuple[torch.Tensor]:
        thread = threading.Thread(target=lambda: found.append(bench.tree.lend()))
        thread.start()
        thread.join()
        return (x + 1,)

    recorded(bench)
    piece = bench.piece(asks, 1, 1)
    piece([values(8)])
    assert found == [False]
    assert bench.tree.lend()


def test_where_the_driver_fails_nothing_is_lent(bench: Bench) -> None:
    (x,), piece = recorded(bench)
    bench.device.fail_at("restore")
    assert not bench.tree.lend()
    call_right(piece, wide, x)  # type: ignore[arg-type]
    assert not bench.device.lends


def test_memory_that_is_lent_does_not_fall_asleep(bench: Bench) -> None:
    from multigraph_backend.allocator.sleeping import Sleeper

    recorded(bench)
    loan = lent(bench)
    with pytest.raises(Asleep, match="lent to others"):
        bench.tree.memory_sleeps([Sleeper(0, None)])
    loan.over()
    bench.tree.memory_sleeps([Sleeper(0, None)])
    bench.tree.memory_sleeps([])


def test_recordings_that_are_given_up_lend_no_more(bench: Bench) -> None:
    (x,), piece = recorded(bench)
    loan = lent(bench)
    bench.tree.forget()
    assert not bench.device.lends
    for _ in range(4):
        call_right(piece, wide, x)  # type: ignore[arg-type]
    assert loan.intact()


@pytest.mark.parametrize(
    "first", [0, 50, *(pytest.param(first, marks=pytest.mark.slow) for first in range(100, 1000, 50))]
)
def test_loans_at_random(first: int) -> None:
    """Calls of several pieces whose outputs are held for a while, loans that come and go, threads that ask."""
    lends = replays = unrecorded = 0
    for seed in range(first, first + 50):
        chance = random.Random(seed)
        bench = Bench()
        pieces = [(bench.piece(function, 1, 1), function) for function in (wide, narrow, wide)]
        inputs = [values(chance.choice((1, 8, 64))) for _ in pieces]
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        loans: list[Loan] = []
        for _ in range(60):
            action = chance.random()
            if action < 0.5:
                at = chance.randrange(len(pieces))
                (output,) = call_right(pieces[at][0], pieces[at][1], inputs[at])
                if chance.random() < 0.5:
                    held.append((output, output.clone()))
                del output
            elif action < 0.6 and held:
                del held[chance.randrange(len(held))]
            elif action < 0.7:
                bench.tree.lend()
            elif action < 0.85:
                if (loan := bench.device.borrow(chance.choice((1, 64, 1000, 5000)))) is not None:
                    loans.append(loan)
            elif action < 0.95 and loans:
                loan = loans.pop(chance.randrange(len(loans)))
                if chance.random() < 0.3:
                    bench.device.behind(2, loan.over)
                else:
                    loan.over()
            elif action > 0.98:
                bench.tree.forget() if chance.random() < 0.5 else bench.tree.give_way()
            assert all(loan.intact() for loan in loans)
            for output, expected in held:
                assert_equal([output], [expected])
        lends += bench.tree.counts["lent"]
        replays += bench.replays()
        unrecorded += bench.unrecorded(*(piece for piece, _ in pieces)).get(lending.LENT, 0)
    assert min(lends, replays, unrecorded) > 50
