"""Regions that a program marks (`torch.compiler.nested_compile_region`) have eager's gradients.

Stock's Inductor takes each result of a region for memory of its own.  Where the backward needs one of them, an argument
or a view, that is not so, and it gives wrong gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph, GraphModule
from torch.torch_version import TorchVersion

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.lower.nested_regions import hand_out_once


@torch.compiler.nested_compile_region
def saves_its_result(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).tanh()
    return y, y.sin()


@torch.compiler.nested_compile_region
def saves_views(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.linear(x, w.cos(), w[0] * 2)
    return x + (y.transpose(0, 1).sin() @ y).tanh() * y.square()


@torch.compiler.nested_compile_region
def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, z = saves_its_result(w, x)
    return y.cos() * z + saves_views(w, y)


@torch.compiler.nested_compile_region
def of_sizes(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ w).tanh() * x.shape[0]
    return y, y.reshape(-1).sin()


def chain_of(region: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def program(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            found = region(w, x)
            x = found[0] * found[1].reshape(found[0].shape) if isinstance(found, tuple) else found
        return x

    return program


def gradients(run: Callable[..., torch.Tensor], tensors: list[torch.Tensor], twice: bool = False) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = run(*leaves)
    result.square().sum().backward(retain_graph=twice)  # type: ignore[no-untyped-call]
    if twice:
        result.cos().sum().backward()  # type: ignore[no-untyped-call]
    return [result.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def drawn(rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, dtype=torch.float64) * 0.4


REGIONS = {
    "result": (saves_its_result, False),
    "result, the backward twice": (saves_its_result, True),
    "views": (saves_views, False),
}
# before torch 2.13 Inductor, stock's too, lowers no region inside of another that saves a view
if TorchVersion(torch.__version__) >= "2.13":
    REGIONS["regions inside, the backward twice"] = (outer, True)


@pytest.mark.parametrize(("region", "twice"), REGIONS.values(), ids=REGIONS)
def test_gradients_are_eagers(region: Callable[..., Any], twice: bool) -> None:
    program = chain_of(region)
    tensors = [drawn(6) for _ in range(4)]
    compiled = torch.compile(program, backend="multigraph", options={"on_failure": "raise"})
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled, tensors, twice), gradients(program, tensors, twice))
        tensors = [drawn(6) for _ in range(4)]
    assert multigraph_backend.stats()["eager_calls"] == 0


def test_gradients_are_eagers_for_all_sizes() -> None:
    program = chain_of(of_sizes)
    compiled = torch.compile(program, backend="multigraph", options={"on_failure": "raise"}, dynamic=True)
    for rows in (5, 3, 2, 1, 0):
        tensors = [drawn(rows), *(drawn(6) for _ in range(3))]
        torch.testing.assert_close(gradients(compiled, tensors), gradients(program, tensors))


def test_stock_gives_other_gradients() -> None:
    """The reason for all of this; where stock has mended it, `nested_regions` can go."""
    program = chain_of(saves_its_result)
    torch.manual_seed(0)
    tensors = [drawn(6) for _ in range(3)]
    expected, stock = gradients(program, tensors), gradients(torch.compile(program), tensors)
    assert max(float((one - other).abs().max()) for one, other in zip(expected, stock, strict=True)) > 0.01


def test_results_of_a_region_are_memory_of_their_own() -> None:
    inside = Graph()
    w, x = (inside.placeholder(name) for name in ("w", "x"))
    y = inside.call_function(torch.ops.aten.mm.default, (x, w))
    y_t = inside.call_function(torch.ops.aten.t.default, (y,))
    w_t = inside.call_function(torch.ops.aten.t.default, (w,))
    z = inside.call_function(torch.ops.aten.sin.default, (y,))
    inside.output((y, z, y, y_t, w_t, x, None))
    graph = Graph()
    a, b = (graph.placeholder(name) for name in ("a", "b"))
    region = graph.get_attr("region")
    call = graph.call_function(_compat.invoke_subgraph, (region, "name", a, b))
    parts = [graph.call_function(operator.getitem, (call, place)) for place in (0, 1, 2, 3, 4, 5)]
    graph.output(tuple(parts))
    for node in (w, x, y, y_t, w_t, z, a, b, *parts):
        node.meta["val"] = torch.empty(2, 2)
    call.meta["val"] = (*(torch.empty(2, 2) for _ in parts), None)
    gm = GraphModule(torch.nn.ModuleDict({"region": GraphModule(torch.nn.Module(), inside)}), graph)
    assert hand_out_once(gm)
    assert len(call.meta["val"]) == 3
    said = f"{gm.region.code}{gm.code}"
    lines = [line.split(";")[0].strip() for line in said.splitlines() if "=" in line or "return" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
mm_default = torch.ops.aten.mm.default(x, w)
t_default = torch.ops.aten.t.default(mm_default)
t_default_1 = torch.ops.aten.t.default(w)
sin_default = torch.ops.aten.sin.default(mm_default)
return (mm_default, sin_default, None)
region = self.region
invoke_subgraph = torch.ops.higher_order.invoke_subgraph(region, 'name', a, b)
getitem_6 = invoke_subgraph[0]
getitem_7 = invoke_subgraph[1]
getitem_8 = invoke_subgraph[0]
getitem_9 = invoke_subgraph[0]
t_default = torch.ops.aten.t.default(getitem_9)
t_default_1 = torch.ops.aten.t.default(a)
return (getitem_6, getitem_7, getitem_8, t_default, t_default_1, b)""",
    )


def test_a_view_by_more_than_constants_is_handed_out_as_a_copy() -> None:
    """Also where nothing else of a region is rewritten."""
    inside = Graph()
    x, rows = (inside.placeholder(name) for name in ("x", "rows"))
    y = inside.call_function(torch.ops.aten.sin.default, (x,))
    some = inside.call_function(torch.ops.aten.slice.Tensor, (y, 0, 0, rows))
    inside.output((some,))
    graph = Graph()
    a, number = (graph.placeholder(name) for name in ("a", "number"))
    call = graph.call_function(_compat.invoke_subgraph, (graph.get_attr("region"), "name", a, number))
    part = graph.call_function(operator.getitem, (call, 0))
    graph.output((part,))
    for node in (x, y, some, a, part):
        node.meta["val"] = torch.empty(2, 2)
    call.meta["val"] = (torch.empty(2, 2),)
    gm = GraphModule(torch.nn.ModuleDict({"region": GraphModule(torch.nn.Module(), inside)}), graph)
    assert hand_out_once(gm)
    (handed_out,) = gm.region.graph.output_node().args[0]
    assert handed_out.target is torch.ops.aten.clone.default
    assert handed_out.args == (some,)
