"""Weight gradients that multiply what is saved in fp8 as it is: the right product, and a cast where none can be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor.utils import run_and_get_code

from multigraph_backend import Cast, Match, Offload, Rule
from multigraph_backend.saved_tensors import products
from multigraph_backend.saved_tensors.rules import rule_from_json, rule_to_json
from tests.support.saved_tensors.models import accounts, step
from tests.support.saved_tensors.partitioned import everything, partition, text

FP8 = Cast("fp8", multiply=True)
MOST = torch.finfo(torch.float8_e5m2).max


def right(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight's gradient is `dy.t() @ tanh(x)`, as of a linear layer."""
    return F.linear(torch.tanh(x), weight)


def left(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`tanh(x).t() @ dy`."""
    return torch.tanh(x) @ weight.t()


def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x)
    return F.linear(h, weight) + h @ weight.t()


def rounded(gradient: torch.Tensor) -> torch.Tensor:
    """What the product has of it."""
    scale = gradient.abs().amax().float() / MOST
    return (gradient.float() / scale).to(torch.float8_e5m2).double() * scale


def weight_gradient(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    cotangent: torch.Tensor,
    pack: Any = FP8,
) -> tuple[torch.Tensor, Any]:
    """Of a program with its saved tensors packed, and the account of these."""
    made = partition(function, everything(pack))
    weight = weight.clone().requires_grad_()
    made.run(x.clone().requires_grad_(), weight).backward(cotangent)
    assert weight.grad is not None
    (said,) = made.accounts
    assert said.failed is None
    return weight.grad, said


@pytest.mark.parametrize("shape", [(64, 32), (4, 16, 32), (2, 4, 8, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [right, left, both])
def test_the_product_is_that_of_what_is_saved_and_the_rounded_gradient(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(48, shape[-1], dtype=dtype)
    for size in (1.0, 1e-4, 1e3):
        cotangent = torch.randn(*shape[:-1], 48, dtype=dtype) * size
        found, said = weight_gradient(function, x, weight, cotangent)
        assert {entry.packed for entry in said.tensors if entry.packed} == {"cast to float8_e4m3fn, multiplied"}
        saved = torch.tanh(x).to(torch.float8_e4m3fn).double().flatten(0, -2)
        wanted = (rounded(cotangent).flatten(0, -2).t() @ saved) * (2 if function is both else 1)
        within = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-8}[dtype]
        assert (found.double() - wanted).norm() <= within * wanted.norm()


def test_the_graphs() -> None:
    made = partition(right, everything(FP8))
    made.run(torch.randn(64, 32).requires_grad_(), torch.randn(48, 32).requires_grad_()).sum().backward()
    assert_expected_inline(
        text(made.forward[0]),
        """\
primals_1: input
primals_2: input
tanh = tanh(primals_1)
t = t(primals_2)
mm = mm(tanh, t)
tanh_pack_mul = mul(tanh, 0.0)
tanh_pack_clamp_min = clamp_min(tanh, -448.0)
tanh_pack_clamp_max = clamp_max(tanh_pack_clamp_min, 448.0)
tanh_pack_add = add(tanh_pack_clamp_max, tanh_pack_mul)
tanh_pack_convert_element_type = convert_element_type(tanh_pack_add, torch.float8_e4m3fn)
tanh_pack_view = view(tanh_pack_convert_element_type, [-1, 32])
tanh_pack_permute = permute(tanh_pack_view, [1, 0])
tanh_pack_inductor_force_stride_order = inductor_force_stride_order(tanh_pack_permute, [64, 1])
t_3 = t(t)
return mm, tanh_pack_inductor_force_stride_order, t_3
""",
    )
    assert_expected_inline(
        text(made.backward[0]),
        """\
tanh_pack_inductor_force_stride_order: input
t_3: input
tangents_1: input
full_default = full([], 1.0)
t_1 = t(tangents_1)
tanh_unpack_permute = permute(tanh_pack_inductor_force_stride_order, [1, 0])
tanh_unpack_convert_element_type = convert_element_type(tanh_unpack_permute, torch.float32)
tanh_unpack_view = view(tanh_unpack_convert_element_type, [64, 32])
tanh_unpack_clone = clone(tanh_unpack_view)
abs_default = abs(t_1)
amax_default = amax(abs_default)
clamp_min_default = clamp_min(amax_default, 1.3481509610710651e-33)
div_tensor = div(clamp_min_default, 57344.0)
lt_scalar = lt(amax_default, inf)
full_default_1 = full([], nan)
where_self = where(lt_scalar, div_tensor, full_default_1)
reciprocal_default = reciprocal(where_self)
mul_tensor = mul(t_1, reciprocal_default)
convert_element_type_default = convert_element_type(mul_tensor, torch.float8_e5m2)
inductor_force_stride_order_default = inductor_force_stride_order(convert_element_type_default, [64, 1])
permute_default = permute(tanh_pack_inductor_force_stride_order, [1, 0])
_scaled_mm_default = _scaled_mm(inductor_force_stride_order_default, permute_default, where_self, full_default)
t_2 = t(_scaled_mm_default)
mm_2 = mm(tangents_1, t_3)
t_4 = t(t_2)
detach_2 = detach(tanh_unpack_clone)
detach_3 = detach(detach_2)
tanh_backward = tanh_backward(mm_2, detach_3)
return tanh_backward, t_4
""",
    )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_makes_no_number(bad: float) -> None:
    cotangent = torch.ones(64, 48)
    cotangent[3, 5] = bad
    for function in (right, left):
        found, _ = weight_gradient(function, torch.randn(64, 32), torch.randn(48, 32), cotangent)
        assert found.isnan().all()


@pytest.mark.parametrize("size", [0.0, -0.0, torch.finfo(torch.float32).tiny, 1e-44, torch.finfo(torch.float32).max])
def test_gradients_at_the_edges(size: float) -> None:
    cotangent = torch.zeros(64, 48)
    cotangent[3, 5] = size
    x = torch.ones(64, 32) * 20  # whose tanh is 1
    for function in (right, left):
        found, _ = weight_gradient(function, x, torch.randn(48, 32), cotangent)
        wanted = torch.zeros(48, 32)
        wanted[5] = size
        smallest = torch.finfo(torch.float32).tiny * 4  # the scale's own smallest, as of scaled packs
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=smallest)


def not_a_multiple(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.tanh(x[:, :24]), weight[:, :24])


def no_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).sum() * weight


def a_part(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.tanh(x)[:32], weight)


def negated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(torch._neg_view(torch.tanh(x)), weight)


def two_saved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each is the other's gradient's factor, and both are saved."""
    return torch.tanh(x).t() @ torch.sigmoid(x) @ weight.t()


@pytest.mark.parametrize(
    ("function", "because"),
    [
        (not_a_multiple, "as a matrix it is 64 x 24, not multiples of 16"),
        (no_product, "no product of the backward sums over its rows"),
        (a_part, "no product of the backward sums over its rows"),
    ],
)
def test_what_cannot_be_multiplied_is_a_cast_and_says_why(function: Callable[..., torch.Tensor], because: str) -> None:
    x, weight = torch.randn(64, 32), torch.randn(48, 32)
    cotangent = torch.randn(function(x, weight).shape)
    found, said = weight_gradient(function, x, weight, cotangent)
    plain, _ = weight_gradient(function, x, weight, cotangent, Cast("fp8"))
    assert torch.equal(found, plain)
    packed = {str(entry.packed) for entry in said.tensors if entry.packed}
    assert f"cast to float8_e4m3fn; not multiplied, for {because}" in packed


def test_a_product_of_two_saved_tensors_is_no_weight_gradient() -> None:
    x, weight = torch.randn(64, 32), torch.randn(48, 32)
    found, _ = weight_gradient(two_saved, x, weight, torch.randn(32, 48))
    plain, _ = weight_gradient(two_saved, x, weight, torch.randn(32, 48), Cast("fp8"))
    assert found.shape == plain.shape
    assert found.isfinite().all()


def test_negatives_of_what_lies_in_memory_are_taken_for_what_they_are() -> None:
    x, weight, cotangent = torch.randn(64, 32), torch.randn(48, 32), torch.randn(64, 48)
    found, _ = weight_gradient(negated, x, weight, cotangent)
    wanted = -(rounded(cotangent).t() @ torch.tanh(x).to(torch.float8_e4m3fn).double())
    assert (found.double() - wanted).norm() <= 1e-5 * wanted.norm()


def test_views_of_other_bits_are_not_followed() -> None:
    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    named = {"permute": [1, 0], "view": [32, 64], "_neg_view": None, "unsqueeze": 0, "detach": None}
    nodes = {name: graph.call_method(name, (value,)) for name in named}
    for name, node in nodes.items():
        node.op, node.target = "call_function", getattr(torch.ops.aten, name).default
    cast = graph.call_function(torch.ops.aten.view.dtype, (value, torch.bfloat16))
    assert [name for name, node in nodes.items() if not products.layout_alone(node)] == ["_neg_view"]
    assert not products.layout_alone(cast)


def test_sizes_that_differ_from_call_to_call() -> None:
    made = partition(right, everything(FP8), dynamic=True)
    weight = torch.randn(48, 32).requires_grad_()
    made.run(torch.randn(64, 32).requires_grad_(), weight).sum().backward()
    (said,) = made.accounts
    assert any("not multiplied, for its sizes differ from call to call" in str(entry.packed) for entry in said.tensors)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.outer(F.gelu(self.inner(self.norm(x))))
        return y


@pytest.mark.slow
def test_compiled_by_inductor_within_a_budget_and_without() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(32), Block(32)), torch.randn(4, 16, 32)
    wanted = step(model, model, x)
    for more in ({}, {"saved_tensors_budget": 0.3}, {"repeat": "always"}):
        torch._dynamo.reset()
        options = {"saved_tensors": everything(FP8), "on_failure": "raise", **more}
        got = step(model, torch.compile(model, backend="multigraph", options=options), x)
        for one, two in zip(got, wanted, strict=True):
            assert (one - two).norm() <= 0.12 * two.norm()
        multiplied = [entry for entry in accounts()[-1].tensors if "fn, multiplied" in str(entry.packed)]
        assert multiplied, more


@pytest.mark.parametrize("function", [right, left])
def test_operands_lie_as_the_hardware_wants_them(function: Callable[..., torch.Tensor]) -> None:
    """The left one row by row, the right one column by column; a CPU would take any, and the compiler chooses."""
    torch.manual_seed(0)
    x, weight = torch.randn(512, 64).bfloat16(), torch.randn(256, 64).bfloat16()

    def run() -> None:
        options = {"saved_tensors": everything(FP8), "on_failure": "raise"}
        made = torch.compile(lambda x, weight: function(x, weight).sin(), backend="multigraph", options=options)
        made(x.clone().requires_grad_(), weight.clone().requires_grad_()).sum().backward()

    _, code = run_and_get_code(run)
    backward = code[-1]
    left_one, right_one = re.findall(
        r"_scaled_mm\((\w+), reinterpret_tensor\((\w+), \(512, \d+\), \(1, 512\), 0\)", backward
    )[0]
    for name in {left_one, right_one}:
        at = re.escape(name)
        (strides,) = re.findall(
            rf"{at} = empty_strided_cpu\(\(\d+, 512\), \((\d+, 1)\)|{at} = rand_strided\(\(\d+, 512\), \((\d+, 1)\)",
            backward,
        )
        assert "512, 1" in strides


def test_what_is_no_such_cast_is_refused() -> None:
    rule = Rule(Match(), FP8)
    assert rule_from_json(rule_to_json(rule)) == rule
    assert rule_from_json({"pack": {"cast": "fp8", "multiply": True}}) == rule
    with pytest.raises(ValueError, match="products of what is saved are for float8_e4m3fn, not bfloat16"):
        Cast("bfloat16", multiply=True)
    with pytest.raises(ValueError, match="multiply must be True or False, got 1"):
        Cast("fp8", multiply=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="what is offloaded cannot be multiplied"):
        Offload(FP8)
