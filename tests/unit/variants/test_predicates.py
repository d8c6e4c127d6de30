"""Predicates and facts against brute force: what they say must be what counting through the integers says."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Callable, Mapping

import pytest
from expecttest import assert_expected_inline

from multigraph_backend.declare.facts import Facts
from multigraph_backend.declare.predicates import (
    And,
    Eq,
    In,
    MultipleOf,
    Predicate,
    Range,
    predicate_from_facts,
    predicate_from_json,
    unreachable,
)
from multigraph_backend.spelling import did_you_mean

# Wide enough to tell any two of the facts below apart: beyond the constants that they mention it is longer,
# at both ends, than the least common multiple of any two steps.
LOW, HIGH = -60, 100
WINDOW = range(LOW, HIGH)


def members(facts: Facts) -> frozenset[int]:
    return frozenset(n for n in WINDOW if facts.holds(n))


def grid() -> list[Facts]:
    bounds = (None, -3, 0, 1, 7, 8, 16, 40)
    ranges = [Facts(low, high, step) for low in bounds for high in bounds for step in (1, 2, 3, 4, 8)]
    lists = [Facts(values=values) for values in ((), (0,), (8,), (2, 4), (16, 8), (8, 16, 24, 32, 40), (-3, 7, 7))]
    return list(dict.fromkeys(ranges + lists))


GRID = grid()


def random_leaf(rng: random.Random, name: str) -> Predicate:
    kind = rng.randrange(4)
    if kind == 0:
        return Eq(name, rng.randrange(0, 7))
    if kind == 1:
        return In(name, [rng.randrange(0, 7) for _ in range(rng.randrange(1, 4))])
    if kind == 2:
        low, high = sorted((rng.randrange(0, 8), rng.randrange(0, 8)))
        return Range(name, rng.choice([None, low]), rng.choice([None, high]))
    return MultipleOf(name, rng.randrange(1, 5))


def random_predicates(seed: int, count: int) -> list[Predicate]:
    rng = random.Random(seed)
    return [And(*(random_leaf(rng, rng.choice("xy")) for _ in range(rng.randrange(0, 4)))) for _ in range(count)]


# Past the largest bound (7) a predicate repeats every 12, the common multiple of all factors.
POINTS = [{"x": x, "y": y} for x, y in itertools.product(range(-13, 21), repeat=2)]


def holds(predicate: Predicate, sizes: Mapping[str, int]) -> bool:
    """What a predicate means, without facts."""
    match predicate:
        case Eq():
            return sizes[predicate.name] == predicate.value
        case In():
            return sizes[predicate.name] in predicate.values
        case Range(min=low, max=high):
            return (low is None or low <= sizes[predicate.name]) and (high is None or sizes[predicate.name] <= high)
        case MultipleOf():
            return sizes[predicate.name] % predicate.factor == 0
        case And():
            return all(holds(part, sizes) for part in predicate.predicates)
    raise TypeError(predicate)


def satisfying(predicate: Predicate) -> frozenset[int]:
    return frozenset(index for index, sizes in enumerate(POINTS) if holds(predicate, sizes))


def covers(one: Predicate, other: Predicate) -> bool:
    """Whether all that satisfies `other` satisfies `one`."""
    return unreachable([one, other]) == {1: 0}


# ---- facts ----


@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_facts_hold_where_their_parts_do(step: int) -> None:
    for low, high in itertools.product((None, -3, 0, 7, 16), repeat=2):
        for values in (None, (8, 2, 8, 24), ()):
            facts = Facts(low, high, step, values)
            for n in WINDOW:
                wanted = (low is None or low <= n) and (high is None or n <= high) and n % step == 0
                assert facts.holds(n) is (wanted and (values is None or n in values)), (facts, n)


def test_facts_are_in_normal_form() -> None:
    for facts in GRID:
        held = members(facts)
        assert facts.empty is (not held)
        assert facts.exact == (min(held) if len(held) == 1 else None)
        assert facts.unconstrained is (len(held) == len(WINDOW))
        assert Facts(facts.min, facts.max, facts.multiple_of, facts.values) == facts
        if held:
            assert facts.min is None or facts.min == min(held)
            assert facts.max is None or facts.max == max(held)
            assert all(n % facts.multiple_of == 0 for n in held)
        if len(held) == 1:
            assert facts.values == tuple(held)


def test_facts_of_ranges_with_the_same_members_are_equal() -> None:
    by_members: dict[frozenset[int], Facts] = {}
    for facts in GRID:
        if facts.values is None or len(facts.values) <= 1:
            assert by_members.setdefault(members(facts), facts) == facts


def test_facts_cover_exactly_what_they_include() -> None:
    held = {facts: members(facts) for facts in GRID}
    outcomes = set()
    for one, other in itertools.product(GRID, repeat=2):
        assert one.covers(other) is (held[other] <= held[one]), (one, other)
        outcomes.add(one.covers(other))
    assert outcomes == {True, False}


def test_facts_intersect_to_common_members() -> None:
    held = {facts: members(facts) for facts in GRID}
    for one, other in itertools.product(GRID, repeat=2):
        both = one.intersect(other)
        assert members(both) == held[one] & held[other], (one, other)
        assert both.covers(other.intersect(one))


def test_possible_lists_all_or_nothing() -> None:
    for facts in GRID:
        held = members(facts)
        bounded = facts.values is not None or (facts.min is not None and facts.max is not None)
        for limit in (1, 3, 6, len(held), 100):
            listed = facts.possible(limit)
            if bounded and len(held) <= limit:
                assert listed is not None
                assert sorted(listed) == sorted(held)
            else:
                assert listed is None


def test_values_keep_their_order() -> None:
    assert Facts(values=(16, 2, 8, 2)).values == (16, 2, 8)
    assert Facts(values=(16, 2, 8)).intersect(Facts(values=(8, 16))).values == (16, 8)
    assert Facts(values=(16, 2, 8), multiple_of=4).multiple_of == 8


def test_facts_refuse_a_factor_below_one() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Facts(multiple_of=0)


def test_facts_as_text() -> None:
    shown = [
        Facts(),
        Facts(values=(8,)),
        Facts(values=(4, 2)),
        Facts(values=()),
        Facts(1, 512),
        Facts(min=1),
        Facts(max=512),
        Facts(multiple_of=16),
        Facts(1, 512, 16),
        Facts(min=1, multiple_of=16),
        Facts(10, 20, 8),
    ]
    assert_expected_inline(
        "\n".join(facts.describe("x[0]") for facts in shown),
        """\
any x[0]
x[0] == 8
x[0] in (4, 2)
x[0] in ()
1 <= x[0] <= 512
x[0] >= 1
x[0] <= 512
x[0] % 16 == 0
16 <= x[0] <= 512 and x[0] % 16 == 0
x[0] >= 16 and x[0] % 16 == 0
x[0] == 16""",
    )


# ---- predicates ----


def test_text_of_a_range_is_true_where_the_range_holds() -> None:
    for facts in GRID:
        if not facts.unconstrained:
            code = compile(facts.describe("n"), "", "eval")
            if facts.values is None or len(facts.values) != 1:
                assert all(eval(code, {"n": n}) is facts.holds(n) for n in WINDOW), facts


def test_predicates_mean_what_their_facts_say() -> None:
    for predicate in random_predicates(1, 300):
        facts = predicate.facts()
        assert tuple(facts) == predicate.names
        for sizes in POINTS:
            assert holds(predicate, sizes) is all(known.holds(sizes[name]) for name, known in facts.items())


def test_predicates_cover_exactly_what_they_include() -> None:
    predicates = random_predicates(2, 120)
    held = [satisfying(predicate) for predicate in predicates]
    outcomes = set()
    for one, other in itertools.product(range(len(predicates)), repeat=2):
        covered = covers(predicates[one], predicates[other])
        assert covered is (held[other] <= held[one]), (predicates[one], predicates[other])
        outcomes.add(covered)
    assert outcomes == {True, False}
    assert {predicate.satisfiable for predicate in predicates} == {True, False}
    assert [predicate.satisfiable for predicate in predicates] == [bool(points) for points in held]


def test_alternatives_split_into_disjoint_parts_without_lists() -> None:
    for predicate in random_predicates(3, 200):
        parts = predicate.alternatives()
        held = [satisfying(part) for part in parts]
        assert sum(map(len, held)) == len(satisfying(predicate))
        assert frozenset().union(*held) == satisfying(predicate)
        for part in parts:
            assert "In(" not in repr(part)
            assert part.alternatives() == (part,)
            assert part.names == predicate.names


def test_alternatives_are_in_declared_order() -> None:
    predicate = And(In("x", [4, 2]), MultipleOf("z", 8), In("y", [1, 3]))
    assert_expected_inline(
        "\n".join(map(str, predicate.alternatives())),
        """\
x == 4 and z % 8 == 0 and y == 1
x == 4 and z % 8 == 0 and y == 3
x == 2 and z % 8 == 0 and y == 1
x == 2 and z % 8 == 0 and y == 3""",
    )
    assert Range("x", 1, 512).alternatives() == (Range("x", 1, 512),)
    assert And(Eq("x", 1), Eq("x", 2)).alternatives() == ()


def test_json_round_trip() -> None:
    for predicate in random_predicates(4, 300):
        text = json.dumps(predicate.to_json())
        back = predicate_from_json(json.loads(text))
        assert back == predicate_from_facts(predicate.facts())
        assert back.facts() == predicate.facts()
        assert back.to_json() == predicate.to_json()
        assert satisfying(back) == satisfying(predicate)


def test_json_form() -> None:
    forms: list[dict[str, object]] = [
        {"x[0]": 8},
        {"x[0]": [4, 2]},
        {"x[0]": {"min": 1, "max": 512}},
        {"x[0]": {"min": 16, "max": 512, "multiple_of": 16}},
        {"x[0]": {"multiple_of": 16}},
        {"x[0]": 1, "x[1]": {"multiple_of": 64}, "n": {"max": 3}},
        {"x[0]": {}},
        {},
    ]
    read = [predicate_from_json(form) for form in forms]
    assert [predicate.to_json() for predicate in read] == forms
    assert_expected_inline(
        "\n".join(f"{predicate!r}: {predicate}" for predicate in read),
        """\
Eq(name='x[0]', value=8): x[0] == 8
In(name='x[0]', values=(4, 2)): x[0] in (4, 2)
Range(name='x[0]', min=1, max=512): 1 <= x[0] <= 512
And(Range(name='x[0]', min=16, max=512), MultipleOf(name='x[0]', factor=16)): 16 <= x[0] <= 512 and x[0] % 16 == 0
MultipleOf(name='x[0]', factor=16): x[0] % 16 == 0
And(Eq(name='x[0]', value=1), MultipleOf(name='x[1]', factor=64), Range(name='n', min=None, max=3)): x[0] == 1 and x[1] % 64 == 0 and n <= 3
Range(name='x[0]', min=None, max=None): always
And(): always""",  # noqa: E501
    )


def test_several_statements_of_one_name_become_one_in_json() -> None:
    predicate = And(Range("x", 1, 100), MultipleOf("x", 4), Eq("y", 2), MultipleOf("x", 6))
    assert predicate.to_json() == {"x": {"min": 12, "max": 96, "multiple_of": 12}, "y": 2}
    assert And(In("x", [1, 2, 3]), Range("x", min=3)).to_json() == {"x": 3}
    assert predicate_from_json({"x": {"min": None, "max": 3}}) == Range("x", max=3)


def test_json_errors() -> None:
    wrong: list[object] = [
        {"x[0]": {"multipleof": 16}},
        {"x[0]": {"step": 16}},
        {"x[0]": True},
        {"x[0]": 1.5},
        {"x[0]": "8"},
        {"x[0]": [1, False]},
        {"x[0]": {"min": 1.0}},
        {"x[0]": {"multiple_of": 0}},
        {"x[0]": {"multiple_of": None}},
        {"x[0]": {"min": 5, "max": 4}},
        {3: 4},
        [1],
    ]
    texts = []
    for obj in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            predicate_from_json(obj)
        texts.append(f"{caught.type.__name__}: {caught.value}")
    assert_expected_inline(
        "\n".join(texts),
        """\
ValueError: 'x[0]': unknown key 'multipleof' (did you mean 'multiple_of'?); allowed: min, max, multiple_of
ValueError: 'x[0]': unknown key 'step' (did you mean 'multiple_of'?); allowed: min, max, multiple_of
TypeError: 'x[0]': expected an int, a list of ints or an object, got True (bool)
TypeError: 'x[0]': expected an int, a list of ints or an object, got 1.5 (float)
TypeError: 'x[0]': expected an int, a list of ints or an object, got '8' (str); write 8
TypeError: In of 'x[0]': values must be ints, got False (bool) among them
TypeError: Range of 'x[0]': min must be an int, got 1.0 (float); write 1
ValueError: MultipleOf of 'x[0]': factor must be at least 1, got 0
TypeError: MultipleOf of 'x[0]': factor must be an int, got None (NoneType)
ValueError: Range of 'x[0]': min 5 is greater than max 4
TypeError: Eq: the name must be a str, got 3 (int)
TypeError: a condition must be an object of size names to values, got [1] (list)""",
    )


def test_wrong_arguments() -> None:
    wrong: list[Callable[[], Predicate]] = [
        lambda: Eq("x", True),
        lambda: Eq("x", 1.0),  # type: ignore[arg-type]
        lambda: Eq(3, 4),  # type: ignore[arg-type]
        lambda: Eq("", 4),
        lambda: In("x", "24"),  # type: ignore[arg-type]
        lambda: In("x", 24),  # type: ignore[arg-type]
        lambda: In("x", [2, "4"]),  # type: ignore[list-item]
        lambda: Range("x", "1"),  # type: ignore[arg-type]
        lambda: Range("x", 3, 2),
        lambda: MultipleOf("x", 0),
        lambda: And(Eq("x", 1), "y == 2"),  # type: ignore[arg-type]
    ]
    texts = []
    for make in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            make()
        texts.append(f"{caught.type.__name__}: {caught.value}")
    assert_expected_inline(
        "\n".join(texts),
        """\
TypeError: Eq of 'x': value must be an int, got True (bool)
TypeError: Eq of 'x': value must be an int, got 1.0 (float); write 1
TypeError: Eq: the name must be a str, got 3 (int)
ValueError: Eq: the name must not be empty
TypeError: In of 'x': values must be a list of ints, got '24' (str)
TypeError: In of 'x': values must be a list of ints, got 24 (int)
TypeError: In of 'x': values must be ints, got '4' (str) among them; write 4
TypeError: Range of 'x': min must be an int, got '1' (str); write 1
ValueError: Range of 'x': min 3 is greater than max 2
ValueError: MultipleOf of 'x': factor must be at least 1, got 0
TypeError: And takes predicates, got 'y == 2' (str)""",
    )


def test_value_semantics() -> None:
    one = And(Eq("x", 1), And(In("y", (3, 2, 3)), Range("z", min=-4)))
    assert one == And(Eq("x", 1), In("y", [3, 2]), Range("z", -4))
    assert one != And(In("y", [3, 2]), Eq("x", 1), Range("z", -4))
    assert one.names == ("x", "y", "z")
    for clone in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert clone == one
        assert hash(clone) == hash(one)
        assert {one: 1}[clone] == 1
    assert In("x", {40, 8, 3}).values == (3, 8, 40)
    assert In("x", range(3)).values == (0, 1, 2)
    with pytest.raises(AttributeError):
        one.predicates = ()  # type: ignore[misc]


def test_predicate_from_facts_has_those_facts() -> None:
    for facts in GRID:
        assert predicate_from_facts({"x": facts, "y": Facts(values=(1,))}).facts()["x"] == facts


# ---- reachability ----


def brute_force_unreachable(predicates: list[Predicate]) -> dict[int, int]:
    held = [satisfying(predicate) for predicate in predicates]
    hidden: dict[int, int] = {}
    for index, points in enumerate(held):
        single = next((before for before in range(index) if points <= held[before]), None)
        finite = all(facts.possible(100) is not None for facts in predicates[index].facts().values())
        needed = [before for before in range(index) if points <= frozenset().union(*held[: before + 1])]
        if single is not None:
            hidden[index] = single
        elif finite and needed:
            hidden[index] = needed[0]
    return hidden


def test_unreachable_agrees_with_brute_force() -> None:
    kinds = set()
    for seed in range(150):
        rng = random.Random(seed)
        narrow = [random_leaf(rng, "x") for _ in range(10)]
        predicates = random_predicates(1000 + seed, 8) if seed % 2 else narrow
        wanted = brute_force_unreachable(predicates)
        assert unreachable(predicates) == wanted, predicates
        for index, by in wanted.items():
            kinds.add(covers(predicates[by], predicates[index]))
    assert kinds == {True, False}, "both single covers and unions must have been seen"


def test_unreachable_cases() -> None:
    assert unreachable([]) == {}
    assert unreachable([MultipleOf("x", 8), Eq("x", 16)]) == {1: 0}
    assert unreachable([Eq("x", 16), MultipleOf("x", 8)]) == {}
    assert unreachable([Eq("x", 2), Eq("y", 1), Eq("x", 4), In("x", [2, 4]), Eq("x", 5)]) == {3: 2}
    assert unreachable([Eq("x", 1), Eq("x", 2), Range("x", 1, 2), Range("x", 1, 3)]) == {2: 1}
    assert unreachable([Eq("x", 1), And(Eq("y", 2), Eq("x", 1)), Eq("y", 2)]) == {1: 0}
    assert unreachable([Eq("x", 1), Eq("x", 2), And(In("x", [1, 2]), Range("y"))]) == {2: 1}
    assert unreachable([And(), Eq("x", 1), And()]) == {1: 0, 2: 0}


def test_unreachable_gives_up_on_unions_too_large_to_list() -> None:
    halves: list[Predicate] = [Range("x", 0, 4999), Range("x", 5000, 9999)]
    assert unreachable([*halves, Range("x", 0, 9999)]) == {}
    assert unreachable([*halves, Range("x", 4000, 6000)]) == {2: 1}


def test_unreachable_of_a_thousand_equalities() -> None:
    predicates: list[Predicate] = [And(Eq("x", n), Eq("y", n % 7)) for n in range(1000)]
    assert unreachable([*predicates, predicates[500], Eq("x", 1)]) == {1000: 500}


def test_did_you_mean() -> None:
    assert did_you_mean("Specialise", ["specialize", "mode"]) == " (did you mean 'specialize'?)"
    assert did_you_mean("qqq", ["specialize", "mode"]) == ""
