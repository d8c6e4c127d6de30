"""Blocks that come again are traced by AOTAutograd once where that is right, and one by one where it is not.

Graphs run operator by operator, all else is as a user has it: no code is generated.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import multigraph_backend
from multigraph_backend.lower import block_operator, one_body, repetition, steps_of_graph, traced_once
from multigraph_backend.lower.inductor import compile_fx_settings
from multigraph_backend.lower.lowering import CompileJob
from multigraph_backend.lower.only_cached import NotCached
from multigraph_backend.saved_tensors.graphs import root
from tests.support.fuzz.repeated import Verdict
from tests.support.fuzz.repeated import traced_once as compiled_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))).cos() + 0.5).tanh() * 1.5
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class WritesInside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(self.inner(x), inplace=True)


class Streams(nn.Module):
    """Blocks hand on two values, and the last one's first is used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = x
        for layer in self.layers:
            new = layer.inner(rest)
            rest = rest * 0.5 + new
            x = layer.down(layer.up(x) + 1).sin() + rest.cos()
        return x


class Sums(Streams):
    """The same, where its gradient is only added to another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = x
        for layer in self.layers:
            rest = rest + layer.inner(rest)
            x = layer.down(layer.up(x) + 1).sin() + rest.cos()
        return x


class SumsOfParameters(Streams):
    """The same, but that the last layer's last parameter has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.ParameterList(torch.randn(2, 8, 8) for _ in self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = x
        for layer, last in zip(self.layers, self.last, strict=True):
            x = layer.down(layer.up(x) + 1).sin() + (rest + layer.inner(rest)).cos()
            rest = rest + layer.inner(rest) + last
        return x


class WritesLater(Layer):
    """What a layer was given is written to behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + self.inner(x.detach() * 3)
        x.add_(1)
        return y


class HandsOutView(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.inner(x)).transpose(-1, -2).contiguous().transpose(-1, -2)


class OwnAutocast(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        return x + y.float()


class PartWithoutGradient(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.inner(x)
        return x + self.inner(x) * scale


class SomeUnderAutocast(nn.Module):
    """Layers look the same, and half of them compute in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[3:]:
                x = layer(x)
        return x


class Drops(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(self.inner(x), 0.4, training=True)


class DropsInPlace(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(self.inner(x), 0.4, True, True)


class DropsInAttention(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.up(x), self.up(self.norm(x)), self.up(x.sin())
        return x + self.down(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4).cos()) * 0.5


class DropsLater(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(self.inner(x), 0.4, training=True)
        return x + self.down(self.up(y.sin()).sigmoid() - 0.2).exp().tanh().square().cos()


class Twice(nn.Module):
    """Two calls for the same arguments draw different numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DropsLater() for _ in range(4))
        for name, parameter in self.layers[0].named_parameters():
            module, _, own = name.rpartition(".")
            for layer in self.layers[1:]:
                setattr(layer.get_submodule(module), own, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.layers[0](x)).tanh() * 0.1
        y = torch.bmm(self.layers[1](x), y).sin() * 0.1
        y = torch.baddbmm(y, y, self.layers[2](x)).cos() * 0.1
        return y + torch.einsum("bij,bjk->bik", self.layers[3](x), y)


class HoldsTensor(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).index_select(1, torch.tensor([0, 1, 1, 3, 0, 2, 2, 7]))


class DropsInMultihead(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.inner(self.attention(y, y, y)[0])


class Checkpointed(nn.Module):
    """What a layer computes is computed again in the backward."""

    def __init__(self, layer: nn.Module | None = None, **how: Any) -> None:
        super().__init__()
        self.layer, self.how = layer or Layer(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.layer, x, use_reentrant=False, **self.how)
        assert isinstance(y, torch.Tensor)
        return y


def policy() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


class Constant(Layer):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * self.value


def checkpointed_constants() -> nn.Module:
    return nn.Sequential(*(Checkpointed(Constant(0.5 if place in (2, 5) else -0.0)) for place in range(6)))


class EveryOther(nn.Module):
    """Layers that are checkpointed, two results of which go on, and layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        for place, layer in enumerate(self.layers):
            if place % 2:
                x = layer(x) + kept.sin()
            else:

                def both(x: torch.Tensor, layer: Any = layer) -> tuple[torch.Tensor, torch.Tensor]:
                    return layer(x), layer.norm(x).cos() * 2

                x, kept = checkpoint(both, x, use_reentrant=False)  # type: ignore[misc]
        return x


class NormAtTheEnd(nn.Module):
    """Blocks that begin behind a norm would hand on what the last of them hands to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(4)), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.second(functional.silu(self.norm(self.first(x))).tanh()).sin() * 2
        return y


def frozen() -> nn.Module:
    model = layers(Layer, 6)
    for parameter in list(model.parameters())[:18]:
        parameter.requires_grad_(False)
    return model


def layers(kind: type[nn.Module], count: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *(kind() for _ in range(count)))


def step(run: Any, model: nn.Module, x: torch.Tensor, training: bool) -> list[torch.Tensor | None]:
    """The result, gradients where there are any, and buffers."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        out = run(x)
    if training:
        (out.float() * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
    found = [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]
    return [None if value is None else value.detach().clone() for value in found]


CASES: dict[str, tuple[Any, bool, bool]] = {  # model, whether it is traced once in inference, and in training
    "plain": (lambda: layers(Layer), True, True),
    "writes inside": (lambda: layers(WritesInside), True, True),
    "first layers are frozen": (frozen, True, True),
    "a result without gradient": (Streams, True, True),
    "a sum without gradient": (Sums, True, True),
    "a sum and a parameter without gradient": (SumsOfParameters, True, False),
    "writes later": (lambda: layers(WritesLater), True, False),
    "hands out a view": (lambda: layers(HandsOutView), True, True),
    "own autocast": (lambda: layers(OwnAutocast), True, True),
    "a part without gradient": (lambda: layers(PartWithoutGradient), True, True),
    "some layers under autocast": (SomeUnderAutocast, True, True),
    "dropout": (lambda: layers(Drops), True, True),
    "dropout in place": (lambda: layers(DropsInPlace), True, True),
    "attention with dropout": (lambda: layers(DropsInAttention), True, True),
    "the same layer twice": (Twice, True, True),
    "statistics": (lambda: layers(Statistics), False, False),
    "a tensor in each layer": (lambda: layers(HoldsTensor), True, True),
    "multihead attention with dropout": (lambda: layers(DropsInMultihead), True, True),
    "a norm at the end": (NormAtTheEnd, True, True),
    "checkpointed": (lambda: layers(Checkpointed), True, True),
    "checkpointed with dropout": (lambda: nn.Sequential(*(Checkpointed(Drops()) for _ in range(4))), False, False),
    "checkpointed, a constant differs": (checkpointed_constants, True, True),
    "every other is checkpointed": (EveryOther, True, True),
    "checkpointed by a policy": (
        lambda: nn.Sequential(*(Checkpointed(context_fn=policy) for _ in range(4))),
        False,
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("repeat", ["always", "auto"])
def test_results_gradients_and_buffers_are_eagers(case: str, training: bool, repeat: str) -> None:
    torch.manual_seed(0)
    made, *expected = CASES[case]
    model = made()
    other, verdict = copy.deepcopy(model), Verdict()
    run = compiled_of(other, verdict, repeat=repeat)
    for turn in range(2):
        x = torch.randn(2, 8, 8)
        torch.manual_seed(turn)
        mine = step(run, other, x, training)
        torch.manual_seed(turn)
        theirs = step(model, model, x, training)
        assert [value is None for value in mine] == [value is None for value in theirs]
        close = 0.05 if "autocast" in case else 1e-4
        torch.testing.assert_close(
            [value for value in mine if value is not None],
            [value for value in theirs if value is not None],
            rtol=close,
            atol=close,
        )
    once = "traced once" in verdict.said[-1]
    assert once == expected[training]
    assert (verdict.calls > 0) or not once
    stats = multigraph_backend.stats()
    assert (stats["repeat_retries"], stats["eager_calls"]) == (0, 0)


class Growing(nn.Module):
    """Layers that do the same to ever more: no call is given what another is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 + 4 * layer, 4) for layer in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat((x, functional.relu(layer(x))), -1)
        return x


def test_layers_that_grow_are_not_traced_to_find_that_out() -> None:
    model, verdict = Growing(), Verdict()
    run = compiled_of(model, verdict, repeat="auto")
    with mock.patch.object(traced_once._Tracing, "_trace", side_effect=AssertionError("traced")):
        step(run, model, torch.randn(2, 8), training=True)
    assert verdict.calls == 0
    assert multigraph_backend.stats()["eager_calls"] == 0


class Counting(nn.Module):
    """Each layer reads a buffer that is written to before the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * ((self.count > 2).float() + self.count).cos()
            self.count.add_(1)
        return x


@pytest.mark.filterwarnings("error:Error detected in")
def test_what_blocks_save_may_be_written_to_and_autograd_is_not_heard_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    other, verdict = copy.deepcopy(model), Verdict()
    run = compiled_of(other, verdict, repeat="auto")
    for _ in range(2):
        x = torch.randn(2, 8, 8)
        mine, theirs = (step(one, owner, x, True) for one, owner in ((run, other), (model, model)))
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(other.count, model.count)


def test_the_last_layer_is_a_call_though_its_sum_goes_nowhere() -> None:
    """Blocks are cut behind the norm, where no kernel is cut in two, and the norm at the end is the last one's."""
    model, verdict = NormAtTheEnd(), Verdict()
    run = compiled_of(model, verdict)
    step(run, model, torch.randn(2, 8, 8), training=True)
    assert re.findall(r"(\w+): (\d) calls of one body .*?(once)", verdict.said[-1]) == [
        ("forward", "4", "once"),
        ("backward", "4", "once"),
    ]


def test_entries_of_a_model_that_a_wrapper_calls_are_told_apart() -> None:
    """As transformers wrap their models.  What reads a part of the last norm is no kernel that the last cut parts."""

    def wrapped(*args: Any) -> torch.Tensor:
        y: torch.Tensor = args[0](args[1])
        return y[:, -1:] @ y[:, :1].transpose(1, 2)

    model, verdict = NormAtTheEnd(), Verdict()
    run: Any = compiled_of(wrapped, verdict)  # type: ignore[arg-type]
    x = torch.randn(2, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(model, x), wrapped(model, x))
    assert "4 calls of one body" in verdict.said[-1]


@pytest.mark.slow
class Attending(nn.Module):
    """By the operator that attention on a GPU becomes: beside tensors it returns lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)[0]
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_attention_that_returns_lengths_is_a_part_of_blocks(training: bool, dynamic: bool) -> None:
    """Traced only: the kernel is a GPU's."""
    calls: list[torch.fx.Node] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        assert traced_once.lift(gm, inputs, functools.partial(compile_fx_settings, {})) is not None
        calls.extend(gm.graph.find_nodes(op="call_function", target=block_operator.BLOCK))
        return lambda *args: (torch.zeros(2, 16, 64, dtype=torch.bfloat16),)

    model = nn.Sequential(*(Attending() for _ in range(5))).to(torch.bfloat16)
    with torch.set_grad_enabled(training), torch._dynamo.config.patch(specialize_float=True):
        x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=training)
        torch.compile(model, backend=backend, dynamic=dynamic)(x)
    assert len(calls) >= 4


@pytest.mark.slow
def test_checkpointed_blocks_save_no_more_than_without_bodies() -> None:
    """Their arguments alone, and the backward's body computes the rest again."""
    torch.manual_seed(0)
    made = [layers(kind, 6) for kind in (Checkpointed, Layer)]
    saved = []
    for model, repeat in ((made[0], "always"), (made[0], False), (made[1], False)):
        run = torch.compile(model, backend="multigraph", options={"repeat": repeat, "compiler": "inductor"})
        out = run(torch.randn(64, 8, 8, requires_grad=True))
        node: Any = out.grad_fn
        found = {value.untyped_storage().data_ptr(): value.nbytes for value in node.saved_tensors if value is not None}
        saved.append(sum(found.values()))
    assert saved[0] == saved[1] < saved[2] / 2
    said = [region.generic.repeated or "" for region in multigraph_backend.explain().regions]
    assert [text.count("1 of the bodies traced once") for text in said] == [2, 0, 0]


def test_a_first_layer_for_data_is_another_block_than_those_behind() -> None:
    """Its input needs no gradient.  The others are calls of one body, and none is made for the first alone."""
    model = nn.ModuleList(Layer() for _ in range(5))

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = layer(x)
        return x

    verdict, x = Verdict(), torch.randn(2, 8, 8)
    run = compiled_of(program, verdict)  # type: ignore[arg-type]
    found = []
    for each in (run, program):
        model.zero_grad()
        out = each(x)
        out.square().sum().backward()
        found.append([out, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert verdict.said[-1].count("1 of the bodies traced once") == 2
    assert "1 calls" not in verdict.said[-1]


def test_layers_before_and_behind_a_part_without_gradient_are_the_same() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for place, layer in enumerate(self.layers):
                x = layer(x)
                if place == 2:
                    with torch.no_grad():
                        scale = x.abs().amax().sin().cos()
                    x = x * scale
            return x

    verdict = Verdict()
    compiled_of(Between(), verdict)(torch.randn(2, 8, 8, requires_grad=True)).sum().backward()
    assert "forward: 6 calls of one body" in verdict.said[-1]


def test_what_stands_in_the_way_of_tracing_once_is_said() -> None:
    class Alone(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return x.sin()

    verdict = Verdict()
    compiled_of(layers(Alone), verdict)(torch.randn(2, 8, 8))
    assert "blocks are traced one by one: _set_grad_enabled: it sets a mode" in verdict.said[-1]


def test_results_are_eagers_under_autocast() -> None:
    model = layers(Layer)
    other, verdict = copy.deepcopy(model), Verdict()
    run, x = compiled_of(other, verdict), torch.randn(2, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = step(run, other, x, True), step(model, model, x, True)
    torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
    assert verdict.calls > 2


def test_a_call_of_another_kind_is_refused() -> None:
    """What a call is given is compared with what its block was traced for, whatever was found equal before."""
    bodies = block_operator.Bodies({"body": {}})
    with pytest.raises(block_operator.CannotLower, match="not what its block was traced for"):
        bodies.find("body", [torch.randn(2)])


class ComputesWithSize(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) / x.shape[1] * (x.shape[0] + 1)


class AsksForSize(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.inner(x) * 2 if x.shape[1] > 6 else self.inner(x).sin())


class Attends(Layer):
    """Views by sizes, one of them computed, which Dynamo computes once for all layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        y = self.inner(x).view(batch * rows, width).tanh().view(batch, rows, 2, width // 2).transpose(1, 2)
        y = functional.scaled_dot_product_attention(y, y.sin(), y)
        return x + y.transpose(1, 2).reshape(batch, rows, width)


class WithToken(nn.Module):
    """All layers but the first two see one row more."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = layers(Attends, 2), layers(Attends, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        y: torch.Tensor = self.behind(torch.cat((x, x[:, :1]), 1))
        return y


SIZES: dict[str, Any] = {
    "plain": lambda: layers(Layer),
    "computes with a size": lambda: layers(ComputesWithSize),
    "asks for a size": lambda: layers(AsksForSize),
    "attends": lambda: layers(Attends),
    "a row more from the third layer on": WithToken,
    "hands out a view": lambda: layers(HandsOutView),
}


def assert_eagers(run: Any, other: nn.Module, model: nn.Module, size: tuple[int, ...], training: bool) -> None:
    def with_dynamic_sizes(x: torch.Tensor) -> Any:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch._dynamo.maybe_mark_dynamic(x, 1)
        return run(x)

    x = torch.randn(size)
    mine, theirs = step(with_dynamic_sizes, other, x, training), step(model, model, x, training)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


SLOW_IN_TRAINING = (  # as others are, and they take the longest
    "plain", "hands out a view", "computes with a size", "a row more from the third layer on", "asks for a size",
    "attends",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "training"),
    [
        pytest.param(case, training, marks=[pytest.mark.slow] if training and case in SLOW_IN_TRAINING else [])
        for case in SIZES
        for training in (False, True)
    ],
)
def test_dynamic_sizes_are_symbols_of_a_body(case: str, training: bool) -> None:
    """One compile serves sizes that differ, and sizes of 0 and 1, where Dynamo traces anew, are right as well."""
    torch.manual_seed(0)
    model = SIZES[case]()
    other, verdict = copy.deepcopy(model), Verdict()
    run = compiled_of(other, verdict)
    for size in ((2, 9, 8), (3, 7, 8), (7, 7, 8), (2, 8, 8)):
        assert_eagers(run, other, model, size, training)
    (region,) = multigraph_backend.explain().regions
    assert region.generic.calls == 4
    assert "traced once" in verdict.said[-1]
    for size in ((2, 1, 8), (1, 3, 8), (3, 0, 8), (4, 4, 8)):
        assert_eagers(run, other, model, size, training)
    stats = multigraph_backend.stats()
    assert (stats["repeat_retries"], stats["eager_calls"]) == (0, 0)


@pytest.mark.parametrize("training", [False, True])
def test_variants_have_bodies_of_their_own(training: bool) -> None:
    """One size is a number in a variant and the other a symbol, or a multiple of a symbol."""
    torch.manual_seed(0)
    model = layers(Attends)
    other, verdict = copy.deepcopy(model), Verdict()
    run = compiled_of(other, verdict, [{"input[0]": 3}, {"input[1]": {"multiple_of": 4}}])
    for size in ((2, 9, 8), (3, 9, 8), (3, 7, 8), (2, 8, 8), (5, 12, 8)):
        assert_eagers(run, other, model, size, training)
    (region,) = multigraph_backend.explain().regions
    assert [variant.calls for variant in (*region.variants, region.generic)] == [2, 2, 1]
    said = [variant.repeated or "" for variant in (*region.variants, region.generic)]
    assert ["traced once" in one for one in said] == [True] * 3


def test_what_the_trace_of_a_body_asks_of_sizes_is_asked_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it asks whether there are more than six rows: code for nine is no code for five."""
    asked: list[bool] = []
    kind_of = traced_once.kind_of

    def asking(graphs: Any, *others: Any) -> Any:
        for gm in graphs.values():
            for node in gm.graph.find_nodes(op="placeholder"):
                if isinstance(node.meta["val"], torch.SymInt) and str(node.meta["val"]) == rows[0]:
                    asked.append(bool(node.meta["val"] > 6))
        return kind_of(graphs, *others)

    model, verdict = layers(Layer), Verdict()
    run = compiled_of(model, verdict)
    monkeypatch.setattr(traced_once, "kind_of", asking)
    rows: list[str] = []
    symbols = traced_once._symbols
    monkeypatch.setattr(
        traced_once, "_symbols", lambda graph, inputs: (rows.append(_rows(inputs)), symbols(graph, inputs))[1]
    )
    with torch.no_grad():
        for count in (9, 8, 5):
            x = torch.randn(2, count, 8)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(run(x), model(x))
    (region,) = multigraph_backend.explain().regions
    assert len(region.generic.forms) == 2
    assert ">= 7" in region.generic.forms[0] or "> 6" in region.generic.forms[0] or "7 <=" in region.generic.forms[0]
    assert True in asked
    assert False in asked
    assert "traced once" in verdict.said[-1]


def _rows(inputs: Any) -> str:
    """The symbol of the rows of a graph's tensor with three dimensions."""
    return next(str(value.size(1)) for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 3)


def test_sizes_that_nothing_is_known_of_are_traced_one_by_one() -> None:
    model, verdict = layers(Layer), Verdict()
    run, x = compiled_of(model, verdict), torch.randn(3, 8, 8)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert "before a run" in verdict.said[-1]


def test_where_one_way_to_cut_cannot_be_traced_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are asked for each way, since what was refused before is not known to a process that only looks there."""
    lengths: list[int] = []
    block = traced_once._block

    def first_refused(body: repetition.Body, *others: Any) -> Any:
        lengths.append(body.length * len(body.calls))
        if len(lengths) == 1:
            raise block_operator.Refused("a block that comes again hands out a view, or what it was given")
        return block(body, *others)

    monkeypatch.setattr(traced_once, "_block", first_refused)
    model, verdict = layers(Layer), Verdict()
    run, x = compiled_of(model, verdict), torch.randn(2, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert "traced once" in verdict.said[-1]
    cut_elsewhere, between_entries = lengths[:2]
    assert cut_elsewhere < between_entries  # where nothing is lost the first layer begins outside


def test_a_compile_from_caches_goes_through_all_ways_and_then_the_graph_as_it_was() -> None:
    asked: list[tuple[int, str | None]] = []

    def look(process_wide: contextlib.ExitStack) -> str:
        here = traced_once._attempt.get()
        assert here is not None
        asked.append((here.passed, here.why_not))
        if here.why_not is not None:
            return "as it was"
        here.lifted, here.more = True, here.passed < 2
        raise NotCached("nothing is kept of it")

    job: Any = SimpleNamespace(only_cached=True, graph=SimpleNamespace(user_code="f"), _floats_or_constants=look)
    with contextlib.ExitStack() as process_wide:
        assert CompileJob._traced_once_or_not(job, process_wide) == "as it was"  # type: ignore[comparison-overlap]
    assert [passed for passed, _ in asked] == [0, 1, 2, 0]
    assert [why is None for _, why in asked] == [True, True, True, False]


def given_to_inductor(model: nn.Module, repeat: Any, training: bool) -> list[torch.fx.GraphModule]:
    """The graphs of a compile, each before bodies are looked for in it."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, *args: Any) -> tuple[one_body.Repeated, list[str]]:
        graphs.append(copy.deepcopy(gm))
        return one_body.Repeated("graph", 0), []

    torch._dynamo.reset()
    options = {"repeat": repeat, "on_failure": "raise"}
    run = torch.compile(model, backend="multigraph", fullgraph=True, options=options)
    with torch._functorch.config.patch(enable_autograd_cache=False), mock.patch.object(one_body, "put_in", keep):
        step(run, model, torch.randn(2, 8, 8), training)
    return graphs


@pytest.mark.parametrize("training", [False, True])
def test_what_is_put_in_the_place_of_calls_is_the_graph_as_it_was(training: bool) -> None:
    """The same operators with results of the same kinds, but what a partitioner decides; and no two of them share what
    looks like memory, unless one is a view of the other: by that Inductor tells what it may overwrite."""
    model = layers(Layer)
    with mock.patch.object(traced_once, "lift", side_effect=block_operator.Refused("not now")):
        whole = given_to_inductor(model, "auto", training)
    inlined = given_to_inductor(model, "auto", training)
    assert len(inlined) == len(whole) == 1 + training
    for mine, theirs in zip(inlined, whole, strict=True):
        assert training or sorted(map(said, mine.graph.nodes)) == sorted(map(said, theirs.graph.nodes))
        makers: dict[int, torch.fx.Node] = {}
        for node in mine.graph.nodes:
            for value in steps_of_graph.values_of(node):
                if node.op == "call_function" and isinstance(value, torch.Tensor):
                    memory = root(node)
                    memory = memory.args[0] if memory.target is operator.getitem else memory  # type: ignore[assignment]
                    assert makers.setdefault(value.untyped_storage()._cdata, memory) is memory


def said(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    kinds = [
        (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value
        for value in steps_of_graph.values_of(node)
    ]
    return f"{node.target} {kinds}"
