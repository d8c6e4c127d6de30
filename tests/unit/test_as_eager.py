"""What is changed in a graph that Inductor would compute otherwise than eager, and that nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from multigraph_backend import _compat
from multigraph_backend.lower import as_eager, decomposed

INF = float("inf")
Program = Callable[..., Any]


def changed(program: Program, *inputs: torch.Tensor) -> tuple[list[str], bool]:
    """The operators that eager's kernels are called for, and whether the graph's text is another."""
    gm = make_fx(program, tracing_mode="fake")(*inputs)
    before = gm.code
    as_eager.give_eagers_numbers(gm)
    return [str(node.target) for node in gm.graph.nodes if "should_fallback" in node.meta], gm.code != before


def test_ordinary_programs_stay_as_they_are() -> None:
    def program(x: torch.Tensor, image: torch.Tensor, whole: torch.Tensor) -> Any:
        return (
            x.var(1), x.var(1, correction=0), torch.var_mean(x), x / 3, torch.div(x, 3, rounding_mode="trunc"),
            whole // 3, whole % 3, x.fmod(3), x**2, x**0.5, x**1.5, x.sqrt(), functional.avg_pool2d(image, 3, 2, 1),
            functional.elu(x), functional.max_pool2d(image, 2), functional.max_pool2d(image, 3, 2, 1),
            torch.ops.aten.avg_pool2d_backward(image, image, [1, 1], [1, 1], [0, 0], False, True, None),
            torch.ops.aten.avg_pool2d_backward(image, image, [1, 1], [1, 1], [0, 0], True, False, None),
        )  # fmt: skip

    assert changed(program, torch.ones(3, 4), torch.ones(1, 2, 6, 6), torch.tensor([7])) == ([], False)


def test_kernels_of_eagers_are_called_for_what_goes_wrong() -> None:
    def program(x: torch.Tensor, half: torch.Tensor, image: torch.Tensor) -> Any:
        return (
            half // 3, half // x.half()[0, 0], half % 3, 5 % x,
            torch.div(half, 0.3, rounding_mode="floor"), x[0, 0].var(correction=0), half**0.5,
            torch.var_mean(x[:, :1], 1, correction=0), x.atanh(),
            functional.max_pool2d(image, 3, 2, 1, return_indices=True)[1],
            torch.ops.aten.avg_pool2d_backward(image, image, [1, 1], [1, 1], [0, 0], True, True, None),
        )  # fmt: skip

    kernels, rewritten = changed(program, torch.ones(3, 4), torch.ones(2).half(), torch.ones(1, 2, 6, 6))
    assert not rewritten
    assert [name.removeprefix("aten.") for name in kernels] == [
        "floor_divide.default", "floor_divide.default", "remainder.Scalar", "remainder.Scalar_Tensor",
        "div.Tensor_mode", "var.correction", "pow.Tensor_Scalar",
        "var_mean.correction", "atanh.default",
        "max_pool2d_with_indices.default", "avg_pool2d_backward.default",
    ]  # fmt: skip


def test_expm1_is_eagers_where_a_program_names_it() -> None:
    kernels, _ = changed(lambda x: (x.expm1(), functional.elu(x)), torch.ones(3))
    assert kernels == (["aten.expm1.default"] if _compat.EXPM1_CANCELS else [])


def test_compositions_take_the_place_of_others() -> None:
    assert changed(lambda x: x**-0.5, torch.ones(3)) == ([], True)
    assert changed(lambda x: x**-0.5, torch.ones(3).half()) == ([], False)  # eager calls pow, as Inductor does
    gm = make_fx(lambda x, y: (x % 3, x % -0.3, x % y), tracing_mode="fake")(torch.ones(2), torch.ones(2))
    as_eager.give_eagers_numbers(gm)
    assert "remainder" not in gm.code
    assert changed(lambda x, y: (x // 0.3, 5 // y, torch.div(x, y, rounding_mode="floor")), *2 * [torch.ones(3)]) == (
        [],
        True,
    )
    x, y = torch.tensor([-7.5, INF, 1e10, -0.0, 3.0]), torch.tensor([2.0, 2.0, 3.0, 5.0, -INF])
    for one, other in zip(gm(x, y), (x % 3, x % -0.3, x % y), strict=True):
        assert torch.equal(one.nan_to_num(99), other.nan_to_num(99))


def test_what_torch_decomposes_wrongly_is_put_right_in_captured_graphs() -> None:
    def program(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.multilabel_margin_loss(x, labels, reduction="none") + functional.relu(x).sum()

    captured: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        captured.append(gm)
        return gm.forward

    inputs = torch.randn(2, 4), torch.tensor([[3, -1, 0, 0], [1, 0, -1, 2]])
    expected = torch.compile(program, backend=keep)(*inputs)
    (gm,) = captured
    decomposed.put_right(gm)
    assert ("multilabel_margin_loss" in gm.code) == (not _compat.DECOMPOSES_WRONGLY)
    torch.testing.assert_close(gm(*inputs)[0], expected)
    before = gm.code
    decomposed.put_right(gm)
    assert gm.code == before
