"""What happened and why, for people and for programs.

`explain()` reads the live regions; nothing is recorded for it on the way, beyond what dispatch keeps anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from multigraph_backend import region as regions
from multigraph_backend.variant import Variant


@dataclass(frozen=True)
class VariantReport:
    """One declared condition: its `state` is declared, compiling, ready, failed or inactive; `forms` are the
    conditions that its compiles added ("True": none); `compile_seconds` over all of its forms."""

    condition: str
    state: str
    calls: int
    compile_seconds: float
    reason: str | None
    forms: tuple[str, ...]
    opaque: str | None = None


@dataclass(frozen=True)
class RegionReport:
    """One Dynamo graph: the user's function, its named sizes (name to expression), and what runs it.

    `linked` are the ids of other graphs of the same function: torch traces size 1, and sizes it takes for constants,
    apart.
    """

    id: int
    linked: tuple[int, ...]
    name: str | None
    function: str
    file: str
    line: int
    sizes: dict[str, str]
    variants: tuple[VariantReport, ...]
    generic: VariantReport
    unreachable: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """All regions that are alive, in no particular order of importance; `str` is for reading."""

    regions: tuple[RegionReport, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, as JSON has them."""
        loaded: dict[str, Any] = json.loads(self.to_json())
        return loaded

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        if not self.regions:
            return "multigraph: nothing compiled yet"
        return "\n".join(_region_text(entry) for entry in self.regions)


def explain() -> Explanation:
    """The account of every region that is alive."""
    entries = sorted(regions.live, key=lambda entry: (entry.code.file, entry.code.line, entry.serial))
    return Explanation(tuple(_report(entry, entries) for entry in entries))


def _report(region: regions.Region, all_regions: Sequence[regions.Region]) -> RegionReport:
    linked = [other for other in all_regions if other.code.same_place(region.code) and other is not region]
    variants = tuple(_variant_report(region, variant, linked) for variant in region.variants)
    return RegionReport(
        id=region.serial,
        linked=tuple(other.serial for other in linked),
        name=region.name,
        function=region.code.function,
        file=region.code.file,
        line=region.code.line,
        sizes=dict(region.sizes),
        variants=variants,
        generic=_variant_report(region, region.generic, ()),
        unreachable=tuple(entry.condition for entry in variants if (entry.reason or "").startswith("unreachable")),
        notes=tuple(region.notes),
    )


_ARGUMENT = re.compile(r"a\[\d+\](?:\.(?:size|stride)\(\d+\)|\.item\(\))?")


def _named(region: regions.Region, code: str) -> str:
    """A condition over arguments in the user's names."""
    return _ARGUMENT.sub(lambda match: region.argument_names.get(match.group(), match.group()), code)


def _linked_reason(variant: Variant, linked: Sequence[regions.Region]) -> str | None:
    """Where a variant is served by a graph that was traced for it: torch traces size 1 apart."""
    condition = variant.condition
    if condition is None or condition.never is not None:
        return None
    if condition.decided:
        return "this graph was traced for it"
    for other in linked:
        for twin in other.variants:
            if twin.text == variant.text and twin.condition is not None and twin.condition.decided:
                return f"where torch traced it as a graph of its own, that graph serves it (graph {other.serial})"
    return None


def _variant_report(region: regions.Region, variant: Variant, linked: Sequence[regions.Region]) -> VariantReport:
    opaque = variant.condition.opaque_because if variant.condition is not None else None
    if opaque is not None and variant.exact is not None:
        opaque = f"{opaque}; compiled for {variant.exact} alone"
    return VariantReport(
        condition=variant.text,
        state=variant.state,
        calls=variant.calls,
        compile_seconds=round(variant.compile_seconds, 4),
        reason=variant.reason or _linked_reason(variant, linked),
        forms=tuple(_named(region, form.lowered.condition.code) for form in variant.forms),
        opaque=opaque,
    )


def _region_text(entry: RegionReport) -> str:
    title = f"graph {entry.id}: {entry.function} ({entry.file}:{entry.line})"
    lines = [f"{title}, {entry.name}" if entry.name else title]
    if entry.sizes:
        lines.append("  sizes: " + ", ".join(f"{name} = {expr}" for name, expr in entry.sizes.items()))
    width = max(len(variant.condition) for variant in (*entry.variants, entry.generic))
    for variant in (*entry.variants, entry.generic):
        line = f"  {variant.condition:<{width}}  {variant.state:<9} {variant.calls:>8} calls"
        if variant.forms:
            line += f"  compiled in {variant.compile_seconds:.2f} s"
        added = [form for form in variant.forms if form != "True"]
        if added:
            line += f"  where {' | '.join(added)}"
        if variant.opaque:
            line += f"  checked at each call: {variant.opaque}"
        if variant.reason:
            line += f"  ({variant.reason})"
        lines.append(line)
    said = {variant.reason for variant in entry.variants}
    lines += [f"  note: {note}" for note in entry.notes if note not in said]
    return "\n".join(lines)
