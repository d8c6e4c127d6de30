"""Which operators a CUDA graph cannot hold, and why.

A recording repeats what the device was told to do and nothing else.  What runs on the CPU, waits for a value, decides
by one, or runs Python would happen once, when it is recorded, and never again: silently stale.  So a graph is cut
around it.

For example: `aten.sin` of a CUDA tensor runs a kernel, and a recording can hold it.  `aten._to_copy` to the CPU is "a
copy between devices", `aten.nonzero` is "a result that depends on data", `my::op` registered from Python is "an
operator in Python that is not declared safe".

In:  a node of an ATen graph, as AOTAutograd makes it, with example values in `meta["val"]`; the user's `CutRules`.
Out: the reason why a recording cannot hold it, or None.

Views are never cut: they run nothing.  A custom operator is taken for Python unless its kernel for the device is
registered in a compiled source file, or the user declares it safe; torch's own operators, also those written in Python,
are trusted as far as their tags go.
"""

from __future__ import annotations

import fnmatch
import functools
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.partition.graph_spec import Cut
from multigraph_backend.distributed import groups, sequence

LISTED = "the option 'cut'"
PYTHON = "an operator in Python that is not declared safe"
UNSAFE = "an operator tagged cudagraph_unsafe"
DATA = "a result that depends on data"
CONTROL = "control flow"
HIGHER_ORDER = "a higher-order operator"
COPY = "a copy between devices"
WAITS = "an operator that waits for the device"
SPARSE = "a sparse result"
TRANSFER = "a saved tensor on its way to the host or back"
CPU_OP = "cpu op"
COLLECTIVES = "the option 'collectives'"
SYMMETRIC = "a collective over memory that all ranks have registered, which they would have to record together"
APART = "a collective that is started in one place and waited for in another"

_OWN = frozenset((
    "aten", "prims", "prim", "inductor", "inductor_prims", "rngprims", "debugprims", "flex_lib", "flex_gemm",
    "quantized", "_quantized", "quantization", "quantized_decomposed", "_c10d_functional", "_c10d_functional_autograd",
    "c10d", "c10d_functional", "symm_mem", "_dtensor", "fsdp", "sparse", "mkl", "mkldnn", "onednn", "profiler",
    "streams", "mempool", "_native", "_native_aot",
))  # fmt: skip
_COMPILED = (".cpp", ".cc", ".cxx", ".c++", ".c", ".cu", ".hip", ".h", ".hpp", ".cuh", ".inc", ".inl")
_WAITING = frozenset((
    "aten::_linalg_eigh", "aten::_fused_moving_avg_obs_fq_helper",
    "aten::_fused_moving_avg_obs_fq_helper_functional", "fbgemm::dense_to_jagged", "fbgemm::jagged_to_padded_dense",
    "streams::synchronize_event", "streams::synchronize_device", "streams::synchronize_stream",
))  # fmt: skip
_CONTROL_FLOW = frozenset(("cond", "switch", "while_loop", "while_loop_stack_output", "map", "map_impl", "scan"))
_WRAPPING = {"auto_functionalized": 0, "auto_functionalized_v2": 0, "with_effects": 1}
_RECORDABLE = frozenset((
    "triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation", "flex_attention", "flex_attention_backward",
    "associative_scan", "invoke_subgraph", "graphsafe_run_with_rng_state", "inline_asm_elementwise", "control_deps",
))  # fmt: skip
_INDEX = frozenset(("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put"))
_COPIES = frozenset(("aten::_to_copy", "aten::copy", "aten::copy_", "prims::device_put"))


@dataclass(frozen=True)
class CutRules:
    """What the user says of operators, and what recordings are made on.

    cut, safe: names `namespace::op`, `namespace::op.overload`, the same with a dot for the colons, or globs of these;
        `cut` wins
    device_type: tensors of this type are recordable; "cpu" stands for the simulated device
    collectives: "record", or "cut": no recording holds any
    backends: backends of process groups whose collectives can be recorded
    """

    cut: frozenset[str] = frozenset()
    safe: frozenset[str] = frozenset()
    device_type: str = "cuda"
    collectives: str = "record"
    backends: frozenset[str] = groups.RECORDABLE


def unsupported(node: Node, rules: CutRules) -> str | None:
    """Why a recording cannot hold `node`, None if it can."""
    if node.op != "call_function" or is_view(node):
        return None
    op = operator_of(node)
    if op is None:  # arithmetic on sizes, and parts of results, run nothing
        return None if node.target is operator.getitem or not has_tensors(node.meta.get("val")) else PYTHON
    if _communicates(op):
        return _off_device(node, rules.device_type) or _by_collectives(node, rules)
    if _named(op, rules.cut):
        return LISTED
    if op.namespace == "multigraph":
        return TRANSFER
    return (
        _off_device(node, rules.device_type)
        or _by_data(node)
        or _by_operator(node, op, rules)
        or _by_subgraph(node, rules)
    )


def cuts_of(gm: GraphModule, rules: CutRules) -> tuple[Cut, ...]:
    """One cut per operator that recordings cannot hold, with the user's line that it comes from."""
    return tuple(
        Cut(reason, (shown(node),), node.meta.get("stack_trace"))
        for node in gm.graph.nodes
        if (reason := unsupported(node, rules)) is not None
    )


def operators_never_recorded(gm: GraphModule, rules: CutRules) -> dict[Any, str]:
    """Operators of the graph and its subgraphs that no recording can hold on whatever inputs, with the reason."""
    found: dict[Any, str] = {}
    for node in gm.graph.nodes:
        op, reason = operator_of(node), unsupported(node, rules)
        if reason is not None and _communicates(op) and isinstance(op, _compat.OpOverload):
            if _off_device(node, rules.device_type) is None:
                found.update((variant, reason) for variant in _in_any_form(op))
        elif isinstance(op, _compat.OpOverload) and reason in (LISTED, PYTHON, UNSAFE, WAITS, TRANSFER):
            found[op] = reason
            found.update((variant, reason) for variant in _out_variants(op, rules, reason == LISTED))
        for subgraph in subgraphs(node):
            found.update(operators_never_recorded(subgraph, rules))
    return found


def shown(node: Node) -> str:
    """The operator's name for messages."""
    op = operator_of(node)
    if op is None:
        return getattr(node.target, "__name__", str(node.target))
    return _names(op)[-1].removesuffix(".default")


def is_view(node: Node) -> bool:
    """Whether the node only looks at memory of its inputs in another way."""
    return isinstance(node.target, _compat.OpOverload) and bool(node.target.is_view)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an example value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def has_tensors(value: Any) -> bool:
    return next(tensors(value), None) is not None


def operator_of(node: Node) -> Any:
    """The operator that the node runs, an `OpOverload` or a higher-order one; None for plain Python functions."""
    op: Any = node.target
    if isinstance(op, _compat.HigherOrderOperator) and op.name() in _WRAPPING:
        wrapped: Any = node.args[_WRAPPING[op.name()]]
        op = wrapped if isinstance(wrapped, _compat.OpOverload | _compat.HigherOrderOperator) else op
    return op if isinstance(op, _compat.OpOverload | _compat.HigherOrderOperator) else None


# ---------------------------------------------------------------- collectives


def _communicates(op: Any) -> bool:
    return isinstance(op, _compat.OpOverload) and (sequence.issues(op.name()) or sequence.waits(op.name()))


def _by_collectives(node: Node, rules: CutRules) -> str | None:
    """Why a collective, or a wait for one, cannot be recorded.  One for all of a graph: who waits for which cannot be
    told by the operator alone, and a wait in a recording for what was started outside of it is an error."""
    for other in node.graph.nodes:
        op = operator_of(other) if other.op == "call_function" else None
        if op is not None and _communicates(op) and (reason := _collective_reason(other, op, rules)) is not None:
            return reason
    return None


def _collective_reason(node: Node, op: Any, rules: CutRules) -> str | None:
    if _named(op, rules.cut):
        return LISTED
    if not sequence.issues(op.name()):
        return None
    if rules.collectives == "cut":
        return COLLECTIVES
    if op.namespace == sequence.SYMMETRIC:
        return SYMMETRIC
    if (hook := groups.registered_buffers()) is not None:
        return f"{SYMMETRIC} ({hook})"
    if (reason := groups.growing_ranges()) is not None:
        return reason
    for collective in sequence.of_nodes([node]):
        backend = groups.backend_of(collective.group, rules.device_type)
        if backend is None:
            return f"a collective of group {collective.group!r}, which serves no {rules.device_type} tensors here"
        if backend not in rules.backends:
            return f"a collective over {backend}, which no recording can hold"
    return None


def _in_any_form(op: Any) -> Iterator[Any]:
    """`op`, and the forms of it that Inductor may call in its place: in place, into a tensor given."""
    library = getattr(torch.ops, op.namespace)
    base = op.name().split("::")[1].split(".")[0]
    for name in (base, f"{base}_", f"{base}_out"):
        packet = getattr(library, name, None)
        for overload in packet.overloads() if packet is not None else ():
            yield getattr(packet, overload)


# ---------------------------------------------------------------- reasons


def _off_device(node: Node, device_type: str) -> str | None:
    result = node.meta.get("val")
    if result is not None and not has_tensors(result):
        return None  # a size, or another number
    values = [value for arg in (*node.all_input_nodes, node) for value in tensors(arg.meta.get("val"))]
    devices = {value.device for value in values if value.device.type != "meta"}
    others = sorted({device.type for device in devices if device.type != device_type})
    if len(devices) > 1 and (not others or _base_name(operator_of(node)) in _COPIES):
        return COPY
    if not others:
        return None
    return f"{others[0]} op" if len(devices) == len(others) else f"an input on the {others[0]}"


def _by_data(node: Node) -> str | None:
    if node.meta.get("unbacked_bindings"):
        return DATA
    if any(value.layout != torch.strided for value in tensors(node.meta.get("val"))):
        return SPARSE
    return None


def _by_operator(node: Node, op: Any, rules: CutRules) -> str | None:
    if isinstance(op, _compat.HigherOrderOperator):
        name = op.name()
        if name in _CONTROL_FLOW:
            return CONTROL
        return None if name in _RECORDABLE or name in _WRAPPING else HIGHER_ORDER
    tags = set(op.tags)
    indexes = _base_name(op) in _INDEX  # its result is of a size that depends on data where a mask chooses
    if tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} and not indexes:
        return DATA
    if getattr(torch.Tag, "cudagraph_unsafe", None) in tags:
        return UNSAFE
    if _base_name(op) in _WAITING:
        return WAITS
    if indexes and _has_mask(node):
        return DATA
    if op.namespace not in _OWN and not _named(op, rules.safe) and not compiled(op, rules.device_type):
        return PYTHON
    return None


def _has_mask(node: Node) -> bool:
    """Whether elements are chosen by a mask, so that how many there are depends on it."""
    indices: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("indices")
    found = [value for index in indices or () if isinstance(index, Node) for value in tensors(index.meta.get("val"))]
    return any(value.dtype in (torch.bool, torch.uint8) for value in found)


def _by_subgraph(node: Node, rules: CutRules) -> str | None:
    for subgraph in subgraphs(node):
        for inner in subgraph.graph.nodes:
            reason = unsupported(inner, rules)
            if reason is not None:
                return f"{reason} ({shown(inner)})"
    return None


def subgraphs(node: Node) -> Iterator[GraphModule]:
    """The graphs that a node is given to call."""
    owner = node.graph.owning_module
    for arg in node.all_input_nodes if owner is not None else ():
        if arg.op == "get_attr":
            value = functools.reduce(lambda at, part: getattr(at, part, None), str(arg.target).split("."), owner)
            if isinstance(value, GraphModule):
                yield value


# ---------------------------------------------------------------- operators


@functools.cache
def compiled(op: Any, device_type: str) -> bool:
    """Whether what the dispatcher calls on `device_type` is known to come from a compiled source file.

    The dispatcher names, for each kernel, the file that registered it: one of Python's for `torch.library`, in all its
    forms.  Where nothing clear is said, the answer is no.
    """
    table: str = _compat.dispatch_table(op.name())
    found = re.search(
        rf"^{device_type.upper()}: registered (?:at (.*):\d+|by RegisterOperators) \[", table, re.MULTILINE
    )
    return found is not None and (found[1] or ".cpp").lower().endswith(_COMPILED)


def _out_variants(op: Any, rules: CutRules, listed: bool) -> Iterator[Any]:
    """What Inductor may call in place of a custom operator, from torch 2.13 on: overloads that fill a tensor given."""
    tag = getattr(torch.Tag, "out", None)
    for name in op.overloadpacket.overloads() if tag is not None and op.namespace not in _OWN else ():
        other = getattr(op.overloadpacket, name)
        if tag in other.tags and (listed or not (_named(other, rules.safe) or compiled(other, rules.device_type))):
            yield other


def _base_name(op: Any) -> str:
    return str(op.name()).split(".")[0] if op is not None else ""


def _names(op: Any) -> tuple[str, ...]:
    """What the user may call an operator; the last one is as Python writes it."""
    if isinstance(op, _compat.HigherOrderOperator):
        name = op.name()
        return name, f"higher_order::{name}", f"higher_order.{name}"
    base = _base_name(op)
    full = f"{base}.{op._overloadname}"
    return base, full, base.replace("::", "."), full.replace("::", ".")


def _named(op: Any, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in _names(op))
