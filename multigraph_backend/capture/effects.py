"""What a call of a graph does besides returning results: what it writes to, and what may be done once only.

In:  a graph of a trace in progress, whose nodes have Dynamo's fake tensors.  Out: positions and reasons, as
`CapturedGraph` keeps them.  When in doubt a graph writes, and may not be run twice.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.capture.structure import graph_modules, held_tensors, made_of


def written(gm: torch.fx.GraphModule) -> frozenset[int]:
    """What the graph may write to, by the memory of Dynamo's fake tensors; positions as in `CapturedGraph.written`.

    In-place operations of the trace have counted up the version of what they wrote to, `x.data` having one of its own.
    Custom operators and kernels need not do so; what their schemas say counts.  Norms with running statistics do not
    say so either.
    """
    written: set[Any] = set()
    nodes = [node for module in graph_modules(gm) for node in module.graph.nodes]
    placeholders, held = gm.graph.find_nodes(op="placeholder"), held_tensors(gm)
    told = _written_among_set(
        [
            *((getattr(node.meta.get("grapharg"), "example", None), node) for node in placeholders),
            *((tensor, node) for tensor, taken in held.items() for node in taken),
        ],
        written,
    )
    for node in nodes:
        value = node.meta.get("example_value")
        counted = isinstance(value, torch.Tensor) and not value.is_inference() and value._version
        if counted and id(_viewed(value)) not in told:
            written.add(_memory(node))
        written.update(map(_memory, (*_written_by_schema(node), *_running_statistics(node))))
    tensors = [*([node] for node in placeholders), *held.values()]
    plain = {_memory(node) for taken in tensors for node in taken}
    inside = written - plain  # of what tensor subclasses are made of, and of what the graph makes
    return frozenset(
        index
        for index, taken in enumerate(tensors)
        if any(_memory(node) in written or not inside.isdisjoint(_parts(node)) for node in taken)
    )


def only_exchanges(gm: torch.fx.GraphModule) -> bool:
    """Whether all that the graph does is `x.data = y` of its inputs, of which AOTAutograd makes code that is not always
    right where their memory is the same (bitsandbytes' int8 weights, after each product)."""
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    names = {getattr(node.target, "__name__", None) for node in calls}
    return not names.isdisjoint(_EXCHANGES) and names <= _EXCHANGES | _AROUND


_EXCHANGES = {"set_", "shallow_copy_data_"}  # as torch's versions trace an assignment of `data`
_AROUND = {"_set_grad_enabled", "_lower_version_count_by_1"}


def _written_among_set(entries: Iterable[tuple[Any, torch.fx.Node]], written: set[Any]) -> dict[int, torch.Tensor]:
    """Adds to `written` what versions say is written to of the memory that several of these real tensors share, and of
    that in which a tensor is no view and begins further on (compiled code returned a slice, or it is one of `data`).

    torch makes fakes of such tensors by `set_`, which counts up their version to 1.  At most one of several, which
    begins where the memory does, is made as if it were alone, with version 0.  So one of them was written to if any
    version is above 1; and, if there is one that begins where the memory does, also if no version is 0.  Returned are
    the fakes that this was asked of, or the tensors that they are views of, by their `id`.
    """
    groups: dict[Any, dict[int, tuple[torch.Tensor, int]]] = {}
    for real, node in entries:
        value = node.meta.get("example_value")
        if not isinstance(real, torch.Tensor) or not isinstance(value, torch.Tensor) or value.is_inference():
            continue
        if real.layout is value.layout is torch.strided and not _compat.is_traceable_wrapper_subclass(real):
            memory = (_memory(node), real.untyped_storage()._cdata)
            viewed = _viewed(value)
            groups.setdefault(memory, {})[id(viewed)] = viewed, int(_viewed(real).storage_offset())
    told: dict[int, torch.Tensor] = {}
    for (memory, _), fakes in groups.items():
        one_alone = any(start == 0 for _, start in fakes.values())
        if len(fakes) > 1 or not one_alone:
            versions = [fake._version for fake, _ in fakes.values()]
            if max(versions) > 1 or (one_alone and min(versions) > 0):
                written.add(memory)
            told.update((key, fake) for key, (fake, _) in fakes.items())
    return told


def _viewed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that `tensor` is a view of and counts versions with, or itself."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def _memory(node: torch.fx.Node) -> Any:
    """What tells the memory of a node's value from that of others; the node, where there is nothing but itself."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return node
    return int(_unwrapped(value).untyped_storage()._cdata)


def _unwrapped(value: torch.Tensor) -> torch.Tensor:
    """What a transform of `torch.func` has wrapped, as often as transforms are nested: that has the memory."""
    if _compat.without("is_functorch_wrapped_tensor", "get_unwrapped") is None:
        while _compat.is_functorch_wrapped_tensor(value):
            value = _compat.get_unwrapped(value)
    return value


def reads_negated(gm: torch.fx.GraphModule, inputs: Iterable[Any]) -> str | None:
    """Why code that reads memory as it lies has wrong numbers for this graph; None where it has not.

    The imaginary part of a conjugate is a view whose values are the negatives of what lies in memory.  torch's own
    operators look at the bit that says so; Inductor's code does not.
    """
    given = (tensor for tensor in (*inputs, *held_tensors(gm)) if isinstance(tensor, torch.Tensor))
    if any(tensor.layout is torch.strided and tensor.is_neg() for tensor in given):
        return "a tensor that it reads has the negatives of what lies in its memory (an imaginary part of a conjugate)"
    return None


def _parts(node: torch.fx.Node) -> Iterator[int]:
    """The memory of what a node's value is made of, where it is a tensor subclass."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and _compat.is_traceable_wrapper_subclass(value):
        parts = (part for _, part in made_of(value))
        yield from (int(part.untyped_storage()._cdata) for part in parts if isinstance(part, torch.Tensor))


def _written_by_schema(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """Operands that the operator called by `node` may write to, as far as it says."""
    target = node.target
    if isinstance(target, _compat.HigherOrderOperator):
        kernel = "triton_kernel" in target.name() or "functionalized" in target.name()
        return node.all_input_nodes if kernel else ()
    if isinstance(target, _compat.OpOverload):
        schemas = [target._schema]
    elif isinstance(target, _compat.OpOverloadPacket):  # Dynamo leaves open which overload is meant
        schemas = [getattr(target, name)._schema for name in target.overloads()]
        schemas = [schema for schema in schemas if _takes(schema, node)]
    else:
        return ()
    found: dict[torch.fx.Node, None] = {}
    for schema in schemas:
        for argument, given in _given(schema, node):
            if argument.alias_info is not None and argument.alias_info.is_write:
                torch.fx.node.map_arg(given, lambda operand: found.setdefault(operand))
    return found


def _running_statistics(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """Operands of a batch or instance norm that may be running statistics, unless it only reads them."""
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or not ("batch_norm" in name or "instance_norm" in name):
        return ()
    flags = [node.kwargs[key] for key in ("training", "use_input_stats") if key in node.kwargs]
    if False in (*flags, *node.args[5:6]):  # all of them take it in this place
        return ()
    values = [(operand, operand.meta.get("example_value")) for operand in node.all_input_nodes[1:]]
    return [operand for operand, value in values if not getattr(value, "requires_grad", False)]


def _given(schema: Any, node: torch.fx.Node) -> Iterator[tuple[Any, Any]]:
    """The arguments of `schema` that a call gives, with what it gives."""
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    yield from zip(positional, node.args, strict=False)
    yield from ((argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs)


def _takes(schema: Any, node: torch.fx.Node) -> bool:
    """Whether a call may mean the overload with this schema, by number and names of arguments."""
    given = [argument.name for argument, _ in _given(schema, node)]
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    return len(given) == len(node.args) + len(node.kwargs) and needed <= set(given)


# of torch's own operators; c10d has `communicates`
_PURE_NAMESPACES = frozenset({
    "aten", "prims", "prim", "inductor", "inductor_prims", "quantized", "quantized_decomposed", "mkldnn",
    "_c10d_functional", "_c10d_functional_autograd", "symm_mem",
})  # fmt: skip
# higher-order operators that do something, or call an object that may; of others the bodies are looked at
_EFFECTS = ("effect", "torchbind", "print", "callback", "opaque", "leaf", "hooks")


def impure(gm: torch.fx.GraphModule, safe: Sequence[str] = ()) -> str | None:
    """The first thing that the graph calls and that is not known to leave nothing behind but its results.

    Known are torch's functions, methods and operators, whatever they write to (see `CapturedGraph.written`), the
    random numbers that they draw, and operators that `safe` names, by globs.
    """
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            if not _known_pure(module, node) and not is_named(node.target, safe):
                return str(getattr(node.target, "__name__", node.target))
    return None


def is_named(target: Any, globs: Sequence[str]) -> bool:
    """Whether an operator is among those that the user names, by `namespace::op` or `namespace::op.overload`."""
    if isinstance(target, _compat.OpOverload):
        names = [target._schema.name, f"{target._schema.name}.{target._overloadname}"]
    elif isinstance(target, _compat.OpOverloadPacket):
        names = [str(target).replace(".", "::", 1)]
    else:
        return False
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)


def _known_pure(module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_module":
        return type(module.get_submodule(target)).__module__.startswith("torch.")
    if node.op != "call_function":
        return True
    if isinstance(target, _compat.HigherOrderOperator):
        return not any(word in target.name() for word in _EFFECTS)
    if isinstance(target, _compat.OpOverload):
        return target.namespace in _PURE_NAMESPACES
    if isinstance(target, _compat.OpOverloadPacket):
        return str(target).partition(".")[0] in _PURE_NAMESPACES
    owner = getattr(target, "__module__", None) or type(getattr(target, "__self__", target)).__module__
    return str(owner).partition(".")[0] in ("torch", "math", "operator", "_operator", "builtins", "numpy", "einops")


def saves_indices(gm: torch.fx.GraphModule) -> bool:
    """Whether it pools for maxima, whose backward takes indices, which Inductor makes offsets of its own of."""
    return any("max_pool" in name.replace("MaxPool", "max_pool") for name in map(_called, _nodes(gm)))


def _nodes(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    return (node for module in graph_modules(gm) for node in module.graph.nodes)


def _called(node: torch.fx.Node) -> str:
    if node.op == "call_module" and node.graph.owning_module is not None:
        return type(node.graph.owning_module.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


def computes_floats(gm: torch.fx.GraphModule) -> bool:
    """Whether a symbolic float is an operand of anything that makes no tensor.

    torch simplifies such arithmetic as for real numbers: `2*n - n` is `n`, and `n/n` is 1.
    """
    return any(
        isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
        and any(isinstance(operand.meta.get("example_value"), torch.SymFloat) for operand in node.all_input_nodes)
        for module in graph_modules(gm)
        for node in module.graph.nodes
        if node.op == "call_function"
    )


def may_change_inputs(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph of a trace in progress may write to its inputs; yes, where this torch does not let it be told."""
    try:
        told = all("example_value" in node.meta for node in gm.graph.find_nodes(op="placeholder"))
        return not told or bool(written(gm))
    except Exception:  # a symbol is missing
        return True


def _outputs(gm: torch.fx.GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0]
    return values if isinstance(values, tuple | list) else (values,)


def viewed_inputs(gm: torch.fx.GraphModule) -> tuple[int, ...]:
    """Which inputs an output looks into without being one, by the memory of Dynamo's fake tensors.

    What an operator returns that writes in place is the very tensor that it was given: AOTAutograd returns the input.
    Operators that give a tensor another shape in place count as views.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    reshaped = {_memory(node.args[0]) for node in gm.graph.nodes if _reshapes_in_place(node)}
    themselves = [node.meta.get("example_value") for node in placeholders if _memory(node) not in reshaped]
    returned = {
        _memory(node)
        for node in _outputs(gm)
        if isinstance(node, torch.fx.Node) and not any(node.meta.get("example_value") is value for value in themselves)
    }
    return tuple(index for index, node in enumerate(placeholders) if _memory(node) in returned)


def _reshapes_in_place(node: torch.fx.Node) -> bool:
    """Whether it is an operator such as `t_` on a tensor of the graph."""
    target = getattr(torch.ops.aten, node.target, None) if isinstance(node.target, str) else node.target
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return False
    packet = getattr(target, "overloadpacket", target)
    if not isinstance(packet, _compat.OpOverloadPacket):
        return False
    return any(torch.Tag.inplace_view in getattr(packet, name).tags for name in packet.overloads())


def output_kinds(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    return tuple(
        "tensor"
        if isinstance(value, torch.fx.Node) and isinstance(value.meta.get("example_value"), torch.Tensor)
        else "other"
        for value in _outputs(gm)
    )
