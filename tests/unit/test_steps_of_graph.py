"""Layers of traced models are found where they are equal; a difference that a compile would see keeps them apart.

Models are traced by AOTAutograd, and what would be compiled is run operator by operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend import _compat
from multigraph_backend.lower import one_body, repetition
from multigraph_backend.lower.repetition import Repetition, Step
from multigraph_backend.lower.steps_of_graph import steps_of, why_it_stays


class Layer(nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.5, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(rate)
        self.register_buffer("seen", torch.zeros(()))
        self.scale, self.counts, self.turned = scale, False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = torch.nn.functional.silu(self.gate(y)) * self.up(y)
        if self.turned:
            y = y.transpose(0, 1).contiguous().transpose(0, 1)
        y = self.down(y).tanh() * self.scale
        if self.counts:
            self.seen.add_(1)
        return x + self.dropout(y)


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Traced:
    """A graph: its steps, what was found, and its text with calls of bodies in place."""

    steps: list[Step]
    found: Repetition
    why: list[str]
    put_in: one_body.Repeated
    text: str


def traced(model: nn.Module, *args: Any, dynamic: bool = False) -> list[Traced]:
    """The forward graph, and the backward graph where there is one; results and gradients are eager's."""
    graphs: list[Traced] = []

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        steps, nodes = steps_of(gm.graph)
        why = [said for node in nodes if (said := why_it_stays(node)) is not None]
        found = repetition.find(steps)
        repetition.verify(steps, found)
        put_in, _ = one_body.put_in(gm)
        bodies = "".join(module.code for _, module in gm.named_children())
        graphs.append(Traced(steps, found, why, put_in, gm.code + bodies))

        def run(given: list[Any]) -> Any:
            taken, given[:] = list(given), []
            return gm(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def over_all(args: tuple[Any, ...], *values: torch.Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(held, values, strict=True)), args)

    part = min_cut_rematerialization_partition
    compiled = aot_function(over_all, fw_compiler=compiler, bw_compiler=compiler, partition_fn=part, dynamic=dynamic)
    torch.manual_seed(0)
    got = compiled(args, *held.values())
    torch.manual_seed(0)
    torch.testing.assert_close(got, model(*args))
    if got.requires_grad:
        torch.manual_seed(0)
        parameters = [value for value in held.values() if value.requires_grad]
        expected = torch.autograd.grad(model(*args).square().sum(), parameters)
        torch.testing.assert_close(torch.autograd.grad(got.square().sum(), parameters), expected)
    return graphs


@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_layers_are_one_body_in_the_forward_and_in_the_backward_graph(dynamic: bool) -> None:
    graphs = traced(Chain(*(Layer() for _ in range(5))), torch.randn(3, 5, 8), dynamic=dynamic)
    forward, backward = (graph.put_in for graph in graphs)
    assert forward.bodies
    assert backward.bodies
    assert forward.calls >= 4
    assert backward.calls >= 3
    assert not forward.refused
    assert not backward.refused


def six_layers(**changes: Any) -> Chain:
    model = Chain(*(Layer() for _ in range(6)))
    for name, value in changes.items():
        setattr(model.layers[2], name, value)
    return model


def shared_parameter() -> Chain:
    model = six_layers()
    model.layers[2].gate.weight = model.layers[2].up.weight
    return model


def strides() -> Chain:
    model = six_layers()
    weight = model.layers[2].up.weight.detach().t().contiguous().t()
    model.layers[2].up.weight = nn.Parameter(weight)
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: six_layers(scale=2.5), lambda: six_layers(counts=True), lambda: six_layers(turned=True), shared_parameter,
     strides],
    ids=["constant", "in-place write", "turned", "shared parameter", "stride"],
)  # fmt: skip
def test_a_layer_that_is_almost_equal_is_not_called(make: Callable[[], Chain]) -> None:
    """What differs from the others is in no call; and numbers are eager's (`traced`)."""
    with torch.no_grad():
        (equal,) = traced(six_layers(), torch.randn(3, 5, 8))
        (graph,) = traced(make(), torch.randn(3, 5, 8))
    assert graph.put_in.calls > 1
    assert graph.put_in.spared < equal.put_in.spared


def test_stages_of_a_vision_model() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Chain(*(Layer(8) for _ in range(3)))
            self.between = nn.Linear(8, 16)
            self.second = Chain(*(Layer(16) for _ in range(5)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.between(self.first(x)))
            return out

    with torch.no_grad():
        (graph,) = traced(Stages(), torch.randn(3, 8))
    assert len(graph.found.bodies) == 2


def test_random_numbers_are_drawn_outside_of_bodies() -> None:
    graphs = traced(Chain(*(Layer(rate=0.5) for _ in range(5))), torch.randn(3, 5, 8))
    assert any("draws random numbers" in step for step in graphs[0].why)
    assert any(graph.put_in.calls > 2 for graph in graphs)


class Views(nn.Module):
    """Layers that hand out views: of what they are given, and of what they have made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = []
        for layer in self.layers:
            y = layer(x)
            views.append(x.transpose(0, 1)[:2])
            x = y + y.unsqueeze(0).expand(2, *y.shape).transpose(0, 1)[:, 1] * layer(x)
            views.append(x.t()[1:].t())
        out: torch.Tensor = x
        for view in views:
            out = out + view.sum()
        return out


def test_a_view_is_made_again_outside_and_no_call_hands_one_out() -> None:
    for graph in traced(Views(), torch.randn(8, 8)):
        assert graph.put_in.calls > 1


def test_what_a_body_may_not_hold_is_said() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).index_put((torch.tensor([0]),), x[1:2])
            return x

    with torch.no_grad():
        (graph,) = traced(Cached(), torch.randn(3, 8))
    assert any("index_put" in said and "in place" in said for said in graph.put_in.stay)
    assert not any("index_put" in text for text in graph.text.split("def forward")[2:])


def test_attention_on_a_gpu_may_be_in_a_body_though_it_returns_numbers() -> None:
    """As the graph of an inference has it: flash attention, of whose nine results one is taken."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default

    def attends(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            mixed = flash(x, x, x)[0]
            x = x + torch.relu(mixed @ weight).tanh()
        return x

    with _compat.FakeTensorMode():
        x = torch.empty(2, 4, 64, 16, device="cuda", dtype=torch.bfloat16)
        gm = make_fx(attends)(x, torch.empty(16, 16, device="cuda", dtype=torch.bfloat16))
    gm.graph.eliminate_dead_code()
    steps, _ = steps_of(gm.graph)
    assert not any(step.stays for step in steps)
    (body,) = repetition.find(steps).bodies
    assert len(body.calls) == 4

    first, *_ = gm.graph.find_nodes(op="call_function", target=flash)
    with gm.graph.inserting_after(first):
        length = gm.graph.call_function(operator.getitem, (first, 4))
        gm.graph.call_function(torch.ops.aten.add.Tensor, (x, length))
    assert why_it_stays(first) == "it makes no plain tensor"


GOOD = """
def repeated_0(args):
    argument_0, argument_1 = args
    args.clear()
    buf0 = empty_strided_cpu((3, 8), (8, 1), torch.float32)
    extern_kernels.mm(argument_0, argument_1, out=buf0)
    del argument_0
    buf1 = buf0; del buf0  # reuse
    buf2 = empty_strided_cpu((3, 8), (8, 1), torch.float32)
    return (buf1, buf2, )
"""


def test_code_of_a_body_is_read_for_what_it_hands_out() -> None:
    assert one_body.wrong(GOOD, "repeated_0") is None
    assert one_body.wrong(GOOD, "repeated_1") == "has no code of its own"
    assert one_body.wrong("void call() {", "repeated_0") == "is in no Python code"
    again = "return (buf1, reinterpret_tensor(buf2, (8, 3), (1, 8), 0), )"  # from its first number on
    assert one_body.wrong(GOOD.replace("return (buf1, buf2, )", again), "repeated_0") is None
    for code, why in {
        "return (buf1, argument_1, )": "hands out argument_1, which it was given",
        "return (buf1, reinterpret_tensor(buf2, (8, 3), (1, 8), 8), )": "a part of something",
        "return (buf1, buf2[:1], )": "a part of something",
        "return (buf1, reinterpret_tensor(argument_1, (8, 3), (1, 8), 0), )": ", which it was given",
        "return (buf1, reinterpret_tensor(buf1, (8, 3), (1, 8), 0), )": ", and the same memory once more",
        "return (buf1, buf0, )": "the same memory once more",
        "return buf1": "does not say what it hands out",
    }.items():
        said = one_body.wrong(GOOD.replace("return (buf1, buf2, )", code), "repeated_0")
        assert said is not None
        assert why in said
    reused = GOOD.replace("    buf2 = empty_strided_cpu((3, 8), (8, 1), torch.float32)", "    buf2 = argument_1")
    assert one_body.wrong(reused, "repeated_0") == "hands out buf2, which it was given"


def test_a_step_at_which_the_graph_is_cut_is_in_no_body() -> None:
    def cut_at(node: torch.fx.Node) -> str | None:
        return "it waits" if node.target is torch.ops.aten.silu.default else None

    model = Chain(*(Layer() for _ in range(6)))
    parameters = dict(model.named_parameters())  # inputs, as they are in a compile: a body takes nothing that is held
    whole = make_fx(lambda held, x: torch.func.functional_call(model, held, (x,)))
    assert one_body.put_in(whole(parameters, torch.randn(4, 8)))[0].calls
    gm = whole(parameters, torch.randn(4, 8))
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)) == 6
    found, _ = one_body.put_in(gm, cut_at=cut_at)
    assert found.calls
    assert found.stay == () or found.bodies
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default)) == 6  # none is inside


def test_where_nothing_but_cuts_come_again_it_is_said() -> None:
    gm = make_fx(lambda x: x.sin().cos().sin().cos(), tracing_mode="fake")(torch.randn(4))
    found, _ = one_body.put_in(gm, cut_at=lambda node: "it waits" if "cos" in str(node.target) else None)
    assert not found.bodies
    assert found.stay == ("aten.cos.default: the graph is cut there: it waits (2 times)",)
