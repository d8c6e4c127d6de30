"""Room for one more recording: how many there may be, and how much memory their pools may take.

Two limits are kept.  Of recordings beyond `per_device` the least recently used are given up.  Beyond `pool_bytes`
nothing is recorded: a pool gives back what it has reserved only as a whole, so giving up single recordings would gain
nothing.

In:  what is to be recorded next, and its limits.  Out: room, or `NotRecorded`; pools of which no recording is left are
given back to the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable

from multigraph_backend import events
from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings import recording
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece, PieceState
from multigraph_backend.cudagraphs.recordings.recording import NotRecorded

NO_ROOM = "the limit of the pool's bytes leaves no room for it (limit_recordings(pool_bytes=...))"


class Room:
    """`used`: whether recordings may be in the pool in use; `warmed`: whether a step has warmed up there.
    `unlocked`: entered while code of the user is captured."""

    def __init__(self, nodes: Nodes, unlocked: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._nodes, self._device, self._unlocked = nodes, nodes.device, unlocked
        self.used = self.warmed = False
        self._recorded_in: dict[int, weakref.WeakSet[Node]] = {}  # by generation
        self._pool_bytes: dict[int, int] = {}  # by generation, where a limit asked for it
        self._seen = nodes.device.generation  # pools up to here are in _old, or were left
        self._old: set[int] = set()

    def recorded(self, node: Node) -> None:
        """Take note of the pool that a new node lives in."""
        self._recorded_in.setdefault(node.generation, weakref.WeakSet()).add(node)

    def warms_up(self, warm: Node) -> None:
        """Take note of the pool that a step warms up in."""
        self.warmed = True
        self.recorded(warm)

    def make(self, limits: Limits) -> None:
        """Give up the least recently used recordings until there is room for one more."""
        while self._nodes.size >= limits.per_device and (node := self._nodes.least_used()) is not None:
            self._nodes.unlink(node)
            self._nodes.counts["evicted"] += 1
            events.count("evicted_recordings")
        self.leave_pools()  # the path stays: what is recorded next is recorded behind its last node

    def find(self, keyed: KeyedPiece, inputs: list[object], plan: recording.InputPlan, limit: int) -> None:
        """Raise `NotRecorded` where the pool would grow beyond `limit`.

        What a pool has reserved it gives back as a whole, so nothing is gained by giving up recordings: what does not
        fit is not recorded.  Where the pool is half full, a piece is captured in a pool of its own first, to see how
        much it needs.
        """
        if not keyed.needs and not keyed.piece.spec.groups and 2 * sum(self._pool_bytes.values()) >= limit:
            keyed.needs = self._needs(keyed.piece, inputs, plan)
            if keyed.needs > limit:
                keyed.piece.uses.wasted()
        if keyed.needs:
            use_count = self._device.use_count
            alive = sum(slot.nbytes for node in self._nodes.path for slot in node.slots if slot.alive(use_count))
            if alive + keyed.needs > limit:
                raise NotRecorded(NO_ROOM)

    def _needs(self, piece: PieceState, inputs: list[object], plan: recording.InputPlan) -> int:
        """Bytes of a pool that has room for one recording; 0 where it cannot be made."""
        device, generation = self._device, self._device.generation
        device.new_pool()
        try:
            plan = dataclasses.replace(plan, owned=())
            made = recording.record(
                device,
                piece.spec,
                piece.function,
                inputs,
                plan,
                lambda owned: device.restore(device.empty_state(), (), owned),
                self._unlocked,
            )
            made.graph.reset()
            del made
            return device.pool_bytes()
        except NotRecorded:  # as the recording proper will say
            return 0
        finally:
            try:
                device.return_to(generation)
            except BaseException:
                self._old |= {later for later in device.generations() if later > generation}  # given back later
                raise

    def stay_within(self, limit: int, had: int, keyed: KeyedPiece) -> None:
        """After a capture, before which `had` bytes were reserved.  Where the pool has outgrown its limit all the same,
        give up all that is in it.  Raises `NotRecorded` then."""
        generation = self._device.generation
        if self._device.reserved_bytes() > had or generation not in self._pool_bytes:
            self._pool_bytes[generation] = self._device.pool_bytes()
        total = sum(self._pool_bytes.values())
        if total <= limit:
            return
        keyed.needs = max(keyed.needs, total)
        keyed.piece.uses.wasted()
        self._nodes.counts["evicted"] += self._nodes.size
        for _ in range(self._nodes.size):
            events.count("evicted_recordings")
        self._nodes.unlink_all()
        self.used = True
        self.leave_pools()
        raise NotRecorded(NO_ROOM)

    def leave_pools(self) -> None:
        """Give back the memory of pools of which no node is left: neither in the tree, nor on the path, nor behind one
        there, where it may answer calls although that was given up."""
        if not self._nodes.size and self.used:
            self._device.new_pool()
            self.used = self.warmed = False
        self._old |= set(range(self._seen, self._device.generation))
        self._old &= set(self._device.generations())  # one that could not be left may have been since
        self._seen = self._device.generation
        for generation in [number for number in self._old if not self._recorded_in.get(number)]:
            self._device.leave(generation)
            self._old.remove(generation)
            self._recorded_in.pop(generation, None)
            self._pool_bytes.pop(generation, None)
