"""What torch's own `mark_dynamic(specialize_on=...)` gets wrong, row by row: right here, with the variant in use.

The rows are those of the table "What stock torch does today". Elsewhere: row 13 (warm caches), the background half of
row 11, row 18 (the text of the generated dispatcher).
"""

from __future__ import annotations

import functools
import gc
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.symbolic_shapes import statically_known_true

import multigraph_backend
from multigraph_backend.backend import multigraph
from tests.support.activity import assert_right, compiles, ran, variants

Specialize = list[dict[str, Any]]


def compile(
    function: Callable[..., Any], specialize: Specialize | None = None, compiler: Any = "aot_eager", **more: Any
) -> Any:
    options = {"specialize": specialize or [], "compiler": compiler, **more}
    return torch.compile(function, backend=multigraph, fullgraph=True, options=options)


def marked(*size: int, dims: dict[int, Sequence[Callable[[int], object]]]) -> torch.Tensor:
    """A random tensor with stock marks."""
    x = torch.randn(*size)
    for dim, specialize_on in dims.items():
        torch._dynamo.mark_dynamic(x, dim, specialize_on=list(specialize_on))
    return x


def dynamic(*size: int) -> torch.Tensor:
    return marked(*size, dims=dict.fromkeys(range(len(size)), ()))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + x.sum()


# ---------------------------------------------------------------- 1


def test_row_1_the_specialized_graph_has_no_symbolic_size() -> None:
    linear = torch.nn.Linear(64, 128)
    compiled = compile(linear, compiler="inductor")
    x = marked(32, 64, dims={0: [lambda n: n == 32]})
    with torch.no_grad(), ran(variants=1):
        got, code = run_and_get_code(compiled, x)
        torch.testing.assert_close(got, linear(x))
    assert code
    assert not re.search(r"\b(?:k?s|u)\d+\b", "\n".join(code))


# ---------------------------------------------------------------- 2, 3: wrong numbers


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_row_2_a_size_equal_to_another_at_the_first_match_stays_its_own(compiler: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(x.shape[1]).sum() + x.mean() * 0

    compiled = compile(f, compiler=compiler)
    specialize_on = {0: [lambda n: n % 8 == 0], 1: ()}
    with ran(generic=1):
        assert_right(compiled, f, marked(15, 5, dims=specialize_on))
    with ran(variants=2):
        assert_right(compiled, f, marked(24, 24, dims=specialize_on))
        assert compiled(marked(32, 16, dims=specialize_on)).item() == 16


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("training", [False, True])
def test_row_3_a_batch_equal_to_a_hidden_size(compiler: str, training: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    compiled = compile(model, compiler=compiler)

    def step(run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        out = run(x)
        if not training:
            return [out]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        assert x.grad is not None
        return [out, x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for rows, met in ((10, False), (16, True), (24, True), (8, True), (11, False), (16, True)):
        x = torch.randn(rows, 8, requires_grad=training)
        y = x.detach().clone().requires_grad_(training)
        torch._dynamo.mark_dynamic(y, 0, specialize_on=[lambda n: n % 8 == 0])
        with torch.set_grad_enabled(training), ran(variants=int(met), generic=int(not met)):
            torch.testing.assert_close(step(compiled, y), step(model, x))
    assert compiles() == (1, 1)


# ---------------------------------------------------------------- 4: what a custom backend can see


@pytest.mark.parametrize(
    ("check", "question"),
    [
        (lambda n: n == 16, lambda n: n == 16),
        (lambda n: n % 8 == 0, lambda n: n % 8 == 0),
        (lambda n: n <= 20, lambda n: n < 21),
    ],
)
def test_row_4_a_custom_compiler_knows_what_was_declared(
    check: Callable[[int], object], question: Callable[[Any], Any]
) -> None:
    known: list[bool] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        known.extend(statically_known_true(question(x.shape[0])) for x in inputs if isinstance(x, torch.Tensor))
        return gm.forward

    compiled = compile(double, compiler=compiler)
    with ran(variants=1):
        assert_right(compiled, double, marked(16, 4, dims={0: [check]}))
    with ran(generic=1):
        assert_right(compiled, double, marked(21, 4, dims={0: [check]}))
    assert known == [True, False]


# ---------------------------------------------------------------- 5, 6: unbacked sizes


def test_row_5_an_unbacked_size_can_be_specialized() -> None:
    def call(rows: int) -> None:
        x = torch.randn(rows, 4)
        mark_unbacked(x, 0, specialize_on=[lambda n: n == 8])
        assert_right(compiled, double, x)

    compiled = compile(double)
    with ran(generic=1):
        call(5)
    with ran(variants=2):
        call(8)
        call(8)
    with ran(generic=1):
        call(6)
    assert multigraph_backend.stats()["regions"] == 1


def test_row_6_marks_of_several_dimensions_are_all_kept() -> None:
    def call(rows: int, columns: int) -> None:
        x = torch.randn(rows, columns)
        multigraph_backend.mark(x, 0, specialize_on=[8])
        multigraph_backend.mark(x, 1, specialize_on=[lambda n: n == 6], unbacked=True)
        assert_right(compiled, double, x)

    compiled = compile(double)
    with ran(variants=2, generic=1):
        call(8, 5)
        call(7, 6)
        call(7, 5)
    assert {v["condition"]: v["calls"] for v in variants()} == {"x[0] == 8": 1, "x[1] == 6": 1}


@pytest.mark.parametrize("unbacked", [False, True])
def test_row_6_the_list_form_keeps_its_specializations(unbacked: bool) -> None:
    def call(rows: int, columns: int) -> None:
        x = torch.randn(rows, columns)
        multigraph_backend.mark(x, [0, 1], specialize_on=[8], unbacked=unbacked)
        assert_right(compiled, double, x)

    compiled = compile(double)
    with ran(variants=2, generic=1):
        call(8, 5)
        call(7, 8)
        call(7, 5)


def test_row_6_what_torch_lost_is_reported() -> None:
    x = marked(8, 4, dims={0: [lambda n: n == 8]})
    mark_unbacked(x, 1)
    compiled = compile(double)
    assert_right(compiled, double, x)
    notes = multigraph_backend.explain().to_dict()["regions"][0]["notes"]
    assert any("x[0]" in note and "lost" in note for note in notes), notes


# ---------------------------------------------------------------- 7: unused, merged, 1


def test_row_7_a_mark_on_an_input_that_the_function_ignores() -> None:
    def f(x: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = compile(f)
    for rows, met in ((8, True), (9, False)):
        x, ignored = marked(rows, 4, dims={0: [lambda n: n == 8]}), marked(6, 4, dims={0: [lambda n: n == 6]})
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, f, x, ignored)


def test_row_7_a_mark_on_an_input_that_the_graph_does_not_take() -> None:
    def f(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x * 2 if other.shape[0] > 5 else x * 3

    compiled = compile(f)
    for rows, others, met in ((8, 6, True), (9, 6, False), (8, 7, True)):
        x, other = marked(rows, 4, dims={0: [lambda n: n == 8]}), marked(others, 4, dims={0: [lambda n: n == 6]})
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, f, x, other)
    notes = multigraph_backend.explain().to_dict()["regions"][0]["notes"]
    assert any("other[0]" in note for note in notes), notes


def test_row_7_a_mark_on_an_input_of_which_only_the_size_is_used() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * x.shape[0] + torch.arange(x.shape[0]).sum()

    compiled = compile(f)
    for rows, met in ((8, True), (9, False), (8, True)):
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, f, marked(rows, 4, dims={0: [lambda n: n == 8]}), dynamic(5, 3))


def test_row_7_marked_sizes_that_dynamo_merges() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    compiled = compile(f)
    for rows, met in ((9, False), (8, True), (16, True), (10, False)):
        x, y = marked(rows, 4, dims={0: [lambda n: n == 16]}), marked(rows, 4, dims={0: [lambda n: n == 8]})
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, f, x, y)


def test_row_7_a_first_call_with_size_1() -> None:
    compiled = compile(double)
    for rows in (1, 8, 9, 1):
        with ran(variants=int(rows == 8), generic=int(rows != 8)):
            assert_right(compiled, double, marked(rows, 4, dims={0: [lambda n: n == 8]}))


def test_row_7_size_1_itself_can_be_declared() -> None:
    compiled = compile(double)
    for rows in (1, 8, 1):
        with ran(variants=int(rows == 1), generic=int(rows != 1)):
            assert_right(compiled, double, marked(rows, 4, dims={0: [lambda n: n == 1]}))


# ---------------------------------------------------------------- 8, 9: any callable


class EqualTo:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, n: int) -> bool:
        return n == self.size


def _is(size: int, n: int) -> bool:
    return n == size


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(eval("lambda n: n == 8"), id="eval"),
        pytest.param(functools.partial(_is, 8), id="partial"),
        pytest.param(EqualTo(8), id="object"),
        pytest.param((8).__eq__, id="built-in"),
    ],
)
def test_row_8_callables_without_source(check: Callable[[int], object]) -> None:
    compiled = compile(double)
    for rows in (9, 8, 8):
        with ran(variants=int(rows == 8), generic=int(rows != 8)):
            assert_right(compiled, double, marked(rows, 4, dims={0: [check]}))


@pytest.mark.parametrize(
    ("check", "met"),
    [
        pytest.param(lambda n: n in (8, 16), (8, 16), id="in"),
        pytest.param(lambda n: not n != 8, (8,), id="not"),  # noqa: SIM202
        pytest.param(lambda n: bool(n == 8), (8,), id="bool"),
        pytest.param(lambda n: 8 <= n <= 16, (8, 9, 16), id="chain"),
        pytest.param(lambda n: n > 7 and n % 8 == 0, (8, 16), id="and"),
        pytest.param(lambda n: True, (7, 8, 9, 16), id="always"),
        pytest.param(lambda n: 1, (7, 8, 9, 16), id="not a bool"),
    ],
)
def test_row_9_callables_that_need_a_bool(check: Callable[[int], object], met: Sequence[int]) -> None:
    compiled = compile(double)
    for rows in (7, 8, 9, 16, 8):
        with ran(variants=int(rows in met), generic=int(rows not in met)):
            assert_right(compiled, double, marked(rows, 4, dims={0: [check]}))


def test_row_9_a_negation_is_no_fact_but_a_check() -> None:
    compiled = compile(double)
    for rows, met in ((7, True), (8, False), (7, True)):
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, double, marked(rows, 4, dims={0: [lambda n: n != 8]}))
    assert_right(compiled, double, marked(9, 4, dims={0: [lambda n: n != 8]}))


# ---------------------------------------------------------------- 10: threads


def test_row_10_four_threads_on_four_specializations() -> None:
    function = torch.nn.Linear(4, 4)
    # without fullgraph: torch 2.11 keeps that in a process-wide setting, which threads leave wrong
    options = {"specialize": [{"input[0]": [8, 16, 24, 32]}], "compiler": "aot_eager"}
    compiled = torch.compile(function, backend=multigraph, options=options)
    torch._dynamo.mark_dynamic(x := torch.randn(5, 4), 0)
    with torch.no_grad():
        compiled(x)
    start = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(rows: int) -> None:
        try:
            start.wait()
            for _ in range(6):
                with torch.no_grad():
                    assert_right(compiled, function, torch.randn(rows, 4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (8, 16, 24, 32)]
    with ran(variants=24):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert compiles() == (4, 1)


# ---------------------------------------------------------------- 11, 12: a compile inside a request


def test_row_11_a_stance_against_compiling_holds_for_variants() -> None:
    compiled = compile(double, [{"x[0]": 8}])
    assert_right(compiled, double, dynamic(9, 4))
    with torch.compiler.set_stance("eager_on_recompile"), ran(generic=1):
        assert_right(compiled, double, dynamic(8, 4))
    assert compiles() == (0, 1)
    with ran(variants=1):
        assert_right(compiled, double, dynamic(8, 4))


def test_row_12_generic_serves_where_a_compile_fails() -> None:
    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(isinstance(x, torch.Tensor) and statically_known_true(x.shape[0] == 8) for x in inputs):
            raise RuntimeError("no code for eight rows")
        return gm.forward

    compiled = compile(double, [{"x[0]": 8}], compiler)
    with ran(generic=1, failures=1):
        assert_right(compiled, double, dynamic(8, 4))
    with ran(generic=2):
        assert_right(compiled, double, dynamic(8, 4))
        assert_right(compiled, double, dynamic(9, 4))
    (variant,) = variants()
    assert variant["state"] == "failed"
    assert "no code for eight rows" in variant["reason"]


# ---------------------------------------------------------------- 14, 15, 16: which one runs, which ones are compiled


def test_row_14_the_first_match_wins_and_what_it_hides_is_reported() -> None:
    compiled = compile(double)
    with ran(variants=2):
        for _ in range(2):
            assert_right(compiled, double, marked(16, 4, dims={0: [lambda n: n % 8 == 0, lambda n: n == 16]}))
    assert [v["calls"] for v in variants()] == [2, 0]
    assert multigraph_backend.explain().to_dict()["regions"][0]["unreachable"] == ["x[0] == 16"]


def test_row_15_several_sizes_at_once() -> None:
    compiled = compile(double, [{"x[0]": 8, "x[1]": {"multiple_of": 4}}])
    for size, met in (((8, 6), False), ((8, 12), True), ((7, 12), False), ((8, 4), True), ((8, 8), True)):
        with ran(variants=int(met), generic=int(not met)):
            assert_right(compiled, double, dynamic(*size))


def test_row_16_generic_is_compiled_when_a_call_needs_it() -> None:
    compiled = compile(double, [{"x[0]": 8}])
    assert_right(compiled, double, dynamic(8, 4))
    assert compiles() == (1, 0)
    assert_right(compiled, double, dynamic(9, 4))
    assert compiles() == (1, 1)


# ---------------------------------------------------------------- 17: options need no marks


def test_row_17_options_hold_for_clones_slices_and_later_tensors() -> None:
    compiled = torch.compile(
        double, backend=multigraph, dynamic=True, options={"specialize": [{"x[0]": 8}], "compiler": "aot_eager"}
    )
    buffer = torch.randn(20, 4)
    with ran(generic=1):
        torch.testing.assert_close(compiled(buffer), double(buffer))
    with ran(variants=3):
        for x in (buffer[4:12], buffer[:8].clone(), torch.randn(8, 4)):
            torch.testing.assert_close(compiled(x), double(x))


# ---------------------------------------------------------------- 19: nothing of the tracer lives on


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_row_19_nothing_of_the_trace_is_kept(compiler: str) -> None:
    kept: dict[str, weakref.ref[Any]] = {}

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.get()
        assert context.fake_mode is not None
        traced = {"graph module": gm, "graph": gm.graph, "context": context, "fake mode": context.fake_mode}
        kept.update({name: weakref.ref(value) for name, value in traced.items()})
        options = {"specialize": [{"input[0]": 8}], "compiler": compiler}
        return multigraph(gm, example_inputs, options=options)

    linear = torch.nn.Linear(4, 4)
    compiled = torch.compile(linear, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (9, 8):
            with ran(variants=int(rows == 8), generic=int(rows != 8)):
                assert_right(compiled, linear, torch.randn(rows, 4))
    gc.collect()
    assert [name for name, ref in kept.items() if ref() is not None] == []
    multigraph.reset()  # Dynamo knows the wrapper alone


# ---------------------------------------------------------------- 20: guards of a specialized compile


def test_row_20_what_a_compile_assumes_is_checked() -> None:
    assumed: list[str] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        (n,) = [x.shape[0] for x in inputs if isinstance(x, torch.Tensor)]
        small = bool(n <= 100)  # a question to the example: a guard
        assumed.append("small" if small else "large")
        return lambda *args: [out if small else out + 0 for out in gm.forward(*args)]

    compiled = compile(double, [{"x[0]": {"multiple_of": 16}}], compiler)
    with ran(variants=4):
        for rows in (16, 160, 32, 320):
            assert_right(compiled, double, dynamic(rows, 4))
    assert assumed == ["small", "large"]
    (variant,) = variants()
    assert len(variant["forms"]) == 2
    assert all("x[0]" in form for form in variant["forms"])


def test_row_20_inductor_splits_a_reduction_by_its_size() -> None:
    compiled = compile(double, [{"x[0]": {"multiple_of": 16}}], "inductor")
    with ran(variants=3):
        for rows in (64, 4096, 128):
            x = torch.randint(-4, 5, (rows, 4)).float()  # whose sum is exact in any order
            torch._dynamo.mark_dynamic(x, 0)
            assert_right(compiled, double, x)
    (variant,) = variants()
    assert len(variant["forms"]) == 2
