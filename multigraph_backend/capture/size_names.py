"""Names of sizes and integer inputs, as the user wrote them.

Dynamo names an input by its source: `L['batch']['ids'][0]`, `L['self']._modules['l']._parameters['weight']`.  A user
declares `batch['ids'][0][1]`, dimension 1 of that tensor.  This module turns one into the other, and nothing else
in the package parses a source's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from multigraph_backend import spelling

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
_WHOLE_SHAPE = re.compile(r"\.(?:shape|size(?:\(\))?|item\(\))$")
_LENGTH = re.compile(r"^len\((.+)\)$")
_INDEXED = re.compile(r"^(.+)\[(-?\d+)\]$")
_WORD = re.compile(r"[^\W\d]\w*|\d+")
_AROUND = ("l", "g", "self", "args", "kwargs")  # words that lead to an input and are no part of its name


def meant(declared: str, known: Iterable[str]) -> str | list[str] | None:
    """What a name that is none of the `known` ones stands for: one of them, or all sizes of a tensor.

    In Python `x.shape[0]`, `x.size(0)` and `len(x)` are `x[0]`, `x[-1]` is the last size of `x`, and `x` has all sizes
    of `x`.  Else it is what has the same words, in any case and with or without underscores, where others may stand
    between them: `input['input_ids'][0]` is `input.data['input_ids'][0]`.  Else it is what is spelt most alike,
    or begins alike, or the only tensor that there is.
    """
    name, known = normalized(declared), list(known)
    shape = _SHAPE.match(name)
    if shape is not None:
        name = f"{shape[1] or shape[3]}[{shape[2] or shape[4]}]"
    name = _LENGTH.sub(r"\1[0]", _WHOLE_SHAPE.sub("", name))
    if name in known:
        return name
    tensors: dict[str, list[str]] = {}
    for size in known:
        if (indexed := _INDEXED.match(size)) is not None:
            tensors.setdefault(indexed[1], []).append(size)
    if name in tensors:
        return tensors[name]
    indexed = _INDEXED.match(name)
    if indexed is not None and indexed[1] in tensors:
        return _size_of(tensors[indexed[1]], int(indexed[2]))
    for same in (_of_the_same_words, _spelt_alike, _begun_alike):
        if indexed is not None and (tensor := same(indexed[1], list(tensors))) is not None:
            return _size_of(tensors[tensor], int(indexed[2]))
        if (number := same(name, [size for size in known if _INDEXED.match(size) is None])) is not None:
            return number
        if (tensor := same(name, list(tensors))) is not None:
            return tensors[tensor]
    if indexed is not None and len(tensors) == 1:
        (sizes,) = tensors.values()
        return _size_of(sizes, int(indexed[2]))
    return None


def _size_of(sizes: list[str], dim: int) -> str | list[str]:
    """The size of that dimension, all of the tensor if it has no such dimension."""
    at = dim + len(sizes) if dim < 0 else dim
    return sizes[at] if 0 <= at < len(sizes) else sizes


def _of_the_same_words(name: str, known: Sequence[str]) -> str | None:
    """The only one of `known` that has all words of `name` in their order and ends with its last one.

    Where there are several, the one with the fewest others between them.
    """
    words = _words(name)
    while len(words) > 1 and words[0] in _AROUND:
        del words[0]
    fitting: dict[int, list[str]] = {}
    for other in known:
        its = _words(other)
        following = iter(its)
        if words and its[-1:] == words[-1:] and all(word in following for word in words):
            fitting.setdefault(len(its), []).append(other)
    nearest = fitting[min(fitting)] if fitting else []
    return nearest[0] if len(nearest) == 1 else None


def _spelt_alike(name: str, known: Sequence[str]) -> str | None:
    return spelling.nearest(name, known, cutoff=0.7)


def _begun_alike(name: str, known: Sequence[str]) -> str | None:
    """The only one that is the beginning of the name, or of which the name is the beginning: `q` for `query`."""
    found = [other for other in known if name.isidentifier() and (name.startswith(other) or other.startswith(name))]
    return found[0] if len(found) == 1 else None


def _words(name: str) -> list[str]:
    return [word.casefold().replace("_", "") for word in _WORD.findall(name)]
