"""The interval of Python's threads is short while anybody needs it so, and then what it was."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from multigraph_backend.process.short_turns import SHORT, ShortTurns

OWN = 0.0125 + 5e-7  # Python cuts off parts of microseconds


@pytest.fixture(autouse=True)
def own_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(OWN)
    yield
    sys.setswitchinterval(before)


def test_it_is_short_until_the_last_one_has_left_in_whatever_order() -> None:
    first, second = ShortTurns().__enter__(), ShortTurns().__enter__()
    assert sys.getswitchinterval() == pytest.approx(SHORT)
    first.__exit__()
    first.__exit__()
    assert sys.getswitchinterval() == pytest.approx(SHORT)
    second.__exit__()
    assert sys.getswitchinterval() == pytest.approx(0.0125)
    second.__exit__()
    assert sys.getswitchinterval() == pytest.approx(0.0125)


def test_turns_that_the_program_has_shorter_stay() -> None:
    sys.setswitchinterval(5e-6 + 5e-7)
    with ShortTurns():
        assert sys.getswitchinterval() == pytest.approx(5e-6)
    assert sys.getswitchinterval() == pytest.approx(5e-6)


def test_what_the_program_has_set_meanwhile_stays() -> None:
    with ShortTurns():
        sys.setswitchinterval(0.25)
    assert sys.getswitchinterval() == pytest.approx(0.25)


def test_threads_that_come_and_go_leave_it_as_it_was() -> None:
    def work() -> None:
        for _ in range(200):
            with ShortTurns():
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == pytest.approx(0.0125)


def test_a_forked_process_takes_over_what_its_own_thread_has() -> None:
    inside, over = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with ShortTurns():
            inside.set()
            over.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        os._exit(0 if abs(sys.getswitchinterval() - 0.0125) < 1e-9 else 1)
    _, status = os.waitpid(child, 0)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert sys.getswitchinterval() == pytest.approx(0.0125)
