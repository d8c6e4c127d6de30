"""Says what a rank was in when the other ranks do not come.

A collective waits until all ranks of its group have entered it.  Where one never does, torch ends the group when its
timeout is over, and says at which of the group's collectives; of collectives that a recording replays it knows
nothing, and waits forever.  Neither knows of variants.  So a thread looks from time to time, while there is compiled
code with collectives and other ranks, and says once, after half of the timeout:

- which code a thread of the host has been in, and at which collective: where collectives block the host (gloo), or
  the queue of the device is full.  It is read off the stacks of the threads: a line of generated code.
- what was launched that the device has not finished.  An event is recorded behind what was launched last;
  while the device has not come to it, the forms that were called since the event before it are named.

In:  nothing; calls leave no trace for it beyond the counts that they leave anyway, and wait for nothing.
Out: warnings with the rank, the count `late_collectives`, `said()`.

The event is on the stream of the recordings; code that was never recorded is seen on the host alone.
"""

from __future__ import annotations

import linecache
import logging
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from multigraph_backend import _compat, events
from multigraph_backend.distributed import communicating, sequence
from multigraph_backend.distributed.communicating import Code, Recordings
from multigraph_backend.distributed.sequence import Collective
from multigraph_backend.process import frames, rank

log = logging.getLogger(__name__)

PART = 0.5  # of a group's timeout, after which it is said
LOOKS = 20  # in a timeout
LONGEST = 10.0  # seconds between two looks at most
TIMEOUT = 600.0  # seconds, of a group that does not tell
LOCK = 0.05  # seconds to wait for a tree that a call holds

_lock = threading.Lock()
_thread: threading.Thread | None = None
_said: deque[str] = deque(maxlen=64)


def watch() -> None:
    """Called when there is code with collectives, just compiled or from a cache."""
    global _thread
    if not rank.live():
        return
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_watch, name="multigraph-watchdog", daemon=True)
            _thread.start()


def said() -> list[str]:
    """The last warnings of this process."""
    return list(_said)


def _watch() -> None:
    global _thread
    looks = Looks()
    while True:
        codes = communicating.codes()
        with _lock:
            if not codes or not rank.live():
                _thread = None
                return
        timeout = min((_compat.group_timeout(group) or TIMEOUT for group in _groups(codes)), default=TIMEOUT)
        del codes
        time.sleep(min(timeout / LOOKS, LONGEST))
        for text in looks.look(time.monotonic(), timeout * PART):
            events.count("late_collectives")
            place = rank.current()
            line = f"rank {place.rank}: {text}" if place is not None else text
            _said.append(line)
            log.warning("%s (the group's timeout is %g s)", line, timeout)


def _groups(codes: Sequence[Code]) -> set[str]:
    return {entry.group for code in codes for entry in code.spec.collectives}


# ---------------------------------------------------------------- looking


@dataclass(frozen=True)
class Position:
    """Where a thread is: frames as numbers, so that nothing of them is kept alive, and how many calls there were."""

    thread: int
    frame: int
    at: int
    calls: int


@dataclass
class Pending:
    """What a device was given to do, with an event behind it: whether that is `done`, when it was recorded, which
    pieces lie before it, and how often each was replayed by then."""

    done: Callable[[], bool]
    since: float
    before: tuple[str, ...]
    calls: Mapping[str, int]
    told: bool = False


@dataclass
class Looks:
    """What earlier looks have found."""

    positions: dict[Position, float] = field(default_factory=dict)
    told: set[Position] = field(default_factory=set)
    pending: weakref.WeakKeyDictionary[Recordings, Pending] = field(default_factory=weakref.WeakKeyDictionary)
    finished: weakref.WeakKeyDictionary[Recordings, Mapping[str, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def look(self, now: float, patience: float) -> Iterator[str]:
        """What has lasted for `patience` seconds and was not said yet."""
        yield from self._at_host(now, patience)
        yield from self._at_devices(now, patience)

    def _at_host(self, now: float, patience: float) -> Iterator[str]:
        calls = events.stats()
        number = calls["generic_calls"] + calls["variant_calls"]
        here = {Position(thread, key, at, number): text for thread, key, at, text in _inside_generated_code()}
        self.positions = {position: self.positions.get(position, now) for position in here}
        self.told &= set(here)
        for position, since in self.positions.items():
            if now - since >= patience and position not in self.told:
                self.told.add(position)
                yield f"for {now - since:.0f} s it has been in {here[position]}"

    def _at_devices(self, now: float, patience: float) -> Iterator[str]:
        for recordings in communicating.recordings():
            pending = self.pending.get(recordings)
            if pending is None or pending.done():
                self._record_event(recordings, now)
            elif now - pending.since >= patience and not pending.told:
                pending.told = True
                yield f"for {now - pending.since:.0f} s its device has not finished {_named(pending.before)}"

    def _record_event(self, recordings: Recordings, now: float) -> None:
        """Behind what was replayed since the last event, which is done, if that is anything."""
        if (pending := self.pending.pop(recordings, None)) is not None:
            self.finished[recordings] = pending.calls
        try:
            launched = recordings.launched(LOCK)
        except Exception as error:  # the driver's
            log.debug("no event: %s", error)
            return
        if launched is None:  # a call holds the tree
            return
        finished = self.finished.get(recordings, {})
        before = tuple(name for name, count in launched.calls.items() if count != finished.get(name, 0))
        if before and launched.done is not None:
            self.pending[recordings] = Pending(launched.done, now, before, launched.calls)


def _named(labels: Sequence[str]) -> str:
    """Recorded pieces with what their code issues."""
    issued = {code.label: code.spec.collectives for code in communicating.codes()}
    return "; ".join(
        f"{label}: {_listed(found)}" if (found := issued.get(label.split(", piece ")[0])) else label for label in labels
    )


def _listed(issued: Sequence[Collective]) -> str:
    more = f" and {len(issued) - 4} more" if len(issued) > 4 else ""
    return ", ".join(map(str, issued[:4])) + more


# ---------------------------------------------------------------- generated code on the stack of a thread


def _inside_generated_code() -> Iterator[tuple[int, int, int, str]]:
    """For each thread in generated code that communicates: the thread, its frame, where in it, and that as text."""
    sources = {source: code for code in communicating.codes() if (source := getattr(code.inner, "source_code", None))}
    for thread, stack in frames.stacks().items() if sources else ():
        for place in stack:
            text = "".join(linecache.getlines(place.code.co_filename))
            code = sources.get(text)
            if code is not None:
                yield thread, place.frame, place.at, f"{code.label}: {_at(code, text, place.line)}"
                break


_OPERATOR = re.compile(r"torch\.ops\.([A-Za-z_]\w*\.\w+(?:\.\w+)?)\((.*)")
_NAME = re.compile(r"[A-Za-z_]\w*")


def _at(code: Code, text: str, line: int) -> str:
    """Which of the code's collectives generated code is at in `line`."""
    lines = text.splitlines()
    found = _OPERATOR.search(lines[line - 1])
    issuing = [(number, said) for number, entry in enumerate(lines, 1)
               if (said := _OPERATOR.search(entry)) is not None and sequence.issues(said.group(1))]  # fmt: skip
    issued = code.spec.collectives
    if found is None or len(issuing) != len(issued):
        return f"line {line}, {lines[line - 1].strip()}; it issues {_listed(issued)}"
    if sequence.issues(found.group(1)):
        at = next(index for index, (number, _) in enumerate(issuing) if number == line)
        return f"collective {at}, {issued[at]}"
    if sequence.waits(found.group(1)):
        waited = set(_NAME.findall(found.group(2)))
        for at in reversed(range(len(issuing))):
            number, _ = issuing[at]
            if number < line and waited & set(_NAME.findall(lines[number - 1])) - _WORDS:
                return f"the wait for collective {at}, {issued[at]}"
    return f"line {line}, {lines[line - 1].strip()}; it issues {_listed(issued)}"


_WORDS = frozenset(("torch", "ops", "_c10d_functional", "default"))
