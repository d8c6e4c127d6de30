"""No order of ending hangs although the process group waits for the recordings that hold its collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from multigraph_backend.distributed import endings
from tests.support.distributed import endings as program
from tests.support.distributed import processes, soak_endings
from tests.support.distributed.doubling import recorded, right


@pytest.fixture(scope="module")
def warm() -> Iterator[processes.Warm]:
    """What each run would take most of its time to import."""
    process = processes.Warm(soak_endings.PROGRAM)
    yield process
    process.close()


@pytest.mark.parametrize("ending", program.ENDINGS)
def test_every_ending_ends(ending: str, warm: processes.Warm) -> None:
    size = 2 if ending == "one rank killed" else 1
    assert soak_endings.once(ending, size, "cpu", 60, warm).problem is None


# ---------------------------------------------------------------- in this process


def test_recordings_without_collectives_are_not_touched() -> None:
    device, tree, piece = recorded(())
    assert not tree.collectives.held()
    assert tree.collectives.release("a reason", 1.0) == 0
    before = len(device.calls("replay"))
    right(piece)
    assert len(device.calls("replay")) == before + 1


def test_a_destroyed_recording_leaves_its_outputs_and_its_code_and_is_made_again() -> None:
    device, tree, piece = recorded(("0",))
    held = right(piece)
    expected = held.clone()
    assert tree.collectives.release("a reason", 1.0) == 1
    assert len(device.calls("reset")) == 1
    assert not tree.collectives.held()
    replays = len(device.calls("replay"))
    for _ in range(3):
        right(piece)
    assert len(device.calls("replay")) == replays
    (keyed,) = piece.by_key.values()
    assert keyed.reasons["a reason"] == 3
    torch.testing.assert_close(held, expected)
    del held
    tree.collectives.resume()
    for _ in range(3):
        right(piece)
    assert tree.counts["recordings"] == 2
    assert len(device.calls("replay")) > replays


def test_one_that_was_given_up_is_destroyed_too() -> None:
    _, tree, piece = recorded(("0",))
    held = right(piece)
    tree.give_up(tree.path[-1], "it does not pay")
    assert tree.size == 0
    assert tree.collectives.release("a reason", 1.0) == 1
    assert held.isfinite().all()


def test_a_call_in_progress_is_waited_for_and_no_longer() -> None:
    _, tree, _ = recorded(("0",))
    began = threading.Event()
    done = threading.Event()

    def busy() -> None:
        with tree.lock:
            began.set()
            done.wait(30)

    thread = threading.Thread(target=busy)
    thread.start()
    began.wait(30)
    assert tree.collectives.release("a reason", 0.05) == 0
    done.set()
    thread.join()
    assert tree.collectives.release("a reason", 0.05) == 1


@pytest.mark.usefixtures("group_of_one")
def test_the_thread_that_watches_ends_when_there_is_nothing_to_watch_for() -> None:
    _, tree, _ = recorded(("0",))

    def watching() -> bool:
        return any(thread.name == "multigraph-endings" for thread in threading.enumerate())

    assert watching()
    assert endings.release("a reason") >= 1
    deadline = time.monotonic() + 30
    while watching() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not watching()
    tree.collectives.resume()


def test_a_tree_that_is_asked_while_it_records_does_not_wait_for_the_thread_that_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endings, "PERIOD", 0.001)
    asked, answered = threading.Event(), threading.Event()

    class Recording:
        """Its lock is held by a call that records, until that has told of the recording."""

        def release(self, why: str, patience: float) -> int:
            return 0

        def resume(self) -> None:
            pass

        def held(self) -> bool:
            asked.set()
            return answered.wait(5)

    tree = Recording()
    endings.watch(tree)
    assert asked.wait(5)
    begun = threading.Thread(target=endings.watch, args=(tree,), daemon=True)
    begun.start()
    begun.join(2)
    waited = begun.is_alive()
    answered.set()
    assert not waited


def test_torchs_functions_that_end_groups_are_known_by_their_code() -> None:
    codes = endings.destroying()
    assert dist.destroy_process_group.__code__ in codes
    assert len(codes) == 2
