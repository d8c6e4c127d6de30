"""Where a rank waits in a collective for others, a line says in which, and in which code."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from pathlib import Path

import pytest

from multigraph_backend.distributed import communicating, watchdog
from tests.support import forked
from tests.support.distributed import processes
from tests.support.distributed.doubling import recorded, right


def test_the_rank_that_waits_says_in_which_variant_and_collective_it_is(tmp_path: Path) -> None:
    port = str(processes.free_port())
    ranks = [[str(processes.HERE / "late_rank.py"), str(rank), "2", port] for rank in range(2)]
    path = os.pathsep.join(filter(None, [str(processes.CHECKOUT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    waited, late = forked.run_together(ranks, env=environ, timeout=120, merged=True)
    assert (waited.returncode, late.returncode) == (0, 0), (waited.stdout, late.stdout)
    line, logged = sorted((line for line in waited.stdout.splitlines() if "it has been in" in line), key=len)
    assert line.startswith("rank 0: for ")
    assert "summed (" in line
    assert "x[0] == 4, forward: the wait for collective 0, all_reduce(float32[4*s27], sum) in group '0'" in line
    assert logged.endswith(f"{line} (the group's timeout is 60 s)")
    assert "late_collectives 1" in waited.stdout
    assert "it has been in" not in late.stdout
    assert "late_collectives 0" in late.stdout


def test_what_a_device_has_not_finished_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tree, piece = recorded(("0",))
    monkeypatch.setattr(communicating, "_recordings", weakref.WeakSet([tree.collectives]))
    looks = watchdog.Looks()
    clock = itertools.count(0.0, 1.0)

    def look() -> list[str]:
        return list(looks.look(next(clock), 3.0))

    for _ in range(6):  # nothing is late: each mark is reached, whether there are calls or not
        right(piece)
        assert look() == []
    assert look() == []
    device.stuck = True
    right(piece)
    told = [text for _ in range(8) for text in look()]
    assert told == ["for 3 s its device has not finished a piece"]
    device.stuck = False
    assert [text for _ in range(8) for text in look()] == []


def test_marks_are_left_out_while_the_user_captures_or_a_call_holds_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tree, _piece = recorded(("0",))
    monkeypatch.setattr(communicating, "_recordings", weakref.WeakSet([tree.collectives]))
    device.stuck = device.user_captures = True
    looks = watchdog.Looks()
    assert [text for now in range(9) for text in looks.look(float(now), 3.0)] == []
    device.user_captures = False
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tree.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    assert list(looks.look(10.0, 3.0)) == []
    assert not looks.pending
    done.set()
    thread.join()
    assert [text for now in range(20, 29) for text in looks.look(float(now), 3.0)] != []


@pytest.mark.usefixtures("group_of_one")
def test_a_rank_that_is_alone_is_not_watched() -> None:
    watchdog.watch()
    assert "multigraph-watchdog" not in {thread.name for thread in threading.enumerate()}
