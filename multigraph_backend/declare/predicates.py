"""What a variant may be specialized for: predicates over named integers.

    >>> small = predicate_from_json({"ids[0]": 1, "ids[1]": {"max": 512, "multiple_of": 64}})
    >>> small
    And(Eq(name='ids[0]', value=1), Range(name='ids[1]', min=None, max=512), MultipleOf(name='ids[1]', factor=64))
    >>> print(small)
    ids[0] == 1 and ids[1] <= 512 and ids[1] % 64 == 0
    >>> unreachable([MultipleOf("n", 8), Eq("n", 16)])  # the second can never be the first to hold
    {1: 0}

A specialization is only worth compiling if the same predicate can be checked at every call, proven to the
compiler, printed for the user, sent through JSON, and compared with the other declared ones. Free-form Python
can do none of that but the first, so a predicate is one of five small immutable kinds: `Eq`, `In`, `Range`,
`MultipleOf`, and `And` of these. What becomes of it in one graph is a condition (`capture.declared`).

In:  names of integers as the user writes them (``"input_ids[0]"`` is a dimension of a tensor, ``"n"`` an
     integer input), and integers; or the declarative form, a JSON object such as ``{"input_ids[0]": 1,
     "input_ids[1]": {"multiple_of": 64}}``.
Out: what holds of each integer alone (`Facts`), which a call is checked for and a compiler may assume; which
     predicates can never be the first to hold (`unreachable`).

Invariant: a predicate's truth is exactly the conjunction of its `Facts`, name by name. So implication between
predicates is decided by comparing facts, without search and without error in either direction.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from multigraph_backend.declare.facts import ANYTHING, Facts
from multigraph_backend.spelling import did_you_mean, shown

__all__ = [
    "And",
    "Eq",
    "Facts",
    "In",
    "MultipleOf",
    "Predicate",
    "Range",
    "predicate_from_facts",
    "predicate_from_json",
    "unreachable",
]

# A predicate with more points than this is not tested for being covered by several earlier ones together.
_MOST_POINTS = 4096

# The keys of a size's object in the declarative form.
_KEYS = ("min", "max", "multiple_of")


class Predicate(ABC):
    """What may hold of named integers. Immutable, hashable, equal as written (`unreachable` compares meanings)."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names it speaks of, in order of first appearance."""

    @abstractmethod
    def facts(self) -> Mapping[str, Facts]:
        """What may be assumed of each name once it holds; every name of `names`, in that order."""

    @property
    def satisfiable(self) -> bool:
        """Whether any assignment of integers satisfies it."""
        return not any(facts.empty for facts in self.facts().values())

    def alternatives(self) -> tuple[Predicate, ...]:
        """Predicates without `In` that together mean the same: one for each listed value, in the order
        declared.

        Several lists give their product, the last one varying fastest. An unsatisfiable predicate has no
        alternative.
        """
        choices = [
            [facts] if facts.values is None else [Facts(values=(value,)) for value in facts.values]
            for facts in self.facts().values()
        ]
        return tuple(
            predicate_from_facts(dict(zip(self.names, choice, strict=True))) for choice in itertools.product(*choices)
        )

    def to_json(self) -> dict[str, object]:
        """The declarative form, of plain JSON types. Read back by `predicate_from_json`, statements about one
        name are merged."""
        return {name: _facts_to_json(facts) for name, facts in self.facts().items()}

    def __str__(self) -> str:
        said = [facts.describe(name) for name, facts in self.facts().items() if not facts.unconstrained]
        return " and ".join(said) or "always"


@dataclass(frozen=True)
class _OfOne(Predicate):
    """A predicate over a single name."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"{type(self).__name__}: the name must be a str, got {shown(self.name)}")
        if not self.name:
            raise ValueError(f"{type(self).__name__}: the name must not be empty")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def _set_integer(self, field: str, least: int | None = None) -> None:
        value = getattr(self, field)
        what = f"{type(self).__name__} of {self.name!r}: {field}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{what} must be an int, got {shown(value)}{_spelled(value)}")
        if least is not None and value < least:
            raise ValueError(f"{what} must be at least {least}, got {value}")
        object.__setattr__(self, field, int(value))


@dataclass(frozen=True)
class Eq(_OfOne):
    """The integer `name` is `value`."""

    value: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_integer("value")

    def facts(self) -> Mapping[str, Facts]:
        return {self.name: Facts(values=(self.value,))}


@dataclass(frozen=True, init=False)
class In(_OfOne):
    """The integer `name` is one of `values`, an iterable kept in its order (a set: ascending)."""

    values: tuple[int, ...]

    def __init__(self, name: str, values: Iterable[int]) -> None:
        object.__setattr__(self, "name", name)
        super().__post_init__()
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
            raise TypeError(f"In of {name!r}: values must be a list of ints, got {shown(values)}")
        listed = list(values)
        for value in listed:
            if not isinstance(value, int) or isinstance(value, bool):
                hint = _spelled(value)
                raise TypeError(f"In of {name!r}: values must be ints, got {shown(value)} among them{hint}")
        ordered = sorted(listed) if isinstance(values, set | frozenset) else listed
        object.__setattr__(self, "values", tuple(dict.fromkeys(map(int, ordered))))

    def facts(self) -> Mapping[str, Facts]:
        return {self.name: Facts(values=self.values)}


@dataclass(frozen=True)
class Range(_OfOne):
    """The integer `name` lies between `min` and `max`, both inclusive; None leaves that end open."""

    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("min", "max"):
            if getattr(self, field) is not None:
                self._set_integer(field)
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"Range of {self.name!r}: min {self.min} is greater than max {self.max}")

    def facts(self) -> Mapping[str, Facts]:
        return {self.name: Facts(min=self.min, max=self.max)}


@dataclass(frozen=True)
class MultipleOf(_OfOne):
    """The integer `name` is divisible by `factor`, which is at least 1. Zero is divisible by everything."""

    factor: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_integer("factor", least=1)

    def facts(self) -> Mapping[str, Facts]:
        return {self.name: Facts(multiple_of=self.factor)}


@dataclass(frozen=True, init=False, repr=False)
class And(Predicate):
    """All of `predicates` hold. Nested ones are flattened; an empty one always holds."""

    predicates: tuple[Predicate, ...]

    def __init__(self, *predicates: Predicate) -> None:
        flat: list[Predicate] = []
        for predicate in predicates:
            if not isinstance(predicate, Predicate):
                raise TypeError(f"And takes predicates, got {shown(predicate)}")
            flat.extend(predicate.predicates if isinstance(predicate, And) else [predicate])
        object.__setattr__(self, "predicates", tuple(flat))

    def __repr__(self) -> str:
        return f"And({', '.join(map(repr, self.predicates))})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for predicate in self.predicates for name in predicate.names))

    def facts(self) -> Mapping[str, Facts]:
        known: dict[str, Facts] = {}
        for predicate in self.predicates:
            for name, facts in predicate.facts().items():
                known[name] = known[name].intersect(facts) if name in known else facts
        return known


def predicate_from_facts(facts: Mapping[str, Facts]) -> Predicate:
    """The plainest predicate whose `Predicate.facts` are `facts`."""
    parts: list[Predicate] = []
    for name, known in facts.items():
        if known.exact is not None:
            parts.append(Eq(name, known.exact))
        elif known.values is not None:
            parts.append(In(name, known.values))
        else:
            if known.min is not None or known.max is not None or known.multiple_of == 1:
                parts.append(Range(name, known.min, known.max))
            if known.multiple_of > 1:
                parts.append(MultipleOf(name, known.multiple_of))
    return parts[0] if len(parts) == 1 else And(*parts)


def predicate_from_json(obj: object) -> Predicate:
    """Read one entry of the declarative form: an object of names to an integer, a list of integers, or an
    object with any of ``min``, ``max`` (inclusive) and ``multiple_of``.

    Raises TypeError for a value of a wrong type and ValueError for an unknown key or an impossible value; the
    text names the size and what was expected.
    """
    if not isinstance(obj, Mapping):
        raise TypeError(f"a condition must be an object of size names to values, got {shown(obj)}")
    parts: list[Predicate] = []
    for name, value in obj.items():
        if isinstance(value, Mapping):
            for key in value:
                if key not in _KEYS:
                    hint = _key_meant(name, str(key), value[key]) or did_you_mean(str(key), _KEYS)
                    raise ValueError(f"{name!r}: unknown key {key!r}{hint}; allowed: {', '.join(_KEYS)}")
            if value.get("min") is not None or value.get("max") is not None or "multiple_of" not in value:
                parts.append(Range(name, value.get("min"), value.get("max")))
            if "multiple_of" in value:
                parts.append(MultipleOf(name, value["multiple_of"]))
        elif isinstance(value, list | tuple):
            parts.append(In(name, value))
        elif isinstance(value, int) and not isinstance(value, bool):
            parts.append(Eq(name, value))
        else:
            hint = _spelled(value)
            raise TypeError(f"{name!r}: expected an int, a list of ints or an object, got {shown(value)}{hint}")
    return parts[0] if len(parts) == 1 else And(*parts)


_OTHER_KEYS = {
    "multiple_of": ("mod", "modulo", "divisible_by", "div", "%", "step", "multiples_of"),
    "min": ("ge", "gte", ">=", "from", "lower", "start"),
    "max": ("le", "lte", "<=", "to", "upper", "end", "stop"),
}


def _key_meant(name: str, key: str, value: object) -> str:
    """What to write for a key of a size's object that others have."""
    meant = next((known for known, words in _OTHER_KEYS.items() if key.casefold() in words), None)
    if meant is not None:
        return f" (did you mean {meant!r}?)"
    equal = ("in", "values", "one_of", "any_of") if isinstance(value, list) else ("eq", "==", "=", "value", "is")
    if key.casefold() in equal:
        return f' (write {{"{name}": {value}}})'
    if re.fullmatch(r"-?\d+", key):
        return f' (a size is named with its dimension: write {{"{name}[{key}]": {value}}})'
    return ""


def _spelled(value: object) -> str:
    """How to write what `value` seems to mean."""
    if isinstance(value, range) and len(value):
        low, high = min(value[0], value[-1]), max(value[0], value[-1])
        each = f"list({value!r}) for a variant of each"
        step = abs(value.step) if len(value) > 1 else 1
        one = {"min": low, "max": high, **({"multiple_of": step} if step > 1 and low % step == 0 else {})}
        whole = f", {json.dumps(one)} for one variant of all" if step == 1 or "multiple_of" in one else ""
        return f"; write {each}{whole}"
    if isinstance(value, set | frozenset) and value and all(type(entry) is int for entry in value):
        return f"; write {sorted(value)!r}"
    if callable(value):
        return "; a callable is for mark(x, 0, specialize_on=[...])"
    if isinstance(value, str) and (ends := re.fullmatch(r"\s*(\d+)\s*(?:-|\.\.+|:)\s*(\d+)\s*", value)):
        return f'; write {{"min": {int(ends[1])}, "max": {int(ends[2])}}}'
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(\s*[, ]\s*\d+)+\s*", value):
        return f"; write {[int(word) for word in re.findall(r'[0-9]+', value)]}"
    if isinstance(value, str | float):
        try:
            return f"; write {int(value)}" if int(value) == float(value) else ""
        except (ValueError, OverflowError):
            return ""
    return ""


def unreachable(predicates: Sequence[Predicate]) -> dict[int, int]:
    """Which predicates can never be the first to hold: the index of each, to the index of what hides it.

    That is the first earlier one that covers it; or, where only several earlier ones together do and it has
    few enough possible assignments to list, the last of those that are needed.
    """
    hidden: dict[int, int] = {}
    earlier = _Earlier()
    for index, predicate in enumerate(predicates):
        facts = {name: known for name, known in predicate.facts().items() if not known.unconstrained}
        by = earlier.first_to_cover(facts)
        if by is None:
            by = earlier.last_needed(facts)
        if by is not None:
            hidden[index] = by
        earlier.add(index, facts)
    return hidden


class _Earlier:
    """The predicates seen so far; those that fix all their names are looked up, so thousands cost little."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
        self._others: list[tuple[int, Mapping[str, Facts]]] = []

    def add(self, index: int, facts: Mapping[str, Facts]) -> None:
        names = tuple(sorted(facts))
        point = _point(names, facts)
        if point is None:
            self._others.append((index, facts))
        else:
            self._points.setdefault(names, {}).setdefault(point, index)

    def first_to_cover(self, facts: Mapping[str, Facts]) -> int | None:
        if any(known.empty for known in facts.values()):
            return 0 if self._points or self._others else None
        first = next((index for index, mine in self._others if _covers(mine, facts)), None)
        found = [] if first is None else [first]
        for names, points in self._points.items():
            point = _point(names, facts)
            if point in points:
                found.append(points[point])
        return min(found, default=None)

    def last_needed(self, facts: Mapping[str, Facts]) -> int | None:
        listed = [known.possible(_MOST_POINTS) for known in facts.values()]
        choices = [values for values in listed if values is not None]
        if len(choices) < len(listed) or math.prod(map(len, choices)) > _MOST_POINTS:
            return None
        needed: set[int] = set()
        for point in itertools.product(*choices):
            by = self.first_to_cover({n: Facts(values=(v,)) for n, v in zip(facts, point, strict=True)})
            if by is None:
                return None
            needed.add(by)
        return max(needed, default=None)


def _point(names: tuple[str, ...], facts: Mapping[str, Facts]) -> tuple[int, ...] | None:
    exact = [facts[name].exact for name in names if name in facts]
    values = tuple(value for value in exact if value is not None)
    return values if len(values) == len(names) else None


def _covers(mine: Mapping[str, Facts], theirs: Mapping[str, Facts]) -> bool:
    if any(known.empty for known in theirs.values()):
        return True
    return all(known.covers(theirs.get(name, ANYTHING)) for name, known in mine.items())


def _facts_to_json(facts: Facts) -> object:
    if facts.values is not None:
        return list(facts.values) if facts.exact is None else facts.exact
    factor = facts.multiple_of if facts.multiple_of > 1 else None
    said = {"min": facts.min, "max": facts.max, "multiple_of": factor}
    return {key: value for key, value in said.items() if value is not None}
