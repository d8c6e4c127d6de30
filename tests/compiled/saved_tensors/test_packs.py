"""Each ready pack keeps its promise, element by element."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from multigraph_backend.saved_tensors.packs import carried_out, functions, said
from multigraph_backend.saved_tensors.rules import Bits, Cast, Match, Rule, Scaled, rule_from_json, rule_to_json

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def around(pack: Cast | Scaled, x: torch.Tensor) -> torch.Tensor:
    """Packed and unpacked; the packed tensors are smaller."""
    found = functions(pack, x)
    assert not isinstance(found, str), found
    packed = found[0](x)
    assert sum(part.nbytes for part in packed) < x.nbytes
    back = found[1](packed)
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    return back


@pytest.mark.parametrize(
    ("pack", "bound", "low"),
    [(Cast("bfloat16"), 2.0**-8, 0.0), (Cast("e4m3"), 2.0**-4, 2.0**-6), (Cast("e5m2"), 2.0**-3, 2.0**-14)],
    ids=str,
)
def test_casts_are_within_their_bound(pack: Cast, bound: float, low: float) -> None:
    x = torch.randn(64, 128, dtype=torch.float64).float() * torch.logspace(-2, 2, 128)
    x = x[:, x.abs().amin(0) >= low].contiguous()
    error = (around(pack, x) - x).abs() / x.abs()
    assert x.shape[1] > 32
    assert 0 < error.max() <= bound * (1 + 2**-7)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("per", ["row", 16])
@pytest.mark.parametrize(("integer", "steps"), [("int8", 254), ("int4", 14)])
def test_integers_are_within_half_a_step(integer: str, steps: int, per: int | str, dtype: torch.dtype) -> None:
    x = (torch.randn(32, 64, dtype=torch.float64) * torch.logspace(-3, 3, 32).double()[:, None]).to(dtype)
    back = around(Scaled(integer, per=per), x).double()  # type: ignore[arg-type]
    rows = x.double().view(-1, 64 if per == "row" else 16)
    bound = rows.abs().amax(1, keepdim=True) / steps
    rounding = torch.finfo(dtype).eps * rows.abs()  # of coming back to the type
    assert ((back.view_as(rows) - rows).abs() <= bound * 1.0001 + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("int4", 14), ("e4m3", 32), ("e5m2", 16)])
def test_scales_reach_from_the_smallest_to_the_largest_numbers(
    kind: str, steps: int, stochastic: bool, dtype: torch.dtype
) -> None:
    known = torch.finfo(dtype)
    magnitudes = [
        known.max,
        known.max * (1 - 1e-3),
        known.max / 3,
        1.0,
        known.tiny * 2**20,
        known.tiny,
        known.tiny / 64,
    ]
    row = torch.tensor([1, -1, 0.3, 0.501, 0.77, 1e-3, 0, -0.25], dtype=dtype).repeat(3)
    x = torch.stack([magnitude * row for magnitude in magnitudes])
    back = around(Scaled(kind, stochastic=stochastic), x)
    assert back.isfinite().all()
    bound = x.abs().amax(1, keepdim=True) / steps * (1 + 1e-4) + known.tiny
    assert ((back - x).abs() <= bound * (1 + stochastic)).all()


@pytest.mark.parametrize(("dtype", "bound"), [("float8_e4m3fn", 2.0**-4), ("float8_e5m2", 2.0**-3)])
def test_scaled_fp8_is_within_its_bound_at_any_magnitude(dtype: str, bound: float) -> None:
    x = torch.randn(16, 64) * torch.logspace(-20, 20, 16)[:, None]
    large = x.abs() > x.abs().amax(1, keepdim=True) * 2**-6  # in the normal range
    error = (around(Scaled(dtype), x) - x).abs() / x.abs()
    assert error[large].max() <= bound * 1.001


@pytest.mark.parametrize(
    "pack",
    [Cast("e4m3"), Cast("e5m2"), Cast("bf16"), Scaled("int8"), Scaled("e4m3", per=8), Scaled("int4"),
     Scaled("int4", per=8, stochastic=True)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_never_comes_back_finite(pack: Cast | Scaled, bad: float) -> None:
    x = torch.randn(4, 16)
    x[1, 3] = bad
    back = around(pack, x)
    assert not back[1, 3].isfinite()
    assert back[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_fp8_casts_stay_finite_beyond_their_range(dtype: torch.dtype) -> None:
    x = torch.tensor([6e4, -6e4, 1.0, 460.0, -447.0, -0.0], dtype=dtype)
    back = around(Cast("e4m3"), x)
    assert back.tolist() == [448.0, -448.0, 1.0, 448.0, -448.0, 0.0]
    assert back[-1].signbit()
    assert around(Cast("e4m3"), torch.tensor([1e300], dtype=torch.float64)).tolist() == [448.0]


@pytest.mark.parametrize(
    "pack", [Cast("e4m3"), Cast("e5m2"), Scaled("int8"), Scaled("e4m3", per=16), Scaled("int4", per=32)], ids=str
)
def test_compiled_they_do_the_same(pack: Cast | Scaled) -> None:
    """The compiler has rules of its own for products with 0, and for what is not finite."""
    x = torch.randn(32, 64) * 3
    x[1, 3], x[2, 4], x[3, 5], x[4, 6], x[5, 7], x[6, 8] = math.inf, -math.inf, math.nan, 1e6, -1e6, -0.0
    there, _ = functions(pack, x)
    torch._dynamo.reset()
    made = torch.compile(there, fullgraph=True)(x)
    for one, other in zip(made, there(x), strict=True):
        finite = other.float().isfinite()
        assert torch.equal(one.float().isfinite(), finite)
        if one.dtype == torch.int8:  # in a row whose scale is NaN they are anything
            finite[1:4] = False
        assert torch.equal(one.float()[finite], other.float()[finite])


def test_what_is_rounded_at_random_ends_where_what_is_rounded_does() -> None:
    numbers = torch.finfo(torch.float32)
    edges = torch.tensor([numbers.max, -numbers.max, numbers.tiny, 0.0, -0.0, 449.0])
    for _ in range(20):
        assert around(Cast("e4m3", stochastic=True), edges)[[0, 1, 5]].tolist() == [448.0, -448.0, 448.0]
        back = around(Cast("bfloat16", stochastic=True), edges)
        assert torch.equal(back[:5], edges.bfloat16().float()[:5])
    for pack in (Cast("e4m3", stochastic=True), Cast("bfloat16", stochastic=True)):
        assert not around(pack, torch.tensor([math.inf, -math.inf, math.nan])).isfinite().any()


def test_where_the_compiler_saturates_what_is_not_finite_is_nan_all_the_same() -> None:
    """The short form for GPUs, but for the conversion."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e6, -3.0, -0.0])
    made = torch.compile(lambda value: value + value * 0.0, fullgraph=True)(x)
    assert made[:3].isnan().all()
    assert made[3:].tolist() == x[3:].tolist()


@pytest.mark.parametrize("pack", [Scaled("int8"), Scaled("e4m3"), Scaled("e5m2", per=8), Scaled("int4")], ids=str)
def test_rows_of_zeros_and_of_tiny_values(pack: Scaled) -> None:
    assert (around(pack, torch.zeros(4, 16)) == 0).all()
    tiny = torch.full((4, 16), 1e-40)
    assert around(pack, tiny).abs().max() <= 2e-38


STOCHASTIC = [
    Cast("bf16", stochastic=True), Cast("e4m3", stochastic=True), Cast("e5m2", stochastic=True),
    Scaled("int8", stochastic=True), Scaled("e4m3", stochastic=True), Scaled("int4", stochastic=True),
]  # fmt: skip


@pytest.mark.parametrize("pack", STOCHASTIC, ids=str)
def test_stochastic_rounding_is_right_in_the_mean(pack: Cast | Scaled) -> None:
    torch.manual_seed(7)
    row = torch.tensor([0.3137, -1.77, 0.0091, 5.3, -0.00037, 1.0, 0.0, -5.9])
    count = 20000
    back = around(pack, row.expand(count, 8).contiguous())
    spread = back.std(0)
    assert ((back.mean(0) - row).abs() <= 6 * spread / math.sqrt(count) + 1e-6).all()
    assert (spread > 0).sum() >= 4  # it does round both ways
    for column, value in zip(back.T, row, strict=True):
        assert column.unique().numel() <= 2
        assert column.min() <= value + 1e-6
        assert column.max() >= value - 1e-6


EDGES = (0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -7e-3, 0.25, 6e4, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("seed", range(200))
def test_int4_from_the_edges(seed: int) -> None:
    """Any row, block, type and magnitude, with 0 and what is not finite in it, rounded to nearest and at random."""
    rng = random.Random(seed)
    dtype, row = rng.choice(TYPES), rng.choice([1, 2, 3, 5, 8, 31, 33, 64, 100])
    shape = (*rng.choices(range(4), k=rng.randrange(3)), row)
    per = rng.choice(["row", 2, 3, 5, 32, 33, 64])
    pack = Scaled("int4", per=per, stochastic=rng.random() < 0.4)  # type: ignore[arg-type]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values *= 10.0 ** rng.randrange(-6, 5)
    for edge in rng.choices(EDGES, k=rng.randrange(4)) if values.numel() else ():
        values.view(-1)[rng.randrange(values.numel())] = edge
    x = values.to(dtype)
    found = functions(pack, x)
    length = row if not isinstance(per, int) or row % per else per
    nbytes = -(-length // 2) + max(dtype.itemsize, 4)  # with a scale
    if isinstance(found, str):
        assert nbytes >= length * dtype.itemsize
        return
    packed = found[0](x)
    assert sum(part.nbytes for part in packed) == x.numel() // length * nbytes
    back = found[1](packed)
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert back.is_contiguous()
    blocks, back = x.double().reshape(-1, length), back.double().reshape(-1, length)
    finite = blocks.isfinite().all(1)
    assert not back[~finite].isfinite().any()
    blocks, back = blocks[finite], back[finite]
    step = blocks.abs().amax(1, keepdim=True) / 7 * (1 + 1e-5) + 3e-38  # scales end there
    rounding = torch.finfo(dtype).eps * blocks.abs() + torch.finfo(dtype).tiny
    assert ((back - blocks).abs() <= (step if pack.stochastic else step / 2) + rounding).all()
    assert (back[blocks == 0] == 0).all()


@pytest.mark.parametrize("per", ["row", 5, 32], ids=str)
@pytest.mark.parametrize("width", [32, 35], ids=str)
def test_int4_is_fused_into_one_loop_of_each_side(per: int | str, width: int) -> None:
    """No buffer of the unpacked size is made; what comes out is what eager makes."""
    x = torch.randn(24, width)
    found = functions(Scaled("int4", per=per), x)  # type: ignore[arg-type]
    assert not isinstance(found, str)
    torch._dynamo.reset()
    pack, unpack = (torch.compile(function, fullgraph=True) for function in found)
    packed, (code,) = run_and_get_code(pack, x)
    assert all(torch.equal(one, other) for one, other in zip(packed, found[0](x), strict=True))
    assert code.split("def call")[1].count("empty_strided_cpu(") == 2  # bytes and scales
    back, (code,) = run_and_get_code(unpack, packed)
    assert torch.equal(back, found[1](packed))
    assert code.split("def call")[1].count("empty_strided_cpu(") == 1


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_mask_comes_back_from_its_bits(compiler: str) -> None:
    x = torch.rand(6, 5, 40) > 0.5
    found = functions(Bits(), x)
    assert not isinstance(found, str)
    torch._dynamo.reset()
    pack, unpack = (torch.compile(function, backend=compiler, fullgraph=True) for function in found)
    (packed,) = pack(x)
    assert (packed.dtype, packed.shape) == (torch.uint8, (6, 5, 5))
    assert packed[0, 0, 0] == sum(int(bit) << place for place, bit in enumerate(x[0, 0, :8]))
    assert torch.equal(unpack((packed,)), x)
    rule = Rule(Match(dtype="bool"), Bits())
    assert rule_from_json(rule_to_json(rule)) == rule


@pytest.mark.parametrize("shape", [(6, 5, 7), (3, 12), (9,), (1, 1, 9), (5, 8), (64, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_mask_of_any_size_comes_back_from_its_bits(shape: tuple[int, ...], compiler: str) -> None:
    x = torch.rand(shape) > 0.5
    found = functions(Bits(), x)
    assert not isinstance(found, str)
    torch._dynamo.reset()
    pack, unpack = (torch.compile(function, backend=compiler, fullgraph=True) for function in found)
    (packed,) = pack(x)
    assert packed.nbytes == -(-x.numel() // 8)
    back = unpack((packed,))
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert torch.equal(back, x)


@pytest.mark.parametrize(
    ("pack", "shape", "text"),
    [
        (Scaled("int8", per=64), (3, 128), "int8, scaled per block of 64"),
        (Scaled("int8", per=64), (3, 64), "int8, scaled per block of 64"),
        (Scaled("int8", per=64), (3, 100), "int8, scaled per row, for its rows are of 100 elements, no multiple of 64"),
        (Scaled("int8"), (3, 100), "int8, scaled per row"),
        (Scaled("int4", per=64), (3, 100), "int4, scaled per row, for its rows are of 100 elements, no multiple of 64"),
        (Cast("bf16"), (3, 100), "cast to bfloat16"),
    ],
)
def test_what_becomes_of_it_is_said(pack: Cast | Scaled, shape: tuple[int, ...], text: str) -> None:
    assert said(pack, torch.empty(shape)) == text


def test_blocks_are_used_where_a_row_is_a_multiple_of_them() -> None:
    assert carried_out(Scaled("int8", per=16), torch.empty(3, 64)) == Scaled("int8", per=16)
    assert carried_out(Scaled("int8", per=16), torch.empty(3, 40)) == Scaled("int8")
    assert carried_out(Scaled("int8"), torch.empty(3, 64)) == Scaled("int8")
    assert carried_out(Scaled("int4", per=16), torch.empty(3, 40)) == Scaled("int4")


@pytest.mark.parametrize(
    ("pack", "x", "reason"),
    [
        (Cast("bf16"), torch.zeros(4, dtype=torch.bfloat16), "no wider than bfloat16"),
        (Cast("fp16"), torch.zeros(4, dtype=torch.bfloat16), "no wider than float16"),
        (Cast("bf16"), torch.zeros(4, dtype=torch.int64), "int64 cannot be packed"),
        (Scaled("int8"), torch.zeros(4, dtype=torch.complex64), "complex64 cannot be packed"),
        (Bits(), torch.zeros(8, dtype=torch.uint8), "uint8 cannot be packed as bits"),
        (Scaled("int8"), torch.zeros(()), "no dimension"),
        (Scaled("int8"), torch.zeros(4, 1), "would not become smaller"),
        (Scaled("int4"), torch.zeros(4, 1), "would not become smaller"),
        (Scaled("int4", per=2), torch.zeros(4, 8, dtype=torch.float16), "would not become smaller"),
        (Scaled("int4"), torch.zeros(4, 8, dtype=torch.int32), "int32 cannot be packed"),
        (Scaled("int8", per=2), torch.zeros(4, 8, dtype=torch.bfloat16), "would not become smaller"),
    ],
)
def test_what_a_pack_is_not_for(pack: Cast | Scaled | Bits, x: torch.Tensor, reason: str) -> None:
    found = functions(pack, x)
    assert isinstance(found, str)
    assert reason in found
