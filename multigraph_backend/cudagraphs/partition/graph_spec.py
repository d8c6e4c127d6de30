"""What recordings have to know of one compiled graph, as plain data.

A graph is compiled once, and its code may be loaded from a cache by another process that never sees the graph.  All
that recording it takes is therefore read off while the graph is there, and stored beside the code: which pieces it was
cut into and why, what each input and output of a piece is in the graph, and names and stack traces for messages.

In:  what `partition` reads from Inductor's result, or what the splitter of the tests makes of a graph.
Out: a `GraphSpec`, which pickles, goes to JSON and back, and prints as short text.

Invariant: a spec that `verify` accepts is consistent in itself; no torch object is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multigraph_backend.distributed.sequence import Collective


@dataclass(frozen=True)
class Placeholder:
    """An input of the graph: its name, where the user's code first uses it, and where it is changed in place."""

    name: str
    stack_trace: str | None = None
    mutated_at: str | None = None


@dataclass(frozen=True)
class Cut:
    """Operators that no recording can hold, why, and the user's line that they come from."""

    reason: str
    ops: tuple[str, ...]
    stack_trace: str | None = None


@dataclass(frozen=True)
class PartitionSpec:
    """One piece.  Positions count its own inputs and outputs.

    inputs: per input, which of the graph's it is; None: it is made inside of the graph
    outputs: per output, the first of the graph's that it is; None: it stays inside
    static: inputs that torch says keep their address
    mutated: inputs that the piece changes, or whose memory it hands out with other contents
    visible: per output, whether a user may hold its memory; not so for what stays inside or is saved for a backward
    names: of the inputs
    constants: tensors that the piece's code holds itself, by name
    results: per input, how many results of one operator it is a tuple of, 0 for none; empty where no input is a tuple
    groups: process groups whose collectives it issues, by name
    unrecorded: why it is not recorded although it is a piece
    """

    number: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    static: tuple[int, ...]
    mutated: tuple[int, ...]
    visible: tuple[bool, ...]
    names: tuple[str, ...]
    constants: tuple[str, ...] = ()
    results: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    unrecorded: str | None = None

    def describe(self, whole: GraphSpec) -> str:
        counts = self.results or (0,) * len(self.names)
        names = [f"{count} of {name}" if count else name for name, count in zip(self.names, counts, strict=True)]
        inputs = _inputs(names, self.static, self.mutated)
        outputs = []
        for index, seen in zip(self.outputs, self.visible, strict=True):
            if index is None:
                outputs.append("inside seen" if seen else "inside")
            else:
                outputs.append(f"{index}" if seen or whole.visible[index] else f"saved {index}")
        text = f"piece {self.number}: {inputs} -> ({', '.join(outputs)})"
        text += f" with constants {', '.join(self.constants)}" if self.constants else ""
        text += f", collectives in {', '.join(self.groups)}" if self.groups else ""
        return text + (f", unrecorded: {self.unrecorded}" if self.unrecorded else "")

    def problems(self, whole: GraphSpec) -> list[str]:
        found = _lengths(inputs=self.inputs, names=self.names) + _lengths(outputs=self.outputs, visible=self.visible)
        found += _positions("static", self.static, len(self.inputs)) + _positions(
            "mutated", self.mutated, len(self.inputs)
        )
        if self.results:
            found += _lengths(inputs=self.inputs, results=self.results)
            for position, (count, index) in enumerate(zip(self.results, self.inputs, strict=False)):
                if count and index is not None:
                    found.append(f"input {position} is a tuple of results, and an input of the graph")
        for what, taken, count in (
            ("inputs", self.inputs, len(whole.inputs)),
            ("outputs", self.outputs, whole.outputs),
        ):
            found += _positions(what, [index for index in taken if index is not None], count, unique=False)
        for position in self.static:
            if 0 <= position < len(self.inputs) and self.inputs[position] not in whole.static:
                found.append(f"input {position} is static in the piece and not in the graph")
        for index, seen in zip(self.outputs, self.visible, strict=False):
            if index is not None and 0 <= index < len(whole.visible) and whole.visible[index] and not seen:
                found.append(f"output {index} of the graph is visible and not as output of the piece")
        return [f"piece {self.number}: {problem}" for problem in found]


@dataclass(frozen=True)
class GraphSpec:
    """A compiled graph and its pieces.  Positions count the graph's inputs and outputs.

    inputs, outputs: the graph's inputs, and how many outputs it has
    static, mutated, visible: as in `PartitionSpec`, for the whole graph
    pieces: in the order in which they run
    whole: one piece is all there is: nothing runs outside of it, so the graph's own callable may be recorded as one
    cuts: what runs between the pieces
    random: whether it may draw random numbers
    devices: indices of the devices that recordings would be made on; empty: nothing runs on such a device
    refused: why nothing of it can be recorded
    collectives: what it issues, in order; `not_known`: why that cannot be told
    pure: whether all operators are known to leave nothing behind but results, what they write to and random numbers
    unread: inputs that no step reads: floats that the trace has made constants, and what is only handed on
    """

    is_backward: bool
    inputs: tuple[Placeholder, ...]
    outputs: int
    static: tuple[int, ...]
    mutated: tuple[int, ...]
    visible: tuple[bool, ...]
    pieces: tuple[PartitionSpec, ...]
    whole: bool
    cuts: tuple[Cut, ...]
    devices: tuple[int, ...]
    refused: str | None = None
    random: bool = True
    collectives: tuple[Collective, ...] = ()
    not_known: str | None = None
    pure: bool = False
    unread: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Process groups whose collectives recordings of it hold."""
        return tuple(dict.fromkeys(group for piece in self.pieces for group in piece.groups if not piece.unrecorded))

    def describe(self) -> str:
        """Short text that is the same from run to run: one line a piece, one a cut.

        `*` marks static inputs, `!` those that are changed.  Outputs of pieces are numbered as the graph's; those
        `saved` are for the backward; what stays `inside` is `seen` if a user gets something else over its memory.
        """
        names = [entry.name for entry in self.inputs]
        inputs = _inputs(names, self.static, self.mutated)
        where = f"device {', '.join(str(index) for index in self.devices)}" if self.devices else "no device"
        where += ", as one" if self.whole else ""
        lines = [f"{'backward' if self.is_backward else 'forward'} on {where}: {inputs} -> {self.outputs} outputs"]
        if self.refused is not None:
            lines.append(f"refused: {self.refused}")
        lines += [piece.describe(self) for piece in self.pieces]
        lines += [f"issues {entry}" for entry in self.collectives]
        lines += [f"cut by {entry.reason}: {', '.join(entry.ops) or '?'}" for entry in self.cuts]
        return "\n".join(lines) + "\n"

    def verify(self) -> None:
        """Raises ValueError where the spec contradicts itself."""
        found = _lengths(outputs=range(self.outputs), visible=self.visible)
        found += _positions("static", self.static, len(self.inputs))
        found += _positions("mutated", self.mutated, len(self.inputs))
        found += _positions("unread", self.unread, len(self.inputs))
        found += [f"device {index}" for index in self.devices if index < 0]
        if len(set(self.devices)) != len(self.devices):
            found.append("devices are listed twice")
        if [piece.number for piece in self.pieces] != list(range(len(self.pieces))):
            found.append("pieces are not numbered from 0 on")
        if self.whole and len(self.pieces) != 1:
            found.append(f"it is one piece, and has {len(self.pieces)}")
        if self.whole and self.cuts:
            found.append("it is one piece, and is cut")
        if self.refused is not None and self.pieces:
            found.append("it is refused, and has pieces")
        for piece in self.pieces:
            found += piece.problems(self)
        if found:
            raise ValueError("inconsistent graph spec: " + "; ".join(found))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` is the way back."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> GraphSpec:
        fields = _tuples(data)
        fields["inputs"] = tuple(Placeholder(**entry) for entry in data["inputs"])
        fields["cuts"] = tuple(Cut(**_tuples(entry)) for entry in data["cuts"])
        fields["collectives"] = tuple(Collective.from_dict(entry) for entry in data.get("collectives", ()))
        fields["pieces"] = tuple(PartitionSpec(**_tuples(entry)) for entry in data["pieces"])
        return GraphSpec(**fields)


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _inputs(names: Sequence[str], static: Iterable[int], mutated: Iterable[int]) -> str:
    marks = [(set(static), "*"), (set(mutated), "!")]
    shown = (name + "".join(mark for marked, mark in marks if at in marked) for at, name in enumerate(names))
    return f"({', '.join(shown)})"


def _lengths(**sized: Sequence[object]) -> list[str]:
    counts = {name: len(value) for name, value in sized.items()}
    if len(set(counts.values())) == 1:
        return []
    return ["lengths differ: " + ", ".join(f"{count} {name}" for name, count in counts.items())]


def _positions(what: str, taken: Sequence[int], count: int, unique: bool = True) -> list[str]:
    found = [f"{what}: {index} is not below {count}" for index in taken if not 0 <= index < count]
    if unique and len(set(taken)) != len(taken):
        found.append(f"{what}: listed twice")
    return found
