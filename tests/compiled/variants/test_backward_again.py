"""A backward may run more than once for one forward: retained graphs, rows of a jacobian, second backwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config

import multigraph_backend
from multigraph_backend import Cast, Match, Range, Rule
from multigraph_backend.lower import donation, retained
from tests.support import forked
from tests.support.backward_again import Function, also_saves, compiled, counted, writes


@pytest.fixture(autouse=True)
def _no_code_of_earlier_processes() -> Iterator[None]:
    with functorch_config.patch(enable_autograd_cache=False):
        yield


def reads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its backward has memory of its own for all that it makes."""
    return (x @ w).sin() @ w


def given(rows: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)


def assert_again_and_again(run: Function, plain: Function, rows: int = 12, seed: int = 0) -> None:
    """Four backwards of one forward, each with another cotangent, as eager; then one of a graph that goes."""
    inputs = given(rows, seed)
    out, wanted = run(*inputs), plain(*inputs)
    cotangents = [torch.randn_like(wanted) for _ in range(4)]
    for number, cotangent in enumerate([*cotangents, cotangents[0]]):
        retain = number < 4
        got = torch.autograd.grad(out, inputs, cotangent, retain_graph=retain)
        expected = torch.autograd.grad(wanted, inputs, cotangent, retain_graph=retain)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, cotangents[0])


def test_the_backward_that_writes_is_compiled_once_more_when_first_needed() -> None:
    run = compiled(writes)
    inputs = given()
    torch.autograd.grad(run(*inputs).sum(), inputs)
    assert counted() == (0, 0)  # nobody has asked yet
    for seed in range(3):
        assert_again_and_again(run, writes, seed=seed)
    assert counted() == (1, 0)


def test_one_that_writes_nowhere_is_the_same_code() -> None:
    assert_again_and_again(compiled(reads), reads)
    assert counted() == (0, 0)


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
@pytest.mark.parametrize("function", [writes, reads])
def test_rows_of_a_jacobian(function: Function, compiler: str) -> None:
    run = compiled(function, compiler=compiler)
    for seed in range(2):
        inputs = given(3, seed)
        got = torch.autograd.functional.jacobian(run, inputs)
        expected = torch.autograd.functional.jacobian(function, inputs)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert multigraph_backend.stats()["eager_calls"] == 0


def test_gradients_that_could_be_differentiated_again() -> None:
    """`create_graph=True` alone: what stock refuses for its donated memory."""
    run = compiled(writes)
    inputs = given()
    got = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
    expected = torch.autograd.grad(writes(*inputs).square().sum(), inputs)
    torch.testing.assert_close([value.detach() for value in got], list(expected), rtol=1e-4, atol=1e-5)


def test_each_variant_has_its_own() -> None:
    run = compiled(writes, specialize=[Range("x[0]", 2, 16)])
    assert_again_and_again(run, writes, rows=12)
    assert_again_and_again(run, writes, rows=40)
    assert_again_and_again(run, writes, rows=13)
    assert counted() == (2, 0)
    (region,) = multigraph_backend.explain().regions
    assert region.variants[0].calls == region.generic.calls + 1 == 2


def test_packed_graphs() -> None:
    run = compiled(also_saves, saved_tensors=[Rule(Match(op="aten::tanh", min_bytes=0), Cast("bf16"))])
    inputs = given()
    out = run(*inputs)
    cotangent = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    again = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    last = torch.autograd.grad(out, inputs, cotangent)
    wanted_all = torch.autograd.grad(also_saves(*inputs), inputs, cotangent)
    for one, two, three, wanted in zip(first, again, last, wanted_all, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(three, one)
        assert 0 < (one - wanted).norm() / wanted.norm() < 0.02
    assert multigraph_backend.explain().regions[0].generic.saved[0].packed == 1
    assert counted() == (1, 0)


def test_a_graph_that_is_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward is compiled when it is first called, in the state of then: copies serve."""
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "all")
    run = compiled(writes)
    inputs = given()
    torch.autograd.grad(run(*inputs).sum(), inputs)
    assert_again_and_again(run, writes)
    assert counted() == (0, 4)


def test_copies_serve_where_there_is_no_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, process_wide: Any) -> Any:
        raise ValueError("no compiler today")

    monkeypatch.setattr(retained._UndonatedCompile, "compile", fails)
    run = compiled(writes)
    assert_again_and_again(run, writes)
    assert counted() == (0, 4)


def test_copies_serve_where_nothing_may_be_compiled() -> None:
    run = compiled(writes)
    inputs = given()
    torch.autograd.grad(run(*inputs).sum(), inputs)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_again_and_again(run, writes)
    assert counted() == (0, 4)
    assert_again_and_again(run, writes)
    assert counted() == (1, 4)


def test_the_switch_of_torch_is_needed_neither_at_the_compile_nor_at_the_call() -> None:
    with functorch_config.patch(donated_buffer=False):
        run = compiled(writes)
        inputs = given()
        torch.autograd.grad(run(*inputs).sum(), inputs)
    assert_again_and_again(run, writes)
    assert counted() == (0, 0)


def test_under_other_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    run = compiled(writes)
    inputs = given()
    torch.autograd.grad(run(*inputs).sum(), inputs)

    def row(seed: int) -> None:
        assert_again_and_again(run, writes, seed=seed)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(row, range(8)))
    assert counted()[0] == 1


SCRIPT = """
import torch
from multigraph_backend import Cast, Match, Range, Rule, explain
from tests.support.backward_again import also_saves, compiled, counted

rules = [Rule(Match(op="aten::tanh", min_bytes=0), Cast("bf16"))]
run = compiled(also_saves, specialize=[Range("x[0]", 2, 16)], saved_tensors=rules)
x, w = torch.randn(12, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
out = run(x, w)
c = torch.randn_like(out)
first, again = (torch.autograd.grad(out, (x, w), c, retain_graph=True) for _ in range(2))
assert all(torch.equal(a, b) for a, b in zip(first, again))
wanted = torch.autograd.grad(also_saves(x, w), (x, w), c)
assert all(0 < (a - b).norm() / b.norm() < 0.02 for a, b in zip(first, wanted))
(variant,) = explain().regions[0].variants
assert (variant.calls, variant.saved[0].packed) == (1, 1)
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"], *counted())
"""


@pytest.mark.slow
def test_code_from_a_cache_in_a_second_process(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    said = []
    for _ in range(2):
        done = forked.run("-c", SCRIPT, cwd=root, env=environment)
        assert done.returncode == 0, done.stderr
        said.append([int(word) for word in done.stdout.split()])
    (hits, compiles, copies), (hits_again, compiles_again, copies_again) = said
    assert (hits, hits_again) == (0, 1)
    assert (compiles, copies) == (1, 0)
    assert compiles_again == 0  # the graphs are not there: what their code writes into is copied
    assert copies_again == 2


# ---------------------------------------------------------------- what these tests notice


def test_a_backward_that_writes_all_the_same_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained._compat, "keeps_graph", lambda: False, raising=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_again_and_again(compiled(writes), writes)


def test_code_that_torch_refuses_to_run_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "nothing_donated", lambda metadata: None)
    with pytest.raises(RuntimeError, match="donated"):
        assert_again_and_again(compiled(reads), reads)


# ---------------------------------------------------------------- what code writes into

WRITES = """
def call(self, args):
    mm, exp, tangents_1 = args
    buf0 = reinterpret_tensor(exp, (4, 4), (4, 1), 0); del exp  # reuse
    kernel(buf0, mm, tangents_1)
    return (buf0, )
"""


def test_it_is_read_off_the_source() -> None:
    names = ["mm", "exp", "tangents_1"]
    assert retained.written(WRITES, names, [0, 1]) == (1,)
    assert retained.written(WRITES, names, [0]) == ()
    assert retained.written("auto buf0 = std::move(exp);", names, [0, 1]) == (0, 1)
    assert retained.written("", names, [1]) == (1,)


def test_copies_lie_as_the_tensor_does() -> None:
    value = torch.randn(4, 3, 5).permute(2, 0, 1)[:, :, :2]
    made = retained._copy_of(value)
    assert torch.equal(made, value)
    assert made.stride() == value.stride()
    assert made.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    assert retained._copy_of(7) == 7
