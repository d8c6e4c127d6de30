"""The dispatcher decides as the rules say, for every kind of rule and order; its text stays what it is."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from expecttest import assert_expected_inline

from multigraph_backend.declare.facts import Facts
from multigraph_backend.region import dispatch
from multigraph_backend.region.dispatch import Rule


def first_match(rules: Sequence[Rule], values: Sequence[int], ask: Callable[[str, int], bool], generic: int) -> int:
    """The definition: rules in order, nothing clever."""
    for rule in rules:
        terms = all(facts.holds(values[column]) for column, facts in rule.terms)
        if terms and (rule.check is None or ask(rule.check, values[rule.check_column])):
            return rule.target
    return generic


def installed(
    columns: Sequence[str], rules: Sequence[Rule], checks: dict[str, Callable[[int], bool]] | None = None
) -> Callable[..., Any]:
    """A dispatcher whose targets return their own number."""
    generic = len(rules)
    ready = [(None, lambda: None, lambda *args, number=number: number, None) for number in range(generic + 1)]

    def missed(target: int, args: tuple[Any, ...]) -> int:
        raise AssertionError(f"target {target} was ready")

    return dispatch.install(dispatch.plan(columns, rules, generic), ready, missed, checks or {})


def random_facts(random_: random.Random) -> Facts:
    kind = random_.randrange(4)
    if kind == 0:
        return Facts(values=(random_.randint(0, 12),))
    if kind == 1:
        low = random_.randint(0, 12)
        return Facts(min=random_.choice([None, low]), max=random_.choice([None, low + random_.randint(0, 6)]))
    if kind == 2:
        return Facts(multiple_of=random_.randint(2, 5), max=random_.choice([None, None, random_.randint(0, 30)]))
    return Facts(min=random_.randint(0, 6), multiple_of=random_.randint(1, 4))


@pytest.mark.parametrize("seed", range(80))
def test_every_call_goes_to_the_first_rule_that_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    if seed % 2:  # two rules are many, and a number of 11 is out of the table's reach
        monkeypatch.setattr(dispatch, "MANY_MULTIPLES", 2)
        monkeypatch.setattr(dispatch, "MULTIPLES_BELOW", 11)
    columns = ["a[0]", "a[1]"]
    asked = {f"check{number}": random_.randint(2, 5) for number in range(12)}
    rules = []
    for number in range(random_.randint(1, 12)):
        chosen = random_.sample([0, 1], random_.randint(1, 2)) if random_.random() > 0.03 else []
        terms = tuple((column, random_facts(random_)) for column in chosen)
        check = f"check{number}" if random_.random() < 0.15 else None
        rules.append(Rule(number, terms, check, random_.randrange(2)))

    def ask(name: str, value: int) -> bool:
        return value % asked[name] == 1

    checks = {name: (lambda value, name=name: ask(name, value)) for name in asked}
    call = installed(columns, rules, checks)
    cases = list(itertools.product(range(18), repeat=2))
    random_.shuffle(cases)
    for values in (*cases, *cases[:50]):
        wanted = first_match(rules, values, ask, len(rules))
        assert call(*values) == wanted


def test_the_same_sizes_twice_and_many_sizes_do_not_confuse_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_REMEMBERED", 4)
    rules = [Rule(0, ((0, Facts(values=(3,))),)), Rule(1, ((0, Facts(multiple_of=2)),))]
    call = installed(["a[0]"], rules)
    for value in [3, 3, 4, 4, 3, *range(20), *range(20), 3]:
        assert call(value) == (0 if value == 3 else 1 if value % 2 == 0 else 2)


def test_the_text_for_equalities_and_ranges_looks_up_and_bisects() -> None:
    rules = [
        Rule(0, ((0, Facts(values=(1,))),)),
        Rule(1, ((0, Facts(values=(8,))),)),
        Rule(2, ((0, Facts(min=2, max=64)),)),
        Rule(3, ((0, Facts(multiple_of=16)), (1, Facts(values=(4,))))),
    ]
    planned = dispatch.plan(["a[0]", "a[2].size(1)"], rules, 4)
    assert_expected_inline(
        dispatch.find_source(planned) + dispatch.source(planned),
        """\
def find0(n0, n1):
    best = otherwise0
    t = table0_0.get(n0, -1)
    if 0 <= t < best or best < 0 <= t:
        best = t
    t = targets0_0[bisect_right(bounds0_0, n0)]
    if 0 <= t < best or best < 0 <= t:
        best = t
    if 0 <= best < 3:
        return best
    if n0 % 16 == 0 and n1 == 4:
        return 3
    return best
def dispatch(*a):
    n0 = a[0]
    n1 = a[2].size(1)
    key = (n0, n1)
    seen = last[0]
    if seen[0] == key:
        t = seen[1]
    else:
        t = known0.get(key, -1)
        if t < 0:
            t = remember(known0, key, find0(n0, n1))
        last[0] = (key, t)
    if profiler._is_profiler_enabled:
        return profiled(t, a)
    check, tick, run, code = ready[t]
    if check is None or check(a):
        tick()
        if code is not None:
            return code.run([*a])
        return run(*a)
    return missed(t, a)
""",
    )
    (segment,) = planned.steps
    assert isinstance(segment, dispatch.Segment)
    assert segment.tables == (((0,), {1: 0, 8: 1}),)
    assert segment.intervals == (dispatch.Intervals(0, (2, 65), (-1, 2, -1)),)


def test_many_multiples_and_pairs_of_values_are_looked_up_not_tried() -> None:
    rules = [Rule(number, ((0, Facts(values=(number, 99))), (1, Facts(values=(4,))))) for number in range(2)]
    rules += [Rule(number, ((1, Facts(multiple_of=number)),)) for number in range(2, 2 + dispatch.MANY_MULTIPLES)]
    planned = dispatch.plan(["a[0]", "a[1]"], rules, len(rules))
    assert_expected_inline(
        dispatch.find_source(planned),
        """\
def scan0_1(n1):
    if n1 % 2 == 0:
        return 2
    if n1 % 3 == 0:
        return 3
    if n1 % 4 == 0:
        return 4
    if n1 % 5 == 0:
        return 5
    if n1 % 6 == 0:
        return 6
    if n1 % 7 == 0:
        return 7
    if n1 % 8 == 0:
        return 8
    if n1 % 9 == 0:
        return 9
    return -1
def find0(n0, n1):
    best = otherwise0
    t = table0_0_1.get((n0, n1), -1)
    if 0 <= t < best or best < 0 <= t:
        best = t
    t = first0_1[n1] if 0 <= n1 < 65536 else scan0_1(n1)
    if 0 <= t < best or best < 0 <= t:
        best = t
    return best
""",
    )
    call = installed(["a[0]", "a[1]"], rules)
    for pair in [(0, 4), (1, 4), (99, 4), (2, 4), (0, 5), (0, 11), (3, 1 << 16), (3, 3 * 70001), (0, -7), (0, 70001)]:
        assert call(*pair) == first_match(rules, pair, lambda name, value: False, len(rules))


def test_the_text_for_an_opaque_check_asks_in_its_place() -> None:
    rules = [
        Rule(0, ((0, Facts(values=(1,))),)),
        Rule(1, (), "check1", 0),
        Rule(2, ((0, Facts(multiple_of=16)),)),
    ]
    planned = dispatch.plan(["a[0]"], rules, 3)
    assert_expected_inline(
        dispatch.find_source(planned) + dispatch.source(planned),
        """\
def find0(n0):
    best = otherwise0
    t = table0_0.get(n0, -1)
    if 0 <= t < best or best < 0 <= t:
        best = t
    return best
def find2(n0):
    best = otherwise2
    if 0 <= best < 2:
        return best
    if n0 % 16 == 0:
        return 2
    return best
def dispatch(*a):
    n0 = a[0]
    key = n0
    t = -1
    if t < 0:
        t = known0.get(key, -2)
        if t == -2:
            t = remember(known0, key, find0(n0))
    if t < 0 and check1(n0):
        t = 1
    if t < 0:
        t = known2.get(key, -2)
        if t == -2:
            t = remember(known2, key, find2(n0))
    if t < 0:
        t = 3
    if profiler._is_profiler_enabled:
        return profiled(t, a)
    check, tick, run, code = ready[t]
    if check is None or check(a):
        tick()
        if code is not None:
            return code.run([*a])
        return run(*a)
    return missed(t, a)
""",
    )


def test_without_rules_a_call_goes_straight_to_generic() -> None:
    assert_expected_inline(
        dispatch.source(dispatch.plan([], [], 0)),
        """\
def dispatch(*a):
    t = 0
    if profiler._is_profiler_enabled:
        return profiled(t, a)
    check, tick, run, code = ready[t]
    if check is None or check(a):
        tick()
        if code is not None:
            return code.run([*a])
        return run(*a)
    return missed(t, a)
""",
    )


@pytest.mark.parametrize("kind", ["equalities", "ranges"])
def test_the_text_does_not_grow_with_the_number_of_rules(kind: str) -> None:
    def lines(count: int) -> int:
        facts = [
            Facts(values=(number,)) if kind == "equalities" else Facts(min=10 * number, max=10 * number + 9)
            for number in range(count)
        ]
        rules = [Rule(number, ((0, entry),)) for number, entry in enumerate(facts)]
        planned = dispatch.plan(["a[0]"], rules, count)
        return (dispatch.find_source(planned) + dispatch.source(planned)).count("\n")

    assert lines(1024) == lines(2)


def test_a_call_whose_condition_fails_or_whose_code_is_missing_is_reported_with_its_target() -> None:
    rules = [Rule(0, ((0, Facts(values=(5,))),))]
    ready: list[Any] = [
        (lambda args: args[0] < 0, lambda: None, None, None),
        (None, lambda: None, lambda *args: "generic", None),
    ]
    seen = []
    call = dispatch.install(
        dispatch.plan(["a[0]"], rules, 1), ready, lambda target, args: seen.append((target, args)), {}
    )
    assert call(6) == "generic"
    assert call(5) is None
    assert seen == [(0, (5,))]
    ready[0] = (None, lambda: None, lambda *args: "variant", None)  # published later
    assert call(5) == "variant"
    boxed = SimpleNamespace(run=lambda args: args)
    ready[0] = (None, lambda: None, lambda *args: "variant", boxed)
    assert call(5) == [5]
    boxed.run = lambda args: "native"
    assert call(5) == "native"


def test_a_dispatcher_that_is_dropped_takes_what_it_holds_with_it_at_once() -> None:
    class Held:
        def missed(self, target: int, args: tuple[Any, ...]) -> None: ...

    held = Held()
    rules = [Rule(0, ((0, Facts(multiple_of=3)),)), Rule(1, ((0, Facts(min=2)),), "check1")]
    never: dispatch.Ready = (lambda args: False, lambda: None, None, None)
    call = dispatch.install(dispatch.plan(["a[0]"], rules, 2), [never] * 3, held.missed, {"check1": bool})
    call(6)
    gone = weakref.ref(held)
    gc.disable()
    try:
        del held, call
        assert gone() is None
    finally:
        gc.enable()


def test_rules_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        dispatch.plan(["a[0]"], [Rule(1), Rule(0)], 2)
