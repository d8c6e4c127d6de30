"""Learn what a callable asks of its one integer, so that a compiler may assume it and a report may print it.

    >>> understand(lambda n: n > 0 and n % 64 == 0)
    Understood(alternatives=(Facts(min=64, max=None, multiple_of=64, values=None),))
    >>> understand(lambda n: n != 8)
    Opaque(reason='not (n == 8) cannot be used as a fact')

The first of these callables is called three times with a probe in place of the integer. Each comparison of the probe is
a question, and whenever the callable wants the truth of one, both answers are explored, yes first:

    n > 0? yes    n % 64 == 0? yes    true:  1 <= n and n % 64 == 0
    n > 0? yes    n % 64 == 0? no     false
    n > 0? no                         false

Each way to a true answer is a conjunction of what was asked and answered. Then the callable is called with some
concrete integers, and has to say what was understood.

A stock mark, ``mark_dynamic(x, 0, specialize_on=[lambda n: n % 64 == 0])``, carries a bare callable: nothing but its
answer for given sizes is known, and its source may not exist (an interactive session, a partial, an object). So it is
called, and not read.

In:  a callable of one integer, a size: only values from 0 on are considered.
Out: `Understood`, with the facts of each alternative, or `Opaque`, with the reason why not.

Invariant: what is returned as understood agrees with the callable on concrete integers around each constant
that it mentions, and the callable is never called more than `_MOST_RUNS` + `_MOST_SAMPLES` times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, cast

from multigraph_backend.declare.facts import ANYTHING, Facts

_MOST_RUNS = 64  # calls with a probe
_MOST_ASKED = 1024  # questions within one such call
_MOST_SAMPLES = 36  # calls with a concrete integer


@dataclass(frozen=True)
class Understood:
    """The callable is true for exactly the integers that satisfy one of `alternatives`.

    There is one alternative of any kind, or there are several of a single value each, in the order in which
    the callable tries them.
    """

    alternatives: tuple[Facts, ...]

    def holds(self, n: int) -> bool:
        """What the callable says of the size `n`."""
        return any(facts.holds(n) for facts in self.alternatives)


@dataclass(frozen=True)
class Opaque:
    """The callable can be called but not understood, for this `reason`."""

    reason: str


def understand(check: Callable[[int], object]) -> Understood | Opaque:
    """Learn for which sizes `check` is true, as `bool` sees it. A `check` that raises is `Opaque`."""
    try:
        paths, constants = _explore(check)
        alternatives = _alternatives(paths)
    except _NotUnderstood as refusal:
        return Opaque(str(refusal))
    understood = Understood(alternatives)
    for n in _samples(constants):
        try:
            said = bool(check(n))
        except Exception as error:
            return Opaque(f"it raised {_shown_error(error)} for {n}")
        if said != understood.holds(n):
            seen = " or ".join(facts.describe("n") for facts in alternatives)
            return Opaque(f"it was read as {seen}, but is {said} for {n}")
    return understood


class _NotUnderstood(Exception):
    """The callable does something that facts cannot express."""


@dataclass(frozen=True)
class _Question:
    """Whether the integer satisfies `facts`, or, with a `residue`, leaves it when divided by `divisor`."""

    facts: Facts
    divisor: int = 1
    residue: int = 0

    def __str__(self) -> str:
        return f"n % {self.divisor} == {self.residue}" if self.residue else self.facts.describe("n")

    def holds(self, n: int) -> bool:
        return n % self.divisor == self.residue if self.residue else self.facts.holds(n)

    def negated(self) -> Facts | None:
        """The facts of an integer that fails the question, None where facts cannot say it."""
        low, high = self.facts.min, self.facts.max
        if low is not None and self.facts == Facts(min=low):
            return Facts(max=low - 1)
        if high is not None and self.facts == Facts(max=high):
            return Facts(min=high + 1)
        return None

    def told(self, answer: bool) -> bool:
        """Whether facts can say all that follows from `answer`."""
        return not self.residue if answer else self.negated() is not None

    def constants(self) -> tuple[int, ...]:
        """The numbers in the question, near which its answer changes."""
        if self.residue:
            return (self.residue, self.divisor)
        bounds = (bound for bound in (self.facts.min, self.facts.max) if bound is not None)
        return (*bounds, self.facts.multiple_of)


@dataclass
class _Path:
    """One call with a probe: the answers it was given, planned ones first, and what they amount to."""

    planned: list[tuple[_Question, bool]]
    answers: list[tuple[_Question, bool]] = field(default_factory=list)
    facts: Facts = ANYTHING
    asked: list[_Question] = field(default_factory=list)
    refused: str | None = None

    def truth(self, question: _Question) -> bool:
        """The answer on this path: what follows from earlier answers, else what was planned, else yes."""
        self.asked.append(question)
        if len(self.asked) > _MOST_ASKED:
            self.refuse(f"it asks more than {_MOST_ASKED} questions")
        known = self._implied(question)
        if known is not None:
            return known
        answer = True
        if len(self.answers) < len(self.planned):
            planned, answer = self.planned[len(self.answers)]
            if planned != question:
                self.refuse("it asks different questions when called again")
        self.answers.append((question, answer))
        learnt = (None if question.residue else question.facts) if answer else question.negated()
        if learnt is not None:
            self.facts = self.facts.intersect(learnt)
        return answer

    def _implied(self, question: _Question) -> bool | None:
        for asked, answer in self.answers:
            if asked == question:
                return answer
        if self.facts.exact is not None:
            return question.holds(self.facts.exact)
        if question.residue:
            return None
        if question.facts.covers(self.facts):
            return True
        return False if question.facts.intersect(self.facts).empty else None

    def refuse(self, reason: str) -> NoReturn:
        """Give up on the callable; noted too, in case it catches the exception."""
        self.refused = reason
        raise _NotUnderstood(reason)

    def conclude(self) -> Facts | None:
        """The facts of the integers that take this path, None if none does. Raises if no facts say it."""
        left = [(question, answer) for question, answer in self.answers if not question.told(answer)]
        facts, before = self.facts, None
        while facts != before:
            before = facts
            for question, _ in left:
                facts = _without_end(facts, question.facts.exact)
        if facts.exact is not None:
            return facts if all(question.holds(facts.exact) is answer for question, answer in left) else None
        for question, _ in left:
            if question.residue:
                raise _NotUnderstood(f"{question} cannot be used as a fact")
            if question.facts.covers(facts):
                return None
            if not question.facts.intersect(facts).empty:
                raise _NotUnderstood(f"not ({question}) cannot be used as a fact")
        return facts


def _without_end(facts: Facts, excluded: int | None) -> Facts:
    """`facts` without the value `excluded`, where that is the least or the greatest of theirs."""
    if excluded is not None and facts.exact is None:
        if excluded == facts.min:
            return facts.intersect(Facts(min=excluded + 1))
        if excluded == facts.max:
            return facts.intersect(Facts(max=excluded - 1))
    return facts


class _Refusing:
    """A stand-in that refuses every operation which its subclass does not define."""

    def __init__(self, path: _Path) -> None:
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> object:
        _path_of(self).refuse(f"it uses the attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        _path_of(self).refuse(f"it sets the attribute {name!r}")


def _path_of(stand_in: _Refusing) -> _Path:
    path = object.__getattribute__(stand_in, "_path")
    assert isinstance(path, _Path)
    return path


def _refuser(operation: str) -> Callable[..., object]:
    def refuse(self: _Refusing, *args: object) -> object:
        _path_of(self).refuse(f"it uses {operation}")

    return refuse


# fmt: off
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor",
    "or", "matmul",
)
_OTHERS = (
    "lt", "le", "eq", "ne", "gt", "ge", "hash", "neg", "pos", "abs", "invert", "index", "int", "float",
    "complex", "round", "trunc", "floor", "ceil", "str", "repr", "format", "bytes", "len", "iter", "next",
    "contains", "getitem", "call", "enter", "await", "dir", "reversed",
)
# fmt: on
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(_Refusing, f"__{_name}__", _refuser(f"__{_name}__"))


class _Relation(_Refusing):
    """Something true or false of the integer: the answer to a question, turned round if `negate`."""

    def __init__(self, path: _Path, question: _Question, negate: bool = False) -> None:
        super().__init__(path)
        object.__setattr__(self, "_asks", (question, negate))

    def __bool__(self) -> bool:
        question, negate = object.__getattribute__(self, "_asks")
        return _path_of(self).truth(question) is not negate

    def __and__(self, other: object) -> bool:
        self._check_joined(other)
        return bool(self) and bool(other)

    def __or__(self, other: object) -> bool:
        self._check_joined(other)
        return bool(self) or bool(other)

    __rand__ = __and__
    __ror__ = __or__

    def _check_joined(self, other: object) -> None:
        if not isinstance(other, bool | _Relation):
            _path_of(self).refuse(f"it joins a comparison with a value of type {type(other).__name__}")


class _Comparable(_Refusing):
    """Something that may be equal to an integer, and is true unless it is zero."""

    def _equals(self, value: int) -> _Question:
        raise NotImplementedError

    def __eq__(self, other: object) -> _Relation:  # type: ignore[override]
        return _Relation(_path_of(self), self._equals(_integer(self, other)))

    def __ne__(self, other: object) -> _Relation:  # type: ignore[override]
        return _Relation(_path_of(self), self._equals(_integer(self, other)), negate=True)

    def __bool__(self) -> bool:
        return not _path_of(self).truth(self._equals(0))

    __hash__ = _Refusing.__hash__


class _Remainder(_Comparable):
    """What is left of the integer when it is divided by a positive `divisor`."""

    def __init__(self, path: _Path, divisor: int) -> None:
        super().__init__(path)
        object.__setattr__(self, "_divisor", divisor)

    def _equals(self, value: int) -> _Question:
        divisor: int = object.__getattribute__(self, "_divisor")
        if not 0 <= value < divisor:
            return _Question(Facts(values=()))
        return _Question(ANYTHING, divisor, value) if value else _Question(Facts(multiple_of=divisor))


class _Probe(_Comparable):
    """Stands in for the integer."""

    def _equals(self, value: int) -> _Question:
        return _Question(Facts(values=(value,)))

    def __lt__(self, other: object) -> _Relation:
        return _Relation(_path_of(self), _Question(Facts(max=_integer(self, other) - 1)))

    def __le__(self, other: object) -> _Relation:
        return _Relation(_path_of(self), _Question(Facts(max=_integer(self, other))))

    def __gt__(self, other: object) -> _Relation:
        return _Relation(_path_of(self), _Question(Facts(min=_integer(self, other) + 1)))

    def __ge__(self, other: object) -> _Relation:
        return _Relation(_path_of(self), _Question(Facts(min=_integer(self, other))))

    def __mod__(self, other: object) -> _Remainder:
        divisor = _integer(self, other)
        if divisor < 1:
            _path_of(self).refuse(f"it divides by {divisor}")
        return _Remainder(_path_of(self), divisor)

    def __and__(self, other: object) -> _Remainder:
        mask = _integer(self, other)
        if mask < 0 or mask & (mask + 1):
            _path_of(self).refuse(f"it masks with {mask}, which is no remainder")
        return _Remainder(_path_of(self), mask + 1)

    __rand__ = __and__


def _integer(stand_in: _Refusing, value: object) -> int:
    if not isinstance(value, int):
        _path_of(stand_in).refuse(f"it computes with a value of type {type(value).__name__}")
    return int(value)


def _explore(check: Callable[[int], object]) -> tuple[list[Facts], list[int]]:
    """Each way in which `check` comes to a true answer, in its order, and each constant that it mentions."""
    ways: list[Facts] = []
    constants: dict[int, None] = {}
    left: list[list[tuple[_Question, bool]]] = [[]]
    for _ in range(_MOST_RUNS):
        path = _Path(left.pop())
        try:
            true = bool(check(cast(int, _Probe(path))))
        except Exception as error:
            if not isinstance(error, _NotUnderstood):
                raise _NotUnderstood(path.refused or f"it raised {_shown_error(error)}") from error
            raise
        if path.refused is not None:
            raise _NotUnderstood(path.refused)
        if len(path.answers) < len(path.planned):
            raise _NotUnderstood("it asks different questions when called again")
        for question in path.asked:
            constants.update(dict.fromkeys(question.constants()))
        facts = path.conclude() if true else None
        if facts is not None:
            ways.append(facts)
        for depth in range(len(path.planned), len(path.answers)):
            left.append([*path.answers[:depth], (path.answers[depth][0], False)])
        if not left:
            return ways, list(constants)
    raise _NotUnderstood(f"it has more than {_MOST_RUNS} ways to an answer")


def _alternatives(ways: list[Facts]) -> tuple[Facts, ...]:
    if not ways:
        raise _NotUnderstood("nothing was found for which it is true")
    if len(ways) > 1 and any(facts.exact is None for facts in ways):
        listed = ", or ".join(facts.describe("n") for facts in ways)
        raise _NotUnderstood(f"it is true in several ways that are no single values: {listed}")
    return tuple(ways)


def _samples(constants: list[int]) -> list[int]:
    """Sizes to try: the smallest, a far one, and those around six constants at most and their multiples."""
    some = constants[:: max(1, -(-len(constants) // 6))]
    around = [n for shift in (0, 1, -1) for n in (constant + shift for constant in some)]
    multiples = [factor * constant for factor in (2, 5) for constant in some]
    sizes = dict.fromkeys(n for n in (0, 1, 2, 3, 1009, *around, *multiples) if n >= 0)
    return list(sizes)[:_MOST_SAMPLES]


def _shown_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
