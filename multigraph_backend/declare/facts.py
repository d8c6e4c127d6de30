"""What is known of one integer: the only facts about a size that a variant's compile may take for granted.

    >>> sixteens = Facts(min=1, max=100, multiple_of=16)
    >>> sixteens.describe("x[0]")  # bounds are moved to values that are possible
    '16 <= x[0] <= 96 and x[0] % 16 == 0'
    >>> sixteens.holds(48), sixteens.holds(50)
    (True, False)
    >>> sixteens.intersect(Facts(min=90)).exact  # a single possible value is a value
    96
    >>> Facts(max=512).covers(sixteens)
    True

Checking a size at a call and assuming it in a compiler must never drift apart, so both are read from one
small object.

In:  bounds, a factor, or a list of possible values, as declared in a predicate or learnt from a callable.
Out: membership, inclusion, intersection and text.

Invariant: a `Facts` is always in normal form, so that inclusion can be decided part by part, exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What is known of one integer: inclusive bounds, a factor, perhaps a list of all possible values.

    Always in normal form: `values` holds only values that fit the rest, in the order given and without
    duplicates; bounds are attained; a single possible value has ``values == (v,)`` and ``min == max == v``;
    with `values` the bounds are theirs and `multiple_of` is their greatest common divisor (1 if that is 0);
    no possible value is ``Facts(values=())``. Raises ValueError if `multiple_of` is less than 1. Crossed
    bounds are no error: they leave no possible value.
    """

    min: int | None = None
    max: int | None = None
    multiple_of: int = 1
    values: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1, got {self.multiple_of}")
        low, high, step, values = self.min, self.max, self.multiple_of, self.values
        if values is None:
            low = None if low is None else -(-low // step) * step
            high = None if high is None else high // step * step
            if low is not None and high is not None and low >= high:
                values = (low,) if low == high else ()
        else:
            values = tuple(dict.fromkeys(value for value in values if _fits(value, low, high, step)))
        if values is not None:
            low, high = (min(values), max(values)) if values else (None, None)
            step = math.gcd(*values) or 1
        for field, normal in (("min", low), ("max", high), ("multiple_of", step), ("values", values)):
            object.__setattr__(self, field, normal)

    @property
    def empty(self) -> bool:
        """Whether no integer at all satisfies these facts."""
        return self.values == ()

    @property
    def unconstrained(self) -> bool:
        """Whether every integer satisfies these facts."""
        return self == ANYTHING

    @property
    def exact(self) -> int | None:
        """The only possible value, or None if there are none or several."""
        return self.values[0] if self.values is not None and len(self.values) == 1 else None

    def holds(self, n: int) -> bool:
        """Whether the integer `n` satisfies these facts."""
        if self.values is not None:
            return n in self.values
        return _fits(n, self.min, self.max, self.multiple_of)

    def possible(self, limit: int) -> tuple[int, ...] | None:
        """All integers that satisfy these facts, or None if there are more than `limit`."""
        if self.values is not None:
            return self.values if len(self.values) <= limit else None
        if self.min is None or self.max is None or (self.max - self.min) // self.multiple_of >= limit:
            return None
        return tuple(range(self.min, self.max + 1, self.multiple_of))

    def covers(self, other: Facts) -> bool:
        """Whether every integer that satisfies `other` satisfies these facts too. Exact both ways."""
        if other.values is not None:
            return all(self.holds(value) for value in other.values)
        if self.values is not None:
            listed = other.possible(len(self.values))
            return listed is not None and all(self.holds(value) for value in listed)
        # `other` has two neighbouring multiples at least and attains its bounds: each part compares alone.
        return (
            other.multiple_of % self.multiple_of == 0
            and (self.min is None or (other.min is not None and self.min <= other.min))
            and (self.max is None or (other.max is not None and self.max >= other.max))
        )

    def intersect(self, other: Facts) -> Facts:
        """The facts of an integer that satisfies both. Where both list values, in the order of `self`."""
        listed = self.values if self.values is not None else other.values
        if listed is not None:
            return Facts(values=tuple(value for value in listed if self.holds(value) and other.holds(value)))
        lows = [facts.min for facts in (self, other) if facts.min is not None]
        highs = [facts.max for facts in (self, other) if facts.max is not None]
        step = math.lcm(self.multiple_of, other.multiple_of)
        return Facts(max(lows, default=None), min(highs, default=None), step)

    def describe(self, name: str) -> str:
        """The facts as text about the integer `name`: ``1 <= x[0] <= 512 and x[0] % 16 == 0``."""
        if self.exact is not None:
            return f"{name} == {self.exact}"
        if self.values is not None:
            return f"{name} in ({', '.join(map(str, self.values))})"
        parts = []
        if self.min is not None and self.max is not None:
            parts.append(f"{self.min} <= {name} <= {self.max}")
        elif self.min is not None:
            parts.append(f"{name} >= {self.min}")
        elif self.max is not None:
            parts.append(f"{name} <= {self.max}")
        if self.multiple_of > 1:
            parts.append(f"{name} % {self.multiple_of} == 0")
        return " and ".join(parts) or f"any {name}"


def _fits(n: int, low: int | None, high: int | None, step: int) -> bool:
    return (low is None or n >= low) and (high is None or n <= high) and n % step == 0


ANYTHING = Facts()
