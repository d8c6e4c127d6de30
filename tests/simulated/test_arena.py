"""The books of the simulated pool, against a model that looks at each granule."""

from __future__ import annotations

import itertools
import random

import pytest

from multigraph_backend.cudagraphs.devices.simulated.arena import Arena, ArenaState, Timeline


class Granules:
    """The same allocator, written to be obvious: one cell per granule, which holds the number of its block, or 0."""

    def __init__(self, cells: int) -> None:
        self.cells = [0] * cells
        self.numbers = itertools.count(1)

    def allocate(self, granules: int) -> int | None:
        runs, start = [], 0
        for number, cells in itertools.groupby(self.cells):
            length = len(list(cells))
            if number == 0 and length >= granules:
                runs.append((length, start))
            start += length
        if not runs:
            return None
        start = min(runs)[1]
        self.cells[start : start + granules] = [next(self.numbers)] * granules
        return start

    def free(self, start: int) -> None:
        number = self.cells[start]
        self.cells = [0 if cell == number else cell for cell in self.cells]


@pytest.mark.parametrize("seed", range(40))
def test_it_does_what_the_model_does(seed: int) -> None:
    rng = random.Random(seed)
    granularity = rng.choice([1, 16, 64])
    cells = rng.choice([8, 64])
    arena, model = Arena(cells * granularity, granularity), Granules(cells)
    states: list[tuple[ArenaState, list[int]]] = []
    highest = refused = 0
    for _ in range(300):
        choice = rng.random()
        if choice < 0.5:
            nbytes = rng.randrange(1, cells * granularity // 3)
            expected = model.allocate(-(-nbytes // granularity))
            if expected is None:
                refused += 1
                with pytest.raises(MemoryError, match=f"no room for {nbytes} bytes"):
                    arena.allocate(nbytes)
            else:
                assert arena.allocate(nbytes) == expected * granularity
        elif choice < 0.85 and arena.blocks:
            offset = rng.choice(sorted(arena.blocks))
            assert arena.free(offset) == model.cells.count(model.cells[offset // granularity]) * granularity
            model.free(offset // granularity)
        elif choice < 0.95 or not states:
            states.append((arena.state(), list(model.cells)))
        else:
            state, then = rng.choice(states)
            arena.restore(state)
            model.cells = list(then)
        starts = [n for n, cell in enumerate(model.cells) if cell and (n == 0 or model.cells[n - 1] != cell)]
        blocks = {n * granularity: model.cells.count(model.cells[n]) * granularity for n in starts}
        assert arena.blocks == blocks
        assert sum(nbytes for _, nbytes in arena.holes()) == model.cells.count(0) * granularity
        highest = max([highest, *(offset + nbytes for offset, nbytes in blocks.items())])
        assert arena.high_water == highest
    assert refused, "this run never filled the arena"


def test_a_state_does_not_change_with_the_arena() -> None:
    arena = Arena(256)
    arena.allocate(100)
    state = arena.state()
    arena.allocate(1)
    assert state == ArenaState(((0, 128),))
    arena.restore(state)
    arena.allocate(1)
    assert state == ArenaState(((0, 128),))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_block_has_bytes(nbytes: int) -> None:
    with pytest.raises(ValueError, match="a block of"):
        Arena(256).allocate(nbytes)


def test_work_waits_for_the_last_work() -> None:
    timeline = Timeline()
    timeline.work(1, "replay")
    timeline.work(1, "replay")
    with pytest.raises(AssertionError, match="copy on stream 2 does not wait for the last replay on stream 1"):
        timeline.work(2, "copy")
    timeline.wait(2, 1)
    timeline.work(2, "copy")
    with pytest.raises(AssertionError, match="race"):
        timeline.check(1, "capture")


def test_to_wait_for_what_was_launched_so_far_is_not_enough_for_what_comes_later() -> None:
    timeline = Timeline()
    timeline.work(1, "replay")
    timeline.wait(2, 1)
    timeline.work(1, "replay")
    with pytest.raises(AssertionError, match="race"):
        timeline.work(2, "replay")


def test_waiting_is_passed_on() -> None:
    timeline = Timeline()
    timeline.work(1, "replay")
    timeline.wait(2, 1)
    timeline.wait(3, 2)
    timeline.work(3, "replay")
