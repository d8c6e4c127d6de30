"""With the option `repeat` equal layers are compiled as one body, with eager's numbers, and explain() says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import multigraph_backend
from multigraph_backend import Keep, Match, Rule, Scaled, _compat
from multigraph_backend.lower import one_body


@pytest.fixture(autouse=True)
def _compiled_here() -> Iterator[None]:
    """Code that comes from torch's caches does not say what was repeated in it.  Kernels are the same wherever they are
    from, so those are compiled once."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


class Layer(nn.Module):
    def __init__(self, width: int = 8, rate: float = 0.0, counts: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.counts = nn.Dropout(rate), counts
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(self.up(x).cos() + 0.5)
        if self.counts:
            self.seen.add_(x.detach().mean(0))
        return x + self.dropout(self.down(y).tanh() * 2)


def layers(count: int, **of_each: Any) -> nn.Sequential:
    return nn.Sequential(*(Layer(**of_each) for _ in range(count)))


def repeating(model: nn.Module, repeat: object = "always", **options: Any) -> Any:
    return torch.compile(model, backend="multigraph", options={"repeat": repeat, **options})


def generic() -> Any:
    (region,) = multigraph_backend.explain().regions
    return region.generic


def assert_called() -> None:
    stats = multigraph_backend.stats()
    assert stats["body_calls"] > 1
    assert (stats["repeat_retries"], stats["eager_calls"]) == (0, 0)


def step(run: Any, model: nn.Module, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """The result, all gradients and all buffers."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    torch.manual_seed(seed)
    out = run(x)
    (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    return [out.detach(), x.grad, *(value.grad for value in model.parameters()), *map(torch.clone, model.buffers())]  # type: ignore[list-item]


def test_layers_are_calls_of_one_body_for_all_sizes() -> None:
    model = layers(4)
    compiled = repeating(model)
    with torch.no_grad():
        for rows in (3, 5, 64):
            x = torch.randn(rows, 4, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), model(x))
        assert "inference: " in generic().repeated
        assert "calls of one body" in str(multigraph_backend.explain())
        assert_called()
        assert multigraph_backend.stats()["generic_calls"] == 3
        for parameter in model.parameters():  # each call takes its own, as they are now
            parameter.add_(0.1)
        torch.testing.assert_close(compiled(x), model(x))


def test_forward_and_backward_are_calls_of_bodies() -> None:
    """With buffers that are written in place, which no body holds, and a size that is dynamic."""
    model, other = layers(4, counts=True), layers(4, counts=True)
    other.load_state_dict(model.state_dict())
    compiled = repeating(other)
    for rows in (3, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(step(compiled, other, x), step(model, model, x))
    said = generic().repeated
    assert "forward: " in said
    assert "backward: " in said
    assert said.count("one body") >= 2
    assert_called()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_layers_with_norms_are_calls_of_bodies(norm: type[nn.Module]) -> None:
    """What a norm saves, Inductor hands out as a buffer under other strides."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = norm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.up(self.norm(x)))

    model, other = (nn.Sequential(*(Normed() for _ in range(3))) for _ in range(2))
    other.load_state_dict(model.state_dict())
    compiled = repeating(other)
    for rows in (8, 3):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(step(compiled, other, x), step(model, model, x))
    assert_called()


def test_tensors_that_layers_hold_and_numbers_that_they_read_stay_outside_of_bodies() -> None:
    """A tensor made in each layer, and a Python float of each: the graph is compiled once, and right."""

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sin() * self.scale

    model = nn.Sequential(*(Holding() for _ in range(4)))
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="multigraph", dynamic=dynamic, options={"repeat": "always"})
        with torch.no_grad():
            for rows in (1, 5):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(compiled(x), model(x))
        stats = multigraph_backend.stats()
        assert (stats["repeat_retries"], stats["eager_calls"]) == (0, 0)


def test_each_call_draws_its_own_random_numbers_the_same_as_without_bodies() -> None:
    model, x = layers(4, rate=0.4), torch.randn(64, 8)
    drawn = []
    with torch.no_grad():
        for repeat in (False, "always"):
            compiled = repeating(model, repeat)
            for seed in (3, 4):
                torch.manual_seed(seed)
                drawn.append(compiled(x))
            torch._dynamo.reset()
    torch.testing.assert_close(drawn[2:], drawn[:2])
    assert not torch.equal(drawn[2], drawn[3])
    assert_called()


def test_a_backward_runs_again_and_saved_tensors_are_packed() -> None:
    """Nothing is donated to a backward that calls bodies, so it writes into nothing that a second run would read."""
    model = layers(4)
    rule = {"match": {"dtype": "float32", "min_bytes": 1}, "pack": {"cast": "bfloat16"}}
    compiled = repeating(model, saved_tensors=[rule])
    x = torch.randn(16, 8, requires_grad=True)
    out = compiled(x).square().sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    (eager,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(first, eager, rtol=0.05, atol=0.05)
    assert multigraph_backend.stats()["packed_tensors"] > 0
    assert_called()


def test_a_compile_that_fails_is_done_again_only_where_blocks_came_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    def fails(*args: Any, **settings: Any) -> Any:
        nonlocal tried
        tried += 1
        raise RuntimeError("there is no code")

    monkeypatch.setattr(_compat, "compile_fx_inner", fails)
    x = torch.randn(4, 8)
    for program, again in ((lambda x: (x.sin() @ x.T).relu(), False), (layers(4), True)):
        tried = 0
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(program, backend="multigraph")(x), program(x))
        assert (tried > 1) == again
        assert multigraph_backend.stats()["repeat_retries"] == again


def test_an_error_that_has_to_do_with_no_block_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Inputs that overlap and are written to are refused with bodies and without: nothing is said of bodies."""
    model = layers(4)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return model(y) + model(x)

    made = []
    for run in (torch.compile(program, backend="multigraph"), program):
        memory = torch.arange(40.0)
        with torch.no_grad():
            made.append(run(memory[:24].view(3, 8), memory[8:32].view(3, 8)))
    torch.testing.assert_close(*made)
    assert multigraph_backend.stats()["eager_calls"] == 1
    said = [record.getMessage() for record in caplog.records if "overlap" in record.getMessage()]
    assert len(said) == 1
    assert "come again" not in said[0]


class Patches(nn.Module):
    """A convolution hands its layers what has other strides than they are given eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers = nn.Conv2d(3, 8, 4, 4), layers(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(self.patches(x).flatten(2).transpose(1, 2))
        return made


def test_in_mode_lite_layers_are_compiled_as_they_stand() -> None:
    """There Inductor runs its marks of strides as they stand, and clones: a view of what is laid out otherwise."""
    model, x = Patches(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="multigraph", options={"mode": "lite", "repeat": "always"})
    mine, theirs = (torch.autograd.grad(run(x).square().sum(), list(model.parameters())) for run in (compiled, model))
    torch.testing.assert_close(mine, theirs)
    assert "operators are eager's" in generic().repeated


@pytest.mark.slow
def test_code_that_hands_out_what_it_was_given_is_compiled_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of the code is believed: here it is said to be wrong, and the graph is compiled once more."""
    monkeypatch.setattr(one_body, "wrong", lambda source, name: "hands out x, which it was given")
    model = layers(4)
    compiled = repeating(model)
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert "the compile with calls of one body failed" in generic().repeated
    assert multigraph_backend.stats()["repeat_retries"] == 1
    assert multigraph_backend.stats()["eager_calls"] == 0


def test_layers_are_calls_unless_somebody_wants_none() -> None:
    model, x = layers(3), torch.randn(3, 8)
    for options, said in (({}, "calls of one body"), ({"repeat": False}, "")):
        compiled = torch.compile(model, backend="multigraph", options=options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        assert said in (generic().repeated or "")
        assert bool(said) == bool(generic().repeated)
        torch._dynamo.reset()


def test_of_a_graph_without_equal_blocks_nothing_is_said() -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x).relu(), backend="multigraph")
    compiled(torch.randn(4, 4))
    assert generic().repeated is None


def test_layers_are_traced_once_with_their_gradients() -> None:
    """Types, sizes and strides are static here, so AOTAutograd sees one operator for each layer."""
    model = layers(4)
    compiled = repeating(model)
    x = torch.randn(3, 8)
    torch._dynamo.mark_static(x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert "1 of the bodies traced once" in generic().repeated
    torch._dynamo.reset()
    model.zero_grad()
    compiled(x).square().sum().backward()
    got = [value.grad for value in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(got, [value.grad for value in model.parameters()])
    said = multigraph_backend.explain().regions[-1].generic.repeated
    assert said is not None
    assert said.count("of the bodies traced once") == 2
    assert_called()


class Convolved(nn.Module):
    """A block of ConvNeXt's kind: a convolution, and the rest with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x).permute(0, 2, 3, 1)
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2) * 0.5


@pytest.mark.slow
def test_bodies_between_convolutions_are_given_the_strides_that_they_were_made_for() -> None:
    """Gradients of convolutions have other strides when Inductor asks than AOTAutograd said.  No body holds one."""
    model, other = (nn.Sequential(*(Convolved() for _ in range(4))) for _ in range(2))
    other.load_state_dict(model.state_dict())
    compiled = repeating(other)
    found = []
    for run, here in ((compiled, other), (model, model)):
        x = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = run(x)
        (out * torch.linspace(-1, 1, 4)).sum().backward()
        found.append([out, x.grad, *(parameter.grad for parameter in here.parameters())])
    torch.testing.assert_close(*found)
    assert generic().repeated.count("1 of the bodies traced once") == 2
    assert "convolution" not in generic().repeated
    assert_called()


@pytest.mark.parametrize("repeat", ["always", "auto"])
def test_layers_that_are_traced_once_drop_out_each_its_own(repeat: str) -> None:
    """With numbers from torch's own generator, which eager draws from, too."""
    model = layers(4, rate=0.4)
    other = layers(4, rate=0.4)
    other.load_state_dict(model.state_dict())
    with inductor_config.patch(fallback_random=True):
        compiled = repeating(other, repeat)
        for seed in range(2):
            x = torch.randn(6, 8)
            torch.testing.assert_close(step(compiled, other, x, seed), step(model, model, x, seed))
    assert "traced once" in generic().repeated
    assert_called()


@pytest.mark.parametrize("repeat", ["always", "auto"])
def test_the_same_layer_for_the_same_input_drops_out_anew_by_inductors_own_numbers(repeat: str) -> None:
    """Gradients are wanted: a partitioner that takes equal steps for one sees each draw of seeds."""
    model = layers(1, rate=0.5)

    def each(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.tanh(x @ model(x).transpose(0, 1)) for _ in range(4)]

    results = repeating(each, repeat)(torch.randn(8, 8))
    assert "traced once" in generic().repeated
    for index, one in enumerate(results):
        assert one.requires_grad
        assert not any(torch.equal(one, other) for other in results[:index])


class Attends(nn.Module):
    """Queries and keys are rotated; the mask of booleans is made numbers by each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.taken, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        taken = self.taken(self.norm(x)).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        query, key, value = (entry * 0.9 + self.turned(entry) * 0.1 for entry in taken)
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(out.transpose(1, 2).flatten(-2))

    @staticmethod
    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., 4:], x[..., :4]), -1)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        for layer in self.layers:
            x = layer(x, places[:, None] >= places)
        return x


def test_layers_that_are_traced_once_save_what_they_save_without() -> None:
    """Not one mask for each layer: what is saved is decided of the graph as a whole.  Gradients of slices are parts of
    bodies, though they are made out of zeros that are made once."""
    found = []
    model, x = Attending(), torch.randn(2, 8, 16)
    for repeat in (False, "auto"):
        torch._dynamo.reset()
        compiled = repeating(model, repeat, on_failure="raise")
        saved: dict[int, int] = {}

        def note(value: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            loss = compiled(x).square().sum()
        loss.backward()
        found.append((sorted(saved.values()), loss.detach(), [value.grad for value in model.parameters()]))
    said = multigraph_backend.explain().regions[-1].generic.repeated or ""
    assert re.search(
        r"forward: \d calls of one body .* traced once .*backward: \d calls of one body .* traced once", said
    )
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1:], found[1][1:])
    assert_called()


class SavingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + torch.nn.functional.dropout(self.down(y), 0.1, self.training)


class SavingLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SavingLayer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_what_blocks_save_that_are_traced_once_is_packed_as_without() -> None:
    """Around the calls: the same tensors, by rules that name modules too, and the same gradients to the last bit."""
    model, x = SavingLayers(), torch.randn(128, 64, requires_grad=True)
    rules = [Rule(Match(module="*layers.2*"), Keep()), Rule(Match(), Scaled("int8", per=64))]
    found = []
    with inductor_config.patch(fallback_random=True):
        for repeat in (False, "always"):
            torch._dynamo.reset()
            model.zero_grad()
            options = {"repeat": repeat, "saved_tensors": rules, "on_failure": "raise"}
            torch.manual_seed(0)
            torch.compile(model, backend="multigraph", options=options)(x).square().sum().backward()
            generic = multigraph_backend.explain().regions[-1].generic
            (saved,) = generic.saved
            packed = sorted(
                (entry.op, entry.module.removeprefix("L."), entry.shape) for entry in saved.tensors if entry.packed
            )
            found.append((packed, [parameter.grad for parameter in model.parameters()]))
    assert "traced once" in generic.repeated
    assert len(found[0][0]) == 6
    assert not any("layers.2" in module for _, module, _ in found[0][0])
    assert found[1][0] == found[0][0]
    for mine, theirs in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
