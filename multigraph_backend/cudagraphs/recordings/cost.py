"""Whether a recording pays: how long its replays take, against the code itself, and whether it is replayed at all.

A replay costs the host the staging of inputs, a launch and the outputs, and the GPU the copies of inputs.  It saves the
host's time for the code itself, which for a kernel or two is less.  All of it is measured: the code while it is
captured, the first replays, and one copy of the inputs between two events of the device.

In:  those times.  Out: a verdict, once.  A piece that loses runs unrecorded from then on.  And what a recording saves
at each call, for choosing among recordings that do not all fit into memory (`room`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

REPLAYS = 8  # of which the quickest counts: the first loads the recording, others may wait for the device


class Trial:
    """The first replays of one recording.

    code_us: microseconds that the host took for the code while it was captured.  copies: tells the device's
    microseconds for copying the inputs, None while it does not know.
    """

    def __init__(self, code_us: float, copies: Callable[[], float | None]) -> None:
        self.code_us, self.copies = code_us, copies
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
        if self.best + copies <= self.code_us:
            return None
        copying = f" and {copies:.1f} us of copying" if copies else ""
        return (
            f"it does not pay: a replay takes {self.best:.1f} us{copying}, its code {self.code_us:.1f} us "
            "(record_small=True records it all the same)"
        )


#: of the host's time for the code, what a replay is taken to save where replays were not timed
_SAVED = 0.8


def saved_us(code_us: float, trial: Trial | None) -> float:
    """Microseconds of the host that a replay saves: as the first replays were timed, where they were; else estimated
    from the time for the code while it was captured, `code_us`, most of which are launches and allocations."""
    if trial is None or not trial.replays:
        return _SAVED * code_us
    return max(trial.code_us - trial.best - (trial.copies() or 0.0), 0.0)


NOT_REPLAYED = (
    "what was recorded of it was hardly replayed: a number among its inputs is another at each call, or calls come in "
    "ever other orders (pass the number as a tensor, or round it up; limits={'unreplayed': ...} allows more recordings)"
)

_REMEMBERED = 256  # that are remembered
_SELDOM = 8  # after each further verdict against the piece, a call has to come again so many times as often
_MOST = 512


class Replayed(Protocol):
    """A recording: how often it was launched."""

    @property
    def calls(self) -> int: ...


class Uses:
    """Whether what is recorded of one piece is replayed.

    A recording takes as long as several calls.  Where fewer than half as many replays as recordings came since the last
    verdict, a call is recorded only when it has come several times alike: with the same numbers, after the
    same recording.  At each further verdict against the piece it has to come more often, after one for it at once.
    """

    def __init__(self) -> None:
        self.needed = 1
        self._made = 0  # recordings since the last verdict
        self._replays = 0  # until then
        self._gone = 0  # replays of nodes that were given up
        self._nodes: list[tuple[weakref.ref[Replayed], list[int]]] = []
        self._seen: OrderedDict[Hashable, int] = OrderedDict()

    def wanted(self, where: Hashable, most: int) -> bool:
        """Whether to record a call at `where`, which no recording answers; `most`: recordings before a verdict."""
        if self._made >= most:
            self._judge()
        if self.needed == 1:
            return True
        times = self._seen.pop(where, 0) + 1
        if times >= self.needed:
            return True
        self._seen[where] = times
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _judge(self) -> None:
        replays = self._count()
        if 2 * (replays - self._replays) >= self._made:
            self.needed = 1
        else:
            self.needed = 2 if self.needed == 1 else min(self.needed * _SELDOM, _MOST)
        self._made, self._replays = 0, replays

    def _count(self) -> int:
        """Replays so far: of each recording those after the call that it was made for."""
        self._gone += sum(final[0] for _, final in self._nodes if final)
        self._nodes = [entry for entry in self._nodes if not entry[1]]
        alive = (reference() for reference, _ in self._nodes)
        return self._gone + sum(max(node.calls - 1, 0) for node in alive if node is not None)

    def recorded(self, node: Replayed) -> list[int]:
        """Note a recording; in what is returned its replays are left when it is given up."""
        final: list[int] = []
        self._made += 1
        self._nodes.append((weakref.ref(node), final))
        return final

    def begin_anew(self) -> None:
        """Recordings are given up, to be made otherwise: that they were made says nothing."""
        self._made = 0

    def wasted(self) -> None:
        """Note a recording that could not be kept."""
        self._made += 1
