"""`MULTIGRAPH_OPTIONS`: options for models by their names, as JSON or as a file that holds it.

    MULTIGRAPH_OPTIONS='{"Llama*": {"compile": "eager"}}'    JSON: what begins with {, [ or "
    MULTIGRAPH_OPTIONS=@/etc/models.json                     a file; the @ may be left out

A server has one such variable, or one file, for all of its models, and is started by somebody who did not write it.  So
an error says the file, the line and the column, and what to write there; and a key that no model answered to is said
when the process ends, with the nearest name that a model did have.

In:  the environment; the names of each model that is compiled.
Out: `Entries`, where each entry knows its place in the text; which keys apply to a model (`Entries.applying`), and
     which applied to none so far (`unmatched`).

Invariant: a file is read once in a process, when the first model is compiled.  What it says of one model it says of all
later ones, whatever becomes of the file meanwhile.
"""

from __future__ import annotations

import atexit
import fnmatch
import json
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from multigraph_backend.spelling import nearest, shown

log = logging.getLogger(__name__)

VARIABLE = "MULTIGRAPH_OPTIONS"
NAME_ATTRIBUTE = "multigraph_name"  # of a module: what it is called among others of its class

Keys = tuple[str | int, ...]


class OptionsError(ValueError):
    """An option is unknown, or its value is not accepted."""


@dataclass(frozen=True)
class Entries:
    """Options by the names of models, in the order of the text; `file` is None where the variable itself holds them."""

    options: Mapping[str, Mapping[str, object]]
    file: str | None = None
    text: str = ""
    starts: Mapping[Keys, int] = field(default_factory=dict)  # positions in the text, by the keys that lead there

    def line(self, path: Keys) -> str:
        """Line and column of the entry that these keys lead to, or of what it is a part of."""
        known = next(path[:end] for end in range(len(path), -1, -1) if path[:end] in self.starts)
        return _line_and_column(self.text, self.starts[known])

    def place(self, path: Keys) -> str:
        """Where the entry stands that these keys lead to."""
        if self.file is None:
            return f"in {VARIABLE}[{path[0]!r}]"
        return f"in {self.file}, {self.line(path)}, for {path[0]!r}"

    def applying(self, models: Sequence[str], name: str | None = None) -> list[str]:
        """The keys that apply to a model, from the most general on: each replaces single options of those before.

        `models` are the names of its class and function, `name` is its own.  "*" comes first, then globs over `models`,
        then exactly these, then globs over the name, then exactly it; within each of these in the order of the text.
        """

        def rank(key: str) -> int | None:
            if key == "*":
                return 0
            if name is not None and key == name:
                return 4
            if name is not None and fnmatch.fnmatchcase(name, key):
                return 3
            if key in models:
                return 2
            return 1 if any(fnmatch.fnmatchcase(model, key) for model in models) else None

        ranked = [(rank(key), key) for key in self.options]
        return [key for wanted in range(5) for found, key in ranked if found == wanted]


# ---------------------------------------------------------------- reading

_read: dict[str, Entries] = {}  # files, by the text of the variable
_reading = threading.RLock()


def entries(environ: Mapping[str, str]) -> Entries | None:
    """What the variable says; None where it is not set, or empty.

    Raises OptionsError for what is no object of model names to objects, and for a file that cannot be read.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if text[0] in '{["':
        return _parsed(text, None)
    with _reading:
        if text not in _read:
            path = os.path.abspath(os.path.expanduser(text.removeprefix("@").strip()))
            _read[text] = _parsed(_content(path, text), path)
        return _read[text]


_FORMS = f"{VARIABLE} is JSON, which begins with {{, or the path of a file that holds it, as in {VARIABLE}=@models.json"


def _content(path: str, given: str) -> str:
    """The text of a file.  Raises OptionsError that says what is in the way, and what to do."""
    if given[0] == given[-1] == "'" and len(given) > 1:
        raise OptionsError(f"{VARIABLE} begins and ends with a quote ('); set it without: {shown(given[1:-1])}")
    if given == "@":
        raise OptionsError(f"{VARIABLE} is @ without a path; {_FORMS}")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or "{" in given:  # a name may be too long, too
            shortened = path if len(path) <= 200 else path[:197] + "..."
            absolute = os.path.isabs(os.path.expanduser(given.removeprefix("@").strip()))
            there = "" if absolute else f" (a path from the working folder, {os.getcwd()})"
            raise OptionsError(f"{VARIABLE} names the file {shortened}, which is not there{there}; {_FORMS}") from error
        if isinstance(error, IsADirectoryError):
            raise OptionsError(f"{VARIABLE} names {path}, which is a folder; name a file in it") from error
        raise OptionsError(
            f"{VARIABLE} names the file {path}, which cannot be read: {error.strerror}; "
            f"make it readable for the user of this process ({os.geteuid()})"
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        place = _line_and_column(before.decode("utf-8", "replace"), None)
        raise OptionsError(
            f"{path}, {place}: byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from error
    if not text.strip():
        raise OptionsError(f"{path} is empty; write an object of model names to options, {{}} for none")
    return text


def _line_and_column(text: str, at: int | None) -> str:
    before = text[:at]
    return f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"


def _parsed(text: str, file: str | None) -> Entries:
    what = VARIABLE if file is None else file
    try:
        values = json.loads(text)
        starts, twice = _places(text)
    except json.JSONDecodeError as error:
        remedy = _remedy(text, error.pos, error.msg)
        if file is None:
            said = f"{VARIABLE} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        else:
            said = f"{file}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        raise OptionsError(said + (f"; {remedy}" if remedy else "")) from error
    except RecursionError as error:
        raise OptionsError(f"{what} holds objects or lists in more levels than can be read") from error
    if twice:
        keys, again = twice[0]
        if file is None:
            raise OptionsError(f"{VARIABLE} says {keys[-1]!r} twice in one object")
        first, second = (_line_and_column(text, at) for at in (starts[keys], again))
        raise OptionsError(f"{file}, {second}: {keys[-1]!r} is in this object already, {first}; leave one of them")
    if not isinstance(values, dict):
        quoted = isinstance(values, str) and values.lstrip().startswith("{")
        hint = "; take the quotes away that stand around it" if quoted else ""
        raise OptionsError(f"{what} must be an object of model names to options, got {shown(values)}{hint}")
    return Entries(values, file, text, starts)


_SPACE = re.compile(r"[ \t\r\n]*")


def _places(text: str) -> tuple[dict[Keys, int], list[tuple[Keys, int]]]:
    """Where each key and each element of a list begins in valid JSON, and which keys come again in an object, where."""
    decoder = json.JSONDecoder()
    starts: dict[Keys, int] = {}
    twice: list[tuple[Keys, int]] = []

    def skip(at: int) -> int:
        found = _SPACE.match(text, at)
        return at if found is None else found.end()

    def walk(at: int, path: Keys) -> int:
        """Past the value that begins at `at`."""
        opening = text[at]
        if opening not in "{[":
            return decoder.raw_decode(text, at)[1]
        at, index = skip(at + 1), 0
        while text[at] not in "}]":
            start, key = at, index
            here: Keys = (*path, key)
            if opening == "{":
                name, at = decoder.raw_decode(text, at)
                here, at = (*path, name), skip(skip(at) + 1)
            if here in starts:
                twice.append((here, start))
            starts.setdefault(here, start)
            at, index = skip(walk(at, here)), index + 1
            at = skip(at + 1) if text[at] == "," else at
        return at + 1

    starts[()] = skip(0)
    walk(starts[()], ())
    return starts, twice


_WORDS = {"True": "true", "False": "false", "None": "null"}


def _remedy(text: str, at: int, said: str) -> str:
    """What to write instead of what JSON does not have, at the place of an error; nothing where it is not plain."""
    rest = text[at:].lstrip()
    before = text[:at].rstrip()
    word = re.match(r"[A-Za-z_]\w*", rest)
    if rest[:1] in "}]" and rest and before.endswith(","):
        return "take away the comma before it"
    if re.match(r",\s*[}\]]", rest):  # from Python 3.13 on the place is the comma's
        return "take away the comma"
    if said.startswith("Invalid control character"):
        return "a string ends in the line in which it begins"
    if said.startswith("Invalid \\escape"):
        return "write a backslash as \\\\"
    if not rest or said.startswith("Unterminated string"):
        return 'a quote (") is missing' if said.startswith("Unterminated") else "a } or ] is missing at the end"
    if rest.startswith("'"):
        return 'write double quotes (") for single ones'
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments: take it away"
    if word is not None and word[0] in _WORDS:
        return f"write {_WORDS[word[0]]}"
    if word is not None:
        return f'write "{word[0]}", in double quotes'
    if said.startswith("Extra data"):
        return "all entries stand in one object: { ... }"
    if said.startswith("Expecting ','"):
        return "a comma is missing before it"
    return ""


# ---------------------------------------------------------------- keys that no model answers to

_models: dict[str, None] = {}  # every name that a model had, in their order
_matched: set[tuple[str, str]] = set()  # the text of the variable, and a key of it
_saying = threading.RLock()
_process: int | None = None  # that says at its end what matched nothing


@dataclass(frozen=True)
class Unmatched:
    """A key that has applied to no model so far, and the nearest of the names that models had, if one is near."""

    key: str
    nearest: str | None

    def __str__(self) -> str:
        return f"{self.key!r}" if self.nearest is None else f"{self.key!r} (did you mean {self.nearest!r}?)"


def note(found: Entries, models: Sequence[str], name: str | None, environ: Mapping[str, str]) -> None:
    """A model of these names is compiled, with what `found` says of it."""
    global _process
    text = environ.get(VARIABLE, "").strip()
    with _saying:
        _models.update(dict.fromkeys([*models, *([] if name is None else [name])]))
        _matched.update((text, key) for key in found.applying(models, name))
        if _process is None:
            atexit.register(_say_at_exit)
        _process = os.getpid()


def unmatched(environ: Mapping[str, str]) -> tuple[Unmatched, ...]:
    """The keys that applied to no model that this process has compiled; none before the first one."""
    text = environ.get(VARIABLE, "").strip()
    with _saying:
        seen, matched = list(_models), {key for of, key in _matched if of == text}
    if not seen:
        return ()
    try:
        found = entries(environ)
    except OptionsError:  # said where a model was compiled
        return ()
    keys = [] if found is None else [key for key in found.options if key != "*" and key not in matched]
    return tuple(Unmatched(key, _nearest(key, seen)) for key in keys)


def _nearest(key: str, seen: Sequence[str]) -> str | None:
    """A glob is held against names without its wildcards, a path by its last word."""
    bare = re.sub(r"\[[^]]*\]|[*?]", "", key).rpartition(".")[2]
    return nearest(bare, seen) if bare else None


def said_of(keys: Sequence[Unmatched]) -> str:
    """One line of what matched nothing, and of the names that there were."""
    with _saying:
        seen = list(_models)
    names = ", ".join(seen[:12]) + (", ..." if len(seen) > 12 else "")
    return f"{VARIABLE}: no model that was compiled has the name {' or '.join(map(str, keys))}; names were: {names}"


def _say_at_exit() -> None:
    keys = unmatched(os.environ)
    if keys and os.getpid() == _process:  # a fork of it has compiled nothing of its own
        log.warning("%s", said_of(keys))


def refuse_entry(found: Entries, name: str, said: str) -> NoReturn:
    """Raise OptionsError about the entry of one key as a whole."""
    if found.file is None:
        raise OptionsError(f"{VARIABLE}[{name!r}] {said}")
    raise OptionsError(f"{found.file}, {found.line((name,))}: {name!r} {said}")
