"""The packed forward and backward graphs, as text."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from multigraph_backend.saved_tensors.rules import Cast, Scaled
from tests.support.saved_tensors.partitioned import Partitioned, everything, gradients, partition, text


def two_layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((x @ w).sin() @ v).cos()


def run(function: object, *shapes: tuple[int, ...], pack: object, dynamic: bool = False) -> Partitioned:
    made = partition(function, everything(pack), dynamic)  # type: ignore[arg-type]
    gradients(made.run, *(torch.randn(shape) for shape in shapes))
    assert made.accounts[0].packed > 0
    return made


def test_packed_behind_the_last_use_and_unpacked_before_the_first() -> None:
    made = run(two_layers, (8, 4), (4, 6), (6, 5), pack=Cast("bfloat16"))
    assert_expected_inline(
        text(made.forward[0]),
        """\
primals_1: input
primals_2: input
primals_3: input
mm = mm(primals_1, primals_2)
sin = sin(mm)
mm_pack_convert_element_type = convert_element_type(mm, torch.bfloat16)
mm_1 = mm(sin, primals_3)
sin_pack_convert_element_type = convert_element_type(sin, torch.bfloat16)
cos = cos(mm_1)
mm_1_pack_convert_element_type = convert_element_type(mm_1, torch.bfloat16)
t_1 = t(primals_3)
t_2 = t(primals_1)
t_3 = t(primals_2)
return cos, mm_pack_convert_element_type, mm_1_pack_convert_element_type, sin_pack_convert_element_type, t_1, t_2, t_3
""",
    )
    assert_expected_inline(
        text(made.backward[0]),
        """\
mm_pack_convert_element_type: input
mm_1_pack_convert_element_type: input
sin_pack_convert_element_type: input
t_1: input
t_2: input
t_3: input
tangents_1: input
mm_1_unpack_convert_element_type = convert_element_type(mm_1_pack_convert_element_type, torch.float32)
sin_1 = sin(mm_1_unpack_convert_element_type)
neg = neg(sin_1)
mul = mul(tangents_1, neg)
sin_unpack_convert_element_type = convert_element_type(sin_pack_convert_element_type, torch.float32)
sin_unpack_permute = permute(sin_unpack_convert_element_type, [1, 0])
mm_2 = mm(sin_unpack_permute, mul)
mm_3 = mm(mul, t_1)
mm_unpack_convert_element_type = convert_element_type(mm_pack_convert_element_type, torch.float32)
cos_1 = cos(mm_unpack_convert_element_type)
mul_1 = mul(mm_3, cos_1)
mm_4 = mm(t_2, mul_1)
mm_5 = mm(mul_1, t_3)
return mm_5, mm_4, mm_2
""",
    )


def heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k = (x @ w).chunk(2, -1)
    return (q @ k.T).exp()


def test_parts_of_one_buffer_are_packed_once_and_cut_out_again() -> None:
    made = run(heads, (8, 4), (4, 12), pack=Scaled("int8"))
    assert_expected_inline(
        text(made.forward[0]),
        """\
primals_1: input
primals_2: input
mm = mm(primals_1, primals_2)
split = split(mm, 6, -1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
permute = permute(getitem_1, [1, 0])
mm_1 = mm(getitem, permute)
mm_pack_abs_1 = abs(mm)
mm_pack_amax = amax(mm_pack_abs_1, [-1], True)
mm_pack_clamp_min = clamp_min(mm_pack_amax, 2.9857556510886103e-36)
mm_pack_clamp_max = clamp_max(mm_pack_clamp_min, 3.4028226550889528e+38)
mm_pack_div = div(mm_pack_clamp_max, 127.0)
mm_pack_mul = mul(mm_pack_amax, 0.0)
mm_pack_add = add(mm_pack_div, mm_pack_mul)
mm_pack_reciprocal = reciprocal(mm_pack_add)
mm_pack_mul_1 = mul(mm, mm_pack_reciprocal)
mm_pack_add_1 = add(mm_pack_mul_1, 12582912.0)
mm_pack_view = view(mm_pack_add_1, torch.int32)
mm_pack_alias = alias(mm_pack_view)
mm_pack_convert_element_type = convert_element_type(mm_pack_alias, torch.int8)
exp = exp(mm_1)
detach = detach(exp)
detach_1 = detach(detach)
t_2 = t(primals_1)
t_3 = t(primals_2)
return exp, detach_1, mm_pack_convert_element_type, mm_pack_add, t_2, t_3
""",
    )
    assert_expected_inline(
        text(made.backward[0]),
        """\
detach_1: input
mm_pack_convert_element_type: input
mm_pack_add: input
t_2: input
t_3: input
tangents_1: input
mul = mul(tangents_1, detach_1)
mm_unpack_convert_element_type = convert_element_type(mm_pack_convert_element_type, torch.float32)
mm_unpack_mul = mul(mm_unpack_convert_element_type, mm_pack_add)
mm_unpack_split = split(mm_unpack_mul, 6, -1)
mm_unpack_getitem = getitem(mm_unpack_split, 0)
mm_unpack_permute = permute(mm_unpack_getitem, [1, 0])
mm_unpack_split_1 = split(mm_unpack_mul, 6, -1)
mm_unpack_getitem_3 = getitem(mm_unpack_split_1, 1)
mm_unpack_permute_1 = permute(mm_unpack_getitem_3, [1, 0])
mm_unpack_permute_2 = permute(mm_unpack_permute_1, [1, 0])
mm_2 = mm(mm_unpack_permute, mul)
mm_3 = mm(mul, mm_unpack_permute_2)
permute_1 = permute(mm_2, [1, 0])
cat = cat([mm_3, permute_1], 1)
mm_4 = mm(t_2, cat)
mm_5 = mm(cat, t_3)
return mm_5, mm_4
""",
    )


def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin().T @ w).sum(0)


def test_a_transpose_is_scaled_along_the_rows_of_what_it_is_a_transpose_of() -> None:
    """Row 14 of the defects: eager saves `x.sin()` transposed, whose memory has rows of 8."""
    made = run(turned, (6, 8), (6, 5), pack=Scaled("int8"))
    (packed,) = [entry for entry in made.accounts[0].tensors if entry.packed]
    assert packed.bytes_saved == 6 * 8 + 6 * 4


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_saved_has_the_kinds_and_order_that_backward_takes(dynamic: bool) -> None:
    made = run(heads, (8, 4), (4, 12), pack=Scaled("int8"), dynamic=dynamic)
    (forward,), (backward,) = made.forward, made.backward
    saved = [str(value) for value in forward.graph.output_node().args[0]][1:]
    taken = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    numbers = [name for name in taken if not isinstance(_value(backward, name), torch.Tensor)]
    assert taken[: len(numbers)] == numbers
    assert taken[len(numbers) : -1] == saved[: len(saved) - len(numbers)]
    for name in taken[len(numbers) : -1]:
        assert _value(forward, name).shape == _value(backward, name).shape


def _value(gm: torch.fx.GraphModule, name: str) -> object:
    return next(node.meta["val"] for node in gm.graph.nodes if node.name == name)
