"""Partitioned graphs of small training programs, packed or not, without Inductor: fast, and run as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition

from multigraph_backend.saved_tensors import account
from multigraph_backend.saved_tensors.account import SavedTensors
from multigraph_backend.saved_tensors.budget import Budget
from multigraph_backend.saved_tensors.graphs import Partition
from multigraph_backend.saved_tensors.partitioner import pack_saved_tensors
from multigraph_backend.saved_tensors.reckoning import Reckoned
from multigraph_backend.saved_tensors.rules import Match, Pack, Rule


@dataclass
class Partitioned:
    """A function that runs packed graphs, the graphs, and the account of them."""

    run: Callable[..., Any]
    forward: list[torch.fx.GraphModule] = field(default_factory=list)
    backward: list[torch.fx.GraphModule] = field(default_factory=list)
    accounts: list[SavedTensors] = field(default_factory=list)


def everything(pack: Pack) -> list[Rule]:
    """One rule for all intermediate numbers, however small."""
    return [Rule(Match(min_bytes=0), pack)]


def partition(
    function: Callable[..., Any],
    rules: Sequence[Rule],
    dynamic: bool = False,
    wanted: Budget | Reckoned | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Partitioned:
    """`function`, whose saved tensors are packed by `rules` once it is called."""

    def parts(gm: torch.fx.GraphModule, joint_inputs: Sequence[Any], **settings: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **settings)
        with account.collecting() as found:
            static = settings.get("static_lifetime_input_indices") or ()
            graphs = Partition(forward, backward, settings["num_fwd_outputs"], static)
            graphs = pack_saved_tensors(graphs, rules, wanted)
        result.accounts += found
        return graphs.forward, graphs.backward

    def keep(into: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            into.append(gm)
            return make_boxed_func(gm.forward)

        return compiler

    result = Partitioned(function)
    result.run = aot_function(
        function,
        keep(result.forward),
        keep(result.backward),
        partition_fn=parts,
        dynamic=dynamic,
        decompositions=None if decompositions is None else dict(decompositions),
    )
    return result


def gradients(function: Callable[..., Any], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients of the arguments, for a random cotangent."""
    inputs = [arg.detach().clone().requires_grad_(arg.is_floating_point()) for arg in args]
    out = function(*inputs)
    generator = torch.Generator().manual_seed(0)
    out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
    return (out.detach(), *(value.grad for value in inputs if value.grad is not None))


def text(gm: torch.fx.GraphModule) -> str:
    """The operations of a graph, one a line, for reading."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: input")
        elif node.op == "output":
            lines.append(f"return {', '.join(map(str, node.args[0]))}")
        else:
            name = str(node.target).split(".")[-2 if "." in str(node.target) else 0]
            if node.op == "get_attr":
                name = "constant"
            elif not hasattr(node.target, "overloadpacket"):
                name = node.target.__name__
            lines.append(f"{node.name} = {name}({', '.join(map(str, node.args))})")
    return "\n".join(lines) + "\n"
