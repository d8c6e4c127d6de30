"""What of this process communicates: compiled code that issues collectives, and the recordings that hold some.

Both register themselves here, for `endings` and `watchdog`, which look at them from below and ask no more of them than
these protocols say.  Nothing is kept alive.

In:  `add_code` where such code was compiled or loaded, `add_recordings` where such a piece was recorded.
Out: those that are still there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from multigraph_backend.distributed.sequence import Collective


class Spec(Protocol):
    """What is known of the graph of compiled code."""

    @property
    def collectives(self) -> Sequence[Collective]:
        """What it issues, in order."""


class Code(Protocol):
    """Compiled code: what messages call it, the code that its compiler generated, what is known of its graph."""

    @property
    def label(self) -> str: ...
    @property
    def inner(self) -> Any: ...
    @property
    def spec(self) -> Spec: ...


class Launched(NamedTuple):
    """What was replayed: how often each piece with collectives, by its label; and whether the device has finished all
    of it (None: that cannot be asked now)."""

    calls: Mapping[str, int]
    done: Callable[[], bool] | None


class Recordings(Protocol):
    """All recordings of one device."""

    def release(self, why: str, patience: float) -> int:
        """Destroy the recordings that hold collectives; until `resume`, calls run unrecorded, as `why`
        says.  Returns how many were destroyed; what a call in progress holds up for `patience` seconds is left."""

    def resume(self) -> None:
        """From now on they may be recorded again."""

    def held(self) -> bool:
        """Whether any recording holds one."""

    def launched(self, patience: float) -> Launched | None:
        """What was replayed so far; None where a call in progress holds them for `patience` seconds."""


_lock = threading.Lock()
_codes: weakref.WeakValueDictionary[int, Code] = weakref.WeakValueDictionary()  # torch's class of it has no hash
_recordings: weakref.WeakSet[Recordings] = weakref.WeakSet()


def add_code(code: Code) -> None:
    """Take note of code that issues collectives, just compiled or from a cache."""
    with _lock:
        _codes[id(code)] = code


def codes() -> list[Code]:
    """Compiled code with collectives."""
    with _lock:
        return list(_codes.values())


def add_recordings(recordings: Recordings) -> None:
    """Take note of recordings of which one holds a collective now."""
    with _lock:
        _recordings.add(recordings)


def recordings() -> list[Recordings]:
    """Those that have held a collective."""
    with _lock:
        return list(_recordings)
