"""A compile that fails in any way costs the variant, not the request: the next safer form answers, and is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import checkpoint

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.backend import multigraph
from multigraph_backend.region import registry
from multigraph_backend.region.region import Region
from multigraph_backend.region.variant import MOST_FAILED_FLOATS
from tests.support.activity import assert_right, compiles, ran, variants

# what ends a compile that hangs may reach it inside a weakref callback, where Python drops it; then it is abandoned
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 + x.shape[0]


def compile(compiler: Compiler, function: Callable[..., Any] = f, sizes: Sequence[int] = (8,), **options: Any) -> Any:
    options = {"specialize": [{"x[0]": list(sizes)}], "compiler": compiler, "compile_timeout": 30, **options}
    return torch.compile(function, backend=multigraph, dynamic=True, options=options)


def for_eight_rows(inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dim() and statically_known_true(x.shape[0] == 8) for x in inputs)


def only_the_variant(bad: Compiler) -> Compiler:
    """A compiler that goes wrong for the variant of eight rows and works for generic."""

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return bad(gm, inputs) if for_eight_rows(inputs) else gm.forward

    return compiler


def raises(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise RuntimeError("no such instruction")


def exits(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise SystemExit("a compiler that gives up")


def runs_out_of_memory(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory while tuning")


def sleeps(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    for _ in range(600):
        time.sleep(0.1)


def sleeps_soundly(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    time.sleep(20)  # in C code, where no exception can reach it


def waits_forever(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    threading.Event().wait()


def not_callable(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return "code"


def too_few_outputs(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return lambda *args: ()


def too_many_outputs(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return lambda *args: (*gm.forward(*args), None)


def no_tuple(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return lambda *args: gm.forward(*args)[0]


def no_tensor(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return lambda *args: ["a text" for _ in gm.forward(*args)]


def raises_when_run(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    def run(*args: Any) -> Any:
        raise RuntimeError("the code is broken")

    return run


WHILE_COMPILING = {
    raises: "no such instruction",
    runs_out_of_memory: "out of memory",
    sleeps: "longer than",
    sleeps_soundly: "longer than",
    waits_forever: "longer than",
    not_callable: "not callable",
}
AT_THE_FIRST_RUN = {
    too_few_outputs: "0 outputs",
    too_many_outputs: "2 outputs",
    no_tuple: "Tensor",
    no_tensor: "str",
    raises_when_run: "the code is broken",
}
HANGING = (sleeps, sleeps_soundly, waits_forever)


def limit(bad: Compiler) -> float:
    return 1.0 if bad in HANGING else 30.0


@pytest.mark.parametrize("bad", WHILE_COMPILING, ids=lambda bad: bad.__name__)
def test_generic_answers_where_a_variant_cannot_be_compiled(bad: Compiler) -> None:
    compiled = compile(only_the_variant(bad), compile_timeout=limit(bad))
    started = time.monotonic()
    with ran(generic=1, failures=1):
        assert_right(compiled, f, torch.randn(8, 3), exact=True)
    assert time.monotonic() - started < 10
    started = time.monotonic()
    with ran(generic=2):  # no second try so soon
        assert_right(compiled, f, torch.randn(8, 3), exact=True)
        assert_right(compiled, f, torch.randn(5, 3), exact=True)
    assert time.monotonic() - started < 1
    (variant,) = variants()
    assert variant["state"] == "failed"
    assert WHILE_COMPILING[bad] in variant["reason"]


@pytest.mark.parametrize("bad", AT_THE_FIRST_RUN, ids=lambda bad: bad.__name__)
def test_wrong_code_is_found_at_its_first_run_and_dropped(bad: Compiler) -> None:
    compiled = compile(only_the_variant(bad))
    with ran(eager=1, failures=1):
        assert_right(compiled, f, torch.randn(8, 3), exact=True)
    with ran(generic=2):
        assert_right(compiled, f, torch.randn(8, 3), exact=True)
        assert_right(compiled, f, torch.randn(5, 3), exact=True)
    (variant,) = variants()
    assert variant["state"] == "failed"
    assert AT_THE_FIRST_RUN[bad] in variant["reason"]


@pytest.mark.parametrize("bad", [raises, waits_forever, not_callable, too_few_outputs], ids=lambda bad: bad.__name__)
def test_eager_answers_where_nothing_can_be_compiled(bad: Compiler) -> None:
    compiled = compile(bad, compile_timeout=limit(bad))
    for rows in (8, 5, 8, 5):
        assert_right(compiled, f, torch.randn(rows, 3), exact=True)
    stats = multigraph_backend.stats()
    assert (stats["variant_calls"], stats["generic_calls"], stats["eager_calls"]) == (0, 0, 4)
    assert stats["failures"] == 2


@pytest.mark.parametrize("bad", [*WHILE_COMPILING, *AT_THE_FIRST_RUN], ids=lambda bad: bad.__name__)
def test_who_asks_for_an_error_gets_it(bad: Compiler) -> None:
    compiled = compile(only_the_variant(bad), on_failure="raise", compile_timeout=limit(bad))
    reason = {**WHILE_COMPILING, **AT_THE_FIRST_RUN}[bad]
    with pytest.raises(RuntimeError, match=rf"(?s)x\[0\] == 8.*{reason}"):
        compiled(torch.randn(8, 3))
    with ran(generic=1):
        assert_right(compiled, f, torch.randn(5, 3), exact=True)


def noted_misses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For which variants calls have to look for code, from now on."""
    missed = list[int]()
    plainly = Region.missed

    def noted(self: Region, target: int, args: tuple[Any, ...]) -> Any:
        missed.append(target)
        return plainly(self, target, args)

    monkeypatch.setattr(Region, "missed", noted)
    return missed


def test_calls_past_a_failure_go_the_way_of_generic_until_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands before them but the time: no second look at each input."""
    broken, missed, now = [True], noted_misses(monkeypatch), [0.0]

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return raises(gm, inputs) if broken[0] and for_eight_rows(inputs) else gm.forward

    def added(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x + sum(others)

    compiled = compile(compiler, added)
    others = [torch.randn(3) for _ in range(20)]
    assert_right(compiled, added, torch.randn(5, 3), *others)
    (region,) = registry.living()
    region.variants[0].clock = lambda: now[0]
    with ran(generic=1, failures=1):
        assert_right(compiled, added, torch.randn(8, 3), *others)
    missed.clear()
    now[0] = 59.0
    with ran(generic=3):
        for rows in (8, 5, 8):
            assert_right(compiled, added, torch.randn(rows, 3), *others)
    assert missed == []
    broken[0] = False
    now[0] = 60.0
    with ran(variants=2):
        for _ in range(2):
            assert_right(compiled, added, torch.randn(8, 3), *others)
    assert missed == [0]


def test_where_generic_comes_after_the_failure_calls_past_it_go_its_way_too() -> None:
    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return raises(gm, inputs) if for_eight_rows(inputs) else gm.forward

    compiled = compile(compiler)
    with ran(generic=1, failures=1):
        assert_right(compiled, f, torch.randn(8, 3), exact=True)
    (region,) = registry.living()
    check, _, run, _ = region._ready[0]
    assert run is region._ready[region.generic.number][2]
    assert check is not None


def test_an_error_of_the_program_is_raised_as_it_is_and_the_code_stays(caplog: pytest.LogCaptureFixture) -> None:
    def gathered(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.gather(x, 0, at)

    run, x = compile("aot_eager", gathered), torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="out of bounds"):
        run(x, torch.full((8, 8), 9))
    assert [record.message for record in caplog.records if record.name.startswith("multigraph")] == []
    with ran(variants=1):
        assert torch.equal(run(x, torch.full((8, 8), 2)), x[2].expand(8, 8))


def test_a_compile_that_ends_the_process_does_not() -> None:
    compiled = compile(only_the_variant(exits))
    with ran(generic=1, failures=1):
        assert_right(compiled, f, torch.randn(8, 3), exact=True)


def test_a_failure_in_backward_is_contained_too() -> None:
    def broken_backward(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise RuntimeError("no code for backward")

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def forward(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return make_boxed_func(gm.forward)

        backward = broken_backward if for_eight_rows(inputs) else forward
        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(gm, inputs)

    model = torch.nn.Linear(3, 4)
    compiled = torch.compile(
        model, backend=multigraph, dynamic=True, options={"specialize": [{"input[0]": 8}], "compiler": compiler}
    )
    for rows in (8, 5, 8):
        x = torch.randn(rows, 3)
        with ran(generic=1, failures=int(compiles() == (0, 0))):
            loss, expected = compiled(x).square().sum(), model(x).square().sum()
            got = torch.autograd.grad(loss, list(model.parameters()))
            torch.testing.assert_close(got, torch.autograd.grad(expected, list(model.parameters())))


@pytest.mark.parametrize("bad", [raises, sleeps, waits_forever, raises_when_run], ids=lambda bad: bad.__name__)
def test_other_compiles_work_afterwards(bad: Compiler) -> None:
    compiled = compile(only_the_variant(bad), compile_timeout=limit(bad))
    assert_right(compiled, f, torch.randn(8, 3), exact=True)

    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    stock = torch.compile(g, backend="inductor", dynamic=True)
    torch.testing.assert_close(stock(x := torch.randn(8, 3)), g(x))
    other = compile(lambda gm, inputs: gm.forward, g)
    with ran(variants=1):
        assert_right(other, g, torch.randn(8, 3))
    torch._dynamo.reset()
    compiled = compile(lambda gm, inputs: gm.forward)
    with ran(variants=1):
        assert_right(compiled, f, torch.randn(8, 3), exact=True)


def test_configuration_is_as_before_after_a_compile_that_hangs() -> None:
    import torch._functorch.config as functorch

    before = functorch.force_non_lazy_backward_lowering, torch.is_grad_enabled(), torch.compiler.config.cache_key_tag
    compiled = compile(only_the_variant(waits_forever), compile_timeout=1)
    assert_right(compiled, f, torch.randn(8, 3), exact=True)
    after = functorch.force_non_lazy_backward_lowering, torch.is_grad_enabled(), torch.compiler.config.cache_key_tag
    assert after == before
    assert not torch.compiler.is_compiling()


def draws_and_waits(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    torch.rand(3)
    threading.Event().wait()


def test_random_numbers_go_on_as_before_after_a_compile_that_hangs() -> None:
    compiled = compile(only_the_variant(draws_and_waits), compile_timeout=1)
    x = torch.randn(8, 3)
    compiled(torch.randn(5, 3))
    torch.manual_seed(0)
    compiled(x)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    torch.testing.assert_close(drawn, torch.rand(4), rtol=0, atol=0)
    assert multigraph_backend.stats()["failures"] == 1


# ---------------------------------------------------------------- what must not run twice

CALLED: list[float] = []


@torch.library.custom_op("multigraph_tests::checked", mutates_args=())
def checked(x: torch.Tensor) -> torch.Tensor:
    CALLED.append(float(x.sum()))
    if bool((x > 100).any()):
        raise ValueError("a value over 100")
    return x * 2


@checked.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def by_overload(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.multigraph_tests.checked.default(x) + x.shape[0]


def by_packet(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.multigraph_tests.checked(x) + x.shape[0]


def in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(by_overload, x, use_reentrant=False)  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph
def noted(x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling() and type(x) is torch.Tensor:
        CALLED.append(float(x.sum()))
        if bool((x > 100).any()):
            raise ValueError("a value over 100")
    return x * 2


def by_function(x: torch.Tensor) -> torch.Tensor:
    return noted(x) + x.shape[0]


@pytest.mark.parametrize("rows", [8, 5], ids=["variant", "generic"])
@pytest.mark.parametrize("program", [by_overload, by_packet, in_a_checkpoint], ids=lambda program: program.__name__)
def test_a_custom_operator_that_raises_runs_once(program: Callable[..., Any], rows: int) -> None:
    compiled = compile(lambda gm, inputs: gm.forward, program)
    for _ in range(2):
        CALLED.clear()
        with pytest.raises(ValueError, match="a value over 100"), ran():
            compiled(torch.full((rows, 3), 200.0))
        (total,) = CALLED
        assert total == 600.0 * rows
    with ran(variants=int(rows == 8), generic=int(rows != 8)):
        assert_right(compiled, program, torch.randn(rows, 3))


def test_a_function_that_was_allowed_in_the_graph_runs_once() -> None:
    compiled = compile(lambda gm, inputs: gm.forward, by_function)
    CALLED.clear()
    with pytest.raises(ValueError, match="a value over 100"), ran():
        compiled(torch.full((8, 3), 200.0))
    assert CALLED == [4800.0]


def test_code_with_a_custom_operator_is_not_run_beside_generic_for_its_gain() -> None:
    compiled = compile(lambda gm, inputs: gm.forward, by_overload)
    assert_right(compiled, by_overload, torch.randn(8, 3))
    CALLED.clear()
    with multigraph_backend.measure_gains(), ran(variants=2):
        for _ in range(2):
            compiled(torch.ones(8, 3))
    assert CALLED == [24.0, 24.0]


@pytest.mark.parametrize("bad", AT_THE_FIRST_RUN, ids=lambda bad: bad.__name__)
def test_random_numbers_are_drawn_once_where_code_is_found_wrong(bad: Compiler) -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    def draws(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        run = bad(gm, inputs)

        def drawing(*args: Any) -> Any:
            torch.rand(7)
            return run(*args)

        return drawing

    compiled = compile(draws, noise)
    x = torch.randn(8, 3)
    for rows in (8, 5):
        x = torch.randn(rows, 3)
        torch.manual_seed(0)
        with ran(eager=1, failures=1):
            got = compiled(x), torch.rand(4)
        torch.manual_seed(0)
        torch.testing.assert_close(got, (noise(x), torch.rand(4)), rtol=0, atol=0)


# ---------------------------------------------------------------- values of Python floats


def clamped(x: torch.Tensor, most: float) -> torch.Tensor:
    return torch.clamp(x, max=most)  # code for each value of its own


def failing_at(*values: float, bad: Compiler) -> Compiler:
    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        run = _compat.lookup_compiler("aot_eager")(gm, list(inputs))  # what tells the value from the rest
        return bad(gm, inputs) if any(f"max = {value}" in gm.code for value in values) else run

    return compiler


@pytest.mark.parametrize("bad", [raises, raises_when_run, too_few_outputs], ids=lambda bad: bad.__name__)
@pytest.mark.parametrize("rows", [5, 8], ids=["generic", "variant"])
def test_a_failure_for_one_value_of_a_float_says_nothing_of_others(
    rows: int, bad: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = noted_misses(monkeypatch)
    compiled = compile(failing_at(3.0, bad=bad), clamped)

    def call(rows: int, most: float) -> None:
        assert_right(compiled, clamped, torch.randn(rows, 3), most, exact=True)

    call(rows, 2.5)
    with ran(eager=1, failures=1 if rows == 5 or bad is not raises else 2):
        call(rows, 3.0)
    with ran(generic=2 * (rows == 5), variants=2 * (rows == 8)):
        call(rows, 4.0)
        call(rows, 2.5)
    with ran(eager=1, failures=int(rows == 8 and bad is not raises)):
        call(rows, 3.0)
    with ran(eager=2):  # nobody tries again
        call(rows, 3.0)
        call(rows, 3.0)
    missed.clear()
    call(rows, 4.0)
    assert missed == []


def test_past_a_failure_for_one_value_calls_go_the_way_of_generic(monkeypatch: pytest.MonkeyPatch) -> None:

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if for_eight_rows(inputs):
            return failing_at(3.0, bad=raises)(gm, inputs)
        return _compat.lookup_compiler("aot_eager")(gm, list(inputs))

    missed = noted_misses(monkeypatch)
    compiled = compile(compiler, clamped)
    for rows, most in ((5, 3.0), (8, 2.5), (8, 3.0)):
        assert_right(compiled, clamped, torch.randn(rows, 3), most, exact=True)
    missed.clear()
    with ran(generic=2, variants=2):
        for most in (3.0, 2.5, 3.0, 2.5):
            compiled(torch.randn(8, 3), most)
    assert missed == []
    with ran(variants=1):
        compiled(torch.randn(8, 3), 4.0)


def test_where_every_value_fails_few_are_tried() -> None:
    tried = list[str]()

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        _compat.lookup_compiler("aot_eager")(gm, list(inputs))
        tried.append(gm.code)
        raise RuntimeError("no such instruction")

    compiled = compile(compiler, clamped)
    with ran(eager=20, failures=MOST_FAILED_FLOATS):
        for most in range(20):
            assert_right(compiled, clamped, torch.randn(5, 3), most + 0.25, exact=True)
    assert len(tried) == MOST_FAILED_FLOATS


# ---------------------------------------------------------------- callables that are not understood


def failing_for(rows: int, bad: Compiler) -> Compiler:
    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        (size,) = [x.shape[0] for x in inputs if isinstance(x, torch.Tensor)]
        return bad(gm, inputs) if statically_known_true(size == rows) else gm.forward

    return compiler


@pytest.mark.parametrize("bad", [raises, raises_when_run, too_few_outputs], ids=lambda bad: bad.__name__)
def test_another_size_is_tried_where_the_first_that_an_opaque_check_accepts_fails(
    bad: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multigraph_backend.region.variant._FIRST_RETRY", 0.0)
    compiled = torch.compile(f, backend=multigraph, dynamic=None, options={"compiler": failing_for(8, bad)})

    def call(rows: int) -> None:
        x = torch.randn(rows, 3)
        torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda n: n not in (5, 6)])
        torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)

    for rows in (8, 16, 16, 5):
        call(rows)
    (variant,) = variants()
    assert (variant["state"], variant["calls"]) == ("ready", 2)
    with ran(variants=1, generic=1):  # now it is for 16 alone
        call(8)
        call(16)


# ---------------------------------------------------------------- threads


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(i)` in as many threads, started together; raise the first error."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def body(index: int) -> None:
        try:
            start.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("threads", [4, 32])
def test_threads_on_one_model_cause_one_compile_a_variant(threads: int) -> None:
    made: list[int] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        (rows,) = [x.shape[0] for x in inputs if isinstance(x, torch.Tensor)]
        made.append(int(rows) if isinstance(rows, int) else 0)
        time.sleep(0.3)  # long enough for every thread to ask
        return gm.forward

    compiled = compile(compiler, sizes=(8, 16, 24))
    assert_right(compiled, f, torch.randn(5, 3), exact=True)

    def work(index: int) -> None:
        for turn in range(8):
            rows = (8, 16, 24, 7)[(index + turn) % 4]
            assert_right(compiled, f, torch.randn(rows, 3), exact=True)

    with ran(variants=threads * 6, generic=threads * 2):
        in_threads(threads, work)
    assert sorted(made) == [0, 8, 16, 24]
    assert compiles() == (3, 1)


@pytest.mark.parametrize("threads", [4, 32])
def test_threads_on_a_variant_that_fails_try_it_once(threads: int) -> None:
    tried: list[int] = []

    def bad(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tried.append(1)
        time.sleep(0.3)
        raise RuntimeError("no such instruction")

    compiled = compile(only_the_variant(bad))
    assert_right(compiled, f, torch.randn(5, 3), exact=True)

    def work(index: int) -> None:
        for _ in range(4):
            assert_right(compiled, f, torch.randn(8, 3), exact=True)

    with ran(generic=threads * 4, failures=1):
        in_threads(threads, work)
    assert len(tried) == 1


def test_threads_do_not_wait_behind_a_compile_that_hangs_for_longer_than_its_limit() -> None:
    compiled = compile(only_the_variant(waits_forever), sizes=(8, 16), compile_timeout=1)
    assert_right(compiled, f, torch.randn(5, 3), exact=True)
    started = time.monotonic()
    in_threads(8, lambda index: assert_right(compiled, f, torch.randn((8, 16, 5)[index % 3], 3), exact=True))
    assert time.monotonic() - started < 10
    assert multigraph_backend.stats()["failures"] == 1
    assert multigraph_backend.stats()["eager_calls"] == 0


def test_threads_share_a_first_trace() -> None:
    compiled = compile(lambda gm, inputs: gm.forward, sizes=(8, 16))
    in_threads(4, lambda index: assert_right(compiled, f, torch.randn((8, 16, 5, 6)[index], 3), exact=True))
    stats = multigraph_backend.stats()
    assert (stats["eager_calls"], stats["failures"]) == (0, 0)
