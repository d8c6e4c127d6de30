"""The benchmark's programs over the simulated driver: what the pool of a capture holds, beside what it needs at least.

The simulated driver has no kernels that take time and no data, but the memory of a capture depends on neither: what is
reserved here is what is reserved on a GPU for the same operations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.allocator.extension import ANY_STREAM, MIB, OWN_STREAM, STRICT, Allocator
from tests.support.allocator.simulated_programs import reserved

Make = Callable[..., Allocator]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("allocator_programs")


@pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
@pytest.mark.parametrize("rule", [OWN_STREAM, ANY_STREAM], ids=["own stream", "any stream"])
def test_blocks_of_one_size_take_no_more_than_what_is_alive(
    make: Make, programs: Any, rule: int, expandable: bool
) -> None:
    for program, most in ((programs.ping_pong(), 258 * MIB), (programs.ping_pong(kept=4), 642 * MIB)):
        assert reserved(programs, program, make(reuse=rule, expandable=expandable)) <= most
    program = programs.without_use()
    held = reserved(programs, program, make(reuse=rule, expandable=expandable))
    assert held <= 1.1 * programs.bounds(program).own_stream


def test_without_reuse_they_take_all_that_was_ever_asked_for(make: Make, programs: Any) -> None:
    allocator = make(reuse=STRICT)
    assert reserved(programs, programs.ping_pong(), allocator) > 4000 * MIB
    assert allocator.stats.proven == 0


@pytest.mark.parametrize("streams", [2, 4])
def test_random_programs(make: Make, programs: Any, streams: int) -> None:
    program = programs.random_program(streams)
    least = programs.bounds(program).own_stream
    allocator = make(reuse=OWN_STREAM, verify=False)
    # segments belong to a stream, and blocks of many sizes leave holes in them
    assert least <= reserved(programs, program, allocator) <= 1.8 * least
    assert allocator.stats.proven > 2_000


@pytest.mark.parametrize("streams", [2, 4])
def test_random_programs_over_one_shared_range(make: Make, programs: Any, streams: int) -> None:
    program = programs.random_program(streams)
    least = programs.bounds(program).own_stream
    allocator = make(reuse=ANY_STREAM, expandable=True, verify=False)
    # holes between blocks of many sizes are left
    assert 1.12 * least <= reserved(programs, program, allocator) <= 1.2 * least
    assert allocator.stats.moved > 2_000
    assert allocator.stats.stitched == 0
    allocator = make(reuse=ANY_STREAM, expandable=True, stitch=True, verify=False)
    assert least <= reserved(programs, program, allocator) <= 1.1 * least
    assert allocator.stats.stitched > 100
