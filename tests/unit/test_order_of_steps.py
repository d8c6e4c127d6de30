"""What a forward graph makes at its end only to return it is made where its operands are."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.lower.order_of_steps import make_early, make_late


def text(gm: torch.fx.GraphModule) -> str:
    return "\n".join(f"{node.name} = {node.target}({', '.join(map(str, node.args))})" for node in gm.graph.nodes)


def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a partitioner leaves it: what the gradients need of each layer comes last."""
    means = []
    for _ in range(2):
        mean = x.mean(-1, keepdim=True)
        means.append(mean)
        x = (x - mean) @ weight
    return torch.where(x > 0, torch.full((), 0.5), x), *(mean.exp() / 64 for mean in means)


def test_steps_move_to_what_they_take_or_are_taken_by() -> None:
    args = torch.randn(3, 4), torch.randn(4, 4)
    gm = make_fx(forward, tracing_mode="fake")(*args)
    late = make_early(gm.graph)
    gm.recompile()
    assert_expected_inline(
        text(gm),
        """\
x_1 = x_1()
weight_1 = weight_1()
mean = aten.mean.dim(x_1, [-1], True)
exp = aten.exp.default(mean)
div = aten.div.Tensor(exp, 64)
sub = aten.sub.Tensor(x_1, mean)
mm = aten.mm.default(sub, weight_1)
mean_1 = aten.mean.dim(mm, [-1], True)
exp_1 = aten.exp.default(mean_1)
div_1 = aten.div.Tensor(exp_1, 64)
sub_1 = aten.sub.Tensor(mm, mean_1)
mm_1 = aten.mm.default(sub_1, weight_1)
gt = aten.gt.Scalar(mm_1, 0)
full = aten.full.default([], 0.5)
where = aten.where.self(gt, full, mm_1)
output = output((where, div, div_1))""",
    )
    torch.testing.assert_close(gm(*args), forward(*args))
    make_late(gm.graph, late)
    gm.graph.lint()
    assert list(gm.graph.nodes)[-1 - len(late) : -1] == late


def test_nothing_moves_over_a_write() -> None:
    def writes(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ weight
        x.copy_(y)
        return y, x.exp()

    args = torch.randn(3, 4), torch.randn(4, 4)
    gm = make_fx(writes, tracing_mode="fake")(*args)
    before = [node.name for node in gm.graph.nodes]
    make_early(gm.graph)
    assert [node.name for node in gm.graph.nodes] == before
