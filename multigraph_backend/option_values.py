"""How the value of each option is read: what it accepts, what becomes of it, and what a message says otherwise.

In:  a `Given`, which is a value and where it was given.
Out: the value as the other parts take it, or an `OptionsError` that says which option, what is accepted, what was
given, and where.  `READERS` has a reader for each option there is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from multigraph_backend import environment, remedies
from multigraph_backend.cudagraphs import limits
from multigraph_backend.declare.buckets import Buckets
from multigraph_backend.declare.predicates import Predicate, predicate_from_json
from multigraph_backend.environment import Entries, OptionsError
from multigraph_backend.spelling import did_you_mean, shown

if TYPE_CHECKING:
    from multigraph_backend.saved_tensors.budget import Budget
    from multigraph_backend.saved_tensors.memory_goal import Goal
    from multigraph_backend.saved_tensors.rules import Rule


@dataclass(frozen=True)
class Given:
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

    def inner(self, key: Any, value: object) -> Given:
        """A part of the value, by its key or index."""
        return Given(f"{self.option}[{key!r}]", value, self.source, (*self.path, key))

    def refuse(self, expected: str, detail: str = "") -> NoReturn:
        """Raise OptionsError: the option's name, what it accepts, what was given, where, and perhaps more."""
        got = f"got {shown(self.value)}{self.origin}" + (f"; {detail}" if detail else "")
        raise OptionsError(f"option {self.option!r}: expected {expected}, {got}")


A_NAME = "a name: text in one line that is not empty"


def is_name(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()


def read_name(given: Given) -> str:
    if not isinstance(given.value, str) or not is_name(given.value):
        given.refuse(A_NAME)
    return given.value


def unknown(given: Given) -> str:
    return remedies.unknown_option(given.option, given.value, list(READERS), given.json) + given.origin


def _read_specialize(given: Given) -> tuple[Predicate, ...]:
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


def _read_pad(given: Given) -> tuple[tuple[str, Buckets], ...] | Literal["declared"]:
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


def _read_saved_tensors(given: Given) -> tuple[Rule, ...] | Literal["auto"]:
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


def _read_budget(given: Given) -> Budget | None:
    from multigraph_backend.saved_tensors.budget import Budget

    if given.value is None:
        return None
    try:
        return Budget.of(cast(float, given.value))
    except (TypeError, ValueError) as error:
        remedy = remedies.fraction(given.value) or remedies.number(given.value) or str(error)
        given.refuse("bytes (an integer), or a fraction (a float from 0.0 to 1.0)", remedy)


def _read_memory_goal(given: Given) -> Goal | None:
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


def _read_choice(*choices: str) -> Callable[[Given], str]:
    def read(given: Given) -> str:
        if not isinstance(given.value, str) or given.value not in choices:
            hint = did_you_mean(given.value, choices) if isinstance(given.value, str) else ""
            given.refuse(" or ".join(map(repr, choices)) + hint)
        return given.value

    return read


def _read_repeat(given: Given) -> object:
    if given.value is False or (isinstance(given.value, str) and given.value in ("auto", "always")):
        return given.value
    hint = did_you_mean(given.value, ("auto", "always")) if isinstance(given.value, str) else ""
    given.refuse(f"'auto', 'always' or False{hint}")


def _read_cudagraphs(given: Given) -> object:
    if given.value is False or (isinstance(given.value, str) and given.value in ("auto", "require")):
        return given.value
    hint = did_you_mean(given.value, ("auto", "require")) if isinstance(given.value, str) else ""
    given.refuse(f"'auto', 'require' or False{hint}", remedies.cudagraphs(given.value, given.json))


def _read_operators(given: Given) -> tuple[str, ...]:
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


def _read_flag(given: Given) -> bool:
    if not isinstance(given.value, bool):
        given.refuse("True or False", remedies.flag(given.value, given.json))
    return given.value


def _read_count(given: Given) -> int:
    if isinstance(given.value, bool) or not isinstance(given.value, int) or given.value < 1:
        given.refuse("a number from 1 on", remedies.number(given.value))
    return given.value


def _read_limits(given: Given) -> tuple[tuple[str, float | None], ...]:
    if given.value is None:
        return ()
    if not isinstance(given.value, Mapping):
        given.refuse(f"a mapping of {', '.join(limits.LEAST)} to numbers")
    read: dict[str, float | None] = {}
    for key, value in given.value.items():
        if key not in limits.LEAST:
            hint = did_you_mean(key, limits.LEAST) if isinstance(key, str) else ""
            if key in READERS:
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


def _read_workers(given: Given) -> tuple[tuple[str, int | bool], ...]:
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


def _read_timeout(given: Given) -> float | None:
    value = given.value
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limits.MOST_SECONDS:
        what = "a number of seconds greater than 0, or None for no limit"
        given.refuse(what, "write None" if _too_long(value) else remedies.number(value))
    return float(value)


def _read_compiler(given: Given) -> str | Callable[..., Any]:
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


def read_mode(given: Given, compiler: str | Callable[..., Any]) -> str | None:
    """The mode that was asked for; a compiler that is given it may know others than torch."""
    if given.value is None or given.value == "default":
        return None
    if compiler != "inductor" and isinstance(given.value, str) and given.value and takes_mode(compiler):
        return given.value
    try:
        known = modes()
    except RuntimeError:  # this torch has no list of them, and the backend has said so
        return None
    if not isinstance(given.value, str) or given.value not in known:
        hint = did_you_mean(given.value, known) if isinstance(given.value, str) else ""
        given.refuse(f"one of {', '.join(map(repr, known))}{hint}")
    return given.value


def takes_mode(compiler: str | Callable[..., Any]) -> bool:
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


def mode_without_effect(mode: str, compiler: str | Callable[..., Any]) -> str:
    said = f"mode {mode!r} has no effect, for the compiler is {compiler!r}, "
    if mode == "reduce-overhead":
        return f"{said}and only Inductor's code is recorded in CUDA graphs"
    return f"{said}and only Inductor tunes its code"


def _read_inductor(given: Given) -> dict[str, object]:
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


def _of_type(given: Given, kind: type | None) -> object:
    """The value, copied if mutable; refused if Inductor declares a plain type that it is not of."""
    value = given.value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is not None and kind is not type(None) and not isinstance(value, kind):
        remedy = remedies.flag(value, given.json) if kind is bool else remedies.number(value) if kind is int else ""
        given.refuse(f"a value of type {kind.__name__}", remedy)
    return value.copy() if isinstance(value, list | dict | set) else value


def modes() -> Mapping[str, Mapping[str, object]]:
    from multigraph_backend import _compat

    return _compat.inductor_modes()


READERS: dict[str, Callable[[Given], object]] = {
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
    "name": read_name,
}
