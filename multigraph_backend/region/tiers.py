"""Code that calls bodies is there soon; whether the whole graph's is faster is measured on calls, and then it stays.

    first tier    blocks that come again compiled once (`"repeat": "auto"`), in a part of the time
    64 calls on   a worker compiles the graph whole (`"compile": "background"`); calls go on
    trial         each call takes one of the two by lot, and is timed
    second tier   the whole graph's code, where it takes less than 0.99 x the time; else the first stays

Compiles in tiers are what machines for Java and JavaScript do; here the measure is time, not how often code runs.

In:  a form that calls bodies.  Of a graph that is trained, a call and its backward are timed together.
Out: which code runs each call, and in the end which form stays.

Guarantees: no call runs twice, and none waits for a compile.  Times are compared among calls that are given the same
numbers, so that sizes which come by turns are no bias; where too few calls are alike, or are followed by their
backward, the first form stays.  Nothing is measured once the process is sealed.  Of code on a GPU nothing is: there the
time of a call is not that of its work.
"""

from __future__ import annotations

import logging
import random
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from multigraph_backend import events, sealing
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.process.interruptions import from_outside

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from multigraph_backend.lower.lowering import Lowered
    from multigraph_backend.region.variant import Form, Variant

log = logging.getLogger(__name__)

CALLS = 64  # of the first form, before the graph is compiled whole
COLD = 3  # calls of each form with the same numbers that do not count
ALIKE = 8  # timed calls of each form with the same numbers, before these count
TIMED = 48  # such calls of each form, before the trial is decided
LOOKS = 16  # calls between two looks at what was timed
MOST = 4096  # calls of a trial
FASTER = 0.99  # of the first form's time: what takes less takes its place


def _backward_of(outputs: Any, args: Sequence[Any]) -> Node | None:
    """The node of autograd's graph that runs the backward of compiled code that returned `outputs`, or what they are
    views of; None where nothing is differentiated.  An output may be one of `args`, or a view of one, and that may come
    from other compiled code."""
    before = {getattr(arg, "grad_fn", None) for arg in args}
    for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
        node = getattr(output, "grad_fn", None)
        while node is not None and node not in before:
            if node.name() == "CompiledFunctionBackward":
                return cast("Node", node)
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return None


class Region(Protocol):
    """A region, as far as it is known here."""

    def compile_whole(self, tier: Tier, args: Sequence[Any]) -> bool | None:
        """Have the whole graph compiled in the background, for calls like this one; False where it cannot be, None
        where it cannot be asked for now."""

    def first_of_whole(self, tier: Tier, whole: Form, args: Sequence[Any]) -> Any:
        """Outputs of a call that the whole graph's code runs first: it is checked."""

    def decided(self, tier: Tier) -> bool:
        """Let calls run what `tier` says from now on; False where that cannot be done now."""


@dataclass
class _Times:
    """Seconds of calls with the same numbers, of the first form's and of the whole graph's code; `cold`: how many calls
    of each did not count."""

    taken: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    cold: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, which: int, seconds: float) -> None:
        if self.cold[which] < COLD:
            self.cold[which] += 1
        else:
            self.taken[which].append(seconds)

    @property
    def alike(self) -> int:
        """How many calls of each form count."""
        least = min(map(len, self.taken))
        return least if least >= ALIKE else 0


class Tier:
    """What becomes of a form of `variant` that calls bodies; `first` is its code.

    `run`: what runs its calls, None where that is its code alone.  `whole`: the form that is tried in its place.
    `taken`: whether that one stays; None until it is known.
    """

    def __init__(self, first: Lowered, variant: Variant, region: Region) -> None:
        self.first, self._variant = first, weakref.ref(variant)
        self.whole: Form | None = None
        self.taken: bool | None = None
        self.run: Callable[..., Any] | None = self._counted
        self._region = weakref.ref(region)
        self._calls = 0
        self._times: dict[tuple[int, ...], _Times] = {}
        self._without_backward = 0  # calls since the last one whose backward has run
        self._lot = random.Random(0)
        self._outcome = ""
        self._told = False
        self._lock = threading.Lock()

    @property
    def said(self) -> str:
        """What became of it, or how far it is, for reports."""
        if self.taken is not None:
            return self._outcome
        if self.whole is not None:
            return f"the whole graph is tried beside bodies ({self._calls} calls so far)"
        if self.run is not None:
            return f"the whole graph is compiled after {CALLS} calls ({self._calls} so far)"
        return "the whole graph is being compiled"

    @property
    def region(self) -> Region:
        region = self._region()
        assert region is not None  # the dispatcher that called keeps it
        return region

    @property
    def variant(self) -> Variant:
        variant = self._variant()
        assert variant is not None  # the region has it
        return variant

    # ---------------------------------------------------------------- the first calls

    def _counted(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls >= CALLS:
            self._begin(args)
        return self.first.shortest(*args)

    def _begin(self, args: Sequence[Any]) -> None:
        with self._lock:
            if self.run != self._counted:  # another thread is here
                return
            self.run = None
        begun: bool | None = False
        try:
            begun = not sealing.sealed() and self.region.compile_whole(self, args)
        except Exception as error:
            if from_outside(error):
                raise
            log.debug("the whole graph is not compiled: %s", describe(error))
        if begun is None:
            self._calls, self.run = 0, self._counted
            return
        if not begun:
            self.taken = False
        self.region.decided(self)

    # ---------------------------------------------------------------- the trial

    def begin_trial(self, whole: Form) -> None:
        """Calls take one of the two from now on."""
        if self.taken is not None:
            return
        self._calls = 0
        self.whole = whole
        self.run = self._tried

    def _tried(self, *args: Any) -> Any:
        whole = self.whole
        if sealing.sealed():
            self.refuse("the process was sealed before the whole graph was measured")
        if whole is None or self.taken is not None:
            self._tell()
            return self.first.shortest(*args)
        which = int(self._lot.random() < 0.5 and whole.holds(args))
        if which and not whole.proven:
            return self.region.first_of_whole(self, whole, args)
        run = (whole.lowered if which else self.first).shortest
        started = time.perf_counter()
        outputs = run(*args)
        seconds = time.perf_counter() - started
        numbers = tuple([arg for arg in args if type(arg) is int])
        if (backward := _backward_of(outputs, args)) is None:
            self._add(numbers, which, seconds)
        else:
            self._add_with_backward(numbers, which, seconds, backward)
        return outputs

    def _add_with_backward(self, numbers: tuple[int, ...], which: int, forward: float, backward: Node) -> None:
        """Add a call when its backward has run, with the seconds of both."""
        begun: list[float] = []

        def begins(gradients: object) -> None:
            begun.append(time.perf_counter())

        def ends(to_inputs: object, to_outputs: object) -> None:
            self._add(numbers, which, forward + time.perf_counter() - begun.pop())

        backward.register_prehook(torch.compiler.disable(begins))  # compiled autograd would trace what reads a clock
        backward.register_hook(torch.compiler.disable(ends))
        with self._lock:
            self._without_backward += 1
        if self._without_backward >= MOST:
            self.refuse("too few calls were followed by their backward to measure the whole graph")

    def _add(self, numbers: tuple[int, ...], which: int, seconds: float) -> None:
        with self._lock:
            self._calls += 1
            self._without_backward = 0
            self._times.setdefault(numbers, _Times()).add(which, seconds)
            if self._calls % LOOKS or self.taken is not None or not self._decide():
                return
        self._tell()

    def _decide(self) -> bool:
        """Whether it is known now which one stays.  Under the lock."""
        counting = [times for times in self._times.values() if times.alike]
        calls = sum(times.alike for times in counting)
        if calls < TIMED:
            if self._calls < MOST:
                return False
            self._outcome, self.taken = "too few calls were alike to measure the whole graph: bodies stay", False
            return True
        first, whole = (
            sum(times.alike * statistics.median(times.taken[which]) for times in counting) for which in (0, 1)
        )
        taken = whole < FASTER * first
        what = "it has taken their place" if taken else "bodies stay"
        ratio = whole / first
        self._outcome = f"the whole graph takes {ratio:.2f} x the time of bodies ({calls} calls of each): {what}"
        self.taken = taken
        return True

    def refuse(self, why: str) -> None:
        """The first form stays."""
        with self._lock:
            if self.taken is not None:
                return
            self._outcome, self.taken = f"{why}: bodies stay", False
        self._tell()

    def _tell(self) -> None:
        """Have the region do what was decided; where it cannot now, the next call asks again."""
        if not self.region.decided(self):
            return
        with self._lock:
            first, self._told = not self._told, True
            self._times.clear()
        if first:
            events.count("whole_graphs_taken" if self.taken else "whole_graphs_refused")
            log.info("%s: %s", self.variant.text, self._outcome)
