"""Whether rows behind the real ones change what a graph returns: traced once, and judged operator by operator.

For `f(x, w) = (x @ w).mean(0)` over `x` of sizes `[s, 8]`, and `s` to be padded:

    %mm    [s, 4]  kept
    %mean  [4]     not kept: aten::mean.dim works along the padded dimension     (x @ w).mean(0), line 12

In: a captured graph, the arguments of a call, symbols of Dynamo's trace that are to be padded.
Out: a `Proof`: for each symbol what speaks against it (`Doubt`), the guards under which that was traced, and for each
output how it is cut back to the real size (`operators` says what "kept" means).

Guarantees: nothing is compiled and nothing runs but on fake tensors; what is proven holds for every size for which the
guards hold, so callers check them for the real size and for the padded one.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch

from multigraph_backend import _compat
from multigraph_backend.capture.graph import CapturedGraph
from multigraph_backend.lower import fresh_inputs, guards
from multigraph_backend.lower.compile_thread import compile_within, describe
from multigraph_backend.lower.first_compile import CompileState
from multigraph_backend.lower.fresh_inputs import FreshInputs
from multigraph_backend.lower.guards import Guards
from multigraph_backend.lower.lowering import constant_floats
from multigraph_backend.padding import operators
from multigraph_backend.padding.operators import Call, NotKept
from multigraph_backend.process.interruptions import from_outside


class CannotPad(Exception):
    """Calls of this graph cannot be padded, whatever its operators do; the message says why."""


@dataclass(frozen=True)
class Doubt:
    """Why real rows may depend on padding: `operator` and the user's `line`; `known`: that they do, or that no rule
    tells."""

    operator: str
    why: str
    line: str
    known: bool

    def __str__(self) -> str:
        said = f"{self.operator} {self.why}" if self.operator else self.why
        return f"{said}: {self.line}" if self.line else said


@dataclass(frozen=True)
class Output:
    """How one output is cut back: `kind`, and text over the arguments `a` of the real call.

    "as it is": nothing of it depends on a padded size.  "slice": the first `size[dim]` entries along each of `dims`.
    "copy": the same in a tensor of its own with these strides.  "view": of argument `of`, `offset` elements behind its
    first.  "argument": that argument itself.  "number": `offset` is the text of it.  "same": the output of number `of`.
    """

    kind: Literal["as it is", "slice", "copy", "view", "argument", "number", "same"]
    of: int = 0
    dims: tuple[int, ...] = ()
    size: tuple[str, ...] = ()
    stride: tuple[str, ...] = ()
    offset: str = "0"


@dataclass(frozen=True)
class Proof:
    """`doubts` by the symbol to be padded, empty: proven; `outputs` in their order, and `guards` of the trace.
    `rounds`: whether integers are made of floating-point numbers, which not-a-number must not become."""

    doubts: Mapping[sympy.Symbol, tuple[Doubt, ...]]
    outputs: tuple[Output, ...]
    guards: Guards
    rounds: bool = False


def prove(
    graph: CapturedGraph,
    args: Sequence[Any],
    symbols: Sequence[sympy.Symbol],
    timeout: float | None,
    state: CompileState,
) -> Proof:
    """Trace `graph` for arguments like `args` and judge it for each of `symbols`.

    Raises `CannotPad`, and what the trace raises.
    """
    run = functools.partial(_prove, graph, args, tuple(symbols), state)
    return compile_within(timeout, run, state.context())


def _prove(
    graph: CapturedGraph, args: Sequence[Any], symbols: tuple[sympy.Symbol, ...], state: CompileState, process_wide: Any
) -> Proof:
    with state.restored(process_wide, "", autograd_cache=False), _compat.own_float_specializations():
        floats = constant_floats(graph, args)
        fresh = fresh_inputs.build(graph, {}, args, floats)
        context = _compat.TracingContext(fresh.fake_mode)
        with _compat.tracing(context), fresh.fake_mode, _compat.python_dispatcher():
            held = [fresh.fake_mode.from_tensor(tensor, static_shapes=True) for tensor in graph.held]
            traced = _Traced(graph, fresh, held)
            returned = traced.plainly()
            functional = traced.functional()
        relied_on = guards.guards_of(graph, fresh, context, args, floats)
    replace = fresh.shape_env.replace
    new: dict[sympy.Symbol, sympy.Symbol] = {}
    doubts: dict[sympy.Symbol, tuple[Doubt, ...]] = {}
    for symbol in symbols:
        found = fresh.replaced.get(symbol)
        if not isinstance(found, sympy.Symbol) or replace(found) != found:
            known = "unknown" if found is None else str(replace(found))
            doubts[symbol] = (Doubt("", f"the graph is traced for its size being {known}", "", True),)
            continue
        new[symbol] = found
        judge = _Judge(functional, found, replace, len(graph.inputs))
        doubts[symbol] = judge.doubts()
    outputs = _Outputs(graph, fresh, returned, new, doubts).all()
    return Proof(doubts, outputs, relied_on, any(map(_rounds, functional.nodes)))


def _rounds(node: torch.fx.Node) -> bool:
    """Whether floating-point numbers go in and integers come out: an index that is computed, say."""
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else [value]
    given = [entry.meta.get("val") for entry in node.all_input_nodes]
    return any(isinstance(entry, torch.Tensor) and entry.is_floating_point() for entry in given) and any(
        isinstance(entry, torch.Tensor) and not (entry.is_floating_point() or entry.is_complex())
        for entry in results
        if not isinstance(entry, torch.Tensor) or entry.dtype is not torch.bool
    )


def _padded_inputs(graph: CapturedGraph, symbols: Sequence[sympy.Symbol]) -> list[int]:
    return [
        index
        for index, entry in enumerate(graph.inputs)
        if entry.layout is not None and any(size.has(*symbols) for size in entry.layout.size)
    ]


# ---------------------------------------------------------------- tracing


class _WithHeld(torch.fx.Interpreter):
    """Runs a module; `held` stand for the tensors that are attributes of it, by their `id`."""

    def __init__(self, module: torch.fx.GraphModule, held: Mapping[int, Any]) -> None:
        super().__init__(module)
        self.held = held

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            return super().run_node(n)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            if from_outside(error):
                raise
            where = f": {line}" if (line := _line(n)) else ""
            raise CannotPad(f"{_name(n.target)} cannot be traced ({describe(error)}){where}") from error

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.held.get(id(value), value)


@dataclass
class _Traced:
    graph: CapturedGraph
    fresh: FreshInputs
    held: list[Any]

    def _run(self, *arguments: Any) -> tuple[Any, ...]:
        count = len(self.graph.inputs)
        held = {id(real): fake for real, fake in zip(self.graph.held, arguments[count:], strict=True)}
        outputs = _WithHeld(self.fresh.module, held).run(*arguments[:count])
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)

    def plainly(self) -> tuple[Any, ...]:
        """The outputs, as they share memory with inputs and each other."""
        tensors = [entry for entry in (*self.fresh.inputs, *self.held) if isinstance(entry, torch.Tensor)]
        before = [(tensor.shape, tensor.untyped_storage()._cdata) for tensor in tensors]
        outputs = self._run(*self.fresh.inputs, *self.held)
        if before != [(tensor.shape, tensor.untyped_storage()._cdata) for tensor in tensors]:
            raise CannotPad("an input is resized, or set to other memory")
        return outputs

    def functional(self) -> torch.fx.Graph:
        """ATen operators without effects; behind the outputs it returns what became of each tensor among the inputs."""

        def with_inputs(*arguments: Any) -> tuple[Any, ...]:
            return (*self._run(*arguments), *(entry for entry in arguments if isinstance(entry, torch.Tensor)))

        run = _compat.dispatch_functionalize(with_inputs, _compat.FunctionalTensorMode())
        with _compat.preserve_node_meta():
            made: torch.fx.GraphModule = _compat.functional_trace(run)(*self.fresh.inputs, *self.held)
        return made.graph


# ---------------------------------------------------------------- judging


class _Judge:
    """Walks a functional graph and notes, for each value, what speaks against its being kept."""

    def __init__(self, graph: torch.fx.Graph, symbol: sympy.Symbol, replace: Any, inputs: int) -> None:
        self.graph, self.symbol, self.replace, self.inputs = graph, symbol, replace, inputs
        self.found: dict[torch.fx.Node, Doubt | None] = {}
        self.positions: set[torch.fx.Node] = set()
        self.counting: dict[torch.fx.Node, sympy.Expr] = {}
        self.shifted: set[torch.fx.Node] = set()

    def doubts(self) -> tuple[Doubt, ...]:
        """What reaches an output, something that is written, or an effect; known ones first."""
        reached: dict[Doubt, None] = {}
        for node in self.graph.nodes:
            doubt = self._of(node)
            self.found[node] = doubt
            if node.op == "output":
                reached.update(dict.fromkeys(self._all(node)))
            elif doubt is not None and not node.users and node.is_impure():
                reached[doubt] = None
        return tuple(sorted(reached, key=lambda doubt: not doubt.known))

    def _all(self, node: torch.fx.Node) -> list[Doubt]:
        return [doubt for entry in node.all_input_nodes if (doubt := self.found[entry]) is not None]

    def _of(self, node: torch.fx.Node) -> Doubt | None:
        inherited = min(self._all(node), key=lambda doubt: not doubt.known, default=None)
        if node.op == "placeholder":
            return self._of_input(node)
        if node.op != "call_function" or node.target is operator.getitem:
            for told in (self.positions, self.shifted):
                if told.intersection(node.all_input_nodes):
                    told.add(node)
            return inherited
        own = self._of_call(node)
        if own is None or (inherited is not None and inherited.known):
            return inherited
        return own if own.known or inherited is None else inherited

    def _of_input(self, node: torch.fx.Node) -> Doubt | None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for size in Call(_NO_CALL, self.symbol, self.replace).shape(node):
                if size.has(self.symbol) and not operators.grows(size, self.symbol):
                    return Doubt("", f"an input has a dimension of size {size}", "", True)
        return None

    def _of_call(self, node: torch.fx.Node) -> Doubt | None:
        target = node.target
        if not isinstance(target, _compat.OpOverload):
            values = node.meta.get("val")
            if isinstance(values, (*_compat.SymTypes, torch.SymBool, int, float, bool)):
                return None  # arithmetic with sizes: what takes the number looks at it
            if _apart(node, self.symbol, self.replace):
                return None
            return Doubt(_name(target), "is not known", _line(node), False)
        call = Call(node, self.symbol, self.replace, self.positions, self.counting, self.shifted)
        try:
            if operators.check(call):
                return None
            operators.check_sizes(call)
        except NotKept as reason:
            return Doubt(_name(target), str(reason), _line(node), True)
        if self.positions.intersection(node.all_input_nodes):
            why = "is not known, and takes positions, of which padded rows have others"
            return Doubt(_name(target), why, _line(node), True)
        return Doubt(_name(target), "is not known", _line(node), False)


_TORCH = os.path.dirname(inspect.getfile(torch)) + os.sep


def _apart(node: torch.fx.Node, symbol: sympy.Symbol, replace: Any) -> bool:
    """Whether nothing that a higher-order operator is given depends on the size."""
    asked = Call(_NO_CALL, symbol, replace)
    asked.node = node
    return asked.apart_from_all()


def _no_call() -> torch.fx.Node:
    graph = torch.fx.Graph()
    return graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))


_NO_CALL = _no_call()


def _name(target: Any) -> str:
    if isinstance(target, _compat.OpOverload):
        return str(target._schema.name)
    return str(getattr(target, "__name__", target))


def _line(node: torch.fx.Node) -> str:
    """The user's line of an operator: `x.mean(0)  (model.py:12)`."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [at for at, line in enumerate(lines) if line.startswith('File "')]
    places = [at for at in places if not lines[at].startswith(f'File "{_TORCH}')] or places
    if not places:
        return ""
    _, file, number = (*lines[places[-1]].split('"', 2), "")[:3]
    place = f"{file.rsplit('/', 1)[-1]}:{number.removeprefix(', line ').split(',')[0]}"
    code = next((line for line in lines[places[-1] + 1 :] if line.strip("^~ ")), "")
    code = code if len(code) <= 100 else f"{code[:97]}..."
    return f"`{code}` ({place})" if code else f"({place})"


# ---------------------------------------------------------------- outputs


class _Outputs:
    """How outputs are cut back, from the fake ones of a plain run."""

    def __init__(
        self,
        graph: CapturedGraph,
        fresh: FreshInputs,
        returned: Sequence[Any],
        symbols: Mapping[sympy.Symbol, sympy.Symbol],
        doubts: Mapping[sympy.Symbol, Sequence[Doubt]],
    ) -> None:
        self.graph, self.fresh, self.returned = graph, fresh, returned
        self.symbols = {new for old, new in symbols.items() if not any(doubt.known for doubt in doubts[old])}
        self.padded = _padded_inputs(graph, [old for old, new in symbols.items() if new in self.symbols])
        self.printer = printer(fresh.text_of)

    def all(self) -> tuple[Output, ...]:
        found: list[Output] = []
        for index, value in enumerate(self.returned):
            before = next((at for at in range(index) if self.returned[at] is value), None)
            same = before is not None and isinstance(value, torch.Tensor)
            found.append(Output("same", before or 0) if same else self._of(index, value))
        return tuple(found)

    def _of(self, index: int, value: Any) -> Output:
        if isinstance(value, (*_compat.SymTypes, torch.SymBool)):
            expr = self._expr(value)
            return Output("number", offset=self._text(expr)) if self._depends(expr) else Output("as it is")
        if not isinstance(value, torch.Tensor):
            return Output("as it is")
        memory = _memory(value)
        for at in self.padded:
            given = self.fresh.inputs[at]
            if value is given:
                return Output("argument", at)
            if _memory(given) == memory:
                return self._view(at, value, given)
        sizes, strides = [[self._expr(entry) for entry in entries] for entries in (value.shape, value.stride())]
        dims = tuple(dim for dim, size in enumerate(sizes) if self._depends(size))
        if not dims:
            return Output("as it is")
        cut = {dim: self._text(sizes[dim]) for dim in dims}
        # of a view, sizes and strides of a part are those of the whole but along what is cut
        if not any(map(self._depends, strides)):
            return Output("slice", dims=dims, size=tuple(cut.values()))
        others = (other for at, other in enumerate(self.returned) if at != index and isinstance(other, torch.Tensor))
        everything = (*others, *(entry for entry in self.fresh.inputs if isinstance(entry, torch.Tensor)))
        if any(_memory(other) == memory for other in everything):
            raise CannotPad(f"output {index} shares memory with another, and its strides depend on the padded size")
        return Output(
            "copy",
            dims=dims,
            size=tuple(map(self._text, sizes)),
            stride=tuple(map(self._text, strides)),
        )

    def _view(self, at: int, value: Any, given: Any) -> Output:
        if value.dtype != given.dtype or value.is_conj() != given.is_conj() or value.is_neg() != given.is_neg():
            raise CannotPad(f"an output is a view of {self.graph.inputs[at].name} as another type")
        texts = [tuple(self._text(self._expr(entry)) for entry in entries) for entries in (value.shape, value.stride())]
        offset = self._text(self._expr(value.storage_offset()) - self._expr(given.storage_offset()))
        return Output("view", at, size=texts[0], stride=texts[1], offset=offset)

    def _expr(self, number: Any) -> Any:
        return self.fresh.shape_env.replace(_compat.sympy_expr(number)) if not isinstance(number, bool) else number

    def _depends(self, expr: Any) -> bool:
        return isinstance(expr, sympy.Basic) and not self.symbols.isdisjoint(expr.free_symbols)

    def _text(self, expr: Any) -> str:
        lacking = expr.free_symbols - set(self.fresh.text_of) if isinstance(expr, sympy.Basic) else ()
        if lacking:
            raise CannotPad(f"the size {expr} of an output is known only when the graph has run")
        return str(self.printer.doprint(expr))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def printer(text_of: Mapping[sympy.Symbol, str]) -> Any:
    """Prints expressions as Python text; symbols by `text_of`."""

    class Printer(_compat.PythonPrinter):  # type: ignore[misc]
        def _print_Symbol(self, expr: sympy.Symbol) -> str:
            return f"({text_of[expr]})"

    return Printer()
