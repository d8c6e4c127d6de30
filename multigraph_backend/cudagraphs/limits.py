"""What recordings may cost: their limits, as the runtime reads them, and as users name them.

In:  numbers by the names of `LEAST`, from `limit_recordings()` for the process or from `options={"limits": ...}` for
one model, checked where they are given.  Out: a frozen `Limits`.  Pure; loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: the limits by the names that users give them, with the least that each may be
LEAST: Mapping[str, int] = {
    "count": 1, "pool_bytes": 1, "depth": 1, "failures": 1, "copied_bytes": 0, "unreplayed": 1,
    "idle": 0, "patience": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What recordings may cost.

    depth: nodes on a path; a longer one ends its step, or its calls run unrecorded
    per_device: recordings in all; the least recently used are given up for new ones
    pool_bytes: bytes of the pool from which on recordings are given up for new ones; None: no limit
    failures: failed recordings of a piece at one key before it is not tried again there
    copied_bytes: bytes of inputs from which on their copies count; fewer take no longer than a launch or two
    unreplayed: recordings of one piece in a row, hardly replayed, before it is only recorded what comes again
    idle: seconds without a call of all threads but one, after which that one's outputs are no copies any more
    patience: seconds that a call waits for one of another thread, before it runs unrecorded beside it
    """

    depth: int = 64
    per_device: int = 1024
    pool_bytes: int | None = None
    failures: int = 2
    copied_bytes: int = 16 << 20
    unreplayed: int = 32
    idle: float = 10.0
    patience: float = 1.0


def by_field(named: Mapping[str, Any]) -> dict[str, Any]:
    """Limits by the names that users give them, by the names of `Limits`."""
    return {"per_device" if name == "count" else name: value for name, value in named.items()}
