"""Offloading as operators, for graphs: bytes of a tensor to the host in forward, back in backward.

    copy = offload(x)
    waited = settle(sources, copies, after)
    begun = begin(copies, device, after)
    x = reload(copy, dtype, device, begun, after)

`offload` begins a copy to the host, and `settle` waits for copies; `begin` prefetches: it begins copies back, and
`reload` waits for one of them.  Inductor knows nothing of other streams, and would use the memory of a tensor again
after its last reader.  So what is being copied is read once more, as a source, by the `settle` that waits for the copy.
The small result of the last one is saved too, so that nothing drops it.  `begun` and `after` are not read: they say
what has to be done before.  `links` puts all that in.

In: graphs that call these operators.  Out: calls of `transfers`.

Invariant: they are functions of their arguments in every order that respects who reads whose result.  No CUDA graph
holds them: they take buffers from a pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multigraph_backend.saved_tensors.offload import transfers
from multigraph_backend.saved_tensors.offload.transfers import host_shape

_library = torch.library.Library("multigraph", "DEF")


def _tags(*names: str) -> tuple[torch.Tag, ...]:
    return tuple(tag for name in ("cudagraph_unsafe", *names) if (tag := getattr(torch.Tag, name, None)))


# where strides are prescribed, Inductor makes a copy of its own for each operator of what has no memory yet: `settle`
# would read another one than `offload`
_library.define("offload(Tensor x) -> Tensor", tags=_tags("flexible_layout"))
_library.define("settle(Tensor[] sources, Tensor[] copies, Tensor[] after) -> Tensor", tags=_tags("flexible_layout"))
_library.define(
    "begin(Tensor[] copies, Device device, Tensor[] after) -> Tensor", tags=_tags("needs_fixed_stride_order")
)
_library.define(
    "reload(Tensor copy, ScalarType dtype, Device device, Tensor[] begun, Tensor[] after) -> Tensor",
    tags=_tags("needs_fixed_stride_order"),
)

_Tensors = Sequence[torch.Tensor]


def _offload(x: torch.Tensor) -> torch.Tensor:
    return transfers.of(x.device).offload(x)


def _settle(sources: _Tensors, copies: _Tensors, after: _Tensors) -> torch.Tensor:
    if sources:
        transfers.of(sources[0].device).wait(copies)
    return torch.empty(1, dtype=torch.uint8)


def _begin(copies: _Tensors, device: torch.device, after: _Tensors) -> torch.Tensor:
    transfers.of(device).prefetch(copies, device)
    return torch.empty(1, dtype=torch.uint8)


def _reload(
    copy: torch.Tensor, dtype: torch.dtype, device: torch.device, begun: _Tensors, after: _Tensors
) -> torch.Tensor:
    return transfers.of(device).reload(copy, dtype, device)


def _fake_offload(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(host_shape(x), dtype=torch.uint8, device="cpu")


def _fake_token(*arguments: object) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _fake_reload(
    copy: torch.Tensor, dtype: torch.dtype, device: torch.device, begun: _Tensors, after: _Tensors
) -> torch.Tensor:
    shape = (*copy.shape[:-1], copy.shape[-1] // dtype.itemsize)
    return torch.empty(shape, dtype=dtype, device=device)


for _name, _function, _fake in (
    ("offload", _offload, _fake_offload),
    ("settle", _settle, _fake_token),
    ("begin", _begin, _fake_token),
    ("reload", _reload, _fake_reload),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"multigraph::{_name}", _fake, lib=_library)

OFFLOAD = torch.ops.multigraph.offload.default
SETTLE = torch.ops.multigraph.settle.default
BEGIN = torch.ops.multigraph.begin.default
RELOAD = torch.ops.multigraph.reload.default
