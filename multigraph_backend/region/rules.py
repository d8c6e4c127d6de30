"""What was declared, as rules over a call's arguments.

In:  a captured graph, and the variants of its conditions.  Out: the plan that `dispatch` generates code from, the
checks of opaque conditions that this code asks, the user's names of what it reads, and sizes for which a variant can
be compiled ahead of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from multigraph_backend import _compat, events
from multigraph_backend.capture import declared, size_names
from multigraph_backend.capture.graph import CapturedGraph, NamedSize
from multigraph_backend.declare.facts import Facts
from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.options import Options
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.region import dispatch
from multigraph_backend.region.dispatch import Rule
from multigraph_backend.region.variant import Variant


def argument_names(graph: CapturedGraph) -> dict[str, str]:
    """Argument text in conditions -> the user's name of that size or integer."""
    names = {size.location.text(): name for name, size in graph.sizes.items()}
    for name, size in graph.sizes.items():
        info = graph.symbols.get(size.expr) if isinstance(size.expr, sympy.Symbol) else None
        if info is not None and info.location is not None:
            names.setdefault(info.location.text(), name)
    for index, entry in enumerate(graph.inputs):
        if entry.layout is not None:
            traced = size_names.input_name(_compat.source_name(entry.layout.source))
            name = graph.user_code.known_as(traced)
            names.setdefault(f"a[{index}].item()" if entry.number else f"a[{index}]", name)
    return names


def refuse_unknown_names(graph: CapturedGraph, options: Options) -> None:
    """Raises `declared.UnknownName` for a name of the options that the graph does not have."""
    for predicate in options.specialize:
        for name in predicate.names:
            if graph.find(name) is None:
                raise declared.UnknownName(declared.unknown_name(graph, name))
    for name, _ in options.pad if options.pad != "declared" else ():
        if graph.find(name) is None:
            raise declared.UnknownName(declared.unknown_name(graph, name))


def plan(
    graph: CapturedGraph, variants: Sequence[Variant], generic: int
) -> tuple[dispatch.Plan, dict[str, Callable[[int], bool]]]:
    """Rules of the variants that can match, over columns of argument text."""
    columns: dict[str, int] = {}
    rules = []
    checks: dict[str, Callable[[int], bool]] = {}

    def column(size: NamedSize) -> int:
        info = graph.symbols.get(size.expr) if isinstance(size.expr, sympy.Symbol) else None
        location = info.location if info is not None and info.location is not None else size.location
        return columns.setdefault(location.text(), len(columns))

    for variant in variants:
        condition = variant.condition
        if condition is None or condition.never is not None:
            continue
        terms: dict[int, Facts] = {}
        for size, facts in condition.terms:
            at = column(size)
            terms[at] = terms[at].intersect(facts) if at in terms else facts
        if condition.check is not None and condition.check_size is not None:
            name = f"check{variant.number}"
            checks[name] = _asking(variant, condition.check)
            rules.append(Rule(variant.number, tuple(terms.items()), name, column(condition.check_size)))
        else:
            rules.append(Rule(variant.number, tuple(terms.items())))
    return dispatch.plan(tuple(columns), rules, generic), checks


def _asking(variant: Variant, check: Callable[[int], object]) -> Callable[[int], bool]:
    """The opaque check as dispatch asks it: once code exists for one value, that value only; an error is a no."""
    text = variant.text

    def ask(value: int) -> bool:
        if variant.exact is not None and value != variant.exact:
            return False
        try:
            return bool(check(value))
        except Exception as error:
            if from_outside(error):
                raise
            events.warn_once(f"{text} raised", "%s raised, taken as no match: %s", text, describe(error))
            return False

    return ask


def exact(variant: Variant, args: Sequence[Any]) -> int | None:
    """The size that an opaque condition asks of, in a call with `args`."""
    size = None if variant.condition is None else variant.condition.check_size
    return None if size is None else int(size.location.read(args))


def declared_for(variant: Variant, args: Sequence[Any]) -> bool:
    """Whether what was declared holds for `args`."""
    terms = [] if variant.condition is None else variant.condition.terms
    return all(facts.holds(size.location.read(args)) for size, facts in terms)


def example(facts: Facts, near: int) -> int:
    """An integer that satisfies `facts`, close to `near` where that is possible."""
    if facts.values is not None:
        return facts.values[0]
    value = near if facts.min is None else max(near, facts.min)
    value = value if facts.max is None else min(value, facts.max)
    down = value // facts.multiple_of * facts.multiple_of
    return down if facts.holds(down) and down > 1 else down + facts.multiple_of
