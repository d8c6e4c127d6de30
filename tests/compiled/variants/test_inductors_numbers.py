"""Where Inductor's code on the CPU differs from eager: what is kept out, and what is passed on.

docs/sharp-edges.md names the cases.  A row fails when torch mends it, and the page has to say so then; not so where
eager's number, or stock's, is another on another processor (`BY_PROCESSOR`).  Stock's run comes first, in the same
process and with the same caches: its code must not be found for multigraph's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional

import multigraph_backend

INF, NAN = float("inf"), float("nan")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
Tensors = tuple[torch.Tensor, ...]
Program = Callable[..., Tensors]


def floor_division(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    in_place = x.clone()
    in_place //= y
    return x // y, torch.div(x, y, rounding_mode="floor"), x // 0.3, in_place


def remainders(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    return x % y, x % 3, x % -0.3, 5 % y, x.bfloat16() % 0.3


def margin_loss_of_labels(x: torch.Tensor) -> Tensors:
    loss, labels = functional.multilabel_margin_loss, torch.tensor([[3, -1, 0, 0], [1, 0, -1, 2], [-1, 0, 0, 0]])
    return loss(x, labels), loss(x, labels, reduction="none"), loss(x[0], labels[0], reduction="sum")


def softshrink(x: torch.Tensor) -> Tensors:
    return functional.softshrink(x), functional.softshrink(input=x, lambd=0.1)


def powers(x: torch.Tensor) -> Tensors:
    return x**1e-50, x**-1e-46, x.half() ** 1e-50, x**16777217.0, x**-16777219


def variance_of_one(x: torch.Tensor) -> Tensors:
    return x.var(unbiased=False), x.std(unbiased=False), torch.var_mean(x, correction=0)[0]


def indices(x: torch.Tensor) -> Tensors:
    dilated = functional.max_pool2d(x, (2, 3), (3, 2), 1, (3, 2), ceil_mode=True, return_indices=True)
    return functional.max_pool2d(x, 3, 2, 1, return_indices=True)[1], dilated[1]


def indices_in_three(x: torch.Tensor) -> Tensors:
    return (functional.max_pool3d(x.expand(1, 3, 5, 5), 2, 2, (0, 1, 1), return_indices=True)[1],)


def indices_of_nan(x: torch.Tensor) -> Tensors:
    return (functional.max_pool2d(x, 3, 2, 1, return_indices=True)[1],)


def sampled(x: torch.Tensor, grid: torch.Tensor) -> Tensors:
    return (functional.grid_sample(x, grid, align_corners=False),)


def margin_loss(x: torch.Tensor) -> Tensors:
    return (functional.multi_margin_loss(x, torch.tensor([0, 1]), reduction="none"),)


def through_half(x: torch.Tensor) -> Tensors:
    return (x.half().float(),)


def normed(x: torch.Tensor) -> Tensors:
    return (functional.layer_norm(x, (4,)),)


def to_nothing(x: torch.Tensor) -> Tensors:
    return (functional.interpolate(x, scale_factor=0.1),)


def enlarged(x: torch.Tensor) -> Tensors:
    return (functional.interpolate(x, size=(5, 12), mode="bilinear"),)


def unpooled(x: torch.Tensor) -> Tensors:
    return (functional.max_unpool2d(x, torch.tensor([[[[-1]]]]), 2),)


def relative(function: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    """Small numbers are as far apart as the results are from what went in."""
    return lambda x: (function(x) / x,)


def of_infinity(x: torch.Tensor) -> Tensors:
    return (functional.gelu(x),)


def root(x: torch.Tensor) -> Tensors:
    return (x**0.5,)


def one_by_root(x: torch.Tensor) -> Tensors:
    return (x**-0.5,)


def averaged(x: torch.Tensor) -> Tensors:
    return (functional.avg_pool2d(x, 4, 3, 1, ceil_mode=True) * 2,)


def averaged_in_three(x: torch.Tensor) -> Tensors:
    return (functional.avg_pool3d(x, 2, 2, ceil_mode=True) * 2,)


def largest(x: torch.Tensor) -> Tensors:
    return (functional.max_pool2d(x, 3, 2, 1) * 2,)


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)))


def bytes_up_to(largest: int, *sizes: int) -> torch.Tensor:
    return torch.randint(largest + 1, sizes, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


#: eager's numbers under multigraph; behind the inputs, the version of torch from which on they are stock's, too
KEPT_OUT: dict[str, tuple[Program, Tensors, tuple[int, ...] | None]] = {
    "floor division": (floor_division, (torch.tensor([3.0, -3.0]), torch.tensor([0.3, 0.3])), None),
    "floor division of infinity": (floor_division, (torch.tensor([INF]), torch.tensor([2.0])), (2, 15)),
    "floor division by infinity": (floor_division, (torch.tensor([-1.0]), torch.tensor([INF])), (2, 15)),
    "remainder": (remainders, (torch.tensor([1e10, -1e10, 3.0]), torch.tensor([3.0, 7.0, 0.3])), None),
    "remainder of infinity": (remainders, (torch.tensor([1.0, -1.0]), torch.tensor([INF, INF])), (2, 15)),
    "margin loss of labels": (margin_loss_of_labels, (random(3, 4).requires_grad_(),), (2, 15)),
    "softshrink of nan": (softshrink, (torch.tensor([NAN, 1.0, -1.0]),), (2, 15)),
    "variance of nan": (variance_of_one, (torch.tensor(NAN),), None),
    "variance of infinity": (variance_of_one, (torch.tensor([INF]),), None),
    "indices of minus infinity": (indices, (torch.full((1, 1, 5, 5), -INF),), None),
    "indices in three dimensions": (indices_in_three, (torch.full((1, 1, 5, 5), -INF),), None),
    "powers that float32 has not": (powers, (torch.tensor([0.0, -0.0, 1.0, -2.0, -1.0, NAN, INF, 1e-30]),), None),
    "root of minus infinity": (root, (torch.tensor([-INF, 4.0], dtype=torch.float16),), None),
    "one by a root": (one_by_root, (torch.tensor([-INF, -0.0, 4.0]),), None),
    "exponential of a small number": (relative(torch.expm1), (torch.tensor([1e-9, -1e-5] * 8),), (2, 15)),
    "atanh of a small number": (relative(torch.atanh), (torch.tensor([1e-9, -1e-5] * 8),), None),
    "gradient of averages": (averaged, (random(1, 2, 6, 6).requires_grad_(),), None),
    "gradient of averages in three dimensions": (averaged_in_three, (random(1, 2, 5, 5, 5).requires_grad_(),), None),
    "gradient of minus infinity": (largest, (torch.full((1, 1, 6, 6), -INF, requires_grad=True),), None),
}

#: stock's numbers under multigraph; behind the inputs, whether it is generated code that has them
PASSED_ON: dict[str, tuple[Program, Tensors, bool]] = {
    "indices of nan": (indices_of_nan, (torch.full((1, 1, 4, 4), NAN),), True),
    "a sample at nan": (sampled, (random(1, 1, 3, 3), torch.full((1, 1, 1, 2), NAN)), True),
    "too large for float16 in between": (through_half, (torch.tensor([1e10, 1.0]),), True),
    "squares that overflow": (normed, (torch.full((2, 4), 1e30),), True),
    "an index before the first": (unpooled, (random(1, 1, 1, 1),), True),
    "erf of a small number": (relative(torch.erf), (torch.tensor([1e-9, -1e-5] * 8),), True),
    "gelu of infinity": (of_infinity, (torch.full((16,), INF),), True),
    "margin loss of nan": (margin_loss, (torch.tensor([[NAN, 1.0, 2.0], [0.5, 1.0, 2.0]]),), False),
    "interpolation of bytes": (enlarged, (bytes_up_to(255, 1, 3, 8, 9),), False),
    "interpolation to no pixels": (to_nothing, (random(1, 1, 4, 4),), False),
}
#: what vector instructions there are, and which library's kernel eager takes, decides whether stock differs at all
BY_PROCESSOR = {
    "exponential of a small number",
    "atanh of a small number",
    "erf of a small number",
    "elu of a small number",
    "gelu of infinity",
}
if TORCH < (2, 15):
    PASSED_ON["elu of a small number"] = relative(functional.elu), (torch.tensor([-1e-9, -1e-5] * 8),), True


def outcome(program: Program, inputs: Tensors, **how: Any) -> list[torch.Tensor] | str:
    """What it returns, and gradients of inputs that want some; the error's text where there is one."""
    torch._dynamo.reset()
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
    try:
        results = list((torch.compile(program, **how) if how else program)(*inputs))
        wanted = [x for x in inputs if x.requires_grad]
        if wanted:
            weights = torch.arange(1.0, 1 + results[0].numel()).view_as(results[0])
            results += torch.autograd.grad(results[0], wanted, weights)
        return [result.detach() for result in results]
    except (RuntimeError, IndexError) as error:
        return str(error)


def same(ones: list[torch.Tensor] | str, others: list[torch.Tensor] | str) -> bool:
    if isinstance(ones, str) or isinstance(others, str):
        return isinstance(ones, str) and isinstance(others, str)
    return all(torch.allclose(*pair, equal_nan=True) for pair in zip(ones, others, strict=True))


@pytest.mark.parametrize("row", KEPT_OUT)
def test_it_is_eagers_number_where_stock_has_another(row: str) -> None:
    program, inputs, mended = KEPT_OUT[row]
    eager = outcome(program, inputs)
    assert not isinstance(eager, str)
    stock = outcome(program, inputs, backend="inductor")
    assert row in BY_PROCESSOR or same(stock, eager) == (mended is not None and mended <= TORCH)
    found = outcome(program, inputs, backend="multigraph", options={"on_failure": "raise"})
    assert same(found, eager), (eager, found)
    ran = multigraph_backend.stats()
    assert (ran["generic_calls"], ran["eager_calls"]) == (1, 0)


EDGES = (0.0, -0.0, 1.0, -0.3, 3.0, -7.5, INF, -INF, NAN, 1e10, -1e-30, 1e-45, 3e38, 16777217.0)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32, torch.float64])
def test_floor_divisions_are_eagers_at_all_edges_with_their_signs(dtype: torch.dtype) -> None:
    pairs = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(EDGES)).to(dtype)
    x, y = (part.repeat(2) for part in pairs.unbind(1))
    whole = torch.arange(-20, len(x) - 20)

    def program(x: torch.Tensor, y: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
        mixed = [whole // y, x // whole, x // y.double(), whole // 0.3, 5 // y, -0.0 // y, x // x.shape[0]]
        return [x // y, *mixed, *(x // each for each in EDGES)]

    run = torch.compile(program, backend="multigraph", options={"on_failure": "raise"})
    for found, expected in zip(run(x, y, whole), program(x, y, whole), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        signs = (each.signbit() & ~each.isnan() for each in (found, expected))
        assert torch.equal(*signs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_divisions_of_a_size_are_compiled(dtype: torch.dtype) -> None:
    """Of scalars whose ranges Inductor knows: it compares these, and cannot those of two truths."""

    def program(x: torch.Tensor) -> Tensors:
        size, two = torch.scalar_tensor(x.shape[0], dtype=dtype), torch.scalar_tensor(2, dtype=dtype)
        less = 3 - size
        return x + less // two, less % two, torch.div(less, two, rounding_mode="floor"), less // 2, less % -2

    compiled = torch.compile(program, backend="multigraph", dynamic=True, options={"on_failure": "raise"})
    for rows in (2, 5, 8):
        x = torch.randn(rows)
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)


@pytest.mark.parametrize("row", PASSED_ON)
def test_it_is_stocks_number_under_multigraph(row: str) -> None:
    program, inputs, generated = PASSED_ON[row]
    eager, stock = outcome(program, inputs), outcome(program, inputs, backend="inductor")
    assert row in BY_PROCESSOR or not same(stock, eager)
    assert same(outcome(program, inputs, backend="multigraph"), stock)
    without = outcome(program, inputs, backend="multigraph", options={"compiler": "aot_eager"})
    assert same(without, eager if generated else stock)


def pooled(x: torch.Tensor) -> Tensors:
    averages = functional.avg_pool2d(x.nan_to_num(0, 0, 0), 4, 3, 1, ceil_mode=True)
    values, where = functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    return averages.sum((2, 3)) + values.nan_to_num(0, 0, 0).sum((2, 3)), where


@pytest.mark.slow
def test_pooling_is_right_in_every_size() -> None:
    torch.manual_seed(0)
    for height, width in ((9, 8), (12, 7), (6, 6)):
        x = torch.randn(2, 3, height, width)
        x = x.masked_fill(torch.rand_like(x) < 0.9, -INF).requires_grad_()
        compiled = torch.compile(pooled, backend="multigraph", dynamic=True)
        found, expected = compiled(x), pooled(x)
        weights = torch.rand_like(found[0])
        gradients = [torch.autograd.grad((y[0] * weights).sum(), x)[0] for y in (found, expected)]
        for one, other in zip((*found, gradients[0]), (*expected, gradients[1]), strict=True):
            torch.testing.assert_close(one, other)
    ran = multigraph_backend.stats()
    assert ran["eager_calls"] == ran["failures"] == 0


@contextlib.contextmanager
def no_code_from_caches() -> Iterator[None]:
    """Which does not say what was repeated in it; kernels may come from there."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + functional.avg_pool1d(y[None], 4, 3, 1, ceil_mode=True)[0].sum() + (x.detach() * 30 // 0.3) / 99


@pytest.mark.parametrize("repeat", ["auto", "always"])
def test_bodies_of_repeated_blocks_have_eagers_numbers(repeat: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block() for _ in range(8)])
    x = torch.randn(6, 8)
    compiled = torch.compile(model, backend="multigraph", options={"repeat": repeat, "on_failure": "raise"})
    with no_code_from_caches():
        y = compiled(x)
        found = [y, *torch.autograd.grad(y.square().mean(), list(model.parameters()))]
    y = model(x)
    expected = [y, *torch.autograd.grad(y.square().mean(), list(model.parameters()))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert "calls of one body" in str(multigraph_backend.explain())


class SumWithZero(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = -torch.relu(self.linear(x))  # many are -0.0
        return x + torch.atan(1.0 / (y + 0.0)) * torch.atan(1.0 / (y + 0.0)).cos().exp()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("repeat", [False, "auto", "always"])
def test_sums_with_zero_keep_their_sign_in_bodies(repeat: bool | str, training: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[SumWithZero() for _ in range(5)])
    compiled = torch.compile(model, backend="multigraph", options={"repeat": repeat, "on_failure": "raise"})
    x = torch.randn(4, 8)
    with torch.set_grad_enabled(training), no_code_from_caches():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert ("calls of one body" in str(multigraph_backend.explain())) == bool(repeat)


# ---------------------------------------------------------------- what a graph is given


class Scaled(torch.nn.Module):
    def __init__(self, by: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("by", by)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by + 1


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


@pytest.mark.parametrize("function", [lambda x: x * 2 + x.shape[0], in_place])
def test_negated_views_are_read_as_such(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    complexes = torch.randn(3, 4, dtype=torch.complex64)

    def right(compiled: Any, negated: bool) -> bool:
        mine, theirs = complexes.clone(), complexes.clone()
        given, expected = ((z.conj() if negated else z).imag for z in (mine, theirs))
        same = torch.equal(compiled(given), function(expected))
        return same and torch.equal(mine, theirs)

    assert not right(torch.compile(function), True)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="multigraph", dynamic=True)
    before = multigraph_backend.stats()["generic_compiled"]
    assert [right(compiled, negated) for negated in (False, True, False, True)] == [True] * 4
    assert str(multigraph_backend.explain()).count("negatives of what lies in its memory") == 1
    assert multigraph_backend.stats()["generic_compiled"] == before + 2  # and no third for what comes again


def test_negated_buffers_are_read_as_such() -> None:
    model, x = Scaled(torch.randn(3, 4, dtype=torch.complex64).conj().imag), torch.randn(3, 4)
    assert not torch.equal(torch.compile(model)(x), model(x))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="multigraph")(x), model(x))


def test_gradients_of_a_negated_view() -> None:
    leaf = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    found = torch.compile(lambda x: (x * x).sum(), backend="multigraph")(leaf.conj().imag)
    expected = (leaf.conj().imag ** 2).sum()
    torch.testing.assert_close(torch.autograd.grad(found, leaf), torch.autograd.grad(expected, leaf))


def test_zeros_of_both_signs_are_two_constants_in_a_graph_with_gradients() -> None:
    """torch's partitioner looks for equal steps, and 0.0 == -0.0."""

    def function(x: torch.Tensor) -> torch.Tensor:
        of_zero, of_negative = (torch.copysign(x, torch.full_like(x, zero)) for zero in (0.0, -0.0))
        return of_zero * 2 + of_negative * torch.atan2(x * 0.0 + -0.0, -torch.ones_like(x))

    def run(compiled: Any, x: torch.Tensor) -> Tensors:
        x = x.clone().requires_grad_()
        y = compiled(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    x = torch.randn(6, 16)
    wanted = run(function, x)
    stock = run(torch.compile(function, backend="inductor"), x)[0]
    assert torch.equal(stock, wanted[0]) == (TORCH >= (2, 15))  # which has mended it
    torch._dynamo.reset()
    for options in ({}, {"repeat": "always"}, {"specialize": [{"x[0]": 6}]}):
        compiled = torch.compile(function, backend="multigraph", dynamic=True, options=options)
        torch.testing.assert_close(run(compiled, x), wanted, rtol=1e-5, atol=1e-6)
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("bounds", [(None, 300), (-5, 300)], ids=str)
def test_integers_are_clamped_to_bounds_that_they_have_no_place_for(
    bounds: tuple[int | None, int | None], dtype: torch.dtype
) -> None:
    """Eager raises, or, from torch 2.15 on, knows better than to take what is left of the bound's bits."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).clamp(*bounds)

    def run(compiled: Any, x: torch.Tensor) -> Any:
        try:
            return compiled(x).tolist()
        except RuntimeError as error:
            return next(line for line in str(error).splitlines() if "value" in line)

    x = torch.tensor([0, 1, 43, 44, 100, 126], dtype=dtype)
    wanted = run(function, x)
    stock = torch.compile(function, backend="inductor")(x)
    assert stock.tolist() != wanted
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="multigraph")
    assert [run(compiled, x), run(compiled, x + 1)] == [wanted, run(function, x + 1)]


BEFORE_THE_BEGIN: dict[str, tuple[Program, bool]] = {
    "index_select": (lambda x, at: (x.index_select(0, at), x.t().index_select(1, at.int())), True),
    "index_add": (lambda x, at: (x.index_add(0, at, x[:2], alpha=2),), True),
    "index_copy": (lambda x, at: (x.clone().index_copy_(0, at, x[:2]),), True),
    "gather": (lambda x, at: (x.gather(0, at.view(1, 2)),), TORCH < (2, 13)),
    "embedding": (lambda x, at: (functional.embedding(at, x),), TORCH < (2, 13)),
    "nll_loss": (lambda x, at: (functional.nll_loss(x[:2], at, ignore_index=-100),), TORCH < (2, 13)),
}


@pytest.mark.parametrize("repeated", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", BEFORE_THE_BEGIN)
def test_an_index_before_the_begin_is_an_error_where_it_is_one_in_eager(
    name: str, repeated: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    program, stock_takes_it = BEFORE_THE_BEGIN[name]
    x, inside, outside = random(4, 3), torch.tensor([0, 2]), torch.tensor([0, -1])
    assert isinstance(outcome(program, (x, outside), backend="inductor"), str) != stock_takes_it
    torch._dynamo.reset()
    run = torch.compile(program, backend="multigraph")
    if repeated:
        assert same(list(run(x, inside)), list(program(x, inside)))
    capfd.readouterr()
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        run(x, outside)
    assert "FX-traced" not in capfd.readouterr().err  # torch's own print, of graphs that are called as modules
    assert same(list(run(x, inside)), list(program(x, inside)))
    assert multigraph_backend.stats()["eager_calls"] == (0 if repeated else 1)
