"""Functions that torch decomposes wrongly before a compiler sees them: put right in the graph that Dynamo captured.

    multilabel_margin_loss(x, [[3, -1, 0]])     decomposed: labels behind the -1 count as label 0

Seen up to torch 2.13, gone in 2.15.  AOTAutograd decomposes when it traces, so this has to come before it, and it is
for every compiler.  What is put in is a composition of torch's own functions, by which AOTAutograd's cache knows it,
and whose gradients are eager's.

In: a captured graph that is to be compiled.  Out: the same graph, changed in place where it calls such a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from multigraph_backend import _compat


def put_right(gm: torch.fx.GraphModule) -> None:
    """Change `gm` and the graphs that it calls."""
    for module in gm.modules() if _compat.DECOMPOSES_WRONGLY else ():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for target, right in _RIGHT.items():
            for node in list(module.graph.find_nodes(op="call_function", target=target)):
                _replace(module, node, right)


def _replace(gm: torch.fx.GraphModule, node: torch.fx.Node, right: Callable[..., Any]) -> None:
    def put(target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        with gm.graph.inserting_before(node):
            return gm.graph.call_function(target, args)

    made = right(put, *node.args, **node.kwargs)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    gm.graph.erase_node(node)
    gm.recompile()


def _softshrink(put: Callable[..., Any], input: Any, lambd: Any = 0.5) -> Any:
    """NaN of NaN, not 0.  Its gradient is 0 there, as it is in most of eager's kernels."""
    return put(torch.where, put(torch.isnan, input), math.nan, put(functional.softshrink, input, lambd))


def _multilabel_margin_loss(
    put: Callable[..., Any],
    input: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Labels end at the first that is negative; what they are short of the margin counts against all other classes."""
    counted = put(torch.cumprod, put(torch.ge, target, 0), -1)
    label = put(torch.mul, target, counted)
    is_label = put(torch.gt, put(torch.scatter_add, put(torch.zeros_like, target), -1, label, counted), 0)
    of_label = put(torch.unsqueeze, put(torch.gather, input, -1, label), -1)
    short = put(torch.sub, put(torch.add, put(torch.unsqueeze, input, -2), 1), of_label)
    others = put(torch.logical_not, put(torch.unsqueeze, is_label, -2))
    pairs = put(torch.logical_and, put(torch.unsqueeze, counted, -1), others)
    counts = put(torch.logical_and, pairs, put(torch.gt, short, 0))
    losses = put(torch.mean, put(torch.sum, put(torch.where, counts, short, 0), -2), -1)
    if size_average is not None or reduce is not None:  # how it was said before `reduction`
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    return losses if reduction == "none" else put(torch.sum if reduction == "sum" else torch.mean, losses)


_RIGHT: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.multilabel_margin_loss: _multilabel_margin_loss,
    functional.softshrink: _softshrink,
}
