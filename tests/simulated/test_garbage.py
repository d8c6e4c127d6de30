"""One switch of the garbage collector for all who need it off: captures, and whoever asks for frames."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from multigraph_backend.process import frames, garbage
from tests.support.simulated.pieces import Bench, call_right, values


@pytest.fixture(params=[True, False], ids=["on before", "off before"])
def on(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


@pytest.mark.parametrize(
    "order", sorted(set(itertools.permutations([1, 2, 3, 3]))), ids=lambda order: "".join(map(str, order))
)
def test_in_whatever_order_they_leave_it_is_off_inside_and_as_before_behind(order: tuple[int, ...], on: bool) -> None:
    entered = [(number, garbage.paused()) for number in (1, 2, 3, 3)]
    for _, entry in entered:
        entry.__enter__()
        assert not gc.isenabled()
    for number in order:
        assert not gc.isenabled()
        found = next(entry for entry in entered if entry[0] == number)
        entered.remove(found)
        found[1].__exit__(None, None, None)
    assert gc.isenabled() == on


def test_an_error_inside_is_an_end_too(on: bool) -> None:
    with contextlib.suppress(KeyboardInterrupt), garbage.paused():
        raise KeyboardInterrupt
    assert gc.isenabled() == on


def test_what_the_program_switches_on_stays_on() -> None:
    gc.disable()
    with garbage.paused():
        gc.enable()
        with garbage.paused():
            assert not gc.isenabled()
        gc.enable()
    assert gc.isenabled()


@pytest.mark.parametrize("frames_first", [True, False], ids=["frames leave last", "the capture leaves last"])
def test_a_capture_and_a_reading_of_frames_that_overlap(frames_first: bool, on: bool) -> None:
    """The first to enter is the first to leave: each on its own would put back what the other had made."""
    looks, leave, left = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def look() -> None:
        with frames.without_collections():
            looks.set()
            leave.wait()
            seen.append(gc.isenabled())
        left.set()

    thread = threading.Thread(target=look)
    captures = [False]

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        if captures[0]:
            captures[0] = False
            if not frames_first:
                thread.start()
                looks.wait()
            else:
                leave.set()
                left.wait()
            seen.append(gc.isenabled())
        return (x * 2,)

    bench = Bench()
    piece = bench.piece(code, 1, 1)
    call_right(piece, code, values())
    if frames_first:
        thread.start()
        looks.wait()
    captures[0] = True
    piece([values()])
    assert bench.recorded() == 1
    leave.set()
    thread.join()
    assert (seen, gc.isenabled()) == ([False, False], on)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 and later, where there are threads
def test_a_forked_process_waits_for_nobody_who_is_not_there(on: bool) -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with garbage.paused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    assert not gc.isenabled()
    child = os.fork()
    if not child:
        right = gc.isenabled() == on
        with garbage.paused():
            right = right and not gc.isenabled()
        os._exit(0 if right and gc.isenabled() == on else 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled() == on
