"""The life of one variant: declared, compiling, ready, failed.

A variant is one condition of the user, or the generic graph that serves when none matches.  Its code exists in
*forms*: a compile may come to rely on more than was declared (Inductor on the CPU splits a reduction at 4096 elements),
and where the declared condition holds but the guards of no form do, a further form is compiled.

Invariants: one compile at a time per variant, however many threads ask; a form runs only where its guards hold;
a failure leaves a reason and a time before which nobody tries again.
"""

from __future__ import annotations

import math
import re
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import sympy

from multigraph_backend import events
from multigraph_backend.capture.aliasing import Sharing
from multigraph_backend.capture.declared import Condition
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.lower.compilers import CompiledFunction
from multigraph_backend.lower.lowering import Lowered
from multigraph_backend.options import Options
from multigraph_backend.region.dispatch import Boxed
from multigraph_backend.region.gains import Gain

State = Literal["declared", "compiling", "ready", "failed", "inactive"]
Floats = tuple[tuple[str, str], ...]  # symbol and value of each Python float whose value a compile may rely on

MOST_FORMS = 4  # of one condition; then generic serves what is left
MOST_GENERIC_FORMS = 64
MOST_FAILED_FLOATS = 4  # so many values may rest, each by itself; then failures speak for all
_FIRST_RETRY = 60.0  # seconds after a failure before another try, doubled each time


class Tried(Protocol):
    """See `tiers.Tier`."""

    @property
    def run(self) -> CompiledFunction | None: ...
    @property
    def said(self) -> str: ...


@dataclass
class Form:
    """Compiled code and where it is right.  `proven` once a call's outputs had the expected structure.

    `loaded`: it came from torch's caches before a call asked for it.  `by_worker`: a worker process compiled it.
    `tier`: what becomes, or became, of one that calls bodies.
    """

    lowered: Lowered
    proven: bool = False
    loaded: bool = False
    by_worker: bool = False
    tier: Tried | None = None

    @property
    def run(self) -> CompiledFunction:
        """What runs its calls."""
        return (None if self.tier is None else self.tier.run) or self.lowered.shortest

    @property
    def boxed(self) -> Boxed | None:
        """What may be called in place of `run`, with a list of its arguments."""
        return self.lowered.boxed if self.tier is None or self.tier.run is None else None

    def holds(self, args: Sequence[Any]) -> bool:
        return self.lowered.guards.hold(args)


class Variant:
    """One condition (None: generic) of a region and its compiled forms.

    `lock` is held by the one thread that compiles; forms are only appended or removed under it.  That thread may take
    it again, in a handler of a signal that calls what it interrupted: `compiling` tells.
    """

    def __init__(self, number: int, condition: Condition | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = number
        self.condition = condition
        self.forms: tuple[Form, ...] = ()
        self.lock = threading.RLock()
        self.compiling = False  # under `lock`
        self.in_background = False  # a worker process compiles a form; set under `lock`
        self.failures = 0
        self.reason: str | None = condition.never if condition is not None else None
        self.details: str | None = None  # the whole traceback of the last failure, as text: no frame is kept alive
        self.user_stack: str | None = None  # the user's lines that the last failure was about, where torch says so
        self.compile_seconds = 0.0
        self.gain = Gain()
        self.reckoned: Options | None = None  # with what its memory goal comes to; see `compile_options.options_for`
        self.exact: int | None = None  # the one value that an opaque condition is compiled for
        self.asked_caches = -math.inf  # when a call after `seal()` asked torch's caches in vain; under `lock`
        self._retry_at: dict[tuple[Sharing, Floats], float] = {}
        self.clock = clock
        self._calls = events.call_counter("generic_calls" if condition is None else "variant_calls", self)

    @property
    def generic(self) -> bool:
        return self.condition is None

    @property
    def text(self) -> str:
        return "generic" if self.condition is None else self.condition.text

    @property
    def tick(self) -> Callable[[], int]:
        return self._calls.tick

    @property
    def calls(self) -> int:
        return self._calls.value

    @property
    def counter(self) -> events.CallCounter:
        """Counts its calls, also for those who outlive it."""
        return self._calls

    @property
    def state(self) -> State:
        if self.condition is not None and self.condition.never is not None:
            return "inactive"
        if self.compiling or (self.in_background and not self.forms):
            return "compiling"
        if self.forms:
            return "ready"
        return "failed" if self.failures else "declared"

    @property
    def facts(self) -> Mapping[sympy.Symbol, Any]:
        return {} if self.condition is None else self.condition.facts

    @property
    def repeated(self) -> str | None:
        """What became of blocks that come again, in the newest form, and of forms that call bodies."""
        newest = [form.lowered.repeated.said for form in self.forms[-1:]]
        return "; ".join(filter(None, (*newest, *(form.tier.said for form in self.forms if form.tier)))) or None

    def fitting(self, args: Sequence[Any]) -> Form | None:
        """The first form whose guards hold."""
        return next((form for form in self.forms if form.holds(args)), None)

    @property
    def rests_until(self) -> float:
        """Before that time no call compiles a form, however its inputs share memory: there are enough, or one failed.

        A failure with inputs that share nothing speaks for all calls, and asking how they share memory would cost more
        than the rest of the call.  One of code for some values of Python floats speaks for these, several for all.
        """
        if len(self.forms) >= (MOST_GENERIC_FORMS if self.generic else MOST_FORMS):
            return math.inf
        values = sorted((at for (_, floats), at in self._retry_at.items() if floats), reverse=True)
        several = values[MOST_FAILED_FLOATS - 1] if len(values) >= MOST_FAILED_FLOATS else -math.inf
        return max(several, self._retry_at.get(((), ()), -math.inf))

    @property
    def resting(self) -> bool:
        return self.clock() < self.rests_until

    @property
    def failed_floats(self) -> bool:
        """Whether a failure speaks for some values of Python floats, however inputs share memory."""
        return any(floats and not sharing for sharing, floats in self._retry_at)

    def rests_for(self, floats: Floats) -> bool:
        """Whether no call with these values of Python floats compiles a form now."""
        now = self.clock()
        return now < self._retry_at.get(((), floats), -math.inf) or now < self.rests_until

    def may_compile(self, sharing: Sharing, floats: Floats = ()) -> bool:
        """Whether another form may be compiled now: not too many of them, and not too soon after a failure.

        A failure with inputs that share memory speaks for calls that do so in the same way, and one of code for some
        values of Python floats for calls with these; others may well compile.
        """
        if self.rests_for(floats):
            return False
        now, never = self.clock(), -math.inf
        return all(now >= self._retry_at.get((sharing, given), never) for given in {(), floats})

    def add(self, form: Form, sharing: Sharing = (), floats: Floats = ()) -> None:
        for given in {(), floats}:
            self._retry_at.pop((sharing, given), None)
        self.forms = (*self.forms, form)
        self.compile_seconds += form.lowered.seconds
        if not self._retry_at:
            self.failures = 0
            self.reason = self.details = self.user_stack = None
        if form.loaded:
            events.count("loaded_ahead")
        else:
            events.count("generic_compiled" if self.generic else "variants_compiled")
            if form.by_worker:
                events.count("worker_compiles")

    def replace(self, form: Form, by: Form) -> None:
        """Another form is there, which is faster, and right for the same calls, or for fewer: then both stay."""
        kept = (by,) if by.lowered.guards.text == form.lowered.guards.text else (by, form)
        self.forms = tuple(one for entry in self.forms for one in (kept if entry is form else (entry,)))
        self.compile_seconds += by.lowered.seconds

    def drop(self, form: Form, error: BaseException, sharing: Sharing, floats: Floats = ()) -> None:
        """A form turned out wrong on its first call."""
        self.forms = tuple(entry for entry in self.forms if entry is not form)
        self.fail(error, sharing, floats)

    def fail(self, error: BaseException, sharing: Sharing, floats: Floats = ()) -> None:
        self.failures += 1
        if not self.forms:
            self.exact = None  # another value may well compile
        self.reason = describe(error)
        self.details = "".join(traceback.format_exception(error))
        self.user_stack = _user_stack(self.details)
        self._retry_at[sharing, floats] = self.clock() + _FIRST_RETRY * 2 ** min(self.failures - 1, 10)
        events.count("failures")


_TRACED_LINES = re.compile(r"^Original traceback:\n((?:[ \t]+\S.*\n?)+)", re.MULTILINE)


def _user_stack(details: str) -> str | None:
    """What torch adds to an error of one node: the lines of the user's program that Dynamo traced into it."""
    found = _TRACED_LINES.findall(details)
    return textwrap.dedent(found[-1]).strip() if found else None
