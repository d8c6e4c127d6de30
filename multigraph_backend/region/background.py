"""Variants compile beside the calls, in worker processes: `"compile": "background"`.

A call that finds its variant without code asks for it here, and runs generic.  A worker compiles and leaves the code in
torch's caches; a thread of this process takes it from there for stand-ins of the call's arguments, as warm start does,
which compiles nothing; and the variant is there, whole, for the next call.

In: variants, and calls that ask for them.  Out: forms of variants, or failures with their reasons.

Guarantees: no call waits, and none fails, whatever becomes of a worker; one compile at a time for each variant; what
fails is counted and tried again later, as after any failed compile, and never in a call.  What no worker can compile is
left to calls, with a note that says why.

What calls pay for it is kept small: of this process's threads one at a time packs or loads, however many workers there
are, for each of them would have a turn of the interpreter between two operators of a call, and it gives way to calls: a
tenth of the time is its own while they come; and kernels are tuned where they are compiled, not in the call that runs
them first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from multigraph_backend import _compat, events
from multigraph_backend.capture import declared
from multigraph_backend.capture.aliasing import sharing
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.lower import parcel, workers
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.parcel import CannotSend, PackedGraph
from multigraph_backend.lower.stand_ins import Likeness
from multigraph_backend.lower.worker import Job, Outcome
from multigraph_backend.options import Options
from multigraph_backend.process import garbage
from multigraph_backend.process.giving_way import MOST, GivesWay
from multigraph_backend.process.short_turns import ShortTurns
from multigraph_backend.region import warm_start
from multigraph_backend.region.compile_options import may_use_gpu, options_for
from multigraph_backend.region.tiers import Tier
from multigraph_backend.region.variant import Variant

log = logging.getLogger(__name__)


class WorkerFailed(RuntimeError):
    """A compile in a worker process failed, or the worker did."""


class Swaps(Protocol):
    """A region, as far as it is known here."""

    notes: list[str]

    def swap_in(self, asked: Asked, made: Outcome | None = None) -> None:
        """Take a form from torch's caches; raises where they do not have it.  `made`: what a worker says of it."""

    def not_made(self, asked: Asked, error: Exception | None) -> None:
        """It is not there: a failure, or (None) it is left to calls."""


@dataclass(frozen=True)
class Asked:
    """What a call has asked for: a variant, for values like these; nothing of the call is kept alive.

    `exact`: the one value that an opaque condition is compiled for.  `case`: what a failure speaks for.
    `tier`: of code that calls bodies, where it is asked for without.
    """

    variant: Variant
    likeness: Likeness
    values: Mapping[str, int]
    exact: int | None
    case: tuple[Any, Any]
    tier: Tier | None = None


_one_at_a_time = threading.Lock()
_RESTS = 4  # times as long as a thread has worked at a stretch, in which calls took longer and others came to wait
_LONGEST_REST = 2.0  # seconds
#: seconds that a worker rests before it benchmarks a kernel, which takes some milliseconds, for each worker there is
_REST = 0.1


@contextlib.contextmanager
def _beside_calls(limit: float | None = None) -> Iterator[None]:
    """Around what a worker's thread does in Python: calls go on, and let go of the interpreter at each operator.

    While calls come, it works in slices.  Where that cannot be, it rests once, before the next one begins, so that
    requests that were held up are served.  `limit`: seconds that a compile may take; rests are at most half of it.
    """
    with _one_at_a_time:
        calls, worked = events.calls(), time.perf_counter()
        way = GivesWay(_calls, MOST if limit is None else min(MOST, limit / 2))
        try:
            with ShortTurns(), way.inside():
                yield
        finally:
            if not way.slices and events.calls() != calls:
                _rest(min(_RESTS * (time.perf_counter() - worked), _LONGEST_REST))


def _calls() -> int:
    """How many there were, that are to be given way to."""
    return events.calls() if workers.pool.gives_way else -1


def _rest(seconds: float) -> None:
    time.sleep(seconds)


def _begin_anew() -> None:
    """In a forked process: the thread that held it may be the parent's."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


class Background:
    """One region's part.  `cannot`: why its variants are compiled in calls after all, once that is known."""

    def __init__(self, graph: CapturedGraph, options: Options, state: CompileState) -> None:
        self._graph, self._options, self._state = graph, options, state
        self._packed: Callable[[], PackedGraph | None] = lambda: None
        self.cannot = self._never()

    def _never(self) -> str | None:
        if self._options.compiler != "inductor":
            return "only Inductor's code can be taken from torch's caches"
        if lacking := _compat.missing("workers"):
            return f"this torch differs: {lacking[0]}"
        if self._graph.communicates:
            return "the graph issues collectives"
        if not warm_start.in_caches(self._graph, self._options):
            return "torch's caches are off"
        return None

    def begin(
        self,
        region: Swaps,
        variant: Variant,
        args: Sequence[Any],
        likeness: Likeness | None,
        exact: int | None,
        case: tuple[Any, Any],
        tier: Tier | None = None,
    ) -> bool:
        """Have a form compiled for calls with such `args`; False where a call has to.

        The caller holds the variant's lock.  `likeness`: of `args`, where it is known.  `tier`: whose calls have code
        that calls bodies, and go on with that.
        """
        if self.cannot is not None:
            return False
        problem = self._not_for(args)
        if problem is None and likeness is None:
            likeness = Likeness.of(self._graph, args)
        if tier is not None and (problem is not None or likeness is None):
            return False
        if problem is not None or likeness is None:
            self._said(region, f"{variant.text} is compiled in calls: {problem or 'its inputs cannot be made up'}")
            return False
        values = {
            str(symbol): int(value)
            for symbol, value in self._graph.values(args).items()
            if isinstance(value, int) and not isinstance(value, bool)
        }
        asked = Asked(variant, likeness, values, exact, case, tier)
        packed = self._packed() or PackedGraph(self._graph)  # there as long as a compile waits
        self._packed = weakref.ref(packed)
        task = _Task(weakref.ref(region), packed, self._options, self._state, asked, self)
        variant.in_background = tier is None
        if not workers.pool.submit(workers.Task(task.job, task.done), dict(self._options.workers).get("count")):
            variant.in_background = False
            return True  # the process ends
        return True

    def _not_for(self, args: Sequence[Any]) -> str | None:
        """Why code for such a call cannot come from a worker."""
        if sharing(self._graph, args):
            return "torch's caches do not keep code for inputs that share memory"
        tensors = [*(arg for arg in args if isinstance(arg, torch.Tensor)), *self._graph.held]
        if any(tensor.is_cuda for tensor in tensors) and not may_use_gpu(self._options):
            return (
                "it is for a GPU, of which a worker would take some hundred MB of memory "
                '("workers": {"gpu": true} allows that)'
            )
        return None

    def left_to_calls(self, region: Swaps, reason: str) -> None:
        """From now on calls compile."""
        self.cannot = reason
        self._said(region, f"variants are compiled in calls, and not in the background: {reason}")

    def _said(self, region: Swaps, note: str) -> None:
        if note not in region.notes:
            region.notes.append(note)
        events.warn_once(f"{self._graph.user_code}: {note}", "%s: %s", self._graph.user_code, note)


@dataclass(frozen=True, eq=False)
class _Task:
    """One compile in a worker, as the worker's thread knows it."""

    region: weakref.ref[Swaps]
    packed: PackedGraph
    options: Options
    state: CompileState
    asked: Asked
    background: Background

    def job(self) -> Job | Outcome:
        variant, region = self.asked.variant, self.region()
        if region is None:
            return Outcome("done")
        if not workers.pool.pids:  # one that runs finds what another process has compiled, and beside calls
            try:
                with _beside_calls(self.options.compile_timeout):
                    region.swap_in(self.asked)
                return Outcome("done")
            except Exception as error:
                log.debug("%s is not in torch's caches: %s", variant.text, describe(error))
        del region  # it may end while a worker compiles
        with _beside_calls(), garbage.paused():
            return self._job(variant)

    def _job(self, variant: Variant) -> Job | Outcome:
        graph = self.packed.graph
        args = self.asked.likeness.with_values(graph, self.asked.values)
        if args is None:
            return Outcome("failed", reason="a parameter is gone")
        condition = variant.condition
        pinned = {} if condition is None else declared.exact_values(condition, graph.values(args))
        on_gpu = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
        options = options_for(self.options, variant, args, self.state.grad, self.asked.tier is not None)
        try:
            content = parcel.pack(self.packed, variant.facts, args, options, self.state, pinned, variant.text, on_gpu)
        except CannotSend as reason:
            return Outcome("cannot", reason=str(reason))
        limits = dict(self.options.workers)
        seconds, memory = self.options.compile_timeout, limits.get("memory")
        rest = _REST * max(1, len(workers.pool.pids)) if on_gpu and workers.pool.gives_way else 0.0
        return Job(content, str(_compat.cache_dir()), seconds, memory, rest)

    def done(self, outcome: Outcome) -> None:
        region = self.region()
        if region is None:
            self.asked.variant.in_background = False
            return
        text = self.asked.variant.text
        error: Exception | None = None
        if outcome.kind == "done":
            return
        if outcome.kind == "cannot" and self.asked.tier is None:
            self.background.left_to_calls(region, outcome.reason)
        elif outcome.kind in ("cannot", "failed"):
            error = WorkerFailed(outcome.reason)
            if outcome.details:
                error.add_note(outcome.details)
        else:
            try:
                with _beside_calls(self.options.compile_timeout):
                    region.swap_in(self.asked, outcome)
                return
            except Exception as problem:
                log.debug("%s of a worker is not taken", text, exc_info=True)
                error = WorkerFailed(
                    f"a worker compiled it, and it is not taken from torch's caches: {describe(problem)}"
                )
                error.__cause__ = problem
        region.not_made(self.asked, error)


def waited_for() -> contextlib.AbstractContextManager[None]:
    """Inside, variants are waited for: what compiles and loads them does not give way to calls."""
    return workers.pool.waited_for()


def wait(seconds: float | None = None) -> bool:
    """Until workers have nothing left to do; whether that is so."""
    return workers.pool.wait(seconds)
