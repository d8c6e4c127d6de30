"""Numbers of the program that a recorded graph computes with: one vector on the GPU, an input of its own.

Under `dynamic=True` Dynamo takes the floats of a program for inputs, tensors of one element on the CPU.  Code that
launches kernels reads them then, and a recording would keep what they were while it was made.  So where graphs are
recorded, Inductor copies all of them to the GPU at each call, between pieces, by a C++ kernel where there are two; and
outputs that the program computes on the CPU come on the GPU, with those that it only hands on, in torch 2.11.

Here the graph takes them from an input behind all others instead, and each step on the GPU reads its element:

    (x, scale, eps) -> x * scale + eps      (x, scale, eps, numbers) -> x * numbers[0] + numbers[1]

What is computed of numbers alone is computed on the GPU as well, for the steps there.  Where it is an output, a float
that a forward saves in the type in which it was used say, it leaves the graph, for its kernel on the CPU would cut
that: it is computed beside each call.  What else the CPU wants of numbers is left as it is.  A vector is made once for
each set of values, and never written over: a recording reads it where it lies, and one that meets other values copies,
as of any input.

In:  a graph before it is compiled, and what a call of its code is given.
Out: the graph with that input and without those outputs, the vector for a call, and the outputs that left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.allocator import sleeping
from multigraph_backend.cudagraphs.partition import cuts
from multigraph_backend.process.captures import beside_captures

NAME = "numbers"  # of the input, and of what is noted in a graph's `meta`
MOST = 16  # vectors that are kept for the values of one graph

_aten, _prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Numbers:
    """What `lift` has made of a graph.

    places: positions of the inputs whose values are in the vector, in its order; empty: there is none
    at_home: positions of outputs that the program computes on the CPU, None in the graph
    device: where the vector is to be
    home: what computes these outputs, of all inputs
    """

    places: tuple[int, ...]
    at_home: tuple[int, ...]
    device: torch.device
    home: GraphModule | None = None

    def supplied(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, the code of the graph, as its callers know it."""
        if self.places:
            run = _with_vector(run, Vectors(self.places, self.device))
        return run if self.home is None else _with_outputs(run, self.at_home, self.home)


# ---------------------------------------------------------------- the graph


def lift(gm: GraphModule, inputs: list[Any], device_type: str) -> Numbers | None:
    """Change `gm`, and its example `inputs`, so that steps on its GPU read numbers there; None: there is nothing to
    do."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    if (before := gm.meta.get(NAME)) is not None:  # a compile of it has failed
        inputs.extend(node.meta["val"] for node in placeholders[len(inputs) :])
        return before  # type: ignore[no-any-return]
    devices = {value.device for node in gm.graph.nodes for value in cuts.tensors(node.meta.get("val"))}
    gpus = [device for device in devices if device.type == device_type]
    places = {node: place for place, node in enumerate(placeholders) if node.users and _is_number(node)}
    if len(gpus) != 1 or not places or not isinstance(fake := next(iter(places)).meta["val"], _compat.FakeTensor):
        return None
    derived = dict.fromkeys(places)
    for node in gm.graph.nodes:
        if _of_numbers(node, derived):
            if _changes_nothing(node):
                node.replace_all_uses_with(node.all_input_nodes[0])
            derived[node] = None
    at_home = tuple(at for at, node in enumerate(outputs_of(gm)) if node in derived and node not in places)
    home = _taken_out(gm, placeholders, derived, at_home) if at_home else None
    wanted = [
        (node, of)
        for node in gm.graph.nodes
        if _runs_on(node, gpus[0])
        for of in node.all_input_nodes
        if of in derived and _floats(of, derived) and not _changes(node, of)
    ]
    lifted = _Lifted(gm, places, placeholders[-1], fake.fake_mode, gpus[0])
    for node, of in wanted:
        node.replace_input_with(of, lifted.on_gpu(of))
    for node in reversed(list(derived)):
        if node.op != "placeholder" and not node.users:
            gm.graph.erase_node(node)
    if (vector := lifted.end()) is not None:
        inputs.append(vector)
    gm.recompile()
    if vector is None and not at_home:
        return None
    device = torch.device(device_type, gpus[0].index or 0)
    numbers = gm.meta[NAME] = Numbers(tuple(places[node] for node in lifted.order), at_home, device, home)
    return numbers


def _taken_out(
    gm: GraphModule, placeholders: Sequence[Node], derived: Mapping[Node, None], at_home: Sequence[int]
) -> GraphModule:
    """What computes the outputs `at_home` of all inputs; in `gm` they are None from now on."""
    outputs, graph = list(outputs_of(gm)), Graph()
    wanted = [outputs[at] for at in at_home]
    needed = set(wanted)
    for node in reversed(list(derived)):
        if node in needed:
            needed.update(node.all_input_nodes)
    known = {node: graph.placeholder(f"given_{place}") for place, node in enumerate(placeholders)}
    for node in derived:
        if node in needed and node not in known:
            made = known[node] = graph.node_copy(node, known.__getitem__)
            made.meta.clear()  # it would keep the trace
            if made.target is _prims.convert_element_type.default:  # Python at each call, and five times as slow
                made.target = _aten.to.dtype  # of another type: what changes nothing is no step any more
    graph.output(tuple(known[node] for node in wanted))
    for at in at_home:
        outputs[at] = None
    gm.graph.output_node().args = (tuple(outputs),)
    return GraphModule({}, graph)


class _Lifted:
    """The vector's input, and the copies of nodes that read it, each made when it is first asked for."""

    def __init__(
        self, gm: GraphModule, places: Mapping[Node, int], last: Node, mode: Any, device: torch.device
    ) -> None:
        self._gm, self._places, self._mode, self._device = gm, places, mode, device
        self._made: dict[Node, Node] = {}
        self._last = last
        self._vector: Node | None = None
        self.order: list[Node] = []

    def on_gpu(self, node: Node) -> Node:
        if node not in self._made:
            self._made[node] = self._element(node) if node in self._places else self._copy(node)
        return self._made[node]

    def _element(self, node: Node) -> Node:
        if self._vector is None:
            with self._gm.graph.inserting_after(self._last):
                self._last = self._vector = self._gm.graph.placeholder(NAME)
        with self._gm.graph.inserting_after(self._last):
            element = self._gm.graph.call_function(_aten.select.int, (self._vector, 0, len(self.order)))
        element.meta["val"] = self._fake((), torch.float64)
        self._last = element
        self.order.append(node)
        dtype = node.meta["val"].dtype
        if dtype is torch.float64:
            return element
        with self._gm.graph.inserting_after(self._last):
            self._last = self._gm.graph.call_function(_prims.convert_element_type.default, (element, dtype))
        self._last.meta["val"] = self._fake((), dtype)
        return self._last

    def _copy(self, node: Node) -> Node:
        with self._gm.graph.inserting_after(node):
            copy = self._gm.graph.node_copy(node, lambda of: self.on_gpu(of) if _is_number(of) else of)
        copy.meta["val"] = self._fake((), node.meta["val"].dtype)
        return copy

    def _fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with _compat.disable_current_modes():  # compilers are called under the mode of the trace
            meta = torch.empty(shape, dtype=dtype, device="meta")
            fake: torch.Tensor = _compat.FakeTensor(self._mode, meta, self._device)
        return fake

    def end(self) -> torch.Tensor | None:
        """The example of the vector, None if nothing reads one."""
        if self._vector is None:
            return None
        example = self._vector.meta["val"] = self._fake((len(self.order),), torch.float64)
        return example


def _is_number(node: Node) -> bool:
    """Whether it is one element on the CPU, of no dimension."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"


def _of_numbers(node: Node, derived: Mapping[Node, None]) -> bool:
    """Whether it computes a number of others that come in, and of nothing else."""
    return (
        _is_number(node)
        and _is_plain(node)
        and not _changes(node)  # what changes an input is no number, and is done where that lies
        and node.kwargs.get("device") is None
        and node.target is not _prims.device_put.default
        and bool(node.all_input_nodes)
        and all(of in derived for of in node.all_input_nodes)
    )


def _changes_nothing(node: Node) -> bool:
    of = node.all_input_nodes[0]
    return node.target is _prims.convert_element_type.default and node.meta["val"].dtype is of.meta["val"].dtype


def _floats(node: Node, derived: Mapping[Node, None]) -> bool:
    """Whether all that comes in of it are floats: of others the vector, of float64, may not hold the value."""
    if not node.meta["val"].dtype.is_floating_point and node.op == "placeholder":
        return False
    return all(_floats(of, derived) for of in node.all_input_nodes if of in derived)


def _runs_on(node: Node, device: torch.device) -> bool:
    values = list(cuts.tensors(node.meta.get("val")))
    return bool(values) and _is_plain(node) and all(value.device == device for value in values)


def _changes(node: Node, of: Node | None = None) -> bool:
    """Whether it writes to its first argument, which `of` is."""
    schema: Any = getattr(node.target, "_schema", None)
    return bool(schema.is_mutable) and (of is None or node.args[0] is of)


def _is_plain(node: Node) -> bool:
    """Whether torch's own operators say what it does, and it draws nothing."""
    op = node.target
    return (
        node.op == "call_function"
        and isinstance(op, _compat.OpOverload)
        and op.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in op.tags
    )


def outputs_of(gm: GraphModule) -> Sequence[Any]:
    results: Any = gm.graph.output_node().args[0]
    return results if isinstance(results, list | tuple) else (results,)


# ---------------------------------------------------------------- what no step reads


def hide(gm: GraphModule, unread: Sequence[int], inputs: list[Any]) -> list[int]:
    """Change example `inputs` so that numbers at the positions `unread` have no element; positions of outputs that are
    among these.

    They are floats that the trace has made constants, the epsilon of a norm say, that are in the vector, or that are
    only handed on to a backward.  Inductor would copy them to the GPU all the same: the C++ kernel is compiled, which
    alone asks a compiler for what the processor can do in each process, and runs before each call.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    hidden = []
    for place in unread:
        value = inputs[place]
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
            inputs[place] = value.new_empty(0)
            hidden.append(placeholders[place])
    return [at for at, node in enumerate(outputs_of(gm)) if node in hidden]


def show_again(code: Any, handed_on: Sequence[int]) -> None:
    """Let Inductor's `code`, and what is compiled after it, know that the outputs `handed_on` are numbers: without a
    dimension."""
    context = None if _compat.without("TracingContext") else _compat.TracingContext.try_get()
    for strides in (code.output_strides, getattr(context, "output_strides", None)):
        if strides:
            for at in handed_on:
                strides[at] = ()


# ---------------------------------------------------------------- a call


class Vectors:
    """The vectors of one graph's numbers: one for each set of values, and for each stream, whose order keeps what is
    copied to one before what reads it."""

    def __init__(self, places: Sequence[int], device: torch.device) -> None:
        self._places, self._device, self._lock = tuple(places), device, threading.Lock()
        self._made: dict[tuple[object, ...], torch.Tensor] = {}
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}  # graphs of the user's own read them at each replay
        #: the values, the stream and the vector of the last call, unless values may be equal and not the same
        self._last: tuple[tuple[float, ...], int, torch.Tensor] | None = None

    def __call__(self, inputs: Sequence[Any]) -> torch.Tensor:
        """Read the values: any thread may."""
        values = tuple([inputs[place].item() for place in self._places])
        stream = self._stream()
        last = self._last
        captures = self._capturing()
        if last is not None and last[0] == values and last[1] == stream and not captures:
            return last[2]
        key = (stream, *map(repr, values))  # both zeros are equal, and NaN equals nothing
        with self._lock:
            if captures:
                return self._for_a_graph(key, values)
            vector = self._made.get(key)
            if vector is None:
                vector = self._made[key] = self._new(values)
                if len(self._made) > MOST:
                    del self._made[next(iter(self._made))]
            self._last = None if 0.0 in values else (values, stream, vector)
            return vector

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _new(self, values: Sequence[float]) -> torch.Tensor:
        """Made without a wait for the device."""
        on_gpu = self._device.type == "cuda"
        with _compat.disable_current_modes():
            host = torch.tensor(values, dtype=torch.float64, pin_memory=on_gpu)
            vector = host.to(self._device, non_blocking=True, copy=True)
        if on_gpu:
            sleeping.survives(vector, host)
        return vector

    def _for_a_graph(self, key: tuple[object, ...], values: Sequence[float]) -> torch.Tensor:
        """A vector for a graph that somebody captures: its values are there before, and it stays."""
        if key not in self._kept:
            vector = self._made.get(key)
            self._kept[key] = self._beside(values) if vector is None else vector
        return self._kept[key]

    def _beside(self, values: Sequence[float]) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(beside_captures())
            aside = torch.cuda.Stream(self._device)
            stack.enter_context(torch.cuda.stream(aside))
            vector = self._new(values)
            aside.synchronize()
        return vector


def _with_vector(run: Callable[[list[Any]], Any], vector: Vectors) -> Callable[[list[Any]], Any]:
    def supplied(inputs: list[Any]) -> Any:
        inputs.append(vector(inputs))
        return run(inputs)

    return supplied


def _with_outputs(
    run: Callable[[list[Any]], Any], positions: Sequence[int], home: GraphModule
) -> Callable[[list[Any]], Any]:
    compute = home.forward

    def completed(inputs: list[Any]) -> Any:
        with torch.no_grad():
            computed = compute(*inputs)  # first: the code clears what it is given
        outputs = list(run(inputs))
        for at, value in zip(positions, computed, strict=True):
            outputs[at] = value
        return tuple(outputs)

    return completed
