"""The peak of a whole training step from its parts, and what a plan comes to, for those who wait for the first step.

    held        100 MiB    what is there anyway: parameters, buffers, inputs, other models
    optimizer    80 MiB    its state, where that is not there yet
    gradients    40 MiB    of this graph's parameters; those of other graphs' are `elsewhere`
    forward      90 MiB    the estimated peak of its graph, above what the caller holds
    backward    110 MiB    the same; the graph makes the gradients, so they are in it

    forward:    100 + 80 + 40 + 90 = 310     (without the 40 where gradients are gone by then)
    backward:   100 + 80 + 110     = 290     the peak of the step is 310 MiB

In: a `Reckoned`, which is all that a process says about itself, rounded so that an equal process says the same; peaks
of the estimate.  Out: the peak of the step, and a `MemoryPlan`.

Invariants: pure.  A `Reckoned` is part of the keys of torch's caches and decides what is planned; nothing else of the
process does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multigraph_backend.saved_tensors.memory_goal import size

if TYPE_CHECKING:
    from multigraph_backend.saved_tensors.costs import Machine

_BITS = 7  # that are told apart: a hundredth


def rounded_up(count: int) -> int:
    """`count`, or a little more: processes that differ by less come to the same plan."""
    step = 1 << max(count.bit_length() - _BITS, 0)
    return -(-count // step) * step


@dataclass(frozen=True)
class Reckoned:
    """A goal in bytes, and what there is and will be beside the saved tensors of a graph.

    goal: None: as little time as possible
    held: None where nobody counts what the process holds: then it is what the graph is given
    optimizer: bytes of state that are still to come; `optimizer_by`: how that is known
    gradients: of the graph's own parameters; `elsewhere`: those of others that the optimizer has
    machine, link: the speed of the device, and bytes a second of copies to the host
    """

    goal: int | None
    machine: Machine
    held: int | None = None
    optimizer: int = 0
    optimizer_by: str = ""
    gradients: int = 0
    elsewhere: int = 0
    calls: int = 1
    gradients_in_forward: bool = True
    link: float = 0.0

    @property
    def fixed(self) -> int:
        """What no pack changes."""
        return (self.held or 0) + self.optimizer + self.elsewhere

    def whole(self, forward: int, backward: int, saved: int) -> int:
        """The peak of the step: of its graphs' estimated peaks, of which each other call holds what is `saved`."""
        waiting = (self.calls - 1) * saved
        before = self.gradients if self.gradients_in_forward else 0
        return self.fixed + waiting + max(before + forward, backward)

    def rows_that_fit(self, whole: int, given: int, rows: int) -> int:
        """Of a batch of `rows`, estimated: all but what no batch changes grows with it, what is `given` too."""
        if self.goal is None or rows < 1:
            return rows
        constant = self.fixed - given + self.gradients
        grows = whole - constant
        if grows <= 0:
            return rows if whole <= self.goal else 0
        return max(min(rows, rows * (self.goal - constant) // grows), 0)


@dataclass(frozen=True)
class Way:
    """What is done with `tensors` saved tensors in one way, `error`: with each element; `seconds`: in a step."""

    name: str
    tensors: int
    bytes: int
    bytes_saved: int
    seconds: float
    error: str

    def __str__(self) -> str:
        some = "1 tensor" if self.tensors == 1 else f"{self.tensors} tensors"
        return (
            f"{self.name}: {some}, {size(self.bytes)} -> {size(self.bytes_saved)}, "
            f"about {self.seconds * 1e3:.2f} ms a step, error {self.error}"
        )


@dataclass(frozen=True)
class MemoryPlan:
    """What became of a goal in one graph: for `explain()`, and for the cache of its code.

    `missed`: bytes by which the estimated peak `peak` is above the goal.  `rows`, `fit`: of the batch, and how many of
    them would fit as it is planned.  `offloads`: whether all that can be copied to the host may be.
    """

    goal: int | None
    held: int
    optimizer: int
    optimizer_by: str
    gradients: int
    elsewhere: int
    calls: int
    peak_without: int
    peak: int
    saved_without: int
    saved: int
    ways: tuple[Way, ...] = ()
    rows: int = 0
    fit: int = 0
    offloads: bool = False

    @property
    def missed(self) -> int:
        return 0 if self.goal is None else max(self.peak - self.goal, 0)

    @property
    def seconds(self) -> float:
        """Estimated, in a step."""
        return sum(way.seconds for way in self.ways)

    def lines(self) -> list[str]:
        goal = "as little time as possible" if self.goal is None else size(self.goal)
        first = (
            f"memory goal: {goal}; held {size(self.held)}, gradients {size(self.gradients + self.elsewhere)}, "
            f"optimizer {size(self.optimizer)} ({self.optimizer_by})"
        )
        waiting = f", {self.calls} calls at one time" if self.calls > 1 else ""
        second = (
            f"estimated peak of the step {size(self.peak_without)} -> {size(self.peak)}{waiting}; "
            f"saved {size(self.saved_without)} -> {size(self.saved)}"
        )
        if self.goal is None:
            verdict = "only what costs nothing is done" if self.ways else "nothing that costs nothing is to be had"
        elif self.missed:
            verdict = f"{size(self.missed)} too much"
        else:
            verdict = f"it fits, for about {self.seconds * 1e3:.2f} ms a step" if self.ways else "it fits as it is"
        return [first, f"  {second}: {verdict}", *(f"  {way}" for way in self.ways)]

    def complaint(self) -> str | None:
        """By how much a goal is missed, and what there is to do; None where it is met."""
        if not self.missed or self.goal is None:
            return None
        said = (
            f"the memory goal of {size(self.goal)} is missed by {size(self.missed)}: a step needs an estimated "
            f"{size(self.peak)} with all that may be done, {size(self.peak_without)} without"
        )
        return f"{said}; {'; '.join(self._remedies())}"

    def _remedies(self) -> Sequence[str]:
        constant = self.held + self.optimizer + self.gradients + self.elsewhere
        found = []
        if 0 < self.fit < self.rows:
            found.append(f"about {self.fit} of the {self.rows} rows of the batch would fit")
        else:
            found.append(f"no smaller batch would fit: {size(constant)} are held, for gradients and for the optimizer")
        if not self.offloads:
            found.append("a rule with Offload() would take more off the GPU")
        found.append("torch.utils.checkpoint around blocks saves less")
        return found


class GoalMissed(RuntimeError):
    """A memory goal cannot be met and the user asked to hear of it (`on_failure="raise"`)."""
