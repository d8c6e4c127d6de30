"""Running code on a simulated device with its memory in the pool, as CUDA does for a pool that a thread allocates from.

In: the operations that pass torch's dispatcher while a function runs.  Each runs at once, over the bytes that its
arguments have in their places, and new results get memory of the pool.  That is free again when their last tensor has
died, also later: then whoever asks for memory of the pool, or what is in it, finds out.
"""

from __future__ import annotations

from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices.device import Layout
from multigraph_backend.cudagraphs.devices.simulated.capture import each
from multigraph_backend.cudagraphs.devices.simulated.memory import Memory, Pool, bytes_of, tensor_over


class Runner(_compat.TorchDispatchMode):  # type: ignore[misc]
    """Gives results of operations memory of `pool`."""

    def __init__(self, pool: Pool, memory: Memory) -> None:
        super().__init__()
        self.pool, self.memory = pool, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: set[int] = set()

        def note(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                given.add(leaf.untyped_storage()._cdata)
            return leaf

        each(note, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        moved: dict[int, torch.UntypedStorage] = {}

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                return leaf
            storage = leaf.untyped_storage()
            if storage._cdata in given or not storage.nbytes() or self.memory.of(storage) is not None:
                return leaf
            if storage._cdata not in moved:
                moved[storage._cdata] = self.allocate(storage, str(func))
            return tensor_over(Layout.of(leaf), moved[storage._cdata])

        return each(place, result)

    def allocate(self, storage: torch.UntypedStorage, origin: str) -> torch.UntypedStorage:
        """Memory of the pool with what `storage` holds."""
        self.memory.gather()
        offset = self.pool.allocate(storage.nbytes())
        made = self.memory.map(self.pool, offset, storage.nbytes(), origin)
        self.memory.mapped[made._cdata].frees = True
        with torch.no_grad():
            bytes_of(made).copy_(bytes_of(storage))
        self.memory.gather()
        return made
