"""Inputs that share memory, begin anywhere in their storage, or are changed in place: right at every call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import multigraph_backend
from multigraph_backend.backend import multigraph


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 4}, {"x[0]": {"multiple_of": 3}}]}
    return torch.compile(function, backend=multigraph, dynamic=True, options=options)


def assert_nothing_fell_back() -> None:
    ran = multigraph_backend.stats()
    assert ran["failures"] == ran["eager_calls"] == 0, str(multigraph_backend.explain())


def add_into(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2 + y


def read_only(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y.sum(0)


# where x and y begin in one buffer of 40 rows, and how many rows they have
PLACES = [
    (0, 20, 4),
    (3, 20, 4),
    (0, 4, 4),
    (2, 4, 4),
    (4, 2, 4),
    (5, 5, 4),
    (0, 20, 6),
    (1, 3, 6),
    (0, 20, 5),
    (4, 6, 5),
]


@pytest.mark.parametrize("function", [add_into, read_only], ids=lambda function: function.__name__)
def test_slices_of_one_buffer_apart_touching_overlapping_or_the_same(function: Callable[..., torch.Tensor]) -> None:
    run = compiled(function)
    for first, second, rows in (*PLACES, *PLACES):
        buffer = torch.randn(40, 2)
        twin = buffer.clone()
        wanted = function(twin[first : first + rows], twin[second : second + rows])
        torch.testing.assert_close(run(buffer[first : first + rows], buffer[second : second + rows]), wanted)
        torch.testing.assert_close(buffer, twin)
    ran = multigraph_backend.stats()
    # forms for ways of sharing are few by design: past them generic and then eager serve
    assert ran["variant_calls"] > 0
    if function is read_only:
        assert_nothing_fell_back()


@pytest.mark.parametrize("function", [add_into, read_only], ids=lambda function: function.__name__)
def test_the_same_tensor_twice_and_then_two_tensors(function: Callable[..., torch.Tensor]) -> None:
    run = compiled(function)
    for same in (False, True, False, True):
        for rows in (4, 6, 5):
            x = torch.randn(rows, 2)
            y = x if same else torch.randn(rows, 2)
            a = x.clone()
            b = a if same else y.clone()
            torch.testing.assert_close(run(x, y), function(a, b))
            torch.testing.assert_close((x, y), (a, b))
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 8


def test_a_window_that_moves_through_a_buffer_needs_one_compile() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1

    run = compiled(scale)
    buffer = torch.randn(64, 2)
    twin = buffer.clone()
    for start in range(0, 60, 4):
        torch.testing.assert_close(run(buffer[start : start + 4]), scale(twin[start : start + 4]))
    torch.testing.assert_close(buffer, twin)
    assert_nothing_fell_back()
    ran = multigraph_backend.stats()
    # the slice at 0 and the others may be two graphs of Dynamo
    assert ran["variants_compiled"] == ran["regions"]
    assert ran["variant_calls"] == 15


def test_a_view_that_needs_gradients_is_changed_in_place() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    run = compiled(scale)
    for start, rows in ((0, 4), (3, 4), (0, 6), (2, 5), (3, 4)):
        leaf, twin = (torch.ones(12, 2, requires_grad=True) for _ in range(2))
        with torch.no_grad():
            twin.copy_(leaf.copy_(torch.randn(12, 2)))
        base, base_twin = leaf * 1, twin * 1
        y = run(base[start : start + rows])
        wanted = scale(base_twin[start : start + rows])
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(base, base_twin)
        (y.sum() + base.square().sum()).backward()
        (wanted.sum() + base_twin.square().sum()).backward()
        torch.testing.assert_close(leaf.grad, twin.grad)


def returns_chunk(y: torch.Tensor) -> torch.Tensor:
    view = y.chunk(2, -1)[1]
    y.add_(0.5)
    return view


def returns_rows(y: torch.Tensor) -> torch.Tensor:
    view = y[1:]
    y.add_(0.5)
    return view


@pytest.mark.parametrize("function", [returns_chunk, returns_rows], ids=lambda function: function.__name__)
def test_views_of_a_changed_input_that_is_a_window_itself(function: Callable[..., torch.Tensor]) -> None:
    """Stock is wrong here, in each torch version, where sizes are symbolic."""
    options = {"compiler": "aot_eager", "specialize": [{"y[0]": 4, "y[1]": 6}]}
    for dynamic in (True, None):
        torch._dynamo.reset()
        run = torch.compile(function, backend=multigraph, dynamic=dynamic, options=options)
        for rows, columns in ((4, 6), (6, 8), (4, 6)):
            for window in (
                lambda x: x[2:-2, 3:-3].clone(),
                lambda x: x[2:-2, 3:-3],
                lambda x: x.reshape(-1)[6 : 6 + (x.shape[0] - 4) * (x.shape[1] - 6)].view(x.shape[0] - 4, -1),
            ):
                whole = torch.randn(rows + 4, columns + 6)
                twin = whole.clone()
                torch.testing.assert_close(run(window(whole)), function(window(twin)))
                torch.testing.assert_close(whole, twin)
