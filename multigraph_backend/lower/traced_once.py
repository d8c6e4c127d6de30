"""Repeated blocks of Dynamo's graph, which AOTAutograd traces and parts into forward and backward once.

    y = linear(rms_norm(x, n1), w1); ...          y = block([x, n1, w1, ...], [], [s0], "9f3c", "whole", 0, 0)[0]
    z = linear(rms_norm(y, n2), w2); ...    ->    z = block([y, n2, w2, ...], [], [s0], "9f3c", "whole", 0, 0)[0]

AOTAutograd, its joint graph's passes and the partitioner then see one operator for each call, and one for its gradient.
In what Inductor is given, calls of a body's forward or backward graph take the place of the operators.

In:  a graph of Dynamo's, before AOTAutograd, and fake inputs (`lift`); graphs as Inductor is given them (`put_in`).
Out: the same graphs, rewritten in place; `Refused` where nothing was touched.

How a body comes to its graphs: the first block that comes again is given to Inductor's `compile_fx` by itself, for fake
arguments like those that it has in the graph, up to where code would be generated.  So it passes the same
decompositions, passes and partitioner as any graph does.

What makes a call of a body right, each checked and none assumed:
- Blocks are the same operators with the same constants over the same operands (`repetition`).  What cannot be read off
  Dynamo's graph, types, sizes and strides of what a call is given and whether it is differentiated, is asked of each
  call when it is traced; a body is traced for each such kind of arguments.
- Symbolic sizes are compared as expressions over the symbols of the trace.  A body is traced in the ShapeEnv of the
  graph around, so what its trace asks of sizes is a guard of the graph.  It takes the symbols that it depends on, each
  an input of the graph; nothing is known of unbacked ones, and no body depends on those.
- AOTAutograd says of each body that it changes and hands out nothing that it was given.  A view at a block's end is
  left to the graph around, which makes it of what the call hands out.
- Graphs of a body write to nothing and are on one device; a forward graph may draw random numbers, each call its own,
  and what it drew is saved, for the partitioner never does a call again.  What they hand out they have made,
  each its own memory: a saved tensor that is an argument, or a view of one, is taken from the arguments again.  So
  memory that is handed out is never memory that was given.
- A checkpointed region is a part of a block as a whole, and draws nothing: its backward graph does it again.
- Where a result gets no gradient, the graph is compiled otherwise, for eager tells no gradient from zeros; unless the
  body does nothing with it but add it to other gradients, as of a residual stream: then it is given -0.0.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower import equal_steps, inlined, modes_of_trace, repetition
from multigraph_backend.lower.block_operator import (
    BLOCK,
    Bodies,
    Kind,
    Part,
    PutIn,
    Refused,
    empty,
    expression,
    key_of,
    layout_of,
    number_node,
)
from multigraph_backend.lower.body_graphs import call_body, kind_of, view_again
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.lower.steps_of_graph import (
    changes_state,
    checkpointed,
    convolves,
    draws_in_a_trace,
    is_plain,
    is_tensor_of_trace,
    is_view_of_trace,
    steps_of_trace,
    why_traced_one_by_one,
)
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.saved_tensors.graphs import FIRST_STEP


@dataclass
class Attempt:
    """One compile: `why_not` to lift blocks out of its graph, if so; `lifted`: whether some were.  `passed`: how many
    of the ways to cut the graph are passed over; `more`: whether there are others behind the one that was taken."""

    why_not: str | None = None
    passed: int = 0
    lifted: bool = False
    more: bool = False


_attempt: ContextVar[Attempt | None] = ContextVar("multigraph_traced_once", default=None)


@contextlib.contextmanager
def attempt(why_not: str | None = None, passed: int = 0) -> Iterator[Attempt]:
    """Says what became of the compile inside; with `why_not`, `lift` refuses there."""
    token = _attempt.set(here := Attempt(why_not, passed))
    try:
        yield here
    finally:
        _attempt.reset(token)


# ---------------------------------------------------------------- Dynamo's graph


@dataclass(frozen=True, eq=False)
class _Block:
    """A body of Dynamo's graph, and its calls: of each its steps, and what they take from elsewhere.

    `module` takes `tensors` tensors, and numbers behind them.  `results`: steps whose values it hands out; `outside`:
    steps that are done once more behind each call, views of results or of what the call was given.  `draws`: each call
    draws random numbers.  `checkpointed`: whether steps are regions that the backward computes again.
    """

    name: str
    module: GraphModule
    tensors: int
    results: tuple[int, ...]
    outside: tuple[int, ...]
    calls: tuple[tuple[list[Node], list[Node]], ...]
    draws: bool
    checkpointed: bool


def lift(
    module: GraphModule,
    inputs: Sequence[Any],
    settings: Callable[[Any], Mapping[str, object]],
    traces: bool = True,
    may_draw: bool = True,
    inline: bool = False,
) -> Bodies | None:
    """Put calls in place of blocks that come again, and trace one of each; None where there are none.

    `settings`: what `compile_fx` is given beside a graph, for a function that compiles one graph.  `traces`: False
    where the code is to come from caches alone, and the rewritten graph is what finds it.  `may_draw`: whether a body
    may draw random numbers, because its calls are never done again in the backward.  `inline`: whether steps take the
    place of calls in what Inductor is given.
    Raises `Refused`, and the graph is as it was, but for tables that were made several times (`equal_steps`).
    """
    here = _attempt.get() or Attempt()
    if here.why_not is not None:
        raise Refused(here.why_not)
    inputs_and_held = _given(module, inputs) if torch.is_grad_enabled() else ()
    differentiated = [node for node, value in inputs_and_held if getattr(value, "requires_grad", False)]
    steps, nodes = steps_of_trace(module.graph, may_draw, differentiated)
    if (unknown := next((node for node in nodes if changes_state(node)), None)) is not None:
        name = getattr(unknown.target, "__name__", unknown.target)
        raise Refused(f"the graph calls {name}, which may change what a trace depends on")
    if equal_steps.merge_tables(module):
        steps, nodes = steps_of_trace(module.graph, may_draw, differentiated)
    named = {node.name: node for node in module.graph.nodes}
    modes = modes_of_trace.at_each_node(module.graph)
    ways = _worth_trying(steps)[here.passed :]
    if not ways:
        if (why := why_traced_one_by_one(module.graph, may_draw)) is not None:
            raise Refused(why)
        return None
    symbols = _symbols(module.graph, inputs)
    while True:
        here.more = len(ways) > 1
        try:
            blocks = [_block(body, nodes, named, modes) for body in ways.pop(0).bodies]
            bodies = Bodies({block.name: {} for block in blocks}, inline)
            bodies.checkpointed = frozenset(block.name for block in blocks if block.checkpointed)
            if traces:
                _Tracing(module, inputs, symbols, settings, bodies).trace(blocks)
            break
        except Refused:
            if not ways:
                raise
    now: dict[Node, Node] = {}
    drawing = itertools.count(1)
    for block in blocks:
        for mine, arguments in block.calls:
            given = [now.get(argument, argument) for argument in arguments]
            draw = next(drawing) if block.draws else 0
            _put_call(module.graph, block, mine, given, list(symbols.values()), draw, now)
    module.graph.lint()
    module.recompile()
    here.lifted = True
    return bodies


def _given(module: GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[Node, Any]]:
    """What a graph is given, and what it holds, with their values."""
    yield from zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    for node in module.graph.find_nodes(op="get_attr"):
        yield node, operator.attrgetter(str(node.target))(module)


def _worth_trying(steps: Sequence[repetition.Step]) -> list[repetition.Repetition]:
    """Ways to cut a graph, of which the first is taken that can be traced: where nothing is lost, between entries of
    lists of modules, for a cut elsewhere may go through a view, where each spares half of what can be; and where most
    is spared."""
    most = repetition.find(steps)
    found = [repetition.find(steps, lossless=True), repetition.between_entries(steps)]
    found = [one for one in found if one.bodies and 2 * one.compiled < one.steps + most.compiled]
    return [*found, most] if most.bodies else found


def _symbols(graph: Graph, inputs: Sequence[Any]) -> dict[sympy.Symbol, Node]:
    """The inputs that are symbols, in order."""
    found: dict[sympy.Symbol, Node] = {}
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        expr = _compat.sympy_expr(value) if isinstance(value, torch.SymInt) else None
        if isinstance(expr, sympy.Symbol):
            found.setdefault(expr, node)
    if found and (lacking := _compat.missing("size assertions")):
        raise Refused(f"sizes are symbolic, and this torch differs: {lacking[0]}")
    return found


def _block(
    body: repetition.Body, nodes: Sequence[Node], named: Mapping[str, Node], modes: Mapping[Node, Hashable]
) -> _Block:
    calls = []
    used: set[int] = set()
    for call in body.calls:
        mine = list(nodes[call.start : call.start + body.length])
        own = set(mine)
        used.update(place for place, node in enumerate(mine) if any(user not in own for user in node.users))
        arguments = [nodes[entry] if isinstance(entry, int) else named[entry] for entry in call.arguments]
        calls.append((mine, arguments))
    results, outside = _handed_out(calls[0][0], used)
    for mine, _ in calls:
        if (other := next((mine[place] for place in results if not is_tensor_of_trace(mine[place])), None)) is not None:
            raise Refused(f"{other.name} is no tensor, and blocks that come again are cut there")
    tensors = [is_tensor_of_trace(argument) for argument in calls[0][1]]
    for _, arguments in calls:
        if [is_tensor_of_trace(argument) for argument in arguments] != tensors:
            raise Refused("blocks that come again are given a number where another is given a tensor")
    order = sorted(range(len(tensors)), key=lambda place: not tensors[place])
    calls = [(mine, [arguments[place] for place in order]) for mine, arguments in calls]
    mine, arguments = calls[0]
    graph, root = Graph(), torch.nn.Module()
    inside: dict[Node, Node] = {}
    for place, argument in enumerate(arguments):
        inside[argument] = graph.placeholder(f"argument_{place}")
        if is_tensor_of_trace(argument):
            inside[argument].meta["example_value"] = None
    regions = []
    for place, node in enumerate(mine):
        if (region := checkpointed(node)) is not None:
            root.add_module(f"region_{place}", region)
            inside[node.args[0]] = graph.get_attr(f"region_{place}")  # type: ignore[index]
            regions.append(region.code)
        inside[node] = graph.node_copy(node, lambda operand: inside[operand])
        inside[node].name = f"step_{place}"
    graph.output(tuple(inside[mine[place]] for place in results))
    module = GraphModule(root, graph, "repeated")
    name = hashlib.sha256(f"{module.code}{regions}{modes[mine[0]]}".encode()).hexdigest()[:16]
    draws = any(map(draws_in_a_trace, mine))
    return _Block(name, module, sum(tensors), results, outside, tuple(calls), draws, bool(regions))


def _handed_out(mine: Sequence[Node], used: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a block whose steps at `used` are used behind it: the steps that it hands out, and those to do again outside.

    A view is not handed out, but what it is a view of, if that was made inside.
    """
    places = {node: place for place, node in enumerate(mine)}
    results: set[int] = set()
    outside: set[int] = set()
    pending = sorted(used)
    while pending:
        place = pending.pop()
        inside = [places[operand] for operand in mine[place].all_input_nodes if operand in places]
        if is_view_of_trace(mine[place]) and all(
            is_tensor_of_trace(mine[operand]) or is_view_of_trace(mine[operand]) for operand in inside
        ):
            outside.add(place)
            pending += [operand for operand in inside if operand not in outside]
        else:
            results.add(place)
    return tuple(sorted(results)), tuple(sorted(outside))


def _put_call(
    graph: Graph,
    block: _Block,
    mine: list[Node],
    given: list[Node],
    symbols: list[Node],
    draw: int,
    now: dict[Node, Node],
) -> None:
    with graph.inserting_after(mine[-1]):
        tensors, numbers = given[: block.tensors], given[block.tensors :]
        made = graph.call_function(BLOCK, (tensors, numbers, symbols, block.name, "whole", 0, draw))
    made.meta.update({key: value for key, value in mine[-1].meta.items() if key != "example_value"})
    if (stack := mine[0].meta.get("nn_module_stack")) is not None:  # behind the last layer there may be no other
        made.meta["nn_module_stack"] = stack
    at, inside = made, set(mine)
    for index, place in enumerate(block.results):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (made, index))
        at.meta.update(mine[place].meta)
        now[mine[place]] = at
    for place in block.outside:
        with graph.inserting_after(at):
            at = graph.node_copy(mine[place], lambda operand: now.get(operand, operand))
        now[mine[place]] = at
    for place in (*block.results, *block.outside):
        mine[place].replace_all_uses_with(now[mine[place]], delete_user_cb=lambda user: user not in inside)
    for node in reversed(mine):
        held = [entry for entry in node.all_input_nodes if entry.op == "get_attr" and checkpointed(node) is not None]
        graph.erase_node(node)
        for attribute in held:
            if not attribute.users:
                graph.erase_node(attribute)


# ---------------------------------------------------------------- a body's graphs

_OTHER_KINDS = "blocks that come again are given tensors of other kinds at each call"


def _calls_of(blocks: Sequence[_Block]) -> Mapping[str, int]:
    return collections.Counter(block.name for block in blocks for _ in block.calls)  # two may look the same


class _Tracing:
    """Goes through Dynamo's graph with fake values, as far as calls need them, and traces a block at its first call."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        symbols: Mapping[sympy.Symbol, Node],
        settings: Callable[[Any], Mapping[str, object]],
        bodies: Bodies,
    ) -> None:
        self._module, self._inputs, self._settings, self._bodies = module, inputs, settings, bodies
        context = _compat.TracingContext.try_get()
        self._fake_mode: Any = getattr(context, "fake_mode", None)
        if self._fake_mode is None:
            raise Refused("no trace is going on")
        self._env = bodies.shape_env = self._fake_mode.shape_env
        self._placeholders = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        self._symbols = [self._placeholders[node] for node in symbols.values()]

    def trace(self, blocks: Sequence[_Block]) -> None:
        self._refuse_growing(blocks)
        while True:  # until no trace finds sizes to be equal, or numbers: what was traced before is of others then
            known = {} if self._env is None else dict(self._env.replacements)
            self._trace(blocks)
            if self._env is None or known == self._env.replacements:
                break
            for kinds in self._bodies.kinds.values():
                kinds.clear()
        if any(len(self._bodies.kinds[name]) == count for name, count in _calls_of(blocks).items()):
            raise Refused(_OTHER_KINDS)

    def _refuse_growing(self, blocks: Sequence[_Block]) -> None:
        """Where parameters alone say that each call is given others, as of layers that grow, nothing is traced."""
        kinds: dict[str, set[tuple[Any, ...]]] = {}
        for block in blocks:
            for _, given in block.calls:
                told = {node: self._placeholders[node] for node in given if node in self._placeholders}
                plain = [value for value in told.values() if isinstance(value, torch.Tensor) and is_plain(value)]
                kinds.setdefault(block.name, set()).add(tuple(map(layout_of, plain)))
        if any(len(kinds[name]) == count for name, count in _calls_of(blocks).items()):
            raise Refused(_OTHER_KINDS)

    def _trace(self, blocks: Sequence[_Block]) -> None:
        calls = {mine[-1]: (block, mine, given) for block in blocks for mine, given in block.calls}
        inside = {node for _, mine, _ in calls.values() for node in mine}
        needed = {node for _, _, given in calls.values() for node in given}
        for node in reversed(self._module.graph.nodes):
            if node in needed and node not in inside:
                needed.update(node.all_input_nodes)
        values: dict[Node, Any] = {}
        quiet = self._env.ignore_fresh_unbacked_symbols() if self._env is not None else contextlib.nullcontext()
        with self._fake_mode, quiet, modes_of_trace.Walk() as walk:
            for node in self._module.graph.nodes:
                if modes_of_trace.sets_mode(node):
                    values[node] = walk.set(node, values)
                elif node in calls:
                    block, mine, given = calls[node]
                    taken = [values[argument] for argument in given]
                    made = self._call(block, taken[: block.tensors], taken[block.tensors :])
                    values.update(zip((mine[place] for place in block.results), made, strict=True))
                    for place in block.outside:
                        values[mine[place]] = self._value(mine[place], values)
                elif node in needed and node not in inside:
                    values[node] = self._value(node, values)

    def _value(self, node: Node, values: Mapping[Node, Any]) -> Any:
        if node.op in ("placeholder", "get_attr"):
            held = node.op == "get_attr"
            value = operator.attrgetter(str(node.target))(self._module) if held else self._placeholders[node]
            if not isinstance(value, torch.Tensor) or not is_plain(value):
                return value
            return self._made((*layout_of(value)[:4], 0), value.requires_grad)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        try:
            return (
                getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
            )
        except Exception as error:
            raise Refused(f"{node.name} cannot be traced by itself ({type(error).__name__})") from error

    def _made(self, layout: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
        return empty(layout, self._env).requires_grad_(requires_grad)

    def _call(self, block: _Block, given: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
        if (found := self._bodies.known(block.name, given, numbers)) is not None:
            kind = found[1]
        else:
            with contextlib.ExitStack() as outside:
                outside.enter_context(_compat.disable_current_modes())
                kind = self._traced(block, given, numbers)
            self._bodies.kinds[block.name][key_of(given, numbers)] = kind
        made = [empty(layout, self._env) for layout in kind.forward.results[: kind.results]]
        for value, differentiable in zip(made, kind.differentiable, strict=False):
            value.requires_grad_(differentiable)
        return made

    def _traced(self, block: _Block, given: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Kind:
        layouts = tuple(map(layout_of, given))
        with self._fake_mode:
            arguments: list[Any] = [
                self._made(layout, value.requires_grad) for layout, value in zip(layouts, given, strict=True)
            ]
        graphs: dict[str, GraphModule] = {}
        context = _compat.TracingContext(self._fake_mode)
        with (
            _compat.tracing(context),
            _compat.functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        ):
            beside: Any = self._settings(functools.partial(_keep, graphs))
            module = self._over_symbols(block, numbers)
            try:
                _compat.compile_fx(module, [*arguments, *self._symbols], ignore_shape_env=True, **beside)
            except Exception as error:  # a number that is read out of an argument, say
                if from_outside(error):
                    raise
                raise Refused(f"a block cannot be traced by itself ({type(error).__name__})") from error
        if context.guards_context.aotautograd_guards:
            raise Refused("a block that comes again is right only where its arguments share no memory")
        return kind_of(graphs, layouts, len(block.results), context.fw_metadata, block.draws)

    def _over_symbols(self, block: _Block, numbers: Sequence[Any]) -> GraphModule:
        """The block's module, which takes all symbols in place of numbers."""
        graph = Graph()
        inside: dict[Node, Any] = {}
        placeholders = block.module.graph.find_nodes(op="placeholder")
        for node in placeholders[: block.tensors]:
            inside[node] = graph.node_copy(node)
        symbols: dict[sympy.Symbol, Node] = {}
        for place, symbol in enumerate(self._symbols):
            node, expr = graph.placeholder(f"symbol_{place}"), expression(symbol)
            if isinstance(expr, sympy.Symbol):
                symbols.setdefault(expr, node)
        for node, number in zip(placeholders[block.tensors :], numbers, strict=True):
            inside[node] = number_node(graph, number, symbols)
        for node in block.module.graph.nodes:
            if node.op == "output":
                graph.output(tuple(inside[entry] for entry in node.args[0]))
            elif node.op != "placeholder":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), inside.__getitem__)
                inside[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
                inside[node].meta = dict(node.meta)
        return GraphModule(block.module, graph, "repeated")


def _keep(graphs: dict[str, GraphModule], gm: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
    """In place of Inductor's compile of one graph."""
    label = "backward" if settings.get("is_backward") else "inference" if settings.get("is_inference") else "forward"
    graphs[label] = gm

    def run(args: list[Any]) -> Any:
        raise RuntimeError("this graph was traced, and never compiled")

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# ---------------------------------------------------------------- graphs that Inductor is given


def put_in(
    gm: GraphModule, bodies: Bodies | None, cut_at: Callable[[Node], str | None] | None = None, label: str = ""
) -> PutIn:
    """Calls of graphs of bodies in place of the operators of `gm`, the "forward" or "backward" graph, or another; or
    what these graphs do, where bodies are inlined.

    `cut_at`: why the graph is to be cut at a step, which no body can be; None where it is not.
    """
    before = (bodies.put.get(label) if bodies is not None else None) or PutIn()
    if not (operators := gm.graph.find_nodes(op="call_function", target=BLOCK)):
        return before
    if bodies is None:
        raise CannotLower("a graph calls repeated blocks that are not there")
    if bodies.wrong is not None:
        raise CannotLower(bodies.wrong)
    names: dict[tuple[Any, ...], str] = {}
    calls: collections.Counter[Part] = collections.Counter()
    convolving = convolves(gm.graph)
    for node in operators:
        body, graph, kind, part, given, symbols = _checked(bodies, node)
        calls[part] += 1
        if bodies.inlined:
            _inline(gm.graph, node, part, given, symbols)
            continue
        if (body, graph, kind) not in names:
            if cut_at is not None and (why := next(filter(None, map(cut_at, part.made.graph.nodes)), None)) is not None:
                raise CannotLower(f"a repeated block is cut: {why}")
            name = next(name for number in itertools.count() if not hasattr(gm, name := f"repeated_{number}"))
            gm.add_submodule(name, part.made)
            names[body, graph, kind] = name
        _call_part(gm.graph, node, names[body, graph, kind], part, [*given, *symbols], _by_symbol(symbols), convolving)
    gm.graph.lint()
    gm.recompile()
    counted = tuple((part.steps, count) for part, count in calls.items())
    if bodies.inlined:
        return PutIn(inlined=(*before.inlined, *counted))
    return PutIn(tuple(names.values()), counted)


def inline_before_parting(gm: GraphModule, bodies: Bodies) -> None:
    """What bodies do in place of their operators in a joint graph, where they may be parted in another way."""
    if bodies.wrong is not None:
        raise CannotLower(bodies.wrong)
    counted: dict[str, collections.Counter[Part]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=BLOCK):
        body, graph, _, part, given, symbols = _checked(bodies, node)
        kinds = bodies.kinds[body].values()
        if body in bodies.checkpointed or not all(inlined.may_be_parted(kind.forward) for kind in kinds):
            continue
        counted.setdefault(graph, collections.Counter())[part] += 1
        _inline(gm.graph, node, part, given, symbols)
    inlined.draw_seeds_at_once(gm.graph)
    gm.graph.lint()
    gm.recompile()
    for graph, calls in counted.items():
        bodies.put[graph] = PutIn(inlined=tuple((part.steps, count) for part, count in calls.items()))


def _checked(bodies: Bodies, node: Node) -> tuple[str, str, int, Part, list[Node], list[Any]]:
    """Of an operator's node the body, which of its graphs, the kind, and the part; the tensors and symbols it takes."""
    args: Any = node.args
    given, numbers, symbols, body, graph, kind, _ = args
    values = [entry.meta["val"] for entry in given]
    if graph == "whole":
        told = [entry.meta["val"] if isinstance(entry, Node) else entry for entry in numbers]
        kind, graph = bodies.find(body, values, told)[0], "inference"
        symbols = [symbols[index] for index in bodies.part(body, graph, kind).symbols]
    part = bodies.part(body, graph, kind)
    if not bodies.takes(part, values) or len(symbols) != len(part.symbols):
        raise CannotLower("a call of a repeated block is not what its block was traced for")
    return body, graph, kind, part, list(given), list(symbols)


def _inline(graph: Graph, node: Node, part: Part, given: list[Node], symbols: list[Any]) -> None:
    made = inlined.inline(graph, node, part, [*given, *symbols])
    _take_results(graph, node, part, made.__getitem__, _by_symbol(symbols), inlined.give_value)


def _by_symbol(nodes: Sequence[Any]) -> dict[sympy.Symbol, Node]:
    known: dict[sympy.Symbol, Node] = {}
    for node in nodes:
        expr = _compat.sympy_expr(node.meta["val"]) if isinstance(node, Node) else None
        if isinstance(expr, sympy.Symbol):
            known.setdefault(expr, node)
    return known


def _call_part(
    graph: Graph,
    node: Node,
    name: str,
    part: Part,
    given: list[Any],
    symbols: Mapping[sympy.Symbol, Node],
    convolving: bool,
) -> None:
    with graph.inserting_before(node):
        attribute = graph.get_attr(name)
        call = call_body(graph, part.made, attribute, name, given, convolving)

    def result(place: int) -> Node:
        value = graph.call_function(operator.getitem, (call, place))
        value.meta["val"] = call.meta["val"][place]
        if (stack := node.meta.get("nn_module_stack")) is not None:  # by which rules tell what is saved
            value.meta.update({"nn_module_stack": stack, FIRST_STEP: True})
        return value

    _take_results(graph, node, part, result, symbols)


def _take_results(
    graph: Graph,
    node: Node,
    part: Part,
    result: Callable[[int], Node],
    symbols: Mapping[sympy.Symbol, Node],
    of_view: Callable[[Node], None] = lambda view: None,
) -> None:
    """What takes the results of an operator takes those that `result` makes, by number, and views of them."""
    with graph.inserting_before(node):
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise CannotLower("results of a repeated block are taken as a list")
            place: Any = user.args[1]
            value = result(place)
            for view in part.views[place]:
                value = view_again(graph, view, value, symbols)
                of_view(value)
            user.replace_all_uses_with(value)
            graph.erase_node(user)
            value.name = user.name  # by which a backward graph takes what is saved
    graph.erase_node(node)
