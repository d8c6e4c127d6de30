"""Python floats: turned into tensors where the compiler can, otherwise part of the condition; never a stale value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.lower import fresh_inputs

PROGRAMS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "added": lambda x, n: x + n,
    "filled": lambda x, n: torch.full((3,), n) + x.sum(),
    "sine": lambda x, n: x * math.sin(n),
    "branch": lambda x, n: x + 1 if n > 3.2 else x - n,
    "truncated": lambda x, n: x * int(n),
    "clamped": lambda x, n: torch.clamp(x, min=-n, max=n),
    "repeated": lambda x, n: x.repeat(int(n // 1)),
    "counted": lambda x, n: torch.arange(0, n, 0.5) + x[0],
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_every_value_of_a_float_gives_its_own_result(
    program: Callable[[torch.Tensor, float], torch.Tensor], compiler: str
) -> None:
    options = {"compiler": compiler, "specialize": [{"x[0]": 5}]}
    compiled = torch.compile(program, backend=multigraph, dynamic=True, options=options)
    for size, number in ((5, 3.5), (5, 4.5), (6, 3.5), (5, 5.25), (6, 2.5), (5, 3.5)):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x, number), program(x, number))
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"]) == (4, 2)
    assert ran["failures"] == ran["eager_calls"] == 0


def test_a_float_that_a_module_holds_and_torch_found_constant_is_a_number_in_the_graph() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8, eps=1e-2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    model = Model()
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 5}]}
    compiled = torch.compile(model, backend=multigraph, dynamic=True, options=options)
    for rows in (5, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"], ran["failures"]) == (1, 1, 0)


def test_floats_inside_a_checkpointed_block_are_numbers_there_or_part_of_the_condition() -> None:
    class Block(torch.nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.norm, self.shift = torch.nn.RMSNorm(8, eps=10 * shift), shift

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return (self.norm(x) + self.shift).sin() * scale

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(1e-3), Block(1e-2)

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            inner = checkpoint(self.first, x, scale, use_reentrant=False)
            return checkpoint(self.second, inner, 0.25, use_reentrant=False)  # type: ignore[no-any-return]

    model = Model()
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 5}]}
    compiled = torch.compile(model, backend=multigraph, dynamic=True, options=options)
    for rows, scale in ((5, 2.5), (6, 2.5), (6, 3.25), (5, 3.25)):
        x, y = (torch.randn(rows, 8, requires_grad=True) for _ in range(2))
        with torch.no_grad():
            y.copy_(x)
        actual, expected = compiled(x, scale), model(y, scale)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*torch.autograd.grad(actual.sum(), x), *torch.autograd.grad(expected.sum(), y))
    ran = multigraph_backend.stats()
    assert (ran["variant_calls"], ran["generic_calls"], ran["eager_calls"], ran["failures"]) == (2, 2, 0, 0)


def test_floats_of_one_model_do_not_leak_into_the_compile_of_another() -> None:
    def constant(x: torch.Tensor, n: float) -> torch.Tensor:
        return torch.full((3,), n) + x.sum()

    def scaled(x: torch.Tensor, n: float) -> torch.Tensor:
        return x * n

    x = torch.randn(5)
    for function in (constant, scaled, constant):
        compiled = torch.compile(function, backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
        for number in (1.5, 2.5):
            torch.testing.assert_close(compiled(x, number), function(x, number))
    assert multigraph_backend.stats()["failures"] == 0


class Attribute(torch.nn.Module):
    scale = 2.0

    def forward(self, x: torch.Tensor, n: float) -> torch.Tensor:
        return x * self.scale


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: float) -> torch.Tensor:
        return self.inner(x, {"scale": [n, 0.5]})

    def inner(self, x: torch.Tensor, settings: dict[str, list[float]]) -> torch.Tensor:
        first, second = settings["scale"]
        return x * first + second


PLACES: dict[str, Callable[..., torch.Tensor]] = {
    "argument": lambda x, n: x * n,
    "temperature": lambda x, n: torch.softmax(x * n, 0),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "list": lambda x, n: x * n[0] + n[1],
    "dict": lambda x, n: x * n["scale"],
    "attribute": Attribute(),
    "nested": Nested(),
}
EDGES = (0.0, 1.0, 2.0, -1.0, 0.5, 1.0, 0.0, 1e-30)


def given(place: str, function: Callable[..., torch.Tensor], number: float) -> object:
    """The second argument of a call of `function` by which it gets `number`."""
    if place == "attribute":
        assert isinstance(function, Attribute)
        function.scale = number
    return {"list": [number, 1.0], "dict": {"scale": number}}.get(place, number)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("first", [0.0, 1.0])
@pytest.mark.parametrize("place", PLACES)
def test_a_float_that_begins_at_0_or_1_is_read_anew_at_each_call(
    place: str, first: float, dynamic: bool | None
) -> None:
    """torch's ShapeEnv takes an example's 0 and 1 for constants, of floats too, unless it is told not to."""
    function = PLACES[place]
    compiled = torch.compile(function, backend=multigraph, dynamic=dynamic, options={"compiler": "aot_eager"})
    # with dynamic=None the second value makes the float dynamic, so that one is an edge too
    for number in (3.5, first, *EDGES) if dynamic is None else (first, *EDGES):
        x = torch.randn(5)
        argument = given(place, function, number)
        torch.testing.assert_close(compiled(x, argument), function(x, argument))
    ran = multigraph_backend.stats()
    assert ran["generic_calls"] == len(EDGES) + (2 if dynamic is None else 1)
    assert ran["failures"] == ran["eager_calls"] == 0


def test_a_learning_rate_that_warms_up_from_zero() -> None:
    """`dynamic=None`: constant at first, then a symbol; 0.0 and 1.0 come late, as in a schedule."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> torch.Tensor:
        return parameter - rate * gradient

    compiled = torch.compile(step, backend=multigraph, options={"compiler": "aot_eager"})
    for rate in (0.0, 1.0, 0.5, 0.25, 0.0, 1.0, 0.125):
        parameter, gradient = torch.randn(5), torch.randn(5)
        torch.testing.assert_close(compiled(parameter, gradient, rate), step(parameter, gradient, rate))
    assert multigraph_backend.stats()["failures"] == 0


def test_a_symbol_that_becomes_a_number_unchecked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old defect put back: the compile notices, and the call runs eagerly instead of with a constant."""
    shape_env = fresh_inputs._compat.ShapeEnv

    class Specializing(shape_env):  # type: ignore[misc, valid-type]
        def create_symbol(self, *args: object, **kwargs: object) -> object:
            return super().create_symbol(*args, **{**kwargs, "do_not_specialize_zero_one": False})

        @property
        def specialize_zero_one(self) -> bool:
            return True

    monkeypatch.setattr(fresh_inputs._compat, "ShapeEnv", Specializing)
    compiled = torch.compile(lambda x, n: x * n, backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
    for number in (1.0, 2.0):
        x = torch.randn(5)
        torch.testing.assert_close(compiled(x, number), x * number)
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    assert "became the constant 1 in this compile, and nothing checks it" in region["generic"]["reason"]
    assert multigraph_backend.stats()["eager_calls"] == 2


def test_sizes_of_what_a_view_looks_into_stay_symbols_at_0_and_1() -> None:
    """Nothing guards them, so none may become a constant of the compile."""
    made: list[fresh_inputs.FreshInputs] = []
    build = fresh_inputs.build

    def building(*args: object, **kwargs: object) -> fresh_inputs.FreshInputs:
        made.append(build(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fresh_inputs, "build", building)
        compiled = torch.compile(lambda x: x.sin(), backend=multigraph, dynamic=True, options={"compiler": "aot_eager"})
        x = torch.randn(1, 5, requires_grad=True).mul(1)[0]
        torch.testing.assert_close(compiled(x), x.sin())
    fake = made[0].inputs[-1]
    assert all(isinstance(size, torch.SymInt) for size in fake._base.size())


@pytest.mark.parametrize(
    ("kind", "train"),
    [
        ("parameter", True), ("buffer", False), ("changed", True), ("attribute", False), ("argument", True),
        *(
            pytest.param(kind, train, marks=pytest.mark.slow)
            for kind, train in (
                ("parameter", False), ("buffer", True), ("changed", False), ("attribute", True), ("argument", False)
            )
        ),
    ],
)  # fmt: skip
def test_a_double_without_dimensions_is_a_tensor_and_no_float(kind: str, train: bool) -> None:
    """torch makes a symbol of its value, as of a Python float that Dynamo has wrapped: no compile came to an end."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            scale = torch.tensor(0.5, dtype=torch.float64)
            if kind == "parameter":
                self.scale: torch.Tensor = torch.nn.Parameter(scale)
            elif kind in ("buffer", "changed"):
                self.register_buffer("scale", scale)
            else:
                self.scale = scale

        def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
            if kind == "changed":
                self.scale.mul_(1.5)
            return torch.tanh(x) * self.scale * x.shape[0] + (x if given is None else given)

    eager, model = Scaled(), Scaled()
    run = torch.compile(model, backend="multigraph", options={"on_failure": "raise"})
    for size in (5, 7, 1):
        for value in (0.0, 2.5, math.nan):
            given = [torch.tensor(value, dtype=torch.float64)] if kind == "argument" else []
            x = torch.randn(size, 3, requires_grad=train)
            with torch.set_grad_enabled(train):
                found, expected = run(x, *given), eager(x, *given)
                torch.testing.assert_close(found, expected, equal_nan=True)
                if train:
                    torch.testing.assert_close(*(torch.autograd.grad(y.nansum(), x)[0] for y in (found, expected)))
            if kind == "attribute":
                for each in (eager, model):
                    each.scale.fill_(size / 3)
    assert multigraph_backend.stats()["eager_calls"] == 0
