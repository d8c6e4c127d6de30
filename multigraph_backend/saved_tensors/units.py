"""Units with their packs traced, each kind of them once.

In: units as `choosing` finds them, both graphs.  Out: a `Traced` for each, or `CannotPack` with the reason.

Invariant: what is traced here can be carried out on the two graphs, alone and together with what else was traced,
where a unit that is computed again leans on none of the others, or is carried out before those that it leans on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from multigraph_backend.saved_tensors import graphs, packs, recompute, tracing
from multigraph_backend.saved_tensors.choosing import Unit
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.rules import Offload, Recompute
from multigraph_backend.saved_tensors.tracing import CannotPack, Traced


class Tracer:
    """For one partition of a graph."""

    def __init__(self, backward: GraphModule) -> None:
        self._backward = backward
        self._placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        self._numbers = [node for node in self._placeholders.values() if isinstance(node.meta.get("val"), torch.SymInt)]
        self._computes_bytes = _computes_bytes(backward)
        self._known: dict[Hashable, Traced | CannotPack] = {}

    def trace(self, unit: Unit, taken: Collection[str] = ()) -> Traced:
        """`taken`: inputs of the backward that will be gone.  Raises CannotPack."""
        self._expect(unit)
        if isinstance(unit.pack, Recompute):
            return recompute.trace(unit, self._backward, taken)
        if isinstance(unit.pack, Offload) and self._computes_bytes:
            raise CannotPack("the backward computes bytes on the CPU, which may come to lie in its copy")
        attentions = self._into_attention(unit)
        if unit.described.role == "statistic" and any("cudnn" in name for name in attentions):
            raise CannotPack("cuDNN's attention takes it only where its own forward has put it")
        in_memory = bool(attentions)
        form = tracing.form(unit, in_memory)
        if form not in self._known:
            try:
                self._known[form] = self._first(unit, in_memory)
            except CannotPack as reason:
                self._known[form] = reason
        found = self._known[form]
        if isinstance(found, CannotPack):
            raise found
        return replace(found, unit=unit)

    def _expect(self, unit: Unit) -> None:
        """The backward graph takes each member by its name, and reads it."""
        for member in unit.members:
            if member.name not in self._placeholders:
                raise CannotPack("the backward graph does not take it by its name")
            if not self._placeholders[member.name].users:
                raise CannotPack("the backward graph does not read it")

    def _into_attention(self, unit: Unit) -> set[str]:
        """The backwards of attentions that read it.

        Inductor gives these operators tensors that lie otherwise than in its graph.  cuDNN's is then wrong: torch 2.11
        keeps its plans by how query, key and value lie, and not by how the output does that they were made for.
        """
        reached = [self._placeholders[member.name] for member in unit.members]
        found: set[str] = set()
        for node in reached:
            for user in node.users:
                if "attention" in str(user.target) and user.op == "call_function":
                    found.add(str(user.target))
                if graphs.viewed(user) is node:
                    reached.append(user)
        return found

    def _first(self, unit: Unit, in_memory: bool) -> Traced:
        value = graphs.tensor(unit.source)
        assert value is not None
        order = graphs.memory_order(value)
        assert order is not None
        assert not isinstance(unit.pack, Recompute)
        if isinstance(unit.pack, SavedHook):
            return tracing.trace(unit, unit.pack.pack, unit.pack.unpack, self._numbers, in_memory)
        found = packs.functions(unit.pack, value.permute(order.dims) if value.dim() else value)
        if isinstance(found, str):
            raise CannotPack(found)
        traced = tracing.trace(unit, *found, self._numbers, in_memory)
        if traced.saved_bytes >= unit.described.bytes:
            raise CannotPack(f"packed it would need {traced.saved_bytes} bytes of {unit.described.bytes}")
        return traced


def _computes_bytes(backward: GraphModule) -> bool:
    """Whether Inductor may take the memory of bytes on the host, once it is read, for something that it makes there."""
    made = [graphs.tensor(node) for node in backward.graph.nodes if node.op == "call_function"]
    return any(value is not None and value.dtype == torch.uint8 and value.device.type == "cpu" for value in made)


def anchors(traced: Traced) -> list[Node]:
    """The inputs of the backward that a unit leans on, besides what is saved for it."""
    return list(traced.numbers) if isinstance(traced.unit.pack, Recompute) else []
