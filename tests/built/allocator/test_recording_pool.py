"""The pool of recordings in the installed extension, under a torch built for CUDA, over the simulated driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.allocator.under_torch import run

SCRIPT = """
from multigraph_backend.cudagraphs.devices.extension_pool import ExtensionPool
from multigraph_backend.cudagraphs import runtime
from tests.support.allocator import recording_programs as programs
from tests.support.allocator.recording_programs import refused, storage

allocator.install(**ARGUMENTS)
facts["unavailable"] = runtime.unavailable()
torch.cuda.init()
captures = programs.Captures(simulated, driver)
facts["counts"] = [programs.run(loaded, captures, seed, 150) for seed in range(6)]
facts["given back"] = [allocator.memory_allocated(), allocator.memory_reserved()]  # pools that are left give it back

pool = ExtensionPool(loaded, 0, lambda pool: pool.id)
uses = pool.uses()
captures.begin_and_break(pool.id)
facts["broken"] = [uses, pool.uses()]
pool.stop(uses)
facts["stopped"] = [pool.uses(), refused(lambda: loaded.call("mg_end_pool", pool._device, *pool.id))]

with captures.into(pool.id):
    output = storage(3 * MIB)
state = pool.adopt([output])
block = output.data_ptr()
facts["reserved"] = [sum(nbytes for _, nbytes in pool.segments()), allocator.memory_reserved()]
facts["account"] = [pool.held(), pool.lent(), [[address == block, nbytes] for address, nbytes in pool.blocks().items()]]
other = programs.Captures(simulated, driver)
with other.into((9, 0)):  # somebody else's, which has nothing to do with the pool
    held = storage(MIB)
    pool.restore(state, [block])
    facts["beside"] = pool.holds_only([block])
    with captures.into(pool.id):
        temporary = storage(MIB)
        del temporary
    facts["another capture"] = refused(lambda: pool.adopt([]))
del held

facts["not there"] = refused(lambda: pool.restore(state, (), [(block, 3 * MIB)]))
(owner,) = pool.restore(state, [block], [(block, 3 * MIB)])
elsewhere = storage(3 * MIB)
facts["one claim"] = [owner.data_ptr() == block, elsewhere.data_ptr() == block]
del owner  # its capture never comes
facts["freed"] = list(pool.freed()) == [block]
facts["brought back"] = [pool.restore(state, [block]), pool.holds_only([block])]
number = state.raw.number
del state
facts["forgotten"] = refused(lambda: loaded.call("mg_torch_pool_restore", pool._device, number))
pool.leave()
facts["left"] = [pool.holds_only([]), refused(lambda: ExtensionPool(loaded, 0, lambda pool: 1 / 0))]
del output, elsewhere
allocator.empty_cache()

class Anchor:
    def __init__(self, pool):
        self.pool = pool
        with captures.into(pool):  # a graph that is kept, as torch's are: a user of the pool until it goes
            captures.kernel()
    def __del__(self):
        loaded.call("mg_torch_release_pool", 0, *self.pool)

before = allocator.memory_reserved()
pool = ExtensionPool(loaded, 0, lambda pool: Anchor(pool.id))
with captures.into(pool.id):
    output = storage(30 * MIB)
loaded.call("mg_torch_release_pool", 0, *pool.id)  # that recording's graph is given up
pool.adopt([output])
grown = allocator.memory_reserved()
pool.leave()
facts["given back by one"] = [before, grown - before >= 30 * MIB, allocator.memory_reserved()]
print(json.dumps(facts))
"""


@pytest.fixture(scope="module", params=["any_stream", "own_stream, plain"])
def facts(request: pytest.FixtureRequest, simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rule, _, plain = request.param.partition(", ")
    arguments = {"reuse": rule, "expandable": not plain}
    return run(SCRIPT.replace("ARGUMENTS", repr(arguments)), simulated, tmp_path_factory.mktemp("recordings"))


def test_random_recordings_share_a_pool_and_never_lie_over_one_another(facts: dict[str, Any]) -> None:
    assert len(facts["counts"]) == 6
    for counts in facts["counts"]:
        assert counts["recordings"] + counts["failed"] == 150
        assert min(counts.values()) > 5, counts


def test_all_memory_comes_back_in_the_end(facts: dict[str, Any]) -> None:
    assert facts["given back"] == [0, 0]


def test_recordings_are_made_where_the_extension_is_installed(facts: dict[str, Any]) -> None:
    assert facts["unavailable"] is None


def test_a_capture_that_cannot_end_leaves_no_use_and_no_scope_behind(facts: dict[str, Any]) -> None:
    assert facts["broken"] == [1, 2]
    assert facts["stopped"] == [1, "there is no such pool"]


def test_what_the_pool_has_reserved(facts: dict[str, Any]) -> None:
    own, all_of_it = facts["reserved"]
    assert 0 < own <= all_of_it
    assert facts["account"] == [own, 0, [[True, 3 << 20]]]


def test_another_capture_under_way_is_no_time_to_save_what_a_capture_has_used(facts: dict[str, Any]) -> None:
    assert facts["beside"]
    assert "a capture that used the pool is under way" in facts["another capture"]


def test_an_owner_lies_over_its_block_and_nothing_else_does(facts: dict[str, Any]) -> None:
    assert "is there to be owned" in facts["not there"]
    assert facts["one claim"] == [True, False]


def test_what_an_owner_freed_without_a_capture_is_brought_back(facts: dict[str, Any]) -> None:
    assert facts["freed"]
    assert facts["brought back"] == [[], True]


def test_a_state_is_forgotten_with_its_object(facts: dict[str, Any]) -> None:
    assert facts["forgotten"] == "there is no such state"


def test_a_pool_that_is_left_holds_nothing(facts: dict[str, Any]) -> None:
    assert facts["left"] == [True, "division by zero"]


def test_a_pool_that_is_left_gives_its_memory_back_though_its_anchor_used_it(facts: dict[str, Any]) -> None:
    before, grew, after = facts["given back by one"]
    assert grew
    assert after == before
