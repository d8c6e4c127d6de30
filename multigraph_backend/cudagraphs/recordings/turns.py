"""Whose turn it is among threads that call recorded code of one device.

The tree's lock is held for as long as the tree is read or changed, and never while code of the user runs: in an
operator between two pieces, in a piece that runs unrecorded, inside of a capture.  Such code may wait for another
thread, which may call compiled code itself.

Yet calls of two threads should not mix: pieces of one call among those of another would be paths that no later call
repeats.  And nothing else may run beside a capture: libraries that set themselves up, and random numbers that are
drawn, fail there, or make the capture fail.  So a call that lets go of the lock in its midst keeps the *turn*.
Another thread waits for it, for some time, and ten times as long for a capture; then it runs *aside*: as the code is,
unrecorded, without a look at the tree.  Where that has happened once, nobody waits for that code any more.  Nothing is
captured while a thread runs aside.

Turns are handed on in the order of asking.  All of it happens under the tree's lock.
"""

from __future__ import annotations

import threading
from collections import deque
from threading import get_ident

BESIDE = "another thread runs compiled code of this device, beside which nothing can be captured"
FOR_CAPTURES = 10  # a capture is waited for so many times longer
OUT_OF_TURN = "another thread was in the midst of a call, and did not end it in time"


class Awaited:
    """Code that keeps the turn while it runs; `in_vain`: whether somebody has waited for it for too long."""

    def __init__(self) -> None:
        self.in_vain = False


class Turns:
    """See the module's text.  `lock`: the tree's.  `owner`: the thread whose turn it is; `aside`: threads that run
    aside; `choosing`: whether the owner is in the midst of choosing what answers its call."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.owner: int | None = None
        self.aside: dict[int, set[int]] = {}  # with their calls
        self._calls: set[int] = set()  # of the owner
        self._awaited = Awaited()
        self.choosing = False
        self.captures = False  # the owner is in the midst of a capture
        self._waiting: deque[int] = deque()
        self._changed = threading.Condition(lock)

    def begin(self, call: int, awaited: Awaited, seconds: float) -> bool:
        """Take the turn, or after `seconds`, or at once where that is known to be in vain, run aside: False."""
        own = get_ident()
        if own in self.aside:
            self.aside[own].add(call)
            return False
        if self.owner is not None and self.owner != own:
            if not self._wait(own, 0.0 if self._awaited.in_vain else seconds):
                self._awaited.in_vain = True
                self.aside[own] = {call}
                return False
        elif self.owner is None:
            self.owner = own
        if not self._calls:
            self._awaited = awaited
        self._calls.add(call)
        return True

    def end(self, call: int, own: int) -> None:
        """What `begin` began in thread `own` is over.  May be said again, where an exception arrived in its midst."""
        if own in self.aside:
            self.aside[own].discard(call)
            if not self.aside[own]:
                del self.aside[own]
        else:
            self._calls.discard(call)
            if not self._calls and self.owner == own:
                self._hand_on()

    def _hand_on(self) -> None:
        self.owner = self._waiting.popleft() if self._waiting else None
        self._changed.notify_all()

    def _wait(self, own: int, seconds: float) -> bool:
        self._waiting.append(own)
        try:
            if not self._changed.wait_for(lambda: self.owner == own, seconds) and self.captures:
                self._changed.wait_for(lambda: self.owner == own, (FOR_CAPTURES - 1) * seconds)
        except BaseException:  # Ctrl-C
            if self.owner == own:
                self._hand_on()
            raise
        finally:
            if own in self._waiting:
                self._waiting.remove(own)
        return self.owner == own

    def wait_until_free(self, seconds: float) -> bool:
        """Whether no other thread has the turn, now or within `seconds`; it is not taken."""
        free = self._changed.wait_for(lambda: self.owner in (None, get_ident()), seconds)
        return bool(free)


class Call:
    """One call that needs the turn, from `begin` to `end`.

    Both may be interrupted by an exception from outside.  Where `end` was, the turn is handed on when this object is
    gone.
    """

    _began = False

    def __init__(self, turns: Turns) -> None:
        self._turns, self._thread = turns, get_ident()

    def begin(self, awaited: Awaited, seconds: float) -> bool:
        """See `Turns.begin`."""
        self._began = True
        with self._turns.lock:
            return self._turns.begin(id(self), awaited, seconds)

    def end(self) -> None:
        turns = self._turns
        with turns.lock:
            turns.end(id(self), self._thread)
        self._began = False

    def __del__(self) -> None:
        if self._began:
            self.end()
