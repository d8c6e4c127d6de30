"""What is kept of one Dynamo graph, so that it can be compiled again and again later.

In: the graph module and example inputs of a backend call, while Dynamo's tracing context is still there.
Out: a `CapturedGraph`: its own copy of the structure (tensors shared), for each placeholder the sizes, strides and
offset it has over Dynamo's symbols, for each symbol its range and where its value is found among the run-time
arguments, the guards that Dynamo put on them, and the marks of the user.

Invariants: no tensor is cloned (a cloned static-address parameter is a wrong number after the first optimizer step);
nothing of Dynamo's tracer stays alive; Dynamo's ShapeEnv is only read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch

from multigraph_backend import _compat, events, naming
from multigraph_backend.distributed import sequence
from multigraph_backend.user_code import UserCode


class CannotCapture(Exception):
    """This graph cannot be compiled late; it has to be compiled at once, as one generic graph."""


@dataclass(frozen=True)
class Location:
    """Where the value of a symbol is found among the arguments of a call."""

    kind: Literal["arg", "item", "size", "stride", "offset"]
    index: int
    dim: int = 0

    def read(self, args: Sequence[Any]) -> Any:
        value = args[self.index]
        match self.kind:
            case "arg":
                return value
            case "item":
                return value.item()
            case "size":
                return value.size(self.dim)
            case "stride":
                return value.stride(self.dim)
            case "offset":
                return value.storage_offset()

    def code(self) -> str:
        """The same as Python text over the argument tuple `a`."""
        value = f"a[{self.index}]"
        match self.kind:
            case "arg":
                return value
            case "item":
                return f"{value}.item()"
            case "size":
                return f"{value}.size({self.dim})"
            case "stride":
                return f"{value}.stride({self.dim})"
            case "offset":
                return f"{value}.storage_offset()"


@dataclass(frozen=True)
class TensorLayout:
    """Sizes, strides and offset of one tensor input over Dynamo's symbols; `memo` by the name of their source."""

    source: Any
    size: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    offset: sympy.Expr
    memo: Mapping[str, sympy.Expr]


@dataclass(frozen=True)
class Input:
    """One placeholder: a tensor (`layout`), a symbolic number (`expr`), or anything else (neither)."""

    name: str
    source: Any
    layout: TensorLayout | None = None
    expr: sympy.Expr | None = None
    static: bool = False  # a parameter or buffer whose address torch keeps
    number: bool = False  # a Python float, which Dynamo passes as a 0-dim tensor made at each call
    into_subgraph: bool = False  # operand of a higher-order operator


@dataclass(frozen=True)
class SymbolInfo:
    """One symbol of Dynamo's trace that the graph's inputs carry."""

    location: Location | None
    source: Any
    lower: Any
    upper: Any
    positive: bool | None
    unbacked: bool
    is_float: bool


@dataclass(frozen=True)
class NamedSize:
    """A size or integer input that a condition can be declared on: over symbols, and where a call has it."""

    expr: sympy.Expr
    location: Location


@dataclass(frozen=True)
class Mark:
    """One entry of a stock `specialize_on`: the size's name and the user's callable."""

    name: str
    check: Callable[[int], object]


@dataclass
class CapturedGraph:
    """See the module's text.  `copy_module()` gives a compile its own structure."""

    module: torch.fx.GraphModule
    inputs: tuple[Input, ...]
    symbols: dict[sympy.Symbol, SymbolInfo]
    guards: tuple[Any, ...]
    shape_env_settings: dict[str, Any]
    sizes: dict[str, NamedSize]  # every named size and integer input of the graph
    traced_names: dict[str, str]  # as Dynamo calls it -> as the user calls it, where they differ
    marks: tuple[Mark, ...]
    written: frozenset[int]  # positions of what a call may write to in place; `held` counts on behind the inputs
    viewed_inputs: tuple[int, ...]  # positions of inputs of which views are returned
    outputs: tuple[str, ...]  # "tensor" or "other", in order
    code: UserCode
    communicates: bool = False  # whether it issues collectives
    impure: str | None = None  # an operator or function that it calls and that is not known to be free of side effects
    compile_id: Any = None  # torch's id of the trace, for its own tools
    notes: list[str] = field(default_factory=list)
    computes_floats: bool = False  # whether Python floats go through arithmetic before tensors take them
    zeros: tuple[int, ...] = ()  # positions of Python floats that Dynamo found to be zero, of whichever sign
    floats_are_constants: bool = False  # set by the first compile that cannot keep them apart from their values

    @property
    def mutates_inputs(self) -> bool:
        """Whether a call changes anything that was there before it: an input, or a tensor that the graph holds."""
        return bool(self.written)

    @functools.cached_property
    def tensor_inputs(self) -> tuple[int, ...]:
        """Positions of the tensors among the inputs, without Python floats."""
        return tuple(i for i, entry in enumerate(self.inputs) if entry.layout is not None and not entry.number)

    @functools.cached_property
    def user_inputs(self) -> tuple[int, ...]:
        """Those of them that are no parameters or buffers."""
        return tuple(index for index in self.tensor_inputs if not self.inputs[index].static)

    @functools.cached_property
    def held(self) -> tuple[torch.Tensor, ...]:
        """Tensors that are attributes of the graph's modules: constants, and parameters that are no inputs."""
        return tuple(_held(self.module))

    @property
    def once_because(self) -> str | None:
        """Why a call may not be run twice, None if it may: then it changes random number generators at most."""
        if self.mutates_inputs:
            return "mutates its inputs"
        if self.communicates:
            return "issues collectives"
        return None if self.impure is None else f"calls {self.impure}, which may have side effects"

    @property
    def repeatable(self) -> bool:
        """Whether a call may be run twice."""
        return self.once_because is None

    @property
    def floats(self) -> list[sympy.Symbol]:
        """Symbols of Python floats."""
        return [symbol for symbol, info in self.symbols.items() if info.is_float and info.location is not None]

    def copy_module(self) -> torch.fx.GraphModule:
        return copy_structure(self.module)

    def find(self, declared: str) -> NamedSize | int | None:
        """What a declared name stands for: a size or integer input, a constant of the trace, or nothing."""
        name = naming.normalized(declared)
        size = self.sizes.get(self.traced_names.get(name, name))
        return size if size is not None else self.code.integers.get(name)

    def values(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of every symbol that the inputs carry, in a call with `args`."""
        return {symbol: info.location.read(args) for symbol, info in self.symbols.items() if info.location is not None}


# ---------------------------------------------------------------- structure


_KEPT_ATTRIBUTES = ("_param_name_to_source", "_backend_id", "compile_subgraph_reason")
_KEPT_META = ("dynamo_compile_id", "dynamo_flat_name_to_original_fqn", "backend_id", "cudagraph_annotation")
_TRACER_META = ("example_value", "grapharg", "unbacked_bindings", "val")


def _shared_objects(gm: torch.fx.GraphModule) -> dict[int, Any]:
    """Deepcopy's memo: what a copy of the structure must share."""
    memo: dict[int, Any] = {}
    for module in gm.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor | torch.ScriptObject) or type(value).__name__ == "ProcessGroup":
                memo[id(value)] = value
    return memo


def copy_structure(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    new = copy.deepcopy(gm, _shared_objects(gm))
    for old_node, node in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        # a copied node keeps its meta and loses its attributes
        if hasattr(old_node, "_dynamo_source"):
            node._dynamo_source = old_node._dynamo_source
        node.meta = dict(node.meta)
    for name in _KEPT_ATTRIBUTES:
        if name in vars(gm):
            setattr(new, name, vars(gm)[name])
    return new


def forget_hooks(graph: CapturedGraph) -> None:
    """Drop the copies of `saved_tensors_hooks` that Dynamo hangs on a graph and that no node of it uses."""
    for name in ("saved_tensors_hooks_pack_0", "saved_tensors_hooks_unpack_0"):
        if hasattr(graph.module, name):
            delattr(graph.module, name)


def _forget_tracer(gm: torch.fx.GraphModule) -> None:
    """Drop what holds the tracer: fake tensors, arguments, bindings.  Sources, stacks, static marks stay."""
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            held_tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
            for key in _TRACER_META:
                node.meta.pop(key, None)
            if "tensor_dict" in node.meta:
                static = node.meta["tensor_dict"].get("_dynamo_static_input_type")
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": static} if static else {}
            if held_tensor:
                node.meta["example_value"] = None  # AOTAutogradCache asks only whether the key is there


def write_known_items(
    module: torch.fx.GraphModule,
    inputs: Sequence[Input],
    translate: Callable[[Any], Any],
    zeros: Mapping[int, float] | None = None,
) -> tuple[int, ...]:
    """Put Python floats that are known constants into the graph as numbers; positions of those that are zero.

    Dynamo passes a float as a 0-dim tensor and takes its item; once the value is guarded on, no symbol is left.
    `translate` gives an expression over Dynamo's symbols as it is known now.  It does not tell the sign of a zero:
    those among `zeros` are written, by position, and others are not.  Other 0-dim tensors are left alone: what is known
    of them, such as a size of the tensor that a view looks into, is not their item.
    """
    found = []
    for index, (node, entry) in enumerate(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if entry.layout is None or not entry.number:
            continue
        values = [
            value
            for name, expr in entry.layout.memo.items()
            if not name.endswith("storage_offset()")
            and (not isinstance(value := translate(expr), sympy.Basic) or value.is_number)
        ]
        if len(values) == 1:
            (value,) = values
            number = int(value) if getattr(value, "is_Integer", False) else float(value)
            if number == 0:
                found += [index] * any(user.users for user in node.users)
                if zeros is None or index not in zeros:
                    continue
                number = zeros[index]
            _write_item(module, node, number)
    module.recompile()
    return tuple(found)


def _write_item(module: torch.fx.GraphModule, node: torch.fx.Node, number: int | float) -> None:
    """Put `number` for the item of the 0-dim tensor `node`, also in bodies of higher-order operators that take it."""
    for user in list(node.users):
        if user.op == "call_method" and user.target == "item":
            replace_with_number(user, number)
            user.graph.erase_node(user)
        elif isinstance(user.target, _compat.HigherOrderOperator):
            for body, placeholder in _inside(module, user, node):
                _write_item(body, placeholder, number)
                body.recompile()


def _inside(
    module: torch.fx.GraphModule, call: torch.fx.Node, operand: torch.fx.Node
) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node]]:
    """The body of a higher-order operator, and what `operand` is called there.

    Understood are operators with one body, whose operands come last.  A body that several calls share may get different
    operands from them, and is left alone.
    """
    named = [arg for arg in call.args if isinstance(arg, torch.fx.Node) and arg.op == "get_attr"]
    if len(named) != 1:
        return
    target = str(named[0].target)
    body = getattr(module, target, None)
    calls = [user for entry in module.graph.find_nodes(op="get_attr", target=target) for user in entry.users]
    if not isinstance(body, torch.fx.GraphModule) or calls != [call]:
        return
    placeholders = body.graph.find_nodes(op="placeholder")
    operands = call.args[len(call.args) - len(placeholders) :]
    for given, placeholder in zip(operands, placeholders, strict=True):
        if given is operand:
            yield body, placeholder


def replace_with_number(node: torch.fx.Node, number: int | float) -> None:
    """Let every user of `node` take a literal instead."""
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, lambda arg: number if arg is node else arg)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda arg: number if arg is node else arg)


# ---------------------------------------------------------------- capture


def capture(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], code: UserCode) -> CapturedGraph:
    """Take what a late compile needs from a backend call in progress.

    Raises `CannotCapture` for inputs that cannot be described apart from Dynamo's trace (tensor subclasses).
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
    symbols = _locate_symbols(inputs, shape_env)
    guards = []
    for guard in shape_env.guards:
        expr = shape_env.replace(guard.expr)
        if expr in (sympy.true, sympy.false) or not expr.free_symbols:
            continue
        if expr.free_symbols <= set(symbols):
            guards.append(expr)
    sizes, traced_names = _name_sizes(inputs, symbols, shape_env, code)
    outputs = _output_kinds(gm)
    if not hasattr(gm, "_param_name_to_source"):
        gm._param_name_to_source = {}  # type: ignore[assignment]
    module = copy_structure(gm)
    _forget_tracer(module)
    zeros = write_known_items(module, inputs, lambda expr: expr)
    module.meta = {key: value for key, value in gm.meta.items() if key in _KEPT_META}
    return CapturedGraph(
        module=module,
        inputs=inputs,
        symbols=symbols,
        guards=tuple(guards),
        shape_env_settings=dataclasses.asdict(shape_env.settings),
        sizes=sizes,
        traced_names=traced_names,
        marks=_marks(shape_env, code),
        written=_written(gm),
        viewed_inputs=_viewed_inputs(gm),
        outputs=outputs,
        code=code,
        communicates=sequence.holds_collectives(gm),
        impure=_impure(gm),
        compile_id=events.current_compile_id(),
        notes=_lost_marks(inputs, example_inputs, code),
        computes_floats=_computes_floats(gm),
        zeros=zeros,
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
    if _compat.is_traceable_wrapper_subclass(example):
        raise CannotCapture(f"input {node.name} is a tensor subclass ({type(example).__name__})")
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
    static = bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))
    return Input(node.name, source, layout=layout, static=static, number=number, into_subgraph=into_subgraph)


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
    inputs: Sequence[Input], symbols: Mapping[sympy.Symbol, SymbolInfo], shape_env: Any, code: UserCode
) -> tuple[dict[str, NamedSize], dict[str, str]]:
    """Sizes of the graph's tensors, its integers, and sizes of tensors that it takes only as a number."""
    sizes: dict[str, NamedSize] = {}
    traced_names: dict[str, str] = {}
    named: dict[str, NamedSize] = {}
    for index, entry in enumerate(inputs):
        if entry.layout is not None and not entry.static and not entry.number:
            source = _compat.source_name(entry.layout.source)
            found = {
                naming.size_name(source, dim): NamedSize(expr, Location("size", index, dim))
                for dim, expr in enumerate(entry.layout.size)
            }
        elif entry.expr is not None and not isinstance(entry.source, _compat.TensorPropertySource):
            name = naming.input_name(_compat.source_name(entry.source))
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
                name = naming.size_name(_compat.source_name(source.base), source.idx)
                if "._base" not in name:  # the tensor that a view looks into is no input
                    named.setdefault(name, NamedSize(shape_env.replace(symbol), info.location))
    for traced, size in named.items():
        name = code.known_as(traced)
        sizes.setdefault(name, size)
        if name != traced:
            traced_names[traced] = name
    return sizes, traced_names


def _marks(shape_env: Any, code: UserCode) -> tuple[Mark, ...]:
    """The stock marks in their order."""
    marks = []
    for entry in shape_env.specializations:
        base, dim = _compat.source_name(entry.source.base), entry.source.idx
        marks.append(Mark(code.known_as(naming.size_name(base, dim)), entry.check_fn))
    return tuple(marks)


def _lost_marks(inputs: Sequence[Input], example_inputs: Sequence[Any], code: UserCode) -> list[str]:
    """What `mark_unbacked` erased: every mark leaves an entry per dimension, and it starts the table anew."""
    notes = []
    for entry, example in zip(inputs, example_inputs, strict=True):
        table = getattr(example, "_specialize_on", None)
        if entry.layout is None or not isinstance(table, dict):
            continue
        marked = {*getattr(example, "_dynamo_dynamic_indices", ()), *getattr(example, "_dynamo_unbacked_indices", ())}
        lost = sorted(marked - set(table))
        for dim in lost:
            name = code.known_as(naming.size_name(_compat.source_name(entry.layout.source), dim))
            notes.append(
                f"{name}: torch lost what was marked on it (mark_unbacked forgets the specialize_on of other "
                "dimensions); use multigraph_backend.mark or options"
            )
    return notes


def _graph_modules(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """`gm` and the bodies of its higher-order operators."""
    return (module for module in gm.modules() if isinstance(module, torch.fx.GraphModule))


def _held(gm: torch.fx.GraphModule) -> dict[torch.Tensor, list[torch.fx.Node]]:
    """Tensors that are attributes of the graph's modules, with the nodes that take them; in order."""
    found: dict[torch.Tensor, list[torch.fx.Node]] = {}  # tensors are equal as keys where they are the same
    for module in _graph_modules(gm):
        for node in module.graph.find_nodes(op="get_attr"):
            value: Any = module
            for name in str(node.target).split("."):
                value = getattr(value, name, None)
            if isinstance(value, torch.Tensor):
                found.setdefault(value, []).append(node)
    return found


def _written(gm: torch.fx.GraphModule) -> frozenset[int]:
    """What the graph may write to, by the memory of Dynamo's fake tensors; positions as in `CapturedGraph.written`.

    In-place operations of the trace have counted up the version of what they wrote to, `x.data` having one of its own.
    Custom operators and kernels need not do so; what their schemas say counts.  Norms with running statistics do not
    say so either.
    """
    written: set[Any] = set()
    nodes = [node for module in _graph_modules(gm) for node in module.graph.nodes]
    placeholders, held = gm.graph.find_nodes(op="placeholder"), _held(gm)
    told = _written_among_shared(
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
    return frozenset(index for index, taken in enumerate(tensors) if any(_memory(node) in written for node in taken))


def _written_among_shared(entries: Iterable[tuple[Any, torch.fx.Node]], written: set[Any]) -> dict[int, torch.Tensor]:
    """Adds to `written` the memory that several of these real tensors share and that versions say is written to.

    torch makes the fake of at most one of them, which begins where the memory does, as of a tensor alone, and those of
    the others by `set_`, which counts up their version once.  So one was written to where the version of any has been
    counted up further, or, if that one may be among them, those of all have been.  Returned are the fakes about which
    that is said, or which they are views of, by their `id`.
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
        if len(fakes) > 1:
            versions = [fake._version for fake, _ in fakes.values()]
            one_alone = any(start == 0 for _, start in fakes.values())
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
    return int(value.untyped_storage()._cdata)


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


def _impure(gm: torch.fx.GraphModule) -> str | None:
    """The first thing that the graph calls and that is not known to leave nothing behind but its results.

    Known are torch's functions, methods and operators, whatever they write to (see `CapturedGraph.written`), and the
    random numbers that they draw.
    """
    for module in _graph_modules(gm):
        for node in module.graph.nodes:
            if not _known_pure(module, node):
                return str(getattr(node.target, "__name__", node.target))
    return None


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


def _computes_floats(gm: torch.fx.GraphModule) -> bool:
    """Whether a symbolic float is an operand of anything that makes no tensor.

    torch simplifies such arithmetic as for real numbers: `2*n - n` is `n`, and `n/n` is 1.
    """
    return any(
        isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
        and any(isinstance(operand.meta.get("example_value"), torch.SymFloat) for operand in node.all_input_nodes)
        for module in _graph_modules(gm)
        for node in module.graph.nodes
        if node.op == "call_function"
    )


def may_change_inputs(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph of a trace in progress may write to its inputs; yes, where this torch does not let it be told."""
    try:
        told = all("example_value" in node.meta for node in gm.graph.find_nodes(op="placeholder"))
        return not told or bool(_written(gm))
    except Exception:  # a symbol is missing
        return True


def _outputs(gm: torch.fx.GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0]
    return values if isinstance(values, tuple | list) else (values,)


def _viewed_inputs(gm: torch.fx.GraphModule) -> tuple[int, ...]:
    """Which inputs an output looks into without being one, by the memory of Dynamo's fake tensors."""
    returned = {_memory(node) for node in _outputs(gm) if isinstance(node, torch.fx.Node) and node.op != "placeholder"}
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(index for index, node in enumerate(placeholders) if _memory(node) in returned)


def _output_kinds(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    return tuple(
        "tensor"
        if isinstance(value, torch.fx.Node) and isinstance(value.meta.get("example_value"), torch.Tensor)
        else "other"
        for value in _outputs(gm)
    )
