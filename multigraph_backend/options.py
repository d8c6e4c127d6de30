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
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from multigraph_backend import environment, remedies
from multigraph_backend.cudagraphs import limits
from multigraph_backend.declare.buckets import Buckets
from multigraph_backend.declare.predicates import Predicate, predicate_from_json
from multigraph_backend.environment import NAME_ATTRIBUTE, VARIABLE, Entries, OptionsError
from multigraph_backend.spelling import did_you_mean, shown

if TYPE_CHECKING:
    from multigraph_backend.saved_tensors.budget import Budget
    from multigraph_backend.saved_tensors.memory_goal import Goal
    from multigraph_backend.saved_tensors.reckoning import Reckoned
    from multigraph_backend.saved_tensors.rules import Rule

__all__ = ["DISABLE_VARIABLE", "PIECES", "VARIABLE", "Options", "OptionsError", "disabled_pieces"]

DISABLE_VARIABLE = "MULTIGRAPH_DISABLE"
_OR_ERROR = "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR"
PIECES = ("variants", "padding", "cudagraphs", "saved_tensors", "all")


def disabled_pieces(environ: Mapping[str, str]) -> frozenset[str]:
    """The pieces that ``MULTIGRAPH_DISABLE`` turns off, for finding out which one a problem comes from.

    "variants": every call runs the generic graph; "padding": no call is padded; "cudagraphs": nothing is recorded;
    "saved_tensors": nothing is packed; "all": each graph is compiled at once, as any backend would, and nothing is
    recorded, packed or padded.
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
        two by that; False: they are compiled as they stand
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
    repeat: Literal["auto", "always", False] = False
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
            if key not in _READERS:
                raise OptionsError(f"unknown option {key!r}{_unknown(value)}; valid options: {', '.join(_READERS)}")
        mode_given = given.pop("mode", None)
        read = {key: _READERS[key](value) for key, value in given.items()}
        knobs: dict[str, object] = {}
        compiler = cast("str | Callable[..., Any]", read.get("compiler", "inductor"))
        if compiler != "inductor" and read.get("cudagraphs") == "require":
            given["cudagraphs"].refuse("none", f"only Inductor's code is recorded, and the compiler is {compiler!r}")
        for key in ("inductor", "saved_tensors", "saved_tensors_budget", "memory_goal", "repeat"):
            if compiler != "inductor" and read.get(key):
                given[key].refuse("none", f"only Inductor has it, and the compiler is {compiler!r}")
        _take_over_auto(given, read)
        wanted = None if mode_given is None else _read_mode(mode_given, compiler)
        if compiler == "inductor":
            knobs.update(redirected or {})
        if wanted is not None and compiler == "inductor":
            knobs.update(_modes()[wanted])
        elif knobs and _tunes_unrecorded(knobs):
            wanted = _NO_CUDAGRAPHS
        knobs.update(cast(Mapping[str, object], read.get("inductor", {})))
        _take_over_cudagraphs(knobs, read, wanted, os.environ if environ is None else environ)
        read["cut"] = cast(tuple[str, ...], read.get("cut", ())) + cast(tuple[str, ...], read.pop("splitting_ops", ()))
        read["inductor"] = tuple(sorted(knobs.items(), key=lambda item: item[0]))
        if wanted is not None and compiler != "inductor":
            if _takes_mode(compiler):
                read["mode"] = wanted
            else:
                read["notes"] = (_mode_without_effect(wanted, compiler),)
        return Options(**cast(dict[str, Any], read), name=called)


_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


def _tunes_unrecorded(knobs: Mapping[str, object]) -> bool:
    """Whether these knobs of a redirected program are those of that mode, which says by what it lacks what it is."""
    try:
        tuned = _modes()[_NO_CUDAGRAPHS].items()
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


@dataclass(frozen=True)
class _Given:
    """The value given for an option, and where: in code, or at the `path` of keys into the environment's entries."""

    option: str
    value: object
    source: Entries | None = None
    path: environment.Keys = ()

    @property
    def origin(self) -> str:
        """Where it was given, for the end of a message; nothing for code."""
        return "" if self.source is None else f" ({self.source.place(self.path)})"

    @property
    def json(self) -> bool:
        """Whether it was written as JSON."""
        return self.source is not None

    def inner(self, key: Any, value: object) -> _Given:
        """A part of the value, by its key or index."""
        return _Given(f"{self.option}[{key!r}]", value, self.source, (*self.path, key))

    def refuse(self, expected: str, detail: str = "") -> NoReturn:
        """Raise OptionsError: the option's name, what it accepts, what was given, where, and perhaps more."""
        got = f"got {shown(self.value)}{self.origin}" + (f"; {detail}" if detail else "")
        raise OptionsError(f"option {self.option!r}: expected {expected}, {got}")


def _from_code(options: object, mode: object, name: object) -> dict[str, _Given]:
    if options is not None and not isinstance(options, Mapping):
        raise OptionsError(f"options must be a mapping of names to values, got {shown(options)}")
    given = _named(options or {})
    if mode is not None:
        if "mode" in given and given["mode"].value != mode:
            given["mode"].refuse(f"{mode!r}, as the argument mode says")
        given["mode"] = _Given("mode", mode)
    if name is not None:
        if "name" in given and given["name"].value not in (None, name):
            given["name"].refuse(f"{name!r}, as the argument name says")
        given["name"] = _Given("name", name)
    return given


def _called(given: _Given | None, models: Sequence[str], attribute: object) -> str | None:
    """The name of the model: what was given in code, else what its module carries; None where it has none."""
    if given is not None and given.value is not None:
        return _read_name(given)
    if attribute is None:
        return None
    if isinstance(attribute, str) and _is_name(attribute):
        return attribute
    owner = models[0] if models else "the module"
    raise OptionsError(f"{NAME_ATTRIBUTE} of {owner}: expected {_A_NAME}, got {shown(attribute)}")


_A_NAME = "a name: text in one line that is not empty"


def _is_name(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()


def _read_name(given: _Given) -> str:
    if not isinstance(given.value, str) or not _is_name(given.value):
        given.refuse(_A_NAME)
    return given.value


def _from_environment(environ: Mapping[str, str] | None, models: Sequence[str], name: str | None) -> dict[str, _Given]:
    found = environment.entries(os.environ if environ is None else environ)
    if found is None:
        return {}
    for key, entry in found.options.items():
        if key in _READERS and key not in (*models, name):
            example = json.dumps({"*": {key: entry}})
            where = VARIABLE if found.file is None else f"{found.file}, {found.line((key,))}: the file"
            raise OptionsError(
                f"{where} is an object of model names to options, and {key!r} is an option: for every model write "
                f"{example if len(example) <= 200 else example[:197] + '...'}"
            )
        if not isinstance(entry, dict):
            hint = remedies.no_options(key, entry, list(_READERS))
            environment.refuse_entry(found, key, f"must be an object of options, got {shown(entry)}{hint}")
    if environ is None:
        environment.note(found, models, name, os.environ)
    given: dict[str, _Given] = {}
    for key in found.applying(models, name):
        given.update(_named(found.options[key], found, (key,)))
    return given


def _unknown(given: _Given) -> str:
    return remedies.unknown_option(given.option, given.value, list(_READERS), given.json) + given.origin


def _named(
    options: Mapping[Any, object], source: Entries | None = None, path: environment.Keys = ()
) -> dict[str, _Given]:
    for key in options:
        if not isinstance(key, str):
            raise OptionsError(f"the name of an option must be a str, got {shown(key)}")
    return {key: _Given(key, value, source, (*path, key)) for key, value in options.items()}


def _read_specialize(given: _Given) -> tuple[Predicate, ...]:
    if isinstance(given.value, Mapping | Predicate):
        given.refuse("a list of conditions", "wrap it in a list")
    if not isinstance(given.value, list | tuple):
        given.refuse("a list of conditions", remedies.condition(given.value, given.json))
    predicates: list[Predicate] = []
    for index, entry in enumerate(given.value):
        here = given.inner(index, entry)
        if not isinstance(entry, Mapping | Predicate):
            here.refuse("an object of size names to values, or a predicate", remedies.condition(entry, here.json))
        try:
            predicate = entry if isinstance(entry, Predicate) else predicate_from_json(entry)
        except (TypeError, ValueError) as error:
            raise OptionsError(f"option {here.option!r}: {error}{here.origin}") from error
        if not predicate.satisfiable:
            here.refuse("a condition that some sizes satisfy", f"nothing satisfies {predicate}")
        if all(facts.unconstrained for facts in predicate.facts().values()):
            here.refuse(
                "a condition that some sizes do not satisfy",
                'the generic graph serves every size; name a size, and what holds of it: {"x[0]": 8}, '
                '{"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}',
            )
        predicates.extend(predicate.alternatives())
    return tuple(predicates)


_A_PAD = 'an object of size names to lists of sizes, such as {"x[0]": [1, 2, 4, "..."]}, or "declared"'


def _read_pad(given: _Given) -> tuple[tuple[str, Buckets], ...] | Literal["declared"]:
    if given.value is None or given.value is False:
        return ()
    if isinstance(given.value, str):
        if given.value != "declared":
            given.refuse(_A_PAD + did_you_mean(given.value, ["declared"]))
        return "declared"
    if not isinstance(given.value, Mapping):
        given.refuse(_A_PAD)
    read: dict[str, Buckets] = {}
    for name, sizes in given.value.items():
        here = given.inner(name, sizes)
        if not isinstance(name, str) or not name.strip():
            here.refuse('the name of a size, such as "x[0]"')
        if isinstance(sizes, Buckets):
            read[name] = sizes
            continue
        if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence):
            here.refuse('a list of sizes, such as [8, 16, 32] or [1, 2, 4, "..."]', "wrap it in a list")
        try:
            read[name] = Buckets.of(sizes)
        except (TypeError, ValueError) as error:
            raise OptionsError(f"option {here.option!r}: {error}{here.origin}") from error
    return tuple(read.items())


def _read_saved_tensors(given: _Given) -> tuple[Rule, ...] | Literal["auto"]:
    from multigraph_backend.saved_tensors.memory_goal import AUTO
    from multigraph_backend.saved_tensors.rules import Rule, rule_from_json

    if isinstance(given.value, str):
        if given.value != AUTO:
            given.refuse(f'a list of rules, or "auto"{did_you_mean(given.value, [AUTO])}')
        return "auto"
    if not isinstance(given.value, list | tuple):
        given.refuse("a list of rules", "wrap it in a list" if isinstance(given.value, Mapping | Rule) else "")
    rules = []
    for index, entry in enumerate(given.value):
        here = given.inner(index, entry)
        if not isinstance(entry, Mapping | Rule):
            here.refuse('a Rule, or an object with "match" and "pack"')
        try:
            rules.append(entry if isinstance(entry, Rule) else rule_from_json(entry))
        except (TypeError, ValueError) as error:
            raise OptionsError(f"option {here.option!r}: {error}{here.origin}") from error
    return tuple(rules)


def _read_budget(given: _Given) -> Budget | None:
    from multigraph_backend.saved_tensors.budget import Budget

    if given.value is None:
        return None
    try:
        return Budget.of(cast(float, given.value))
    except (TypeError, ValueError) as error:
        remedy = remedies.fraction(given.value) or remedies.number(given.value) or str(error)
        given.refuse("bytes (an integer), or a fraction (a float from 0.0 to 1.0)", remedy)


def _read_memory_goal(given: _Given) -> Goal | None:
    from multigraph_backend.saved_tensors.memory_goal import Goal

    if given.value is None:
        return None
    try:
        return Goal.of(given.value)
    except (TypeError, ValueError) as error:
        remedy = remedies.fraction(given.value) or remedies.number(given.value)
        raise OptionsError(
            f"option {given.option!r}: {error}{given.origin}" + (f"; {remedy}" if remedy else "")
        ) from error


def _take_over_auto(given: Mapping[str, _Given], read: dict[str, object]) -> None:
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


def _read_choice(*choices: str) -> Callable[[_Given], str]:
    def read(given: _Given) -> str:
        if not isinstance(given.value, str) or given.value not in choices:
            hint = did_you_mean(given.value, choices) if isinstance(given.value, str) else ""
            given.refuse(" or ".join(map(repr, choices)) + hint)
        return given.value

    return read


def _read_repeat(given: _Given) -> object:
    if given.value is False or (isinstance(given.value, str) and given.value in ("auto", "always")):
        return given.value
    hint = did_you_mean(given.value, ("auto", "always")) if isinstance(given.value, str) else ""
    given.refuse(f"'auto', 'always' or False{hint}")


def _read_cudagraphs(given: _Given) -> object:
    if given.value is False or (isinstance(given.value, str) and given.value in ("auto", "require")):
        return given.value
    hint = did_you_mean(given.value, ("auto", "require")) if isinstance(given.value, str) else ""
    given.refuse(f"'auto', 'require' or False{hint}", remedies.cudagraphs(given.value, given.json))


def _read_operators(given: _Given) -> tuple[str, ...]:
    """Names of operators; every spelling of one (`a.b`, `a::b`) as `a::b`."""
    if isinstance(given.value, str) or not isinstance(given.value, list | tuple):
        given.refuse("a list of names of operators", "wrap it in a list" if isinstance(given.value, str) else "")
    names = []
    for index, entry in enumerate(given.value):
        text = str(entry)
        if not isinstance(entry, str) or not text.strip():
            given.inner(index, entry).refuse("the name of an operator, such as 'aten::mm'")
        if remedy := remedies.operator(text):
            given.inner(index, entry).refuse("the name of an operator, such as 'aten::mm'", remedy)
        names.append(text if "::" in text else text.replace(".", "::", 1))
    return tuple(names)


def _read_flag(given: _Given) -> bool:
    if not isinstance(given.value, bool):
        given.refuse("True or False", remedies.flag(given.value, given.json))
    return given.value


def _read_count(given: _Given) -> int:
    if isinstance(given.value, bool) or not isinstance(given.value, int) or given.value < 1:
        given.refuse("a number from 1 on", remedies.number(given.value))
    return given.value


def _read_limits(given: _Given) -> tuple[tuple[str, float | None], ...]:
    if given.value is None:
        return ()
    if not isinstance(given.value, Mapping):
        given.refuse(f"a mapping of {', '.join(limits.LEAST)} to numbers")
    read: dict[str, float | None] = {}
    for key, value in given.value.items():
        if key not in limits.LEAST:
            hint = did_you_mean(key, limits.LEAST) if isinstance(key, str) else ""
            if key in _READERS:
                hint = f" (it is an option: write it beside {given.option!r})"
            raise OptionsError(
                f"option {given.option!r}: unknown limit {key!r}{hint}{given.origin}; limits: {', '.join(limits.LEAST)}"
            )
        here = given.inner(key, value)
        number = isinstance(value, int) and not isinstance(value, bool)
        if key in limits.SECONDS:
            if not (number or isinstance(value, float)) or not 0 <= cast(float, value) <= limits.MOST_SECONDS:
                here.refuse(
                    "a number of seconds from 0 on",
                    f"write {limits.MOST_SECONDS}, or less" if _too_long(value) else remedies.number(value),
                )
            read[key] = float(cast(float, value))
        elif key in limits.AMOUNTS:
            if not limits.accepts(key, value):
                here.refuse(limits.AMOUNTS[key], remedies.number(value))
            read[key] = cast("float | None", value)
        elif not number or cast(int, value) < limits.LEAST[key]:
            here.refuse(f"a number from {limits.LEAST[key]} on", remedies.number(value))
        else:
            read[key] = cast(int, value)
    return tuple(sorted(read.items()))


_WORKERS = ("count", "memory", "gpu")


def _read_workers(given: _Given) -> tuple[tuple[str, int | bool], ...]:
    if given.value is None:
        return ()
    if not isinstance(given.value, Mapping):
        given.refuse(f"a mapping of {', '.join(_WORKERS)} to values")
    read: dict[str, int | bool] = {}
    for key, value in given.value.items():
        if key not in _WORKERS:
            hint = did_you_mean(key, _WORKERS) if isinstance(key, str) else ""
            names = ", ".join(_WORKERS)
            raise OptionsError(f"option {given.option!r}: unknown key {key!r}{hint}{given.origin}; keys: {names}")
        here = given.inner(key, value)
        read[key] = _read_flag(here) if key == "gpu" else _read_count(here)
    return tuple(sorted(read.items()))


def _too_long(value: object) -> bool:
    return isinstance(value, int | float) and value > limits.MOST_SECONDS


def _read_timeout(given: _Given) -> float | None:
    value = given.value
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limits.MOST_SECONDS:
        what = "a number of seconds greater than 0, or None for no limit"
        given.refuse(what, "write None" if _too_long(value) else remedies.number(value))
    return float(value)


def _read_compiler(given: _Given) -> str | Callable[..., Any]:
    expected = "the name of a backend, or a callable of a graph module and its example inputs"
    if given.value == "multigraph":
        given.refuse(
            expected, "multigraph is what asks it: name the compiler that lowers each graph, such as 'inductor'"
        )
    if given.value == "inductor" or callable(given.value):
        return given.value
    if not isinstance(given.value, str) or not given.value:
        given.refuse(expected)
    import torch

    known = [name for name in torch.compiler.list_backends(exclude_tags=()) if name != "multigraph"]
    if given.value not in known:
        given.refuse(
            expected, f"no backend has that name{did_you_mean(given.value, known)}; backends: {', '.join(known)}"
        )
    return given.value


def _read_mode(given: _Given, compiler: str | Callable[..., Any]) -> str | None:
    """The mode that was asked for; a compiler that is given it may know others than torch."""
    if given.value is None or given.value == "default":
        return None
    if compiler != "inductor" and isinstance(given.value, str) and given.value and _takes_mode(compiler):
        return given.value
    try:
        modes = _modes()
    except RuntimeError:  # this torch has no list of them, and the backend has said so
        return None
    if not isinstance(given.value, str) or given.value not in modes:
        hint = did_you_mean(given.value, modes) if isinstance(given.value, str) else ""
        given.refuse(f"one of {', '.join(map(repr, modes))}{hint}")
    return given.value


def _takes_mode(compiler: str | Callable[..., Any]) -> bool:
    """Whether a compiler other than Inductor has a use for a mode, as far as its signature says."""
    if isinstance(compiler, str):
        from multigraph_backend import _compat

        try:
            function = _compat.lookup_compiler(compiler)
        except Exception:  # it cannot be loaded: said where it is to compile
            return False
    else:
        function = compiler
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    if (named := parameters.get("mode")) is not None:
        return named.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # torch's own backends take anything and use nothing of it
    anything = any(entry.kind is inspect.Parameter.VAR_KEYWORD for entry in parameters.values())
    return anything and not isinstance(compiler, str)


def _mode_without_effect(mode: str, compiler: str | Callable[..., Any]) -> str:
    said = f"mode {mode!r} has no effect, for the compiler is {compiler!r}, "
    if mode == "reduce-overhead":
        return f"{said}and only Inductor's code is recorded in CUDA graphs"
    return f"{said}and only Inductor tunes its code"


def _read_inductor(given: _Given) -> dict[str, object]:
    if given.value is None:
        return {}
    if not isinstance(given.value, Mapping):
        remedy = remedies.knobs(given.value, given.json)
        given.refuse("a mapping of names in torch._inductor.config to values", remedy)
    if not given.value:
        return {}
    from multigraph_backend import _compat

    try:
        known = _compat.inductor_config_names()
    except (RuntimeError, AttributeError):  # this torch differs: variants are off, and it is said
        return {}
    patches: dict[str, object] = {}
    for key, value in given.value.items():
        here = given.inner(key, value)
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name not in known:
            hint = remedies.knob(name, value, given.json) or did_you_mean(name, known)
            where = f"{hint}{given.origin}"
            raise OptionsError(f"option {here.option!r}: torch._inductor.config has no such name{where}")
        if name in patches:
            raise OptionsError(f"option {here.option!r}: {name!r} is given twice{given.origin}")
        patches[name] = _of_type(here, _compat.inductor_config_type(name))
    return patches


def _of_type(given: _Given, kind: type | None) -> object:
    """The value, copied if mutable; refused if Inductor declares a plain type that it is not of."""
    value = given.value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is not None and kind is not type(None) and not isinstance(value, kind):
        remedy = remedies.flag(value, given.json) if kind is bool else remedies.number(value) if kind is int else ""
        given.refuse(f"a value of type {kind.__name__}", remedy)
    return value.copy() if isinstance(value, list | dict | set) else value


def _modes() -> Mapping[str, Mapping[str, object]]:
    from multigraph_backend import _compat

    return _compat.inductor_modes()


_READERS: dict[str, Callable[[_Given], object]] = {
    "specialize": _read_specialize,
    "pad": _read_pad,
    "compile": _read_choice("lazy", "eager", "background"),
    "workers": _read_workers,
    "on_failure": _read_choice("fallback", "raise"),
    "compile_timeout": _read_timeout,
    "warm_start": _read_flag,
    "compiler": _read_compiler,
    "cudagraphs": _read_cudagraphs,
    "cut": _read_operators,
    "splitting_ops": _read_operators,
    "safe": _read_operators,
    "collectives": _read_choice("record", "cut"),
    "record_small": _read_flag,
    "copy_outputs": _read_flag,
    "max_recordings": _read_count,
    "limits": _read_limits,
    "inductor": _read_inductor,
    "saved_tensors": _read_saved_tensors,
    "saved_tensors_budget": _read_budget,
    "memory_goal": _read_memory_goal,
    "repeat": _read_repeat,
    "mode": lambda given: given.value,  # read with the compiler
    "name": _read_name,
}
