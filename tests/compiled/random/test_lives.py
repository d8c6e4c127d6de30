"""A slice of the random lives of variants, and what once went wrong in them, which it must find."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from multigraph_backend.backend import multigraph
from multigraph_backend.capture import declared
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.declare.facts import Facts
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.region import first_run, region, registry
from multigraph_backend.region.region import Region
from multigraph_backend.region.variant import Form, Variant
from tests.support.fuzz.lives import Lock, Wrong, function, play

Captured = tuple[CapturedGraph, CompileState]


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=multigraph, dynamic=True, options={"compiler": "eager"})
    compiled(torch.randn(5, 3), 2.5)
    (found,) = (found for found in registry.living() if found.user_code.function == "function" and found._graph.floats)
    return found._graph, found._state


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("multigraph_backend")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_each_call_runs_what_the_rules_say(captured: Captured) -> None:
    counts: Counter[str] = Counter()
    for seed in range(150):
        counts += play(seed, *captured)
    least = {"variants": 300, "opaque": 100, "generic": 700, "eager": 300, "raised": 40, "compiles": 400}
    least["repeated"] = 500
    assert {name: counts[name] for name, count in least.items() if counts[name] < count} == {}


# ---------------------------------------------------------------- what that is worth


@contextlib.contextmanager
def impossible_sizes() -> Iterator[None]:
    """What no call of the graph satisfies is compiled with the rest, for sizes 0 and 1."""
    with mock.patch.object(declared, "bounds", return_value=Facts()):
        yield


@contextlib.contextmanager
def the_first_failure_ends_it() -> Iterator[None]:
    """Where all is compiled at once and failures are raised, what comes after one stays as it is declared."""

    def compile_all(self: Region, args: Sequence[Any]) -> None:
        self._all_pending = False
        for variant, made in self._made_up(args):
            self._form_for(variant, made)

    with mock.patch.object(Region, "_compile_all", compile_all):
        yield


@contextlib.contextmanager
def bound_before_there_is_code() -> Iterator[None]:
    """A callable that is not understood belongs to the first size that it accepts, though there is no code for it."""
    compile, fail = Region._compile, Variant.fail

    def bound(self: Region, variant: Variant, args: Sequence[Any]) -> Form | None:
        if variant.condition is not None and variant.condition.check_size is not None and variant.exact is None:
            variant.exact = variant.condition.check_size.location.read(args)
        return compile(self, variant, args)

    def failing(self: Variant, *args: Any) -> None:
        exact = self.exact
        fail(self, *args)
        self.exact = exact

    with mock.patch.object(Region, "_compile", bound), mock.patch.object(Variant, "fail", failing):
        yield


@contextlib.contextmanager
def each_call_past_a_failure_looks_again() -> Iterator[None]:
    """Generic's code is not put in the place of a variant that rests."""
    entry = Region._entry
    never = mock.PropertyMock(return_value=-math.inf)

    def own(self: Region, variant: Variant) -> Any:
        with mock.patch.object(Variant, "rests_until", never), mock.patch.object(Variant, "failed_floats", False):
            return entry(self, variant)

    with mock.patch.object(Region, "_entry", own):
        yield


@contextlib.contextmanager
def a_failure_for_one_value_is_one_for_all() -> Iterator[None]:
    """Where code for one value of a float fails, no code is made for another."""
    with mock.patch.object(region, "_floats", return_value=()):
        yield


@contextlib.contextmanager
def nobody_rests() -> Iterator[None]:
    """Each call tries again what has just failed."""
    with mock.patch.object(Variant, "may_compile", return_value=True):
        yield


@contextlib.contextmanager
def new_code_is_proven() -> Iterator[None]:
    """What new code returns at its first call is taken as it is."""
    with mock.patch.object(first_run, "_wrong", return_value=None):
        yield


@contextlib.contextmanager
def wrong_code_stays() -> Iterator[None]:
    """Code that raised at its first call is kept."""

    def keep(self: Variant, form: Form, error: BaseException, *case: Any) -> None:
        self.fail(error, *case)

    with mock.patch.object(Variant, "drop", keep):
        yield


@contextlib.contextmanager
def calls_wait_for_each_other() -> Iterator[None]:
    """A call from a compile of Dynamo's waits for a thread that compiles the variant, which waits for Dynamo."""
    acquire = Lock.acquire

    def waiting(self: Lock, blocking: bool = True, timeout: float = -1) -> bool:
        return acquire(self, True, timeout)

    with mock.patch.object(Lock, "acquire", waiting):
        yield


@contextlib.contextmanager
def all_compiles_are_the_first_requests() -> Iterator[None]:
    """Context variables are those of the first compile, for as long as the region lives."""
    context, first = CompileState.context, list[contextvars.Context]()

    def kept(self: CompileState) -> contextvars.Context:
        first[:] = first or [context(self)]
        return first[0]

    with mock.patch.object(CompileState, "context", kept):
        yield


MUTANTS = [
    impossible_sizes,
    the_first_failure_ends_it,
    bound_before_there_is_code,
    each_call_past_a_failure_looks_again,
    a_failure_for_one_value_is_one_for_all,
    nobody_rests,
    new_code_is_proven,
    wrong_code_stays,
    calls_wait_for_each_other,
    all_compiles_are_the_first_requests,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_what_went_wrong_once_is_found(
    mutant: Callable[[], contextlib.AbstractContextManager[None]], captured: Captured
) -> None:
    with mutant(), pytest.raises(Wrong):
        _play_until_wrong(captured)


def _play_until_wrong(captured: Captured) -> None:
    for seed in range(150):
        play(seed, *captured)
