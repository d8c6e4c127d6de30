"""The recordings of one tree that hold collectives: how many are left, ended before their communicators, and counted.

NCCL waits for the last graph that holds work of a communicator when that is destroyed, so these recordings end before
the code that they were made of; what was launched of them is told to the watchdog.

In:  each node whose piece issues collectives, when it was recorded.  Out: what `communicating.Recordings` says, to
`distributed`, and to the tree why none is recorded now.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable

from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.turns import Turns
from multigraph_backend.distributed import endings
from multigraph_backend.distributed.communicating import Launched


class Collectives:
    """`ending`: why no collectives are recorded now."""

    def __init__(self, nodes: Nodes, turns: Turns, last_stream: Callable[[], int]) -> None:
        self._nodes, self._turns, self._last_stream = nodes, turns, last_stream
        #: nodes whose recordings hold collectives, also those that were given up and are not collected yet
        self._held: weakref.WeakSet[Node] = weakref.WeakSet()
        self.ending: str | None = None

    def recorded(self, node: Node) -> None:
        """Take note of a node that holds some, under the tree's lock."""
        self._held.add(node)
        endings.watch(self)

    def held(self) -> bool:
        """Whether any recording holds a collective."""
        with self._turns.lock:
            return any(not node.destroyed for node in self._held)

    def release(self, why: str, patience: float) -> int:
        """See `communicating.Recordings`.  Their outputs stay as they are."""
        self.ending = why
        until = time.monotonic() + patience
        if not self._turns.lock.acquire(timeout=patience):
            return 0
        try:
            if self._turns.choosing and not self._turns.wait_until_free(until - time.monotonic()):
                return 0
            destroyed = 0
            for node in list(self._held):
                if node.recording is None or node.destroyed:
                    continue
                node.destroyed = True
                node.ready = False
                node.holds = lambda inputs: False
                if self._nodes.linked(node):
                    self._nodes.unlink(node)
                with contextlib.suppress(Exception):  # the driver may be gone: then there is nothing left to destroy
                    node.recording.graph.reset()
                destroyed += 1
            self._nodes.counts["released"] += destroyed
            return destroyed
        finally:
            self._turns.lock.release()

    def resume(self) -> None:
        """See `communicating.Recordings`."""
        self.ending = None

    def launched(self, patience: float) -> Launched | None:
        """See `communicating.Recordings`."""
        if not self._turns.lock.acquire(timeout=patience):
            return None
        try:
            calls: Counter[str] = Counter()
            for node in self._held:
                if node.keyed is not None and node.calls:
                    calls[node.keyed.piece.spec.label] += node.calls
            return Launched(calls, self._nodes.device.record_event(self._last_stream()) if calls else None)
        finally:
            self._turns.lock.release()
