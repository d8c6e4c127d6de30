"""FX graphs, read: which values share memory, how large they are, what a graph makes and drops.

In: a partitioned forward or backward graph, with fake values on its nodes; both together are a `Partition`.  Out:
programs for `lifetimes`, and answers about single nodes for `choosing`.

Invariant: nothing here changes a graph or asks a question that would put a guard on its sizes; sizes are hints, and
what must hold for every size is decided on expressions.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.saved_tensors.lifetimes import Fragment, Program, Step
from multigraph_backend.saved_tensors.offload.operators import BEGIN, OFFLOAD, RELOAD, SETTLE

_SHARES_FIRST = {
    getattr(torch.ops.aten, name).default for name in ("_unsafe_view", "copy_") if hasattr(torch.ops.aten, name)
}
_UNKNOWN_SIZE = 4096  # for a size that only a run knows


@dataclass(frozen=True)
class Partition:
    """A joint graph in two parts.  What the forward returns behind its first `outputs` results, which are the caller's,
    is saved for the backward.  `static`: positions of its inputs that are parameters or buffers; `activations`: of
    those that need gradients and are neither, as what another block has computed.
    """

    forward: GraphModule
    backward: GraphModule
    outputs: int
    static: Sequence[int] = ()
    activations: Sequence[int] = ()

    def saved_tensors(self) -> list[Node]:
        """What the forward graph hands to the backward graph, without symbolic numbers and opaque objects."""
        found: list[Node] = []
        for value in results(self.forward.graph)[self.outputs :]:
            if isinstance(value, Node) and tensor(value) is not None and value not in found:
                found.append(value)
        return found

    def copy(self) -> Partition:
        """The same over copies of both graphs."""
        return replace(self, forward=_copy(self.forward), backward=_copy(self.backward))


def without_gradient(partition: Partition) -> frozenset[int]:
    """Positions of the forward's inputs that need no gradient: the backward returns one for each input, or None."""
    if not partition.backward.graph.find_nodes(op="output"):
        return frozenset()
    gradients = results(partition.backward.graph)
    if len(gradients) != len(partition.forward.graph.find_nodes(op="placeholder")):
        return frozenset()
    return frozenset(index for index, gradient in enumerate(gradients) if gradient is None)


def _copy(module: GraphModule) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    returned: Any = graph.graph_copy(module.graph, copies)
    graph.output(returned).meta.update(module.graph.output_node().meta)
    return GraphModule(module, graph)


_WRAPPED = re.compile(r"^L\['(args|kwargs)'\]\[[^]]*\]\.?")


def innermost_module(stack: Mapping[str, Any]) -> str:
    """The path of the last module of an `nn_module_stack`, as Dynamo writes it; "" of none.

    A model that is called through a wrapper, as transformers' are, is an argument of that, and its path begins there.
    """
    return _WRAPPED.sub("", str(list(stack.values())[-1][0])) if stack else ""


def viewed(node: Node) -> Node | None:
    """The node of whose memory `node` is a view, one step up; None where it has memory of its own."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    first = node.args[0]
    if node.target is operator.getitem:
        return first if viewed(first) is not None else None
    if node.target in _SHARES_FIRST:
        return first
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return first if aliases else None


def root(node: Node) -> Node:
    """The node that made the memory of `node`."""
    while (above := viewed(node)) is not None:
        node = above
    return node


def chain(node: Node, source: Node) -> list[Node]:
    """The views that lead from `source` to `node`, in order."""
    views: list[Node] = []
    while node is not source:
        views.append(node)
        above = viewed(node)
        if above is None:
            raise ValueError(f"{node.name} is no view of {source.name}")
        node = above
    return views[::-1]


def changed(graph: Graph) -> set[Node]:
    """Roots of what the graph writes to."""
    found: set[Node] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema is not None else (), node.args, strict=False):
            if isinstance(value, Node) and argument.alias_info is not None and argument.alias_info.is_write:
                found.add(root(value))
    return found


def tensor(node: Node) -> torch.Tensor | None:
    """The fake value of `node` where it is one plain tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def on_host(node: Node) -> bool:
    """Whether `node` is bytes that were offloaded: they take no memory of the device."""
    return node.op == "call_function" and node.target in (OFFLOAD, SETTLE, BEGIN)


def storage_bytes(value: torch.Tensor) -> int:
    """Of the memory that it lies in; of what is sparse, as a gradient may be, nobody knows."""
    if value.layout is not torch.strided:
        return 0
    return _compat.hint(value.untyped_storage().nbytes(), _UNKNOWN_SIZE)


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of the elements, whatever lies between them."""
    return elements(value) * value.element_size()


def elements(value: torch.Tensor) -> int:
    """How many there are, as far as it is known."""
    return _compat.hint(value.numel(), _UNKNOWN_SIZE)


@dataclass(frozen=True)
class MemoryOrder:
    """Dimensions from the one with the largest stride to the smallest: in this order the elements lie side by side."""

    dims: tuple[int, ...]

    @property
    def inverse(self) -> tuple[int, ...]:
        return tuple(self.dims.index(dim) for dim in range(len(self.dims)))


def memory_order(value: torch.Tensor) -> MemoryOrder | None:
    """The order in which `value` is contiguous, for every size it may have; None where it has gaps or overlaps."""
    if value.layout is not torch.strided:
        return None
    sizes = [_compat.plain_size(size) for size in value.shape]
    strides = [_compat.plain_size(stride) for stride in value.stride()]
    dims = sorted(range(value.dim()), key=lambda dim: -_compat.hint(value.stride()[dim], _UNKNOWN_SIZE))
    expected: Any = 1
    # dimensions of one element may have any stride, and come first
    dims = [dim for dim in dims if sizes[dim] == 1] + [dim for dim in dims if sizes[dim] != 1]
    for dim in reversed(dims):
        if sizes[dim] != 1 and strides[dim] != expected and (strides[dim] - expected).expand() != 0:
            return None
        expected = expected * sizes[dim]
    return MemoryOrder(tuple(dims))


def results(graph: Graph) -> tuple[Any, ...]:
    """What the graph returns, flat."""
    found: Any = graph.output_node().args[0]
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def program(graph: Graph, held: Iterable[str] = (), fused: bool = False) -> Program:
    """The steps and lifetimes of `graph`; `held` names placeholders whose memory belongs to the caller.

    `fused`: what is read within one kernel takes no memory, as in Inductor's code; what it is made of is read instead.
    """
    buffers = _Buffers(_within_kernels(graph) if fused else frozenset())
    steps: list[Step] = []
    given: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            given.update(buffers.of(node))
        elif node.op == "output":
            reads = {name for value in node.all_input_nodes for name in buffers.of(value)}
            steps.append(Step(node.name, frozenset(reads), (), view=False))
        else:
            reads = {name for value in node.all_input_nodes for name in buffers.of(value)}
            view = viewed(node) is not None and node.target is not torch.ops.aten.copy_.default
            makes = () if viewed(node) is not None or node.target is operator.getitem else buffers.made(node)
            steps.append(Step(node.name, frozenset(reads), makes, view or node.target is operator.getitem))
    returned = {name for value in results(graph) if isinstance(value, Node) for name in buffers.of(value)}
    by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
    owned = {name for entry in held if entry in by_name for name in buffers.of(by_name[entry])}
    same: dict[str, str] = {}
    first: dict[int, str] = {}
    for node in by_name.values():
        value = tensor(node)
        if value is not None and value.layout is torch.strided:
            same[node.name] = first.setdefault(value.untyped_storage()._cdata, node.name)
    constants = {name for node in graph.find_nodes(op="get_attr") for name in buffers.of(node)}
    return Program(
        steps=tuple(steps),
        sizes=buffers.sizes,
        given=frozenset(given),
        held=frozenset(owned | constants),
        results=frozenset(returned - constants),
        same={name: memory for name, memory in same.items() if name != memory},
    )


def _within_kernels(graph: Graph) -> frozenset[Node]:
    """What is computed element by element, and read so, or summed up, before the next operation of another kind.

    Such steps are one kernel, or several that compute it once more.
    """
    ends: dict[Node, int] = {}  # how many operations of another kind came before
    count = 0
    for node in graph.nodes:
        ends[node] = count
        count += node.op == "call_function" and not _inlined(node) and viewed(node) is None and not reduces(node)
    return frozenset(
        node
        for node in graph.nodes
        if node.op == "call_function" and _inlined(node) and viewed(node) is None
        and (reading := readers(node))
        and all((_inlined(reader) or reduces(reader)) and ends[reader] == ends[node] for reader in reading)
    )  # fmt: skip


def _inlined(node: Node) -> bool:
    return tensor(node) is not None and elementwise(node)


def readers(node: Node) -> list[Node]:
    """What computes with a value, or returns it."""
    found: list[Node] = []
    for user in node.users:
        found += readers(user) if viewed(user) is node else [user]
    return found


_ELEMENTWISE = ("convert_element_type", "inductor_random", "inductor_lookup_seed", "_to_copy")  # without the tag


def elementwise(node: Node) -> bool:
    """Whether each element of the result comes from one place: Inductor computes it where it is read."""
    named = any(name in str(node.target) for name in _ELEMENTWISE)
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or named


def reduces(node: Node) -> bool:
    """Whether it is a sum, a maximum or the like of rows, for which Inductor makes a kernel."""
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def number(node: Node) -> bool:
    """Whether it is one number as a tensor, a constant of the code."""
    return node.target is torch.ops.aten.scalar_tensor.default


def fragment(graph: Graph, inputs: Sequence[Node], fused: bool = True) -> Fragment:
    """A traced function as steps: its tensor `inputs` are buffers of the program that it is put into.

    `fused`: what is computed element by element on the way takes no memory, as in Inductor's code.
    """
    whole = program(graph)
    outputs = [value for value in results(graph) if isinstance(value, Node) and tensor(value) is not None]
    names = tuple(name for value in outputs for name in memory_of(value))
    given = tuple(node.name for node in inputs)
    steps = tuple(step for step in whole.steps if step.name != graph.output_node().name)
    needed = {*names, *copied(graph)}
    free = {node.name for node in graph.nodes if fused and elementwise(node) and node.name not in needed}
    return Fragment(steps, {name: 0 if name in free else size for name, size in whole.sizes.items()}, given, names)


def copied(graph: Graph) -> tuple[str, ...]:
    """The buffers that `graph` copies to the host."""
    found = graph.find_nodes(op="call_function", target=OFFLOAD)
    return tuple(name for node in found if isinstance(node.args[0], Node) for name in memory_of(node.args[0]))


def brought_back(graph: Graph) -> tuple[str, ...]:
    """The buffers into which `graph` copies from the host."""
    return tuple(node.name for node in graph.find_nodes(op="call_function", target=RELOAD))


def memory_of(node: Node) -> tuple[str, ...]:
    """The buffers of `node`, by the names that `program` gives them."""
    return _Buffers().of(node)


class _Buffers:
    """Names of buffers: the node that made one, or `node[i]` for part of a tuple; sizes on the way."""

    def __init__(self, inlined: frozenset[Node] = frozenset()) -> None:
        self.sizes: dict[str, int] = {}
        self._inlined = inlined
        self._read: dict[Node, tuple[str, ...]] = {}

    def made(self, node: Node) -> tuple[str, ...]:
        """New ones."""
        return () if node in self._inlined else self.of(node)

    def of(self, node: Node) -> tuple[str, ...]:
        if node in self._inlined:
            if node not in self._read:
                read = [name for entry in node.all_input_nodes for name in self.of(entry)]
                self._read[node] = tuple(dict.fromkeys(read))
            return self._read[node]
        above = viewed(node)
        if above is not None:
            return self.of(above)
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            made = node.args[0]
            name = f"{made.name}[{node.args[1]}]"
            found = self.of(made)
            return (name,) if name in found else found
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self.sizes.setdefault(node.name, 0 if on_host(node) else storage_bytes(value))
            return (node.name,)
        if isinstance(value, tuple | list):
            names = []
            for index, part in enumerate(value):
                if isinstance(part, torch.Tensor):
                    names.append(f"{node.name}[{index}]")
                    self.sizes.setdefault(names[-1], storage_bytes(part))
            return tuple(names)
        return ()


# ---------------------------------------------------------------- subgraphs that are compiled once and called often
#
#     out, tanh, w_t = invoke_subgraph(subgraph, "fw_0", w, x)      # tanh is saved, and w_t is a view of w
#
# `torch.compiler.nested_compile_region` makes them.  A graph sees one operator with a tuple of results.  Their fake
# values say nothing about memory: torch uses them again for each call of the same subgraph.  So the subgraph is read.


#: in the meta of a call's results: the modules that are named there are those of its first step, not of its last
FIRST_STEP = "multigraph_first_step"


@dataclass(frozen=True)
class SubgraphResult:
    """A result of the call `call`: `made` in the subgraph `inside`, or a view of `operand`, which lies outside."""

    call: Node
    inside: GraphModule
    made: Node
    operand: Node | None


def subgraph_result(forward: GraphModule, node: Node) -> SubgraphResult | None:
    """Of which subgraph `node` is a result; None for anything else, and for a result that is not understood."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    call, index = node.args
    called = subgraph_of(forward, call) if isinstance(call, Node) else None
    if called is None or not isinstance(call, Node) or not isinstance(index, int):
        return None
    inside, operands = called
    returned = results(inside.graph)
    value = returned[index] if index < len(returned) else None
    if not isinstance(value, Node):
        return None
    made = root(value)
    if made.op != "placeholder":
        return SubgraphResult(call, inside, made, None)
    position = inside.graph.find_nodes(op="placeholder").index(made)
    operand = operands[position] if position < len(operands) else None
    return SubgraphResult(call, inside, made, operand) if isinstance(operand, Node) else None


def subgraph_of(forward: GraphModule, node: Node) -> tuple[GraphModule, Sequence[object]] | None:
    """The subgraph that `node` calls, and what it gives to it; None where it calls none."""
    if node.op != "call_function" or str(node.target) != "invoke_subgraph":
        return None
    attribute, _, *operands = node.args
    inside = getattr(forward, str(attribute.target), None) if isinstance(attribute, Node) else None
    return (inside, operands) if isinstance(inside, GraphModule) else None


def owner(forward: GraphModule, node: Node) -> tuple[Node, Node | None]:
    """What made the memory that `node` lies in, through subgraphs: a node of the graph, and the one in its subgraph."""
    made = root(node)
    found = subgraph_result(forward, made)
    if found is None:
        return made, None
    return owner(forward, found.operand) if found.operand is not None else (found.call, found.made)
