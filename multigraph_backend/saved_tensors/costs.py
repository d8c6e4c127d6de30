"""Estimated seconds of the steps of a graph, to compare ways with each other and to begin copies in time.

In: an FX graph with fake values.  Out: seconds for each node, from how many bytes it reads and writes and how many
multiplications it does, for a machine of the kind that its tensors are on.

The figures of machines are round numbers, and what is chosen by them depends on their ratios.  A figure that is wrong
makes a step slower or larger, never its result wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from multigraph_backend import _compat
from multigraph_backend.saved_tensors import graphs

_UNKNOWN_SIZE = 4096


@dataclass(frozen=True)
class Machine:
    """Bytes of memory and operations (two for a multiplication that is added) in a second."""

    bytes_per_second: float
    narrow: float  # with 16 bits and fewer
    wide: float


MACHINES: Mapping[str, Machine] = {
    "cuda": Machine(2.5e12, 5e14, 1e14),
    "cpu": Machine(2e10, 1e11, 1e11),
}
#: no machine of today is faster than this
FASTEST: Mapping[str, Machine] = {
    "cuda": Machine(5e12, 9e14, 4e14),
    "cpu": Machine(2e11, 2e12, 2e12),
}


def machine_of(device: torch.device) -> Machine:
    return MACHINES.get(device.type, MACHINES["cuda"])


def seconds_of(graph: Graph, machine: Machine | None = None) -> dict[str, float]:
    """Seconds of each node, by its name; what runs nothing takes none.  `machine`: one that was measured."""
    return {node.name: seconds(node, machine) for node in graph.nodes}


def least_seconds_of(graph: Graph) -> dict[str, float]:
    """Seconds of each node, by its name, at the least: on a fast machine, what is element by element fused.

    For copies beside the steps: one that begins too early only takes memory, one that begins too late holds
    everything up.  What a compiler fuses moves no bytes: only what it reads from other kinds of steps counts, and what
    it gives to them.
    """
    return {node.name: _least_seconds(node) for node in graph.nodes}


def _least_seconds(node: Node) -> float:
    value = graphs.tensor(node)
    if node.op != "call_function" or graphs.viewed(node) is not None:
        return 0.0
    device = next((read.device for entry in (node, *node.all_input_nodes)
                   if (read := graphs.tensor(entry)) is not None), None)  # fmt: skip
    if device is None:
        return 0.0
    machine = FASTEST.get(device.type, FASTEST["cuda"])
    moved = 0
    if value is not None and graphs.elementwise(node):
        made = [entry for entry in node.all_input_nodes if not graphs.elementwise(graphs.root(entry))]
        moved += sum(map(_bytes, made))
        moved += 0 if all(graphs.elementwise(user) for user in node.users) else _bytes(node)
    else:
        moved += _bytes(node) + sum(map(_bytes, node.all_input_nodes))
    narrow = value is None or value.dtype.itemsize <= 2
    return max(moved / machine.bytes_per_second, operations(node) / (machine.narrow if narrow else machine.wide))


def _bytes(node: Node) -> int:
    value = graphs.tensor(node)
    return 0 if value is None or graphs.on_host(node) else graphs.tensor_bytes(value)


def seconds(node: Node, machine: Machine | None = None) -> float:
    """Of one operation: the longer of its work and its memory; on `machine`, or one of its device's kind."""
    value = graphs.tensor(node)
    if node.op != "call_function" or value is None or graphs.viewed(node) is not None:
        return 0.0
    machine = machine or machine_of(value.device)
    moved = graphs.tensor_bytes(value)
    moved += sum(graphs.tensor_bytes(read) for entry in node.all_input_nodes
                 if (read := graphs.tensor(entry)) is not None)  # fmt: skip
    speed = machine.narrow if value.dtype.itemsize <= 2 else machine.wide
    return max(moved / machine.bytes_per_second, operations(node) / speed)


def operations(node: Node) -> float:
    """Of matmuls, convolutions and attention; 0 for all else."""
    packet = getattr(node.target, "overloadpacket", None)
    count: Any = flop_registry.get(packet)
    if count is None:
        return 0.0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _sized)
    try:
        found = float(count(*args, **kwargs, out_val=_sized(node)))
    except Exception:  # it is an estimate: a form of the operator that torch cannot count is as long as its memory
        return 0.0
    return found if math.isfinite(found) else 0.0


def _sized(node: Node) -> Any:
    """A tensor without memory, of the size at hand."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes = [_compat.hint(size, _UNKNOWN_SIZE) for size in value.shape]
        return torch.empty(sizes, dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return [
            torch.empty([_compat.hint(size, _UNKNOWN_SIZE) for size in part.shape], dtype=part.dtype, device="meta")
            for part in value
            if isinstance(part, torch.Tensor)
        ]
    return value
