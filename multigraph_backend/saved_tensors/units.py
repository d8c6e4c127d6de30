"""One buffer that is to be packed, and how: what `choosing`, `tracing` and all that comes after hand on.

In: nodes of a partitioned forward graph.  Out: plain data over them.

Invariant: nothing here reads or changes a graph, but for the sizes of what was traced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from multigraph_backend.saved_tensors import graphs
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.products import Product
from multigraph_backend.saved_tensors.rules import Bits, Cast, Described, Offload, Recompute, Scaled


@dataclass(frozen=True)
class Unit:
    """One buffer to pack: `source` is the forward node whose value is packed, `members` the saved views of it.

    `held`: who else may hold its memory.  `products`: steps of the backward that multiply what is saved; `alone`: why
    there are none although its rule asks for them.
    """

    source: Node
    members: tuple[Node, ...]
    described: Described
    pack: Cast | Scaled | Bits | Offload | Recompute | SavedHook
    rule: str
    held: str | None = None
    products: tuple[Product, ...] = ()
    alone: str | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def exact(self) -> bool:
        """Whether the backward sees the very values."""
        inside = self.pack.pack if isinstance(self.pack, Offload) else self.pack
        return inside is None or isinstance(inside, Bits | Recompute)


@dataclass(frozen=True)
class Kept:
    """A saved tensor that stays as it is."""

    node: Node
    described: Described
    reason: str


class CannotPack(Exception):
    """A unit is kept as it is, because of this."""


@dataclass(frozen=True)
class Traced:
    """A unit with its pack and its unpack as graphs.

    `pack`: one placeholder, the source, and the distinct tensors to save as outputs.  `unpack`: as placeholders these
    and then the inputs `inputs` of the backward graph, and as outputs the members of the unit, in order.  What is
    unpacked needs symbolic numbers of the backward at the most; what is computed again needs tensors of it too.
    """

    unit: Unit
    pack: GraphModule
    unpack: GraphModule
    saved: tuple[torch.Tensor, ...]
    inputs: tuple[Node, ...]

    @property
    def computed_from(self) -> tuple[Node, ...]:
        """The inputs of the backward that it is computed again from; none where it is unpacked."""
        return self.inputs if isinstance(self.unit.pack, Recompute) else ()

    @property
    def saved_bytes(self) -> int:
        """On the device."""
        return self._bytes(on_host=False)

    @property
    def host_bytes(self) -> int:
        """On the host, of what was offloaded."""
        return self._bytes(on_host=True)

    def _bytes(self, on_host: bool) -> int:
        made = dict.fromkeys(node for node in graphs.results(self.pack.graph) if isinstance(node, Node))
        values = [graphs.tensor(node) for node in made if graphs.on_host(node) == on_host]
        return sum(graphs.tensor_bytes(value) for value in values if value is not None)

    @property
    def cheap(self) -> bool:
        """Whether unpacking twice costs next to nothing: a few operations, element by element."""
        made = [node for node in self.unpack.graph.nodes if node.op == "call_function" and graphs.viewed(node) is None]
        plain = all(graphs.elementwise(node) for node in made)
        return plain and len(made) <= 6 and not self.unpack.graph.find_nodes(op="get_attr")
