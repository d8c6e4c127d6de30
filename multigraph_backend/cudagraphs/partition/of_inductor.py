"""What recordings have to know of a graph that Inductor has compiled, taken together before it is cached.

Half of it is in the graph, and Inductor changes the graph while it compiles it; the other half is in what it made.  So
`take` reads the graph before, and `from_inductor` puts a `GraphSpec` together after.

An example.  A graph of two sizes and two tensors, in whose middle a sum goes to the CPU, is increased there and comes
back, is two pieces with that addition between them:

    forward on device 0: (arg0_1, arg1_1, arg2_1, arg3_1) -> 2 outputs
    piece 0: (arg2_1, arg3_1, arg0_1, arg1_1) -> (1, inside)
    piece 1: (buf1, buf6, arg0_1, arg1_1) -> (0, 1)
    cut by cpu op: aten.add.Tensor

The graph says that two sizes and two tensors come in and which operator cuts it; the generated code, that piece 0 takes
the tensors first, that its first output is output 1 of the graph and its second stays inside (`buf3`, the sum), and
that piece 1 is given `buf6`, the memory that the sum has come back to.

In:  the graph that Inductor is given, the positions of static inputs, the user's `CutRules`; the `CompiledFxGraph`.
Out: a `GraphSpec`.

Invariant: what the generated code says decides.  Where it says nothing that is understood, Inductor's maps do, if they
fit; where they contradict it, or an operator that may be in no recording is in one, nothing is recorded.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.capture import effects
from multigraph_backend.cudagraphs.partition import cuts
from multigraph_backend.cudagraphs.partition.cuts import CutRules
from multigraph_backend.cudagraphs.partition.generated_code import GeneratedCode, NotUnderstood, Parameters, PieceCall
from multigraph_backend.cudagraphs.partition.graph_spec import Cut, GraphSpec, PartitionSpec, Placeholder
from multigraph_backend.distributed import sequence
from multigraph_backend.distributed.sequence import Collective

log = logging.getLogger(__name__)

LEFT_OUT = "Inductor, which keeps it out of its pieces"
NO_OPERATOR = "a kernel on the CPU, or a copy"  # what is left where no operator is called by name


class BrokenCode(RuntimeError):
    """The code would fail when it runs, recorded or not."""


@dataclass(frozen=True)
class Taken:
    """What the graph says.

    graph: a spec without pieces
    cut_ops: operators that Inductor has to be told to cut around, for its `custom_should_partition_ops`
    forbidden: operators that no piece may run, as code writes them, with the reason
    """

    graph: GraphSpec
    cut_ops: tuple[str, ...]
    forbidden: Mapping[str, str]


def take(gm: GraphModule, static: Iterable[int], is_backward: bool, rules: CutRules) -> Taken:
    """Read a graph before it is compiled.  `static`: as Inductor is given them, `static_input_idxs`."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    devices = devices_of(gm, rules.device_type)
    tensors = {index for index, node in enumerate(placeholders) if isinstance(node.meta.get("val"), torch.Tensor)}
    shown = visible_outputs(gm, is_backward)
    never = cuts.operators_never_recorded(gm, rules) if devices else {}
    collectives, not_known = issued(gm)
    graph = GraphSpec(
        is_backward=is_backward,
        inputs=tuple(placeholder(node) for node in placeholders),
        outputs=len(shown),
        static=tuple(sorted(tensors.intersection(static))),
        mutated=(),
        visible=shown,
        pieces=(),
        whole=False,
        cuts=cuts.cuts_of(gm, rules) if devices else (),
        devices=devices,
        refused=(hidden_size(placeholders) or not_cut(never)) if devices else None,
        random=draws(gm),
        collectives=collectives,
        not_known=not_known,
        pure=effects.impure(gm) is None,
        unread=tuple(at for at, node in enumerate(placeholders) if all(user.op == "output" for user in node.users)),
    )
    return Taken(
        graph, tuple(sorted({op.name() for op in never})), {f"torch.ops.{op}": why for op, why in never.items()}
    )


def from_inductor(code: Any, taken: Taken) -> GraphSpec:
    """The spec of what Inductor made of a graph, `code`, a `CompiledFxGraph`.

    Raises `BrokenCode`.
    """
    graph = dataclasses.replace(taken.graph, mutated=tuple(sorted(set(code.mutated_input_idxs))))
    if graph.not_known is None:
        graph = dataclasses.replace(graph, not_known=_other_order(code, graph.collectives))
    if not graph.devices:
        return graph
    try:
        spec = _put_together(code, taken, graph)
        spec.verify()
    except ValueError as error:
        return dataclasses.replace(graph, refused=str(error))
    return spec


def _put_together(code: Any, taken: Taken, graph: GraphSpec) -> GraphSpec:
    """Raises ValueError where nothing can be recorded."""
    maps = code.partition_maps
    if maps is None:
        raise ValueError("Inductor did not look for pieces in it")
    try:
        generated = GeneratedCode(code.source_code)
        parameters = generated.parameters
    except NotUnderstood as error:
        raise ValueError(f"Inductor's code is not understood: {error}") from None
    if (unmade := generated.unmade()) is not None:
        raise BrokenCode(f"Inductor's code reads {unmade[1]} in piece {unmade[0]}, and nothing has made it there")
    if len(parameters) != len(maps):
        raise ValueError(f"Inductor tells of {len(maps)} pieces, and its code has {len(parameters)}")
    if (found := generated.recorded(taken.forbidden)) is not None:
        number, name = found
        raise ValueError(f"{name} is in piece {number}, and may be in no recording: {taken.forbidden[name]}")
    try:
        call = generated.call
        if (len(call.inputs), call.outputs) != (len(graph.inputs), graph.outputs):
            raise NotUnderstood("it has other inputs or outputs than the graph")
    except NotUnderstood as error:
        log.info("pieces are taken from Inductor's maps, for its code is not understood: %s", error)
        made_of_maps = [
            _piece_of_map(number, entry, names, graph)
            for number, (entry, names) in enumerate(zip(maps, parameters, strict=True))
        ]
        return dataclasses.replace(graph, pieces=_with_collectives(generated, made_of_maps))
    for made, entry in zip(call.pieces, maps, strict=True):
        _compare(made, entry)
    left_out = graph.cuts or (Cut(LEFT_OUT, call.ops or (NO_OPERATOR,)),)
    made_of_code = [
        _piece_of_call(number, made, entry, graph)
        for number, (made, entry) in enumerate(zip(call.pieces, maps, strict=True))
    ]
    pieces = _with_collectives(generated, made_of_code)
    apart = tuple(Cut(piece.unrecorded, ("a piece of it",)) for piece in pieces if piece.unrecorded)
    return dataclasses.replace(
        graph,
        pieces=pieces,
        whole=len(pieces) == 1 and not call.outside and not apart,
        cuts=(left_out if call.outside else ()) + apart,
    )


def _piece_of_call(number: int, made: PieceCall, entry: Any, graph: GraphSpec) -> PartitionSpec:
    seen = [any(graph.visible[index] for index in indices) for indices in made.memory]
    outputs = [indices[0] if indices else None for indices in made.outputs]
    piece = _piece(number, made.inputs, made.of_graph, outputs, seen, entry, graph)
    return dataclasses.replace(piece, results=made.results) if any(made.results) else piece


def _piece_of_map(number: int, entry: Any, parameters: Parameters, graph: GraphSpec) -> PartitionSpec:
    """From the map alone.  Raises ValueError where it does not fit."""
    outputs = [indices[0] if indices else None for indices in map(_indices, entry.output_index_mapping)]
    if (len(entry.input_index_mapping), len(outputs)) != (len(parameters.names), len(parameters.same)):
        raise ValueError(f"Inductor's code is not understood, nor does its map fit piece {number}")
    # what stays inside as far as the map knows may still be handed out under another name
    seen = [index is None or graph.visible[index] for index in outputs]
    return _piece(number, parameters.names, entry.input_index_mapping, outputs, seen, entry, graph)


def _piece(
    number: int,
    names: Sequence[str],
    of_graph: Sequence[int | None],
    outputs: Sequence[int | None],
    seen: Sequence[bool],
    entry: Any,
    graph: GraphSpec,
) -> PartitionSpec:
    return PartitionSpec(
        number=number,
        inputs=tuple(of_graph),
        outputs=tuple(outputs),
        static=tuple(at for at, index in enumerate(of_graph) if index in graph.static),
        mutated=tuple(at for at, index in enumerate(of_graph) if index in graph.mutated),
        visible=tuple(seen),
        names=tuple(
            name if index is None else graph.inputs[index].name for name, index in zip(names, of_graph, strict=True)
        ),
        constants=tuple(entry.constant_names),
    )


def _compare(made: PieceCall, entry: Any) -> None:
    """Raises ValueError where a map of equal length says otherwise than the code."""
    pairs = list(zip(made.of_graph, entry.input_index_mapping, strict=False))
    if len(made.of_graph) != len(entry.input_index_mapping):
        return  # numbers, or buffers that were not made
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise ValueError(
            f"Inductor's map of a piece has inputs {list(entry.input_index_mapping)}, its code {list(made.of_graph)}"
        )


def _indices(mapped: Any) -> Sequence[int]:
    """The graph's outputs that an output of a piece is: up to some version one or None, then a list."""
    if mapped is None:
        return ()
    return (mapped,) if isinstance(mapped, int) else tuple(mapped)


# ---------------------------------------------------------------- collectives


def issued(gm: GraphModule) -> tuple[tuple[Collective, ...], str | None]:
    """What a graph issues, or why that cannot be told."""
    try:
        return sequence.of_graph(gm), None
    except sequence.NotKnown as reason:
        return (), str(reason)


def _other_order(code: Any, collectives: Sequence[Collective]) -> str | None:
    """What speaks against the code issuing what its graph does, in the same order."""
    if not collectives:
        return None
    try:
        found = GeneratedCode(code.source_code or "").issued()
    except NotUnderstood as error:
        return f"Inductor's code is not understood: {error}"
    wanted = [(entry.kind, entry.group) for entry in collectives]
    if found != wanted:
        return f"Inductor's code issues {_kinds(found)}, and its graph {_kinds(wanted)}"
    return None


def _kinds(entries: Iterable[tuple[str, str]]) -> str:
    return ", ".join(kind for kind, _ in entries) or "nothing"


def _with_collectives(generated: GeneratedCode, pieces: Sequence[PartitionSpec]) -> tuple[PartitionSpec, ...]:
    """Pieces, with the groups that they communicate in; one that holds half of a collective is not recorded."""
    if not generated.communicates:
        return tuple(pieces)
    return tuple(
        dataclasses.replace(
            piece,
            groups=generated.groups(piece.number),
            unrecorded=cuts.APART if generated.waits_elsewhere(piece.number) else None,
        )
        for piece in pieces
    )


# ---------------------------------------------------------------- the graph


def devices_of(gm: GraphModule, device_type: str) -> tuple[int, ...]:
    """Indices of the devices of `device_type` that hold a tensor of the graph; one without index counts for 0."""
    values = [value for node in gm.graph.nodes for value in cuts.tensors(node.meta.get("val"))]
    return tuple(sorted({value.device.index or 0 for value in values if value.device.type == device_type}))


def placeholder(node: Node) -> Placeholder:
    """Where the user's code uses an input first, and where it changes it."""
    traces = [user.meta.get("stack_trace") for user in (node, *node.users)]
    writes = [user for user in node.users if user.target is torch.ops.aten.copy_.default and user.args[0] is node]
    mutated_at = [user.meta.get("stack_trace") for user in writes]
    return Placeholder(
        node.name,
        next((trace for trace in traces if trace), None),
        next((trace for trace in mutated_at if trace), None),
    )


def hidden_size(placeholders: Sequence[Node]) -> str | None:
    """What speaks against recording where a size of an input is not among the inputs: recordings are told apart by the
    numbers that come as inputs."""
    values = [node.meta.get("val") for node in placeholders]
    known = {_compat.sympy_expr(value) for value in values if isinstance(value, torch.SymInt)}
    for node, value in zip(placeholders, values, strict=True):
        if isinstance(value, torch.Tensor):
            for size in (*value.shape, *value.stride()):
                if isinstance(size, torch.SymInt) and not _compat.sympy_expr(size).free_symbols <= known:
                    return f"size {size} of input {node.name} is no input"
    return None


def not_cut(never: Mapping[Any, str]) -> str | None:
    """What speaks against recording where the user lists an operator that Inductor has code of its own for: it cuts
    around calls of operators, and what is in its kernels and templates cannot be parted from them."""
    generated = _compat.lowerings.keys() - _compat.fallbacks
    own = sorted(op.name() for op, why in never.items() if why == cuts.LISTED and op in generated)
    return f"Inductor generates code for {own[0]}, and cannot cut there as asked" if own else None


def visible_outputs(gm: GraphModule, is_backward: bool) -> tuple[bool, ...]:
    """Per output, whether a user may hold it.

    A forward returns new values of changed inputs, then the user's outputs, which compilers mark, then what it saves.
    Where nothing is saved, in a backward, or without marks or what AOTAutograd counted, all are seen.
    """
    output = gm.graph.output_node()
    results: Any = output.args[0]
    count = len(results) if isinstance(results, list | tuple) else 1
    marked = output.meta.get("user_visible_output_idxs")
    saves = any(node.name.startswith("primals") for node in gm.graph.find_nodes(op="placeholder"))
    if is_backward or not saves or not marked or _compat.without("TracingContext"):
        return (True,) * count
    # bases of views that the user gets come behind his outputs; AOTAutograd counts them among what a forward returns
    context = _compat.TracingContext.try_get()
    returned = getattr(getattr(context, "fw_metadata", None), "num_forward", 0)
    return tuple(index <= max(marked) or index < returned for index in range(count))


def _drops_nothing(node: torch.fx.Node) -> bool:
    """Whether it draws for its dropout alone, as attention does, and nothing is to be dropped."""
    operator: Any = node.target
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return isinstance(given, int | float) and given == 0
    return False


def draws(gm: GraphModule) -> bool:
    """Whether a graph may draw random numbers: torch says so of an operator, or knows nothing about it."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, _compat.OpOverload):
            known = node.target.namespace in ("aten", "prims", "_c10d_functional")
            if not known or (torch.Tag.nondeterministic_seeded in node.target.tags and not _drops_nothing(node)):
                return True
        elif node.target is _compat.invoke_subgraph:
            if any(map(draws, cuts.subgraphs(node))):
                return True
        elif node.op == "call_function" and isinstance(node.target, _compat.HigherOrderOperator):
            return True
    return False
