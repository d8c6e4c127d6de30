"""Memory of recordings that serves others between two replays, before an allocation fails.

What a replay uses for a moment is free until the next one.  Where the device is full and an allocation would fail, the
pool's allocator is set to the state that the path's last recording leaves, with what is alive allocated and the rest
free, and free blocks of the pool serve allocations outside of it from then on:

    path [A, B], outputs of B alive     [ A's | dead | B's output | dead          ]
    an allocation of 30 MiB would fail  [ A's | dead | B's output | lent  | dead  ]
    the next call                       lent: it waits for the device; still lent: it runs unrecorded, from ordinary
                                        memory or, if there is none, from what else is dead here
    the 30 MiB are free again           nothing is lent: replayed as ever

So a loan costs the calls that it is alive at, and nothing is recorded again for it.  Loans that stay (something that
is made once and kept) get the pool: after `MOST_CALLS` calls that they were in the way of, recordings are given up, and
begin anew in another pool.

Invariant: while the pool may lend (`on`), no recording is found, none is made, and no first call warms up there: none
of its nodes is ready.  Nor is anything made or warmed up in a pool that was left to its loans and is still in use, for
the driver has failed when another one was to take its place.

In:  a device that lacks memory, under the tree's lock, with no call under way; and each call that is answered by no
node.  Out: whether the pool lends now; whether recordings may be used.  Only pools of the extension can lend.
"""

from __future__ import annotations

import logging
import weakref

from multigraph_backend import events
from multigraph_backend.cudagraphs.devices.device import DeviceFailed
from multigraph_backend.cudagraphs.recordings.asleep import never
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.process.interruptions import from_outside

log = logging.getLogger(__name__)

LENT = "memory of its recordings is lent to others, which have it still (allocator.install(lend=...))"

#: calls in a row that loans are in the way of, before the recordings leave the pool to them
MOST_CALLS = 8
PATIENCE = 5.0  # seconds that the device is waited for


class Lending:
    """See the module's text.  Under the tree's lock."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._device = nodes, nodes.device
        self.on = False
        self._calls = 0  # in a row that loans were in the way of
        self._left: int | None = None  # the generation of the pool that was left to its loans
        #: those that were ready, and the storages that their code is for
        self._put_off: list[tuple[weakref.ref[Node], list[int]]] = []

    def begin(self) -> bool:
        """Let the pool lend what is dead in it, where it can; whether it does so now and did not before."""
        nodes, device = self._nodes, self._device
        if self.on or not nodes.size or any(node.recording is None for node in nodes.path):
            return False
        state, after, alive = nodes.at_path_end()
        if not alive <= after:
            return False
        try:
            device.restore(state, alive, ())
            self.on = device.lend(True)
        except (DeviceFailed, RuntimeError) as error:
            if from_outside(error):
                raise
            log.debug("the pool lends nothing: %s", error)
            return False
        if not self.on:
            return False
        everything = nodes.reachable()
        self._put_off = [(weakref.ref(node), _storages(node)) for node in everything if node.ready]
        for node in everything:
            node.ready = False
        self._calls = 0
        nodes.counts["lent"] += 1
        events.count("pool_loans")
        log.info("the device is out of memory: what is free between replays serves others")
        return True

    def over(self) -> bool:
        """Before a call that recordings may answer: whether nothing is lent, which ends it."""
        lent = self._device.lent_bytes()
        if lent and self._device.settle(PATIENCE):  # what was freed may be in use on the device
            lent = self._device.lent_bytes()
        if lent:
            self._calls += 1
            return False
        self._end()
        return True

    def in_the_way(self) -> bool:
        """Whether the pool in use may lend, or has loans of before: it should have been left to them, and could not."""
        return self.on or (self._left == self._device.generation and self._device.lent_bytes() > 0)

    @property
    def stays(self) -> bool:
        """Whether loans have been in the way for long."""
        return self._calls >= MOST_CALLS

    def give_up(self) -> None:
        """All recordings are about to be given up: the pool lends nothing more, and what it has lent stays.  Those
        behind what is on the path would go on answering calls."""
        if not self.on:
            return
        self._left = self._device.generation
        # also those that were not built: they would be, for the calls that ask for them
        for node in (*self._nodes.reachable(), *(reference() for reference, _ in self._put_off)):
            if node is not None:
                node.holds, node.slept = never, None
        self._end()

    def _end(self) -> None:
        self._device.lend(False)
        for reference, storages in self._put_off:
            node = reference()
            # what was held of others was moved meanwhile: they are built again when they are next asked for
            if node is not None and not node.destroyed and _storages(node) == storages:
                node.ready = True
        self._put_off = []
        self.on = False  # last: Ctrl-C may arrive here too


def _storages(node: Node) -> list[int]:
    """Handles of those over the memory of its slots."""
    return [slot.handle for slot in node.slots]
