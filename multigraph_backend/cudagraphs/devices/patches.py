"""Which parameters of a recording's kernels hold the address of an input: proven by two captures, or not believed.

An input that comes at another address at each call is copied into a buffer that the recording reads.  Where it is known
which parameters of which kernels hold its address, these are *patched* at each launch instead, and nothing is copied.
What compiled code and libraries do with an address is not known; so the piece is captured twice, the first time with
the input elsewhere, and all that both captures tell the driver is compared, word by word:

    with x at 0x7f0000000000        with x at 0x7f5500000000
    add   [x, out, 1024]            add   [x', out, 1024]            word 0 is x: patched
    mean  [x + 4096, out2]          mean  [x' + 4096, out2]          word 0 is x + 4096: patched
    add   [out, out2]               add   [out, out2]                nothing of x

In:  the nodes of both graphs as plain data (`Described`), and where the inputs lay (`Candidate`).  Out: what is told
to which node (`Told`), or for an input why it is copied as ever.

What is believed: a word of a kernel's parameters that differs, and is in both captures as far behind the first byte of
the same input, inside of it, holds the address of that input.  Nothing else may differ between the captures.
Otherwise, and where a node could carry addresses in what is not seen here (memory of the host that is copied, calls of
the host, graphs within), no input is patched.  An input that is read otherwise, by a copy or a fill, or in what may be
a tensor map, whose fields the driver encodes, is not patched; nor is one whose address was not seen at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: kinds of nodes, as CUDA numbers them
KERNEL, COPY, FILL, EMPTY, WAIT, RECORD = 0, 1, 2, 5, 6, 7
_SEEN = frozenset({KERNEL, COPY, FILL, EMPTY, WAIT, RECORD})
_ON_DEVICE = 2  # of the kinds of memory that a copy reads and writes
WORD = 8
#: bytes of a tensor map, and what a structure that has one among its fields is a multiple of
MAP, MAP_ALIGNED = 128, 64
#: nodes of one recording that are told anything: each takes the host about a microsecond
MOST_NODES = 64


class Unreadable(Exception):
    """The nodes of a graph cannot be told; the text says why."""


class Limits(NamedTuple):
    """What inputs may be patched on a device: from so many bytes on, for each kernel that is told, for to tell it takes
    the host about as long as the device takes to copy so much; and those that lie on so many bytes."""

    least: int
    aligned: int


class Described(NamedTuple):
    """One node of a captured graph.

    `handle`: the driver's.  `kind`: see above.  `same`: numbers that have to be the same in another capture; of a
    kernel (function, kernel, context, 3 of the grid, 3 of the block, shared bytes), of a copy the kinds of memory of
    source and target first.  `values`: of a kernel its parameters as bytes, of a copy the addresses of source and
    target, of a fill that of its target.
    """

    handle: int
    kind: int
    same: tuple[int, ...]
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class Candidate:
    """An input that may be patched: `span` bytes from its first to behind its last element at `address` in the capture
    that is kept, and at `elsewhere` in the other; `nbytes` would be copied."""

    index: int
    address: int
    elsewhere: int
    span: int
    nbytes: int


class Word(NamedTuple):
    """At byte `at` of parameter `parameter`: the address of input `which` (of those that are patched), and `offset`."""

    parameter: int
    at: int
    which: int
    offset: int


@dataclass(frozen=True)
class Told:
    """A kernel that is told where inputs lie: all of its parameters as they were captured, and the words among them."""

    node: Described
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Patched:
    """An input of a recording that is read where it lies: its position, and how it lies from its first element on, with
    `span` bytes to behind its last."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    span: int


@dataclass(frozen=True)
class Patches:
    """What a launch tells the kernels of a recording.  An input has to lie on `aligned` bytes, and outside of
    `written`, ranges that the recording changes beside its own memory: sorted, and apart from each other."""

    inputs: tuple[Patched, ...]
    told: tuple[Told, ...]
    written: tuple[tuple[int, int], ...]
    aligned: int


@dataclass(frozen=True)
class Proven:
    """`told`: of all candidates, in their order, if `refused`, by their index, is empty; a recording in which some are
    refused reads these where they lay, and is of no use."""

    told: tuple[Told, ...]
    refused: dict[int, str]


class _Differs(Exception):
    """No input can be patched; the text says why."""


def proven(
    elsewhere: Sequence[Described], here: Sequence[Described], inputs: Sequence[Candidate], least: int
) -> Proven:
    """Compare the nodes of both captures, with the inputs `elsewhere` and `here`; see the module's text."""
    if len({entry.elsewhere - entry.address for entry in inputs}) < len(inputs):
        raise ValueError("two inputs were moved by the same distance")
    refused: dict[int, str] = {}
    words: dict[int, list[Word]] = {}  # by the number of a node
    try:
        if len(elsewhere) != len(here):
            raise _Differs(f"two captures have {len(elsewhere)} and {len(here)} nodes")
        for number, (other, node) in enumerate(zip(elsewhere, here, strict=True)):
            _check(other, node)
            for parameter, (there, value) in enumerate(zip(other.values, node.values, strict=True)):
                if there == value:
                    continue
                for word in _words(there, value, parameter, inputs):
                    if (why := _no_patch(node, len(value))) is not None:
                        refused[inputs[word.which].index] = why
                    words.setdefault(number, []).append(word)
    except _Differs as why:
        return Proven((), {entry.index: str(why) for entry in inputs})
    nodes = [[number for number, found in words.items() if any(word.which == at for word in found)]
             for at in range(len(inputs))]  # fmt: skip
    for entry, of in zip(inputs, nodes, strict=True):
        if not of:
            refused.setdefault(entry.index, "no kernel was seen to be given its address")
        elif entry.nbytes < len(of) * least:
            refused.setdefault(entry.index, f"{len(of)} kernels read it, which takes longer to tell than to copy it")
    _keep_few(inputs, nodes, refused)
    told = tuple(
        Told(here[number], tuple(word for word in found if inputs[word.which].index not in refused))
        for number, found in sorted(words.items())
    )
    return Proven(tuple(entry for entry in told if entry.words), refused)


def _check(other: Described, node: Described) -> None:
    """Raise `_Differs` where nodes are not two captures of one, or carry what is not seen."""
    if node.kind not in _SEEN:
        raise _Differs(f"it has a node of CUDA's kind {node.kind}, which may hold addresses that are not seen")
    sizes, others = [len(value) for value in node.values], [len(value) for value in other.values]
    if other.kind != node.kind or other.same != node.same or sizes != others:
        raise _Differs("two captures launch different kernels")
    if node.kind == KERNEL and not node.values:
        raise _Differs("it has a kernel whose parameters are not known")
    if node.kind == COPY and node.same[:2] != (_ON_DEVICE, _ON_DEVICE):
        raise _Differs("it copies memory of the host, which may hold addresses")


def _words(there: bytes, value: bytes, parameter: int, inputs: Sequence[Candidate]) -> list[Word]:
    """The words of a parameter that differ.  Raises `_Differs` where one is not the address of an input."""
    found = []
    whole = len(value) // WORD * WORD
    for at in range(0, whole, WORD):
        was, now = (int.from_bytes(text[at : at + WORD], "little") for text in (there, value))
        if was == now:
            continue
        holds = [
            which
            for which, entry in enumerate(inputs)
            if now - entry.address == was - entry.elsewhere and 0 <= now - entry.address < entry.span
        ]
        if len(holds) != 1:
            raise _Differs("two captures differ in a number that is not the address of an input")
        found.append(Word(parameter, at, holds[0], now - inputs[holds[0]].address))
    if there[whole:] != value[whole:]:
        raise _Differs("two captures differ in a number that is not the address of an input")
    return found


def _no_patch(node: Described, nbytes: int) -> str | None:
    """Why an address in a value of `nbytes` bytes of `node` cannot be told later; None if it can."""
    if node.kind != KERNEL:
        return "it is copied, or filled, by what is no kernel"
    if nbytes >= MAP and nbytes % MAP_ALIGNED == 0:
        return "a kernel may be given its address in a tensor map"
    return None


def _keep_few(inputs: Sequence[Candidate], nodes: Sequence[Sequence[int]], refused: dict[int, str]) -> None:
    """Refuse inputs, those first that save least for each node, until few enough nodes are told anything."""
    kept: set[int] = set()
    wanted = [at for at, entry in enumerate(inputs) if entry.index not in refused]
    for at in sorted(wanted, key=lambda at: -inputs[at].nbytes / len(nodes[at])):
        if len(kept | set(nodes[at])) > MOST_NODES:
            refused[inputs[at].index] = f"more than {MOST_NODES} kernels would have to be told where inputs lie"
        else:
            kept |= set(nodes[at])


def apart(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same bytes as ranges (begin, end) that are sorted and apart from each other."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(entry for entry in ranges if entry[0] < entry[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)


def overlaps(begin: int, end: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether any byte of `begin` to `end` is in one of `ranges`."""
    return any([begin < other_end and other < end for other, other_end in ranges])  # noqa: C419 - see `Node.alive`
