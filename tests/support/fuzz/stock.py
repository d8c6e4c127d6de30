"""Why torch's own `mark_dynamic(specialize_on=...)` fails on a program, by counterfactuals.

A failing case is put down to a defect only where the same program without that one circumstance is right. They
are row 2, two dynamic sizes that are equal when a specialization is compiled; row 3, a batch equal to a hidden size;
row 9, a lambda that needs a concrete bool; row 7, a marked size that the graph does not take. (Rows of the table in
`docs/specialization.md`; that the program is right with nothing declared is a condition for being a failure at all.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from .differential import Verdict, run_case
from .programs import Program, generate

FAILED = ("wrong", "error")
APART = (20, 40, 80)  # hidden sizes in the proportions of the usual ones, equal to no batch


def failures(profile: str, compiler: str, seeds: Iterable[int]) -> Iterator[tuple[Program, Verdict]]:
    """The programs of these seeds that stock gets wrong."""
    for seed in seeds:
        program = generate(seed, profile)
        verdict = run_case(program, compiler, "stock")
        if verdict.outcome in FAILED:
            yield program, verdict


def classify(program: Program, verdict: Verdict, compiler: str) -> int | None:
    """The row of the table that explains a failure of stock; None where no single one does."""
    if "is not in list" in verdict.detail:
        return 7

    def right(p: Program) -> bool:
        return run_case(p, compiler, "stock").outcome == "right"

    if any(p.opaque or p.kind == "always" for m in program.marks for p in m.specialize_on):
        return 9 if right(_plainly_spelled(program)) else None
    if right(_hidden_apart(program)):
        return 3
    return 2 if right(_axes_apart(_hidden_apart(program))) else None


def _plainly_spelled(program: Program) -> Program:
    """The same conditions in comparisons that a symbol can answer; those that have no such form are left out."""
    return replace(
        program,
        marks=tuple(
            replace(
                m,
                specialize_on=tuple(
                    replace(p, spelling="plain") for p in m.specialize_on if p.kind not in ("in", "always")
                ),
            )
            for m in program.marks
        ),
    )


def _hidden_apart(program: Program) -> Program:
    """The same program with other hidden sizes; itself, where that would change more than the numbers."""
    other = generate(program.seed, program.profile, hidden=APART)

    def shape(p: Program) -> list[str]:
        return [re.sub(r"\d+", "#", line) for line in (*p.body.lines, *p.body.returns)]

    return other if shape(other) == shape(program) and other.marks == program.marks else program


def _axes_apart(program: Program) -> Program:
    """The same program, called with sizes that differ between its axes wherever they were equal."""
    calls = []
    for call in program.calls:
        sizes = dict(call.sizes)
        if len(set(sizes.values())) < len(sizes):
            specialized = next((m for m in program.marks if m.specialize_on), None)
            kept = (
                next(t.dims[specialized.dim] for t in program.tensors if t.name == specialized.tensor)
                if specialized
                else ""
            )
            for i, axis in enumerate(axis for axis in sizes if axis != kept):
                sizes[axis] += 27 + i
        calls.append(replace(call, sizes=sizes))
    return replace(program, calls=tuple(calls))
