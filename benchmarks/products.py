"""One weight-gradient product of what was packed: unpacked before it, inside of it, or multiplied as it is saved.

`dw = dy.t() @ x` at the shapes of decoder blocks, in bfloat16; x is what a pack saved. The forms, compiled by Inductor:

unpacked             x was never packed: the product alone, of the GPU's library
buffer               x is unpacked into a buffer, and that multiplied, as saved tensors are by default
inside               x is unpacked in the prologue of Triton's template, which Inductor tunes and may refuse; on a GPU.
                     The unpack is an `invoke_quant`, which Inductor's rules against such prologues let pass
template             "unpacked" by Triton's template instead of the library: what "inside" is at best; on a GPU
inside, or library   the same, where tuning may also take the library over a buffer
scaled               x in float8_e4m3fn is multiplied as it is, dy rounded to float8_e5m2: `Cast(..., multiply=True)`

us              of the product, with all that its form does for it, on the GPU
over unpacked   paired by turns
fused           whether the unpack is in the product's own kernel
slower by       by how much Inductor found the product with the unpack inside to be slower, where it tried and refused
error           to the product of what is packed, in float64, relative

    python benchmarks/products.py --json products.json
"""

from __future__ import annotations

import contextlib
import logging
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor_config
from measure import Column, Results, arguments, attempt, device_passes, input_sets, interleaved, own_code, paired_ratio
from torch._higher_order_ops import InvokeQuant
from torch._inductor.utils import run_and_get_code

COLUMNS = (
    Column("shape", "tokens x in x out"),
    Column("pack", "pack"),
    Column("form", "form"),
    Column("us", "us", 1),
    Column("over_unpacked", "over unpacked", 3),
    Column("fused", "fused"),
    Column("slower", "slower by", 3),
    Column("off", "error", 4),
)
SHAPES = (
    (8192, 1024, 1024), (8192, 1024, 3072), (8192, 1024, 4096), (8192, 4096, 1024),
    (8192, 2048, 2048), (8192, 2048, 8192), (8192, 8192, 2048),
)  # fmt: skip
PLAIN = ("unpacked", "template")  # what they multiply was never packed
E5M2 = 57344.0

Tensors = tuple[torch.Tensor, ...]


def packed(pack: str, x: torch.Tensor) -> Tensors:
    if pack == "fp8":
        return (x.to(torch.float8_e4m3fn),)
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x.float() / scale).round().to(torch.int8), scale


def unpacked(saved: Tensors) -> torch.Tensor:
    x = saved[0].float() * saved[1] if len(saved) > 1 else saved[0]
    return x.to(torch.bfloat16)


def plain(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy.t() @ x


def by_way_of_a_buffer(dy: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
    return dy.t() @ unpacked(saved)


def inside(dy: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
    x: torch.Tensor = InvokeQuant()(_cast if len(saved) == 1 else _scale, *saved)
    return dy.t() @ x


def _cast(x: torch.Tensor) -> torch.Tensor:
    return unpacked((x,))


def _scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return unpacked((x, scale))


def scaled(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` lies transposed."""
    scale = dy.abs().amax().float() / E5M2
    rounded = (dy.t().float() / scale).to(torch.float8_e5m2).contiguous()
    one = torch.ones((), device=dy.device)
    return torch._scaled_mm(rounded, x.t(), scale, one, out_dtype=torch.bfloat16)


TUNED = {"max_autotune_gemm": True, "prologue_fusion": True, "benchmark_epilogue_fusion": True}
FORMS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "unpacked": (plain, {}),
    "buffer": (by_way_of_a_buffer, {}),
    "template": (plain, {**TUNED, "max_autotune_gemm_backends": "TRITON"}),
    "inside": (inside, {**TUNED, "max_autotune_gemm_backends": "TRITON"}),
    "inside, or library": (inside, {**TUNED, "max_autotune_gemm_backends": "ATEN,TRITON"}),
    "scaled": (scaled, {}),
}


def measured(device: str, shape: tuple[int, int, int], pack: str, rounds: int) -> dict[str, dict[str, Any]]:
    """The values of each form's row, or an "error"."""
    names = ["unpacked", "buffer"]
    names += ["template", "inside", "inside, or library"] if device == "cuda" else []
    names += ["scaled"] if pack == "fp8" else []
    rows: dict[str, dict[str, Any]] = {}
    passes: dict[str, Any] = {}
    held: list[Any] = []  # inputs: what is timed reads them where they lie
    for name in names:
        made, error = attempt(partial(_form, device, shape, pack, name))
        rows[name] = {"error": error}
        if made is not None:
            rows[name], passes[name], inputs = made
            held.append(inputs)
    taken = interleaved(passes, rounds)
    for name, times in taken.items():
        rows[name]["us"] = statistics.median(times)
        if "unpacked" in taken:
            rows[name]["over_unpacked"] = paired_ratio(times, taken["unpacked"])
    return rows


def _form(device: str, shape: tuple[int, int, int], pack: str, name: str) -> tuple[dict[str, Any], Any, Any]:
    """What is known of a form before it is timed, the pass that times it, and the inputs of that."""
    tokens, inside, outside = shape
    function, how = FORMS[name]
    torch.manual_seed(0)

    def given() -> Tensors:
        x, dy = (torch.randn(tokens, columns, device=device).bfloat16() for columns in (inside, outside))
        saved = packed(pack, x)
        if name in PLAIN:
            return dy * 1e-3, unpacked(saved)
        return dy * 1e-3, *((saved[0].t().contiguous(),) if name == "scaled" else saved)

    inputs = input_sets(given)
    with inductor_config.patch(how), refusals() as refused:
        run = torch.compile(own_code(function), dynamic=False)
        made, code = run_and_get_code(run, *inputs[0])
    dy, *saved = inputs[0]
    x = saved[0].t() if name == "scaled" else saved[0] if name in PLAIN else unpacked(tuple(saved))
    wanted = dy.double().t() @ x.double()
    off = float((made.double() - wanted).norm() / wanted.norm())
    if not off < (0.1 if name == "scaled" else 0.01):
        raise RuntimeError(f"an error of {off:.3g}")
    fused = name not in (*PLAIN, "scaled") and _one_kernel("\n".join(code))
    about = {"off": off, "fused": "yes" if fused else "no", "slower": max(refused, default=None)}
    return about, device_passes({name: run}, inputs, device)[name], inputs


@contextlib.contextmanager
def refusals() -> Iterator[list[float]]:
    """How many times as slow as two kernels those were that Inductor tried inside, and did not fuse for that."""
    found: list[float] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "cannot fuse (benchmark)" in (said := record.getMessage()):
                found.extend(float(each) for each in re.findall(r"(\d+\.\d+)[^x]*x slowdown", said))

    log, handler = logging.getLogger("torch._inductor.scheduler.__fusion"), Handler()
    level, passes_on = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = passes_on


def _one_kernel(code: str) -> bool:
    """Whether the call makes one buffer, its result: what is unpacked has none."""
    return code.count("= empty_strided") == 1


def main() -> int:
    args = arguments(__doc__).parse_args()
    results = Results("products", "Products: a weight gradient of what was packed", COLUMNS, args)
    shapes = ((256, 64, 128),) if args.quick else SHAPES
    for shape in shapes:
        for pack in ("fp8", "int8"):
            _add(results, shape, pack, 3 if args.quick else 40)
    return results.finish()


def _add(results: Results, shape: tuple[int, int, int], pack: str, rounds: int) -> None:
    rows, failed = attempt(partial(measured, results.device, shape, pack, rounds))
    for form, row in (rows or {"unpacked": {}}).items():
        about = {"shape": " x ".join(map(str, shape)), "pack": pack, "form": form}
        results.add(about, row, row.pop("error", None) or failed, form == "inside")


if __name__ == "__main__":
    sys.exit(main())
