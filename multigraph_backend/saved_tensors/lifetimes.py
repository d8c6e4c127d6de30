"""How many bytes are alive at each step of a program, from who makes and who reads what.

A saved tensor that is packed at the right step lowers the peak, at the wrong one it raises it; this can be
computed, as a sum over lifetimes.  This module is that sum: pure, over names and sizes.  `graphs` reads programs from
FX graphs, `placement` compares them.

In: a `Program`.  Out: bytes alive while each step runs.

Invariant: a buffer lives from the step that makes it to the last one that reads it; results live to the end, what the
caller holds is not counted.  The same as running the steps one after the other and dropping each value after its last
use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Step:
    """One operation: the buffers it reads and makes.  A view makes none: it reads the memory that it shares."""

    name: str
    reads: frozenset[str] = frozenset()
    makes: tuple[str, ...] = ()
    view: bool = False


@dataclass(frozen=True)
class Program:
    """Steps in order over buffers.

    `given` buffers are there at the start and die after their last use; `held` ones belong to the caller and are not
    counted; `results` live to the end.  `same`: buffers that are one memory under several names, with the name that
    stands for all of them.
    """

    steps: tuple[Step, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()
    same: Mapping[str, str] = field(default_factory=dict)

    def memories(self, names: Iterable[str]) -> frozenset[str]:
        """The distinct memories of these buffers, without what the caller holds."""
        return frozenset(self.same.get(name, name) for name in names if name not in self.held)

    def uses(self, buffers: Iterable[str]) -> list[int]:
        """Positions of the steps that compute with one of `buffers`; views of it do not."""
        wanted = frozenset(buffers)
        return [index for index, step in enumerate(self.steps) if not step.view and step.reads & wanted]


def live_bytes(program: Program) -> tuple[int, ...]:
    """Bytes alive while each step runs: all that is needed then or later, and what the step makes."""
    touched = [program.memories((*step.makes, *step.reads)) for step in program.steps]
    last = {name: index for index, names in enumerate(touched) for name in names}
    results = program.memories(program.results)
    dying: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in results:
            dying.setdefault(index, []).append(name)
    alive = set(program.memories(program.given))
    total = sum(program.sizes[name] for name in alive)
    curve = []
    for index, step in enumerate(program.steps):
        made = program.memories(step.makes) - alive
        alive |= made
        total += sum(program.sizes[name] for name in made)
        curve.append(total)
        gone = alive.intersection(dying.get(index, ()))
        alive -= gone
        total -= sum(program.sizes[name] for name in gone)
    return tuple(curve)


def peak(program: Program) -> int:
    """The most bytes alive at any step."""
    return max(live_bytes(program), default=0)


def inserted(program: Program, before: Mapping[int, Sequence[Step]], sizes: Mapping[str, int]) -> Program:
    """`program` with further steps before the given positions (the number of steps: at the end)."""
    steps: list[Step] = []
    for index, step in enumerate(program.steps):
        steps.extend(before.get(index, ()))
        steps.append(step)
    steps.extend(before.get(len(program.steps), ()))
    return replace(program, steps=tuple(steps), sizes={**program.sizes, **sizes})


@dataclass(frozen=True)
class Fragment:
    """Steps that turn `inputs` into `outputs`, to be put into a program any number of times."""

    steps: tuple[Step, ...]
    sizes: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def placed(self, prefix: str, inputs: Sequence[str]) -> tuple[list[Step], dict[str, int], tuple[str, ...]]:
        """Steps, sizes and output buffers of one copy whose own buffers start with `prefix`."""
        names = dict(zip(self.inputs, inputs, strict=True))

        def name(buffer: str) -> str:
            return names.get(buffer, f"{prefix}{buffer}")

        steps = [
            Step(f"{prefix}{step.name}", frozenset(map(name, step.reads)), tuple(map(name, step.makes)), step.view)
            for step in self.steps
        ]
        sizes = {name(buffer): size for buffer, size in self.sizes.items() if buffer not in names}
        return steps, sizes, tuple(map(name, self.outputs))
