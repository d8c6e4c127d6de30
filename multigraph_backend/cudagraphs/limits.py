"""What recordings may cost: their limits, as the runtime reads them, and as users name them.

In:  numbers by the names of `LEAST`, from `limit_recordings()` for the process or from `options={"limits": ...}` for
one model, checked where they are given.  Out: a frozen `Limits`.  Pure; loads nothing.

Amounts of memory (`AMOUNTS`) are bytes, or a fraction of the device: `4 << 30` is 4 GiB, and 0.5 is half of it.  A
number's type says which, so that 1 is a byte and 1.0 the whole device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: the limits by the names that users give them, with the least that each may be
LEAST: Mapping[str, int] = {
    "count": 1, "pool_bytes": 1, "depth": 1, "failures": 1, "copied_bytes": 0, "small_bytes": 0,
    "unreplayed": 1, "idle": 0, "patience": 0, "keep_free": 0,
}  # fmt: skip

#: of `idle`, `patience`, and of how long a compile may take: 31 years; no lock waits for more than some 292
MOST_SECONDS = 1_000_000_000

#: those that are seconds
SECONDS = ("idle", "patience")
#: those that are amounts of memory, with what is expected of them
AMOUNTS: Mapping[str, str] = {
    "pool_bytes": "a number of bytes from 1 on, a fraction of the device (a float above 0.0, up to 1.0) or None",
    "keep_free": "a number of bytes from 0 on, or a fraction of the device (a float from 0.0 on, below 1.0)",
}


@dataclass(frozen=True)
class Limits:
    """What recordings may cost.

    depth: nodes on a path; a longer one ends its step, or its calls run unrecorded
    per_device: recordings in all; the least recently used are given up for new ones
    pool_bytes: memory of all pools together, beyond which recordings that are worth less are given up for new ones, or
        the new one is not made; None: no limit
    failures: failed recordings of a piece at one key before it is not tried again there
    copied_bytes: bytes of inputs from which on their copies count; fewer take no longer than a launch or two
    small_bytes: of an input that is copied although it came at the same address twice, where such are few; to copy it
        takes little more than a launch
    unreplayed: recordings of one piece in a row, hardly replayed, before it is only recorded what comes again
    idle: seconds without a call of all threads but one, after which that one's outputs are no copies any more
    patience: seconds that a call waits for one of another thread, before it runs unrecorded beside it
    keep_free: memory of the device that recordings leave to all others
    """

    depth: int = 64
    per_device: int = 1024
    pool_bytes: float | None = None
    failures: int = 2
    copied_bytes: int = 16 << 20
    small_bytes: int = 256 << 10
    unreplayed: int = 32
    idle: float = 10.0
    patience: float = 1.0
    keep_free: float = 0.05


def by_field(named: Mapping[str, Any]) -> dict[str, Any]:
    """Limits by the names that users give them, by the names of `Limits`."""
    return {"per_device" if name == "count" else name: value for name, value in named.items()}


def accepts(name: str, value: object) -> bool:
    """Whether `value` is one for `name`, an amount of memory."""
    if isinstance(value, float):
        return 0.0 < value <= 1.0 if name == "pool_bytes" else 0.0 <= value < 1.0
    if value is None:
        return name == "pool_bytes"
    return isinstance(value, int) and not isinstance(value, bool) and value >= LEAST[name]


def in_bytes(amount: float, total: int) -> int:
    """An amount of memory of a device that has `total` bytes."""
    return int(amount * total) if isinstance(amount, float) else amount
