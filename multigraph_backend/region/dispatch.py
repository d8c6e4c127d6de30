"""Which variant runs a call: rules over sizes in, one generated Python function out.

For the rules `a[0] == 1`, `2 <= a[0] <= 64` and `a[0] % 128 == 0`, in that order, with generic as target 3:

    def find0(n0):
        best = otherwise0
        t = table0_0.get(n0, -1)
        if 0 <= t < best or best < 0 <= t:
            best = t
        t = targets0_0[bisect_right(bounds0_0, n0)]
        if 0 <= t < best or best < 0 <= t:
            best = t
        if 0 <= best < 2:
            return best
        if n0 % 128 == 0:
            return 2
        return best
    def dispatch(*a):
        n0 = a[0]
        key = n0
        seen = last[0]
        if seen[0] == key:
            t = seen[1]
        else:
            t = known0.get(key, -1)
            if t < 0:
                t = remember(known0, key, find0(n0))
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

How it stays flat: the sizes of the last call are tried first (`last`), then a table of sizes seen before (`known0`); a
new combination is looked up by `find0`: a table for equalities (`table0_0`, of one column, or of several together),
bisection for ranges, a table of all numbers below 65536 where there are many multiples, then what remains in order.
`check` stands for the guards of the code that is ready, and `code` for recorded code that `run` would only hand a list
of the arguments: one call of Python's less.  Opaque rules are asked at every call, in their place in the
order.

In: columns (Python text of each declared size over the argument tuple `a`) and rules in declared order, each a
conjunction of facts about columns, or with a callable of the user that has to be asked (opaque).
Out: source text of `dispatch(*a)`.  The first declared match wins; the last target is the generic graph.

Everything here is pure: text and tables are functions of the rules.  `install` compiles the text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from types import FunctionType
from typing import Any, Protocol

from multigraph_backend.declare.facts import Facts

MOST_REMEMBERED = 1 << 16  # sizes seen before that are kept; then the table starts anew
MANY_MULTIPLES = 8  # of one column: from here on a table says which is the first that holds
MULTIPLES_BELOW = 1 << 16  # ... for numbers below; what is above is tried in order
MOST_EQUAL = 1 << 12  # combinations of values that one rule may add to a table

NOTHING = -1


class NoProfiler:
    """Stands for torch's profiler where there is none."""

    _is_profiler_enabled = False


class Boxed(Protocol):
    """Code that is called with a list of its arguments, by what is there at that moment."""

    @property
    def run(self) -> Callable[[list[Any]], Any]: ...


# guards as a check of the argument tuple (None: there are none), call counter, code (None only where the check fails),
# and what may be called in its place with a list of the arguments
Ready = tuple[Callable[[Sequence[Any]], bool] | None, Callable[[], object], Callable[..., Any] | None, Boxed | None]


@dataclass(frozen=True)
class Rule:
    """A call goes to `target` if each column's value fits its facts and, where given, the opaque check agrees.

    `check` names the object that is asked with the value of `check_column`.
    """

    target: int
    terms: tuple[tuple[int, Facts], ...] = ()
    check: str | None = None
    check_column: int = 0


@dataclass(frozen=True)
class Intervals:
    """For one column, which target each interval of integers goes to: `targets[bisect_right(bounds, n)]`."""

    column: int
    bounds: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Multiples:
    """Many rules about multiples in one column.  `first[n]` is the first one's target, for n below MULTIPLES_BELOW."""

    column: int
    rules: tuple[Rule, ...]
    first: array[int]


@dataclass(frozen=True)
class Segment:
    """Consecutive rules without an opaque check, sorted by how they are found."""

    tables: tuple[tuple[tuple[int, ...], dict[Any, int]], ...]  # columns, value (or values) -> target
    intervals: tuple[Intervals, ...]
    multiples: tuple[Multiples, ...]
    others: tuple[Rule, ...]  # in declared order
    always: int  # the target if everything else fails, NOTHING if none


@dataclass(frozen=True)
class Plan:
    """Segments and opaque rules in turn, in declared order; `generic` is the target when none matches."""

    columns: tuple[str, ...]
    steps: tuple[Segment | Rule, ...]
    generic: int


def plan(columns: Sequence[str], rules: Sequence[Rule], generic: int) -> Plan:
    """Sort rules into tables, intervals and tests.  Targets must ascend with the declared order."""
    if any(first.target >= second.target for first, second in pairwise(rules)):
        raise ValueError("rules must be in the order of their targets")
    steps: list[Segment | Rule] = []
    pending: list[Rule] = []
    for rule in rules:
        if rule.check is None:
            pending.append(rule)
            continue
        if pending:
            steps.append(_segment(pending))
            pending = []
        steps.append(rule)
    if pending:
        steps.append(_segment(pending))
    return Plan(tuple(columns), tuple(steps), generic)


def _segment(rules: Sequence[Rule]) -> Segment:
    tables: dict[tuple[int, ...], dict[Any, int]] = {}
    ranges: dict[int, list[tuple[Facts, int]]] = {}
    multiples: dict[int, list[Rule]] = {}
    others: list[Rule] = []
    always = NOTHING
    for rule in rules:
        if not rule.terms:
            always = rule.target
            break  # what follows can never be reached
        values = [facts.values for _, facts in rule.terms if facts.values is not None]
        columns = tuple(column for column, _ in rule.terms)
        ((column, facts), *further) = rule.terms
        if len(values) == len(set(columns)) == len(columns) and prod(map(len, values)) <= MOST_EQUAL:
            table = tables.setdefault(columns, {})
            for key in values[0] if len(columns) == 1 else product(*values):
                table.setdefault(key, rule.target)
        elif further or facts.values is not None:
            others.append(rule)
        elif facts.multiple_of == 1:
            ranges.setdefault(column, []).append((facts, rule.target))
        else:
            multiples.setdefault(column, []).append(rule)
    for column, entries in list(multiples.items()):
        if len(entries) < MANY_MULTIPLES:
            others += multiples.pop(column)
    return Segment(
        tables=tuple(sorted(tables.items(), key=lambda entry: entry[0])),
        intervals=tuple(_intervals(column, entries) for column, entries in sorted(ranges.items())),
        multiples=tuple(_multiples(column, entries) for column, entries in sorted(multiples.items())),
        others=tuple(sorted(others, key=lambda rule: rule.target)),
        always=always,
    )


def _multiples(column: int, rules: Sequence[Rule]) -> Multiples:
    """Each rule marks its multiples; the first rule last, so that it wins."""
    first = array("i", [NOTHING]) * MULTIPLES_BELOW
    for rule in reversed(rules):
        ((_, facts),) = rule.terms
        low = max(0, facts.min or 0)
        start = low + -low % facts.multiple_of
        end = MULTIPLES_BELOW if facts.max is None else max(min(MULTIPLES_BELOW, facts.max + 1), start)
        count = len(range(start, end, facts.multiple_of))
        if count:
            first[start : end : facts.multiple_of] = array("i", [rule.target]) * count
    return Multiples(column, tuple(rules), first)


def _intervals(column: int, entries: Sequence[tuple[Facts, int]]) -> Intervals:
    """Cut the integers at every bound; each piece goes to the first range that holds it."""
    cuts = sorted(
        {facts.min for facts, _ in entries if facts.min is not None}
        | {facts.max + 1 for facts, _ in entries if facts.max is not None}
    )
    inside = [cuts[0] - 1, *cuts] if cuts else [0]
    targets = [next((target for facts, target in entries if facts.holds(value)), NOTHING) for value in inside]
    bounds, kept = [], [targets[0]]
    for cut, target in zip(cuts, targets[1:], strict=True):
        if target != kept[-1]:
            bounds.append(cut)
            kept.append(target)
    return Intervals(column, tuple(bounds), tuple(kept))


# ---------------------------------------------------------------- source text


def _column_names(planned: Plan) -> list[str]:
    return [f"n{index}" for index in range(len(planned.columns))]


def find_source(planned: Plan) -> str:
    """The text of the lookups, one per segment; names they use are bound by `install`."""
    names = _column_names(planned)
    lines: list[str] = []
    for index, step in enumerate(planned.steps):
        if isinstance(step, Segment):
            lines += _find_source(index, step, names)
    return "".join(f"{line}\n" for line in lines)


def source(planned: Plan) -> str:
    """The text of `dispatch(*a)`; names it uses are bound by `install`."""
    names = _column_names(planned)
    key = names[0] if len(names) == 1 else f"({', '.join(names)})"
    opaque = any(isinstance(step, Rule) for step in planned.steps)
    lines = ["def dispatch(*a):"]
    lines += [f"    {name} = {code}" for name, code in zip(names, planned.columns, strict=True)]
    if not planned.steps:
        lines.append(f"    t = {planned.generic}")
    elif not names:
        # every condition was decided when Dynamo traced: the first that holds is the whole region
        lines += _always_source(planned)
    elif opaque:
        lines += _ordered_source(planned, names, key)
    else:
        lines += [
            f"    key = {key}",
            "    seen = last[0]",
            "    if seen[0] == key:",
            "        t = seen[1]",
            "    else:",
            "        t = known0.get(key, -1)",
            "        if t < 0:",
            f"            t = remember(known0, key, find0({', '.join(names)}))",
            "        last[0] = (key, t)",
        ]
    lines += [
        "    if profiler._is_profiler_enabled:",
        "        return profiled(t, a)",
        "    check, tick, run, code = ready[t]",
        "    if check is None or check(a):",
        "        tick()",
        "        if code is not None:",
        "            return code.run([*a])",
        "        return run(*a)",
        "    return missed(t, a)",
    ]
    return "\n".join(lines) + "\n"


def _always_source(planned: Plan) -> list[str]:
    first = planned.steps[0]
    if not isinstance(first, Segment):
        raise ValueError("an opaque rule needs a column")
    return [f"    t = {first.always if first.always != NOTHING else planned.generic}"]


def _ordered_source(planned: Plan, names: Sequence[str], key: str) -> list[str]:
    """Segments and opaque rules in turn, each tried while nothing matched."""
    lines = [f"    key = {key}", "    t = -1"]
    for index, step in enumerate(planned.steps):
        if isinstance(step, Rule):
            tests = [_term_source(names[column], facts) for column, facts in step.terms]
            tests.append(f"{step.check}({names[step.check_column]})")
            lines += [f"    if t < 0 and {' and '.join(tests)}:", f"        t = {step.target}"]
            continue
        lines += [
            "    if t < 0:",
            f"        t = known{index}.get(key, -2)",
            "        if t == -2:",
            f"            t = remember(known{index}, key, find{index}({', '.join(names)}))",
        ]
    lines += ["    if t < 0:", f"        t = {planned.generic}"]
    return lines


def _find_source(index: int, segment: Segment, names: Sequence[str]) -> list[str]:
    lines = []
    for many in segment.multiples:
        name = names[many.column]
        lines.append(f"def scan{index}_{many.column}({name}):")
        for rule in many.rules:
            lines += [f"    if {_term_source(name, rule.terms[0][1])}:", f"        return {rule.target}"]
        lines.append(f"    return {NOTHING}")
    lines.append(f"def find{index}({', '.join(names)}):")
    lines.append(f"    best = otherwise{index}")
    for target in _target_sources(index, segment, names):
        lines += [f"    t = {target}", "    if 0 <= t < best or best < 0 <= t:", "        best = t"]
    for rule in segment.others:
        tests = " and ".join(_term_source(names[column], facts) for column, facts in rule.terms)
        lines += [
            f"    if 0 <= best < {rule.target}:",
            "        return best",
            f"    if {tests}:",
            f"        return {rule.target}",
        ]
    lines.append("    return best")
    return lines


def _target_sources(index: int, segment: Segment, names: Sequence[str]) -> list[str]:
    """One expression for each way of finding a target, NOTHING if it finds none."""
    found = []
    for columns, _ in segment.tables:
        key = ", ".join(names[column] for column in columns)
        found.append(f"{_table_name(index, columns)}.get({key if len(columns) == 1 else f'({key})'}, {NOTHING})")
    for entry in segment.intervals:
        where = f"{index}_{entry.column}"
        found.append(f"targets{where}[bisect_right(bounds{where}, {names[entry.column]})]")
    for many in segment.multiples:
        where, name = f"{index}_{many.column}", names[many.column]
        found.append(f"first{where}[{name}] if 0 <= {name} < {MULTIPLES_BELOW} else scan{where}({name})")
    return found


def _table_name(index: int, columns: Sequence[int]) -> str:
    return "_".join(["table" + str(index), *map(str, columns)])


def _term_source(name: str, facts: Facts) -> str:
    if facts.values is not None:
        return f"{name} == {facts.values[0]}" if len(facts.values) == 1 else f"{name} in {facts.values}"
    parts = []
    if facts.min is not None and facts.max is not None:
        parts.append(f"{facts.min} <= {name} <= {facts.max}")
    elif facts.min is not None:
        parts.append(f"{name} >= {facts.min}")
    elif facts.max is not None:
        parts.append(f"{name} <= {facts.max}")
    if facts.multiple_of > 1:
        parts.append(f"{name} % {facts.multiple_of} == 0")
    return " and ".join(parts) or "True"


def _remember(table: dict[Any, int], key: Any, target: int) -> int:
    if len(table) >= MOST_REMEMBERED:
        table.clear()
    table[key] = target
    return target


def install(
    planned: Plan,
    ready: Sequence[Ready],
    missed: Callable[[int, tuple[Any, ...]], Any],
    checks: Mapping[str, Callable[[int], bool]],
    profiler: Any = NoProfiler,
    profiled: Callable[[int, tuple[Any, ...]], Any] | None = None,
) -> Callable[..., Any]:
    """Compile the generated text.

    `missed(target, args)` runs a call for which `ready[target]` has no code or its guards fail.  Entries of
    `ready` may be replaced at any time.  `profiled(target, args)` runs the calls while `profiler._is_profiler_enabled`.
    """
    lookups: dict[str, Any] = {"bisect_right": bisect_right}
    calls: dict[str, Any] = {
        "ready": ready,
        "missed": missed,
        "last": [(None, planned.generic)],
        "remember": _remember,
        "profiler": profiler,
        "profiled": profiled,
        **checks,
    }
    opaque = any(isinstance(step, Rule) for step in planned.steps)
    for index, step in enumerate(planned.steps):
        if not isinstance(step, Segment):
            continue
        calls[f"known{index}"] = {}
        unmatched = NOTHING if opaque else planned.generic
        lookups[f"otherwise{index}"] = step.always if step.always != NOTHING else unmatched
        for columns, table in step.tables:
            lookups[_table_name(index, columns)] = table
        for entry in step.intervals:
            lookups[f"targets{index}_{entry.column}"] = entry.targets
            lookups[f"bounds{index}_{entry.column}"] = entry.bounds
        for many in step.multiples:
            lookups[f"first{index}_{many.column}"] = many.first
    # the text is made above, from integers.  Each function is taken out of the namespace that it lives in: without a
    # cycle, regions end at once with the code that Dynamo drops
    finds = [f"find{index}" for index, step in enumerate(planned.steps) if isinstance(step, Segment)]
    exec(compile(find_source(planned), "<multigraph lookups>", "exec"), lookups)
    calls.update({name: lookups.pop(name) for name in finds})
    for name in [name for name in lookups if name.startswith("scan")]:
        lookups[name] = FunctionType(lookups[name].__code__, {})
    exec(compile(source(planned), "<multigraph dispatcher>", "exec"), calls)
    function: Callable[..., Any] = calls.pop("dispatch")
    return function
