"""A graph cut into pieces that can be recorded and what runs between them, for compilers other than Inductor.

Inductor cuts its own code.  Graphs that are run as they are (on the simulated device, and by tests) are cut here: runs
of operators that a recording can hold become pieces, the others stay in the code that calls the pieces.

In:  an ATen graph, as AOTAutograd makes it, with example values in `meta["val"]`; the user's `CutRules`.
Out: a `Split`: the `GraphSpec`, the code of each piece, and the code around them, for pieces wrapped in recordings.

Invariant: operators run in the order of the graph.  A piece's inputs say all that its recording depends on: tensors,
and every number that their sizes and strides are made of.  No view enters or leaves a piece: each is made where it is
needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.partition import cuts, of_inductor
from multigraph_backend.cudagraphs.partition.cuts import CutRules
from multigraph_backend.cudagraphs.partition.graph_spec import Cut, GraphSpec, PartitionSpec
from multigraph_backend.distributed import sequence
from tests.support.straight_code import Boxed, StraightCode, bases, inputs_of, is_light, value_of, variable


@dataclass(frozen=True)
class Split:
    """functions: the code of the pieces, each of a list that it clears.  source: of the code around them."""

    spec: GraphSpec
    functions: tuple[Boxed, ...]
    source: str
    make: Callable[[Sequence[Boxed]], Boxed] = field(repr=False)

    def bind(self, pieces: Sequence[Boxed] | None = None) -> Boxed:
        """The graph as a function of a list that it clears; `pieces` are called in place of `functions`."""
        return self.make(self.functions if pieces is None else tuple(pieces))


def split(gm: GraphModule, rules: CutRules, static: Iterable[int] = (), is_backward: bool = False) -> Split:
    """Cut a graph.  `static`: positions of inputs that keep their address."""
    graph = of_inductor.take(gm, static, is_backward, rules).graph
    (runs, apart), memory, results = _parted(gm, rules), _Memory(gm), _results(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    place = {node: at for at, node in enumerate(placeholders)}
    shown = memory.union(node for node, seen in zip(results, graph.visible, strict=True) if seen)
    around = StraightCode(gm, "graph", [variable(node) for node in placeholders])
    specs: list[PartitionSpec] = []
    functions: list[Boxed] = []
    for number, run in enumerate(runs):
        if not run.recordable:
            for node in run.nodes:
                around.run(node)
            continue
        piece = _piece(run, placeholders, runs[:number], runs[number + 1 :], results)
        functions.append(_function(gm, f"piece_{len(specs)}", piece))
        around.call_piece(len(specs), piece.inputs, piece.measured, piece.outputs)
        changed = memory.changed_by(run.nodes)
        specs.append(
            PartitionSpec(
                number=len(specs),
                inputs=tuple(place.get(node) for node in piece.inputs) + (None,) * len(piece.measured),
                outputs=tuple(_first_of(node, results) for node in piece.outputs),
                static=tuple(at for at, node in enumerate(piece.inputs) if place.get(node) in graph.static),
                mutated=tuple(at for at, node in enumerate(piece.inputs) if memory.of[node] & changed),
                visible=tuple(bool(memory.of[node] & shown) for node in piece.outputs),
                names=tuple(node.name for node in piece.inputs)
                + tuple(f"{n.name}.{text}" for n, text in piece.measured),
                constants=tuple(sorted({str(arg.target) for node in run.nodes for arg in _constants(node)})),
                groups=tuple(dict.fromkeys(entry.group for entry in sequence.of_nodes(run.nodes))),
            )
        )
    source, make = around.finish(results)
    changed = memory.changed_by(gm.graph.nodes)
    spec = GraphSpec(
        is_backward=is_backward,
        inputs=graph.inputs,
        outputs=graph.outputs,
        static=graph.static,
        mutated=tuple(at for at, node in enumerate(placeholders) if memory.of[node] & changed),
        visible=graph.visible,
        pieces=tuple(specs),
        whole=len(runs) == len(specs) == 1,
        cuts=graph.cuts + tuple(Cut(cuts.APART, (cuts.shown(node),), node.meta.get("stack_trace")) for node in apart),
        devices=graph.devices,
        random=graph.random,
        collectives=graph.collectives,
        not_known=graph.not_known,
    )
    spec.verify()
    return Split(spec, tuple(functions), source, make)


# ---------------------------------------------------------------- pieces


@dataclass
class _Run:
    """Operators that follow one another and are all recordable, or all not."""

    recordable: bool
    nodes: list[Node]

    def needs(self) -> list[Node]:
        """What comes from elsewhere, in the order of use: tensors as they were made, and numbers."""
        own = set(self.nodes)
        needed = dict.fromkeys(base for node in self.nodes for arg in node.all_input_nodes for base in _enter(arg, own))
        return [node for node in needed if node not in own and node.op != "get_attr"]


@dataclass(frozen=True)
class _Piece:
    """measured: numbers that are no values of the graph, as (tensor, what is asked of it)."""

    nodes: list[Node]
    inputs: list[Node]
    measured: list[tuple[Node, str]]
    outputs: list[Node]


def _enter(node: Node, own: set[Node]) -> list[Node]:
    """What a run of the nodes `own` is given to have the value of `node`."""
    node = value_of(node)
    if not is_light(node) or not (cuts.has_tensors(node.meta.get("val")) or own.intersection(bases(node))):
        return [node]
    return [base for arg in node.all_input_nodes for base in _enter(arg, own)]


def _parted(gm: GraphModule, rules: CutRules) -> tuple[list[_Run], list[Node]]:
    """Runs, and the collectives that are kept out of pieces because their start and their wait would not be in one."""
    apart: set[Node] = set()
    while True:
        runs = _runs(gm, rules, apart)
        found: set[Node] = set()
        for run in runs:
            if run.recordable:
                found |= _started_apart(gm.graph.nodes, run.nodes)
        if not found:
            return runs, [node for node in gm.graph.nodes if node in apart]
        apart |= found


def _started_apart(nodes: Iterable[Node], here: Iterable[Node]) -> set[Node]:
    """Of the collectives and waits among `here`, those that are not both here: a start whose waits are elsewhere, or
    nowhere; a wait for what was started elsewhere.  `nodes`: all of the graph."""
    inside = set(here)
    starts: dict[Node, set[Node]] = {}
    waited: dict[Node, set[Node]] = {}
    waits: set[Node] = set()
    for node in nodes:
        op = cuts.operator_of(node) if node.op == "call_function" else None
        if op is not None and isinstance(op, _compat.OpOverload) and sequence.issues(op.name()):
            starts[node] = {node}
            waited[node] = set()
        elif op is not None and isinstance(op, _compat.OpOverload) and sequence.waits(op.name()):
            waits.add(node)
            starts[node] = set().union(*(starts.get(arg, set()) for arg in node.all_input_nodes))
            for start in starts[node]:
                waited[start].add(node)
        elif node.target is operator.getitem or cuts.is_view(node):
            starts[node] = set().union(*(starts.get(arg, set()) for arg in node.all_input_nodes))
    apart: set[Node] = set()
    for node in inside:
        if node in waited:
            if not waited[node] or not waited[node] <= inside:
                apart.add(node)
        elif node in waits:
            began = starts.get(node, set()) & waited.keys()
            if not began or not began <= inside:
                apart.add(node)
    return apart


def _runs(gm: GraphModule, rules: CutRules, apart: Collection[Node] = ()) -> list[_Run]:
    runs: list[_Run] = []
    of: dict[Node, _Run] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_light(node):
            continue
        if node.op != "call_function":
            raise ValueError(f"{node.name} is a {node.op}; only ATen graphs are cut")
        recordable = node not in apart and cuts.unsupported(node, rules) is None
        if node.target is operator.getitem:  # stays with what it is a part of
            run = of[node.args[0]]
        elif runs and (runs[-1].recordable == recordable or not _on_tensors(node)):
            run = runs[-1]
        else:
            runs.append(run := _Run(recordable and _on_tensors(node), []))
        run.nodes.append(node)
        of[node] = run
    return runs


def _on_tensors(node: Node) -> bool:
    """Not so for checks of numbers."""
    return any(cuts.has_tensors(arg.meta.get("val")) for arg in (node, *node.all_input_nodes))


def _piece(
    run: _Run, placeholders: Sequence[Node], before: Sequence[_Run], later: Sequence[_Run], results: Sequence[Any]
) -> _Piece:
    inputs = run.needs()
    known = [*inputs, *placeholders, *(node for other in before for node in other.nodes)]
    numbers, measured = _numbers([node for node in inputs if _is_tensor(node)], known)
    inputs += [node for node in numbers if node not in inputs]
    inputs.sort(key=lambda node: not _is_tensor(node))
    needed = {base for other in later for node in other.needs() for base in bases(node)}
    needed.update(base for node in results if isinstance(node, Node) for base in bases(node))
    return _Piece(run.nodes, inputs, measured, [node for node in run.nodes if node in needed])


def _numbers(inputs: Sequence[Node], known: Sequence[Node]) -> tuple[list[Node], list[tuple[Node, str]]]:
    """What sizes and strides of `inputs` are made of: values of the graph, or else what has to be asked of a tensor."""
    made = {
        _compat.sympy_expr(value): node
        for node in reversed(known)
        if isinstance(value := node.meta.get("val"), torch.SymInt)
    }
    asked: dict[Any, tuple[Node, str]] = {}
    for node in inputs:
        tensor = node.meta["val"]
        for text, numbers in (("size", tensor.size()), ("stride", tensor.stride())):
            for dim, value in enumerate(numbers):
                if isinstance(value, torch.SymInt):
                    asked.setdefault(_compat.sympy_expr(value), (node, f"{text}({dim})"))
    found: dict[Node, None] = {}
    measured = []
    for expression, question in asked.items():
        if expression.free_symbols <= made.keys():
            found.update((made[symbol], None) for symbol in expression.free_symbols)
        else:
            measured.append(question)
    return sorted(found, key=known.index), measured


def _function(gm: GraphModule, name: str, piece: _Piece) -> Boxed:
    unused = [f"measured_{at}" for at in range(len(piece.measured))]
    code = StraightCode(gm, name, [variable(node) for node in piece.inputs] + unused)
    for node in piece.nodes:
        code.run(node)
    _, make = code.finish(piece.outputs)
    function: Boxed = make(())
    return function


def _results(gm: GraphModule) -> tuple[Any, ...]:
    results: Any = gm.graph.output_node().args[0]
    results = results if isinstance(results, list | tuple) else (results,)
    return tuple(value_of(result) if isinstance(result, Node) else result for result in results)


def _first_of(node: Node, results: Sequence[Any]) -> int | None:
    """The first output of the graph that is `node`, or a view of it."""
    return next(
        (at for at, result in enumerate(results) if isinstance(result, Node) and _looked_at(result) is node), None
    )


def _looked_at(node: Node) -> Node:
    while is_light(node) and node.args and isinstance(node.args[0], Node):
        node = value_of(node.args[0])
    return node


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _constants(node: Node) -> Iterator[Node]:
    return (base for arg in inputs_of(node) for base in bases(arg) if base.op == "get_attr")


# ---------------------------------------------------------------- memory


class _Memory:
    """`of`: per node, the nodes that made the memory its result may be in."""

    def __init__(self, gm: GraphModule) -> None:
        self.of: dict[Node, frozenset[Node]] = {}
        for node in gm.graph.nodes:
            self.of[node] = self._of(node) if cuts.has_tensors(node.meta.get("val")) else frozenset()

    def union(self, nodes: Iterable[Any]) -> frozenset[Node]:
        return frozenset().union(*(self.of[node] for node in nodes if isinstance(node, Node)))

    def changed_by(self, nodes: Iterable[Node]) -> frozenset[Node]:
        """Memory that `nodes` write to."""
        return self.union(arg for node in nodes for arg in _written(node))

    def _of(self, node: Node) -> frozenset[Node]:
        own = frozenset([node])
        if node.op != "call_function":
            return own
        if node.target is operator.getitem:
            return self.union(node.all_input_nodes)
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name.startswith(("prims::", "aten::_unsafe_view")):
            return own | self.union(node.all_input_nodes)  # not said, or not to be relied upon
        shared = self.union(arg for arg, info in _arguments(node, schema) if info is not None)
        return shared if all(result.alias_info is not None for result in schema.returns) else own | shared


def _written(node: Node) -> Iterator[Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        yield from (arg for arg, info in _arguments(node, schema) if info is not None and info.is_write)
    elif (
        isinstance(node.target, _compat.HigherOrderOperator) and node.target.name() == "triton_kernel_wrapper_mutation"
    ):
        yield from node.all_input_nodes


def _arguments(node: Node, schema: Any) -> Iterator[tuple[Node, Any]]:
    """Nodes among the arguments, each with what the schema says of the memory of its argument."""
    for at, argument in enumerate(schema.arguments):
        given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, list | tuple) else (given,):
            if isinstance(value, Node):
                yield value, argument.alias_info
