"""Names of sizes and integer inputs, as the user wrote them.

Dynamo names an input by its source: `L['batch']['ids'][0]`, `L['self']._modules['l']._parameters['weight']`.  A user
declares `batch['ids'][0][1]`, dimension 1 of that tensor.  This module turns one into the other, and nothing else
in the package parses a source's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_LOCAL = re.compile(r"^[LG]\[(['\"])(.+?)\1\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([A-Za-z_]\w*)\1\]")
_CONVERTED = re.compile(r"^___(?:from_numpy|as_tensor)\((.*)\)$")
_QUOTED = re.compile(r'\["([^"\']*)"\]')


def input_name(source_name: str) -> str:
    """`L['batch']['ids'][0]` -> `batch['ids'][0]`; module members are written with dots.

    What is no local or global (a constant, a name made by torch) stays as it is.
    """
    name = _CONVERTED.sub(r"\1", source_name)
    name = _LOCAL.sub(lambda match: match.group(2), name)
    name = _MEMBER.sub(lambda match: f".{match.group(2)}", name)
    return _QUOTED.sub(r"['\1']", name)


def size_name(source_name: str, dim: int) -> str:
    """The name of dimension `dim` of the tensor with this source: `x[0]`."""
    return f"{input_name(source_name)}[{dim}]"


def normalized(declared: str) -> str:
    """A declared name without the liberties that Python allows: spaces, double quotes."""
    return _QUOTED.sub(r"['\1']", declared.replace(" ", ""))


_SHAPE = re.compile(r"^(.+)\.(?:shape|size\(\))\[(-?\d+)\]$|^(.+)\.size\((?:dim=)?(-?\d+)\)$")
_INDEXED = re.compile(r"^(.+)\[(-?\d+)\]$")


def meant(declared: str, known: Iterable[str]) -> str | list[str] | None:
    """What a name that is none of the `known` ones stands for in Python: one of them, or all sizes of a tensor.

    `x.shape[0]` and `x.size(0)` are `x[0]`; `x[-1]` is the last size of `x`; `x` has all sizes of `x`.
    """
    name, known = normalized(declared), list(known)
    shape = _SHAPE.match(name)
    if shape is not None:
        name = f"{shape[1] or shape[3]}[{shape[2] or shape[4]}]"
    if name in known:
        return name
    indexed = _INDEXED.match(name)
    if indexed is not None and int(indexed[2]) < 0:
        sizes = _sizes_of(indexed[1], known)
        at = len(sizes) + int(indexed[2])
        return sizes[at] if 0 <= at < len(sizes) else (sizes or None)
    return _sizes_of(name, known) or None


def _sizes_of(tensor: str, known: Sequence[str]) -> list[str]:
    return [f"{tensor}[{dim}]" for dim in range(len(known)) if f"{tensor}[{dim}]" in known]
