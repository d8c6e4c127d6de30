"""After `warmup()` nothing is compiled any more, nothing that it touched is changed, and `seal()` holds."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import multigraph_backend
from multigraph_backend import Sealed, seal, stats, unseal, warmup


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    multigraph_backend.reset_stats()
    yield
    unseal()
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """Token numbers that must stay in the table, a mask of the same sizes, a buffer that counts calls, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 16)
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        hidden = torch.nn.functional.dropout(self.table(ids), 0.1, self.training)
        return torch.relu(self.linear(hidden)) * mask.unsqueeze(-1)


SPECIALIZE: list[dict[str, Any]] = [
    {"ids[0]": [1, 8, 16]},
    {"ids[1]": {"multiple_of": 8, "max": 64}},
    {"ids[0]": {"max": 12}},
]


def compiled(model: torch.nn.Module, specialize: list[dict[str, Any]], **options: Any) -> Any:
    options = {"specialize": specialize, "compiler": "aot_eager", **options}
    return torch.compile(model, backend="multigraph", dynamic=True, options=options)


def call(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, 50, (rows, tokens)), "mask": torch.ones(rows, tokens)}


def made() -> tuple[int, int, int]:
    counted = stats()
    return counted["generic_compiled"], counted["variants_compiled"], counted["regions"]


@pytest.mark.parametrize("training", [False, True])
def test_every_size_that_was_declared_runs_afterwards_without_a_compile(training: bool) -> None:
    model = Model().train(training)
    run = compiled(model, SPECIALIZE)
    account = warmup(run, call(4, 10))
    assert account.ready, account
    assert not account.missing
    before = made()
    seal("raise")
    for rows, tokens in ((1, 5), (8, 3), (16, 16), (5, 24), (12, 7), (2, 9), (30, 11)):
        given = call(rows, tokens)
        out = run(**given)
        assert out.shape == (rows, tokens, 16)
        if not training:
            torch.testing.assert_close(out, model(**given))
        out.sum().backward()
    assert made() == before
    assert stats()["after_seal"] == 0
    assert stats()["eager_calls"] == stats()["failures"] == 0


def test_the_largest_inputs_come_first_behind_the_example() -> None:
    account = warmup(compiled(Model().eval(), SPECIALIZE), call(4, 10))
    numbers = [row.sizes["ids[0]"] * row.sizes["ids[1]"] for row in account.calls[1:]]
    assert len(numbers) == 6
    assert numbers == sorted(numbers, reverse=True)
    assert account.calls[0].sizes == {}


def test_buffers_gradients_and_random_numbers_are_as_before() -> None:
    model = Model()
    model.linear.weight.grad = torch.full_like(model.linear.weight, 3.0)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    given = call(4, 10)
    kept = {name: value.clone() for name, value in given.items()}
    torch.manual_seed(5)
    warmup(compiled(model, SPECIALIZE), given)
    assert torch.equal(torch.rand(4), expected)
    assert model.calls.item() == 0
    assert model.linear.weight.grad.eq(3.0).all()
    assert model.table.weight.grad is None
    for name, value in given.items():
        assert torch.equal(value, kept[name])


class Replaces(torch.nn.Module):
    """Puts new tensors in place of its buffers, and draws from Python's generator outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("last", None)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + 1
        self.last = x.sum(0)
        self.calls.add_(1)
        return x + self.total


replaces = Replaces()


@pytest.mark.parametrize("way", ["its forward", "a closure", "a global"])
def test_buffers_that_are_replaced_are_as_before_and_so_in_functions_that_call_a_module(way: str) -> None:
    model = replaces if way == "a global" else Replaces()
    functions = {"a closure": lambda x: (random.random(), model(x))[1], "a global": lambda x: replaces(x)}
    function: Any = functions.get(way, model.forward)
    total = model.total
    random.seed(5)
    numpy.random.seed(5)
    expected = random.random(), numpy.random.rand()
    random.seed(5)
    numpy.random.seed(5)
    with torch.no_grad():
        account = warmup(compiled(function, [{"x[0]": 4}], compiler="eager"), torch.randn(3, 2))
    assert account.calls
    assert model.total is total
    assert model.last is None
    assert total.eq(0).all()
    assert model.calls.item() == 0
    assert (random.random(), numpy.random.rand()) == expected


def test_sizes_of_zero_and_one_that_are_declared_have_graphs_of_their_own_afterwards() -> None:
    run = compiled(Model().eval(), [{"ids[0]": 0}, {"ids[0]": 1}])
    account = warmup(run, call(4, 10))
    assert account.ready, account
    seal("raise")
    for rows in (0, 1, 4):
        assert run(**call(rows, 10)).shape[0] == rows


def test_several_examples_are_several_ways_to_call() -> None:
    def scaled(x: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 if by is None else x * by

    run = compiled(scaled, [{"x[0]": [4, 8]}])  # type: ignore[arg-type]
    account = warmup(run, [(torch.randn(3, 2),), {"x": torch.randn(3, 2), "by": torch.randn(3, 2)}])
    assert account.ready, account
    seal("raise")
    for rows in (4, 8, 5):
        x = torch.randn(rows, 2)
        assert torch.equal(run(x), x * 2)
        assert torch.equal(run(x, by=x.clone()), x * x)


def test_what_an_earlier_condition_answers_is_not_missing() -> None:
    account = warmup(compiled(Model().eval(), [{"ids[0]": {"max": 9}}, {"ids[0]": 0}, {"ids[0]": 4}]), call(20, 10))
    assert account.ready, account


class _Doubles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2


class _Broken(torch.nn.Module):
    """Dynamo leaves the loop to Python, and traces what it calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([_Doubles(), _Doubles()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_a_condition_of_what_is_traced_apart_is_missing_and_says_why() -> None:
    options = {"specialize": [{"x[0]": 8}], "compiler": "eager"}
    call = torch.compile(_Broken(), backend="multigraph", dynamic=True, options=options)
    account = multigraph_backend.warmup(call, torch.randn(5, 6))
    assert not account.ready
    ((what, why),) = account.missing.items()
    assert "x[0] == 8" in what
    assert "traced apart, after a graph break" in why
    call(torch.randn(8, 6))
    assert multigraph_backend.explain().regions[0].variants[0].calls == 2


def test_a_condition_that_cannot_be_met_is_missing_and_says_why() -> None:
    account = warmup(compiled(Model().eval(), [{"idss[0]": 4}]), call(4, 10))
    assert not account.ready
    ((what, why),) = account.missing.items()
    assert "idss[0] == 4" in what
    assert "did you mean 'ids[0]'" in why


def test_an_error_of_one_size_is_told_and_the_others_go_on() -> None:
    def refuses(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).reshape(-1, 6, 2)

    run = compiled(refuses, [{"x[0]": 6}, {"x[0]": 7}, {"x[0]": 12}])  # type: ignore[arg-type]
    account = warmup(run, torch.randn(18, 2))
    failed = [row for row in account.calls if row.failed]
    assert [row.sizes for row in failed] == [{"x[0]": 7}]
    assert not account.ready
    ((what, why),) = account.missing.items()
    assert "x[0] == 7" in what
    assert why.startswith("x[0]=7: failed: ")
    assert any("x[0] == 12" in row.ran for row in account.calls)


def test_other_arguments_than_those_with_names_get_their_sizes_too() -> None:
    def added(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        for entry in more:
            x = x + entry
        return x

    run = compiled(added, [{"x[0]": 4}, {"more[1][1]": 8}], compiler="eager")  # type: ignore[arg-type]
    account = warmup(run, (torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 1)))
    assert [row.ran for row in account.calls[1:]] == [("x[0] == 4",)]
    assert all("more[1][1]" in what for what in account.missing)


def test_nothing_is_ready_where_nothing_of_multigraph_ran() -> None:
    linear = torch.nn.Linear(2, 2)
    for other in (linear, torch.compile(linear, backend="eager")):
        account = warmup(other, torch.randn(3, 2))
        assert not account.ready
        assert "nothing of multigraph" in str(account)
    with torch.compiler.set_stance("force_eager"):
        assert not warmup(compiled(linear, []), torch.randn(3, 2)).ready
    with pytest.raises(TypeError, match="has no call"):
        warmup(compiled(linear, []), [])


def test_the_error_of_the_example_itself_is_the_callers() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            raise KeyError("mine")
        return x + 1

    with pytest.raises(KeyError, match="mine"):
        warmup(compiled(raises, []), torch.randn(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a tuple of arguments"):
        warmup(compiled(raises, []), 4)  # type: ignore[arg-type]


def test_progress_is_said_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    warmup(compiled(Model().eval(), [{"ids[0]": 8}]), call(4, 10), progress=True)
    assert "ids[0] == 8" in capsys.readouterr().err


# ---------------------------------------------------------------- seal


def test_what_is_sealed_to_refuse_runs_generic_or_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = Model().eval()
    run = compiled(model, [{"ids[0]": 8}])
    with torch.no_grad():
        run(**call(4, 10))
        before = made()
        seal("refuse")
        with caplog.at_level(logging.WARNING, logger="multigraph_backend"):
            for rows in (8, 8, 1):  # a variant, and a graph of its own
                given = call(rows, 10)
                torch.testing.assert_close(run(**given), model(**given))
    assert made()[:2] == before[:2]
    assert stats()["after_seal"] >= 3
    assert stats()["eager_calls"] == 1
    unseal()
    run(**call(1, 10))
    assert stats()["eager_calls"] == 1
    said = [record.getMessage() for record in caplog.records if "after seal()" in record.getMessage()]
    assert any("ids[0] == 8 is compiled after seal(): refused" in line for line in said)


def test_what_is_sealed_to_log_is_made_and_said() -> None:
    run = compiled(Model().eval(), [{"ids[0]": 8}])
    run(**call(4, 10))
    seal()
    run(**call(8, 10))
    assert stats()["variants_compiled"] == 1
    assert stats()["after_seal"] == 1


def test_what_is_sealed_to_raise_raises_until_it_is_unsealed() -> None:
    run = compiled(Model().eval(), [{"ids[0]": 8}])
    run(**call(4, 10))
    seal("raise")
    with pytest.raises(Sealed, match=r"ids\[0\] == 8 is compiled after seal\(\)"):
        run(**call(8, 10))
    run(**call(5, 10))
    unseal()
    assert run(**call(8, 10)).shape[0] == 8
    with pytest.raises(ValueError, match="'log', 'refuse', 'raise'"):
        seal("never")  # type: ignore[arg-type]
