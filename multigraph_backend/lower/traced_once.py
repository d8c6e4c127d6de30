"""Repeated blocks of Dynamo's graph, which AOTAutograd traces and parts into forward and backward once.

    y = linear(rms_norm(x, n1), w1); ...          y = block([x, n1, w1, ...], "9f3c", "whole", 0)[0]
    z = linear(rms_norm(y, n2), w2); ...    ->    z = block([y, n2, w2, ...], "9f3c", "whole", 0)[0]

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
- AOTAutograd says of each body that it changes and hands out nothing that it was given.
- Graphs of a body have fixed sizes, draw no random numbers, write to nothing, are on one device.  What they hand out
  they have made, each its own memory: a saved tensor that is an argument, or a view of one, is taken from the
  arguments again.  So memory that is handed out is never memory that was given.
- Where a result gets no gradient, the graph is compiled otherwise: eager tells no gradient from zeros.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.lower import repetition
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.lower.steps_of_graph import (
    is_plain,
    is_step,
    may_be_done_in_place,
    steps_of_trace,
    why_it_stays,
)
from multigraph_backend.saved_tensors.graphs import viewed

_library = torch.library.Library("multigraph", "FRAGMENT")
_library.define("block(Tensor[] given, str body, str graph, int kind) -> Tensor[]")


class Refused(Exception):
    """Repeated blocks are traced one by one; the message says why."""


@dataclass
class Attempt:
    """One compile: `why_not` to lift blocks out of its graph, if so; `lifted`: whether some were."""

    why_not: str | None = None
    lifted: bool = False


_attempt: ContextVar[Attempt | None] = ContextVar("multigraph_traced_once", default=None)


@contextlib.contextmanager
def attempt(why_not: str | None = None) -> Iterator[Attempt]:
    """Says what became of the compile inside; with `why_not`, `lift` refuses there."""
    token = _attempt.set(here := Attempt(why_not))
    try:
        yield here
    finally:
        _attempt.reset(token)


# ---------------------------------------------------------------- what is known of a body

#: type, device, sizes, strides and offset of a tensor
_Layout = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Part:
    """One graph of a body.  `made`: the graph, which hands out memory that it has made; `views`: for each result, what
    of the block's own graph makes it out of that."""

    made: GraphModule
    given: tuple[_Layout, ...]
    results: tuple[_Layout, ...]
    views: tuple[tuple[Node, ...], ...]

    @property
    def steps(self) -> int:
        return sum(is_step(node) for node in self.made.graph.nodes)


@dataclass(frozen=True, eq=False)
class _Kind:
    """A body for one kind of arguments.

    results: how many the block has; its forward graph makes what is saved for backward behind them
    differentiable: which of the results have gradients
    saved: what the backward graph takes before gradients, arguments or results of the forward graph by number
    gradients: for each argument the number of the backward's result, or -1 - the number of the gradient it is given
    """

    forward: _Part
    results: int
    differentiable: tuple[bool, ...] = ()
    backward: _Part | None = None
    saved: tuple[tuple[str, int], ...] = ()
    gradients: tuple[int | None, ...] = ()


@dataclass
class Bodies:
    """The bodies of one graph by their names: of each its kinds, in order, by what a call is given.

    `wrong`: why what AOTAutograd has traced with them is of no use.
    """

    kinds: dict[str, dict[tuple[Any, ...], _Kind]] = field(default_factory=dict)
    wrong: str | None = None

    def find(self, name: str, given: Sequence[torch.Tensor]) -> tuple[int, _Kind]:
        kinds = self.kinds.get(name, {})
        key = _key(given)
        if key not in kinds:
            raise CannotLower("a call of a repeated block is not what its block was traced for")
        return list(kinds).index(key), kinds[key]

    def part(self, name: str, graph: str, kind: int) -> _Part:
        found = list(self.kinds[name].values())[kind]
        part = found.backward if graph == "backward" else found.forward
        assert part is not None
        return part


_bodies: ContextVar[Bodies | None] = ContextVar("multigraph_bodies", default=None)


@contextlib.contextmanager
def known(bodies: Bodies) -> Iterator[None]:
    """AOTAutograd may trace calls of `bodies` inside."""
    token = _bodies.set(bodies)
    try:
        yield
    finally:
        _bodies.reset(token)


def _key(given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    grad = torch.is_grad_enabled()
    return tuple((*_layout(value), grad and value.requires_grad) for value in given)


def _layout(value: torch.Tensor) -> _Layout:
    sizes = (*value.size(), *value.stride(), value.storage_offset())
    if not is_plain(value) or not all(type(size) is int for size in sizes):
        raise Refused("sizes are symbolic" if is_plain(value) else "it takes what is no plain tensor")
    return value.dtype, value.device, tuple(value.size()), tuple(value.stride()), value.storage_offset()


def _empty(layout: _Layout) -> torch.Tensor:
    dtype, device, size, stride, offset = layout
    if offset:
        raise Refused("it takes a window into other memory")
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


# ---------------------------------------------------------------- the operator


def _known() -> Bodies:
    bodies = _bodies.get()
    if bodies is None:
        raise CannotLower("a repeated block is traced outside of its compile")
    return bodies


def _fake(given: Sequence[torch.Tensor], body: str, graph: str, kind: int) -> list[torch.Tensor]:
    bodies = _known()
    if graph == "whole":
        kind, _ = bodies.find(body, given)
    part = bodies.part(body, graph, kind)
    if tuple(map(_layout, given)) != part.given:
        raise CannotLower("a call of a repeated block is not what its block was traced for")
    return [_empty(layout) for layout in part.results]


def _differentiated(given: Sequence[torch.Tensor], body: str, graph: str, kind: int) -> list[torch.Tensor]:
    if graph != "whole":
        return _below_autograd(given, body, graph, kind)
    kind, known = _known().find(body, given)
    if known.backward is None:
        return _below_autograd(given, body, "inference", kind)
    results: tuple[torch.Tensor, ...] = _Differentiated.apply(known, body, kind, *given)  # type: ignore[no-untyped-call]
    return list(results)


def _below_autograd(given: Sequence[torch.Tensor], body: str, graph: str, kind: int) -> list[torch.Tensor]:
    with _compat.below_autograd():
        made: list[torch.Tensor] = BLOCK(list(given), body, graph, kind)
    return made


class _Differentiated(torch.autograd.Function):
    """A call and its gradient, while AOTAutograd traces."""

    @staticmethod
    def forward(ctx: Any, known: _Kind, body: str, kind: int, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = _below_autograd(given, body, "forward", kind)
        ctx.known, ctx.body, ctx.kind = known, body, kind
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(given[index] if where == "given" else made[index] for where, index in known.saved))
        plain = itertools.compress(made, map(operator.not_, known.differentiable))
        ctx.mark_non_differentiable(*plain, *made[known.results :])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        known: _Kind = ctx.known
        assert known.backward is not None
        expected = known.backward.given[len(known.saved) :]
        tangents: list[torch.Tensor] = []
        wanted = list(itertools.compress(gradients, known.differentiable))
        for gradient, layout in zip(wanted, expected, strict=True):
            if gradient is None:  # an error here would come with autograd's warning; `put_in` raises it
                _known().wrong = "a result of a repeated block has no gradient"
                tangents.append(_empty(layout).zero_())
                continue
            dtype, _, size, stride, _ = layout
            if gradient.dtype != dtype or gradient.size() != size:
                raise CannotLower("a gradient of a repeated block is of another kind than its result")
            if gradient.stride() != stride or gradient.storage_offset():
                gradient = gradient.contiguous() if _is_contiguous(size, stride) else gradient
                gradient = gradient.clone() if gradient.storage_offset() else gradient
            tangents.append(gradient)
        made = _below_autograd([*ctx.saved_tensors, *tangents], ctx.body, "backward", ctx.kind)
        return (
            *(None, None, None),
            *(
                None if place is None else made[place] if place >= 0 else tangents[-1 - place]
                for place in known.gradients
            ),
        )


def _is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for count, step in zip(reversed(size), reversed(stride), strict=True):
        if step != expected:
            return False
        expected *= max(count, 1)
    return True


_library.impl("block", _differentiated, "Autograd")
torch.library.register_fake("multigraph::block", _fake, lib=_library)
BLOCK = torch.ops.multigraph.block.default


# ---------------------------------------------------------------- Dynamo's graph


@dataclass(frozen=True, eq=False)
class _Block:
    """A body of Dynamo's graph, and its calls: of each its steps and what they take from elsewhere."""

    name: str
    module: GraphModule
    results: tuple[int, ...]
    calls: tuple[tuple[list[Node], list[Node]], ...]


def lift(
    module: GraphModule, inputs: Sequence[Any], settings: Callable[[Any], Mapping[str, object]], traces: bool = True
) -> Bodies | None:
    """Put calls in place of blocks that come again, and trace one of each; None where there are none.

    `settings`: what `compile_fx` is given beside a graph, for a function that compiles one graph.  `traces`: False
    where the code is to come from caches alone, and the rewritten graph is what finds it.
    Raises `Refused`, and the graph is as it was.
    """
    here = _attempt.get() or Attempt()
    if here.why_not is not None:
        raise Refused(here.why_not)
    steps, nodes = steps_of_trace(module.graph)
    if (unknown := next((node for node in nodes if _changes_state(node)), None)) is not None:
        raise Refused(f"the graph calls {unknown.name}, which may change what a trace depends on")
    found, entries = repetition.find(steps), repetition.between_entries(steps)
    if 2 * entries.compiled < entries.steps + found.compiled:  # a cut elsewhere may go through a view
        found = entries
    named = {node.name: node for node in module.graph.nodes}
    blocks = [_block(body, nodes, named) for body in found.bodies]
    if not blocks:
        return None
    bodies = Bodies({block.name: {} for block in blocks})
    if traces:
        _Tracing(module, inputs, settings, bodies).trace(blocks)
    now: dict[Node, Node] = {}
    for block in blocks:
        for mine, arguments in block.calls:
            _put_call(module.graph, block, mine, [now.get(argument, argument) for argument in arguments], now)
    module.graph.lint()
    module.recompile()
    here.lifted = True
    return bodies


_STATELESS = frozenset((
    "torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "torch._C._fft",
    "torch._C._special", "_operator", "math", "builtins",
))  # fmt: skip


def _changes_state(node: Node) -> bool:
    """Whether it may change what a trace depends on, such as autocast or grad mode: no plain function of torch's."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, _compat.OpOverload | _compat.OpOverloadPacket):
        return node.op == "call_module"
    if isinstance(target, _compat.HigherOrderOperator):
        return False
    name = str(getattr(target, "__name__", ""))
    private = name.startswith(("_", "set_"))
    return getattr(target, "__module__", None) not in _STATELESS or private


def _is_tensor(node: Node) -> bool:
    """In a captured graph: the key alone is there (`capture.structure`)."""
    return "example_value" in node.meta


def _block(body: repetition.Body, nodes: Sequence[Node], named: Mapping[str, Node]) -> _Block:
    calls = []
    used: set[int] = set()
    for call in body.calls:
        mine = list(nodes[call.start : call.start + body.length])
        own = set(mine)
        used.update(place for place, node in enumerate(mine) if any(user not in own for user in node.users))
        arguments = [nodes[entry] if isinstance(entry, int) else named[entry] for entry in call.arguments]
        calls.append((mine, arguments))
    results = tuple(sorted(used))
    for mine, taken in calls:
        across = (*taken, *(mine[place] for place in results))
        if (other := next((node for node in across if not _is_tensor(node)), None)) is not None:
            raise Refused(f"{other.name} is no tensor, and blocks that come again are cut there")
    mine, arguments = calls[0]
    graph = Graph()
    inside: dict[Node, Node] = {}
    for place, argument in enumerate(arguments):
        inside[argument] = graph.placeholder(f"argument_{place}")
        inside[argument].meta["example_value"] = None
    for place, node in enumerate(mine):
        inside[node] = graph.node_copy(node, lambda operand: inside[operand])
        inside[node].name = f"step_{place}"
    graph.output(tuple(inside[mine[place]] for place in results))
    module = GraphModule(torch.nn.Module(), graph, "repeated")
    name = hashlib.sha256(module.code.encode()).hexdigest()[:16]
    return _Block(name, module, results, tuple(calls))


def _put_call(graph: Graph, block: _Block, mine: list[Node], given: list[Node], now: dict[Node, Node]) -> None:
    with graph.inserting_after(mine[-1]):
        made = graph.call_function(BLOCK, (given, block.name, "whole", 0))
    made.meta.update({key: value for key, value in mine[-1].meta.items() if key != "example_value"})
    at, inside = made, set(mine)
    for index, place in enumerate(block.results):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (made, index))
        at.meta.update(mine[place].meta)
        now[mine[place]] = at
        mine[place].replace_all_uses_with(at, delete_user_cb=lambda user: user not in inside)
    for node in reversed(mine):
        graph.erase_node(node)


# ---------------------------------------------------------------- a body's graphs


class _Tracing:
    """Goes through Dynamo's graph with fake values, as far as calls need them, and traces a block at its first call."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        settings: Callable[[Any], Mapping[str, object]],
        bodies: Bodies,
    ) -> None:
        self._module, self._inputs, self._settings, self._bodies = module, inputs, settings, bodies
        context = _compat.TracingContext.try_get()
        self._fake_mode: Any = getattr(context, "fake_mode", None)
        if self._fake_mode is None:
            raise Refused("no trace is going on")

    def trace(self, blocks: Sequence[_Block]) -> None:
        calls = {mine[-1]: (block, mine, given) for block in blocks for mine, given in block.calls}
        inside = {node for _, mine, _ in calls.values() for node in mine}
        needed = {node for _, _, given in calls.values() for node in given}
        for node in reversed(self._module.graph.nodes):
            if node in needed and node not in inside:
                needed.update(node.all_input_nodes)
        values: dict[Node, Any] = {}
        placeholders = dict(zip(self._module.graph.find_nodes(op="placeholder"), self._inputs, strict=True))
        env = self._fake_mode.shape_env
        quiet = env.ignore_fresh_unbacked_symbols() if env is not None else contextlib.nullcontext()
        with self._fake_mode, quiet:
            for node in self._module.graph.nodes:
                if node in calls:
                    block, mine, given = calls[node]
                    made = self._call(block, [values[argument] for argument in given])
                    values.update(zip((mine[place] for place in block.results), made, strict=True))
                elif node in needed and node not in inside:
                    values[node] = self._value(node, placeholders, values)
        for block in blocks:
            if len(self._bodies.kinds[block.name]) == len(block.calls):
                raise Refused("blocks that come again are given tensors of other kinds at each call")

    def _value(self, node: Node, inputs: Mapping[Node, Any], values: Mapping[Node, Any]) -> Any:
        if node.op in ("placeholder", "get_attr"):
            value = inputs[node] if node.op == "placeholder" else operator.attrgetter(str(node.target))(self._module)
            if not isinstance(value, torch.Tensor):
                return value
            return _empty((*_layout(value)[:4], 0)).requires_grad_(value.requires_grad) if is_plain(value) else value
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        try:
            return (
                getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
            )
        except Exception as error:
            raise Refused(f"{node.name} cannot be traced by itself ({type(error).__name__})") from error

    def _call(self, block: _Block, given: list[torch.Tensor]) -> list[torch.Tensor]:
        kinds = self._bodies.kinds[block.name]
        key = _key(given)
        if key not in kinds:
            with contextlib.ExitStack() as outside:
                outside.enter_context(_compat.disable_current_modes())
                kinds[key] = self._traced(block, given)
        kind = kinds[key]
        made = [_empty(layout) for layout in kind.forward.results[: kind.results]]
        for value, differentiable in zip(made, kind.differentiable, strict=False):
            value.requires_grad_(differentiable)
        return made

    def _traced(self, block: _Block, given: Sequence[torch.Tensor]) -> _Kind:
        layouts = tuple(map(_layout, given))
        with self._fake_mode:
            arguments = [
                _empty(layout).requires_grad_(value.requires_grad) for layout, value in zip(layouts, given, strict=True)
            ]
        graphs: dict[str, GraphModule] = {}
        context = _compat.TracingContext(self._fake_mode)
        with (
            _compat.tracing(context),
            _compat.functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        ):
            beside: Any = self._settings(functools.partial(_keep, graphs))
            _compat.compile_fx(block.module, arguments, ignore_shape_env=True, **beside)
        metadata: Any = context.fw_metadata
        if (why := _not_pure(metadata)) is not None:
            raise Refused(f"a block that comes again {why}")
        results = len(block.results)
        if "inference" in graphs:
            made = _outputs(graphs["inference"])
            if len(made) != results:
                raise Refused("a block that comes again has other results than its graph")
            return _Kind(_part(graphs["inference"], layouts, made), results)
        if {"forward", "backward"} - set(graphs):
            raise Refused("a block that comes again is in no graph")
        return _parted(graphs["forward"], graphs["backward"], layouts, results, metadata)


def _keep(graphs: dict[str, GraphModule], gm: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
    """In place of Inductor's compile of one graph."""
    label = "backward" if settings.get("is_backward") else "inference" if settings.get("is_inference") else "forward"
    graphs[label] = gm

    def run(args: list[Any]) -> Any:
        raise RuntimeError("this graph was traced, and never compiled")

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _not_pure(metadata: Any) -> str | None:
    """Why AOTAutograd does not say that a block is a function of its arguments that makes what it hands out."""
    if metadata is None:
        return "was not described by AOTAutograd"
    if any(info.mutates_data or info.mutates_metadata or info.mutates_storage_metadata for info in metadata.input_info):
        return "writes to what it is given"
    if any(info.output_type.name != "non_alias" for info in metadata.output_info):
        return "hands out a view, or what it was given"
    if metadata.num_intermediate_bases or metadata.tokens or metadata.num_graphsafe_rng_states:
        return "is no function of its arguments alone"
    return None


def _outputs(gm: GraphModule) -> list[Any]:
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def _chain(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Where the memory of `node` comes from, and the views that lead from there to it."""
    views: list[Node] = []
    while (above := viewed(node)) is not None:
        if node.all_input_nodes != [above]:
            raise Refused(f"{node.name} is a view by more than one value")
        views.append(node)
        node = above
    return node, tuple(reversed(views))


def _part(gm: GraphModule, given: tuple[_Layout, ...], outputs: Sequence[Any]) -> _Part:
    """A graph of a body that hands out the memory of `outputs`."""
    graph = Graph()
    inside: dict[Node, Node] = {}
    devices = {layout[1] for layout in given}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if node.op != "placeholder" and (why := _why_no_part(node)) is not None:
            raise Refused(f"a block that comes again holds {node.target}: {why}")
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, torch.Tensor):
                _layout(value)
                devices.add(value.device)
        inside[node] = graph.node_copy(node, lambda operand: inside[operand])
    if len(devices) != 1:
        raise Refused("a block that comes again is on several devices")
    if len(gm.graph.find_nodes(op="placeholder")) != len(given):
        raise Refused("a block that comes again takes other arguments than its graph")
    makers, views, seen = [], [], set()
    for node in outputs:
        if not isinstance(node, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            raise Refused("a block that comes again hands out what is no tensor")
        maker, chain = _chain(node)
        if maker.op == "placeholder" or maker in seen or not isinstance(maker.meta.get("val"), torch.Tensor):
            raise Refused(f"a block that comes again hands out {node.name}, which has no memory of its own")
        seen.add(maker)
        makers.append(inside[maker])
        views.append(chain)
    output = graph.output(tuple(makers))
    output.meta["user_visible_output_idxs"] = list(range(len(makers)))  # with the strides that they have here
    graph.eliminate_dead_code()
    results = tuple(_layout_of_result(node) for node in outputs)
    return _Part(GraphModule(torch.nn.Module(), graph, "repeated"), given, results, tuple(views))


def _layout_of_result(node: Node) -> _Layout:
    layout = _layout(node.meta["val"])
    if layout[4]:
        raise Refused(f"a block that comes again hands out {node.name}, a window into other memory")
    return layout


def _why_no_part(node: Node) -> str | None:
    if node.op != "call_function":
        return "it is no operator"
    if may_be_done_in_place(node):
        first = node.args[0]
        taken = isinstance(first, Node) and _chain(first)[0].op == "placeholder"
        return "it may be done in place" if taken or not isinstance(first, Node) else None
    return why_it_stays(node)


def _parted(
    forward: GraphModule, backward: GraphModule, given: tuple[_Layout, ...], results: int, metadata: Any
) -> _Kind:
    made = _outputs(forward)
    taken = backward.graph.find_nodes(op="placeholder")
    differentiable = tuple(bool(info.requires_grad) for info in metadata.output_info)
    tangents = sum(differentiable)
    saved = made[results:]
    names = [getattr(node, "name", None) for node in saved]
    if len(differentiable) != results or names != [node.name for node in taken[: len(taken) - tangents]]:
        raise Refused("a block that comes again is saved for backward in another way")
    numbers = {node: place for place, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    outputs: list[Any] = made[:results]
    graph = Graph()
    inside: dict[Node, Node] = {}
    placeholders: dict[tuple[str, int], Node] = {}
    layouts: list[_Layout] = []

    def take(where: str, index: int, like: Node) -> Node:
        if (where, index) not in placeholders:
            placeholders[where, index] = graph.placeholder(f"{where}_{index}")
            placeholders[where, index].meta["val"] = like.meta["val"]
            layouts.append(_layout(like.meta["val"]))
        return placeholders[where, index]

    views: list[tuple[Node, Node, tuple[Node, ...]]] = []
    for node, placeholder in zip(saved, taken, strict=False):
        maker, chain = _chain(node)  # what is saved is the memory, and the backward graph makes the view again
        if maker not in numbers and maker not in outputs:
            outputs.append(maker)
        source = ("given", numbers[maker]) if maker in numbers else ("made", outputs.index(maker))
        views.append((placeholder, take(*source, maker), chain))
    sources = tuple(placeholders)
    for index, placeholder in enumerate(taken[len(saved) :]):
        inside[placeholder] = take("tangent", index, placeholder)
    for placeholder, value, chain in views:
        for view in chain:
            value = graph.node_copy(view, lambda operand, value=value: value)  # type: ignore[misc]
        inside[placeholder] = value
    for node in backward.graph.nodes:
        if node.op == "output":
            results_of_backward = [None if entry is None else inside[entry] for entry in node.args[0]]
            graph.output(tuple(results_of_backward))
        elif node.op != "placeholder":
            inside[node] = graph.node_copy(node, lambda operand: inside[operand])
    if len(results_of_backward) != len(given):
        raise Refused("a block that comes again has other gradients than arguments")
    handed_out: list[Node] = []
    gradients: list[int | None] = []
    of_tangents = [placeholders["tangent", index] for index in range(tangents)]
    for entry in results_of_backward:
        if entry is None:
            gradients.append(None)
        elif entry in of_tangents:
            gradients.append(-1 - of_tangents.index(entry))
        else:
            if entry not in handed_out:
                handed_out.append(entry)
            gradients.append(handed_out.index(entry))
    module = GraphModule(torch.nn.Module(), graph, "repeated")
    return _Kind(
        _part(forward, given, outputs),
        results,
        differentiable,
        _part(module, tuple(layouts), handed_out),
        sources,
        tuple(gradients),
    )


# ---------------------------------------------------------------- graphs that Inductor is given


@dataclass(frozen=True)
class PutIn:
    """What stands for the operators of one graph: names of bodies, and of each its steps and how often it is called."""

    names: tuple[str, ...] = ()
    bodies: tuple[tuple[int, int], ...] = ()


def put_in(gm: GraphModule, bodies: Bodies | None) -> PutIn:
    """Calls of graphs of bodies in place of the operators."""
    if not (operators := gm.graph.find_nodes(op="call_function", target=BLOCK)):
        return PutIn()
    if bodies is None:
        raise CannotLower("a graph calls repeated blocks that are not there")
    if bodies.wrong is not None:
        raise CannotLower(bodies.wrong)
    names: dict[tuple[Any, ...], str] = {}
    calls: dict[str, int] = {}
    steps: dict[str, int] = {}
    for node in operators:
        given, body, graph, kind = node.args
        if graph == "whole":
            kind, graph = bodies.find(body, [entry.meta["val"] for entry in given])[0], "inference"
        part = bodies.part(body, graph, kind)
        if tuple(_layout(entry.meta["val"]) for entry in given) != part.given:
            raise CannotLower("a call of a repeated block is not what its block was traced for")
        if (body, graph, kind) not in names:
            name = next(name for number in itertools.count() if not hasattr(gm, name := f"repeated_{number}"))
            gm.add_submodule(name, part.made)
            names[body, graph, kind], steps[name] = name, part.steps
        name = names[body, graph, kind]
        calls[name] = calls.get(name, 0) + 1
        _call_part(gm.graph, node, name, part)
    gm.graph.lint()
    gm.recompile()
    return PutIn(tuple(names.values()), tuple((steps[name], count) for name, count in calls.items()))


def _call_part(graph: Graph, node: Node, name: str, part: _Part) -> None:
    with graph.inserting_before(node):
        attribute = graph.get_attr(name)
        made = graph.call_function(_compat.invoke_subgraph, (attribute, name, *node.args[0]))  # type: ignore[misc]
        handed_out = part.made.graph.output_node().args[0]
        made.meta["val"] = tuple(entry.meta["val"] for entry in handed_out)  # type: ignore[union-attr]
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise CannotLower("results of a repeated block are taken as a list")
            place: Any = user.args[1]
            value = graph.call_function(operator.getitem, (made, place))
            value.meta["val"] = made.meta["val"][place]
            for view in part.views[place]:
                value = graph.node_copy(view, lambda operand, value=value: value)  # type: ignore[misc]
            user.replace_all_uses_with(value)
            graph.erase_node(user)
    graph.erase_node(node)
