"""The ready packs as tensor functions: narrower types, with and without scales, and memory of the host.

In: a `Cast`, a `Scaled`, a `Bits` or an `Offload` of one of them, and a tensor that is contiguous.  Out: `pack(x) ->
packed tensors` and `unpack(packed) -> x again`, up to rounding (bits, offloaded as they are: exactly), of the same type
and shape.  A hook of the user's is taken as it is.

Invariants, by element: bfloat16 within 2^-8 of the value, e4m3 within 2^-4 and e5m2 within 2^-3 in their normal
range; int8 within amax / 254 and int4 within amax / 14 of its row or block, or within the smallest normal number where
that is more.  What is finite comes back finite, and a value that is infinite or NaN never does: with scales its whole
row or block becomes NaN.  Arithmetic is in float32; scales of float64 are too wide for it, and are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.saved_tensors import compressed
from multigraph_backend.saved_tensors.hooks import SavedHook
from multigraph_backend.saved_tensors.offload import operators, transfers
from multigraph_backend.saved_tensors.rules import Bits, Cast, Offload, Scaled

PackFunction = Callable[[torch.Tensor], Any]
UnpackFunction = Callable[[Any], torch.Tensor]
Ready = Cast | Scaled | Bits | Offload | SavedHook

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LARGEST = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# a small number added to it is, rounded to nearest, in its last bits; a GPU is slower at rounding and converting
_ONES_LAST = 1.5 * 2**23
# bits behind the leading one, and the smallest normal number as a power of two
_PRECISION = {"bfloat16": (7, -126), "float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}


def functions(pack: Ready, value: torch.Tensor) -> tuple[PackFunction, UnpackFunction] | str:
    """`pack` and `unpack` for tensors like `value`, or why there are none."""
    if isinstance(pack, SavedHook):
        return pack.pack, pack.unpack
    if isinstance(pack, Offload):
        return _offload(pack, value)
    if isinstance(pack, Bits):
        return _bits(value)
    if value.dtype not in _FLOATS:
        return f"{_name(value.dtype)} cannot be packed as {pack}"
    if isinstance(pack, Cast):
        found = _cast(pack, value.dtype)
        return _transposed(value, *found) if pack.multiply and not isinstance(found, str) else found
    return _scaled(pack, value)


def _cast(pack: Cast, dtype: torch.dtype) -> tuple[PackFunction, UnpackFunction] | str:
    target: torch.dtype = getattr(torch, pack.dtype)
    if target.itemsize >= dtype.itemsize:
        return f"it is {_name(dtype)} already, no wider than {pack.dtype}"

    def narrow(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if pack.stochastic:
            x = _round_at_random(x.to(torch.float32), pack.dtype)
        if pack.dtype in _LARGEST:
            x = _within(x if dtype == torch.float64 else x.to(torch.float32), _LARGEST[pack.dtype])
        return (x.to(target),)

    return narrow, lambda packed: packed[0].to(dtype)


def _transposed(value: torch.Tensor, pack: PackFunction, unpack: UnpackFunction) -> tuple[PackFunction, UnpackFunction]:
    """As a matrix, a column of the last dimension's elements in a row of what is saved; see `products`."""
    shape = value.shape

    def turn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (packed,) = pack(x)
        turned = packed.reshape(-1, shape[-1]).t()
        # the product wants it so; a contiguous copy alone would lie as the compiler would rather have it
        return (_compat.force_stride_order(turned, [turned.shape[1], 1]),)

    return turn, lambda packed: unpack([packed[0].t()]).reshape(shape)


def _scaled(asked: Scaled, value: torch.Tensor) -> tuple[PackFunction, UnpackFunction] | str:
    if value.dim() == 0:
        return "it has no dimension to scale along"
    row: Any = value.shape[-1]
    whole_row = isinstance(row, int) and asked.per == row  # what is compared with a dynamic length fixes that
    pack = replace(asked, per="row") if whole_row else carried_out(asked, value)
    dtype, most = value.dtype, _LARGEST[pack.dtype]
    length = row if pack.per == "row" else pack.per
    inside = torch.float64 if dtype == torch.float64 else torch.float32  # where scales are found
    numbers = torch.finfo(inside)
    if isinstance(length, int) and _packed_bytes(pack, length, inside) >= length * dtype.itemsize:
        return f"with a scale per {length} elements it would not become smaller"

    def scale_of(largest: torch.Tensor) -> torch.Tensor:
        # so that its reciprocal is a normal number too, and what comes back of the largest is finite
        scale = largest.clamp(2 * numbers.tiny * most, numbers.max * (1 - 2 * numbers.eps)) / most
        return scale + largest * 0.0  # NaN where that is not finite; see `_within`

    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x * scale.reciprocal()).to(torch.float32)

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x if pack.per == "row" else x.unflatten(-1, (row // pack.per, pack.per))

    def whole(x: torch.Tensor) -> torch.Tensor:
        return (x if pack.per == "row" else x.flatten(-2)).to(dtype)

    if pack.dtype == "int4":
        return _halves(pack, length, inside, scale_of, scaled, blocks, whole)
    target: torch.dtype = getattr(torch, pack.dtype)

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = blocks(x.to(inside))
        scale = scale_of(x.abs().amax(-1, keepdim=True))
        x = scaled(x, scale)
        if pack.stochastic:
            x = torch.floor(x + torch.rand_like(x)) if pack.dtype == "int8" else _round_at_random(x, pack.dtype)
            x = x.clamp(-most, most)
        elif pack.dtype == "int8":
            return _integers(x).to(target), scale
        return x.to(target), scale  # rounding may have put it just beyond `most`, to which it is rounded here

    return quantize, lambda packed: whole(packed[0].to(inside) * packed[1])


def _halves(
    pack: Scaled,
    length: int,
    inside: torch.dtype,
    scale_of: Callable[[torch.Tensor], torch.Tensor],
    scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    blocks: Callable[[torch.Tensor], torch.Tensor],
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[PackFunction, UnpackFunction]:
    """Two elements a byte: the first half of each row or block of `length` in the low bits, the second in the others.

    Both halves are read at once, so that the largest value and the bytes come of one loop; one of odd length is filled
    up with a zero.
    """
    half, most = -(-length // 2), _LARGEST[pack.dtype]

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = blocks(x.to(inside))
        x = torch.nn.functional.pad(x, (0, 1)) if length % 2 else x
        parts = [x.narrow(-1, 0, half), x.narrow(-1, half, half)]
        scale = scale_of(torch.maximum(parts[0].abs(), parts[1].abs()).amax(-1, keepdim=True))
        parts = [scaled(part, scale) for part in parts]
        if pack.stochastic:
            parts = [torch.floor(part + torch.rand_like(part)).clamp(-most, most) for part in parts]
        low, high = map(_integers, parts)
        return ((low & 15) + high * 16).to(torch.int8), scale

    def restore(packed: Sequence[torch.Tensor]) -> torch.Tensor:
        both = packed[0].to(torch.int32).unsqueeze(-2)
        places = torch.arange(0, 8, 4, device=both.device, dtype=torch.int32).unsqueeze(-1)
        x = ((((both >> places) & 15) ^ 8) - 8).to(inside).flatten(-2)
        return whole((x.narrow(-1, 0, length) if length % 2 else x) * packed[1])

    return quantize, restore


def _integers(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to integers, which are small, in the last bits of what is returned; anything for NaN."""
    return (x + _ONES_LAST).view(torch.int32)


def _packed_bytes(pack: Scaled, length: int, of_scale: torch.dtype) -> int:
    """Of a row or block of `length` elements, with its scale."""
    values = -(-length // 2) if pack.dtype == "int4" else length * getattr(torch, pack.dtype).itemsize
    return int(values) + of_scale.itemsize


def _bits(value: torch.Tensor) -> tuple[PackFunction, UnpackFunction] | str:
    """Eight elements a byte: of the whole mask where its size is known, else along a dimension; zeros fill it up."""
    if value.dtype != torch.bool:
        return f"{_name(value.dtype)} cannot be packed as bits"
    sizes: list[Any] = list(value.shape)
    along = -1
    whole = all(isinstance(size, int) for size in sizes) and (not sizes or sizes[-1] % 8 != 0)
    count: Any = math.prod(sizes) if whole else sizes[-1]
    if not isinstance(count, int):  # the one that is filled up the least, and the innermost of these
        fixed = [(dim, size) for dim, size in enumerate(sizes) if isinstance(size, int) and size > 1]
        known = [(-(-size // 8) / size, -dim, dim) for dim, size in fixed]
        if not known:
            return f"its rows are of {count} elements, which differ from call to call, and no other dimension is fixed"
        along = min(known)[-1] - len(sizes)
        count = sizes[along]
    filled = -count % 8

    def gather(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = (x.reshape(count) if whole else x).to(torch.uint8)
        eights = torch.nn.functional.pad(x, (0, 0) * (-along - 1) + (0, filled)) if filled else x
        eights = eights.unflatten(along, ((count + filled) // 8, 8))
        packed = eights.select(along, 0)
        for place in range(1, 8):
            packed = packed + eights.select(along, place) * 2**place
        return (packed,)

    def spread(packed: Sequence[torch.Tensor]) -> torch.Tensor:
        places = torch.arange(8, device=packed[0].device, dtype=torch.uint8).view(8, *[1] * (-along - 1))
        at = packed[0].dim() + along + 1  # of the eight, behind the bytes
        bits = ((packed[0].unsqueeze(at) >> places) & 1).to(torch.bool).flatten(at - 1, at)
        bits = bits.narrow(along, 0, count) if filled else bits
        return bits.reshape(sizes) if whole else bits

    return gather, spread


def carried_out(pack: Scaled, value: torch.Tensor) -> Scaled:
    """What is done where rows are such that `pack` cannot be: scales of whole rows, a whole byte for each element."""
    row: Any = value.shape[-1] if value.dim() else 1
    if not isinstance(row, int):
        return replace(pack, per="row", dtype="int8" if pack.dtype == "int4" else pack.dtype)
    return pack if pack.per == "row" or row % pack.per == 0 else replace(pack, per="row")


def said(pack: Ready, value: torch.Tensor) -> str:
    """What becomes of tensors like `value`, for reports: where it is not what was asked for, with the reason."""
    if isinstance(pack, Offload) and pack.pack is not None:
        inside = said(pack.pack, value)
        if (nowhere := _nowhere(value.device)) is not None:
            return f"{inside}; not offloaded, for {nowhere}"
        why = functions(pack.pack, value)
        return f"offload as it is, for {why}" if isinstance(why, str) else f"offload as {inside}"
    if not isinstance(pack, Scaled) or (done := carried_out(pack, value)) == pack:
        return str(pack)
    row: Any = value.shape[-1]
    if not isinstance(row, int):
        return f"{done}, for its rows differ from call to call"
    return f"{done}, for its rows are of {row} elements, no multiple of {pack.per}"


def _nowhere(device: torch.device) -> str | None:
    """Why nothing of `device` can be offloaded; None where it can."""
    if device.type in transfers.STREAMS:
        return None
    return f"it is on the {device.type}, which has no other memory to offload to"


def _offload(pack: Offload, value: torch.Tensor) -> tuple[PackFunction, UnpackFunction] | str:
    dtype, device = value.dtype, value.device
    nowhere = _nowhere(device)
    if pack.pack is not None:
        inner = functions(pack.pack, value)
        if nowhere is not None:
            return inner
        if not isinstance(inner, str):
            return compressed.offloaded(*inner)
    if nowhere is not None:
        return nowhere
    if value.dim() == 0:
        return "it is a single number"
    return (
        lambda x: (operators.OFFLOAD(x),),
        lambda packed: operators.RELOAD(packed[0], dtype, device, [], []),
    )


def _within(x: torch.Tensor, most: float) -> torch.Tensor:
    """`x` where it is at most `most`, else that; NaN for what is not finite.

    Times 0 a value is NaN where it is not finite, and else 0.  On a GPU a test of each element would take longer than
    reading and writing it; and what `where` chooses from would be a constant in the graph, next to which packs would
    have to stand: those of equal layers would be far from their layers, which would be no blocks then.
    """
    nothing = x * 0.0  # with an integer 0 Inductor would replace the product by 0
    if x.device.type == "cuda" and torch.version.hip is None:  # there Triton's conversion to fp8 stops at `most`
        return x + nothing
    return x.clamp(-most, most) + nothing


def _round_at_random(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """To one of the two neighbours of each value in `dtype`, the nearer the likelier; float32 in and out.

    What is not finite stays, and so does what would be rounded to infinity.
    """
    bits, smallest = _PRECISION[dtype]
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, at or below the value
    step = power.clamp(min=2.0**smallest) * 2.0**-bits
    rounded = torch.floor(x / step + torch.rand_like(x)) * step
    return torch.where(torch.isfinite(rounded), rounded, x)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
