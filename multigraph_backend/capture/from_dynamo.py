"""A backend call in progress, taken into a `CapturedGraph`.

In: the graph module and example inputs of a backend call, while Dynamo's tracing context is still there.
Out: see `graph`.

Invariants: no tensor is cloned; nothing of Dynamo's tracer stays alive; Dynamo's ShapeEnv is only read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from multigraph_backend import _compat, events
from multigraph_backend.capture import assertions, dtensors, size_names, static_sizes
from multigraph_backend.capture.effects import (
    computes_floats,
    impure,
    output_kinds,
    reads_negated,
    viewed_inputs,
    written,
)
from multigraph_backend.capture.graph import (
    CapturedGraph,
    Input,
    Location,
    MarkedSize,
    NamedSize,
    SymbolInfo,
    TensorLayout,
)
from multigraph_backend.capture.known_numbers import write_known_items
from multigraph_backend.capture.structure import KEPT_META, copy_structure, forget_tracer, made_of
from multigraph_backend.capture.user_code import UserCode
from multigraph_backend.distributed import sequence


class CannotCapture(Exception):
    """This graph cannot be compiled late; it has to be compiled at once, as one generic graph."""


def capture(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], user_code: UserCode) -> CapturedGraph:
    """Take what a late compile needs from a backend call in progress.

    Raises `CannotCapture` for inputs that cannot be described apart from Dynamo's trace: tensor subclasses, unless they
    are parameters or buffers of fixed sizes that the graph does not write to, and negated views.
    """
    context = _compat.TracingContext.try_get()
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        raise CannotCapture("the backend was called outside of a Dynamo trace")
    shape_env = context.fake_mode.shape_env
    placeholders = gm.graph.find_nodes(op="placeholder")
    fakes: list[Any] = []
    inputs = tuple(
        _describe(node, example, context, fakes) for node, example in zip(placeholders, example_inputs, strict=True)
    )
    if (negated := reads_negated(gm, example_inputs)) is not None:
        raise CannotCapture(negated)
    changed = written(gm)
    for index, entry in enumerate(inputs):
        if entry.wrapper is not None and index in changed:
            raise CannotCapture(f"input {entry.name} is a tensor subclass ({entry.wrapper}) that the graph writes to")
    symbols = _locate_symbols(inputs, shape_env)
    guards = []
    unread: set[sympy.Symbol] = set()
    for guard in shape_env.guards:
        expr = shape_env.replace(guard.expr)
        if expr in (sympy.true, sympy.false) or not expr.free_symbols:
            continue
        if expr.free_symbols <= set(symbols):
            guards.append(expr)
        else:
            unread.update(expr.free_symbols)
    sizes, traced_names = _name_sizes(inputs, symbols, shape_env, user_code)
    outputs = output_kinds(gm)
    if not hasattr(gm, "_param_name_to_source"):
        gm._param_name_to_source = {}  # type: ignore[assignment]
    module = copy_structure(gm)
    try:
        unchecked = assertions.put_back(module, shape_env, symbols)
    except assertions.CannotAssert as reason:
        raise CannotCapture(f"an assertion about sizes cannot be kept: {reason}") from None
    forget_tracer(module)
    zeros = write_known_items(module, inputs, lambda expr: expr)
    module.meta = {key: value for key, value in gm.meta.items() if key in KEPT_META}
    return CapturedGraph(
        module=module,
        inputs=inputs,
        symbols=symbols,
        guards=tuple(guards),
        shape_env_settings=dataclasses.asdict(shape_env.settings),
        sizes=sizes,
        traced_names=traced_names,
        marked_sizes=_marked_sizes(shape_env, user_code),
        written=changed,
        viewed_inputs=viewed_inputs(gm),
        outputs=outputs,
        user_code=user_code,
        communicates=sequence.holds_collectives(gm),
        impure=impure(gm),
        compile_id=events.current_compile_id(),
        notes=[*_lost_marks(inputs, example_inputs, user_code), *unchecked],
        remarks=_wrappers(inputs, user_code),
        computes_floats=computes_floats(gm),
        zeros=zeros,
        unread=frozenset(unread),
        static=static_sizes.reasons(inputs, example_inputs, shape_env, user_code),
    )


def _describe(node: torch.fx.Node, example: Any, context: Any, fakes: list[Any]) -> Input:
    """One input as Dynamo's trace has it.

    `fakes` keeps what torch made for the inputs so far: while they live it takes those of their gradients, and of what
    they are views of, again for inputs that are these, with the symbols that they have in the trace.
    """
    source = getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)
    into_subgraph = any(isinstance(user.target, _compat.HigherOrderOperator) for user in node.users)
    if isinstance(example, _compat.SymTypes):
        if source is None:
            raise CannotCapture(f"input {node.name} has no source")
        return Input(node.name, source, expr=example.node.expr, into_subgraph=into_subgraph)
    if not isinstance(example, torch.Tensor):
        return Input(node.name, source)
    static = bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))
    if _compat.is_traceable_wrapper_subclass(example):
        fakes.append(_static_wrapper(node, example, static, context))
        return Input(
            node.name,
            source,
            static=True,
            into_subgraph=into_subgraph,
            wrapper=type(example).__name__,
            is_dtensor=dtensors.is_dtensor(example),
        )
    if source is None or isinstance(example, _compat.FakeTensor):
        raise CannotCapture(f"input {node.name} is not an input of the user's function (the graph was split)")
    symbolic = context.tensor_to_context.get(example, None)
    tensor_source = symbolic.tensor_source if symbolic is not None else source
    # the same fakification that AOTAutograd does: the symbols come from Dynamo's memo, none is new
    fake = context.fake_mode.from_tensor(
        example,
        symbolic_context=symbolic,
        source=symbolic.tensor_source if symbolic is not None else None,
        trace=False,
    )
    fakes.append(fake)
    shape_env = context.fake_mode.shape_env
    memo = {}
    if symbolic is not None:
        for name, expr in symbolic.shape_env_to_source_to_symbol_cache.get(id(shape_env), {}).items():
            memo[name] = shape_env.replace(expr) if isinstance(expr, sympy.Basic) else expr
    layout = TensorLayout(
        source=tensor_source,
        size=tuple(map(_compat.sympy_expr, fake.size())),
        stride=tuple(map(_compat.sympy_expr, fake.stride())),
        offset=_compat.sympy_expr(fake.storage_offset()),
        memo=memo,
    )
    number = isinstance(tensor_source, _compat.FloatTensorSource)
    return Input(
        node.name,
        source,
        layout=layout,
        static=static,
        number=number,
        into_subgraph=into_subgraph,
        grad=example.requires_grad and not number,
    )


def _static_wrapper(node: torch.fx.Node, example: Any, static: bool, context: Any) -> Any:
    """Dynamo's fake of a parameter or buffer that is a tensor subclass made of plain tensors.

    What it is made of has to have fixed sizes: Dynamo guards on these.  A DTensor is also made of a mesh, which is no
    tensor; what code relies on of DTensors is asked at each call (`capture.dtensors`).
    """
    said = f"input {node.name} is a tensor subclass ({type(example).__name__})"
    if not static:
        raise CannotCapture(f"{said}, and no parameter or buffer")
    symbolic = context.tensor_to_context.get(example, None)
    fake = context.fake_mode.from_tensor(
        example,
        symbolic_context=symbolic,
        source=symbolic.tensor_source if symbolic is not None else None,
        static_shapes=None if symbolic is not None else True,
        trace=False,
    )
    for name, tensor in (("", fake), *made_of(fake)):
        if dtensors.is_mesh_of(example, name):
            continue
        if _compat.is_traceable_wrapper_subclass(tensor) != isinstance(tensor, _compat.FakeTensor):
            numbers = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
            if not all(isinstance(number, int) for number in numbers):
                raise CannotCapture(f"{said} whose sizes are not fixed ({name or 'its own'}: {list(tensor.size())})")
        else:
            raise CannotCapture(f"{said} made of a {type(tensor).__name__} ({name})")
    return fake


def _occurrences(inputs: Sequence[Input]) -> Iterable[tuple[Any, Location, Any]]:
    """Every expression over symbols that a call can read, with where and from which source; cheapest first."""
    size, stride, offset = (
        _compat.TensorProperty.SIZE,
        _compat.TensorProperty.STRIDE,
        _compat.TensorProperty.STORAGE_OFFSET,
    )
    prop = _compat.TensorPropertySource
    for index, entry in enumerate(inputs):
        if entry.expr is not None:
            yield entry.expr, Location("arg", index), entry.source
    for index, entry in enumerate(inputs):
        layout = entry.layout
        if layout is None:
            continue
        for dim, expr in enumerate(layout.size):
            yield expr, Location("size", index, dim), prop(layout.source, size, dim)
        for dim, expr in enumerate(layout.stride):
            yield expr, Location("stride", index, dim), prop(layout.source, stride, dim)
        yield layout.offset, Location("offset", index), prop(layout.source, offset)
    for index, entry in enumerate(inputs):
        if entry.layout is not None and entry.number:  # a Python float: a 0-dim tensor with an item
            for expr in entry.layout.memo.values():
                yield expr, Location("item", index), entry.layout.source


def _locate_symbols(inputs: Sequence[Input], shape_env: Any) -> dict[sympy.Symbol, SymbolInfo]:
    found: dict[sympy.Symbol, SymbolInfo] = {}
    types = _compat.SymT
    for expr, location, source in _occurrences(inputs):
        if not isinstance(expr, sympy.Basic):
            continue
        for symbol in sorted(expr.free_symbols, key=str):
            plain = expr == symbol
            known = found.get(symbol)
            if known is not None and (known.location is not None or not plain or location.kind == "item"):
                continue
            if location.kind == "item" and not plain:
                continue
            bounds = shape_env.var_to_range.get(symbol)
            found[symbol] = SymbolInfo(
                location=location if plain else None,
                source=source if plain else None,
                lower=bounds.lower if bounds is not None else None,
                upper=bounds.upper if bounds is not None else None,
                positive=symbol.is_positive,
                unbacked=_compat.symbol_is_type(symbol, (types.UNBACKED_INT, types.UNBACKED_FLOAT)),
                is_float=_compat.symbol_is_type(symbol, (types.FLOAT, types.UNBACKED_FLOAT)),
            )
    return found


def _name_sizes(
    inputs: Sequence[Input], symbols: Mapping[sympy.Symbol, SymbolInfo], shape_env: Any, user_code: UserCode
) -> tuple[dict[str, NamedSize], dict[str, str]]:
    """Sizes of the graph's tensors, its integers, and sizes of tensors that it takes only as a number."""
    sizes: dict[str, NamedSize] = {}
    traced_names: dict[str, str] = {}
    named: dict[str, NamedSize] = {}
    for index, entry in enumerate(inputs):
        if entry.layout is not None and not entry.static and not entry.number:
            source = _compat.source_name(entry.layout.source)
            found = {
                size_names.size_name(source, dim): NamedSize(expr, Location("size", index, dim))
                for dim, expr in enumerate(entry.layout.size)
            }
        elif entry.expr is not None and not isinstance(entry.source, _compat.TensorPropertySource):
            name = size_names.input_name(_compat.source_name(entry.source))
            found = {name: NamedSize(entry.expr, Location("arg", index))}
        else:
            continue
        named.update(found)
    for symbol, sources in shape_env.var_to_sources.items():
        info = symbols.get(shape_env.replace(symbol))
        if info is None or info.location is None:
            continue
        for source in sources:
            if isinstance(source, _compat.TensorPropertySource) and source.prop is _compat.TensorProperty.SIZE:
                name = size_names.size_name(_compat.source_name(source.base), source.idx)
                if "._base" not in name:  # the tensor that a view looks into is no input
                    named.setdefault(name, NamedSize(shape_env.replace(symbol), info.location))
    for traced, size in named.items():
        name = user_code.known_as(traced)
        sizes.setdefault(name, size)
        if name != traced:
            traced_names[traced] = name
    return sizes, traced_names


def _marked_sizes(shape_env: Any, user_code: UserCode) -> tuple[MarkedSize, ...]:
    """The stock marks in their order."""
    marked = []
    for entry in shape_env.specializations:
        base, dim = _compat.source_name(entry.source.base), entry.source.idx
        marked.append(MarkedSize(user_code.known_as(size_names.size_name(base, dim)), entry.check_fn))
    return tuple(marked)


def _lost_marks(inputs: Sequence[Input], example_inputs: Sequence[Any], user_code: UserCode) -> list[str]:
    """What `mark_unbacked` erased: every mark leaves an entry per dimension, and it starts the table anew."""
    notes = []
    for entry, example in zip(inputs, example_inputs, strict=True):
        table = getattr(example, "_specialize_on", None)
        if entry.layout is None or not isinstance(table, dict):
            continue
        marked = {*getattr(example, "_dynamo_dynamic_indices", ()), *getattr(example, "_dynamo_unbacked_indices", ())}
        lost = sorted(marked - set(table))
        for dim in lost:
            name = user_code.known_as(size_names.size_name(_compat.source_name(entry.layout.source), dim))
            notes.append(
                f"{name}: torch lost what was marked on it (mark_unbacked forgets the specialize_on of other "
                "dimensions); use multigraph_backend.mark or options"
            )
    return notes


def _wrappers(inputs: Sequence[Input], user_code: UserCode) -> tuple[str, ...]:
    """Which parameters are tensor subclasses, by class."""
    named: dict[str, list[str]] = {}
    for entry in inputs:
        if entry.wrapper is not None:
            name = user_code.known_as(size_names.input_name(_compat.source_name(entry.source)))
            named.setdefault(entry.wrapper, []).append(name)
    return tuple(
        f"{names[0]} is a {kind}, of fixed sizes"
        if len(names) == 1
        else f"{len(names)} parameters are {kind}s, of fixed sizes: {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
        for kind, names in named.items()
    )


def forget_hooks(graph: CapturedGraph) -> None:
    """Drop the copies of `saved_tensors_hooks` that Dynamo hangs on a graph and that no node of it uses."""
    for name in ("saved_tensors_hooks_pack_0", "saved_tensors_hooks_unpack_0"):
        if hasattr(graph.module, name):
            delattr(graph.module, name)
