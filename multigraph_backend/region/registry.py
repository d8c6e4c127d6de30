"""Which regions are alive, for reports.

A region ends with the code that Dynamo drops, so this holds it weakly.  `keep()` is for an account of a whole run,
given after its models have ended; it is called before anything is compiled, so nothing here needs torch.  Nor does
it know what a region is: only what `gains` asks of each.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Registered(Protocol):
    """A region, as far as it is known here."""

    def publish(self) -> None:
        """Let generated code run what it may."""


_alive: weakref.WeakSet[Registered] = weakref.WeakSet()
_kept: list[Registered] | None = None


def add(region: Registered) -> None:
    """A new region."""
    _alive.add(region)
    if _kept is not None:
        _kept.append(region)


def living() -> list[Registered]:
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
