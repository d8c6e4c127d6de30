"""Products with int8 weights: in which form Inductor gets them, and that it no longer takes them for another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend import _compat
from multigraph_backend.lower import quantized_products

ON_CPU = frozenset({"cpu"})
Program = Callable[..., torch.Tensor]


def linear(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x @ w.to(x.dtype).t()) * scale


def transposed_first(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x @ w.t().to(x.dtype)) * scale


def of_tokens(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.linear(x[None], w.to(x.dtype)) * scale
    return y[0]


def with_zero_points(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    made = (w.to(x.dtype) - 3) * scale[:, None]
    return torch.nn.functional.linear(x, made, scale)


def in_groups(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    made = (w.view(24, 2, 8).to(x.dtype) * scale[:, None, None]).view(24, 16)
    return x @ made.t() + scale


def with_an_adapter(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ (w.to(x.dtype) * scale[:, None] + torch.outer(scale, x[0])).t()


def inputs(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    w = torch.randint(-127, 128, (24, 16), dtype=torch.int8)
    return torch.randn(rows, 16, dtype=dtype), w, torch.rand(24, dtype=dtype)


def traced(program: Program, given: tuple[torch.Tensor, ...], mode: str = "fake", **how: Any) -> torch.fx.GraphModule:
    made = make_fx(program, tracing_mode=mode, decomposition_table=_compat.select_decomp_table())(*given)
    quantized_products.keep_products(made, **how)
    return made


def test_factors_are_exchanged() -> None:
    made = traced(transposed_first, inputs(3), devices=ON_CPU)
    assert_expected_inline(
        made.code.strip(),
        """\
def forward(self, x_1, w_1, scale_1) -> _torch_Tensor_:
    permute = torch.ops.aten.permute.default(w_1, [1, 0]);  w_1 = None
    convert_element_type = torch.ops.prims.convert_element_type.default(permute, torch.bfloat16);  permute = None
    mm = torch.ops.aten.mm.default(x_1, convert_element_type);  x_1 = convert_element_type = None
    mul = torch.ops.aten.mul.Tensor(scale_1, mm);  scale_1 = mm = None
    return mul""",
    )


def test_one_row_becomes_a_sum() -> None:
    made = traced(linear, inputs(1), devices=ON_CPU)
    called = [str(node.target) for node in made.graph.nodes if node.op == "call_function"]
    assert called == [
        "prims.convert_element_type.default", "prims.convert_element_type.default", "aten.mul.Tensor",
        "aten.sum.dim_IntList", "aten.unsqueeze.default", "prims.convert_element_type.default", "aten.mul.Tensor",
    ]  # fmt: skip


@pytest.mark.parametrize("program", [with_zero_points, in_groups, with_an_adapter])
def test_one_row_is_a_sum_over_whatever_weight_is_made_of_int8(program: Program) -> None:
    text = traced(program, inputs(1), devices=ON_CPU).code
    assert "aten.sum" in text
    assert not {"aten.mm", "aten.addmm"} & set(text.replace(".default", " ").split("torch.ops."))
    assert "aten.sum" not in traced(program, inputs(2), devices=ON_CPU).code


@pytest.mark.parametrize("program", [linear, transposed_first, of_tokens, with_zero_points, in_groups, with_an_adapter])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_those_of_before(program: Program, rows: int, dtype: torch.dtype) -> None:
    given = inputs(rows, dtype)
    close = {"rtol": 0.02, "atol": 2.0} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-3}
    torch.testing.assert_close(traced(program, given, devices=ON_CPU)(*given), program(*given), **close)


def test_other_devices_other_weights_and_unknown_sizes_stay_as_they_are() -> None:
    given = inputs(1)
    assert "aten.sum" not in traced(linear, given).code
    for dtype in (torch.uint8, torch.int16, torch.bfloat16):
        other = (given[0], given[1].abs().to(dtype), given[2])
        assert traced(linear, other, devices=ON_CPU).code == traced(linear, other).code
    text = traced(linear, inputs(3), mode="symbolic", devices=ON_CPU).code
    assert "aten.mm" in text
    assert "aten.sum" not in text


def compiled(program: Program, keeps: bool) -> Program:
    def inner(gm: torch.fx.GraphModule, example: Any, **settings: Any) -> Any:
        if keeps:
            quantized_products.keep_products(gm, ON_CPU)
        return _compat.compile_fx_inner(gm, example, **settings)

    def backend(gm: torch.fx.GraphModule, example: Any) -> Any:
        return _compat.compile_fx(gm, example, inner_compile=inner)

    torch._dynamo.reset()
    return torch.compile(program, backend=backend, dynamic=False)


@pytest.mark.parametrize("program", [of_tokens, transposed_first])
def test_inductor_takes_it_for_its_own_operator_no_more(program: Program) -> None:
    given = inputs(3)[0].repeat(1, 4), inputs(3)[1].repeat(1, 4), inputs(3)[2]  # 64 elements to a row: no wrong kernel
    for keeps, taken in ((False, 1), (True, 0)):
        counters.clear()
        with torch.no_grad(), _compat.inductor_config.patch(force_disable_caches=True):
            got = compiled(program, keeps)(*given)
        torch.testing.assert_close(got, program(*given), rtol=0.02, atol=0.5)
        assert counters["inductor"]["woq_matcher_count"] == taken


@pytest.mark.parametrize("program", [with_zero_points, in_groups, linear])
def test_sums_are_compiled(program: Program) -> None:
    given = inputs(1, torch.float32)
    with torch.no_grad(), _compat.inductor_config.patch(force_disable_caches=True):
        got = compiled(program, True)(*given)
    torch.testing.assert_close(got, program(*given), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("inner", "keeps"), [(64, True), (128, True), (16, False), (40, False), (100, False)])
def test_the_operator_of_the_cpu_is_called_where_it_is_right(inner: int, keeps: bool) -> None:
    w = torch.randint(-127, 128, (24, inner), dtype=torch.int8)
    given = torch.randn(3, inner, dtype=torch.bfloat16), w, torch.rand(24, dtype=torch.bfloat16) / 100
    program = transposed_first
    (product,) = traced(program, given).graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert (str(product.args[0]) == "mm") == keeps
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        got = torch.compile(program, backend="multigraph", dynamic=True)(*given)
    torch.testing.assert_close(got, program(*given), rtol=0.05, atol=0.2)
