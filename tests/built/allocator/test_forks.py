"""Children of forks: a late one gets one clear error, an early one goes its own way, the parent goes on.

Under a torch built for CUDA, over the simulated driver.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.allocator.under_torch import run

SCRIPT = """
import gc, threading, time
from multigraph_backend.cudagraphs.devices.extension_pool import ExtensionPool
from tests.support.allocator import recording_programs as programs
from tests.support.allocator.recording_programs import storage

def in_a_child(function):
    # what it returns; None where it does not end by itself within a minute
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            found = function()
        except BaseException as error:
            found = type(error).__name__ + ": " + str(error)
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        return None
    with os.fdopen(read) as said:
        return json.loads(said.read()) if status == 0 else status

def said_by(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__ + ": " + str(error)

allocator.install(reuse="any_stream")

def starts():
    torch.cuda.init()
    address = allocate(3 * MIB, 0)
    free(address)
    return [address > 0, allocator.memory_reserved() > 0, in_a_child(lambda: said_by(lambda: allocate(MIB, 0)))]

facts["early"] = in_a_child(starts)

torch.cuda.init()
allocator.record_memory_history()
kept = [allocate(3 * MIB, 0)]
tensor = storage(MIB)
captures = programs.Captures(simulated, driver)
pool = ExtensionPool(loaded, 0, lambda pool: pool.id)
users = allocator.pool()

def late():
    global tensor, pool, users
    said = [
        said_by(lambda: allocate(MIB, 0)),
        said_by(lambda: storage(MIB)),
        said_by(lambda: torch.empty(10, device="cuda")),
        said_by(allocator.pool),
        said_by(lambda: pool.restore(pool.empty, ())),
        allocator.memory_stats(),
        allocator.empty_cache(),
    ]
    free(kept[0])  # and what the parent's objects do when they end
    pool.leave()
    del tensor, pool, users
    gc.collect()
    allocator.record_memory_history(None)
    return said

before = allocator.memory_stats()
facts["late"] = in_a_child(late)
facts["unchanged"] = allocator.memory_stats() == before

# while other threads hold whatever locks there are
stop = threading.Event()

def work():
    simulated.sim_enter(driver)
    while not stop.is_set():
        held = [storage(4096) for _ in range(50)]
        free(allocate(MIB, 0))
        pool.holds_only(())

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
ends = [in_a_child(late) for _ in range(5)]
stop.set()
for thread in threads:
    thread.join()
facts["all alike"] = [each == facts["late"] for each in ends].count(True)

again = allocate(3 * MIB, 0)
held_since = allocator.memory_allocated() - before["allocated_bytes.all.current"]
facts["parent"] = [again not in kept, pool.holds_only(()), held_since]
pool.restore(pool.empty, ())
loaded.call("mg_verify", loaded.call("mg_torch_device", 0))
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(SCRIPT, simulated, tmp_path_factory.mktemp("forks"))


def is_clear(said: str) -> bool:
    """It names the cause and the remedy: the extension's own error, or torch's where that comes first."""
    return said.startswith(("RuntimeError: ", "Refused: ")) and "fork" in said and "'spawn'" in said


def test_who_is_forked_before_cuda_starts_has_an_allocator_of_its_own(facts: dict[str, Any]) -> None:
    allocates, reserves, grandchild = facts["early"]
    assert allocates
    assert reserves
    assert is_clear(grandchild)


def test_who_is_forked_later_gets_one_clear_error_from_every_side(facts: dict[str, Any]) -> None:
    *said, stats, given_back = facts["late"]
    assert len(said) == 5
    assert [text for text in said if not is_clear(text)] == []
    assert "whose parent had started CUDA" in said[0]
    assert (stats, given_back) == ({}, 0)


def test_a_child_never_waits_for_what_other_threads_of_the_parent_held(facts: dict[str, Any]) -> None:
    assert facts["all alike"] == 5


def test_the_parent_goes_on(facts: dict[str, Any]) -> None:
    assert facts["unchanged"]
    assert facts["parent"] == [True, True, 3 << 20]
