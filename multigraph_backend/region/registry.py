"""Which regions are alive, for reports.

A region ends with the code that Dynamo drops, so this holds it weakly.  `keep()` is for an account of a whole run,
given after its models have ended; it is called before anything is compiled, so nothing here needs torch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multigraph_backend.region.region import Region

_alive: weakref.WeakSet[Region] = weakref.WeakSet()
_kept: list[Region] | None = None


def add(region: Region) -> None:
    """A new region."""
    _alive.add(region)
    if _kept is not None:
        _kept.append(region)


def living() -> list[Region]:
    """Every region that is alive; other threads may add some meanwhile."""
    while True:
        try:
            return list(_alive)
        except RuntimeError:  # the set grew while it was read
            continue


def clear() -> None:
    """Let reports start anew, with `torch._dynamo.reset()`; what is kept stays."""
    if _kept is None:
        _alive.clear()


def keep() -> None:
    """From now on every region stays alive, and `clear` forgets none, until `release`."""
    global _kept
    _kept = []


def release() -> None:
    """Let the regions go that were kept."""
    global _kept
    _kept = None
