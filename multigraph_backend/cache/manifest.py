"""One graph's manifest: which of its variants were used, how often, in which order, and where torch keeps their code.

    {"format": 4, "torch": "2.13.0", "multigraph": "0.1.1 (6c1d...)", "digest": "...", "manifest": {
        "graph": "9f...", "model": "Decoder.forward (model.py:12)", "names": ["Decoder", "forward"], "tuned": [],
        "used": [{"condition": "x[0] == 8", "calls": 940, "forms": [
            {"values": {"s0": 8}, "keys": [["aot_autograd", "a5p5..."]], "repeated": ["", false], "floats": ""}]}]}}

`condition` is the text of a declared condition, or "generic"; a form is compiled code and the values of the graph's
symbols that it was compiled for, with the keys that torch's caches have it under, what became of blocks that come again
in it, which the code itself does not tell, and the name under which code that computes with Python floats is asked for.

Everything here is pure.  What is read is checked in full: a manifest is a hint, and whatever it says, code comes from
torch's caches under keys that the compile itself computes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multigraph_backend.cache.trusted import Refused

FORMAT = 4
MOST_BYTES = 4 << 20  # of one manifest, as a file
MOST_USED = 256  # conditions of one graph that are noted
MOST_FORMS = 64  # of one condition
MOST_KEYS = 1024  # of one form: on a CPU each kernel is a library
MOST_TUNED = 256
MOST_TEXT = 2000  # characters of one text

GRAPH_CACHES = ("aot_autograd", "inductor")  # kinds of torch's artifacts that hold code
_NAME = re.compile(r"[0-9a-f]{0,32}")
_KEY = re.compile(r"[A-Za-z0-9_=-]{1,128}")
_PATH = re.compile(r"[A-Za-z0-9_=-]{1,128}(/[A-Za-z0-9_=-][A-Za-z0-9_.=-]{0,127}){0,3}")

Key = tuple[str, str]  # kind of artifact, key


@dataclass(frozen=True)
class RepeatedBlocks:
    """What became of blocks that come again in compiled code: what is `said` of them, "" where nothing is, and whether
    the code has a body for them, which it `calls`."""

    said: str = ""
    calls: bool = False


NOTHING_SAID = RepeatedBlocks()


@dataclass(frozen=True)
class UsedForm:
    """Compiled code: the values of symbols that it was compiled for, its keys in torch's caches, what became of blocks
    that come again, and the name of code that computes with Python floats (`Lowered.floats`)."""

    values: tuple[tuple[str, int], ...]
    keys: tuple[Key, ...] = ()
    repeated: RepeatedBlocks = NOTHING_SAID
    floats: str = ""

    @property
    def libraries(self) -> list[str]:
        """What the C++ compiler made for it, as paths below Inductor's folder."""
        return [key for kind, key in self.keys if kind == "native"]

    @property
    def key(self) -> str | None:
        """The key of all of its code together, None where torch does not keep it as one."""
        return next((key for kind, key in self.keys if kind == "aot_autograd"), None)


@dataclass(frozen=True)
class Used:
    """One condition that calls came for, with its forms in the order in which they were compiled."""

    condition: str
    calls: int
    forms: tuple[UsedForm, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What became of one graph: `used` in the order of first use, `tuned` the keys of measured choices of kernels.

    `graph` names it among all others; `model` and `names` are for people, and for choosing.
    """

    graph: str
    model: str = ""
    names: tuple[str, ...] = ()
    used: tuple[Used, ...] = ()
    tuned: tuple[str, ...] = field(default_factory=tuple)

    def most_used_first(self) -> list[Used]:
        """In the order in which a second process loads them."""
        return sorted(self.used, key=lambda entry: -entry.calls)  # else in the order of first use

    @property
    def cached(self) -> set[Key]:
        """The keys of all that belongs to it in torch's caches."""
        found = {key for entry in self.used for form in entry.forms for key in form.keys}
        return found | {("autotune", key) for key in self.tuned}


def safe_key(kind: str, key: str) -> bool:
    """Whether a key of torch's caches names a place inside of them and nothing else."""
    if kind in GRAPH_CACHES:
        return _KEY.fullmatch(key) is not None
    if kind in ("autotune", "native"):
        return _PATH.fullmatch(key) is not None and (kind == "autotune" or key.endswith(".so"))
    return kind == "pgo" and _KEY.fullmatch(key.replace(":", "_")) is not None


def older(manifest: Manifest) -> Manifest:
    """As a new process takes it over: what counts is rather what is called now than what was called once."""
    return replace(manifest, used=tuple(replace(entry, calls=-(-entry.calls // 2)) for entry in manifest.used))


def merged(first: Manifest, second: Manifest) -> Manifest:
    """Both together, within the limits: calls are added, what only `second` has comes behind."""
    used = {entry.condition: entry for entry in first.used}
    for entry in second.used:
        before = used.get(entry.condition)
        used[entry.condition] = entry if before is None else _both(before, entry)
    kept = sorted(used.values(), key=lambda entry: -entry.calls)[:MOST_USED]
    return replace(
        first,
        model=second.model or first.model,
        names=second.names or first.names,
        used=tuple(entry for entry in used.values() if entry in kept),
        tuned=tuple(dict.fromkeys((*second.tuned, *first.tuned)))[:MOST_TUNED],
    )


def _both(first: Used, second: Used) -> Used:
    forms = {form.values: form for form in first.forms}
    for form in second.forms:
        if form.key is not None or form.values not in forms:
            forms[form.values] = replace(form, keys=form.keys[:MOST_KEYS])
    newest = list(forms.values())[-MOST_FORMS:]
    return Used(first.condition, first.calls + second.calls, tuple(newest))


# ---------------------------------------------------------------- as text


def to_bytes(manifest: Manifest, versions: tuple[str, str]) -> bytes:
    """For a file; `versions` are those of torch and of this package."""
    body = {
        "graph": manifest.graph,
        "model": manifest.model,
        "names": manifest.names,
        "tuned": manifest.tuned,
        "used": [
            {
                "condition": entry.condition,
                "calls": entry.calls,
                "forms": [
                    {
                        "values": dict(form.values),
                        "keys": form.keys,
                        "repeated": [form.repeated.said, form.repeated.calls],
                        "floats": form.floats,
                    }
                    for form in entry.forms
                ],
            }
            for entry in manifest.used
        ],
    }
    torch, multigraph = versions
    head = {"format": FORMAT, "torch": torch, "multigraph": multigraph, "digest": _digest(body)}
    return json.dumps({**head, "manifest": body}, indent=1).encode()


def from_bytes(content: bytes, versions: tuple[str, str]) -> Manifest:
    """What `to_bytes` wrote.  Raises `Refused` for anything else, and for other versions."""
    try:
        read = json.loads(content)
        head = {name: read[name] for name in ("format", "torch", "multigraph", "digest")}
        body = read["manifest"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Refused("it is no whole manifest") from None
    if head["format"] != FORMAT:
        raise Refused(f"it has format {head['format']!r}, and {FORMAT} is read")
    for name, given, own in zip(("torch", "multigraph"), (head["torch"], head["multigraph"]), versions, strict=True):
        if given != own:
            raise Refused(f"it was written with {name} {given!r}, and this is {own}")
    if head["digest"] != _digest(body):
        raise Refused("its digest is another one: it was changed, or cut off")
    try:
        return Manifest(
            _text(body["graph"]),
            _text(body["model"]),
            tuple(map(_text, _listed(body["names"], 64))),
            tuple(_used(entry) for entry in _listed(body["used"], MOST_USED)),
            tuple(_checked_key("autotune", key) for key in _listed(body["tuned"], MOST_TUNED)),
        )
    except (TypeError, KeyError, AttributeError):
        raise Refused("its parts are not what they should be") from None


def _used(entry: Any) -> Used:
    return Used(
        _text(entry["condition"]),
        _number(entry["calls"]),
        tuple(
            UsedForm(
                tuple((_text(name), _number(value)) for name, value in form["values"].items()),
                tuple((kind, _checked_key(kind, key)) for kind, key in _pairs(form["keys"])),
                _blocks(form["repeated"]),
                _name(form["floats"]),
            )
            for form in _listed(entry["forms"], MOST_FORMS)
        ),
    )


def _blocks(value: Any) -> RepeatedBlocks:
    said, calls = _listed(value, 2)
    if not isinstance(calls, bool):
        raise TypeError
    return RepeatedBlocks(_text(said), calls)


def _pairs(values: Any) -> Iterable[tuple[str, str]]:
    for value in _listed(values, MOST_KEYS):
        kind, key = _listed(value, 2)
        yield _text(kind), _text(key)


def _checked_key(kind: str, key: Any) -> str:
    if not safe_key(kind, _text(key)):
        raise Refused(f"{key!r} is no key of torch's caches")
    return str(key)


def _listed(value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise Refused(f"a list of at most {most} was expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise Refused("a short text was expected")
    return value


def _name(value: Any) -> str:
    if not _NAME.fullmatch(_text(value)):
        raise Refused("a name in hexadecimal digits was expected")
    return str(value)


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 62:
        raise Refused("a number was expected")
    return value


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
