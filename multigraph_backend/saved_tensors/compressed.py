"""What a pack makes of a tensor, on the host until the backward: fewer bytes on the link, and none on the device.

    x                       q, scale = int8(x)          what the pack inside makes of it
    saved                   offload(q), scale           what is large of that goes to the host
    unpacked                int8_back(reload(q), scale)

In: the pack and unpack functions inside, of any structure.  Out: a pack function that sends what they save to the host,
and an unpack function that takes it back first.

Invariants: what the inner unpack function gets has the shape, type and strides of what the inner pack function made.
What is small beside the rest, a single number, or no plain memory of the same device stays where it is: a copy of its
own takes longer than it is worth, or is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigraph_backend.saved_tensors import graphs
from multigraph_backend.saved_tensors.offload import operators
from multigraph_backend.saved_tensors.structure import Structure, take_apart

SMALL = 64  # a part of so many is not worth a copy of its own: scales of rows of 256 elements and more

_Return = Callable[[torch.Tensor], torch.Tensor]


def offloaded(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> tuple[Callable[[torch.Tensor], list[torch.Tensor]], Callable[[Sequence[torch.Tensor]], torch.Tensor]]:
    """`pack` and `unpack` by way of the host.  Raises CannotTakeApart where what is packed hides its tensors."""
    made: list[tuple[Structure, list[_Return]]] = []  # by the traces of the pack function, of which the last counts

    def there(x: torch.Tensor) -> list[torch.Tensor]:
        tensors, structure = take_apart(pack(x))
        total = sum(map(graphs.tensor_bytes, tensors))
        sent = [_sent(entry, x.device, total) for entry in tensors]
        made.append((structure, [way for _, way in sent]))
        return [copy for copy, _ in sent]

    def back(copies: Sequence[torch.Tensor]) -> torch.Tensor:
        structure, ways = made[-1]
        return unpack(structure.build([way(copy) for way, copy in zip(ways, copies, strict=True)]))

    return there, back


def _sent(value: torch.Tensor, device: torch.device, total: int) -> tuple[torch.Tensor, _Return]:
    """What is saved for one tensor of a pack, and how it comes back."""
    order = graphs.memory_order(value)
    stays = value.device != device or value.dim() == 0 or value.is_conj() or value.is_neg() or order is None
    if stays or graphs.tensor_bytes(value) * SMALL < total:
        return value, lambda copy: copy
    assert order is not None
    dims, inverse, dtype = order.dims, order.inverse, value.dtype

    def back(copy: torch.Tensor) -> torch.Tensor:
        return operators.RELOAD(copy, dtype, device, [], []).permute(inverse)  # type: ignore[no-any-return]

    return operators.OFFLOAD(value.permute(dims)), back
