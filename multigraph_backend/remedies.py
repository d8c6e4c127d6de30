"""What to write instead of an option, or of a value of one, that is not accepted.

    max_autotune=True       ->  (it is Inductor's: write {'inductor': {'max_autotune': True}})
    {"x[0]": "1-512"}       ->  write {"min": 1, "max": 512}

Someone who meets multigraph knows torch.compile, Inductor's knobs and other libraries' configurations, and writes what
these take.  What was meant is mostly plain, and the error says how it is written here.

In:  what was given, and whether it is JSON or Python.  Out: text for the end of a message, nothing where it is not
plain what was meant.  Nothing is accepted here, and nothing is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from multigraph_backend.cudagraphs import limits
from multigraph_backend.environment import NAME_ATTRIBUTE, VARIABLE
from multigraph_backend.spelling import did_you_mean, nearest

_OF_TORCH_COMPILE = ("fullgraph", "dynamic", "backend", "disable", "recompile_limit", "isolate_recompiles")
_VARIABLES = (VARIABLE, "MULTIGRAPH_DISABLE", "MULTIGRAPH_DEBUG")
_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_OTHER_WORDS = {
    "specialize": ("variants", "shapes", "sizes", "dynamic_shapes", "compile_sizes", "cudagraph_capture_sizes"),
    "saved_tensors": ("packs", "rules", "activations"),
    "memory_goal": ("memory_limit", "memory", "max_memory", "memory_budget", "gpu_memory_utilization"),
}


def written(value: object, as_json: bool) -> str:
    """How to write a value, in JSON or in Python."""
    text = json.dumps(value) if as_json else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def unknown_option(key: str, value: object, known: Sequence[str], as_json: bool) -> str:
    """Where what is no option belongs; else the nearest option."""
    knob = key.replace("-", "_")
    if key in _OF_TORCH_COMPILE:
        where = "given in code, as an argument" if as_json else "an argument"
        return f' (it is {where} of torch.compile, beside backend="multigraph")'
    if key in limits.LEAST:
        return f" (it is a limit: write {written({'limits': {key: value}}, as_json)})"
    if key in ("match", "pack"):
        return ' (it is part of a rule: write {"saved_tensors": [{"match": ..., "pack": ...}]})'
    if key.endswith(("]", ")")) or key in ("min", "max", "multiple_of"):
        size = {key: value} if key.endswith(("]", ")")) else {"x[0]": {key: value}}
        return f" (it is of a condition: write {written({'specialize': [size]}, as_json)})"
    if key == "options":
        return " (write its entries in its place)"
    if key == NAME_ATTRIBUTE:
        return f" (it is an attribute of a module; here write {written({'name': value}, as_json)})"
    if key in _VARIABLES:
        return " (it is a variable of the environment)"
    if key in _MODES:
        return f" (it is a mode: write {written({'mode': key}, as_json)})"
    if (meant := next((option for option, words in _OTHER_WORDS.items() if key in words), None)) is not None:
        return f" (did you mean {meant!r}?)"
    if _is_knob(knob):
        return f" (it is Inductor's: write {written({'inductor': {knob: value}}, as_json)})"
    if isinstance(value, Mapping) and as_json:
        return " (is it the name of a model? These stand one level above)"
    if key.startswith(("#", "//", "$")):
        return " (take it away: there is no place for remarks)"
    return did_you_mean(key, known)


def _is_knob(name: str) -> bool:
    from multigraph_backend import _compat

    try:
        return name in _compat.inductor_config_names()
    except (RuntimeError, AttributeError):  # this torch differs, and it is said elsewhere
        return False


def no_options(key: str, value: object, known: Sequence[str]) -> str:
    """What to write for the entry of a model that is no object of options."""
    if key.endswith(("]", ")")):
        return f"; write {written({'*': {'specialize': [{key: value}]}}, True)}"
    if (option := nearest(key, known, cutoff=0.7)) is not None:
        return f"; is it the option {option!r}? For every model write {written({'*': {option: value}}, True)}"
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return f"; write {written({key: {'specialize': value}}, True)}"
    return ""


def flag(value: object, as_json: bool) -> str:
    """For what is not True or False."""
    meant = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
    found = meant.get(str(value).casefold())
    return "" if found is None else f"write {written(found, as_json)}"


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def number(value: object) -> str:
    """For a number as text, with a unit of time or of memory."""
    found = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*(?:(s|sec|secs|seconds)|(min|minutes)|([kmg]i?)b?|b)?\s*", _lower(value)
    )
    if found is None:
        return ""
    count = float(found[1]) * (60 if found[3] else _UNITS[found[4] or ""])
    return f"write {int(count) if count == int(count) else count}"


def fraction(value: object) -> str:
    """For a percentage as text."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", _lower(value))
    return "" if found is None or float(found[1]) > 100 else f"write {float(found[1]) / 100}"


def _lower(value: object) -> str:
    return value.casefold() if isinstance(value, str) else ""


def cudagraphs(value: object, as_json: bool) -> str:
    """For what is none of the values of the option of that name."""
    if value is True or _lower(value) in ("true", "on", "yes", "record"):
        return "write 'auto', which is the default" if not as_json else 'write "auto", which is the default'
    if value is None or value == 0 or _lower(value) in ("false", "off", "no", "none", "0", ""):
        return f"write {written(False, as_json)}"
    return ""


_CONDITIONS = '{"x[0]": 8}, {"x[0]": [4, 8]}, {"x[0]": {"min": 1, "max": 512}}, {"x[0]": {"multiple_of": 16}}'


def condition(value: object, as_json: bool) -> str:
    """For what is no condition, in a list of them."""
    if callable(value):
        return (
            "a callable is asked about one size: mark(x, 0, specialize_on=[...]); here conditions are data, such as "
            + (_CONDITIONS)
        )
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        return "take the inner list away"
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"write {written({value[0]: value[1]}, as_json)}"
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\w.*?)\s*(==|=|:|<=|>=|%)\s*(\d+)(?:\s*==\s*0)?\s*", value)
        if found is not None:
            bound = int(found[3])
            meant: object = {"<=": {"max": bound}, ">=": {"min": bound}, "%": {"multiple_of": bound}}.get(
                found[2], bound
            )
            return f"write {written({found[1]: meant}, as_json)}"
    return f"such as {_CONDITIONS}"


def operator(name: str) -> str:
    """For the name of one of torch's operators without its namespace; higher-order ones have none."""
    if not name.isidentifier():
        return ""
    import torch

    if not hasattr(torch.ops.aten, name) or hasattr(torch.ops.higher_order, name):
        return ""
    return f"an operator has a namespace: write 'aten::{name}', or '*::{name}' for any"


def knobs(value: object, as_json: bool) -> str:
    """For what is no mapping of Inductor's knobs."""
    return f"write {written({'mode': value}, as_json)}" if isinstance(value, str) and value in _MODES else ""


def knob(name: str, value: object, as_json: bool) -> str:
    """For knobs that are written as an object in an object: Inductor's have dots in their names."""
    if not isinstance(value, Mapping):
        return ""
    inner = {f"{name}.{key}": entry for key, entry in value.items()}
    return f" (write {written(inner, as_json)})" if inner and all(map(_is_knob, inner)) else ""
