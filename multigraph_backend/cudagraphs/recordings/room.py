"""Room for one more recording: how many there may be, and how much memory their pools may take.

Four limits are kept.

- Of recordings beyond `per_device` the least recently used are given up.
- All pools together take `pool_bytes` at most.
- Where a recording would leave less than `keep_free` of the device to others, it is not made.  What others may have is
  what the driver has free, and what torch's allocator has cached outside of pools.
- Where memory runs out all the same, recordings give way (`give_way`).

A pool gives back what it has reserved only as a whole, once no graph of it is left.  So memory comes back by way of a
fresh pool: all recordings of the old one are given up, and each is made again at its next call, but for those that are
put off.  The other way would be a pool for each group of recordings, of which one could go alone.  But recordings that
are never alive together lie over each other in one pool: N sizes of a model take what the largest takes, and in N pools
the sum.  A limit that is met by the sum keeps far less.

An example, limit 10, three sizes that need 4, 6 and 11 bytes of an empty pool, in that order:

    4    recorded; the pool has 4
    6    recorded over the first; the pool has grown by 2
    11   the pool is more than half full, so this one is captured in a pool of its own first: it never fits

Where one that would fit alone makes the pool outgrow its limit (what is alive, and holes, are in the way), a fresh pool
is begun and that one is put off.  Each later call counts for it: when its calls, times the microseconds that a replay
saves, are worth more than the recordings that would have to go, and than recording the others again, these are put off
in its place, the least valuable first: calls, times microseconds, per byte that the pool grew for them.

What a capture takes is the change of what the allocator has reserved, a quick question.  The pool itself is looked at
where that says that a limit is passed, and the tree is walked where one gives way to another.

In:  what is to be recorded next, and its limits.  Out: room, or `NotRecorded`; pools of which no recording is left are
given back to the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable

from multigraph_backend import events
from multigraph_backend.cudagraphs.devices.device import DeviceFailed
from multigraph_backend.cudagraphs.limits import Limits, in_bytes
from multigraph_backend.cudagraphs.recordings import cost, out_of_memory, recording
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece, PieceState
from multigraph_backend.cudagraphs.recordings.recording import NotRecorded, Recording
from multigraph_backend.process import rank
from multigraph_backend.process.interruptions import from_outside

log = logging.getLogger(__name__)

NO_ROOM = "the limit of the pool's bytes leaves no room for it (limit_recordings(pool_bytes=...))"
TIGHT = "recording it would leave too little of the device's memory to others (limit_recordings(keep_free=...))"
RAN_OUT = "the device ran out of memory while it was recorded"

#: of the device that must be free where first calls are to take memory that serves recordings alone: what else a first
#: step allocates (gradients, an optimizer's states) would otherwise take what they have used
_AMPLE = 0.5
_PAUSE, _LONGEST_PAUSE = 1.0, 64.0  # seconds until free memory is asked for again; doubled each time
_PATIENCE = 5.0  # seconds that the device is waited for before memory goes back
_TRIMMED = 2 << 20  # bytes, a segment of torch's allocator: less than that cannot be given back
_TRIMMING = 0.1  # of the time that captures have taken, which giving back memory before them may have taken
_SELDOM = 4  # times as many calls until one is tried again, each time that it made the pool outgrow its limit


@dataclasses.dataclass
class Waiting:
    """What is put off.  grows: bytes that the pool would grow by; saves: microseconds of each call; calls: that ran
    unrecorded since; needed: calls before it is tried again; until: the time before which free memory is not asked
    for, `why` not; pause: seconds until the next such time."""

    grows: int = 0
    saves: float = 0.0
    calls: int = 0
    needed: int = 1
    until: float = 0.0
    pause: float = _PAUSE
    why: str = TIGHT

    def put_off(self, why: str) -> None:
        self.why = why
        self.until = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)


class Room:
    """`used`: whether recordings may be in the pool in use; `warmed`: whether a step has warmed up there.
    `unlocked`: entered while code of the user is captured."""

    def __init__(self, nodes: Nodes, unlocked: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._nodes, self._device, self._unlocked = nodes, nodes.device, unlocked
        self.used = self.warmed = False
        self._recorded_in: dict[int, weakref.WeakSet[Node]] = {}  # by generation
        self._pool_bytes: dict[int, int] = {}  # by generation, as far as it grew in captures and warm-ups
        self._grew: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()  # where that is more than 0
        self._warmed_in: weakref.WeakKeyDictionary[KeyedPiece, int] = weakref.WeakKeyDictionary()  # a generation
        self._waiting: weakref.WeakKeyDictionary[KeyedPiece, Waiting] = weakref.WeakKeyDictionary()
        self._seen = nodes.device.generation  # pools up to here are in _old, or were left
        self._old: set[int] = set()
        self._returns = False  # what was left is to go back to the device
        self._given_back = 0  # bytes, when the cache was emptied
        self._trimming = self._capturing = 0.0  # seconds
        self._tuned = False  # kernels were, in calls that have warmed up in the pool in use
        self._largest = 0  # bytes of the inputs of the largest of these that began a step

    def recorded(self, node: Node, grew: int = 0) -> None:
        """Take note of the pool that a new node lives in, and of the bytes that it grew by."""
        self._recorded_in.setdefault(node.generation, weakref.WeakSet()).add(node)
        if grew:
            self._grew[node] = grew

    def begin_anew(self, keyed: KeyedPiece) -> None:
        """Before a first call of `keyed`, with nothing on the path: give back what first calls of other code have left.

        Its blocks are of other sizes, so the pool would grow though nothing in it is alive.  Once there are recordings,
        that memory is theirs."""
        if self.warmed and not self.used and not self._nodes.size and keyed not in self._warmed_in:
            self.used = True
            with contextlib.suppress(DeviceFailed, RuntimeError):  # there may be no memory for the anchor of a new pool
                self.leave_pools()

    def warms_up(self, warm: Node, keyed: KeyedPiece) -> None:
        """Take note of the pool that a step warms up in, which a call of `keyed` begins."""
        self.warmed = True
        self._largest = max(self._largest, keyed.nbytes)
        self.recorded(warm)

    def warmed_up(self, keyed: KeyedPiece) -> None:
        """Take note that the pool in use has what a call of `keyed` takes."""
        self._warmed_in[keyed] = self._device.generation

    def tuned(self) -> None:
        """Take note that kernels were tuned in a call that has warmed up: for that their inputs were copied, and a
        buffer as large as the device's cache was written before each of many runs."""
        self._tuned = True

    def leave_tuned(self, keyed: KeyedPiece) -> bool:
        """With nothing on the path, and before `keyed` is recorded as the first in its pool: give that back if kernels
        were tuned in it, for recordings need nothing of that; whether there was one.

        Not before one that is smaller than what has warmed up there: it would begin a pool in which the larger one
        finds only pieces."""
        if not self._tuned or self._nodes.size or not self.warmed or keyed.nbytes < self._largest:
            return False
        generation = self._device.generation
        if not self._left():
            return False
        for warmed in [warmed for warmed, number in self._warmed_in.items() if number == generation]:
            self._warmed_in[warmed] = self._device.generation  # what was given back has room for it
        return True

    def make(self, limits: Limits) -> None:
        """Give up the least recently used recordings until there is room for one more."""
        while self._nodes.size >= limits.per_device and (node := self._nodes.least_used()) is not None:
            self._nodes.unlink(node)
            self._nodes.counts["evicted"] += 1
            events.count("evicted_recordings")
        self.leave_pools()  # the path stays: what is recorded next is recorded behind its last node

    # ---------------------------------------------------------------- before a capture

    def hear(self, keyed: KeyedPiece, limits: Limits) -> None:
        """Raise `NotRecorded` for what is put off, or too large for the limit by itself: nothing gives way to that."""
        waiting = self._waiting.get(keyed)
        if waiting is not None and time.monotonic() < waiting.until:
            raise NotRecorded(waiting.why)
        if limits.pool_bytes is None:
            return
        if keyed.needs > self._bytes(limits.pool_bytes):
            raise NotRecorded(NO_ROOM)
        if waiting is not None:
            waiting.calls += 1
            if waiting.calls < waiting.needed:
                raise NotRecorded(NO_ROOM)

    def admit(self, keyed: KeyedPiece, inputs: list[object], plan: recording.InputPlan, limits: Limits) -> None:
        """Raise `NotRecorded` where a recording would be beyond a limit of memory, as far as that is known before."""
        if limits.pool_bytes is not None:
            self._fit(keyed, inputs, plan, self._bytes(limits.pool_bytes))
        if limits.keep_free:
            self._leave_enough(keyed, self._bytes(limits.keep_free))

    def may_warm_up(self, limits: Limits) -> bool:
        """Whether a first call may take memory of the pool.  Behind another, less has to be free."""
        if not limits.keep_free:
            return True
        share = self._bytes(limits.keep_free)
        wanted = share if self._nodes.path else max(share, self._bytes(_AMPLE))
        return self._leaves(wanted) or (self._leave_idle() and self._leaves(wanted))

    def _fit(self, keyed: KeyedPiece, inputs: list[object], plan: recording.InputPlan, limit: int) -> None:
        """Where the pool is half full, a piece is captured in a pool of its own first, to see how much it needs."""
        if not keyed.needs and not keyed.piece.spec.groups and 2 * self._held() >= limit:
            keyed.needs = self._needs(keyed.piece, inputs, plan)
            if keyed.needs > limit:
                keyed.piece.uses.wasted()
        if keyed.needs:
            use_count = self._device.use_count
            alive = sum(slot.nbytes for node in self._nodes.path for slot in node.slots if slot.alive(use_count))
            if alive + keyed.needs > limit:
                raise NotRecorded(NO_ROOM)
        waiting = self._waiting.get(keyed)
        over = 0 if waiting is None else self._held() + waiting.grows - limit
        if waiting is not None and over > 0 and not self._yield_to(waiting, over):
            raise NotRecorded(NO_ROOM)

    def _yield_to(self, waiting: Waiting, over: int) -> bool:
        """Give all recordings up for one that is worth more than those of which the pool has `over` bytes, and than
        recording the others again; whether they were."""
        if waiting.calls & (waiting.calls - 1) or self._nodes.path:  # seldom, and where the memory comes back at once
            return False
        victims, lost = self._least_valuable(over)
        if waiting.calls * waiting.saves <= lost:
            return False
        self._waiting.update(victims)
        self._nodes.counts["gave way"] += len(victims)
        self._give_up_all()
        self.leave_pools()
        return True

    def _least_valuable(self, over: int) -> tuple[dict[KeyedPiece, Waiting], float]:
        """What to put off so that the pool is smaller by `over` bytes, and the microseconds that this loses."""
        made = [(node, node.recording) for node in self._nodes.root.below() if node.recording is not None]
        growers = [
            (node.calls * _saves(recorded), self._grew[node], node.keyed, recorded)
            for node, recorded in made
            if node.keyed is not None and self._grew.get(node)
        ]
        growers.sort(key=lambda entry: entry[0] / entry[1])
        victims: dict[KeyedPiece, Waiting] = {}
        lost, freed = sum(recorded.code_us for _, recorded in made), 0  # all are recorded again
        for worth, grew, keyed, recorded in growers:
            if freed >= over:
                break
            victims[keyed] = Waiting(grew, _saves(recorded))
            lost, freed = lost + worth, freed + grew
        return victims, lost

    def _needs(self, piece: PieceState, inputs: list[object], plan: recording.InputPlan) -> int:
        """Bytes of a pool that has room for one recording; 0 where it cannot be made."""
        device, generation = self._device, self._device.generation
        device.new_pool()
        try:
            plan = dataclasses.replace(plan, owned=())
            made = self.captured(
                lambda: recording.record(
                    device,
                    piece.spec,
                    piece.function,
                    inputs,
                    plan,
                    lambda owned: device.restore(device.empty_state(), (), owned),
                    self._unlocked,
                )
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

    def _leave_enough(self, keyed: KeyedPiece, share: int) -> None:
        """What has warmed up in the pool is captured in any case: it is likely to take no more than is there, and would
        take as much again outside."""
        waiting = self._waiting.get(keyed)
        if waiting is None and self._warmed_in.get(keyed) == self._device.generation:
            return
        wanted = share + (0 if waiting is None else waiting.grows)
        if not (self._leaves(wanted) or (self._leave_idle() and self._leaves(wanted))):
            self._waiting.setdefault(keyed, Waiting()).put_off(TIGHT)
            raise NotRecorded(TIGHT)

    # ---------------------------------------------------------------- around a capture

    def captured(self, capture: Callable[[], Recording]) -> Recording:
        """What `capture` makes; once more where memory ran out in it and some was cached: the allocator gives that back
        to the device by itself, but not while anything is captured."""
        self._trim()
        generation, began = self._device.generation, time.perf_counter()
        try:
            return capture()
        except NotRecorded as why:
            spoilt = self._device.generation != generation
            if spoilt or not out_of_memory.is_behind(why) or not self._cached() or not self._empty_cache():
                raise
        finally:
            self._capturing += time.perf_counter() - began
        return capture()

    def _trim(self) -> None:
        """Give back what is cached before a capture, which cannot use it: what inputs of a larger size have left, say.
        Others need it again soon, and so it is to cost little beside captures; and no other rank may be waited for."""
        if self._trimming > _TRIMMING * self._capturing or rank.live() or self._cached() < _TRIMMED:
            return
        if not self._device.settle(_PATIENCE):
            return
        had, began = self._device.reserved_bytes(), time.perf_counter()
        with contextlib.suppress(RuntimeError):  # another thread may capture
            self._device.trim()
        self._trimming += time.perf_counter() - began
        self._given_back += had - self._device.reserved_bytes()

    def reserved(self) -> int:
        """Bytes that the allocator has taken of the device so far, to compare them later."""
        return self._device.reserved_bytes() + self._given_back

    def beside(self, nbytes: int) -> None:
        """So much that was reserved since is not the pool's."""
        self._given_back -= nbytes

    def grew(self, had: int) -> int:
        """Bytes that the pool in use has grown by since `reserved` said `had`."""
        generation, grew = self._device.generation, max(self.reserved() - had, 0)
        self._pool_bytes[generation] = self._pool_bytes.get(generation, 0) + grew
        return grew

    def keep(self, keyed: KeyedPiece, made: Recording, limits: Limits, had: int) -> int | None:
        """Bytes that the pool grew by for `made`, before whose capture `had` bytes were reserved; None: it is kept for
        this one call, since the pool has outgrown a limit and cannot go before the path ends.  Raises `NotRecorded`
        where it can go at once.  All that is in it is given up then."""
        grew, problem = self.grew(had), None
        if limits.pool_bytes is not None:
            limit = self._bytes(limits.pool_bytes)
            if self._held() > limit:
                self._pool_bytes[self._device.generation] = self._device.pool_bytes()
            if (over := self._held() - limit) > 0:
                grew, problem = max(grew, over), NO_ROOM
        if problem is None and grew and limits.keep_free and not self._leaves(self._bytes(limits.keep_free)):
            problem = TIGHT
        if problem is None:
            self._waiting.pop(keyed, None)
            return grew
        waiting = self._waiting.setdefault(keyed, Waiting())
        waiting.grows, waiting.saves, waiting.calls = grew, _saves(made), 0
        if problem is TIGHT:
            waiting.put_off(TIGHT)
        else:
            waiting.needed *= _SELDOM
        keyed.piece.uses.wasted()
        self._give_up_all()
        if self._nodes.path:
            log.info("%s: %s; it serves one call", keyed.piece.spec.label, problem)
            return None
        self.leave_pools()
        raise NotRecorded(problem)

    def ran_out(self, keyed: KeyedPiece, grew: int) -> None:
        """A capture has failed for lack of memory, and the pool keeps what it has grown by until then."""
        waiting = self._waiting.setdefault(keyed, Waiting())
        waiting.grows = max(waiting.grows, grew)
        waiting.put_off(RAN_OUT)
        self.used = True
        self.give_way()

    def holds_memory(self) -> bool:
        """Whether there may be anything to give up."""
        return bool(self._nodes.size or self.used or self.warmed or self._old)

    def give_way(self) -> None:
        """Memory has run out: give recordings up, and give back the memory of those that are not in use."""
        if not self.holds_memory():
            return
        self._nodes.counts["gave way to others"] += self._nodes.size
        self._give_up_all()
        with contextlib.suppress(DeviceFailed, RuntimeError):  # there may be no memory for the anchor of a new pool
            self.leave_pools()

    def _give_up_all(self) -> None:
        """Give up all recordings; their pool is left by `leave_pools`, as soon as none of them is on the path."""
        size = self._nodes.size
        self._nodes.counts["evicted"] += size
        for _ in range(size):
            events.count("evicted_recordings")
        self._nodes.unlink_all()
        self.used = self._returns = True

    # ---------------------------------------------------------------- memory

    def _bytes(self, amount: float) -> int:
        return in_bytes(amount, self._device.total_bytes()) if isinstance(amount, float) else amount

    def _held(self) -> int:
        """Bytes that all pools have grown to."""
        return sum(self._pool_bytes.values())

    def _leaves(self, share: int) -> bool:
        """Whether others may have `share`; gives back what is cached if need be."""
        free = self._device.free_bytes()
        if free >= share:
            return True
        return free + self._cached() >= share and self._empty_cache() and self._device.free_bytes() >= share

    def _cached(self) -> int:
        """Bytes that the allocator has cached outside of pools; what tensors hold in pools is taken off too."""
        return max(self._device.cached_bytes() - self._held(), 0)

    def _empty_cache(self) -> bool:
        """Give what is cached back to the device, when that has come to its end; whether it has."""
        device = self._device
        if not device.settle(_PATIENCE):
            return False
        had = device.reserved_bytes()
        device.empty_cache()
        self._given_back += had - device.reserved_bytes()
        return True

    def _leave_idle(self) -> bool:
        """Leave a pool that holds nothing; whether there was one, and it could be left."""
        if self._nodes.size or self._nodes.path or not (self.used or self.warmed):
            return False
        return self._left()

    def _left(self) -> bool:
        """Leave a pool without recordings; whether it could be left."""
        self.used = True
        try:
            self.leave_pools()
        except (DeviceFailed, RuntimeError) as error:
            if from_outside(error):
                raise
            log.debug("a pool could not be left: %s", error)
            return False
        return True

    def leave_pools(self) -> None:
        """Give back the memory of pools of which no node is left: neither in the tree, nor on the path, nor behind one
        there, where it may answer calls although that was given up."""
        if not self._nodes.size and self.used:
            self._device.new_pool()
            self.used = self.warmed = self._tuned = False
            self._largest = 0
        self._old |= set(range(self._seen, self._device.generation))
        self._old &= set(self._device.generations())  # one that could not be left may have been since
        self._seen = self._device.generation
        for generation in [number for number in self._old if not self._recorded_in.get(number)]:
            self._device.leave(generation)
            self._old.remove(generation)
            self._recorded_in.pop(generation, None)
            self._pool_bytes.pop(generation, None)
        if self._returns and not self._old:
            self._returns = False
            self._empty_cache()


def _saves(made: Recording) -> float:
    return cost.saved_us(made.code_us, made.trial)
