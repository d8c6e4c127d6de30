"""Whether a recording pays: what its replays take, held against the code as it is.

A replay costs the host the staging of inputs, a launch and the outputs, and the GPU the copies of inputs.  It saves the
host's time for the code itself, which for a kernel or two is less.  All of it is measured: the code while it is
captured, the first replays, and one copy of the inputs between two events of the device.

In:  those times.  Out: a verdict, once.  A piece that loses runs unrecorded from then on.
"""

from __future__ import annotations

from collections.abc import Callable

REPLAYS = 8  # of which the quickest counts: the first loads the recording, others may wait for the device


class Trial:
    """The first replays of one recording.

    code: microseconds that the host took for the code while it was captured.  copies: tells the device's microseconds
    for copying the inputs, None while it does not know.
    """

    def __init__(self, code: float, copies: Callable[[], float | None]) -> None:
        self.code, self.copies = code, copies
        self.replays = 0
        self.best = float("inf")

    def ran(self, microseconds: float) -> bool:
        """Note one replay; whether they were enough for a verdict."""
        self.replays += 1
        self.best = min(self.best, microseconds)
        return self.replays >= REPLAYS

    def loss(self) -> str | None:
        """What speaks against the recording, None if nothing does."""
        copies = self.copies() or 0.0
        if self.best + copies <= self.code:
            return None
        copying = f" and {copies:.1f} us of copying" if copies else ""
        return (
            f"it does not pay: a replay takes {self.best:.1f} us{copying}, its code {self.code:.1f} us "
            "(record_small=True records it all the same)"
        )
