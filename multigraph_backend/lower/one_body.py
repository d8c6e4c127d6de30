"""Repeated blocks of a graph that Inductor is given, put into it as calls of one body.

    mm = mm(x, w1); ...          x = invoke_subgraph(repeated_0, "repeated_0", x, w1, ...)[0]
    mm = mm(x, w2); ...    ->    x = invoke_subgraph(repeated_0, "repeated_0", x, w2, ...)[0]

Inductor lowers a body once, its code is one function, and its calls are calls of that function.

In:  a forward, backward or inference graph, as AOTAutograd hands it to Inductor, with packed tensors and all.
Out: Inductor's code; what became of blocks that come again is noted for the compile that is running (`collecting`).

Why here, and not only before AOTAutograd (`traced_once`): what is left of a graph here is ATen operators without side
effects, and whatever autograd, the partitioner, autocast or packing did is done.  So a body is a function of its
arguments; it needs no backward of its own, and nothing is saved for backward otherwise than without bodies.  What was
lifted out before comes here as operators, and becomes calls of the same form.  What torch itself makes of regions that
are marked before AOTAutograd gives wrong gradients: such a region hands out what it was given, where the backward needs
it, and Inductor uses that memory again (torch 2.13 and 2.15, CPU).  A body here hands out only what it has made: a view
is made again outside, and the code that comes out is read for it.

A block is no body where that does not hold, and where Inductor could not bind its sizes.  Up to torch 2.13 Inductor
also takes a body's arguments for saved tensors that were donated, by their positions: where a backward calls a body,
nothing is donated to it.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.cache.revived import compile_by_inductor
from multigraph_backend.lower import donation, equal_steps, order_of_steps, repetition, traced_once
from multigraph_backend.lower.block_operator import Bodies
from multigraph_backend.lower.body_graphs import call_body, whatever_strides
from multigraph_backend.lower.fresh_inputs import CannotLower
from multigraph_backend.lower.inlined import give_value
from multigraph_backend.lower.steps_of_graph import (
    Told,
    convolves,
    is_number,
    is_of_call,
    is_plain,
    is_step,
    steps_of,
    updates_a_constant,
    values_of,
    why_it_stays,
)
from multigraph_backend.saved_tensors.graphs import viewed


@dataclass(frozen=True)
class Repeated:
    """What became of one graph: its `steps`, and of each body its steps and how often it is called.

    `traced_once`: of how many of the bodies AOTAutograd traced one block.  `inlined`: of each block that it traced once
    and whose steps were put in the place of all, its steps and how often.  `refused`: why blocks that come again are no
    bodies, or traced one by one.  `stay`: which operators may be a part of none, and why.
    """

    graph: str
    steps: int
    bodies: tuple[tuple[int, int], ...] = ()
    refused: tuple[str, ...] = ()
    stay: tuple[str, ...] = ()
    traced_once: int = 0
    inlined: tuple[tuple[int, int], ...] = ()

    @property
    def calls(self) -> int:
        return sum(calls for _, calls in self.bodies)

    @property
    def comes_again(self) -> bool:
        """Whether blocks that come again were traced or compiled once."""
        return bool(self.bodies or self.inlined)

    @property
    def spared(self) -> int:
        """Steps that are not compiled."""
        return sum(length * (calls - 1) for length, calls in self.bodies)

    def __str__(self) -> str:
        each = ", ".join(f"{calls} calls of one body of {length} steps" for length, calls in self.bodies)
        said = f"{each}; {self.steps - self.spared} of {self.steps} steps compiled" if each else "nothing is called"
        said += f"; {self.traced_once} of the bodies traced once" if self.traced_once else ""
        said += "".join(f"; {count} blocks of {length} steps traced once" for length, count in self.inlined)
        return "; ".join((f"{self.graph}: {said}", *self.refused, *(() if each else self.stay)))


_collected: ContextVar[list[Repeated] | None] = ContextVar("multigraph_repeated", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Repeated]]:
    """What became of the graphs that are compiled inside the body, in its thread."""
    here: list[Repeated] = []
    token = _collected.set(here)
    try:
        yield here
    finally:
        _collected.reset(token)


def collect_anew() -> None:
    """Forget what became of the graphs so far, of a compile that failed."""
    if (here := _collected.get()) is not None:
        here.clear()


#: why a step may be a part of no body; None of those that may
Stays = Callable[[Node], str | None]


def inner_compile(
    inner: Callable[..., Any] | None = None,
    lossless: bool = False,
    cut_at: Stays | None = None,
    traced: Bodies | None = None,
    why_not: str | None = None,
) -> Callable[..., Any]:
    """`inner`, or Inductor's own compile of one graph, with calls of bodies; `lossless`: only where no kernel is cut
    in two.

    `cut_at`: why a graph is to be cut at a step, which no body can be.
    `traced`: bodies that the graph calls already; `why_not`: why it calls none.
    """
    return functools.partial(_compile, inner or compile_by_inductor, lossless, cut_at, traced, why_not)


def _compile(
    compile_inner: Callable[..., Any],
    lossless: bool,
    cut_at: Stays | None,
    traced: Bodies | None,
    why_not: str | None,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    **settings: Any,
) -> Any:
    """Raises `CannotLower` where the code is not what it should be."""
    backward = bool(settings.get("is_backward"))
    label = "backward" if backward else "inference" if settings.get("is_inference") else "forward"
    called = traced_once.put_in(gm, traced, cut_at, label)
    names: list[str] = []
    if settings.get("cpp_wrapper") or _compat.inductor_config.cpp_wrapper:
        found = Repeated(label, 0, refused=("there are no bodies in C++ wrappers",))
    else:
        if label == "inference":
            equal_steps.merge(gm)
        found, names = put_in(gm, label, lossless, cut_at)
        names += called.names
        found = dataclasses.replace(
            found,
            steps=found.steps + sum(length * count for length, count in called.bodies),
            bodies=(*called.bodies, *found.bodies),
            traced_once=len(called.bodies),
            inlined=called.inlined,
            refused=found.refused if why_not is None else (*found.refused, f"blocks are traced one by one: {why_not}"),
        )
    if (here := _collected.get()) is not None:
        here.append(found)
    if names and backward:
        donation.nothing_donated(getattr(_compat.TracingContext.try_get(), "fw_metadata", None))
    code = compile_inner(gm, example_inputs, **settings)
    source = str(getattr(getattr(code, "inner", code), "source_code", "") or "")
    for name in names:
        if (why := wrong(source, name)) is not None:
            raise CannotLower(f"a body of repeated blocks {why}")
    return code


# ---------------------------------------------------------------- bodies and calls


def put_in(
    gm: GraphModule, label: str = "graph", lossless: bool = False, cut_at: Stays | None = None
) -> tuple[Repeated, list[str]]:
    """Put calls of bodies into a graph; what became of it, and the names of the bodies."""
    _read_sizes_of_inputs(gm.graph)
    _fill_for_each_update(gm.graph)
    nodes, repeated = _repeated(gm.graph, label, lossless, cut_at)
    own = [node for node in nodes if not is_of_call(node)]
    staying = collections.Counter(
        f"{node.target}: {why}" for node in own if (why := why_it_stays(node, cut_at)) is not None
    )
    putting = _Putting(gm)
    bodies: list[tuple[int, int]] = []
    refused: list[str] = []
    for body in repeated.bodies:
        blocks = [
            _Block(
                nodes[call.start : call.start + body.length],
                [nodes[entry] if isinstance(entry, int) else putting.inputs[entry] for entry in call.arguments],
            )
            for call in body.calls
        ]
        if (why := next(filter(None, (putting.refused(block) for block in blocks)), None)) is not None:
            refused.append(f"a block of {body.length} steps that comes {len(blocks)} times {why}")
            continue
        putting.put(blocks)
        bodies.append((body.length, len(blocks)))
    if bodies:
        gm.graph.lint()
        gm.recompile()
    stay = tuple(f"{said} ({count} times)" for said, count in staying.most_common(3))
    return Repeated(label, len(own), tuple(bodies), tuple(refused), stay), putting.names


def _repeated(
    graph: Graph, label: str, lossless: bool, cut_at: Stays | None
) -> tuple[list[Node], repetition.Repetition]:
    """The steps of a graph and what comes again in it: of a forward graph in the order in which less is compiled."""
    told: Told = {}

    def found() -> tuple[list[Node], repetition.Repetition]:
        steps, nodes = steps_of(graph, cut_at, told)
        made = repetition.find(steps, lossless)
        return nodes, made.worth() if lossless else made

    nodes, as_it_is = found()
    if label == "forward" and (late := order_of_steps.make_early(graph, told)):
        nodes, better = found()
        if better.compiled < as_it_is.compiled:
            return nodes, better
        order_of_steps.make_late(graph, late)
        return found()
    return nodes, as_it_is


def _read_sizes_of_inputs(graph: Graph) -> None:
    """Where a size of something computed is read, read an input that is the same symbol, or has it as a size."""
    inputs = graph.find_nodes(op="placeholder")
    told: dict[sympy.Symbol, Callable[[], Node]] = {}
    for node in reversed(inputs):
        if (symbol := _symbol(node)) is not None:
            told[symbol] = functools.partial(_itself, node)
        elif isinstance(value := node.meta.get("val"), torch.Tensor):
            for dim, size in enumerate(value.size()):
                if isinstance(expr := _compat.sympy_expr(size), sympy.Symbol) and expr not in told:
                    told[expr] = functools.cache(functools.partial(_size_of, graph, inputs[-1], node, dim))
    for node in list(graph.nodes):
        symbol = _symbol(node) if node.op == "call_function" and any(map(is_step, node.all_input_nodes)) else None
        if symbol in told:
            node.replace_all_uses_with(told[symbol]())
            graph.erase_node(node)


def _fill_for_each_update(graph: Graph) -> None:
    """Make constants that are updated, such as the zeros around the gradient of a slice, for each update anew:
    AOTAutograd makes equal ones once, and a call would be given them, though the kernel that updates makes them."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
        for user in [user for user in node.users if updates_a_constant(user)][len(node.users) == 1 :]:
            with graph.inserting_before(user):
                own = graph.node_copy(node, lambda operand: operand)
            give_value(own)
            user.replace_input_with(node, own)
        if not node.users:
            graph.erase_node(node)


def _itself(node: Node) -> Node:
    return node


def _size_of(graph: Graph, last: Node, node: Node, dim: int) -> Node:
    with graph.inserting_after(last):
        made = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    made.meta["val"] = node.meta["val"].size(dim)
    return made


@dataclass(frozen=True, eq=False)
class _Block:
    """Steps that a call is to stand for, and what they take from elsewhere."""

    steps: list[Node]
    arguments: list[Node]

    def handed_out(self) -> list[Node]:
        """Steps whose values are used elsewhere."""
        mine = set(self.steps)
        return [node for node in self.steps if any(user not in mine for user in node.users)]

    def results(self) -> list[int]:
        """What a call has to hand out: places of the steps that have made the memory of what is used elsewhere."""
        places = {node: place for place, node in enumerate(self.steps)}
        made = []
        for node in self.handed_out():
            while node in places and (above := viewed(node)) is not None:
                node = above
            if node in places:
                made.append(places[node])
        return made

    def numbers(self) -> list[Node]:
        """Symbolic numbers that the steps are given."""
        found = (operand for node in self.steps for operand in node.all_input_nodes if is_number(operand))
        return list(dict.fromkeys(found))

    def symbols(self) -> set[sympy.Symbol]:
        """All that sizes and strides depend on."""
        nodes = (*self.steps, *self.arguments, *self.numbers())
        return {symbol for node in nodes for expr in _expressions(node.meta.get("val")) for symbol in expr.free_symbols}

    def devices(self) -> set[torch.device]:
        values = (entry for node in (*self.steps, *self.arguments) for entry in values_of(node))
        return {value.device for value in values if isinstance(value, torch.Tensor)}

    def told(self) -> set[sympy.Symbol]:
        """The sizes among them that are those of an argument."""
        return {
            expr
            for node in self.arguments
            for expr in map(_compat.sympy_expr, node.meta["val"].size())
            if isinstance(expr, sympy.Symbol)
        }


def _expressions(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [expr for entry in value for expr in _expressions(entry)]
    if isinstance(value, torch.Tensor):
        return [_compat.sympy_expr(size) for size in (*value.size(), *value.stride(), value.storage_offset())]
    return [value.node.expr] if isinstance(value, torch.SymInt) else []


def _symbol(node: Node) -> sympy.Symbol | None:
    """The symbol that a number is, by itself."""
    value = node.meta.get("val")
    expr = value.node.expr if isinstance(value, torch.SymInt) else None
    return expr if isinstance(expr, sympy.Symbol) else None


class _Putting:
    """A graph while calls are put into it.  `inputs`: nodes that are no steps, by name; `names`: of the bodies."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self.inputs = {node.name: node for node in gm.graph.nodes if not is_step(node)}
        self.names: list[str] = []
        sizes = gm.graph.find_nodes(op="placeholder")
        self._sizes = {symbol: node for node in reversed(sizes) if (symbol := _symbol(node)) is not None}
        self._convolves = convolves(gm.graph)
        self._now: dict[Node, Node] = {}  # what stands for a step that is gone

    def refused(self, block: _Block) -> str | None:
        """Why these steps may not be a call; None where they may."""
        for node in block.arguments:
            if not isinstance(node.meta.get("val"), torch.Tensor) or not is_plain(node.meta["val"]):
                return f"takes {node.name}, which is no plain tensor"
            if node.op == "get_attr":  # Inductor's passes take its values, and not what is known of them, to the call
                return f"takes {node.name}, a tensor that the graph holds"
        if len(block.devices()) > 1:
            return "is on several devices"
        for node in block.steps:
            if any(is_number(user) for user in node.users):
                return f"holds {node.name}, whose size is read"
            if updates_a_constant(node) and node.args[0] not in block.steps:
                return f"updates {node.args[0]}, which it is given"
        for node in block.numbers():
            if not isinstance(node.meta["val"], torch.SymInt):
                return f"takes {node.name}, which is no integer"
        if lacking := block.symbols() - set(self._sizes) - block.told():
            return f"depends on {min(map(str, lacking))}, which no argument tells"
        for place in block.results():
            if not isinstance(block.steps[place].meta.get("val"), torch.Tensor):
                return f"hands out {block.steps[place].name}, which is several values"
        return None

    def put(self, blocks: Sequence[_Block]) -> None:
        """Calls of one body in place of equal blocks."""
        first = blocks[0]
        results = sorted({place for block in blocks for place in block.results()})
        # equal blocks are given equal numbers, and those of the first are there for all
        sizes = [self._sizes[symbol] for symbol in sorted(first.symbols() & set(self._sizes), key=str)]
        sizes = list(dict.fromkeys((*sizes, *first.numbers())))
        name = next(name for number in itertools.count() if not hasattr(self._gm, name := f"repeated_{number}"))
        self._gm.add_submodule(name, self._body(first, sizes, results))
        self.names.append(name)
        for block in blocks:
            self._call(name, block, sizes, results)

    def _body(self, block: _Block, sizes: Sequence[Node], results: Sequence[int]) -> GraphModule:
        graph = Graph()
        inside: dict[Node, Node] = {}
        for place, argument in enumerate((*map(self._today, block.arguments), *sizes)):
            inside[argument] = graph.placeholder(f"argument_{place}")
            inside[argument].meta["val"] = argument.meta["val"]
        for node in block.steps:
            inside[node] = graph.node_copy(node, lambda operand: inside[operand])
        output = graph.output(tuple(inside[block.steps[place]] for place in results))
        output.meta["user_visible_output_idxs"] = list(range(len(results)))  # with the strides that they have here
        whatever_strides(graph)
        return GraphModule(torch.nn.Module(), graph, "repeated")

    def _call(self, name: str, block: _Block, sizes: Sequence[Node], results: Sequence[int]) -> None:
        """In place of the steps that it stands for, behind the last of them."""
        graph, mine = self._gm.graph, set(block.steps)
        given = [self._today(argument) for argument in block.arguments]
        with graph.inserting_after(block.steps[-1]):
            attribute = graph.get_attr(name)
        with graph.inserting_before(attribute.next):
            made = call_body(graph, getattr(self._gm, name), attribute, name, [*given, *sizes], self._convolves)
        made.meta["val"] = tuple(block.steps[place].meta["val"] for place in results)
        places = {block.steps[place]: index for index, place in enumerate(results)}
        outside: dict[Node, Node] = {}
        at = made

        def again(node: Node) -> Node:
            """A result of the call, or a view of one."""
            nonlocal at
            if node not in mine:
                return self._today(node)
            if node not in outside:
                if node in places:
                    with graph.inserting_after(at):
                        at = outside[node] = graph.call_function(operator.getitem, (made, places[node]))
                    at.meta.update(node.meta)
                else:
                    operands = {operand: again(operand) for operand in node.all_input_nodes}
                    with graph.inserting_after(at):
                        at = outside[node] = graph.node_copy(node, lambda operand: operands[operand])
            return outside[node]

        for node in block.handed_out():
            node.replace_all_uses_with(again(node), delete_user_cb=lambda user: user not in mine)
            self._now[node] = outside[node]
        for node in reversed(block.steps):
            graph.erase_node(node)

    def _today(self, node: Node) -> Node:
        while node in self._now:
            node = self._now[node]
        return node


# ---------------------------------------------------------------- what comes out


def wrong(source: str, name: str) -> str | None:
    """What is wrong with the code of a body: that it hands out what it was given, or the same memory twice.

    A caller then may use that memory for something else while it is needed.  Each piece of a graph that Inductor parts
    has the code of the bodies that it calls.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return "is in no Python code"
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        return "has no code of its own"
    return next(filter(None, map(_wrong, functions)), None)


def _wrong(function: ast.FunctionDef) -> str | None:
    lies_in: dict[str, str] = {}
    given: set[str] = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List) and ast.unparse(node.value) == "args":
                given |= {entry.id for entry in target.elts if isinstance(entry, ast.Name)}
            elif isinstance(target, ast.Name) and (memory := _memory(node.value)):
                lies_in[target.id] = memory
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returned) != 1 or not isinstance(returned[0], ast.Tuple):
        return "does not say what it hands out"
    seen: set[str] = set()
    for value in returned[0].elts:
        if not isinstance(value, ast.Name) and not _begins_with_it(value):
            return f"hands out {ast.unparse(value)}, a part of something"
        memory = _memory(value)
        names = {memory}
        while memory in lies_in and lies_in[memory] not in names:
            memory = lies_in[memory]
            names.add(memory)
        if memory in given:
            return f"hands out {ast.unparse(value)}, which it was given"
        if memory in seen:
            return f"hands out {ast.unparse(value)}, and the same memory once more"
        seen.add(memory)
    return None


def _begins_with_it(value: ast.expr) -> bool:
    """Whether it is a buffer under another size or other strides, from its first number on: what a norm saves, say."""
    if not _memory(value) or not isinstance(value, ast.Call) or len(value.args) != 4:
        return False
    buffer, _, _, offset = value.args
    return isinstance(buffer, ast.Name) and isinstance(offset, ast.Constant) and offset.value == 0


def _memory(value: ast.expr) -> str:
    """The buffer that an expression is, or is a view of; "" for anything else."""
    if isinstance(value, ast.Call) and value.args and ast.unparse(value.func) == "reinterpret_tensor":
        return _memory(value.args[0])
    return value.id if isinstance(value, ast.Name) else ""
