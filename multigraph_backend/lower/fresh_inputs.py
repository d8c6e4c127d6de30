"""A ShapeEnv and fake inputs of its own for each compile, with the declared facts built in.

In: a captured graph, facts about its symbols, and example arguments (real ones of a call, or stand-ins).
Out: `FreshInputs`: fake inputs whose sizes are Dynamo's expressions with each symbol replaced.

How a fact becomes known to the compiler:
- equality: the symbol is the integer, everywhere;
- range: the bounds of a new symbol;
- multiple of m: the size is `m*k` with a new symbol k, so that divisibility is visible in every expression.

Invariants, checked:
- the sizes come out exactly as planned;
- a symbol becomes a number only where a guard of Dynamo's, the dispatcher or the variant's condition checks it.  That
  the example has a number there is no reason: torch's own rule, to take 0 and 1 of an example for constants, is off
  (`specialize_zero_one=False`), as is merging equal sizes of the example (`duck_shape=False`).

Nothing is patched into a ShapeEnv that anything else uses.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.capture import signs_of_zero
from multigraph_backend.capture.aliasing import any_overlap, sharing, wrappers_apart, writes_beside_wrappers
from multigraph_backend.capture.graph import CapturedGraph, Input, TensorLayout
from multigraph_backend.capture.known_numbers import replace_with_number, write_known_items
from multigraph_backend.declare.predicates import Facts

OVERLAPPING = (
    "inputs that overlap in memory are changed in place, and AOTAutograd's code for that is not always right "
    "(seen in torch 2.11 and 2.13: wrong numbers, errors)"
)

GIVEN_TWICE = (
    "a tensor that is changed in place is given twice, where the trace was given two: AOTAutograd fails of that "
    "(seen in torch 2.11, 2.13, 2.15)"
)

VIEW_OF_CHANGED = (
    "a view of an input that is changed in place is returned, and the input is itself a window into other memory: "
    "AOTAutograd's code for that gives wrong numbers where sizes are symbolic (seen in torch 2.11, 2.13, 2.15)"
)


class CannotLower(Exception):
    """This compile cannot be made right; the message says why."""


class LosesSign(CannotLower):
    """The sign of a zero among Python floats would be lost; not where all floats are constants, maybe."""


@dataclass
class FreshInputs:
    """What one compile starts from."""

    shape_env: Any
    fake_mode: Any
    module: torch.fx.GraphModule
    alone: bool = False  # the inputs are made without the graph: the module is an empty one
    inputs: list[Any] = field(default_factory=list)
    text_of: dict[sympy.Symbol, str] = field(default_factory=dict)  # Python text of each new symbol over the arguments
    replaced: dict[sympy.Symbol, Any] = field(default_factory=dict)  # Dynamo's symbol -> expression over new ones
    checked: set[sympy.Symbol] = field(default_factory=set)  # Dynamo's symbols that may be numbers: calls are checked
    divided: dict[int, int] = field(default_factory=dict)  # argument position -> m: the code takes argument // m
    # storage offsets of arguments that share memory with another or are views to differentiate, where the graph
    # mutates its inputs: the code takes them for constants, so its guards check them
    offsets: dict[int, int] = field(default_factory=dict)
    zeros: dict[int, float] = field(
        default_factory=dict
    )  # argument positions of floats that the graph has as this zero
    # inputs of which views are returned and that have to be contiguous from the start of their memory
    windows: tuple[int, ...] = ()
    numbers: dict[int, float] = field(default_factory=dict)  # what was written into the graph of Python floats' tensors
    known_guards: int = 0  # guards that hold already: Dynamo's and the declared facts

    def translate(self, expr: Any) -> Any:
        return expr.xreplace(self.replaced) if isinstance(expr, sympy.Basic) else expr


def build(
    graph: CapturedGraph,
    facts: Mapping[sympy.Symbol, Facts],
    args: Sequence[Any],
    floats: Mapping[sympy.Symbol, float],
    inputs_alone: bool = False,
) -> FreshInputs:
    """Fake inputs for `args` under `facts`, with the Python floats in `floats` as constants (to the sign of a zero).

    `inputs_alone`: nobody asks for the graph, and the module is an empty one.
    Raises `CannotLower` when a guard of Dynamo's trace does not hold under the facts or a size cannot be rebuilt.
    """
    shape_env = _compat.ShapeEnv(**{**graph.shape_env_settings, "duck_shape": False, "specialize_zero_one": False})
    module = torch.fx.GraphModule({}, torch.fx.Graph()) if inputs_alone else graph.copy_module()
    fresh = FreshInputs(shape_env, _compat.FakeTensorMode(shape_env=shape_env), module, inputs_alone)
    # inputs that are changed, or share memory with what is
    changed = set(graph.written)
    if graph.mutates_inputs:
        everything = (*args, *graph.held)
        own = {index for index in graph.user_inputs if args[index]._is_view() and args[index].requires_grad}
        for group in sharing(graph, args):
            own.update(index for index in group if index < len(args))
            if graph.written.isdisjoint(group):
                continue
            members = [everything[member] for member in group]
            if any_overlap(members):
                raise CannotLower(OVERLAPPING)
            if len(set(map(id, members))) < len(members):
                raise CannotLower(GIVEN_TWICE)
            changed.update(group)
        if writes_beside_wrappers(graph) and not wrappers_apart(graph, args)(args):
            raise CannotLower("a parameter that is a tensor subclass is made of memory that is changed in place")
        fresh.offsets = {index: args[index].storage_offset() for index in sorted(own)}
    multiples: dict[sympy.Symbol, tuple[int, sympy.Symbol]] = {}
    for symbol, info in graph.symbols.items():
        if info.location is None:
            continue
        value = info.location.read(args)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            raise CannotLower(f"argument {info.location.index} is symbolic: the call is being traced itself")
        if symbol in floats:
            fresh.replaced[symbol] = sympy.Float(floats[symbol])
            fresh.checked.add(symbol)
        else:
            _replace_symbol(fresh, graph, symbol, value, facts.get(symbol), multiples)
    _refuse_unchecked_numbers(fresh)
    for guard in graph.guards:
        expr = fresh.translate(guard)
        if expr in (sympy.true, True):
            continue
        if expr in (sympy.false, False) or not shape_env.evaluate_expr(expr):
            raise CannotLower(f"Dynamo's guard {guard} does not hold for the declared sizes")
    fresh.known_guards = len(shape_env.guards)
    if graph.mutates_inputs and fresh.text_of:
        # AOTAutograd makes a returned view of a changed input again by the strides of its own copy of that input; with
        # symbolic sizes that is right only where both begin at 0 and are contiguous
        fresh.windows = tuple(index for index in graph.viewed_inputs if index in changed)
        for index in fresh.windows:
            if args[index].storage_offset() or not args[index].is_contiguous():
                raise CannotLower(VIEW_OF_CHANGED)
    _fill_inputs(fresh, graph, args, multiples)
    if floats or graph.zeros:
        known = {**fresh.replaced, **floats}  # an expression has no sign of zero
        fresh.zeros = {index: float(args[index].item()) for index in graph.zeros}
        fresh.numbers = {index: float(arg.item()) for index, arg in enumerate(args) if graph.inputs[index].number}
        if not inputs_alone:
            write_known_items(module, graph.inputs, lambda expr: known.get(expr, fresh.translate(expr)), fresh.numbers)
            if 0 in fresh.numbers.values() and (lost := signs_of_zero.keep(module, fresh.inputs)) is not None:
                raise LosesSign(lost)
    if not inputs_alone:
        module.recompile()
    return fresh


def _refuse_unchecked_numbers(fresh: FreshInputs) -> None:
    """Raise `CannotLower` for a symbol that is a number in this compile though no call is checked for it."""
    for symbol, expr in fresh.replaced.items():
        if symbol not in fresh.checked and not expr.free_symbols:
            raise CannotLower(f"{symbol} became the constant {expr} in this compile, and nothing checks it at a call")


def _replace_symbol(
    fresh: FreshInputs,
    graph: CapturedGraph,
    symbol: sympy.Symbol,
    value: Any,
    known: Facts | None,
    multiples: dict[sympy.Symbol, tuple[int, sympy.Symbol]],
) -> None:
    info, shape_env = graph.symbols[symbol], fresh.shape_env
    assert info.location is not None
    if known is not None and known.exact is not None:
        fresh.replaced[symbol] = sympy.Integer(known.exact)
        fresh.checked.add(symbol)
        return
    text = info.location.text()
    dynamic = _compat.DimDynamic.DYNAMIC
    if info.is_float:
        new = shape_env.create_symbol(
            float(value), info.source, dynamic, positive=None, do_not_specialize_zero_one=True
        )
        fresh.replaced[symbol], fresh.text_of[new] = new, f"float({text})"
        return
    if info.unbacked and known is None:
        with shape_env.ignore_fresh_unbacked_symbols():  # an input is bound, not pending
            new = shape_env.create_unbacked_symint(info.source).node.expr
        shape_env.unbacked_inputs.add(new)
        shape_env._constrain_range_for_size(new)
        if info.lower is not None:
            shape_env._update_var_to_range(new, _compat.ValueRanges(info.lower, info.upper))
        fresh.replaced[symbol], fresh.text_of[new] = new, text
        return
    # an unbacked size with a declared fact becomes a backed one: what a compile then asks of it is the variant's
    # condition, and dispatch checks it
    lower = info.lower if info.lower is not None else -_compat.int_oo
    upper = info.upper if info.upper is not None else _compat.int_oo
    factor = 1
    if known is not None:
        lower = lower if known.min is None else max(lower, sympy.Integer(known.min))
        upper = upper if known.max is None else min(upper, sympy.Integer(known.max))
        factor = known.multiple_of
    if lower == upper:  # bounds that Dynamo or the dispatcher checks
        fresh.replaced[symbol] = sympy.Integer(value)
        fresh.checked.add(symbol)
        return
    # up to 2.13 a subgraph binds plain symbols only, there divisibility is a guard that already holds
    structural = factor > 1 and not (info.location.kind == "arg" and graph.inputs[info.location.index].into_subgraph)
    if structural:
        lower, upper = _divide_up(lower, factor), _divide_down(upper, factor)
        if lower == upper:
            fresh.replaced[symbol] = sympy.Integer(value)
            fresh.checked.add(symbol)
            return
        source = _compat.ConstantSource(f"{_compat.source_name(info.source)}//{factor}")
        new = _bounded_symbol(shape_env, value // factor, source, lower, upper, info.positive)
        fresh.replaced[symbol], fresh.text_of[new] = factor * new, f"({text}//{factor})"
        multiples[symbol] = (factor, new)
        return
    new = _bounded_symbol(shape_env, value, info.source, lower, upper, info.positive)
    fresh.replaced[symbol] = new
    if isinstance(new, sympy.Symbol):
        fresh.text_of[new] = text
        if factor > 1:
            shape_env.evaluate_expr(sympy.Eq(_compat.Mod(new, factor), 0))


def _divide_up(bound: Any, factor: int) -> Any:
    return -(-int(bound) // factor) if getattr(bound, "is_Integer", isinstance(bound, int)) else bound


def _divide_down(bound: Any, factor: int) -> Any:
    return int(bound) // factor if getattr(bound, "is_Integer", isinstance(bound, int)) else bound


def _bounded_symbol(shape_env: Any, value: int, source: Any, lower: Any, upper: Any, positive: bool | None) -> Any:
    constraint = _compat.StrictMinMaxConstraint(vr=_compat.ValueRanges(lower, upper), warn_only=False)
    return shape_env.create_symbol(
        value,
        source,
        _compat.DimDynamic.DYNAMIC,
        constraint,
        positive=positive,
        do_not_specialize_zero_one=True,
    )


# ---------------------------------------------------------------- inputs


def _fill_inputs(
    fresh: FreshInputs,
    graph: CapturedGraph,
    args: Sequence[Any],
    multiples: Mapping[sympy.Symbol, tuple[int, sympy.Symbol]],
) -> None:
    """Make `fresh.inputs`.

    With the fake of a tensor torch makes fakes of the tensor that it is a view of and of its gradient, with sizes of
    its own choice, and takes them again whenever it meets these tensors.  So where one of them is an input itself, its
    fake is made first, as planned for it.
    """
    position = {id(args[index]): index for index in graph.tensor_inputs}
    order: dict[int, None] = {}
    for index in range(len(args)):
        _in_order(index, graph, args, position, set(), order)
    made: dict[int, Any] = {}
    changes = graph.mutates_inputs  # then it counts which inputs share memory
    kept: list[Any] = []  # torch knows the fake of a tensor again while that lives
    for index in order:
        entry, arg = graph.inputs[index], args[index]
        if entry.layout is not None and (gradient := _gradient(arg)) is not None and id(gradient) not in position:
            kept.append(_fresh_gradient(fresh, entry, gradient))
        if entry.grad and not arg.requires_grad and not (index in graph.written or (changes and arg.is_inference())):
            arg = _requiring(arg)
        made[index] = _fresh_input(fresh, index, entry, arg, multiples)
    fresh.inputs.extend(made[index] for index in range(len(args)))


def _in_order(
    index: int,
    graph: CapturedGraph,
    args: Sequence[Any],
    position: Mapping[int, int],
    begun: set[int],
    order: dict[int, None],
) -> None:
    """Add an input to `order`, behind those that its base and its gradient are.  No closure: one that calls itself
    would hold the first call's inputs until garbage is collected."""
    if index in order or index in begun:  # two tensors may be each other's gradients
        return
    begun.add(index)
    arg = args[index]
    if graph.inputs[index].layout is not None:
        for beside in (arg._base if arg._is_view() else None, _gradient(arg)):
            if id(beside) in position:
                _in_order(position[id(beside)], graph, args, position, begun, order)
    order[index] = None


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """`tensor.grad`, without torch's warning about tensors that keep none."""
    return tensor.grad if not tensor.is_inference() and (tensor.is_leaf or tensor.retains_grad) else None


def _fresh_gradient(fresh: FreshInputs, entry: Input, gradient: torch.Tensor) -> Any:
    """A fake for the gradient of an input, where the gradient is no input itself.

    No size of it becomes a symbol of its own: no call is checked for that.
    """
    assert entry.layout is not None
    layout = TensorLayout(
        source=_compat.ConstantSource(f"{_compat.source_name(entry.layout.source)}.grad"),
        size=entry.layout.size,
        stride=tuple(map(sympy.Integer, gradient.stride())),
        offset=sympy.Integer(gradient.storage_offset()),
        memo={},
    )
    base = gradient._base if gradient._is_view() else None
    context = _symbolic_context(fresh, Input(f"{entry.name}.grad", layout.source, layout=layout), layout.offset, base)
    return fresh.fake_mode.from_tensor(gradient, symbolic_context=context, source=layout.source, trace=False)


def _fresh_input(
    fresh: FreshInputs, index: int, entry: Input, arg: Any, multiples: Mapping[sympy.Symbol, tuple[int, sympy.Symbol]]
) -> Any:
    if entry.expr is not None:
        return _fresh_number(fresh, index, entry, arg, multiples)
    if entry.layout is not None:
        return _fresh_tensor(fresh, index, entry, arg)
    if entry.wrapper is not None:
        return fresh.fake_mode.from_tensor(arg, static_shapes=True, source=entry.source, trace=False)
    return arg


def _fresh_number(
    fresh: FreshInputs, index: int, entry: Input, arg: Any, multiples: Mapping[sympy.Symbol, tuple[int, sympy.Symbol]]
) -> Any:
    shape_env = fresh.shape_env
    if isinstance(entry.expr, sympy.Symbol) and entry.expr in multiples:
        # Inductor binds plain symbols only: the code takes k, and the graph multiplies
        factor, part = multiples[entry.expr]
        if not fresh.alone:
            _multiply(fresh.module.graph, index, factor)
        fresh.divided[index] = factor
        return shape_env.create_symintnode(part, hint=arg // factor, source=entry.source)
    expr = fresh.translate(entry.expr)
    if not expr.free_symbols:
        if entry.into_subgraph and expr.is_Integer:
            # a higher-order operator lifts the number into its subgraph and wants a symbol: one known to be it
            new = shape_env.create_symbol(
                int(expr),
                entry.source,
                _compat.DimDynamic.DYNAMIC,
                positive=None,
                do_not_specialize_zero_one=True,
            )
            number = shape_env.create_symintnode(new, hint=int(expr), source=entry.source)
            if isinstance(new, sympy.Symbol):
                shape_env.evaluate_expr(sympy.Eq(new, expr))
                fresh.text_of[new] = f"a[{index}]"
                fresh.known_guards = len(shape_env.guards)
            return number
        number = int(expr) if expr.is_Integer else float(expr)
        # a compiler may take a number that is an argument for unknown: the graph says it
        if not fresh.alone:
            replace_with_number(fresh.module.graph.find_nodes(op="placeholder")[index], number)
        return number
    types = _compat.SymT
    if any(_compat.symbol_is_type(symbol, types.UNBACKED_INT) for symbol in expr.free_symbols):
        return shape_env.create_symintnode(expr, hint=None, source=entry.source)
    if any(_compat.symbol_is_type(symbol, (types.FLOAT, types.UNBACKED_FLOAT)) for symbol in expr.free_symbols):
        return shape_env.create_symfloatnode(expr, hint=float(arg), source=entry.source)
    return shape_env.create_symintnode(expr, hint=arg, source=entry.source)


def _multiply(graph: torch.fx.Graph, index: int, factor: int) -> None:
    """Let a graph use `factor` times the number that it is given at `index`."""
    nodes = graph.find_nodes(op="placeholder")
    node = nodes[index]
    with graph.inserting_after(nodes[-1]):
        product = graph.call_function(operator.mul, (node, factor))
    product.meta = {"stack_trace": node.meta.get("stack_trace", "")}
    node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)


def _fresh_tensor(fresh: FreshInputs, index: int, entry: Input, arg: torch.Tensor) -> Any:
    layout = entry.layout
    assert layout is not None
    offset = sympy.Integer(fresh.offsets[index]) if index in fresh.offsets else fresh.translate(layout.offset)
    if offset.is_Integer and arg.storage_offset() != int(offset):
        arg = twin(arg, tuple(arg.size()), tuple(arg.stride()), int(offset))
    elif _would_be_a_number(arg) and not entry.number:
        arg = twin(arg, (), (), int(arg.storage_offset()))
    base = arg._base if arg._is_view() else None
    fake = fresh.fake_mode.from_tensor(
        arg,
        symbolic_context=_symbolic_context(fresh, entry, offset, base, isinstance(arg, _compat.FakeTensor)),
        source=layout.source,
        trace=False,
    )
    # translated once only: a new symbol may have the name of one of Dynamo's
    planned = (*map(fresh.translate, (*layout.size, *layout.stride)), offset)
    for got, expr in zip((*fake.size(), *fake.stride(), fake.storage_offset()), planned, strict=True):
        # Dynamo's guards may have settled a symbol further than was declared
        if _compat.sympy_expr(got) not in (expr, fresh.shape_env.replace(expr)):
            raise CannotLower(f"input {entry.name}: {_compat.sympy_expr(got)} where {expr} was planned")
    if fake._is_view() and fake._base is not None:  # the base's own symbols may show up in guards
        of_base = f"a[{index}]._base"
        named = [(f"{of_base}.size({dim})", value) for dim, value in enumerate(fake._base.size())]
        named += [(f"{of_base}.stride({dim})", value) for dim, value in enumerate(fake._base.stride())]
        named.append((f"{of_base}.storage_offset()", fake._base.storage_offset()))
        for text, value in named:
            expr = _compat.sympy_expr(value)
            if isinstance(expr, sympy.Symbol):
                fresh.text_of.setdefault(expr, text)
    return fake


def _requiring(tensor: torch.Tensor) -> torch.Tensor:
    """The same that requires a gradient, as in the trace.

    Dynamo's guards see to that, and where they were dropped code may come to be compiled in a call that needs no
    gradient, and be run in one that does.
    """
    if tensor.is_inference():
        made = without_memory(
            tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype, tensor.device
        )
    else:
        made = tensor.detach()
    return torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made.requires_grad_()


def twin(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor without memory that is like `tensor` but for its layout, and shares memory with nothing.

    Dynamo does not guard on storage offsets, so a later call may come with another one than was traced.
    """
    made = without_memory(size, stride, offset, tensor.dtype, tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _would_be_a_number(tensor: torch.Tensor) -> bool:
    """Whether torch makes a symbol of its value, as it does of a Python float that Dynamo has wrapped in such a tensor.

    Where nothing computes with that symbol, AOTAutograd gives up, for Dynamo to trace again with the value.
    """
    return tensor.dim() == 0 and tensor.dtype == torch.float64 and tensor.device.type == "cpu"


def without_memory(
    size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of that layout that shares memory with nothing, since it has none."""
    with _compat.FakeTensorMode():
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if offset:
            whole = torch.empty(
                offset + made.untyped_storage().nbytes() // made.element_size(), dtype=made.dtype, device=made.device
            )
            made = torch.empty(0, dtype=made.dtype, device=made.device)
            made.set_(whole.untyped_storage(), offset, size, stride)
        return made


def _symbolic_context(
    fresh: FreshInputs, entry: Input, offset: Any, base: torch.Tensor | None, made_up: bool = False
) -> Any:
    """`made_up`: for a fake tensor.  From torch 2.13 on its sizes come out as they are where they are said to be
    unbacked; their symbols stand in the context anyway.
    """
    layout = entry.layout
    assert layout is not None
    kinds, prop = _compat.DimDynamic, _compat.TensorProperty
    rank = len(layout.size)

    def name(which: Any, dim: int | None = None) -> str:
        return _compat.source_name(_compat.TensorPropertySource(layout.source, which, dim))

    located = set(fresh.replaced)
    memo = {
        key: fresh.translate(expr)
        for key, expr in layout.memo.items()
        if not isinstance(expr, sympy.Basic) or expr.free_symbols <= located
    }
    memo.update({name(prop.SIZE, dim): fresh.translate(expr) for dim, expr in enumerate(layout.size)})
    memo.update({name(prop.STRIDE, dim): fresh.translate(expr) for dim, expr in enumerate(layout.stride)})
    memo[name(prop.STORAGE_OFFSET)] = offset

    def kind(expr: Any) -> Any:
        symbols = fresh.translate(expr).free_symbols
        if not symbols:
            return kinds.STATIC
        unbacked = not made_up and any(_compat.symbol_is_type(symbol, _compat.SymT.UNBACKED_INT) for symbol in symbols)
        return kinds.UNBACKED if unbacked else kinds.DYNAMIC

    base_context = None
    if base is not None:  # Dynamo guards on nothing of a view's base, so every size of it is a new symbol
        base_context = _compat.StatelessSymbolicContext(
            dynamic_sizes=[kinds.DYNAMIC] * base.dim(),
            dynamic_strides=[kinds.INFER_STRIDE] * base.dim(),
            constraint_sizes=[None] * base.dim(),
            constraint_strides=[None] * base.dim(),
        )
    return _compat.StatefulSymbolicContext(
        dynamic_sizes=[kind(expr) for expr in layout.size],
        dynamic_strides=[kinds.DYNAMIC] * rank,
        constraint_sizes=[None] * rank,
        constraint_strides=[None] * rank,
        view_base_context=base_context,
        tensor_source=layout.source,
        shape_env_to_source_to_symbol_cache={id(fresh.shape_env): memo},
    )
