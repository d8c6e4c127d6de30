"""Which threads call the recordings of one device, and what they are handed out.

One thread is handed out memory of the pool itself.  Several threads know nothing of one another: what one of them uses
must not be overwritten by another, so while several call, all that a user may hold is a copy.

In:  the thread of each call, forwards only (autograd runs backwards in threads of its own).  Out: `Nodes.shared`,
`Nodes.thread`, and which outputs are copies.
"""

from __future__ import annotations

import logging
import threading
import time

from multigraph_backend import events
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.piece_state import PieceState

log = logging.getLogger(__name__)

_LOOK = 8  # after so many calls in a row of one thread it is asked whether the others still call
_MOST_RETURNS = 64  # of `_returns`


class Callers:
    """`first`: the thread that was alone before several came; outputs that it holds are no copies."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.first: int | None = None
        self.forget()
        self._last_caller: int | None = None
        self._calls_alone = 0

    def forget(self) -> None:
        """Begin anew, with the next thread that calls."""
        self._nodes.shared, self._nodes.thread = False, None
        self._caller: threading.Thread | None = None
        # while several threads call: each with its last call, about
        self._callers: dict[int, tuple[threading.Thread, float]] = {}
        self._returns = 1  # a factor of the limit `idle`, doubled each time that a thread comes back

    def attend(self, piece: PieceState) -> None:
        """Take note of the thread that calls `piece`."""
        thread = threading.get_ident()
        if self._nodes.shared:
            self._look_for_others(thread, piece)
        elif thread != self._nodes.thread:
            if self._caller is None or not self._caller.is_alive():  # a thread that warmed up, say
                self._nodes.thread, self._caller = thread, threading.current_thread()
            else:
                self._share(thread)

    def _share(self, thread: int) -> None:
        """Several threads call: what one of them uses must not be moved or overwritten by another, so from now on users
        get copies, made while the lock is held."""
        assert self._nodes.thread is not None
        assert self._caller is not None
        now = time.monotonic()
        self._callers = {self._nodes.thread: (self._caller, now), thread: (threading.current_thread(), now)}
        # what the first thread holds are no copies; from now on each call comes to `attend`
        self.first, self._nodes.thread, self._caller = self._nodes.thread, None, None
        self._calls_alone = 0
        self._nodes.counts["shared"] += 1
        events.count("shared_by_threads")
        names = " and ".join(repr(caller.name) for caller, _ in self._callers.values())
        events.warn_once(
            f"device {self._nodes.device.index}: shared",
            "threads %s call recordings of device %d: all outputs are copies while both do; keep one thread to a "
            "device, or let one that warms up end before the next begins",
            names,
            self._nodes.device.index,
        )
        self._nodes.shared = True
        for node in self._nodes.reachable():
            if any(slot.visible and not slot.copied for slot in node.slots):
                self._hand_out_copies(node)

    def _look_for_others(self, thread: int, piece: PieceState) -> None:
        """While outputs are copies: go back once all other threads have ended, or have not called for a while."""
        if thread != self._last_caller:
            self._last_caller, self._calls_alone = thread, 0
            self._callers[thread] = threading.current_thread(), time.monotonic()
        self._calls_alone += 1
        if self._calls_alone % _LOOK:
            return
        now = time.monotonic()
        self._callers[thread] = threading.current_thread(), now
        self._callers = {ident: entry for ident, entry in self._callers.items() if entry[0].is_alive()}
        idle = piece.limits.idle * self._returns
        others = [last for ident, (_, last) in self._callers.items() if ident != thread]
        if all(now - last >= idle for last in others):
            self._unshare(thread, bool(others))

    def _unshare(self, thread: int, idle: bool) -> None:
        """One thread calls: outputs are handed out where they lie again, but for those that were seen held."""
        if thread != self.first and any(node.alive() for node in self._nodes.path):
            return  # outputs of the first thread, from before there were two
        if idle:  # one that comes back is waited for longer
            self._returns = min(2 * self._returns, _MOST_RETURNS)
        self._nodes.shared, self._nodes.thread, self._caller = False, thread, threading.current_thread()
        self._callers.clear()
        self._nodes.counts["not shared any more"] += 1
        log.info(
            "one thread calls recordings of device %d again: outputs are no copies any more", self._nodes.device.index
        )
        for node in self._nodes.reachable():
            if node.keyed is None or node.keyed.piece.spec.copies:
                continue
            if any(slot.copied and slot.movable for slot in node.slots):
                node.unbuild()  # it is built where it is needed
                for slot in node.slots:
                    slot.copied = slot.copied and not slot.movable  # what was seen held stays a copy

    def _hand_out_copies(self, node: Node) -> None:
        for slot in node.slots:
            slot.copied = slot.copied or slot.visible
        node.unbuild()  # it is built where it is needed, and its outputs, which the first thread may use, are dead
