"""The order of a graph that changes its inputs in place: no change runs before a read of the old values.

The change, `copy_(input, new values)`, may be fused with a read of old values at other places (`x[1:] = x.flip(0)[1:]`;
seen in torch 2.11, 2.13 and 2.15, pytorch issues 198270 and 198280), and up to torch 2.12 also run before kernels that
read old values for something else.  `compile_in_order` takes such a change out of the graph: it returns the new values,
and they are copied afterwards.  Caches, states and statistics that are written, or updated in place, stay in the graph.

In: a graph that Inductor compiles.  Out: the same contract as Inductor's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cache.revived import compile_by_inductor
from multigraph_backend.lower.changes import changes_of, is_view

InnerCompile = Callable[..., Any]


def compile_in_order(
    inner: InnerCompile | None, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Any:
    """Inductor's compile of one graph, in which no change of an input runs before a read of its old values."""
    compile_inner = inner or compile_by_inductor
    moved = {
        changed: writes
        for changed, writes in changes_of(gm).items()
        if reads_elsewhere(changed, writes) or (_compat.INDUCTOR_CHANGES_EARLY and outlives(changed, writes))
    }
    if not moved:
        return compile_inner(gm, example_inputs, **settings)
    targets, count = _take_out(gm, moved)
    code = compile_inner(gm, example_inputs, **settings)
    context = _compat.TracingContext.try_get()
    if context is not None and context.output_strides:  # AOTAutograd counts from both ends
        del context.output_strides[count:]

    return ChangesLast(code, targets, count)


_OutputCode: Any = object if _compat.missing("cudagraphs") else _compat.OutputCode


class ChangesLast(_OutputCode):  # type: ignore[misc]
    """Code that returns new values of inputs behind its `count` outputs, copied to the inputs `targets` at last.

    AOTAutograd keeps it in no cache: it has no key of Inductor's, by which `code` alone would be found, and it refuses
    to be serialized.  The attribute of the key is absent, and not None: AOTAutograd of torch 2.11 only asks whether it
    is there.
    """

    def __init__(self, code: Any, targets: Sequence[int], count: int) -> None:
        self.code, self.targets, self.count = code, targets, count
        self._boxed_call = True

    @property
    def _fx_graph_cache_key(self) -> str:
        raise AttributeError("_fx_graph_cache_key")

    def __call__(self, args: list[Any]) -> Any:
        changed = [args[index] for index in self.targets]
        outputs = self.code(args)
        for target, new in zip(changed, outputs[self.count :], strict=True):
            target.data.copy_(new)  # the version counter is AOTAutograd's business, as for a change in the graph
        return outputs[: self.count]

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        raise AssertionError("code that is in no cache was loaded from one")

    def prepare_for_serialization(self) -> None:
        raise _compat.BypassAOTAutogradCache("changes of inputs that come last are not cached")  # torch warns of others

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        self.code.set_triton_bundle(triton_bundle)


def _take_out(
    gm: torch.fx.GraphModule, moved: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]
) -> tuple[list[int], int]:
    """Return new values instead of writing them: positions of the inputs, and how many outputs there were."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    results: Any = output.args[0]
    values = []
    for writes in moved.values():
        new: Any = writes[-1].args[1]
        if new.op == "placeholder" or is_view(new):  # memory that a copy of another new value might change
            with gm.graph.inserting_before(output):
                apart = gm.graph.call_function(torch.ops.aten.clone.default, (new,))
            apart.meta.update(new.meta)
            new = apart
        values.append(new)
    output.args = ((*results, *values),)
    for writes in moved.values():
        for write in reversed(writes):
            write.replace_all_uses_with(write.args[1])  # type: ignore[arg-type]
            gm.graph.erase_node(write)
    gm.recompile()
    return [placeholders.index(changed) for changed in moved], len(results)


def outlives(changed: torch.fx.Node, writes: Sequence[torch.fx.Node]) -> bool:
    """Whether old values of `changed` are needed for anything else than its new ones."""
    needed = _ancestors(writes)
    new = {write.args[1] for write in writes}
    waiting, seen = [changed], {changed}
    while waiting:
        for user in waiting.pop().users:
            if user not in needed:
                return True
            if user not in seen and user not in new:
                seen.add(user)
                waiting.append(user)
    return False


# views that keep the order of the elements
_LINEAR = {
    getattr(torch.ops.aten, name).default
    for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias")
    if hasattr(torch.ops.aten, name)
} | {torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}
_PARTS = {torch.ops.aten.slice.Tensor: 4, torch.ops.aten.select.int: 3}  # and how many arguments say which part
_PUT_BACK = {torch.ops.aten.slice_scatter.default: torch.ops.aten.slice.Tensor,
             torch.ops.aten.select_scatter.default: torch.ops.aten.select.int}  # fmt: skip
_WRITE_INTO = {
    "index_put", "_unsafe_index_put", "index_copy", "index_fill", "index_add", "scatter", "scatter_add",
    "scatter_reduce", "masked_fill", "masked_scatter", "fill", "copy", "zero",
}  # fmt: skip
_MADE_FIRST = {  # kernels of their own, or loops that end before anything that needs their result begins
    "sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all", "argmax", "argmin", "max", "min",
    "linalg_vector_norm", "mm", "addmm", "bmm", "baddbmm", "convolution", "native_layer_norm", "native_batch_norm",
    "sym_size",
}  # fmt: skip


def reads_elsewhere(changed: torch.fx.Node, writes: Sequence[torch.fx.Node]) -> bool:
    """Whether a new value may be computed from old ones at other places.

    Follows the old values with the part of the input that they are in: a part that is read, changed element by element
    and put back where it was, or written over, is safe; so is what a kernel of its own makes first.  All else counts.
    """
    needed = _ancestors(writes)
    where: dict[Any, tuple[Any, ...]] = {changed: ()}
    for node in changed.graph.nodes:
        old = [entry for entry in node.all_input_nodes if entry in where]
        if not old or node not in needed or node in writes:
            continue
        target = node.target
        name = getattr(getattr(target, "overloadpacket", None), "__name__", "")
        places = {where[entry] for entry in old}
        if target in _LINEAR:
            where[node] = where[old[0]]
        elif target in _PARTS:
            where[node] = (*where[old[0]], (target, _part(node.args[1:], _PARTS[target])))
        elif target is torch.ops.aten.index.Tensor and old == [node.args[0]]:
            where[node] = (*where[old[0]], (target, str(node.args[1])))
        elif target in _PUT_BACK:
            whole, part = node.args[0], node.args[1]
            if whole not in where:
                return True
            read = _PUT_BACK[target]
            if part in where and where[part] != (*where[whole], (read, _part(node.args[2:], _PARTS[read]))):
                return True
            where[node] = where[whole]
        elif name in _WRITE_INTO and node.args[0] in where:
            inside = where[node.args[0]]
            if name != "copy":
                inside = (*inside, (torch.ops.aten.index.Tensor, str(node.args[1:2] and node.args[1])))
            if any(entry is not node.args[0] and where[entry] != inside for entry in old):
                return True
            where[node] = where[node.args[0]]
        elif torch.Tag.pointwise in getattr(target, "tags", ()):
            if len(places) > 1 or len({_shape(entry) for entry in (*old, node)}) > 1:
                return True
            where[node] = places.pop()
        elif name not in _MADE_FIRST or places != {()}:
            return True
    return any(where.get(write.args[1], ()) != () for write in writes)


def _part(arguments: Sequence[Any], most: int) -> tuple[str, ...]:
    """Which part, with the defaults of `slice` and `select` filled in."""
    default = (0, None, None, 1) if most == 4 else (0, 0, None)
    said = [given if given is not None else default[index] for index, given in enumerate(arguments[:most])]
    filled = [*said, *default[len(said) : most]]
    whole_end = 2**63 - 1
    return tuple(str(whole_end if index == 2 and value is None else value or 0) for index, value in enumerate(filled))


def _shape(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else ""


def _ancestors(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    seen: set[torch.fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(node.all_input_nodes)
    return seen
