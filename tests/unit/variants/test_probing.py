"""What is learnt of a callable is checked against the callable itself, size by size."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline

from multigraph_backend.declare.facts import Facts
from multigraph_backend.declare.probing import Opaque, Understood, understand

# The text of a callable's body, and what must be learnt of it.
UNDERSTOOD = {
    "v == 8": "n == 8",
    "8 == v": "n == 8",
    "not v != 8": "n == 8",
    "v >= 8": "n >= 8",
    "8 <= v": "n >= 8",
    "v > 8": "n >= 9",
    "8 < v": "n >= 9",
    "v <= 8": "n <= 8",
    "v < 8": "n <= 7",
    "8 > v": "n <= 7",
    "not (v >= 8)": "n <= 7",
    "not v <= 8": "n >= 9",
    "8 <= v <= 16": "8 <= n <= 16",
    "not (v < 8 or v > 16)": "8 <= n <= 16",
    "(v >= 8) & (v <= 16)": "8 <= n <= 16",
    "v >= 8 and v <= 8": "n == 8",
    "7 < v < 9": "n == 8",
    "v % 8 == 0": "n % 8 == 0",
    "0 == v % 8": "n % 8 == 0",
    "not v % 8": "n % 8 == 0",
    "not (v % 8 != 0)": "n % 8 == 0",
    "v % 8 in (0,)": "n % 8 == 0",
    "v & 7 == 0": "n % 8 == 0",
    "not 7 & v": "n % 8 == 0",
    "v % 1 == 0": "any n",
    "v % 8 == 0 and v > 16": "n >= 24 and n % 8 == 0",
    "v > 16 and not v % 8": "n >= 24 and n % 8 == 0",
    "v % 8 == 0 and v % 12 == 0": "n % 24 == 0",
    "v % 8 == 0 or v % 16 == 0": "n % 8 == 0",
    "v % 8 == 0 and v != 4": "n % 8 == 0",
    "8 <= v <= 20 and v % 8 == 0": "8 <= n <= 16 and n % 8 == 0",
    "v in (8, 16)": "n == 8 | n == 16",
    "v in [16, 8]": "n == 16 | n == 8",
    "v == 8 or v == 16": "n == 8 | n == 16",
    "(v == 8) | (v == 16)": "n == 8 | n == 16",
    "not (v != 8 and v != 16)": "n == 8 | n == 16",
    "any(v == k for k in (1, 2, 4))": "n == 1 | n == 2 | n == 4",
    "v in range(14, 17)": "n == 14 | n == 15 | n == 16",
    "v == 8 and v % 8 == 0 or v == 3": "n == 8 | n == 3",
    "v >= 8 and v != 8": "n >= 9",
    "v != 9 and v != 8 and v >= 8": "n >= 10",
    "8 <= v <= 16 and v != 16": "8 <= n <= 15",
    "v % 8 == 0 and v >= 8 and v != 8": "n >= 16 and n % 8 == 0",
    "v % 8 != 0 and v == 9": "n == 9",
    "v % 8 == 1 and v == 9": "n == 9",
    "v and v >= 3": "n >= 3",
    "not v": "n == 0",
    "bool(v >= 8)": "n >= 8",
    "True if v == 8 else False": "n == 8",
    "v >= 8 if v >= 4 else False": "n >= 8",
    "(v >= 8) & True": "n >= 8",
    "True and v >= 8": "n >= 8",
    "v == 8 and v == 8": "n == 8",
    "v < 8 and v >= 20 or v == 4": "n == 4",
    "v % 8 == 9 or v == 4": "n == 4",
    "v == True": "n == 1",
    "True": "any n",
    "1": "any n",
}

OPAQUE = [
    "v % 8 == 3",
    "v % 8 != 0",
    "v % 8",
    "v != 8",
    "v",
    "v // 8 == 2",
    "v / 8 == 2",
    "v * 2 == 8",
    "v + 1 == 8",
    "1 + v == 8",
    "2 ** v == 8",
    "-v == -8",
    "v & (v - 1) == 0",
    "v & 6 == 0",
    "v % -8 == 0",
    "v % v == 0",
    "64 % v == 0",
    "v == 8.0",
    "v < 8.5",
    "v == '8'",
    "v is None",
    "v in {8, 16}",
    "v in range(1, 600)",
    "{8: True}.get(v)",
    "int(v) == 8",
    "[0, 1, 2, 3][v] == 3",
    "f'{v}' == '8'",
    "str(v) == '8'",
    "isinstance(v, int) and v == 8",
    "v.bit_length() < 4",
    "v < 8 or v > 16",
    "v % 8 == 0 or v == 4",
    "~(v == 8)",
    "(v == 8) ^ (v == 16)",
    "(v == 8) & 1",
    "(v == 8) == True",
    "(v == 8) + (v == 16)",
    "False",
    "None",
    "v < 8 and v > 16",
    "v > 4 and 1 / 0",
    "v > 4 and undefined",
    "next(iter(v))",
    "all(v >= k for k in range(-2000, 8))",
]


def made(body: str) -> Callable[[int], object]:
    """A lambda with no source anywhere."""
    check: Callable[[int], object] = eval(f"lambda v: {body}", {})
    return check


class Counted:
    """Counts the calls of a callable, so that no test depends on unlimited ones."""

    def __init__(self, check: Callable[[int], object]) -> None:
        self.check = check
        self.calls = 0

    def __call__(self, n: int) -> object:
        self.calls += 1
        return self.check(n)


@pytest.mark.parametrize(("body", "learnt"), UNDERSTOOD.items())
def test_understood(body: str, learnt: str) -> None:
    check = Counted(made(body))
    result = understand(check)
    assert check.calls <= 100
    assert isinstance(result, Understood), result
    assert " | ".join(facts.describe("n") for facts in result.alternatives) == learnt
    for n in range(201):
        assert result.holds(n) is bool(check(n)), n


@pytest.mark.parametrize("body", OPAQUE)
def test_opaque(body: str) -> None:
    check = Counted(made(body))
    result = understand(check)
    assert check.calls <= 100
    assert isinstance(result, Opaque), result
    assert result.reason


def test_reasons() -> None:
    bodies = [
        "v % 8 == 3",
        "v != 8",
        "v % 8 != 0",
        "v // 8 == 2",
        "v.bit_length() < 4",
        "v == 8.0",
        "v & 6 == 0",
        "v % 0 == 0",
        "v in {8, 16}",
        "v in range(1, 600)",
        "(v == 8) & 1",
        "False",
        "v > 4 and 1 / 0",
        "v % 8 == 0 or v == 4",
        "v == 8 or type(v) is int and v == 16",
    ]
    results = [(body, understand(made(body))) for body in bodies]
    assert_expected_inline(
        "\n".join(f"{body}: {result.reason}" for body, result in results if isinstance(result, Opaque)),
        """\
v % 8 == 3: n % 8 == 3 cannot be used as a fact
v != 8: not (n == 8) cannot be used as a fact
v % 8 != 0: not (n % 8 == 0) cannot be used as a fact
v // 8 == 2: it uses __floordiv__
v.bit_length() < 4: it uses the attribute 'bit_length'
v == 8.0: it computes with a value of type float
v & 6 == 0: it masks with 6, which is no remainder
v % 0 == 0: it divides by 0
v in {8, 16}: it uses __hash__
v in range(1, 600): it has more than 64 ways to an answer
(v == 8) & 1: it joins a comparison with a value of type int
False: nothing was found for which it is true
v > 4 and 1 / 0: it raised ZeroDivisionError: division by zero
v % 8 == 0 or v == 4: it is true in several ways that are no single values: n % 8 == 0, or n == 4
v == 8 or type(v) is int and v == 16: it was read as n == 8, but is True for 16""",
    )


def test_partials_and_objects_are_understood() -> None:
    class Divisible:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, n: int) -> bool:
            return n % self.by == 0

        def method(self, n: int) -> bool:
            return n == self.by

    def between(low: int, high: int, n: int) -> bool:
        return low <= n <= high

    assert understand(functools.partial(between, 2, 5)) == Understood((Facts(2, 5),))
    assert understand(functools.partial(between, high=5, n=3)) == Understood((Facts(max=3),))
    assert understand(functools.partial(operator.eq, 8)) == Understood((Facts(values=(8,)),))
    assert understand(Divisible(16)) == Understood((Facts(multiple_of=16),))
    assert understand(Divisible(16).method) == Understood((Facts(values=(16,)),))
    assert understand(len) == Opaque("it uses __len__")  # type: ignore[arg-type]


def test_statements_are_understood() -> None:
    def check(n: int) -> bool:
        if n < 8:
            return False
        for factor in (2, 3):
            if n % factor:
                break
        else:
            return True
        return False

    assert understand(check) == Understood((Facts(min=12, multiple_of=6),))


def test_a_refusal_that_is_caught_still_counts() -> None:
    def check(n: int) -> bool:
        try:
            return int(n) == 3
        except Exception:
            return n == 500_000

    assert understand(check) == Opaque("it uses __int__")


def test_different_behaviour_on_integers_is_noticed() -> None:
    result = understand(lambda n: n == 8 or (type(n) is int and n == 16))
    assert isinstance(result, Opaque)
    assert "is True for 16" in result.reason

    def raising(n: int) -> bool:
        if type(n) is int and n > 1000:
            raise KeyError(n)
        return n % 8 == 0

    assert understand(raising) == Opaque("it raised KeyError: 1009 for 1009")


def test_a_callable_that_changes_its_mind_is_opaque() -> None:
    asked = iter(range(1000))
    result = understand(lambda n: n == next(asked) or n == next(asked))
    assert isinstance(result, Opaque)
    assert result.reason == "it asks different questions when called again"  # other ones
    answers = iter([True, False])
    shorter = understand(lambda n: next(answers, False) and n > 3)
    assert shorter == Opaque("it asks different questions when called again")  # fewer


def test_a_loop_that_never_ends_on_the_probe_is_given_up() -> None:
    def check(n: int) -> bool:
        if type(n) is not int:
            while n < 8 or n >= 8:
                pass
        return n < 8

    assert understand(check) == Opaque("it asks more than 1024 questions")


def test_the_number_of_calls_is_bounded() -> None:
    wide = Counted(lambda n: n in tuple(range(0, 620, 10)))
    result = understand(wide)
    assert isinstance(result, Understood)
    assert len(result.alternatives) == 62
    assert 63 < wide.calls <= 100
    wider = Counted(lambda n: n in tuple(range(0, 640, 10)))
    assert understand(wider) == Opaque("it has more than 64 ways to an answer")
    assert wider.calls == 64


def random_condition(rng: random.Random, depth: int) -> str:
    if depth and rng.random() < 0.6:
        joined = f" {rng.choice(['and', 'or', 'and', 'and'])} ".join(random_condition(rng, depth - 1) for _ in range(2))
        return f"not ({joined})" if rng.random() < 0.2 else f"({joined})"
    constant = rng.randrange(0, 30)
    return rng.choice(
        [
            f"v {rng.choice(['==', '!=', '<', '<=', '>', '>='])} {constant}",
            f"{constant} {rng.choice(['==', '!=', '<', '<=', '>', '>='])} v",
            f"v % {rng.randrange(1, 9)} == {rng.choice([0, 0, 0, 1])}",
            f"not v % {rng.randrange(1, 9)}",
            f"v in ({constant}, {constant + rng.randrange(1, 9)})",
            f"{constant} <= v <= {constant + rng.randrange(0, 30)}",
        ]
    )


def test_what_is_understood_is_right_for_random_conditions() -> None:
    rng = random.Random(20)
    understood = 0
    for _ in range(1500):
        body = random_condition(rng, 3)
        check = Counted(made(body))
        result = understand(check)
        assert check.calls <= 100
        if isinstance(result, Understood):
            understood += 1
            assert len(result.alternatives) == 1 or all(f.exact is not None for f in result.alternatives)
            assert [n for n in range(200) if result.holds(n) is not bool(check(n))] == [], body
        else:
            assert "it was read as" not in result.reason, (body, result.reason)
    assert understood > 300
