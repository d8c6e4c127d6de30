"""The user's options, read once, checked once, and never again in doubt.

`torch.compile(model, backend="multigraph", options={...})` passes a bare dict, a server may pass none at all
and set an environment variable instead, and a mistyped key that is silently dropped costs a day. All of it
ends here, in one frozen `Options`, which every other part reads.

In:  the dict given in code, the mode, the environment variable ``MULTIGRAPH_OPTIONS``, the names of the
     model.
Out: an `Options`, or an `OptionsError` that says which option, what is accepted, what was given, and where.

Invariant: an `Options` that `Options.build` returned holds only values that the other parts accept as they
are. Nothing process-wide is changed: what the user wants of Inductor is kept as patches, to be applied around
each compile.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from multigraph_backend import environment, remedies
from multigraph_backend.declare.buckets import Buckets
from multigraph_backend.declare.predicates import Predicate
from multigraph_backend.environment import NAME_ATTRIBUTE, VARIABLE, Entries, OptionsError
from multigraph_backend.option_values import (
    A_NAME,
    READERS,
    Given,
    is_name,
    mode_without_effect,
    modes,
    read_mode,
    read_name,
    takes_mode,
    unknown,
)
from multigraph_backend.spelling import did_you_mean, shown

if TYPE_CHECKING:
    from multigraph_backend.saved_tensors.budget import Budget
    from multigraph_backend.saved_tensors.memory_goal import Goal
    from multigraph_backend.saved_tensors.reckoning import Reckoned
    from multigraph_backend.saved_tensors.rules import Rule

__all__ = ["DISABLE_VARIABLE", "PIECES", "VARIABLE", "Options", "OptionsError", "disabled_pieces"]

DISABLE_VARIABLE = "MULTIGRAPH_DISABLE"
_OR_ERROR = "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR"
PIECES = (
    "variants", "padding", "cudagraphs", "native_calls", "patched_inputs", "saved_tensors", "stored_code",
    "kernels_together", "all",
)  # fmt: skip


def disabled_pieces(environ: Mapping[str, str]) -> frozenset[str]:
    """The pieces that ``MULTIGRAPH_DISABLE`` turns off, for finding out which one a problem comes from.

    "variants": every call runs the generic graph; "padding": no call is padded; "cudagraphs": nothing is recorded;
    "native_calls": what is recorded is called by way of Python; "patched_inputs": inputs that move are copied into
    recordings; "saved_tensors": nothing is packed; "stored_code": saved functions ask Inductor for their code;
    "kernels_together": each C++ kernel is compiled by itself; "all": each graph is compiled at once, as any backend
    would, and nothing is recorded, packed or padded.
    Raises OptionsError for a name that is none of these.
    """
    return _listed(environ, DISABLE_VARIABLE, "piece", PIECES)


def _listed(environ: Mapping[str, str], variable: str, kind: str, known: Sequence[str]) -> frozenset[str]:
    names = [name.strip() for name in environ.get(variable, "").split(",")]
    for name in filter(None, names):
        if name not in known:
            raise OptionsError(
                f"{variable}: unknown {kind} {name!r}{did_you_mean(name, known)}; {kind}s: {', '.join(known)}"
            )
    return frozenset(filter(None, names))


@dataclass(frozen=True)
class Options:
    """What the user asked for. Hashable, and equal by value.

    specialize: conditions to compile variants for, in the order declared; none holds an `In`
    pad: sizes that calls are padded up to, by the name of the size; "declared": those that `specialize` lists
    compile: "lazy", in the first call that matches; "eager", all declared ones at once; or "background", in worker
        processes while generic serves
    workers: of "background", sorted: "count", how many at a time; "memory", bytes that each may take; "gpu", whether
        one may take memory of a GPU, by default only where tuning was asked for
    on_failure: what becomes of a call whose variant fails to compile: "fallback", generic; "raise", an error
    compile_timeout: seconds that a late compile may take before the call goes on without it; None: no limit
    warm_start: whether it is noted what calls use, and loaded from torch's caches when a later process begins to use it
    compiler: what lowers each graph, a backend's name or a callable of a graph module and its example inputs
    cudagraphs: "auto" records what can be recorded on a GPU; "require" also raises where something cannot; False:
        nothing is recorded
    cut: operators that no recording may hold, by name, `namespace::op`, `namespace::op.overload`, or a glob
    safe: custom operators in Python that recordings may hold: they read and change nothing but their arguments
    collectives: "record" lets recordings hold collectives of backends that can be recorded (NCCL); "cut": none does
    record_small: whether pieces are recorded that cost more as recordings than they save
    copy_outputs: whether every output of a recording is handed out as a copy, in memory of its own from the start: its
        address stays what it is, for those who keep addresses (DLPack, `__cuda_array_interface__`, a captured graph)
    max_recordings: recordings of one piece, for the same sizes and after the same recording, before parameters that
        come at further addresses are copied at each call
    limits: what recordings of this model may cost, by the names of `limits.LEAST`, sorted; in place of the process's
    inductor: patches of Inductor's configuration, sorted by name; those of the mode are among them
    saved_tensors: rules for what is saved for backward, the first that matches decides; none: nothing is packed
    saved_tensors_budget: how much may be saved for backward; then the rules say what may be done, and it how much of
        it; None: all that the rules say
    memory_goal: what a training step may need in all; then the rules say what may be done, and it how much of it
    reckoned: the goal in bytes, and what this process holds beside; filled in when a graph is compiled
    repeat: "always" compiles blocks of a graph that come again once, and calls them; "auto" where no kernel is cut in
        two by that; False: they are compiled as they stand; False, too, where the compiler is not Inductor
    name: what this model is called among others of its class: in reports and messages, and as a key of the environment
    mode: for a compiler other than Inductor that has a parameter of that name, and None otherwise
    notes: what was asked for and cannot be had, for reports
    """

    specialize: tuple[Predicate, ...] = ()
    pad: tuple[tuple[str, Buckets], ...] | Literal["declared"] = ()
    compile: Literal["lazy", "eager", "background"] = "lazy"
    workers: tuple[tuple[str, int | bool], ...] = ()
    on_failure: Literal["fallback", "raise"] = "fallback"
    compile_timeout: float | None = 600.0
    warm_start: bool = True
    compiler: str | Callable[..., Any] = "inductor"
    cudagraphs: Literal["auto", "require", False] = "auto"
    cut: tuple[str, ...] = ()
    safe: tuple[str, ...] = ()
    collectives: Literal["record", "cut"] = "record"
    record_small: bool = False
    copy_outputs: bool = False
    max_recordings: int = 5
    limits: tuple[tuple[str, float | None], ...] = ()
    inductor: tuple[tuple[str, object], ...] = ()
    saved_tensors: tuple[Rule, ...] = ()
    saved_tensors_budget: Budget | None = None
    memory_goal: Goal | None = None
    reckoned: Reckoned | None = dataclasses.field(default=None, repr=False)
    repeat: Literal["auto", "always", False] = "auto"
    name: str | None = None
    mode: str | None = None
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __hash__(self) -> int:
        # Callables and the values of patches take no part: they may be unhashable.
        compiler = self.compiler if isinstance(self.compiler, str) else None
        knobs = tuple(name for name, _ in self.inductor)
        others = self.recording, knobs, self.saved_tensors, self.saved_tensors_budget, self.memory_goal, self.repeat
        return hash((self.specialize, self.pad, self.compile, self.on_failure, self.compile_timeout, compiler, *others))

    @property
    def recording(self) -> tuple[object, ...]:
        """All that says what is recorded, and how."""
        return (
            self.cudagraphs,
            self.cut,
            self.safe,
            self.collectives,
            self.record_small,
            self.max_recordings,
            self.copy_outputs,
            self.limits,
            bool(self.pad),
        )

    @property
    def packing(self) -> bool:
        """Whether anything may be done with saved tensors."""
        return bool(self.saved_tensors) or self.saved_tensors_budget is not None or self.memory_goal is not None

    def without(self, disabled: Collection[str]) -> Options:
        """With the `disabled_pieces` off that are options; "all" turns off each of these."""
        kept = self
        if not {"cudagraphs", "all"}.isdisjoint(disabled):
            kept = dataclasses.replace(kept, cudagraphs=False)
        if not {"saved_tensors", "all"}.isdisjoint(disabled):
            kept = kept.without_packs()
        if not {"padding", "all"}.isdisjoint(disabled):
            kept = dataclasses.replace(kept, pad=())
        if not {"variants", "all"}.isdisjoint(disabled):
            kept = dataclasses.replace(kept, specialize=())
        return kept

    def without_packs(self) -> Options:
        return dataclasses.replace(self, saved_tensors=(), saved_tensors_budget=None, memory_goal=None, reckoned=None)

    def reckoned_for(self, args: Sequence[object]) -> Options:
        """With the memory goal in bytes, for this process and a training graph over `args`; the same without a goal."""
        if self.memory_goal is None or self.reckoned is not None:
            return self
        from multigraph_backend.saved_tensors import holding, memory_goal

        found = holding.reckon(self.memory_goal, args)
        rules = self.saved_tensors
        if self.memory_goal.auto:
            on_gpu = any(getattr(arg, "is_cuda", False) for arg in args)
            rules = (*rules, *memory_goal.default_rules("cuda" if on_gpu else "cpu", found.goal is not None))
        return dataclasses.replace(self, saved_tensors=rules, reckoned=found)

    @staticmethod
    def build(
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
        model_names: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        name: str | None = None,
        attribute: object = None,
        redirected: Mapping[str, object] | None = None,
    ) -> Options:
        """Merge and check what was asked for.

        options: as given to `torch.compile`; a key replaces the same key of the environment
        mode: as given to `torch.compile`; replaces the key "mode", which both sources may hold too
        model_names: what the environment may call this model, such as its class and "forward"
        environ: the environment; if None, that of the process, where keys that match no model are noted
        name: as given to `torch.compile`, from torch 2.15 on; the same as the key "name"
        attribute: the module's `multigraph_name`, which names it where nothing in code does
        redirected: knobs that a program gave to Inductor whose graphs are multigraph's now; all else goes before them

        ``MULTIGRAPH_OPTIONS`` is a JSON object of names or globs to options, or the path of a file that holds it; which
        of its entries apply, and in which order, is said at `Entries.applying`.

        Raises OptionsError.
        """
        in_code = _from_code(options, mode, name)
        called = _called(in_code.pop("name", None), model_names, attribute)
        given = _from_environment(environ, model_names, called)
        if "name" in given:
            why = "options are looked up here by the name; it is given in code, or by the module's multigraph_name"
            given["name"].refuse("none", why)
        given.update(in_code)
        for key, value in given.items():
            if key not in READERS:
                raise OptionsError(f"unknown option {key!r}{unknown(value)}; valid options: {', '.join(READERS)}")
        mode_given = given.pop("mode", None)
        read = {key: READERS[key](value) for key, value in given.items()}
        knobs: dict[str, object] = {}
        compiler = cast("str | Callable[..., Any]", read.get("compiler", "inductor"))
        if compiler != "inductor" and read.get("cudagraphs") == "require":
            given["cudagraphs"].refuse("none", f"only Inductor's code is recorded, and the compiler is {compiler!r}")
        for key in ("inductor", "saved_tensors", "saved_tensors_budget", "memory_goal", "repeat"):
            if compiler != "inductor" and read.get(key):
                given[key].refuse("none", f"only Inductor has it, and the compiler is {compiler!r}")
        if compiler != "inductor":
            read["repeat"] = False
        _take_over_auto(given, read)
        wanted = None if mode_given is None else read_mode(mode_given, compiler)
        if compiler == "inductor":
            knobs.update(redirected or {})
        if wanted is not None and compiler == "inductor":
            knobs.update(modes()[wanted])
        elif knobs and _tunes_unrecorded(knobs):
            wanted = _NO_CUDAGRAPHS
        knobs.update(cast(Mapping[str, object], read.get("inductor", {})))
        _take_over_cudagraphs(knobs, read, wanted, os.environ if environ is None else environ)
        read["cut"] = cast(tuple[str, ...], read.get("cut", ())) + cast(tuple[str, ...], read.pop("splitting_ops", ()))
        read["inductor"] = tuple(sorted(knobs.items(), key=lambda item: item[0]))
        if wanted is not None and compiler != "inductor":
            if takes_mode(compiler):
                read["mode"] = wanted
            else:
                read["notes"] = (mode_without_effect(wanted, compiler),)
        return Options(**cast(dict[str, Any], read), name=called)


_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


def _tunes_unrecorded(knobs: Mapping[str, object]) -> bool:
    """Whether these knobs of a redirected program are those of that mode, which says by what it lacks what it is."""
    try:
        tuned = modes()[_NO_CUDAGRAPHS].items()
    except (RuntimeError, KeyError):
        return False
    return "triton.cudagraphs" not in knobs and all(knobs.get(key) == value for key, value in tuned)


def _take_over_cudagraphs(
    knobs: dict[str, object], read: dict[str, object], mode: str | None, environ: Mapping[str, str]
) -> None:
    """What Inductor's own knobs, modes and environment say of recordings, as the option; it decides where it is given.

    `mode="reduce-overhead"` asks for what is done anyway; a mode without recordings, or `triton.cudagraphs` off, for
    none; `triton.cudagraph_or_error` for "require".  With `cudagraphs=False` Inductor's knobs stay its own.
    """
    chosen = read.get("cudagraphs")
    if chosen is False or read.get("compiler", "inductor") != "inductor":
        return
    if chosen is None:
        if knobs.get("triton.cudagraphs") is False or (mode or "").endswith("no-cudagraphs"):
            read["cudagraphs"] = False
            return
        if knobs.get("triton.cudagraph_or_error", environ.get(_OR_ERROR) == "1"):
            read["cudagraphs"] = "require"
    knobs.pop("triton.cudagraph_or_error", None)
    knobs.pop("triton.cudagraphs", None)


def _from_code(options: object, mode: object, name: object) -> dict[str, Given]:
    if options is not None and not isinstance(options, Mapping):
        raise OptionsError(f"options must be a mapping of names to values, got {shown(options)}")
    given = _named(options or {})
    if mode is not None:
        if "mode" in given and given["mode"].value != mode:
            given["mode"].refuse(f"{mode!r}, as the argument mode says")
        given["mode"] = Given("mode", mode)
    if name is not None:
        if "name" in given and given["name"].value not in (None, name):
            given["name"].refuse(f"{name!r}, as the argument name says")
        given["name"] = Given("name", name)
    return given


def _called(given: Given | None, models: Sequence[str], attribute: object) -> str | None:
    """The name of the model: what was given in code, else what its module carries; None where it has none."""
    if given is not None and given.value is not None:
        return read_name(given)
    if attribute is None:
        return None
    if isinstance(attribute, str) and is_name(attribute):
        return attribute
    owner = models[0] if models else "the module"
    raise OptionsError(f"{NAME_ATTRIBUTE} of {owner}: expected {A_NAME}, got {shown(attribute)}")


def _from_environment(environ: Mapping[str, str] | None, models: Sequence[str], name: str | None) -> dict[str, Given]:
    found = environment.entries(os.environ if environ is None else environ)
    if found is None:
        return {}
    for key, entry in found.options.items():
        if key in READERS and key not in (*models, name):
            example = json.dumps({"*": {key: entry}})
            where = VARIABLE if found.file is None else f"{found.file}, {found.line((key,))}: the file"
            raise OptionsError(
                f"{where} is an object of model names to options, and {key!r} is an option: for every model write "
                f"{example if len(example) <= 200 else example[:197] + '...'}"
            )
        if not isinstance(entry, dict):
            hint = remedies.no_options(key, entry, list(READERS))
            environment.refuse_entry(found, key, f"must be an object of options, got {shown(entry)}{hint}")
    if environ is None:
        environment.note(found, models, name, os.environ)
    given: dict[str, Given] = {}
    for key in found.applying(models, name):
        given.update(_named(found.options[key], found, (key,)))
    return given


def _named(
    options: Mapping[Any, object], source: Entries | None = None, path: environment.Keys = ()
) -> dict[str, Given]:
    for key in options:
        if not isinstance(key, str):
            raise OptionsError(f"the name of an option must be a str, got {shown(key)}")
    return {key: Given(key, value, source, (*path, key)) for key, value in options.items()}


def _take_over_auto(given: Mapping[str, Given], read: dict[str, object]) -> None:
    """`"auto"` is a goal with rules of its own: the one that is given, or as little time as possible."""
    auto, goal = read.get("saved_tensors") == "auto", cast("Goal | None", read.get("memory_goal"))
    if not auto and goal is None:
        return
    from multigraph_backend.saved_tensors.memory_goal import Goal

    if auto or (goal is not None and not read.get("saved_tensors")):
        read["memory_goal"] = dataclasses.replace(goal or Goal(), auto=True)
    if auto:
        read["saved_tensors"] = ()
    if read.get("saved_tensors_budget") is not None:
        which = "memory_goal" if goal is not None else 'saved_tensors="auto"'
        given["saved_tensors_budget"].refuse("none", f"{which} chooses how much is saved; leave one of them out")
