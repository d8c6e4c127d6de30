"""One pool for recordings of all sizes: smaller ones give way to a larger one that could not use their memory.

A pool grows by segments, and torch's allocator neither joins segments nor gives them back while a graph of the pool
lives.  What the recordings of smaller sizes have left is dead when a larger one is made, and in pieces too small for
it.  The other way round smaller blocks lie in larger segments, and need no others:

    sizes 3, 2, 1            [ 3 ]                  2 and 1 lie in the memory of 3
    sizes 1, 2, 3            [1] [ 2] [ 3 ]         up to twice as much as 3 takes alone
    the same, giving way     [1], [ 2], [ 3 ]       one after the other; 1 and 2 are recorded again in 3 when they are
                                                    called again

So before a recording is made that is larger than those which the pool has grown by, all that is in the pool is given
up, the pool goes back to the device, and the larger one is the first in a new pool.  Which is larger is told by the
bytes of its inputs, against those of the same piece: what it needs is not known before it is captured.  A pool that
grew in another way is *fragmented*: after enough replays of what it grew by, that is recorded first in a new pool.

Three things keep this from costing more than it gains.  A pool of few bytes is left alone.  Recordings that are made
again for it are counted, and are at most `AGAIN` for each that was made for the first time: sizes that grow while all
of them go on being used are recorded a constant number of times each.  And a fragmented pool waits for `REPLAYS`
replays for each recording that would be made again, once for each size.

In:  the call that is to be recorded, and by how much its capture made the pool grow.  Out: whether all else gives way.
That nothing in the pool is alive then, the tree sees to.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch

from multigraph_backend import events
from multigraph_backend.cudagraphs.recordings import replay
from multigraph_backend.cudagraphs.recordings.cost import Trial
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece, PieceState
from multigraph_backend.cudagraphs.recordings.room import Room

log = logging.getLogger(__name__)

#: bytes of a pool, or of what a fragmented one may gain, below which nothing gives way; the workspaces of cuBLAS, which
#: are what they are for all sizes, take half of it
LEAST = 64 << 20
SHARE = 0.05  # of a fragmented pool: what may be gained below which nothing gives way
AGAIN = 2  # recordings made again, at most, for each that was made for the first time
REPLAYS = 16  # replays of what made a pool fragmented, for each recording in it, before all give way to it


class Sharing:
    """See the module's text.  `least`: `LEAST`, for tests."""

    def __init__(self, nodes: Nodes, room: Room) -> None:
        self._nodes, self._room = nodes, room
        self.least = LEAST
        self._firsts = self._again = 0
        self._begin()

    def _begin(self) -> None:
        """Take note that the pool in use is new."""
        self._generation = self._nodes.device.generation
        self._nbytes = 0  # that recordings and warm-ups made it grow by
        self._settled: weakref.ref[KeyedPiece] | None = None  # what it has waited for, once that came often enough
        #: bytes of the inputs of the largest, by the piece that begins a step which made it grow
        self._grown_by: weakref.WeakKeyDictionary[PieceState, int] = weakref.WeakKeyDictionary()
        self._alone: tuple[weakref.ref[PieceState], int] | None = None  # what one step alone made it grow by

    def _follow(self) -> None:
        if self._generation != self._nodes.device.generation:
            self._begin()

    # ---------------------------------------------------------------- before a recording

    def look(self, keyed: KeyedPiece, inputs: Sequence[object]) -> None:
        """Take note of a call that is to be recorded, or to warm up, and begins a step."""
        static = keyed.piece.spec.static
        keyed.nbytes = sum(
            value.numel() * value.element_size()
            for index, value in enumerate(inputs)
            if index not in static and isinstance(value, torch.Tensor)
        )

    def asks(self, keyed: KeyedPiece) -> bool:
        """Whether all that is in the pool should give way to that call."""
        self._follow()
        count = self._nodes.size
        if not count:
            return False
        if self.settled(keyed):
            return True
        largest = self._grown_by.get(keyed.piece)
        return (
            largest is not None
            and keyed.nbytes > largest
            and self._nbytes >= self.least
            and self._again + count <= AGAIN * self._firsts
        )

    def settled(self, keyed: KeyedPiece) -> bool:
        """Whether the pool is fragmented, has waited for `keyed`, and that has come often enough."""
        self._follow()
        return self._settled is not None and self._settled() is keyed

    def give_way(self, keyed: KeyedPiece) -> None:
        """Give up all recordings, for one of `keyed` to be the first in a new pool.  Nothing in the pool is alive."""
        count = self._nodes.size
        for given_up in [node.keyed for node in self._nodes.root.below() if node.keyed is not None]:
            given_up.gave_way += 1  # and no name holds a node, which would keep the pool
        self._nodes.unlink_all()
        self._room.used = True
        self._room.leave_pools()  # before the new one grows
        self._nodes.counts["gave way"] += count
        for _ in range(count):
            events.count("recordings_that_gave_way")
        label = keyed.piece.spec.label
        log.info("%d recordings give way to a larger one of %s, and are made again when they are called", count, label)

    # ---------------------------------------------------------------- after it

    def warmed_up(self, keyed: KeyedPiece, grown: int) -> None:
        """Note that the pool grew in a step that warms up, which a call of `keyed` has begun."""
        self._follow()
        if grown > 0:
            self._grew(keyed, grown)

    def recorded(self, node: Node, first: Node, grown: int) -> None:
        """Note a recording, in a step that `first` began, and by how much the pool grew."""
        self._follow()
        keyed, begins = node.keyed, first.keyed
        assert keyed is not None
        assert begins is not None
        if keyed.gave_way:
            keyed.gave_way -= 1
            self._again += 1
        else:
            self._firsts += 1
        alone = self._nodes.size <= (1 if first is node else len(self._nodes.path) + 1)
        if grown <= 0 and not (alone and first is node):
            return
        largest = self._grown_by.get(begins.piece, 0)
        self._grew(begins, max(grown, 0))
        if alone:
            self._alone = weakref.ref(begins.piece), self._nbytes
        elif begins.nbytes >= largest and not begins.settled and self._may_gain(begins.piece, grown):
            self._watch(first)

    def _grew(self, keyed: KeyedPiece, grown: int) -> None:
        self._nbytes += grown
        self._grown_by[keyed.piece] = max(keyed.nbytes, self._grown_by.get(keyed.piece, 0))

    def _may_gain(self, piece: PieceState, grown: int) -> bool:
        """Whether the pool may be much smaller with a step of `piece` as the first in it, by which it grew by `grown`
        bytes: it needs these at least, and what a smaller one of the same piece took alone."""
        needs = grown
        if self._alone is not None and self._alone[0]() is piece:
            needs = max(needs, self._alone[1])
        return self._nbytes - needs >= max(self.least, SHARE * self._nbytes)

    def _watch(self, node: Node) -> None:
        """Have all others give way to `node` when it has been replayed often enough."""
        keyed = node.keyed
        assert keyed is not None
        keyed.settled = True
        waits_for, node_at = weakref.ref(keyed), weakref.ref(node)

        def settled() -> None:
            found = node_at()
            if found is not None and found.generation == self._nodes.device.generation:
                self._settled = waits_for
                found.unbuild()  # so that its next call is not answered before somebody has looked

        replay.watch(node, Settling(node.trial, REPLAYS * self._nodes.size, settled))


class Settling(Trial):
    """The first replays of a recording after which something is done; beside the trial that it is on, if it is."""

    def __init__(self, trial: Trial | None, replays: int, settled: Callable[[], None]) -> None:
        super().__init__(0.0, lambda: None)
        self._trial, self._left, self._settled = trial, replays, settled
        self._loss: str | None = None

    def ran(self, microseconds: float) -> bool:
        self._left -= 1
        if self._trial is not None and self._trial.ran(microseconds):
            self._loss, self._trial = self._trial.loss(), None
        return self._loss is not None or self._left <= 0

    def loss(self) -> str | None:
        if self._loss is None:
            self._settled()
        return self._loss
