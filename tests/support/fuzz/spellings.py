"""Random options, written as they are read or in one other way: each is understood, or an error or a hint says how.

In: a seed, and a captured graph that has the sizes of `SIZES`.  Out: what was written, or `Silent` where multigraph
took it for something else without a word, or said nothing of the right spelling.

    written = play(seed, graph)

What is written comes by one of three ways: in code, in `MULTIGRAPH_OPTIONS`, or as a mark on a tensor.  A condition
that is understood is held against brute force on sizes from the edges.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multigraph_backend.capture import declared
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.declare.marks import mark
from multigraph_backend.options import VARIABLE, Options, OptionsError
from tests.support.fuzz.declarations import Condition, Predicate, random_predicate

SIZES = ("x[0]", "x[1]", "y[0]", "y[1]")
NAMES = (*SIZES, "n")
EDGES = (-1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 24, 32, 513)

# what each option may be, as JSON has it, and what it may not; the text is part of the error
RIGHT: Mapping[str, tuple[Any, ...]] = {
    "compile": ("lazy", "eager"),
    "on_failure": ("fallback", "raise"),
    "compile_timeout": (None, 0.5, 1, 600),
    "compiler": ("eager", "aot_eager", "inductor"),
    "cudagraphs": ("auto", False),
    "cut": ([], ["aten::mm"], ["aten.mm", "aten::mul.Tensor"]),
    "splitting_ops": ([], ["aten::mm"]),
    "safe": ([], ["mylib::double"]),
    "collectives": ("record", "cut"),
    "record_small": (True, False),
    "copy_outputs": (True, False),
    "max_recordings": (1, 5),
    "limits": ({}, {"count": 1}, {"pool_bytes": None, "idle": 0}, {"pool_bytes": 0.5, "keep_free": 0.1}),
}
WRONG: Mapping[str, tuple[tuple[Any, str], ...]] = {
    "compile": ((True, "'lazy' or 'eager'"), (None, "'lazy' or 'eager'")),
    "on_failure": ((["raise"], "'fallback' or 'raise'"), ("error", "'fallback' or 'raise'")),
    "compile_timeout": ((0, "greater than 0"), (-1.0, "greater than 0"), (True, "greater than 0"), ("60", "seconds")),
    "compiler": (("", "name of a backend"), (1, "name of a backend"), ("multigraph", "'inductor'")),
    "cudagraphs": ((True, "'auto', 'require' or False"), (None, "'auto'"), (0, "'auto'")),
    "cut": (("aten::mm", "wrap it in a list"), ([1], "'aten::mm'"), ([""], "'aten::mm'")),
    "splitting_ops": (("aten::mm", "wrap it in a list"), (True, "a list of names")),
    "safe": (({}, "a list of names"), ([None], "'aten::mm'")),
    "collectives": ((False, "'record' or 'cut'"),),
    "record_small": ((1, "True or False"), ("yes", "True or False"), (None, "True or False")),
    "copy_outputs": ((0, "True or False"), ("True", "True or False")),
    "max_recordings": ((0, "from 1 on"), (-1, "from 1 on"), (True, "from 1 on"), (2.0, "from 1 on")),
    "limits": (([], "a mapping"), ({"count": 0}, "from 1 on"), ({"idle": -1}, "seconds from 0 on")),
    "specialize": (({"x[0]": 8}, "wrap it in a list"), (8, "a list of"), ([8], "an object"), ([[]], "an object")),
    "inductor": ((True, "a mapping"), ([], "a mapping")),
}  # fmt: skip


class Silent(AssertionError):
    """Something was taken for what it is not, or nobody was told how to write it."""


@dataclass
class Draft:
    """Options as they are to be written; `hint` is what has to be said of them, None where they are right."""

    options: dict[str, Any]
    conditions: list[Condition]
    hint: str | None = None
    with_graph: bool = False  # said once there is a graph, not as an error


def play(seed: int, graph: CapturedGraph) -> str:
    """Draw, write, and see what is made of it; returns what was written.  Raises `Silent`."""
    rng = random.Random(f"spellings:{seed}")
    if rng.random() < 0.2:
        return _marked(rng)
    draft = _right(rng)
    respelled = rng.random() < 0.75
    if respelled:
        rng.choices(list(_OTHERWISE), list(_OTHERWISE.values()))[0](rng, draft)
    text = json.dumps(draft.options, default=repr)
    environ: dict[str, str] = {}
    given: dict[str, Any] | None = draft.options
    if rng.random() < 0.4 and _is_json(draft.options):
        environ[VARIABLE] = json.dumps({rng.choice(("*", "M*", "Model")): draft.options})
        given = None
        if draft.hint is None and draft.options and rng.random() < 0.3:  # the level of models is left out
            environ[VARIABLE], draft.hint = json.dumps(draft.options), "for every model write"
    try:
        options = Options.build(given, model_names=("Model", "forward"), environ=environ)
    except OptionsError as error:
        if draft.hint is None or draft.with_graph or draft.hint not in str(error):
            raise Silent(f"{text}: expected {draft.hint!r}, was told {error}") from error
        return text
    if draft.hint is not None and not draft.with_graph:
        raise Silent(f"{text}: expected {draft.hint!r}, was told nothing, got {options}")
    conditions, notes = declared.resolve(graph, options.specialize)
    if draft.hint is not None:
        said = [condition.never for condition in conditions if condition.never and draft.hint in condition.never]
        if not said or not any(draft.hint in note for note in notes):
            raise Silent(f"{text}: expected {draft.hint!r} with the graph, was told {notes}")
        return text
    if notes:
        raise Silent(f"{text}: is right, was told {notes}")
    _same_meaning(text, options, draft)
    return text


def _is_json(options: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(options)) == options)
    except TypeError:
        return False


def _same_meaning(text: str, options: Options, draft: Draft) -> None:
    wanted = [variant for condition in draft.conditions for variant in condition.variants()]
    if len(wanted) != len(options.specialize):
        raise Silent(f"{text}: {len(wanted)} conditions were declared, {options.specialize} was read")
    for condition, read in zip(wanted, options.specialize, strict=True):
        facts = read.facts()
        if set(facts) != set(condition.names):
            raise Silent(f"{text}: {read} is about other sizes than {condition}")
        for name, predicate in condition.terms:
            differ = [size for size in EDGES if predicate.holds(size) != facts[name].holds(size)]
            if differ:
                raise Silent(f"{text}: {read} is not {condition} at {differ}")
    for name, value in draft.options.items():
        if isinstance(value, str | bool | int) and getattr(options, name) != value:
            raise Silent(f"{text}: {name} was read as {getattr(options, name)!r}")


# ---------------------------------------------------------------- as it is read


def _right(rng: random.Random) -> Draft:
    names = rng.sample(sorted(RIGHT), rng.randint(0, 3))
    options = {name: rng.choice(RIGHT[name]) for name in names}
    if {"cut", "splitting_ops"} <= set(options):
        del options["cut"]
    conditions = [_condition(rng) for _ in range(rng.randint(1, 3))]
    options["specialize"] = [condition.declarative() for condition in conditions]
    return Draft(options, conditions)


def _condition(rng: random.Random) -> Condition:
    names = rng.sample(NAMES, rng.choice((1, 1, 2)))
    return Condition(tuple((name, random_predicate(rng, lists=True)) for name in names))


# ---------------------------------------------------------------- in another way


def _misspelt(rng: random.Random, word: str) -> str:
    """A letter left out or doubled, or two that changed places (which may be the same)."""
    at = rng.randrange(len(word) - 1)
    return rng.choice(
        (word[:at] + word[at + 1 :], word[: at + 1] + word[at:], word[:at] + word[at + 1] + word[at] + word[at + 2 :])
    )


def _option_misspelt(rng: random.Random, draft: Draft) -> None:
    name = rng.choice(sorted(name for name in {*RIGHT, "specialize", "inductor", "saved_tensors"} if len(name) > 5))
    other = _misspelt(rng, name)
    if other != name:
        draft.options[other] = draft.options.pop(name, None)
        draft.hint = f"unknown option {other!r} (did you mean "


def _choice_misspelt(rng: random.Random, draft: Draft) -> None:
    name, value = rng.choice(
        (("compile", "eager"), ("on_failure", "fallback"), ("cudagraphs", "require"), ("collectives", "record"),
         ("compiler", "inductor"), ("compiler", "aot_eager"))
    )  # fmt: skip
    other = _misspelt(rng, value)
    if other != value:
        draft.options[name] = other
        draft.hint = f"did you mean {value!r}?"


def _wrong_value(rng: random.Random, draft: Draft) -> None:
    name = rng.choice(sorted(WRONG))
    draft.options[name], draft.hint = rng.choice(WRONG[name])


def _key_misspelt(rng: random.Random, draft: Draft) -> None:
    where = rng.choice(("specialize", "limits", "inductor"))
    if where == "specialize":
        key, value = rng.choice((("multiple_of", 8), ("min", 2), ("max", 16)))
        name = rng.choice(NAMES)
        other = rng.choice((_misspelt(rng, key), key.upper(), key.replace("_", "")))
        if other != key:
            draft.options[where] = [{name: {other: value}}]
            draft.hint = f"{name!r}: unknown key {other!r} (did you mean {key!r}?)"
        return
    key, value = ("pool_bytes", 2**20) if where == "limits" else ("max_autotune", True)
    other = _misspelt(rng, key)
    if other != key:
        draft.options[where], draft.hint = {other: value}, f"did you mean {key!r}?"
        draft.options.pop("compiler", None)


def _another_value(rng: random.Random, draft: Draft) -> None:
    """What a condition's value may not be, though it can be guessed what it means."""
    name = rng.choice(NAMES)
    number, low = rng.choice((1, 2, 8)), rng.choice((0, 1, 4))
    value, hint = rng.choice(
        (
            (str(number), f"write {number}"),
            (float(number), f"write {number}"),
            ({number + 8, number}, f"write {[number, number + 8]}"),
            (frozenset((number,)), f"write {[number]}"),
            (range(low, low + 5), f'{{"min": {low}, "max": {low + 4}}} for one variant of all'),
            (range(8, 33, 8), '{"min": 8, "max": 32, "multiple_of": 8} for one variant of all'),
            (None, "expected an int, a list of ints or an object"),
            (True, "expected an int, a list of ints or an object"),
            ([True], "values must be ints"),
            ([], "nothing satisfies"),
            ({}, "name a size, and what holds of it"),
            ({"multiple_of": 1}, "name a size, and what holds of it"),
            ({"multiple_of": 0}, "factor must be at least 1"),
            ({"min": 9, "max": 8}, "min 9 is greater than max 8"),
        )
    )
    draft.options["specialize"] = rng.choice(([{name: value}], [{name: value}, *draft.options["specialize"]]))
    draft.hint = hint


def _name_as_python_has_it(rng: random.Random, draft: Draft) -> None:
    size = rng.choice(SIZES)
    tensor, dim = size[0], int(size[2])
    name, hint = rng.choice(
        (
            (f"{tensor}.shape[{dim}]", f"did you mean {size!r}?"),
            (f"{tensor}.size({dim})", f"did you mean {size!r}?"),
            (f"{tensor}.size({dim - 2})", f"did you mean {size!r}?"),
            (f"{tensor}[{dim - 2}]", f"did you mean {size!r}?"),
            (f"{tensor} [ {dim - 2} ]", f"did you mean {size!r}?"),
            (f"self.{tensor.upper()}[{dim}]", f"did you mean {size!r}?"),
            (f"len({tensor})", f"did you mean '{tensor}[0]'?"),
            (tensor, f"{tensor} is a tensor, name one of its sizes: '{tensor}[0]', '{tensor}[1]'"),
            (f"{tensor}[2]", "is no size or integer input"),
            ("batch", "is no size or integer input"),
        )
    )
    predicate = random_predicate(rng, lists=False)
    draft.options["specialize"] = [{name: predicate.declarative()}, *draft.options["specialize"]]
    draft.hint, draft.with_graph = hint, True


def _negative(rng: random.Random, draft: Draft) -> None:
    name = rng.choice(NAMES)
    value = rng.choice((-1, -8, {"max": -1}, {"min": -4, "max": -2}))
    draft.options["specialize"] = [{name: value}]
    if name in SIZES:
        draft.hint, draft.with_graph = f"{name} is a size, which is never negative", True
        return
    low, high = (value, value) if isinstance(value, int) else (value.get("min"), value["max"])
    predicate = Predicate("eq", (value,)) if isinstance(value, int) else Predicate("range", (low, high))
    draft.conditions = [Condition(((name, predicate),))]  # an integer may be


_OTHERWISE: dict[Callable[[random.Random, Draft], None], int] = {
    _option_misspelt: 2,
    _choice_misspelt: 2,
    _wrong_value: 4,
    _key_misspelt: 2,
    _another_value: 4,
    _name_as_python_has_it: 3,
    _negative: 2,
}


# ---------------------------------------------------------------- marks


def _marked(rng: random.Random) -> str:
    x = torch.empty(4, 3)
    given: dict[str, Any] = {"tensor": x, "dim": rng.choice((0, 1, -1, [0, 1]))}
    right: Sequence[Any] = (8, 1, {"multiple_of": 8}, {"min": 2, "max": 9}, lambda size: size > 3)
    given["specialize_on"] = [rng.choice(right) for _ in range(rng.randint(0, 2))]
    hint = None
    if rng.random() < 0.75:
        what, value, hint = rng.choice(
            (
                ("tensor", [1, 2], "mark takes a tensor"),
                ("dim", "0", "dim must be an int"),
                ("dim", True, "dim must be an int"),
                ("dim", None, "dim must be an int"),
                ("dim", 2, "dimension 2 cannot be marked"),
                ("dim", [0, -3], "dimension -3 cannot be marked"),
                ("specialize_on", 8, "write [8]"),
                ("specialize_on", {8, 4}, "write [4, 8]"),
                ("specialize_on", {"min": 2}, "write [{'min': 2}]"),
                ("specialize_on", [[2, 3]], "write 2, 3"),
                ("specialize_on", [{}], "holds for every size"),
                ("specialize_on", [-1], "never negative"),
                ("specialize_on", [{"max": -1}], "never negative"),
                ("specialize_on", ["8"], "takes integers"),
                ("specialize_on", None, "must be a list"),
                ("min", "1", "min must be an int"),
                ("min", -1, "min must be at least 0"),
                ("max", True, "max must be an int"),
                ("max", -2, "max must be at least 0"),
                ("unbacked", 1, "unbacked must be"),
            )
        )
        given[what] = value
    text = ", ".join(f"{name}={value!r}" for name, value in given.items() if name != "tensor")
    try:
        mark(given.pop("tensor"), given.pop("dim"), **given)
    except (TypeError, ValueError) as error:
        if hint is None or hint not in str(error):
            raise Silent(f"mark(x, {text}): expected {hint!r}, was told {error}") from error
    except Exception as error:
        raise Silent(f"mark(x, {text}): expected {hint!r}, {error!r}") from error
    else:
        if hint is not None:
            raise Silent(f"mark(x, {text}): expected {hint!r}, was told nothing")
    return f"mark(x, {text})"
