"""The structure of an FX graph: copied for each compile, freed of Dynamo's tracer, and what it holds.

A compiler changes the graph that it is given, so each compile gets a copy.  Invariant: no tensor is cloned.  A cloned
parameter whose address torch keeps is a wrong number after the first step of an optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from multigraph_backend import _compat

_KEPT_ATTRIBUTES = ("_param_name_to_source", "_backend_id", "compile_subgraph_reason")
_TRIES = 3  # such code is written once
KEPT_META = ("dynamo_compile_id", "dynamo_flat_name_to_original_fqn", "backend_id", "cudagraph_annotation")
_TRACER_META = ("example_value", "grapharg", "unbacked_bindings", "val")


def _shared_objects(gm: torch.fx.GraphModule) -> dict[int, Any]:
    """Deepcopy's memo: what a copy of the structure must share."""
    memo: dict[int, Any] = {}
    for module in gm.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor | torch.ScriptObject) or type(value).__name__ == "ProcessGroup":
                memo[id(value)] = value
    return memo


def copy_structure(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    new = _deep_copy(gm)
    for old_node, node in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        # a copied node keeps its meta and loses its attributes
        if hasattr(old_node, "_dynamo_source"):
            node._dynamo_source = old_node._dynamo_source
        node.meta = dict(node.meta)
    for name in _KEPT_ATTRIBUTES:
        if name in vars(gm):
            setattr(new, name, vars(gm)[name])
    return new


def _deep_copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Once more where another thread, which runs the graph as it is for the first time, writes its code into it."""
    for _ in range(_TRIES):
        try:
            return copy.deepcopy(gm, _shared_objects(gm))
        except RuntimeError as error:
            if "changed size during iteration" not in str(error):
                raise
    return copy.deepcopy(gm, _shared_objects(gm))


def forget_tracer(gm: torch.fx.GraphModule) -> None:
    """Drop what holds the tracer: fake tensors, arguments, bindings.  Sources, stacks, static marks stay."""
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            held_tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
            for key in _TRACER_META:
                node.meta.pop(key, None)
            if "tensor_dict" in node.meta:
                static = node.meta["tensor_dict"].get("_dynamo_static_input_type")
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": static} if static else {}
            if held_tensor:
                node.meta["example_value"] = None  # AOTAutogradCache asks only whether the key is there


def graph_modules(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """`gm` and the bodies of its higher-order operators."""
    return (module for module in gm.modules() if isinstance(module, torch.fx.GraphModule))


def with_paths_alone(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same, which is a copy, with modules that nodes were traced in by their paths: their classes are the program's
    own, and cannot be sent to other processes.  Rules for saved tensors and blocks that come again go by paths."""
    known: dict[tuple[tuple[str, str], ...], dict[str, tuple[str, type]]] = {}  # equal ones are pickled once
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                paths = tuple((str(key), str(entry[0])) for key, entry in stack.items())
                told = known.setdefault(paths, {key: (path, torch.nn.Module) for key, path in paths})
                node.meta = {**node.meta, "nn_module_stack": told}
    return gm


def uses_gpu(gm: torch.fx.GraphModule) -> bool:
    """Whether anything that it holds, or computes as far as its nodes tell, is on a GPU."""
    values = [*gm.parameters(), *gm.buffers(), *(node.meta.get("example_value") for node in gm.graph.nodes)]
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)


def held_tensors(gm: torch.fx.GraphModule) -> dict[torch.Tensor, list[torch.fx.Node]]:
    """Tensors that are attributes of the graph's modules, with the nodes that take them; in order."""
    found: dict[torch.Tensor, list[torch.fx.Node]] = {}  # tensors are equal as keys where they are the same
    for module in graph_modules(gm):
        for node in module.graph.find_nodes(op="get_attr"):
            value: Any = module
            for name in str(node.target).split("."):
                value = getattr(value, name, None)
            if isinstance(value, torch.Tensor):
                found.setdefault(value, []).append(node)
    return found


def made_of(wrapper: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that a subclass is made of, and what these are made of, with the paths to them (`inner.scale`)."""
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        yield name, inner
        if isinstance(inner, torch.Tensor) and _compat.is_traceable_wrapper_subclass(inner):
            yield from ((f"{name}.{below}", part) for below, part in made_of(inner))


def plain_parts(wrapper: Any) -> list[str]:
    """The paths to the plain tensors that a subclass is made of in the end, in AOTAutograd's order."""
    return [path for path, part in made_of(wrapper) if isinstance(part, torch.Tensor) and not is_wrapper(part)]


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor that is made of others."""
    return isinstance(value, torch.Tensor) and bool(_compat.is_traceable_wrapper_subclass(value))
