"""Every small program: up to three pieces in every order, inputs fresh or handed on, outputs dropped in every order.

Each program runs for several rounds, so that its pieces are warmed up, recorded, replayed and met on other paths; after
every call everything that is held must be what it was when it was handed out.  The device is the simulated one, whose
memory is garbage as soon as something else lives there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from multigraph_backend.cudagraphs.devices.device import PoolState
from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings import replay
from multigraph_backend.cudagraphs.recordings.nodes import Holds, Node
from multigraph_backend.cudagraphs.recordings.slot import Slot
from multigraph_backend.cudagraphs.recordings.tree import Tree
from tests.support.simulated.pieces import Bench

ROUNDS = 6


@dataclass(frozen=True)
class Program:
    """calls: which piece; chained: whether it gets the last output; dropped: per output, after which call of the round
    it goes, and the program's length means: when the same call has been made again; later: the same for rounds 3 and 4,
    so that recordings meet what was not so when they were made."""

    calls: tuple[int, ...]
    chained: tuple[bool, ...]
    dropped: tuple[int, ...]
    later: tuple[int, ...]


def orders(length: int) -> Iterator[tuple[int, ...]]:
    """Sequences over up to three pieces, each set of names once."""
    for calls in itertools.product(range(3), repeat=length):
        seen = list(dict.fromkeys(calls))
        if seen == sorted(seen) and seen == list(range(len(seen))):
            yield calls


def programs(length: int, mixed: bool = True) -> Iterator[Program]:
    """All of them; `mixed`: also those in which some inputs are fresh and some handed on."""
    schedules = list(itertools.product(*(range(made, length + 1) for made in range(length))))
    for calls in orders(length):
        for chained in itertools.product((False, True), repeat=length - 1):
            if mixed or len(set(chained)) <= 1:
                for number, dropped in enumerate(schedules):
                    yield Program(calls, (False, *chained), dropped, schedules[(number + 7) % len(schedules)])


def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    temporary = x * 2
    return (temporary + 1,)


def rotated(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    temporary = x.roll(1) + x
    other = temporary * temporary
    return (other - x,)


def summed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x.sum()
    return (x - total, total)


FUNCTIONS = (scaled, rotated, summed)


class Run:
    """One program on a tree of its own."""

    def __init__(self, program: Program, limits: Limits | None = None) -> None:
        self.program = program
        self.bench = Bench(limits, pool_bytes=1 << 14)
        self.pieces = [self.bench.piece(function, 1, len(function(torch.ones(1)))) for function in FUNCTIONS]
        self.held: dict[int, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}

    def go(self, rounds: int) -> None:
        values = torch.Generator().manual_seed(0)
        length = len(self.program.calls)
        for round_ in range(rounds):
            last: torch.Tensor | None = None
            for at, (which, chained) in enumerate(zip(self.program.calls, self.program.chained, strict=True)):
                x = last if chained and last is not None else torch.randn(8, generator=values)
                expected = [value.clone() for value in FUNCTIONS[which](x)]
                outputs = self.pieces[which]([x])
                last = outputs[0]
                del x
                number = round_ * length + at
                self.held[number] = (outputs, expected)
                del outputs
                self.check(number)
                for made in list(self.held):
                    if number >= self._last_held(made):
                        del self.held[made]
                if not (at + 1 < length and self.program.chained[at + 1]):
                    last = None

    def _last_held(self, made: int) -> int:
        """The call after which the output of call `made` is dropped."""
        length = len(self.program.calls)
        first_of_round, at = made - made % length, made % length
        schedule = self.program.later if made // length in (3, 4) else self.program.dropped
        dropped = schedule[at]
        return made + length if dropped == length else first_of_round + dropped

    def check(self, number: int) -> None:
        for made, (outputs, expected) in self.held.items():
            for output, value in zip(outputs, expected, strict=True):
                assert torch.equal(output, value), f"after call {number}, output of call {made} of {self.program}"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_everything_held_keeps_its_value(length: int) -> None:
    for program in programs(length):
        run = Run(program)
        run.go(ROUNDS)
        # all calls but the first of each piece came from recordings
        assert run.bench.unrecorded(*run.pieces) == {}, program
        assert run.bench.replays() == ROUNDS * length - len(set(program.calls)), program


@pytest.mark.slow
def test_everything_held_keeps_its_value_in_programs_of_four_calls() -> None:
    for program in programs(4, mixed=False):
        run = Run(program)
        run.go(4)
        assert run.bench.unrecorded(*run.pieces) == {}, program


# ---------------------------------------------------------------- what the check is worth


def _nothing_moves_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "_restart", lambda tree, kept=0: tree.path.clear())


def _everything_seems_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "alive", lambda slot, use_count: False)


def _nothing_is_kept_out_of_the_way(patch: pytest.MonkeyPatch) -> None:
    restore = SimulatedDevice.restore

    def wrong(
        device: SimulatedDevice, state: PoolState, blocks: Collection[int], owned: Sequence[tuple[int, int]]
    ) -> list[torch.UntypedStorage]:
        restore(device, state, ())
        return [device.storage_at(address, nbytes) for address, nbytes in owned]

    patch.setattr(SimulatedDevice, "restore", wrong)


def _dead_or_alive_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    build = replay.build_holds

    def forgetful(node: Node) -> Holds:
        node.dead = ()
        return build(node)

    patch.setattr(replay, "build_holds", forgetful)


def _inputs_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedDevice, "_copy", lambda device, to, of: None)


MUTANTS = [
    _nothing_moves_out,
    _everything_seems_dead,
    _nothing_is_kept_out_of_the_way,
    _dead_or_alive_does_not_matter,
    _inputs_are_not_copied,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_runtime_with_one_mistake_is_caught(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(AssertionError):
            _run_all()


def _run_all() -> None:
    for program in itertools.chain(programs(2), programs(3)):
        Run(program).go(ROUNDS)
