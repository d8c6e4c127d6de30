"""What happens is counted here, process-wide, and logged once.

Counting a call must cost next to nothing and lose nothing when threads race, so a call counter is an
`itertools.count`: its `next` is one atomic step of the interpreter.  Everything rarer is a plain integer under a lock.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from typing import Any, Literal

log = logging.getLogger(__name__)

CallKind = Literal["generic_calls", "variant_calls"]
Event = Literal["regions", "generic_compiled", "variants_compiled", "eager_calls", "failures"]

_CALLS: tuple[CallKind, ...] = ("generic_calls", "variant_calls")
_EVENTS: tuple[Event, ...] = ("regions", "generic_compiled", "variants_compiled", "eager_calls", "failures")

_lock = threading.RLock()  # guards everything below; a finalizer may run inside
_events: dict[str, int] = dict.fromkeys(_EVENTS, 0)
_counters: dict[str, list[CallCounter]] = {kind: [] for kind in _CALLS}
_ended: dict[str, int] = dict.fromkeys(_CALLS, 0)  # calls of owners that are gone
_start: dict[str, int] = dict.fromkeys(_CALLS, 0)  # the sum at the last reset
_said: set[str] = set()


class CallCounter:
    """Counts calls; `tick()` is atomic and takes no lock."""

    def __init__(self) -> None:
        count = itertools.count()
        self.tick = count.__next__
        self._reads = 0

    @property
    def value(self) -> int:
        with _lock:
            seen = self.tick() - self._reads
            self._reads += 1
            return seen


def call_counter(kind: CallKind, owner: Any) -> CallCounter:
    """A counter that is part of the process-wide sum of its kind, also after `owner` is gone."""
    counter = CallCounter()
    with _lock:
        _counters[kind].append(counter)
    weakref.finalize(owner, _retire, kind, counter).atexit = False
    return counter


def _retire(kind: CallKind, counter: CallCounter) -> None:
    with _lock:
        _counters[kind].remove(counter)
        _ended[kind] += counter.value


def count(event: Event) -> None:
    """One more of `event`."""
    with _lock:
        _events[event] += 1


def _calls(kind: CallKind) -> int:
    return _ended[kind] + sum(counter.value for counter in _counters[kind])


def stats() -> dict[str, int]:
    """Process-wide counts since the start or the last `reset_stats()`.

    `regions`: Dynamo graphs taken; `generic_compiled`, `variants_compiled`: backend compiles; `generic_calls`,
    `variant_calls`: calls run by them; `eager_calls`: calls run without compiled code; `failures`: compiles that
    failed, hung, or gave wrong outputs.
    """
    with _lock:
        return {**_events, **{kind: _calls(kind) - _start[kind] for kind in _CALLS}}


def reset_stats() -> None:
    """Let every count of `stats()` start at 0 again.  What `explain()` shows per variant is not touched."""
    with _lock:
        for event in _EVENTS:
            _events[event] = 0
        for kind in _CALLS:
            _start[kind] = _calls(kind)


def warn_once(key: str, message: str, *args: object) -> None:
    """Log a warning the first time something of this kind happens, at debug level afterwards."""
    with _lock:
        first = key not in _said
        _said.add(key)
    log.log(logging.WARNING if first else logging.DEBUG, message, *args)
