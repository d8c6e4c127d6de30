"""What no rule decides, tried out: one call with rows of several kinds behind the real ones.

The graph runs eagerly some times on the inputs of a call: as it is; padded as calls are, with the last row; padded with
not-a-number, and with huge numbers of both signs, where integers are those of other rows, in another order.  Real rows
of the padded runs must be the same bit by bit, and within rounding those of the run without padding.

A try says something of the sizes and inputs that it was made with, and nothing of others.  So it is made again at each
new size, and only of operators for which there is no rule.

In: a graph that may run as often as one likes (the caller sees to that), the arguments of a call, a `PaddedCall`.  Out:
what was different, or nothing.  Random number generators of the program are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.padding.calls import PaddedCall

Run = Callable[..., Any]


def difference(
    run: Run, padded: PaddedCall, args: Sequence[Any], sizes: Sequence[int], mild: bool = False
) -> str | None:
    """What shows that real rows depend on padding, None where nothing does.  Raises what the graph itself raises.

    `mild`: other rows in place of garbage, for a graph that makes integers of floating-point numbers: an index that is
    made of garbage lies outside of what it indexes, and that ends a process that uses a GPU.
    """
    devices = sorted({arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices):
        plain = run(*args)
        given = padded.inputs(args, *sizes)
        first: Sequence[Any] | None = None
        for kind in ("repeated rows", *(("other rows",) if mild else ("not-a-number", "huge numbers"))):
            try:
                outputs = padded.cut(run(*_spoilt(args, given, kind)), args)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                return f"with {kind} behind them it raised {type(error).__name__}: {error}"
            for number, (one, other) in enumerate(zip(outputs, first or plain, strict=True)):
                try:
                    same = (_close if first is None else _identical)(one, other)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # quantized tensors cannot be, for one
                    return f"output {number} cannot be compared: {describe(error)}"
                if not same:
                    return f"output {number} is another with {kind} behind the real rows"
            first = first or outputs
    return None


def _spoilt(args: Sequence[Any], given: Sequence[Any], kind: str) -> Iterator[Any]:
    """The padded arguments, with rows of this kind behind the real ones."""
    random = torch.Generator().manual_seed(29)
    for real, longer in zip(args, given, strict=True):
        if real is longer or not isinstance(longer, torch.Tensor) or kind == "repeated rows":
            yield longer.clone() if isinstance(longer, torch.Tensor) and real is not longer else longer
            continue
        made = longer.clone(memory_format=torch.preserve_format)
        for dim, (had, has) in enumerate(zip(real.shape, made.shape, strict=True)):
            if had < has:
                tail = made.narrow(dim, had, has - had)
                if kind != "other rows" and (made.is_floating_point() or made.is_complex()):
                    tail.copy_(_garbage(tail, kind, random))
                else:
                    rows = torch.randint(had, (has - had,), generator=random).to(made.device)
                    tail.copy_(made.index_select(dim, rows))
        yield made


def _garbage(tail: torch.Tensor, kind: str, random: torch.Generator) -> torch.Tensor:
    if kind == "not-a-number":
        return torch.full_like(tail, float("nan"))
    signs = torch.randint(2, tail.shape, generator=random).to(tail.device) * 2 - 1
    return signs * (torch.finfo(tail.dtype).max / 8)


def _tensors(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)


def _identical(one: Any, other: Any) -> bool:
    if not _tensors(one, other):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.isnan(), other.isnan()) and bool(((one == other) | one.isnan()).all())


def _close(one: Any, other: Any) -> bool:
    if not _tensors(one, other):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    # other sizes may be computed in another order: about half of the digits have to agree
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    largest = max((float(part.abs().nan_to_num().max()) for part in (one, other) if part.numel()), default=0.0)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * min(largest, 1e30), equal_nan=True)
