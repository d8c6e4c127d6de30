"""What happened and why, for people and for programs.

`explain()` reads the live regions; nothing is recorded for it on the way, beyond what dispatch keeps anyway.
As text it is for reading in a terminal, as data for programs, and `page` makes a page for browsers of it.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import fnmatch
import importlib.metadata
import inspect
import json
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from multigraph_backend import environment, events, page
from multigraph_backend.declare import marks
from multigraph_backend.options import disabled_pieces
from multigraph_backend.padding.padded import Account
from multigraph_backend.process import rank
from multigraph_backend.region import region as regions
from multigraph_backend.region import registry
from multigraph_backend.region.variant import Variant
from multigraph_backend.saved_tensors.account import SavedTensors

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.account import CodeMemory, DeviceReport, GraphReport


@dataclass(frozen=True)
class VariantReport:
    """One declared condition: its `state` is declared, compiling, ready, failed or inactive; `forms` are the
    guards of each of its forms ("True": none); `compile_seconds` over all of its forms.

    `gain`: how many times as fast as generic, over `gain_calls` calls under `measure_gains()`; None where not measured.
    `user_stack`: after a failure, the lines of the user's program that the compiler was at, where torch says so.
    `saved`: for each form, what became of the tensors that it saves for backward, where there are rules for them.
    `loaded`: all of its code came from torch's caches before a call asked for it; `past_inductor`: as that of a saved
    function, without loading Inductor.  `by_worker`: some of it was compiled in a worker process.
    `collectives`: what its newest form issues, forward and then backward; `collective_bytes`: of what goes into them,
    for the sizes of the compile.
    `memory`: what the recordings of all its forms take, where anything of it can be recorded.
    `repeated`: for its newest form, what became of blocks that come again, where the option `repeat` asks for it.
    """

    condition: str
    state: str
    calls: int
    compile_seconds: float
    reason: str | None
    forms: tuple[str, ...]
    opaque: str | None = None
    gain: float | None = None
    gain_calls: int = 0
    user_stack: str | None = None
    saved: tuple[SavedTensors, ...] = ()
    collectives: tuple[str, ...] = ()
    collective_bytes: int = 0
    memory: CodeMemory | None = None
    loaded: bool = False
    past_inductor: bool = False
    by_worker: bool = False
    repeated: str | None = None


@dataclass(frozen=True)
class PaddingReport:
    """Calls that are padded up to declared sizes: `sizes`, as text by name; `state`: declared (no call was judged yet),
    proven (operator by operator), tried (`operators` have no rule, and were tried out) or refused, for `reason`;
    `refused`: of several sizes those that are not padded, and why; `calls`: how many were padded."""

    sizes: dict[str, str]
    state: str
    calls: int
    reason: str | None = None
    refused: dict[str, str] = field(default_factory=dict)
    operators: tuple[str, ...] = ()


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
    padding: PaddingReport | None = None


@dataclass(frozen=True)
class Explanation:
    """Regions that are alive, in the order of the source; `str` is for reading.

    `stance`: torch's stance at that moment (`torch.compiler.set_stance`); `disabled`: pieces that `MULTIGRAPH_DISABLE`
    turns off; `unmet_marks`: places ("file:line") of `mark` calls whose tensors no trace has had; `late_marks`: those
    of them that came after graphs had been traced;
    `unmatched_options`: keys of `MULTIGRAPH_OPTIONS` that no model has had as a name so far;
    `recordings`: CUDA graphs of each device, of all models; `graphs`: compiled graphs on GPUs, with what their
    recordings leave out; `rank`, `world_size`: of this process among others, None where it is alone; `others`: names of
    what was compiled, where nothing of it is of the model that was asked for.
    """

    regions: tuple[RegionReport, ...] = field(default_factory=tuple)
    stance: str = "default"
    disabled: tuple[str, ...] = ()
    unmet_marks: tuple[str, ...] = ()
    late_marks: tuple[str, ...] = ()
    unmatched_options: tuple[environment.Unmatched, ...] = ()
    recordings: tuple[DeviceReport, ...] = ()
    graphs: tuple[GraphReport, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    others: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, as JSON has them."""
        loaded: dict[str, Any] = json.loads(self.to_json())
        return loaded

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(asdict(self))

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, title: str = "multigraph", said: Iterable[str] = ()
    ) -> str:
        """The same as one page for a browser, which loads nothing from anywhere; also written to `path` if given.

        `title`: of the page; `said`: lines to show where nothing was compiled.  The page has the counts of `stats()`
        too, of the moment when it is made.  What was at `path` is replaced once the page is whole.
        """
        about = {
            "multigraph": _version("multigraph"),
            "torch": str(torch.version.__version__),
            "Python": platform.python_version(),
            "": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        }
        text = page.render(self.to_dict(), events.stats(), title, about, said)
        if path is not None:
            beside = f"{os.fspath(path)}.{os.getpid()}.{threading.get_ident()}.new"
            try:
                with open(beside, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(beside, path)
            except BaseException as problem:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                if isinstance(problem, OSError) and problem.errno is not None:  # it names the file beside
                    raise OSError(problem.errno, problem.strerror, os.fspath(path)) from problem
                raise
        return text

    def _nothing(self) -> str:
        if not self.others:
            return "multigraph: nothing compiled yet"
        return f"multigraph: nothing that was compiled is of this model; names were: {', '.join(self.others)}"

    def __str__(self) -> str:
        lines = [_region_text(entry) for entry in self.regions] or [self._nothing()]
        if self.rank is not None:
            lines.insert(0, f"rank {self.rank} of {self.world_size}")
        lines += [str(entry) for entry in self.recordings if entry.pieces]
        lines += [str(entry) for entry in self.graphs if entry.cuts or entry.refused is not None]
        if self.stance != "default":
            lines.append(f"stance in force: {self.stance}")
        if self.disabled:
            lines.append(f"MULTIGRAPH_DISABLE turns off: {', '.join(self.disabled)}")
        lines += [
            f"marked at {place}: no trace has had that tensor ({_TOO_LATE if place in self.late_marks else _LOST})"
            for place in self.unmet_marks
        ]
        if self.unmatched_options:
            lines.append(environment.said_of(self.unmatched_options))
        return "\n".join(lines)


_LOST = "a clone or a slice of it, perhaps, or no call yet"
_TOO_LATE = (
    "graphs had been traced when the mark came, and one of them serves it: mark before the first call, or declare in "
    f"options; or it is {_LOST}"
)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "from a checkout"


def explain(model: object = None) -> Explanation:
    """The account of every region that is alive, or of those of one model.

    `model`: a module or function, compiled or not, or a name or glob of a module class, a function, or one model (the
    option `name`, a module's `multigraph_name`).  A module stands for its class and those of its submodules (Dynamo
    traces a submodule on its own after a graph break), and not for those with another `multigraph_name`.
    """
    alive = [entry for entry in registry.living() if isinstance(entry, regions.Region)]
    entries = everything = sorted(alive, key=lambda entry: (entry.user_code.file, entry.user_code.line, entry.serial))
    if model is not None:
        wanted = _names_of(model)
        entries = [
            entry
            for entry in entries
            if any(name in entry.user_code.names or fnmatch.filter(entry.user_code.names, name) for name in wanted)
        ]
        others = _named_otherwise(model)
        entries = [entry for entry in entries if not others(entry)]
    where = rank.current()
    return Explanation(
        _regions(entries),
        stance=regions.stance(),
        disabled=tuple(sorted(disabled_pieces(os.environ))),
        unmet_marks=marks.unmet(),
        late_marks=marks.late(),
        unmatched_options=environment.unmatched(os.environ),
        recordings=_recordings(),
        graphs=_graphs(),
        rank=None if where is None else where.rank,
        world_size=None if where is None else where.world_size,
        others=() if entries else tuple(dict.fromkeys(name for entry in everything for name in entry.user_code.names)),
    )


def _regions(entries: Sequence[regions.Region]) -> tuple[RegionReport, ...]:
    of_variant = _memory_of_variants()
    return tuple(_report(entry, entries, of_variant) for entry in entries)


def _memory_of_variants() -> Callable[[Variant], CodeMemory | None]:
    """What a variant's recordings take now."""
    runtime = sys.modules.get("multigraph_backend.cudagraphs.runtime")  # not loaded: nothing was recorded
    if runtime is None:
        return lambda variant: None
    from multigraph_backend.cudagraphs import account

    of_piece = account.of_pieces(runtime.trees())

    def of_variant(variant: Variant) -> CodeMemory | None:
        codes = [code for form in variant.forms for alive in form.lowered.codes if (code := alive()) is not None]
        return account.of_code(codes, of_piece) if codes else None

    return of_variant


def _recordings() -> tuple[DeviceReport, ...]:
    runtime = sys.modules.get("multigraph_backend.cudagraphs.runtime")  # not loaded: nothing was recorded
    if runtime is None:
        return ()
    from multigraph_backend.cudagraphs import account

    return tuple(account.of(tree) for tree in runtime.trees())


def _graphs() -> tuple[GraphReport, ...]:
    output_code = sys.modules.get("multigraph_backend.cudagraphs.output_code")
    if output_code is None:
        return ()
    from multigraph_backend.cudagraphs import account

    return account.graphs(output_code.living())


def _names_of(model: object) -> set[str]:
    if isinstance(model, str):
        return {model}
    if isinstance(model, torch.nn.Module):
        return {type(module).__name__ for module in model.modules()}
    function = inspect.unwrap(model) if callable(model) else None
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return _names_of(owner)
    name = getattr(function, "__name__", None)
    if name is None:
        raise TypeError(f"explain() takes a module, a function or a name, not {model!r}")
    return {name}


def _named_otherwise(model: object) -> Callable[[regions.Region], bool]:
    """Which regions are of a module of one of its classes that has another `multigraph_name`, or none."""
    model = getattr(model, "__self__", model)
    names: dict[str, set[object]] = {}
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        names.setdefault(type(module).__name__, set()).add(getattr(module, environment.NAME_ATTRIBUTE, None))

    def otherwise(region: regions.Region) -> bool:
        owner, models = region.user_code.owner, region.user_code.models
        return owner is not None and owner.attribute not in names.get(models[0], {owner.attribute})

    return otherwise


def _report(
    region: regions.Region,
    all_regions: Sequence[regions.Region],
    of_variant: Callable[[Variant], CodeMemory | None],
) -> RegionReport:
    linked = [other for other in all_regions if other.user_code.same_function(region.user_code) and other is not region]
    variants = tuple(_variant_report(region, variant, linked, of_variant(variant)) for variant in region.variants)
    return RegionReport(
        id=region.serial,
        linked=tuple(other.serial for other in linked),
        name=region.name,
        function=region.user_code.function,
        file=region.user_code.file,
        line=region.user_code.line,
        sizes=dict(region.sizes),
        variants=variants,
        generic=_variant_report(region, region.generic, (), of_variant(region.generic)),
        unreachable=tuple(entry.condition for entry in variants if (entry.reason or "").startswith("unreachable")),
        notes=tuple(region.notes),
        padding=None if region.padding is None else _padding_report(region.padding),
    )


def _padding_report(account: Account) -> PaddingReport:
    return PaddingReport(
        sizes={name: str(buckets) for name, buckets in account.sizes.items()},
        state=account.state,
        calls=account.calls,
        reason=account.reason,
        refused=dict(account.refused),
        operators=account.tried,
    )


def _padding_text(entry: PaddingReport) -> list[str]:
    sizes = "; ".join(f"{name} to {sizes}" for name, sizes in entry.sizes.items() if name not in entry.refused)
    if entry.state == "refused":
        names = ", ".join(entry.sizes)
        return [f"  not padded: {names}: {entry.reason}"]
    tried = f", {', '.join(entry.operators)} by trial" if entry.operators else ""
    lines = [f"  padded: {sizes}  {entry.state}{tried}  {entry.calls:>8} calls"]
    return lines + [f"  not padded: {name}: {why}" for name, why in entry.refused.items()]


_ARGUMENT = re.compile(r"a\[\d+\](?:\.(?:size|stride)\(\d+\)|\.item\(\))?")


def _named(region: regions.Region, guards: str) -> str:
    """Guards over arguments in the user's names."""
    return _ARGUMENT.sub(lambda match: region.argument_names.get(match.group(), match.group()), guards)


def _linked_reason(variant: Variant, linked: Sequence[regions.Region]) -> str | None:
    """Where a variant is served by a graph that was traced for it: torch traces size 1 apart."""
    condition = variant.condition
    if condition is None or (condition.never is not None and not condition.elsewhere):
        return None
    if condition.decided:
        return "this graph was traced for it"
    for other in linked:
        for twin in other.variants:
            if twin.text == variant.text and twin.condition is not None and twin.condition.decided:
                return f"where torch traced it as a graph of its own, that graph serves it (graph {other.serial})"
    return None


def _variant_report(
    region: regions.Region, variant: Variant, linked: Sequence[regions.Region], memory: CodeMemory | None
) -> VariantReport:
    opaque = variant.condition.opaque_because if variant.condition is not None else None
    if opaque is not None and variant.exact is not None:
        opaque = f"{opaque}; compiled for {variant.exact} alone"
    newest = variant.forms[-1].lowered.issued if variant.forms else None
    issued = () if newest is None else (*newest.forward, *newest.backward)
    return VariantReport(
        condition=variant.text,
        state=variant.state,
        calls=variant.calls,
        compile_seconds=round(variant.compile_seconds, 4),
        reason=variant.reason if variant.failures else _linked_reason(variant, linked) or variant.reason,
        forms=tuple(_named(region, form.lowered.guards.text) for form in variant.forms),
        opaque=opaque,
        gain=None if variant.gain.factor is None else round(variant.gain.factor, 3),
        gain_calls=variant.gain.calls,
        user_stack=variant.user_stack,
        saved=tuple(entry for form in variant.forms for entry in form.lowered.saved),
        collectives=tuple(map(str, issued)),
        collective_bytes=sum(entry.nbytes or 0 for entry in issued),
        memory=memory,
        loaded=bool(variant.forms) and all(form.loaded for form in variant.forms),
        past_inductor=bool(variant.forms) and all(form.lowered.past_inductor for form in variant.forms),
        by_worker=any(form.by_worker for form in variant.forms),
        repeated=variant.repeated,
    )


_LONG = 160  # characters of guards that are shown as they are
_OF_ATTRIBUTE = re.compile(r"(?:same_float\(|ordinary\()?([^\W\d][\w.\[\]']*)(?: == |, |\)).*")


def folded(guards: str, most: int = _LONG) -> str:
    """The text of guards in words, where it is long: attributes of one object that have to be as they were traced.

    `self.layers[0].eps == 1e-05 and self.layers[1].eps == 1e-05 and ...` -> `12 attributes of self.layers as traced`
    """
    if len(guards) <= most:
        return guards
    parts = _joined_by_and(guards)
    owners = [_owner(part) for part in parts]
    counts = collections.Counter(filter(None, owners))
    shown: dict[str, None] = {}
    for part, owner in zip(parts, owners, strict=True):
        if owner is None or counts[owner] < 3:
            shown[part] = None
        else:
            shown[f"{counts[owner]} attributes of {owner} as traced"] = None
    kept = list(shown)
    while len(kept) > 1 and len(" and ".join(kept)) > most:
        kept.pop()
    left = len(shown) - len(kept)
    return " and ".join([*kept, f"{left} more" if left > 1 else "one more"] if left else kept)


def _owner(guard: str) -> str | None:
    """The object whose attribute, or whose part's, a guard asks for; None where it asks for something else."""
    asked = _OF_ATTRIBUTE.fullmatch(guard)
    if asked is None or "." not in asked[1]:
        return None
    return re.split(r"\[|\._modules|\.\w+$", asked[1], maxsplit=1)[0]


def _joined_by_and(guards: str) -> list[str]:
    """The guards of a text, each as it stands; those in parentheses belong together."""
    parts, depth = [""], 0
    for word in guards.split(" and "):
        parts[-1] += f" and {word}" if parts[-1] else word
        depth += word.count("(") - word.count(")")
        if not depth:
            parts.append("")
    return [part for part in parts if part]


def _region_text(entry: RegionReport) -> str:
    title = f"graph {entry.id}: {entry.function} ({entry.file}:{entry.line})"
    lines = [f"{title}, {entry.name}" if entry.name else title]
    if entry.sizes:
        lines.append("  sizes: " + ", ".join(f"{name} = {expr}" for name, expr in entry.sizes.items()))
    width = max(len(variant.condition) for variant in (*entry.variants, entry.generic))
    for variant in (*entry.variants, entry.generic):
        line = f"  {variant.condition:<{width}}  {variant.state:<9} {variant.calls:>8} calls"
        if variant.forms:
            how = "loaded past Inductor" if variant.past_inductor else "loaded" if variant.loaded else "compiled"
            line += f"  {how} in {variant.compile_seconds:.2f} s"
            line += " by a worker" if variant.by_worker else ""
        if variant.gain is not None:
            line += f"  {variant.gain:.2f} times as fast as generic ({variant.gain_calls} calls)"
        guarded = [form for form in variant.forms if form != "True"]
        if guarded:
            line += f"  where {' | '.join(map(folded, guarded))}"
        if variant.opaque:
            line += f"  checked at each call: {variant.opaque}"
        if variant.reason:
            line += f"  ({variant.reason})"
        lines.append(line)
        if variant.user_stack:
            lines += [f"    {entry}" for entry in variant.user_stack.splitlines()]
        if variant.memory is not None and (taken := str(variant.memory)):
            lines.append(f"    {taken}")
        if variant.repeated is not None:
            lines.append(f"    {variant.repeated}")
        lines += [f"    {line}" for saved in variant.saved for line in saved.lines()]
        if variant.collectives:
            lines.append(f"    {len(variant.collectives)} collectives of {variant.collective_bytes} bytes in all:")
            lines += [f"      {collective}" for collective in variant.collectives]
    if entry.padding is not None:
        lines += _padding_text(entry.padding)
    said = {variant.reason for variant in entry.variants}
    lines += [f"  note: {note}" for note in entry.notes if note not in said]
    return "\n".join(lines)
