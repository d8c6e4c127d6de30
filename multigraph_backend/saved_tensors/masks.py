"""Which values of a forward graph are masks of attention: what is added to its weights, -inf where nothing is seen.

    mask = where(causal, 0.0, -inf)                               saved for attention's backward, which adds it again
    y, logsumexp = scaled_dot_product(q, k, v, attn_mask=mask)

A pack that scales, or one to fp8, knows no infinities: a mask that went through it would make each gradient NaN. So
masks have a role of their own, and are kept unless a rule names it.

In: a partitioned forward graph, with the subgraphs that it calls.  Out: its nodes that attention takes for a mask; of
views of one memory, the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import GraphModule, Node

from multigraph_backend.saved_tensors import graphs

_ARGUMENTS = ("attn_mask", "attn_bias", "bias")


def of(forward: GraphModule) -> set[Node]:
    found: set[Node] = set()
    for node in forward.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and ("attention" in schema.name or "attn" in schema.name):
            given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
            found.update(mask for name in _ARGUMENTS if isinstance(mask := given.get(name), Node))
        elif (called := graphs.subgraph_of(forward, node)) is not None:
            found.update(_handed_in(*called))
    return found


def _handed_in(inside: GraphModule, operands: Sequence[object]) -> Iterator[Node]:
    """What a subgraph is given that is a mask there."""
    masks = {graphs.root(node) for node in of(inside)}
    for placeholder, operand in zip(inside.graph.find_nodes(op="placeholder"), operands, strict=False):
        if placeholder in masks and isinstance(operand, Node):
            yield operand
