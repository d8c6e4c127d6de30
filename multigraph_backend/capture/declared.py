"""From what the user declared to what a region can check and assume: predicates and marks become conditions.

For a graph over `x` of sizes `[2*s0, 64]`, the predicate `{"x[0]": {"max": 100, "multiple_of": 8}, "x[1]": 64}` becomes

    terms   x[0]: max 96, a multiple of 8       dispatch checks this at a call
    facts   s0: max 48, a multiple of 4         a compile may assume this

    >>> s0 = sympy.Symbol("s0", integer=True)
    >>> about_symbols(2 * s0, Facts(max=100, multiple_of=8))
    {s0: Facts(min=None, max=48, multiple_of=4, values=None)}

and `x[1]` takes no part: a size that Dynamo traced as a constant decides its part of a condition at once.  With
`"x[1]": 32` the condition would have a reason why it never applies here: no call of this graph has such a size.

In: predicates over names (`options["specialize"]`) and stock marks (a callable on one size), in declared order; the
sizes that one Dynamo graph has.
Out: one `Condition` each: terms over the graph's sizes for dispatch, facts about its symbols for the compiler, or the
reason why it never applies here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from multigraph_backend.capture import size_names, static_sizes
from multigraph_backend.capture.graph import CapturedGraph, MarkedSize, NamedSize
from multigraph_backend.declare import probing
from multigraph_backend.declare.facts import Facts
from multigraph_backend.declare.predicates import Predicate, predicate_from_facts, unreachable


@dataclass
class Condition:
    """One declared specialization in one graph.

    `terms`: sizes to check at a call and what must hold of them.  `facts`: what follows about Dynamo's symbols.
    `check`: a callable that could not be understood, asked with the value of `check_size`.  `never`: why the
    condition cannot apply in this graph, None if it can.
    """

    text: str
    predicate: Predicate | None
    terms: list[tuple[NamedSize, Facts]] = field(default_factory=list)
    facts: dict[sympy.Symbol, Facts] = field(default_factory=dict)
    check: Callable[[int], object] | None = None
    check_size: NamedSize | None = None
    opaque_because: str | None = None
    never: str | None = None
    elsewhere: bool = False  # it never applies here as Dynamo traces such calls as graphs of their own

    @property
    def decided(self) -> bool:
        """Whether the trace itself makes it true: every size of it is a constant of this graph."""
        return self.never is None and not self.terms and self.check is None


class UnknownName(ValueError):
    """A declared name is none of the graph's inputs."""


def resolve(graph: CapturedGraph, predicates: Sequence[Predicate]) -> tuple[list[Condition], list[str]]:
    """Conditions of `predicates`, then of the graph's marks, and notes for the report."""
    notes: list[str] = []
    conditions = [_from_predicate(graph, predicate, notes) for predicate in predicates]
    for marked in graph.marked_sizes:
        conditions += _from_mark(graph, marked, notes)
    _find_unreachable(conditions)
    return conditions, notes


def _from_predicate(graph: CapturedGraph, predicate: Predicate, notes: list[str]) -> Condition:
    condition = Condition(str(predicate), predicate)
    for name, facts in predicate.facts().items():
        found = graph.find(name)
        if found is None and name in graph.static:
            condition.never = f"{name} is a constant of this graph: {graph.static[name]}"
        elif found is None:
            condition.never = unknown_name(graph, name)
            if not graph.user_code.partial:  # what Dynamo traces after a break is not what the name was declared for
                notes.append(condition.never)
        elif isinstance(found, int):
            _decide(graph, condition, name, found, facts)
        else:
            _add_term(graph, condition, name, found, facts)
            if found.location.kind == "size" and facts.intersect(Facts(min=0)).empty:
                condition.never = f"{name} is a size, which is never negative: {facts.describe(name)} holds for none"
                notes.append(condition.never)
    return condition


def unknown_name(graph: CapturedGraph, name: str) -> str:
    """The text for a name that this graph does not have."""
    meant = size_names.meant(name, graph.sizes)
    hint = ""
    if isinstance(meant, str):
        hint = f"; did you mean {meant!r}?"
    elif meant is not None:
        listed = ", ".join(map(repr, meant))
        exact = meant[0].startswith(f"{size_names.normalized(name)}[")
        hint = f"; {name} is a tensor, name one of its sizes: {listed}" if exact else f"; did you mean one of {listed}?"
    elif name in ("min", "max", "multiple_of"):
        hint = f'; {name} belongs to a size: {{"x[0]": {{"{name}": 8}}}}'
    known = ", ".join(graph.sizes) or "none"
    return f"{name!r} is no size or integer input of {graph.user_code.function} (it has: {known}){hint}"


def _add_term(graph: CapturedGraph, condition: Condition, name: str, size: NamedSize, facts: Facts) -> None:
    if size.expr.is_Integer:
        _decide(graph, condition, name, int(size.expr), facts)
        return
    condition.terms.append((size, facts))
    for symbol, known in about_symbols(size.expr, facts).items():
        before = condition.facts.get(symbol)
        condition.facts[symbol] = known if before is None else before.intersect(known)
        if condition.facts[symbol].empty:
            condition.never = f"no size of {name} satisfies it together with the rest"
        elif condition.facts[symbol].intersect(bounds(graph, symbol)).empty:
            condition.never = f"no call of this graph satisfies it: {bounds(graph, symbol).describe(str(symbol))}"
            condition.elsewhere = True


def _decide(graph: CapturedGraph, condition: Condition, name: str, value: int, facts: Facts) -> None:
    if not facts.holds(value):
        condition.never = static_sizes.said(name, value, graph.static)


def bounds(graph: CapturedGraph, symbol: sympy.Symbol) -> Facts:
    """What Dynamo's guards say of a symbol: sizes 0 and 1 are graphs of their own, so that others are at least 2."""
    info = graph.symbols.get(symbol)
    low, high = (None, None) if info is None else (info.lower, info.upper)
    return Facts(min=_integer(low), max=_integer(high))


def _integer(bound: object) -> int | None:
    return int(bound) if isinstance(bound, int | sympy.Integer) else None


def about_symbols(expr: sympy.Expr, facts: Facts) -> dict[sympy.Symbol, Facts]:
    """What `facts` about the size `expr` say about its symbol; only what certainly follows.

    Exact for `a*s + b`; nothing is said where several symbols are involved.
    """
    symbols = sorted(expr.free_symbols, key=str)
    if len(symbols) != 1:
        return {}
    (symbol,) = symbols
    scale, shift = expr.coeff(symbol, 1), expr.subs(symbol, 0)
    if not (scale.is_Integer and shift.is_Integer) or scale == 0 or expr != scale * symbol + shift:
        return {}
    a, b = int(scale), int(shift)
    if facts.values is not None:
        return {symbol: Facts(values=tuple((value - b) // a for value in facts.values if (value - b) % a == 0))}
    bounds = [None if bound is None else bound - b for bound in (facts.min, facts.max)]
    low, high = bounds if a > 0 else bounds[::-1]
    factor = facts.multiple_of
    step = sympy.ilcm(factor, a) // abs(a) if b == 0 else 1
    return {
        symbol: Facts(
            min=None if low is None else -(-low // a),
            max=None if high is None else high // a,
            multiple_of=int(step),
        )
    }


# ---------------------------------------------------------------- stock marks


def _from_mark(graph: CapturedGraph, marked: MarkedSize, notes: list[str]) -> list[Condition]:
    size = graph.sizes.get(marked.name)
    if size is None:
        notes.append(f"{marked.name} is marked, but the graph of {graph.user_code.function} does not take that tensor")
        return []
    learnt = _learn(marked.check)
    if isinstance(learnt, probing.Opaque):
        text = f"{_callable_name(marked.check)}({marked.name})"
        condition = Condition(text, None, check=marked.check, check_size=size, opaque_because=learnt.reason)
        if size.expr.is_Integer:
            try:
                agreed = bool(marked.check(int(size.expr)))
            except Exception as error:
                condition.never = f"{text} raised {type(error).__name__}: {error}"
            else:
                condition.never = None if agreed else f"{marked.name} is {size.expr} in this graph"
            condition.check = condition.check_size = None
        return [condition]
    conditions = []
    for facts in learnt.alternatives:
        predicate = predicate_from_facts({marked.name: facts})
        condition = Condition(facts.describe(marked.name), predicate)
        _add_term(graph, condition, marked.name, size, facts)
        conditions.append(condition)
    return conditions


def _learn(check: Callable[[int], object]) -> probing.Understood | probing.Opaque:
    owner = getattr(check, "__self__", None)
    if isinstance(owner, Facts) and getattr(check, "__name__", "") == "holds":
        values = owner.values
        alternatives = (owner,) if values is None else tuple(Facts(values=(value,)) for value in values)
        return probing.Understood(alternatives)
    return probing.understand(check)


def learnt(check: Callable[[int], object]) -> tuple[Facts, ...] | None:
    """What a mark's callable was understood to mean, each a condition of its own; None where it was not."""
    found = _learn(check)
    return None if isinstance(found, probing.Opaque) else tuple(found.alternatives)


def _callable_name(check: object) -> str:
    code = getattr(check, "__code__", None)
    name = getattr(check, "__name__", type(check).__name__)
    return f"{name}:{code.co_firstlineno}" if code is not None and name == "<lambda>" else str(name)


# ---------------------------------------------------------------- unreachable


def _find_unreachable(conditions: Sequence[Condition]) -> None:
    """Note which conditions never run because earlier ones cover them; those that never apply cover nothing."""
    alive = [entry for entry in conditions if entry.never is None and entry.predicate is not None]
    predicates = [entry.predicate for entry in alive if entry.predicate is not None]
    for index, by in unreachable(predicates).items():
        alive[index].never = f"unreachable: {alive[by].text} is declared earlier and covers it"
    decided = next((entry for entry in conditions if entry.decided), None)
    if decided is not None:  # true for the whole graph
        for entry in conditions[conditions.index(decided) + 1 :]:
            entry.never = entry.never or f"unreachable: {decided.text} is declared earlier and always holds here"


def exact_values(condition: Condition, values: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """Symbols that a compile has to fix because the condition's own facts do not say enough.

    For a callable that was not understood, and for an equality on a size of several symbols: the values of the call.
    """
    pinned: set[sympy.Symbol] = set()
    if condition.check_size is not None:
        pinned |= condition.check_size.expr.free_symbols
    for size, facts in condition.terms:
        if facts.exact is not None and not size.expr.free_symbols <= set(condition.facts):
            pinned |= size.expr.free_symbols
    return {symbol: values[symbol] for symbol in sorted(pinned, key=str) if symbol in values}
