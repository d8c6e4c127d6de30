"""What a random program declares, as data: predicates over named sizes, in every way in which a user may write them.

A predicate is evaluated here by brute force on a call's real sizes, so that the fuzzer knows which declared condition
a call meets without asking the code under test.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["eq", "in", "range", "multiple_of", "always"]
# How a mark's lambda spells its predicate. "plain" compares and takes remainders, nothing else; the others ask
# for a concrete bool and so cannot be understood from a symbol.
Spelling = Literal["plain", "in", "not", "bool", "chained"]

SMALL = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 24, 32)


@dataclass(frozen=True)
class Predicate:
    """One predicate over one size.

    `values`: eq (v,); in (v, ...); range (low, high), None for an open end; multiple_of (m,).
    """

    kind: Kind
    values: tuple[int | None, ...] = ()
    spelling: Spelling = "plain"

    def holds(self, size: int) -> bool:
        if self.kind == "always":
            return True
        if self.kind in ("eq", "in"):
            return size in self.values
        if self.kind == "range":
            low, high = self.values
            return (low is None or size >= low) and (high is None or size <= high)
        (m,) = self.values
        assert m is not None
        return size % m == 0

    @property
    def opaque(self) -> bool:
        return self.spelling != "plain"

    def declarative(self) -> Any:
        """The JSON form of `options["specialize"]`."""
        if self.kind == "eq":
            return self.values[0]
        if self.kind == "in":
            return list(self.values)
        if self.kind == "range":
            low, high = self.values
            return {k: v for k, v in (("min", low), ("max", high)) if v is not None}
        assert self.kind == "multiple_of"
        return {"multiple_of": self.values[0]}

    def as_lambda(self) -> str:
        """The Python text of a stock mark's lambda."""
        return f"lambda v: {self._text()}"

    def _text(self) -> str:
        if self.kind == "always":
            return "True"
        if self.kind == "in":
            return f"v in {self.values!r}"
        if self.kind == "range":
            low, high = self.values
            if low is not None and high is not None:
                return f"{low} <= v <= {high}" if self.spelling == "chained" else f"(v >= {low}) & (v <= {high})"
            return f"v >= {low}" if low is not None else f"v <= {high}"
        positive = f"v == {self.values[0]}" if self.kind == "eq" else f"v % {self.values[0]} == 0"
        if self.spelling == "not":
            return f"not {positive.replace('==', '!=')}"
        return f"bool({positive})" if self.spelling == "bool" else positive

    def example(self, rng: random.Random) -> int:
        """A size that meets the predicate, 2 or larger where there is one."""
        if self.kind in ("eq", "in"):
            value = rng.choice(self.values)
            assert value is not None
            return value
        fitting = [v for v in SMALL if self.holds(v)]
        if fitting:
            return rng.choice(fitting)
        return next(v for v in range(2, 100) if self.holds(v))


@dataclass(frozen=True)
class Condition:
    """A conjunction over named sizes (`"x[0]"`, `"n"`), as one entry of `options["specialize"]`."""

    terms: tuple[tuple[str, Predicate], ...]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        return all(predicate.holds(sizes[name]) for name, predicate in self.terms)

    def declarative(self) -> dict[str, Any]:
        return {name: predicate.declarative() for name, predicate in self.terms}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.terms)

    def variants(self) -> list[Condition]:
        """A list of values declares one variant per value, several lists their product, the last name fastest."""
        out: list[tuple[tuple[str, Predicate], ...]] = [()]
        for name, predicate in self.terms:
            each = [Predicate("eq", (v,)) for v in predicate.values] if predicate.kind == "in" else [predicate]
            out = [(*head, (name, p)) for head in out for p in each]
        return [Condition(terms) for terms in out]


@dataclass(frozen=True)
class Mark:
    """`mark_dynamic(input, dim, specialize_on=[...])`."""

    tensor: str
    dim: int
    specialize_on: tuple[Predicate, ...]

    @property
    def name(self) -> str:
        return f"{self.tensor}[{self.dim}]"


def random_predicate(rng: random.Random, lists: bool, kinds: Sequence[Kind] = ()) -> Predicate:
    """A predicate that both a lambda of plain comparisons and the declarative form can say (`lists`: also a list)."""
    kind = (
        rng.choice(kinds)
        if kinds
        else rng.choices(("eq", "multiple_of", "range", "in"), (5, 3, 2, 1 if lists else 0))[0]
    )
    if kind == "eq":
        return Predicate("eq", (rng.choice((2, 3, 4, 5, 8, 8, 16, 16, 24)),))
    if kind == "multiple_of":
        return Predicate("multiple_of", (rng.choice((2, 3, 4, 8, 8, 16)),))
    if kind == "in":
        return Predicate("in", tuple(rng.sample((2, 4, 5, 8, 16, 24), rng.randint(2, 3))))
    low = rng.choice((None, 2, 3, 5, 8))
    high = rng.choice((8, 9, 12, 16, 24) if low is None else (None, 9, 16, 24))
    return Predicate("range", (low, high))


def respelled(predicate: Predicate, rng: random.Random) -> Predicate:
    """The predicate as a lambda that needs a concrete bool."""
    if predicate.kind in ("eq", "multiple_of"):
        return Predicate(predicate.kind, predicate.values, rng.choice(("not", "bool")))
    if predicate.kind == "range" and None not in predicate.values:
        return Predicate(predicate.kind, predicate.values, "chained")
    return Predicate("in", (8, 16), "in")
