"""The steps of a graph that Inductor is given, for `repetition` to compare.

In:  a forward, backward or inference graph of AOTAutograd's: ATen operators without side effects, with fake values on
     its nodes, and writes to inputs at its end.
Out: a `Step` for each node that computes a tensor, and these nodes.  Inputs, symbolic numbers and seeds of random
     numbers are no steps: a call of a body takes them, or computes the numbers for itself.

Two steps have equal descriptions only if Inductor makes the same code of them wherever their operands come from: the
operator and all that is no tensor among its arguments; element type, device, sizes and strides over the trace's symbols
and offset of each operand and of what is made.  What cannot be compared is equal to itself only.

A step stays where it is, and is a part of no body, unless it is known that a call may stand for it (`why_it_stays`): it
is an operator of torch's own that writes to nothing and draws no random numbers but by a seed that it is given.
Convolutions stay: Inductor chooses in which layout they compute for a graph as a whole, and counts those that it sees.
"""

from __future__ import annotations

import collections
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower import modes_of_trace
from multigraph_backend.lower.repetition import Step
from multigraph_backend.saved_tensors.graphs import innermost_module, viewed

# kernels of their own, by the last part of the name
_ALONE = frozenset((
    "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "dot", "_int_mm", "_grouped_mm", "_scaled_mm",
    "_scaled_grouped_mm", "convolution", "convolution_backward", "sort", "topk", "cumsum", "cumprod",
))  # fmt: skip
# what Inductor writes into memory that it is given, where it may: in a body, it would have to copy that first
_UPDATES = frozenset((
    "index_put", "_unsafe_index_put", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce",
    "slice_scatter", "select_scatter", "as_strided_scatter", "diagonal_scatter", "masked_scatter", "copy",
))  # fmt: skip
_NAMESPACES = ("aten", "prims")
_CONVOLUTIONS = frozenset(("convolution", "convolution_backward"))
_LAYOUT = "its layout is chosen for the graph as a whole"
_IN_PLACE = "it may be done in place"
_WRITES = "it writes to what it takes"
_FUSED = (None, _IN_PLACE, _WRITES)  # what is written is computed in the kernel that writes it
_DRAWS = "it draws random numbers"
_CALL = "it is a call of a body"
_STRIDES = "inductor_force_stride_order"  # of what a call is given
_SEEDED = ("inductor_random", "inductor_randint")  # draw what their seed says
_SEED = "inductor_lookup_seed"


@dataclass(frozen=True, eq=False)
class _Told:
    """What a step is, wherever it stands and whatever may stand for it."""

    operands: list[Node]
    description: Hashable
    path: str


#: of a graph whose steps keep what they take: what was told of them, for the next look at them in another order
Told = dict[Node, _Told]


def steps_of(
    graph: Graph, cut_at: Callable[[Node], str | None] | None = None, told: Told | None = None
) -> tuple[list[Step], list[Node]]:
    """See the module's text.  `cut_at`: why the graph is to be cut at a step, None where it is not."""
    told = {} if told is None else told
    values: dict[Node, Hashable] = {}
    nodes = [node for node in graph.nodes if is_step(node)]
    numbers = {node: index for index, node in enumerate(nodes)}
    steps = []
    for node in nodes:
        if node not in told:
            operands = [operand for operand in _operands(node) if not is_number(operand)]
            told[node] = _Told(operands, _description(node, operands, values), _path(node))
        why, name = why_it_stays(node, cut_at), _name(node)
        steps.append(
            Step(
                told[node].description,
                tuple(numbers.get(operand, operand.name) for operand in told[node].operands),
                why not in _FUSED or name in _ALONE or "attention" in name,
                told[node].path,
                why is not None,
                node.target is operator.getitem,
                viewed(node) is not None,
            )
        )
    return steps, nodes


def steps_of_trace(
    graph: Graph, may_draw: bool = True, differentiated: Collection[Node] = ()
) -> tuple[list[Step], list[Node]]:
    """The same of a captured graph of Dynamo's, before AOTAutograd: functions and methods as the program calls them.

    A checkpointed region (`torch.utils.checkpoint`) is one step, which does what its own graph does.
    It has no values on its nodes: descriptions say nothing of types and sizes, which `traced_once` asks of each call.
    Numbers that are computed from numbers are no steps: Dynamo computes each once, for whatever needs it.  Steps under
    other modes, autocast for one, are others.  `may_draw`: whether a call may stand for steps that draw random numbers.
    `differentiated`: the inputs that need gradients; steps of a first layer, whose input needs none, are others, too.
    """
    told: set[Node] = set()
    for node in graph.nodes:
        if not is_tensor_of_trace(node) and (node.op == "placeholder" or _computes_number(node, told)):
            told.add(node)
    told.update(filter(modes_of_trace.does_nothing, graph.nodes))
    nodes = [node for node in graph.nodes if _called(node) and node not in told]
    numbers = {node: index for index, node in enumerate(nodes)}
    modes = modes_of_trace.at_each_node(graph)
    needing = set(differentiated)
    steps = []
    for node in nodes:
        region = checkpointed(node)
        operands = [operand for operand in _operands(node) if region is None or operand is not node.args[0]]
        name = _name(node)
        needs = tuple(operand in needing for operand in operands)
        if any(needs):
            needing.add(node)
        stays = _why_it_stays_in_a_trace(node, name, may_draw) is not None
        taken = node.target is operator.getitem and not is_tensor_of_trace(operands[0])
        steps.append(
            Step(
                (_said_in_a_trace(node), region and _said_of_region(region), modes[node], needs),
                tuple(numbers.get(operand, operand.name) for operand in operands),
                bool(stays or region) or name in _ALONE or name in _ALONE_IN_A_TRACE or "attention" in name,
                _path_in_a_trace(operands[0] if taken else node),
                stays,
                taken,
                not taken and is_view_of_trace(node),
                1 if region is None else sum(_called(inner) for inner in region.graph.nodes),
            )
        )
    return steps, nodes


def checkpointed(node: Node) -> GraphModule | None:
    """The graph of a checkpointed region of a captured graph, if `node` is one."""
    target: Any = node.target
    if not isinstance(target, _compat.HigherOrderOperator) or target.name() != "tag_activation_checkpoint":
        return None
    holder, attribute = node.graph.owning_module, node.args[0] if node.args else None
    if holder is None or not isinstance(attribute, Node) or attribute.op != "get_attr":
        return None
    region = getattr(holder, str(attribute.target), None)
    return region if isinstance(region, GraphModule) else None


def _called(node: Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


def _said_of_region(region: GraphModule) -> Hashable:
    """What the graph of a region does, as a value to compare."""
    numbers = {node: number for number, node in enumerate(region.graph.nodes)}
    return tuple(
        (node.op if node.op == "placeholder" else _said_in_a_trace(node), tuple(numbers[of] for of in _operands(node)))
        for node in numbers
    )


def _path_in_a_trace(node: Node) -> str:
    region = checkpointed(node)
    inner = next((path for entry in region.graph.nodes if (path := _path(entry))), "") if region else ""
    return inner or _path(node)


def is_tensor_of_trace(node: Node) -> bool:
    """In a captured graph: the key alone is there (`capture.structure`)."""
    return "example_value" in node.meta


def why_traced_one_by_one(graph: Graph, may_draw: bool) -> str | None:
    """Which steps of a captured graph may be a part of no block, most frequent first; None where all may."""
    said = collections.Counter(
        f"{_name(node)}: {why}"
        for node in graph.nodes
        if node.op.startswith("call_") and not modes_of_trace.does_nothing(node)
        if (why := _why_it_stays_in_a_trace(node, _name(node), may_draw)) is not None
    )
    return ", ".join(f"{entry} ({count} times)" for entry, count in said.most_common(2)) or None


def is_view_of_trace(node: Node) -> bool:
    """Whether a step makes a view of its first operand, or takes one out of several: nothing is lost where it is done
    again elsewhere."""
    if node.target is not operator.getitem:
        return _name(node) in _VIEWS
    taken, index = node.args
    if not isinstance(taken, Node) or not is_tensor_of_trace(taken):
        return isinstance(taken, Node) and is_view_of_trace(taken)
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, int | slice | type(Ellipsis) | None) for part in parts)


def _computes_number(node: Node, numbers: set[Node]) -> bool:
    target: Any = node.target
    plain = getattr(target, "__module__", None) in ("_operator", "math") or target in _OF_NUMBERS
    operands = node.all_input_nodes
    return node.op == "call_function" and plain and bool(operands) and numbers.issuperset(operands)


_OF_NUMBERS = (torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_sum)


def _said_in_a_trace(node: Node) -> Hashable:
    target = node.target if isinstance(node.target, Hashable) else ("target", id(node.target))
    custom = str(node.meta.get("custom")) if node.meta.get("custom") else None
    return node.op, target, _given(node.args), _given(node.kwargs), custom


_ALONE_IN_A_TRACE = frozenset(("linear", "matmul", "baddbmm", "einsum", "embedding"))
_CONVOLUTIONS_IN_A_TRACE = frozenset((
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
))  # fmt: skip
_VIEWS = frozenset((
    "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "select", "narrow",
    "chunk", "split", "unbind", "movedim", "reshape", "swapaxes", "swapdims", "view_as", "expand_as", "t",
))  # fmt: skip
_OPERATORS = frozenset((
    "getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "matmul", "eq", "ne",
    "lt", "le", "gt", "ge", "and_", "or_", "xor", "invert", "lshift", "rshift",
))  # fmt: skip
_DRAW = ("dropout", "rand", "bernoulli", "multinomial", "normal", "rrelu", "gumbel", "poisson", "exponential", "seed")
_DRAW_FOR_A_CALL = ("dropout", "attention", "rand_like", "randn_like")  # of these it is known that each call may
_STATISTICS = frozenset(("batch_norm", "instance_norm", "native_batch_norm"))


def _why_it_stays_in_a_trace(node: Node, name: str, may_draw: bool) -> str | None:
    """Why a call may not stand for this step; None where AOTAutograd is asked whether it may."""
    target: Any = node.target
    if modes_of_trace.sets_mode(node):
        return "it sets a mode"
    if node.op == "call_module":
        return "it calls a module"
    if node.op == "call_method":
        if name.endswith("_"):
            return "it writes to what it takes"
    elif isinstance(target, _compat.OpOverload):
        if target.namespace not in _NAMESPACES:
            return "it is no operator of torch's own"
        if target._schema.is_mutable:
            return "it writes to what it takes"
    elif (region := checkpointed(node)) is not None:
        return _why_a_region_stays(node, region)
    elif isinstance(target, _compat.HigherOrderOperator | _compat.OpOverloadPacket):
        return "it is no function"
    elif name not in _OPERATORS and (getattr(target, "__module__", None) == "_operator" or name.endswith("_")):
        return "it writes to what it takes"
    if name in _CONVOLUTIONS_IN_A_TRACE:
        return _LAYOUT
    if "out" in node.kwargs or (name in _STATISTICS and _given_as(node, "training", 5) is not False):
        return "it writes to what it takes"
    if not draws_in_a_trace(node):
        return None
    if not may_draw or not any(word in name for word in _DRAW_FOR_A_CALL) or node.kwargs.get("generator") is not None:
        return _DRAWS
    return None


def writes_in_a_trace(node: Node) -> bool:
    """Whether a step of a captured graph writes to what it takes, or may."""
    if not _called(node) or modes_of_trace.does_nothing(node):
        return False
    why = _why_it_stays_in_a_trace(node, _name(node), may_draw=True)
    return (why is not None and why not in (_DRAWS, _LAYOUT)) or _is_told_to_write(node)


def _is_told_to_write(node: Node) -> bool:
    """Of `functional.relu(x, inplace=True)` and its like."""
    place = _place_of_inplace(node.target) if callable(node.target) else None
    given = node.kwargs.get("inplace") if place is None else _given_as(node, "inplace", place)
    return given not in (None, False)


@functools.cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of what is not written in Python, which has another function for that
        return None
    return names.index("inplace") if "inplace" in names else None


def _why_a_region_stays(node: Node, region: GraphModule) -> str | None:
    """Of a checkpointed region.  What it computes is computed again in the backward: nothing may be drawn in it."""
    if any("context_fn" in str(key) for key in (*region.meta, *node.meta, *node.kwargs)):
        return "it has a policy of its own for what is saved"  # whose state, and equality, nobody can see
    for inner in region.graph.nodes:
        if inner.op == "get_attr":
            return f"it reads {inner.target}, which the program holds and does not give it"
        if _called(inner) and not modes_of_trace.does_nothing(inner):
            if changes_state(inner):
                return f"its {_name(inner)} may change what a trace depends on"
            if (why := _why_it_stays_in_a_trace(inner, _name(inner), may_draw=False)) is not None:
                return f"of its {_name(inner)}, {why}"
    return None


_STATELESS = frozenset((
    "torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "torch._C._fft",
    "torch._C._special", "_operator", "math", "builtins",
))  # fmt: skip


def changes_state(node: Node) -> bool:
    """Whether a step of a captured graph may change what a trace depends on, such as autocast or grad mode: it is no
    plain function of torch's."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, _compat.OpOverload | _compat.OpOverloadPacket):
        return node.op == "call_module"
    if modes_of_trace.sets_mode(node) or modes_of_trace.does_nothing(node):
        return False
    if isinstance(target, _compat.HigherOrderOperator):
        return False
    name = str(getattr(target, "__name__", ""))
    private = name.startswith(("_", "set_"))
    return getattr(target, "__module__", None) not in _STATELESS or private


def draws_in_a_trace(node: Node) -> bool:
    """Whether a step draws random numbers, by its name."""
    name = _name(node)
    draws = any(word in name for word in _DRAW) and name != "normalize" and not _drops_nothing(node, name)
    return draws or bool(_drop_rate_of_attention(node, name))


_RATES = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}  # where attention's rate is given


def _drop_rate_of_attention(node: Node, name: str) -> Any:
    return _given_as(node, "dropout_p", _RATES[name]) if name in _RATES else node.kwargs.get("dropout_p")


def _given_as(node: Node, name: str, place: int) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else None)


def _drops_nothing(node: Node, name: str) -> bool:
    """Whether it is dropout that is turned off."""
    if "dropout" not in name or node.op != "call_function":
        return False
    rate = _given_as(node, "p", 1)
    return _given_as(node, "training", 2) is False or (isinstance(rate, int | float) and rate == 0)


def may_be_done_in_place(node: Node) -> bool:
    """Whether Inductor may write what it makes into the memory of its first operand."""
    return why_it_stays(node) == _IN_PLACE


def updates_a_constant(node: Node) -> bool:
    """Whether it makes what it makes out of memory that is one number everywhere: gradients of slices are."""
    first = node.args[0] if node.op == "call_function" and node.args else None
    return isinstance(first, Node) and _name(node) in _UPDATES and first.target is torch.ops.aten.full.default


def is_of_call(node: Node) -> bool:
    """Whether it calls a body, takes a result of such a call, or brings an argument of one to its strides."""
    return why_it_stays(node) == _CALL


def convolves(graph: Graph) -> bool:
    """Whether there are convolutions in a graph that Inductor is given."""
    return any(node.op == "call_function" and _name(node) in _CONVOLUTIONS for node in graph.nodes)


def is_step(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output") and not is_number(node) and _name(node) != _SEED


def is_number(node: Node) -> bool:
    """Whether it is a symbolic number, or computes one."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def draws(node: Node) -> bool:
    """Whether a call may not stand for a step because it draws random numbers, and for nothing else."""
    return why_it_stays(node) == _DRAWS


def why_it_stays(node: Node, cut_at: Callable[[Node], str | None] | None = None) -> str | None:
    """Why a call may not stand for this step; None where it may.  What takes one of several results stays with them."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    if (why := _why_it_stays_anyway(node)) is not None or cut_at is None:
        return why
    why = cut_at(node)
    return why and f"the graph is cut there: {why}"


def _why_it_stays_anyway(node: Node) -> str | None:
    target: Any = node.target
    if target is _compat.invoke_subgraph or _name(node) == _STRIDES:
        return _CALL
    if not isinstance(target, _compat.OpOverload):
        return "it is no operator"
    name = _name(node)
    if target.namespace not in _NAMESPACES:
        return "it is no operator of torch's own"
    if target._schema.is_mutable:
        return _WRITES
    if name in _UPDATES:
        return None if updates_a_constant(node) and len(node.all_input_nodes[0].users) == 1 else _IN_PLACE
    if name in _CONVOLUTIONS:
        return _LAYOUT
    if _draws(node):
        return _DRAWS
    if node.meta.get("unbacked_bindings") or torch.Tag.data_dependent_output in target.tags:
        return "its sizes are known when it has run"
    if not _makes_plain_tensors(node):
        return "it makes no plain tensor"
    return None


def _makes_plain_tensors(node: Node) -> bool:
    """Attention on a GPU also returns how long its sequences are, which its gradient has as constants: a number among
    several results does not matter as long as no step takes it."""
    values = values_of(node)
    if len(values) > 1:
        taken = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
        values = [value for place, value in enumerate(values) if not _is_size(value) or place in taken]
    return all(map(is_plain, values))


def _is_size(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt)


def _draws(node: Node) -> bool:
    """Whether it draws random numbers, but for what says that nothing is dropped."""
    target: Any = node.target
    name = _name(node)
    if name == "inductor_seeds":
        return True
    if name in _SEEDED or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    place = next((place for place, entry in enumerate(target._schema.arguments) if entry.name == "dropout_p"), None)
    if place is None or "attention" not in name:
        return True
    rate = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not (isinstance(rate, int | float) and rate == 0)


def values_of(node: Node) -> list[Any]:
    """Its value, or its values where it has several."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def is_plain(value: Any) -> bool:
    """Whether a value is one that bodies may take and make."""
    return value is None or (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_neg() or value.dtype.is_complex)
        and not _compat.is_traceable_wrapper_subclass(value)
    )


def _operands(node: Node) -> list[Node]:
    """Each as often as it is given: `x * x` and `x * y` differ."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _description(node: Node, operands: list[Node], known: dict[Node, Hashable]) -> Hashable:
    """`known`: what is known of the values of nodes, each of which several take."""
    for entry in (node, *operands):
        if entry not in known:
            known[entry] = _value(entry.meta.get("val"))
    target = node.target if isinstance(node.target, Hashable) else ("target", id(node.target))
    given = _given(node.args), _given(node.kwargs)
    eager = node.meta.get("eager_input_vals")  # Inductor lets some operators take their operands as eager did
    said = str(node.meta.get("custom")) if node.meta.get("custom") else None
    return node.op, target, given, tuple(map(known.__getitem__, operands)), known[node], _value(eager), said


def _given(value: Any) -> Hashable:
    """Arguments without the operands."""
    if isinstance(value, Node):
        return _value(value.meta.get("val")) if is_number(value) else "operand"
    if isinstance(value, tuple | list):
        return type(value), tuple(_given(entry) for entry in value)
    if isinstance(value, dict):
        return "dict", tuple((_constant(key), _given(entry)) for key, entry in value.items())
    if isinstance(value, slice):
        return "slice", tuple(_given(part) for part in (value.start, value.stop, value.step))
    return _constant(value)


def _constant(value: Any) -> Hashable:
    """Equal only where it makes no difference which of the two is used: 1, 1.0 and True are not, nor 0.0 and -0.0."""
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, complex):
        return "complex", value.real.hex(), value.imag.hex()
    if isinstance(value, _CONSTANTS):
        return type(value).__name__, value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value).__name__, value.node.expr
    return "object", type(value).__name__, id(value)


_CONSTANTS = (
    bool,
    int,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def _value(value: Any) -> Hashable:
    """What is known of a value when compiled."""
    if isinstance(value, dict):
        return "dict", tuple((_constant(key), _value(entry)) for key, entry in value.items())
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value), tuple(_value(entry) for entry in value)
    if not isinstance(value, torch.Tensor):
        return _constant(value)
    kind = (value.dtype, value.device, value.layout)
    if not is_plain(value):
        return "tensor", *kind, id(value)
    layout = (value.size(), value.stride(), (value.storage_offset(),))
    return "tensor", *kind, tuple(tuple(_compat.sympy_expr(size) for size in part) for part in layout)


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(node.target, "__name__", node.target)))


def _path(node: Node) -> str:
    """The path of the module that a node was traced in, "layers.3.attention"; "" where none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return innermost_module(stack).replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
