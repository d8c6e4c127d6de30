"""What a graph does twice is done once, early; what must stay apart does."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.lower import equal_steps, repetition
from multigraph_backend.lower.steps_of_graph import steps_of


def traced(function: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each makes its mask, as attention does of a boolean one."""
    places = torch.arange(x.shape[0])
    visible = places[:, None] >= places
    for _ in range(4):
        mask = torch.where(visible, 0.0, -torch.inf)
        x = (((x @ weight).tanh().cos() + mask).softmax(-1) @ x).sin() + x
    return x


def test_masks_of_layers_are_one_and_the_first_layer_is_like_the_others() -> None:
    args = torch.randn(3, 3), torch.randn(3, 3)
    gm = traced(layers, *args)
    before = repetition.find(steps_of(gm.graph)[0], lossless=True)
    assert equal_steps.merge(gm) == 9  # two numbers and a mask, in three layers
    gm.graph.lint()
    assert torch.equal(gm(*args), layers(*args))
    (body,) = repetition.find(steps_of(gm.graph)[0], lossless=True).bodies
    assert len(body.calls) == 3  # from one product to the next, behind the first
    assert before.bodies == ()
    text = "\n".join(f"{node.name} = {node.target}" for node in list(gm.graph.nodes)[:12])
    assert_expected_inline(
        text,
        """\
x_1 = x_1
weight_1 = weight_1
scalar_tensor = aten.scalar_tensor.default
scalar_tensor_1 = aten.scalar_tensor.default
arange = aten.arange.default
unsqueeze = aten.unsqueeze.default
ge = aten.ge.Tensor
where = aten.where.self
mm = aten.mm.default
tanh = aten.tanh.default
cos = aten.cos.default
add = aten.add.Tensor""",
    )


def test_random_programs_that_repeat_themselves_compute_the_same_in_a_right_order() -> None:
    ones: list[Callable[..., torch.Tensor]] = [torch.sin, torch.tanh, lambda x: x[:, None].sum(1), lambda x: x + 0.0]
    twos: list[Callable[..., torch.Tensor]] = [torch.add, torch.mul, torch.maximum]
    taken = 0

    def program(seed: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chance, values = random.Random(seed), [x, torch.full((3,), 0.5)]
        for _ in range(30):
            few = values[: chance.randrange(1, 6)] if chance.random() < 0.6 else values[-4:]
            if chance.random() < 0.5:
                values.append(chance.choice(ones)(chance.choice(few)))
            else:
                values.append(chance.choice(twos)(chance.choice(few), chance.choice(few)))
        return tuple(values[-3:])

    for seed in range(150):
        function = functools.partial(program, seed)
        x = torch.randn(3)
        gm = traced(function, x)
        taken += equal_steps.merge(gm)
        gm.graph.lint()
        torch.testing.assert_close(gm(x), function(x), rtol=0, atol=0)
    assert taken > 500


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((y := x.sin()) + 1, y, x.sin()),  # returned: two tensors
        lambda x: torch.rand_like(x) + torch.rand_like(x),
        lambda x: (x * 0.0) + (x * -0.0),
        lambda x: torch.full((3,), 0.0) / x + torch.full((3,), -0.0) / x,
        lambda x: torch.full((3,), 1) / x + torch.full((3,), 1.0) / x,
        lambda x: (x @ x[:, None]) + (x @ x[:, None]),  # a kernel of its own
        lambda x: torch.empty_like(x).fill_(1) + torch.empty_like(x).fill_(2),
        lambda x: x.sum(0) + x[:, None].sum(0),
        lambda x: x - x.flip(0) + (x.flip(0) - x).abs(),
    ],
)
def test_what_differs_or_is_handed_out_stays(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.tensor([1.0, -2.0, 0.0])
    gm = traced(function, x)
    steps = len(gm.graph.nodes)
    taken = equal_steps.merge(gm)
    assert len(gm.graph.nodes) == steps - taken
    gm.graph.lint()
    torch.manual_seed(0)
    wanted = function(x)
    torch.manual_seed(0)
    got = gm(x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    if isinstance(got, tuple):
        assert len({tensor.untyped_storage().data_ptr() for tensor in got}) == len(got)
    bits = [torch.signbit(value) for value in (got if isinstance(got, tuple) else (got,))]
    assert all(map(torch.equal, bits, map(torch.signbit, wanted if isinstance(wanted, tuple) else (wanted,))))


def captured(function: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    """As Dynamo captures it."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*args)
    (gm,) = graphs
    return gm


def rotated(x: torch.Tensor, write: bool = False) -> torch.Tensor:
    angles = torch.arange(x.shape[-1], dtype=x.dtype) / 10
    if write:
        torch.nn.functional.relu(angles, True)
    return x * angles.cos() + x.flip(-1) * angles.sin()


def test_tables_of_a_captured_graph_are_made_once() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return rotated(rotated(rotated(x)))

    x = torch.randn(2, 4)
    gm = captured(program, x)
    assert equal_steps.merge_tables(gm) == 8  # positions, what they are divided by, two tables, in two of three
    assert torch.equal(gm(x)[0], program(x))
    assert equal_steps.merge_tables(gm) == 0


def test_tables_of_a_captured_graph_stay_apart_where_one_may_be_written_to() -> None:
    def returns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = torch.arange(3.0), torch.arange(3.0)
        return rotated(rotated(x)), one, other.unsqueeze(0)

    def writes(x: torch.Tensor) -> torch.Tensor:
        return rotated(rotated(x), write=True)

    def under_a_mode(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = rotated(x)
        return rotated(y)

    x = torch.randn(2, 3)
    gm = captured(returns, x)
    assert equal_steps.merge_tables(gm) == 4  # of `rotated` alone
    _, one, other = gm(x)
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    for function in (writes, under_a_mode):
        assert equal_steps.merge_tables(captured(function, x)) == 0
