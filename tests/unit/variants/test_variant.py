"""The life of a variant: forms, failures, and when another try is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multigraph_backend import events
from multigraph_backend.capture.declared import Condition
from multigraph_backend.lower.guards import Guards
from multigraph_backend.lower.lowering import Lowered
from multigraph_backend.region.variant import MOST_FAILED_FLOATS, MOST_FORMS, MOST_GENERIC_FORMS, Form, Variant

ALONE = ()
SHARED = ((0, 1),)


def form(largest: int) -> Form:
    """Code that is right for arguments up to `largest`."""

    def check(args: Sequence[Any]) -> bool:
        return bool(args[0] <= largest)

    return Form(Lowered(lambda *args: args, Guards(f"a[0] <= {largest}", check), seconds=0.5))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_form_that_holds_is_the_one() -> None:
    variant = Variant(0, None)
    assert variant.state == "declared"
    small, large = form(10), form(100)
    variant.add(small)
    variant.add(large)
    assert variant.state == "ready"
    assert variant.fitting([5]) is small
    assert variant.fitting([50]) is large
    assert variant.fitting([500]) is None
    assert variant.compile_seconds == 1.0
    assert events.stats()["generic_compiled"] == 2


def test_forms_are_few() -> None:
    for condition, most in ((Condition("x[0] == 8", None), MOST_FORMS), (None, MOST_GENERIC_FORMS)):
        variant = Variant(0, condition)
        for _ in range(most):
            assert variant.may_compile(ALONE)
            variant.add(form(1))
        assert not variant.may_compile(ALONE)


def test_after_a_failure_tries_come_later_and_later() -> None:
    clock = Clock()
    variant = Variant(0, Condition("x[0] == 8", None), clock)
    for wait in (60, 120, 240):
        assert variant.may_compile(ALONE)
        variant.fail(ValueError("no"), ALONE)
        assert (variant.state, variant.reason) == ("failed", "ValueError: no")
        clock.now += wait - 1
        assert not variant.may_compile(ALONE)
        clock.now += 1
    variant.add(form(1), ALONE)
    assert (variant.state, variant.reason, variant.failures) == ("ready", None, 0)
    assert events.stats()["failures"] == 3


def test_a_failure_for_inputs_that_share_memory_says_nothing_of_others() -> None:
    variant = Variant(0, None, Clock())
    variant.fail(ValueError("no"), SHARED)
    assert not variant.may_compile(SHARED)
    assert variant.may_compile(ALONE)
    variant.add(form(1), ALONE)
    assert (variant.state, variant.reason) == ("ready", "ValueError: no")
    assert not variant.may_compile(SHARED)


def test_a_failure_for_values_of_floats_says_nothing_of_others_until_several_failed() -> None:
    clock = Clock()
    variant = Variant(0, None, clock)

    def value(number: int) -> tuple[tuple[str, str], ...]:
        return (("s0", f"{number}.5"),)

    for number in range(MOST_FAILED_FLOATS - 1):
        assert variant.may_compile(ALONE, value(number))
        variant.fail(ValueError("no"), ALONE, value(number))
        assert not variant.may_compile(ALONE, value(number))
        assert not variant.may_compile(SHARED, value(number))
        assert variant.failed_floats
        assert not variant.resting
    variant.fail(ValueError("no"), SHARED, value(8))
    assert variant.resting
    assert not variant.may_compile(ALONE, value(9))
    clock.now = variant.rests_until
    assert clock.now == 60.0
    assert variant.may_compile(ALONE, value(9))
    assert not variant.may_compile(ALONE, value(1))
    assert variant.may_compile(ALONE, value(8))
    assert not variant.may_compile(SHARED, value(8))


def test_a_form_that_turned_out_wrong_is_gone() -> None:
    variant = Variant(0, None)
    wrong = form(10)
    variant.add(wrong)
    variant.drop(wrong, TypeError("not a tuple"), ALONE)
    assert (variant.state, variant.reason) == ("failed", "TypeError: not a tuple")
    assert variant.fitting([1]) is None


def test_a_condition_that_never_applies_is_inactive() -> None:
    variant = Variant(0, Condition("x[0] == 8", None, never="x[0] is 4 in this graph"))
    assert (variant.state, variant.reason) == ("inactive", "x[0] is 4 in this graph")


def test_a_failure_speaks_for_all_calls_where_its_inputs_shared_nothing() -> None:
    clock = Clock()
    variant = Variant(0, Condition("x[0] == 8", None), clock)
    variant.fail(ValueError("no"), SHARED)
    assert not variant.resting
    variant.fail(ValueError("no"), ALONE)
    assert variant.resting
    assert not variant.may_compile(((0, 2),))
    clock.now = variant.rests_until
    assert not variant.resting
    assert variant.may_compile(((0, 2),))
