"""The graph that each variant is compiled from, as text: facts are in it, and nothing of another variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline

from multigraph_backend.backend import multigraph


def f(x: torch.Tensor, n: int) -> torch.Tensor:
    rows = torch.ones(x.shape[0])
    return x.sum(1) * rows + n * x.shape[0]


class Recorder:
    """A compiler that keeps what it was given: input shapes, and the operations of the graph."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, inputs, strict=True):
            shown = [str(size) for size in value.shape] if isinstance(value, torch.Tensor) else value
            self.text += f"{node.name}: {shown}\n"
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method"):
                target = node.target if isinstance(node.target, str) else node.target.__name__
                self.text += f"{node.name} = {target}({', '.join(str(arg) for arg in node.args)})\n"
        self.text += "\n"
        return gm.forward


def test_each_variant_has_its_own_sizes_and_the_graph_stays_as_traced() -> None:
    recorder = Recorder()
    declared = [{"x[0]": 8}, {"x[0]": {"multiple_of": 16}}, {"x[0]": {"min": 2, "max": 9}, "n": 5}]
    compiled = torch.compile(
        f, backend=multigraph, dynamic=True, options={"specialize": declared, "compiler": recorder}
    )
    for rows, n in ((8, 3), (32, 3), (9, 5), (7, 4)):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x, n), f(x, n))
    assert_expected_inline(
        recorder.text,
        """\
s77: 8
s27: s27
l_x_: ['8', 's27']
l_n_: s86
rows = ones(8)
sum_1 = sum(l_x_, 1)
mul = mul(sum_1, rows)
mul_1 = mul(l_n_, 8)
add = add(mul, mul_1)

s77: s33
s27: s27
l_x_: ['16*s33', 's27']
l_n_: s86
mul_2 = mul(s77, 16)
rows = ones(mul_2)
sum_1 = sum(l_x_, 1)
mul = mul(sum_1, rows)
mul_1 = mul(l_n_, mul_2)
add = add(mul, mul_1)

s77: s77
s27: s27
l_x_: ['s77', 's27']
l_n_: 5
rows = ones(s77)
sum_1 = sum(l_x_, 1)
mul = mul(sum_1, rows)
mul_1 = mul(5, s77)
add = add(mul, mul_1)

s77: s77
s27: s27
l_x_: ['s77', 's27']
l_n_: s86
rows = ones(s77)
sum_1 = sum(l_x_, 1)
mul = mul(sum_1, rows)
mul_1 = mul(l_n_, s77)
add = add(mul, mul_1)

""",
    )
