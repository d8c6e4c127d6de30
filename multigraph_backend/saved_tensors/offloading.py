"""Offloading as operators, for graphs: bytes of a tensor to the host in forward, back in backward.

    copy = offload(x, kept, copies)
    settled = settle(kept, copies)
    x = reload(copy, dtype, device, following, settled)

Inductor knows nothing of other streams, and would use the memory of a tensor again after its last reader.  So what is
being copied is read once more, as `kept`, by the operator that waits for the copy: the offload some tensors later, and
for the last ones `settle`, whose small result is saved too, so that nothing drops it.  `links` puts that in.

In: graphs that call these operators.  Out: calls of `transfers`.

Invariant: they are functions of their arguments in every order that respects who reads whose result.  No CUDA graph
holds them: they take buffers from a pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multigraph_backend.saved_tensors import transfers
from multigraph_backend.saved_tensors.transfers import host_shape

_library = torch.library.Library("multigraph", "DEF")
_tags = tuple(
    tag for name in ("cudagraph_unsafe", "needs_fixed_stride_order") if (tag := getattr(torch.Tag, name, None))
)
_library.define("offload(Tensor x, Tensor[] kept, Tensor[] copies) -> Tensor", tags=_tags)
_library.define("settle(Tensor[] kept, Tensor[] copies) -> Tensor", tags=_tags)
_library.define(
    "reload(Tensor copy, ScalarType dtype, Device device, Tensor[] following, Tensor[] settled) -> Tensor", tags=_tags
)


def _offload(x: torch.Tensor, kept: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> torch.Tensor:
    return transfers.of(x.device).offload(x, kept, copies)


def _settle(kept: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> torch.Tensor:
    if kept:
        transfers.of(kept[0].device).settle(kept, copies)
    return torch.empty(1, dtype=torch.uint8)


def _reload(
    copy: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    following: Sequence[torch.Tensor],
    settled: Sequence[torch.Tensor],
) -> torch.Tensor:
    return transfers.of(device).reload(copy, dtype, device, following)


def _fake_offload(x: torch.Tensor, kept: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(host_shape(x), dtype=torch.uint8, device="cpu")


def _fake_settle(kept: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _fake_reload(
    copy: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    following: Sequence[torch.Tensor],
    settled: Sequence[torch.Tensor],
) -> torch.Tensor:
    shape = (*copy.shape[:-1], copy.shape[-1] // dtype.itemsize)
    return torch.empty(shape, dtype=dtype, device=device)


for _name, _function, _fake in (
    ("offload", _offload, _fake_offload),
    ("settle", _settle, _fake_settle),
    ("reload", _reload, _fake_reload),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"multigraph::{_name}", _fake, lib=_library)

OFFLOAD = torch.ops.multigraph.offload.default
SETTLE = torch.ops.multigraph.settle.default
RELOAD = torch.ops.multigraph.reload.default
