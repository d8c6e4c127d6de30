"""What the user wants of saved tensors: rules, the first that matches decides.

    options={"saved_tensors": [Rule(Match(op="aten::native_layer_norm"), Keep()), Rule(pack=Scaled("int8", per="row"))]}

In:  `Rule` objects, or the same as JSON for `MULTIGRAPH_OPTIONS`:
     {"match": {"op": "aten::mm", "min_bytes": 65536}, "pack": {"cast": "bfloat16"}}
Out: frozen rules, equal by value, and for each saved tensor the rule that decides, or why none does.

Invariant: what nobody named is left alone.  Integers and bools need a rule that names their dtype, tensors under
`SMALL_BYTES` one that gives `min_bytes`; statistics (see `statistics`), masks of attention (`masks`), graph inputs,
data, parameters and outputs one that gives their `role`.  To leave alone, a rule need name neither dtype nor bytes, and
not statistics and masks.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from multigraph_backend import _compat
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.spelling import did_you_mean, shown

SMALL_BYTES = 64 * 1024

Role = Literal["intermediate", "statistic", "mask", "input", "data", "parameter", "output"]
ROLES: tuple[str, ...] = get_args(Role)

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "fp8": "float8_e4m3fn",
    "float": "float32",
}
CAST_TO = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32")
SCALED_TO = ("int4", "int8", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Keep:
    """Leave the tensor as it is."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True)
class Cast:
    """Save in a narrower type, without a scale: "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32".

    fp8 keeps finite values finite (beyond its range they become its largest); infinities and NaN become NaN.
    `stochastic`: round up or down at random, so that the mean of many roundings is the value.
    `multiply`: weight gradients multiply what is saved as it is, with the gradient of the output in "float8_e5m2" and a
    scale (see `products`); for "float8_e4m3fn" alone.  Where that cannot be, `explain()` says why, and it is a cast.
    """

    dtype: str
    stochastic: bool = False
    multiply: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _known_dtype(self.dtype, CAST_TO))
        if self.stochastic and self.dtype in ("float16", "float32"):
            raise ValueError(f"stochastic rounding is for bfloat16 and fp8, not {self.dtype}")
        if not isinstance(self.multiply, bool):
            raise ValueError(f"multiply must be True or False, got {shown(self.multiply)}")
        if self.multiply and self.dtype != "float8_e4m3fn":
            raise ValueError(f"products of what is saved are for float8_e4m3fn, not {self.dtype}")

    def __str__(self) -> str:
        more = (", stochastic" if self.stochastic else "") + (", multiplied" if self.multiply else "")
        return f"cast to {self.dtype}{more}"


@dataclass(frozen=True)
class Scaled:
    """Save as "int4", "int8", "float8_e4m3fn" or "float8_e5m2" with a scale per row or per block.

    Scales are float32, and float64 where the tensor is.
    `per`: "row", the last dimension in memory that has more than one element (so of `[N, 1]` all of it), or the number
    of elements that lie side by side and share a scale.  A last dimension that is no multiple of the block, or that is
    dynamic, is scaled per row, and `explain()` says so.
    "int4" has two elements in a byte, from -7 to 7 times their scale; where the last dimension is dynamic it is "int8".
    `stochastic`: round up or down at random, so that the mean of many roundings is the value.
    """

    dtype: str
    per: int | Literal["row"] = "row"
    stochastic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _known_dtype(self.dtype, SCALED_TO))
        block = self.per
        if block != "row" and (isinstance(block, bool) or not isinstance(block, int) or block < 2):
            raise ValueError(f"per must be 'row' or a number of elements above 1, got {shown(block)}")

    def __str__(self) -> str:
        per = "row" if self.per == "row" else f"block of {self.per}"
        return f"{self.dtype}, scaled per {per}" + (", stochastic" if self.stochastic else "")


@dataclass(frozen=True)
class Bits:
    """Save each element of a mask as one bit, exactly; for bool alone, and where some dimension is not dynamic."""

    def __str__(self) -> str:
        return "bits"


@dataclass(frozen=True)
class Offload:
    """Save in pinned memory of the host, exactly, or as it is packed; on a GPU alone.

    pack: a Cast, a Scaled, Bits or a saved_hook; what it makes of the tensor goes to the host, and the tensor itself
    where it makes nothing of it.  Where there is no GPU, it packs, and what it makes stays where it is
    waiting: a tensor stays on the device until so many further ones are offloaded; its copy has that long
    ahead: so many are on their way back before they are needed
    Both are for where memory is short.  Where keeping a tensor longer, or taking it back sooner, leaves the estimated
    peak as it is, copies have the time that they take.
    """

    pack: Cast | Scaled | Bits | SavedHook | None = None
    waiting: int = 2
    ahead: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.pack, Cast | Scaled | Bits | SavedHook | None):
            hint = f"; did you mean waiting={self.pack}?" if isinstance(self.pack, int) else ""
            raise TypeError(f"an Offload packs with Cast, Scaled, Bits or a saved_hook, not {shown(self.pack)}{hint}")
        _expect_complete(self.pack)
        if isinstance(self.pack, Cast) and self.pack.multiply:
            raise ValueError("what is offloaded cannot be multiplied as it is saved; leave multiply out")
        for name in ("waiting", "ahead"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a number of tensors, got {shown(value)}")

    def __str__(self) -> str:
        return "offload" if self.pack is None else f"offload as {self.pack}"


@dataclass(frozen=True)
class Recompute:
    """Save nothing: the backward computes it again, from what it has anyway.  Not of random numbers.

    from_packed: also from what other rules pack, as it is unpacked; with their rounding, if they round
    """

    from_packed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.from_packed, bool):
            raise ValueError(f"from_packed must be True or False, got {shown(self.from_packed)}")

    def __str__(self) -> str:
        return "recompute" + (" from what is packed" if self.from_packed else "")


Pack = Keep | Cast | Scaled | Bits | Offload | Recompute | SavedHook


@dataclass(frozen=True)
class Match:
    """What a rule is about; what is not given matches anything, within the invariant of this module.

    op: the producing operator, as it was traced or as the user wrote it: a name or glob, "aten::mm", "aten::gelu"
    dtype: the type of its elements, "float32"
    min_bytes: its size at the least
    module: path or glob of the module that produced it, "layers.0.attention", "layers.*"
    role: "intermediate", "statistic", "mask" (that attention adds, with infinities), "parameter", "output", "input"
    (one that needs a gradient, as what a block before has computed) or "data" (an input that needs none: data, tables)
    pointwise: whether it is made pointwise of what else is saved, and of parameters: the output of an activation whose
    input is saved too, of a norm whose statistics are
    """

    op: str | None = None
    dtype: str | None = None
    min_bytes: int | None = None
    module: str | None = None
    role: Role | None = None
    pointwise: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _known_dtype(self.dtype, _dtypes()))
        for name in ("op", "module"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} must be a name or glob, got {shown(getattr(self, name))}")
        if self.op is not None and "::" not in self.op:
            object.__setattr__(self, "op", self.op.replace(".", "::", 1))
        low = self.min_bytes
        if low is not None and (isinstance(low, bool) or not isinstance(low, int) or low < 0):
            raise ValueError(f"min_bytes must be a number of bytes, got {shown(low)}")
        if self.pointwise is not None and not isinstance(self.pointwise, bool):
            raise ValueError(f"pointwise must be True or False, got {shown(self.pointwise)}")
        if self.role is not None and self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(map(repr, ROLES))}, got {shown(self.role)}")

    def __str__(self) -> str:
        given = [(entry.name, getattr(self, entry.name)) for entry in fields(self)]
        return ", ".join(f"{name}={value}" for name, value in given if value is not None) or "any"


@dataclass(frozen=True)
class Rule:
    """Saved tensors that `match` are packed as `pack` says."""

    match: Match = Match()
    pack: Pack = Keep()

    def __post_init__(self) -> None:
        if not isinstance(self.match, Match):
            hint = "; a pack comes second: Rule(Match(), ...)" if isinstance(self.match, Pack) else ""
            raise TypeError(f"a rule begins with a Match, not {shown(self.match)}{hint}")
        if not isinstance(self.pack, Pack):
            raise TypeError(
                "a rule packs with Keep, Cast, Scaled, Bits, Offload, Recompute or a saved_hook, "
                f"not {shown(self.pack)}"
            )
        _expect_complete(self.pack)

    def __str__(self) -> str:
        return f"{self.match}: {self.pack}"


def _expect_complete(pack: object) -> None:
    if isinstance(pack, SavedHook) and not pack.complete:
        raise ValueError(f"the saved_hook {pack.name} has no unpack function; decorate one with its .unpack")


@dataclass(frozen=True)
class Described:
    """What rules may ask of one saved tensor."""

    ops: tuple[str, ...]
    dtype: str
    number: bool  # floating point or complex
    bytes: int
    module: str
    role: Role
    pointwise: bool = False


_ROLE_NOT_NAMED: Mapping[Role, str] = {
    "intermediate": "no rule matches it",
    "statistic": "it is a statistic of a norm, a softmax or an attention, which no rule names",
    "mask": "it is a mask of an attention, with infinities, which no rule names",
    "input": "it is an input of the graph, which no rule names",
    "data": "it is an input of the graph that needs no gradient, which no rule names",
    "parameter": "it is a parameter of the graph, which no rule names",
    "output": "it is an output of the graph, which no rule names",
}


def decide(rules: Sequence[Rule], tensor: Described) -> Rule | str:
    """The rule that decides about `tensor`, or why it is kept although nothing forbids packing it."""
    kept = "no rule matches it"
    for rule in rules:
        match = rule.match
        if match.op is not None and not any(fnmatch.fnmatchcase(op, match.op) for op in tensor.ops):
            continue
        if match.dtype is not None and match.dtype != tensor.dtype:
            continue
        if match.module is not None and not fnmatch.fnmatchcase(tensor.module, match.module):
            continue
        if match.pointwise is not None and match.pointwise != tensor.pointwise:
            continue
        if match.min_bytes is not None and tensor.bytes < match.min_bytes:
            continue
        keeps = isinstance(rule.pack, Keep)
        named = match.role or "intermediate"
        if named != tensor.role and not (keeps and match.role is None and tensor.role in ("statistic", "mask")):
            kept = _ROLE_NOT_NAMED[tensor.role]
        elif keeps:
            return rule
        elif match.dtype is None and not tensor.number:
            kept = f"it is {tensor.dtype}, which no rule names"
        elif match.min_bytes is None and tensor.bytes < SMALL_BYTES:
            kept = f"it is small ({tensor.bytes} bytes), and no rule says min_bytes"
        else:
            return rule
    return kept


def hook_rules(hook: SavedHook) -> tuple[Rule, ...]:
    """Rules for torch's own `saved_tensors_hooks`: numbers of any size, of the roles that torch's filter lets through.

    Integers and masks are left alone: a hook that is written for numbers makes wrong ones of them.
    """
    filtering = str(_compat.functorch_config.saved_tensors_hooks_filtering_mode)
    roles: dict[str, tuple[Role, ...]] = {
        "no_static": ("input", "data", "output"),
        "all": ("input", "data", "output", "parameter"),
    }
    always: tuple[Role, ...] = ("intermediate", "statistic", "mask")  # a hook is given all that is saved
    return tuple(Rule(Match(min_bytes=0, role=role), hook) for role in (*always, *roles.get(filtering, ())))


# ---------------------------------------------------------------- JSON


def rule_from_json(entry: Mapping[str, Any]) -> Rule:
    """A rule from plain data; raises ValueError or TypeError that names what is wrong."""
    _refuse_unknown(entry, ("match", "pack"), "a rule")
    if "pack" not in entry:
        raise ValueError('a rule needs "pack"')
    given = entry.get("match", {})
    if not isinstance(given, Mapping):
        raise TypeError(f'"match" must be an object, got {shown(given)}')
    _refuse_unknown(given, [entry.name for entry in fields(Match)], "match")
    return Rule(Match(**given), _pack_from_json(entry["pack"]))


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """Plain data that `rule_from_json` reads back, but for a hook, which it can only name."""
    match = {entry.name: getattr(rule.match, entry.name) for entry in fields(Match)}
    given = {name: value for name, value in match.items() if value is not None}
    return {"match": given, "pack": _pack_to_json(rule.pack)}


def _pack_to_json(pack: Pack) -> Any:
    if isinstance(pack, Cast):
        return {"cast": pack.dtype, "stochastic": pack.stochastic, "multiply": pack.multiply}
    if isinstance(pack, Scaled):
        return {"scale": pack.dtype, "per": pack.per, "stochastic": pack.stochastic}
    if isinstance(pack, Offload):
        inner = {} if pack.pack is None else {"pack": _pack_to_json(pack.pack)}
        return {"offload": {**inner, "waiting": pack.waiting, "ahead": pack.ahead}}
    if isinstance(pack, Bits):
        return "bits"
    if isinstance(pack, Recompute):
        return {"recompute": {"from_packed": True}} if pack.from_packed else "recompute"
    if isinstance(pack, SavedHook):
        return {"hook": pack.name, "key": pack.key}  # a function is no plain data: this names it
    return "keep"


def _pack_from_json(pack: Any) -> Pack:
    if isinstance(pack, Pack):
        return pack
    if pack == "keep":
        return Keep()
    if isinstance(pack, Mapping) and "cast" in pack:
        _refuse_unknown(pack, ("cast", "stochastic", "multiply"), "pack")
        return Cast(pack["cast"], **_but(pack, "cast"))
    if isinstance(pack, Mapping) and "scale" in pack:
        _refuse_unknown(pack, ("scale", "per", "stochastic"), "pack")
        return Scaled(pack["scale"], **_but(pack, "scale"))
    if pack == "offload":
        return Offload()
    if pack == "recompute":
        return Recompute()
    if pack == "bits":
        return Bits()
    if isinstance(pack, Mapping) and isinstance(pack.get("offload"), Mapping):
        _refuse_unknown(pack, ("offload",), "pack")
        _refuse_unknown(pack["offload"], ("pack", "waiting", "ahead"), "offload")
        inner: Any = _pack_from_json(pack["offload"]["pack"]) if "pack" in pack["offload"] else None
        return Offload(inner, **_but(pack["offload"], "pack"))
    if isinstance(pack, Mapping) and isinstance(pack.get("recompute"), Mapping):
        _refuse_unknown(pack, ("recompute",), "pack")
        _refuse_unknown(pack["recompute"], ("from_packed",), "recompute")
        return Recompute(**pack["recompute"])
    if isinstance(pack, str) and ":" in pack:
        return _imported(pack)
    kinds = '"keep", "bits", "offload", "recompute", "module:name" of a saved_hook, {"cast": dtype} or {"scale": dtype}'
    raise ValueError(f'"pack" must be {kinds}, got {shown(pack)}')


def _imported(place: str) -> SavedHook:
    """The hook at "module:name"."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the saved_hook {place!r} cannot be imported: {error}") from error
    if not isinstance(found, SavedHook):
        raise TypeError(f"{place!r} is {shown(found)}, not a saved_hook")
    return found


def _but(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != name}


def _refuse_unknown(entry: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in entry:
        if key not in known:
            raise ValueError(f"{what} has no {key!r}{did_you_mean(str(key), known)}; it has {', '.join(known)}")


def _known_dtype(name: object, known: Sequence[str]) -> str:
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if not isinstance(name, str):
        raise TypeError(f"a dtype must be a name such as {known[0]!r}, got {shown(name)}")
    full = _SHORT.get(name, name)
    if full not in known:
        raise ValueError(
            f"dtype {name!r} is not possible here{did_you_mean(name, known)}; it may be {', '.join(known)}"
        )
    return full


def _dtypes() -> tuple[str, ...]:
    found = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return tuple(sorted(found))
