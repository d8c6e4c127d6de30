"""The collectives that a graph issues, in order, and whether two forms of one graph issue the same.

Ranks choose on their own: one may run a variant, another the generic graph, a third has just failed to compile.  That
is safe as long as every form of a graph issues the same collectives in the same order; else ranks wait for each other
forever, or take one another's data for something else.

In:  ATen graphs, as AOTAutograd makes them, with example values in `meta["val"]`.
Out: `Collective`s, plain data that is cached with the code and shown in reports; `difference` of two sequences, as
     text.

Invariant: what is not understood is not taken for equal.  Waits are left out: each rank waits on its own.

Element counts are Python expressions over the symbols of the compile that they come from.  What the program computes
from data while it runs is `DATA` in both sequences: the same program computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from multigraph_backend import _compat

#: libraries whose operators communicate
NAMESPACES = frozenset((
    "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem",
))  # fmt: skip
SYMMETRIC = "symm_mem"
DATA = "data"

_LOCAL = frozenset(("wait_tensor", "_wrap_tensor_autograd"))
_INLINED = frozenset(("invoke_subgraph",))
_WRAPPERS = frozenset(("with_effects", "auto_functionalized", "auto_functionalized_v2"))


class NotKnown(Exception):
    """Which collectives a graph issues cannot be told; its text says why."""


@dataclass(frozen=True)
class Collective:
    """One collective as this rank issues it.

    kind: `all_reduce`, ...; in place or not, and with its derivative or without, is the same
    group: name of the process group
    dtypes, counts: of each tensor that goes in: its type, and how many elements it has, as text
    how: the other arguments, as text: reduction, root, number of ranks
    nbytes: of what goes in, for the sizes of the compile; None where these are not known.  Takes no part in comparisons
    """

    kind: str
    group: str
    dtypes: tuple[str, ...]
    counts: tuple[str, ...]
    how: tuple[str, ...] = ()
    nbytes: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        sent = ", ".join(f"{dtype}[{count}]" for dtype, count in zip(self.dtypes, self.counts, strict=True))
        how = f", {', '.join(self.how)}" if self.how else ""
        return f"{self.kind}({sent}{how}) in group {self.group!r}"

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Collective:
        """The way back from `dataclasses.asdict`, also after JSON."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return Collective(**fields)


@dataclass(frozen=True)
class Issued:
    """What one form of a graph issues: in its forward, and in its backward, where it has one.

    unknown: why it is not known; then the rest means nothing.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    unknown: str | None = None

    @property
    def count(self) -> int:
        return len(self.forward) + len(self.backward)


def holds_collectives(module: torch.nn.Module) -> bool:
    """Whether a graph, as Dynamo or AOTAutograd makes it, or a graph inside of it, issues a collective or waits.

    Where Dynamo's graph makes a DTensor, any of its operators may issue some, which only AOTAutograd's graph shows.
    """
    graphs = [inner for inner in module.modules() if isinstance(inner, GraphModule)]
    return any(_namespace(target) in NAMESPACES for inner in graphs for target in _targets(inner)) or any(
        type(node.meta.get("example_value")).__module__.startswith("torch.distributed.")
        for inner in graphs
        for node in inner.graph.nodes
    )


def of_graph(gm: GraphModule) -> tuple[Collective, ...]:
    """What an ATen graph issues.  Raises `NotKnown`."""
    return tuple(_of_graph(gm))


def of_nodes(nodes: Iterable[Node]) -> list[Collective]:
    """What single nodes issue; one that cannot be told is left out."""
    found = []
    for node in nodes:
        try:
            found += list(_of_node(node))
        except NotKnown:
            continue
    return found


def kind_of(name: str) -> str:
    """The kind of an operator by its name, with or without namespace and overload: `c10d.all_reduce_.default`."""
    parts = name.replace("::", ".").split(".")
    base = parts[1] if len(parts) > 1 else parts[0]
    return base.removesuffix("_out").removesuffix("_")


def issues(name: str) -> bool:
    """Whether the operator of that name (`namespace::op`, `namespace.op.overload`) is a collective, and no wait."""
    parts = name.replace("::", ".").split(".")
    return len(parts) > 1 and parts[0] in NAMESPACES and parts[1] not in _LOCAL


def waits(name: str) -> bool:
    """Whether the operator of that name waits for a collective."""
    parts = name.replace("::", ".").split(".")
    return len(parts) > 1 and parts[0] in NAMESPACES and parts[1] == "wait_tensor"


# ---------------------------------------------------------------- reading a graph


def _of_graph(gm: GraphModule) -> Iterator[Collective]:
    for node in gm.graph.nodes:
        if node.op == "call_module" and isinstance(inner := gm.get_submodule(str(node.target)), GraphModule):
            yield from _of_graph(inner)
        elif node.op == "call_function":
            yield from _of_node(node)
            if isinstance(node.target, _compat.HigherOrderOperator) and node.target.name() not in _WRAPPERS:
                yield from _of_subgraphs(gm, node, node.target.name())


def _of_node(node: Node) -> Iterator[Collective]:
    """What a node issues itself."""
    target: Any = node.target
    args: Sequence[Any] = node.args
    if isinstance(target, _compat.HigherOrderOperator) and target.name() in _WRAPPERS:
        at = 1 if target.name() == "with_effects" else 0
        target, args = node.args[at], node.args[at + 1 :]
    if _namespace(target) in NAMESPACES and issues(str(target)):
        yield _collective(target, args, node.kwargs)


def _of_subgraphs(gm: GraphModule, node: Node, name: str) -> Iterator[Collective]:
    inside = [graph for graph in _subgraphs(gm, node) if holds_collectives(graph)]
    if inside and name not in _INLINED:
        raise NotKnown(f"{name} decides while it runs whether {next(_of_graph(inside[0]), 'a collective')} is issued")
    for graph in inside:
        yield from _of_graph(graph)


def _subgraphs(gm: GraphModule, node: Node) -> Iterator[GraphModule]:
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            start: Any = gm
            value = functools.reduce(lambda at, part: getattr(at, part, None), str(arg.target).split("."), start)
            if isinstance(value, GraphModule):
                yield value


def _collective(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collective:
    schema = getattr(op, "_schema", None)
    if schema is None:
        raise NotKnown(f"{op} is not resolved to an overload")
    group, how = "", []
    tensors: list[torch.Tensor] = []
    for index, argument in enumerate(schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        found = list(_tensors(given))
        if argument.name in ("group_name", "group", "tag", "process_group"):
            group = str(given)
        elif found and not argument.is_out:
            tensors += found
        elif not found:
            how += _shown(given)
    counts = tuple(_text(tensor.numel()) for tensor in tensors)
    sizes = [_bytes(tensor) for tensor in tensors]
    return Collective(
        kind=kind_of(str(op)),
        group=group,
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        counts=counts,
        how=tuple(how),
        nbytes=None if None in sizes else sum(size for size in sizes if size is not None),
    )


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, Node):
        value = given.meta.get("val")
        yield from _tensors(value) if not isinstance(value, Node) else ()
    elif isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for item in given:
            yield from _tensors(item)


def _shown(given: Any) -> list[str]:
    """One text a value; of a list, its length first."""
    if isinstance(given, Node):
        given = given.meta.get("val")
    if isinstance(given, list | tuple):
        return [f"{len(given)} of", *(text for item in given for text in _shown(item))]
    return [_text(given) if isinstance(given, torch.SymInt) else str(given)]


def _text(number: int | torch.SymInt) -> str:
    """A number as Python text; `DATA` where it depends on more than sizes."""
    if not isinstance(number, torch.SymInt):
        return str(number)
    expr = number.node.expr
    unbacked = _compat.SymT.UNBACKED_INT
    if any(_compat.symbol_is_type(symbol, unbacked) for symbol in expr.free_symbols):
        return DATA
    return str(_compat.PythonPrinter().doprint(expr))


def _bytes(tensor: torch.Tensor) -> int | None:
    count = tensor.numel()
    if isinstance(count, torch.SymInt):
        hint = count.node.hint if count.node.has_hint() else None
        return None if hint is None else int(hint) * tensor.dtype.itemsize
    return count * tensor.dtype.itemsize


def _targets(gm: GraphModule) -> Iterator[Any]:
    for node in gm.graph.nodes:
        if node.op == "call_function":
            yield node.target
            yield from (arg for arg in node.args[:2] if isinstance(arg, _compat.OpOverload))  # of wrappers


def _namespace(target: Any) -> str:
    if isinstance(target, _compat.OpOverload | _compat.OpOverloadPacket):
        return str(target).split(".")[0]
    return ""


# ---------------------------------------------------------------- comparing


def difference(reference: Issued, other: Issued, same: Callable[[str, str], bool]) -> str | None:
    """How `other` differs from what generic issues, `reference`; None where it does not.

    `same(theirs, ours)`: whether two element counts, or other arguments, are equal wherever `other` runs.
    """
    for issued, name in ((reference, "generic"), (other, "it")):
        if issued.unknown is not None:
            return f"the collectives that {name} issues are not known: {issued.unknown}"
    for phase in ("forward", "backward"):
        theirs, ours = getattr(reference, phase), getattr(other, phase)
        for index, (wanted, given) in enumerate(zip(theirs, ours, strict=False)):
            if not _same_collective(wanted, given, same):
                return f"collective {index} of its {phase} is {given}, and generic's {wanted}"
        if len(theirs) != len(ours):
            return f"its {phase} issues {len(ours)} collectives, and generic's {len(theirs)}"
    return None


def _same_collective(one: Collective, other: Collective, same: Callable[[str, str], bool]) -> bool:
    if (one.kind, one.group, one.dtypes) != (other.kind, other.group, other.dtypes):
        return False
    if (len(one.counts), len(one.how)) != (len(other.counts), len(other.how)):
        return False
    pairs = [*zip(one.counts, other.counts, strict=True), *zip(one.how, other.how, strict=True)]
    return all(theirs == ours == DATA or same(theirs, ours) for theirs, ours in pairs)


@dataclass(frozen=True)
class Sizes:
    """What sizes are in one compile.

    replaced: what each symbol of Dynamo's trace is there, as an expression over symbols of its own; equal: what the
    compile found each of these to be.
    """

    replaced: Mapping[sympy.Symbol, Any] = field(default_factory=dict)
    equal: Mapping[sympy.Symbol, Any] = field(default_factory=dict)

    @property
    def symbols(self) -> dict[str, sympy.Symbol]:
        """Those of the compile, by name."""
        found = (symbol for expr in self.replaced.values() for symbol in getattr(expr, "free_symbols", ()))
        return {str(symbol): symbol for symbol in found}


@dataclass(frozen=True)
class SameSizes:
    """Whether two texts, each over symbols of its compile, are one number wherever the second compile's code runs."""

    theirs: Sizes
    ours: Sizes

    def __call__(self, theirs: str, ours: str) -> bool:
        left, right = _parsed(theirs, self.theirs.symbols), _parsed(ours, self.ours.symbols)
        if left is None or right is None:  # a word: `sum`, None
            return theirs == ours
        moved = left.xreplace({
            expr: self.ours.replaced[symbol]
            for symbol, expr in self.theirs.replaced.items()
            if isinstance(expr, sympy.Symbol) and symbol in self.ours.replaced
        })  # fmt: skip
        if not (moved.free_symbols | right.free_symbols) <= set(self.ours.symbols.values()):
            return False
        moved, right = moved.xreplace(self.ours.equal), right.xreplace(self.ours.equal)
        return bool(sympy.simplify(sympy.expand(moved - right)) == 0)


def _parsed(text: str, symbols: Mapping[str, sympy.Symbol]) -> Any:
    """The expression of a count, None for what is none."""
    if not set(_names(text)) <= symbols.keys() | _FUNCTIONS.keys():
        return None
    try:
        value = eval(text, {"__builtins__": {}}, {**_FUNCTIONS, **symbols})
    except Exception:
        return None
    return sympy.sympify(value) if isinstance(value, int | sympy.Basic) and not isinstance(value, bool) else None


_FUNCTIONS: Mapping[str, Any] = {"max": sympy.Max, "min": sympy.Min, "abs": sympy.Abs}


def _names(text: str) -> Iterable[str]:
    word = ""
    for letter in f"{text} ":
        if letter.isalnum() or letter in "_":
            word += letter
            continue
        if word and not word[0].isdigit():
            yield word
        word = ""
