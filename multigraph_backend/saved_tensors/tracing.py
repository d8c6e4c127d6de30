"""Pack and unpack of units, traced with fake tensors into graphs that can be put into forward and backward.

In: units as `choosing` finds them, the backward graph, and with it the symbolic numbers that it has.  Out: a `Traced`
for each: the pack graph over the source, the unpack graph over what is saved in its place, both in Inductor's core
operators.  Units of one form (the same pack, sizes, types and views) are traced once.

Invariants: each tensor that the unpack graph returns has the shape, type and strides of the saved tensor that it stands
for, for every size; what cannot be traced, or is anything else, raises `CannotPack` with the reason.  What is traced
can be carried out on the two graphs, alone and together with what else was traced, where a unit that is computed again
needs none of the others, or is carried out before those that it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode

from multigraph_backend import _compat
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.saved_tensors import graphs, packs, products, rematerialize
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.rules import Cast, Offload, Recompute
from multigraph_backend.saved_tensors.structure import CannotTakeApart, take_apart
from multigraph_backend.saved_tensors.units import CannotPack, Traced, Unit

PackFunction = Callable[[torch.Tensor], Any]
UnpackFunction = Callable[[Any], Any]

_COMPARING = {
    getattr(torch.ops.aten, name)
    for name in ("le", "lt", "ge", "gt", "eq", "ne", "sign", "sgn", "signbit", "threshold_backward")
}


class Tracer:
    """For one partition of a graph."""

    def __init__(self, backward: GraphModule) -> None:
        self._backward = backward
        self._placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        self._numbers = [node for node in self._placeholders.values() if isinstance(node.meta.get("val"), torch.SymInt)]
        self._computes_bytes = _computes_bytes(backward)
        self._known: dict[Hashable, Traced | CannotPack] = {}

    def trace(self, unit: Unit, taken: Collection[str] = ()) -> Traced:
        """`taken`: inputs of the backward that will be gone.  Raises CannotPack."""
        self._expect(unit)
        unit = self._with_products(unit)
        if isinstance(unit.pack, Recompute):
            return rematerialize.trace(unit, self._backward, taken)
        if isinstance(unit.pack, Offload) and self._computes_bytes:
            raise CannotPack("the backward computes bytes on the CPU, which may come to lie in its copy")
        attentions = self.into_attention(unit)
        if unit.described.role == "statistic" and any("cudnn" in name for name in attentions):
            raise CannotPack("cuDNN's attention takes it only where its own forward has put it")
        in_memory = bool(attentions)
        form = _form(unit, in_memory)
        if form not in self._known:
            try:
                self._known[form] = self._first(unit, in_memory)
            except CannotPack as reason:
                self._known[form] = reason
        found = self._known[form]
        if isinstance(found, CannotPack):
            raise found
        return replace(found, unit=unit)

    def _expect(self, unit: Unit) -> None:
        """The backward graph takes each member by its name, and reads it."""
        for member in unit.members:
            if member.name not in self._placeholders:
                raise CannotPack("the backward graph does not take it by its name")
            if not self._placeholders[member.name].users:
                raise CannotPack("the backward graph does not read it")

    def _with_products(self, unit: Unit) -> Unit:
        """What asks for products, with those that can be; else with why there are none, and as a cast like any."""
        if not isinstance(unit.pack, Cast) or not unit.pack.multiply:
            return unit
        source = graphs.tensor(unit.source)
        assert source is not None
        members = [
            self._placeholders[member.name]
            for member in unit.members
            if all(map(products.layout_alone, graphs.chain(member, unit.source)))
        ]
        found = products.find(source, members)
        if isinstance(found, str):
            return replace(unit, pack=replace(unit.pack, multiply=False), alone=found)
        return replace(unit, products=found)

    def into_attention(self, unit: Unit) -> set[str]:
        """The backwards of attentions that read it.

        Inductor gives these operators tensors that lie otherwise than in its graph.  cuDNN's is then wrong: torch 2.11
        keeps its plans by how query, key and value lie, and not by how the output does that they were made for.
        """
        called = (user for user in self._read_by(unit) if user.op == "call_function")
        return {str(user.target) for user in called if "attention" in str(user.target)}

    def compared(self, unit: Unit) -> bool:
        """Whether the backward compares its elements with something: of a ReLU's output, which of them are 0."""
        return any(getattr(user.target, "overloadpacket", None) in _COMPARING for user in self._read_by(unit))

    def _read_by(self, unit: Unit) -> Iterator[Node]:
        """Steps of the backward that read it, or a view of it."""
        reached = [self._placeholders[member.name] for member in unit.members if member.name in self._placeholders]
        for node in reached:
            for user in node.users:
                yield user
                if graphs.viewed(user) is node:
                    reached.append(user)

    def _first(self, unit: Unit, in_memory: bool) -> Traced:
        value = graphs.tensor(unit.source)
        assert value is not None
        order = graphs.memory_order(value)
        assert order is not None
        assert not isinstance(unit.pack, Recompute)
        found = packs.functions(unit.pack, value.permute(order.dims) if value.dim() else value)
        if isinstance(found, str):
            raise CannotPack(found)
        traced = trace_functions(unit, *found, self._numbers, in_memory)
        inside = unit.pack.pack if isinstance(unit.pack, Offload) and unit.pack.pack is not None else unit.pack
        if not isinstance(inside, SavedHook) and traced.saved_bytes >= unit.described.bytes:
            raise CannotPack(f"packed it would need {traced.saved_bytes} bytes of {unit.described.bytes}")
        return traced


def _computes_bytes(backward: GraphModule) -> bool:
    """Whether Inductor may take the memory of bytes on the host, once it is read, for something that it makes there."""
    made = [graphs.tensor(node) for node in backward.graph.nodes if node.op == "call_function"]
    return any(value is not None and value.dtype == torch.uint8 and value.device.type == "cpu" for value in made)


def trace_functions(
    unit: Unit, pack: PackFunction, unpack: UnpackFunction, numbers: Sequence[Node], in_memory: bool = False
) -> Traced:
    """Trace both functions for `unit`.

    `pack` gets the source as it lies in memory, and `unpack` has to return the same; `numbers` are the symbolic
    numbers that the backward graph has as inputs.  `in_memory`: what is unpacked has to lie in memory as the source
    did, whatever the compiler would rather do.  Raises CannotPack.
    """
    source = graphs.tensor(unit.source)
    assert source is not None
    order = graphs.memory_order(source)
    assert order is not None
    mode = getattr(source, "fake_mode", None)
    if mode is None:
        raise CannotPack("its graph has no fake value for it")
    built: list[Any] = []
    symbols = [node.meta["val"] for node in numbers]

    def packing(x: torch.Tensor) -> list[torch.Tensor]:
        tensors, structure = take_apart(pack(_permuted(x, order.dims)))
        built.append((structure, len(tensors)))
        return tensors

    def unpacking(*values: Any) -> list[torch.Tensor]:
        structure, count = built[-1]
        found = unpack(structure.build(values[:count]))
        expected = [source.shape[dim] for dim in order.dims]
        if not isinstance(found, torch.Tensor):
            raise CannotPack(f"unpack returned a {type(found).__name__}, not a tensor")
        if found.dtype != source.dtype:
            raise CannotPack(f"unpack returned {found.dtype} where {source.dtype} was saved")
        if not _same(found.shape, expected):
            raise CannotPack(f"unpack returned the shape {_shown(found.shape)} where {_shown(expected)} was saved")
        if found.device != source.device:
            raise CannotPack(f"unpack returned a tensor on {found.device} where one on {source.device} was saved")
        found = found.contiguous()
        if in_memory:
            found = _compat.force_stride_order(found, found.stride())
        found = _permuted(found, order.inverse)
        return [_replayed(member, unit.source, found) for member in unit.members]

    with _tracing(mode):
        packed = _make(packing, (source,), "pack", mode)
        saved = _outputs(packed, "pack")
        unpacked = _make(unpacking, (*saved, *symbols), "unpack", mode)
        restored = _outputs(unpacked, "unpack")
    _refuse_effects(packed.graph, "pack")
    _refuse_effects(unpacked.graph, "unpack")
    for member, value in zip(unit.members, restored, strict=True):
        _check(member, value)
    _check_sizes(unit, saved, symbols)
    return Traced(unit, packed, unpacked, tuple(saved), tuple(numbers))


def _form(unit: Unit, in_memory: bool) -> Hashable:
    """What `trace_functions` makes of a unit: for units of the same form it makes the same graphs."""
    source = graphs.tensor(unit.source)
    assert source is not None
    pack: Any = id(unit.pack) if isinstance(unit.pack, SavedHook) else unit.pack
    members = []
    for member in unit.members:
        views = [
            (node.target, str(_values_of((node.args[1:], node.kwargs)))) for node in graphs.chain(member, unit.source)
        ]
        members.append((tuple(views), _layout(graphs.tensor(member))))
    return pack, _layout(source), source.device, in_memory, tuple(members)


def _layout(value: torch.Tensor | None) -> Hashable:
    return None if value is None else (value.dtype, str(tuple(value.shape)), str(value.stride()))


def _values_of(arguments: Any) -> Any:
    return torch.fx.map_arg(arguments, lambda entry: entry.meta["val"])


def values_again(node: Node, made: Node, mode: Any) -> None:
    """Give `made`, a copy of a traced `node`, fake values of its own: two copies share no memory."""
    made.meta.update(node.meta)
    if node.op == "call_function":
        args, kwargs = _values_of((made.args, made.kwargs))
        with _tracing(mode):
            made.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _permuted(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x if dims == tuple(range(x.dim())) else x.permute(dims)


def _keep_constant(made: GraphModule, node: Node, mode: Any) -> None:
    """A tensor that a hook captured is a constant: what the user does to it later is not seen.

    Inductor takes a real tensor in a graph where it is lifted first.
    """
    with _compat.disable_current_modes():
        value = getattr(made, str(node.target)).detach().clone()
    setattr(made, str(node.target), value)
    lifts = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
    users = [user for user in node.users if user.target not in lifts]
    if users:
        with made.graph.inserting_after(node):
            lifted = made.graph.call_function(lifts[0], (node,))
        lifted.meta["val"] = mode.from_tensor(value, static_shapes=True)
        for user in users:
            user.replace_input_with(node, lifted)


def _make(function: Callable[..., Any], inputs: Sequence[Any], what: str, mode: Any) -> GraphModule:
    try:
        with _NoMemory(what):
            made: GraphModule = _compat.make_fx(
                torch.func.functionalize(function),
                decomposition_table=_compat.select_decomp_table(),
                tracing_mode="real",
            )(*inputs)
    except (CannotPack, CannotTakeApart) as error:
        raise CannotPack(str(error)) from error
    except Exception as error:
        if from_outside(error):
            raise
        raise CannotPack(f"{what} cannot be traced: {type(error).__name__}: {_first_line(error)}") from error
    made.graph.eliminate_dead_code()
    for node in made.graph.find_nodes(op="get_attr"):
        _keep_constant(made, node, mode)
    _compat.replace_random_passes(made)
    return made


#: they give out memory, and a tensor that is traced has none: what lies at its address would be a constant of the graph
_GIVE_OUT_MEMORY = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__})


class _NoMemory(TorchFunctionMode):
    """Refuses what takes the memory of a tensor out of the sight of a trace."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GIVE_OUT_MEMORY:
            raise CannotPack(f"{self._what} takes the memory of a tensor ({func.__name__}), which no trace can follow")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _tracing(mode: Any) -> Iterator[None]:
    """The fake mode of the graphs, in which a real tensor is a constant; gradients are of no interest."""
    allowed = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with mode, torch.no_grad(), _compat.set_fake_mode(mode):
            yield
    finally:
        mode.allow_non_fake_inputs = allowed


def _outputs(made: GraphModule, what: str) -> list[torch.Tensor]:
    values = []
    for node in graphs.results(made.graph):
        value = graphs.tensor(node) if isinstance(node, Node) else None
        if value is None:
            raise CannotPack(f"{what} returned a tensor that does not depend on what it was given")
        values.append(value)
    return values


def _refuse_effects(graph: Graph, what: str) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        raise CannotPack(f"{what} changes its input, or a tensor that it captured, in place ({node.name})")


def _replayed(member: Node, source: Node, value: torch.Tensor) -> Any:
    """The view of `value` that `member` is of `source`."""
    found: Any = value
    for node in graphs.chain(member, source):
        arguments = _values_of((node.args[1:], node.kwargs))
        found = node.target(found, *arguments[0], **arguments[1])  # type: ignore[operator]
    return found


def _check(member: Node, value: torch.Tensor) -> None:
    saved = graphs.tensor(member)
    assert saved is not None
    if value.dtype != saved.dtype or not _same(value.shape, saved.shape):
        raise CannotPack(f"it came back as {value.dtype} {_shown(value.shape)}")
    for size, got, wanted in zip(saved.shape, value.stride(), saved.stride(), strict=True):
        if _compat.sympy_expr(size) != 1 and not _same((got,), (wanted,)):
            raise CannotPack(f"it came back with strides {_shown(value.stride())}, not {saved.stride()}")


def _check_sizes(unit: Unit, saved: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
    """Every size that the members told the backward graph is still told: as a number, or by what is saved."""
    members = [value for node in unit.members if (value := graphs.tensor(node)) is not None]
    needed = {symbol for value in (*saved, *members) for symbol in _compat.free_symbols(value)}
    told = {_compat.sympy_expr(value) for value in numbers}
    told |= {_compat.sympy_expr(size) for value in saved for size in value.shape}
    unknown = sorted(str(symbol) for symbol in needed - told)
    if unknown:
        raise CannotPack(f"the backward graph would not know these sizes any more: {', '.join(unknown)}")


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Equal for every size; asks nothing that would become a guard."""
    if len(left) != len(right):
        return False
    if all(isinstance(entry, int) for entry in (*left, *right)):
        return list(left) == list(right)
    pairs = [(_compat.plain_size(a), _compat.plain_size(b)) for a, b in zip(left, right, strict=True)]
    return all(a == b or (a - b).expand() == 0 for a, b in pairs)


def _shown(sizes: Sequence[Any]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
