"""Memory of a simulated pool that serves allocations outside of it.

A loan holds bytes of its own, which nobody else may write over: `intact` tells.  It takes of the pool what that has and
is free, never more of the device.
"""

from __future__ import annotations

import os

from multigraph_backend.cudagraphs.devices.simulated.memory import Pool


class Loan:
    """`nbytes` of `pool`, until it is over; one of `loans` meanwhile."""

    def __init__(self, pool: Pool, offset: int, nbytes: int, loans: list[Loan]) -> None:
        self.pool, self.offset, self.nbytes, self._loans = pool, offset, nbytes, loans
        self._content = os.urandom(nbytes)
        pool.memory[offset : offset + nbytes] = self._content
        loans.append(self)

    @classmethod
    def of(cls, pool: Pool, nbytes: int, loans: list[Loan]) -> Loan | None:
        """None where the pool has no such memory."""
        arena = pool.arena
        has, before = arena.bytes, arena.mark()
        try:
            offset = arena.allocate(nbytes)
        except MemoryError:
            return None
        if arena.bytes > has:
            arena.free(offset)
            arena.return_to(before)
            return None
        return cls(pool, offset, nbytes, loans)

    def intact(self) -> bool:
        """Whether its bytes are what they were."""
        return self.pool.memory[self.offset : self.offset + self.nbytes] == self._content

    def over(self) -> None:
        """It goes back to the pool, and what it held is garbage."""
        self._loans.remove(self)
        self.pool.free(self.offset)
