"""The tree of recordings of one device: which recording answers a call, and when a new one is made.

A recording stands for the memory it was made in: what was alive then was kept out of its way, everything else it may
write over.  So recordings form trees.  A node's children are what was recorded next, in the state that the node leaves;
the *path* is the nodes replayed in this step, from the first to the last that still has an output alive.  A node whose
outputs are all dead leaves the path by itself, and so a step ends by itself.

An example, pieces `encode` and `score`, called by turns:

    h = encode(x)     1st call: runs as it is.  2nd call: the path is empty, so it is recorded as a child of the root:
                      node A.  h is alive, so the path is [A]
    s = score(h)      2nd call: recorded as a child of A, node B.  h lies in the pool and is read where it is; the
                      allocator is set to A's state first, in which h is allocated and the rest of the pool is free
    del h, s          nothing happens now.  At the next call the nodes at the end of the path have nothing alive any
                      more and are dropped: the path is [], the step is over
    h = encode(x)     A is a child of the root, what it may write over is dead: it is replayed.  The path is [A]
    t = rank(h)       another piece after A is another child of A: node C.  The tree is  root - A - (B, C)
    h = encode(x)     while h and t are held: this call repeats what is on the path, so a new step begins.  h and t
                      get memory of their own, the path is emptied, and A is replayed

Invariants:

- Every output that is alive in the pool belongs to a node on the path.
- A recording is replayed only as a child of the path's last node, when the memory that it may write over is dead and
  its fixed inputs lie where they lay.
- What is alive and in the way of a new step is moved out first, to memory of its own, under the tensors that the user
  holds.  Where something alive cannot be moved no new step begins: the path goes on, or the call runs unrecorded.

One lock guards all of it; a call holds it from the choice of a node to the launch, and never while code of the user
runs; see `turns`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from multigraph_backend import _compat, events, sealing
from multigraph_backend.allocator.sleeping import Asleep, Sleeper
from multigraph_backend.cudagraphs.devices.device import Device, DeviceFailed, PoolState
from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings import out_of_memory, patching, planning, recording, replay
from multigraph_backend.cudagraphs.recordings.asleep import Sleepers, never
from multigraph_backend.cudagraphs.recordings.callers import Callers
from multigraph_backend.cudagraphs.recordings.collectives import Collectives
from multigraph_backend.cudagraphs.recordings.cost import NOT_REPLAYED
from multigraph_backend.cudagraphs.recordings.gathered import Gathered
from multigraph_backend.cudagraphs.recordings.lending import LENT, Lending
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece, PieceState
from multigraph_backend.cudagraphs.recordings.recording import FIRST_CALL, NotAllRecorded, NotRecorded
from multigraph_backend.cudagraphs.recordings.room import RAN_OUT, Room
from multigraph_backend.cudagraphs.recordings.settling import Settling
from multigraph_backend.cudagraphs.recordings.sharing import Sharing
from multigraph_backend.cudagraphs.recordings.slot import Slot
from multigraph_backend.cudagraphs.recordings.turns import BESIDE, OUT_OF_TURN, Call, Turns
from multigraph_backend.cudagraphs.recordings.warm_up import WarmSlot, WarmUp, WarmUps
from multigraph_backend.native import Calls
from multigraph_backend.process import rank
from multigraph_backend.process.interruptions import from_outside

log = logging.getLogger(__name__)

# seconds that the device is waited for before outputs are moved: where it may wait for other ranks, and where not
_PATIENCE, _PATIENCE_ALONE = 5.0, 60.0
_RETRY = 100.0  # seconds until it is waited for again where that was in vain
#: bytes of gradients up to which they stay where they are over micro-batches: beyond, a pool that holds those of two
#: is felt, and that the host makes a copy of each is not
_STAY = 64 << 20
GIVEN_UP = "the recording that it follows was given up, and has outputs that are still alive"
_NO_STREAM = -1  # so that the next call looks which streams it has to wait for


def _lies_in(slots: Mapping[int, Slot], value: object, device: Device) -> bool:
    """Whether `value` is a tensor in one of `slots`, by handle."""
    if not isinstance(value, torch.Tensor):
        return False
    slot = slots.get(value.untyped_storage()._cdata)
    return slot is not None and slot.lies(device)


class StepMarks(Protocol):
    """torch's count of `mark_step_begin()`, which changes when the user says that a step begins."""

    mark_step_counter: int


class NoSteps:
    """Nobody says when a step begins."""

    mark_step_counter = 0


class Tree(Nodes):
    """See the module's text.  One per device.

    step_marks: tells when the user says that a step begins.  poisons: see `poison`.
    """

    def __init__(
        self,
        device: Device,
        limits: Limits | None = None,
        step_marks: StepMarks | None = None,
        poisons: bool = False,
    ) -> None:
        super().__init__(device, poisons)
        self.limits, self.step_marks = limits or Limits(), step_marks or NoSteps()
        self.lock = threading.RLock()
        self.capturing, self.device_stream = device.capturing, device.stream
        self.pieces: weakref.WeakSet[PieceState] = weakref.WeakSet()  # all there are, for reports
        self._dropped: deque[PieceState] = deque()
        self._not_before = 0.0  # when the device is next waited for
        self.stay = _STAY
        self.room = Room(self, self.unlocked)
        self.sharing = Sharing(self, self.room)
        self.gathered = Gathered(device)
        self.settling = Settling(device, self.gathered)
        self.turns = Turns(self.lock)
        self.collectives = Collectives(self, self.turns, lambda: self._last_stream)
        self.stream = self._last_stream = device.stream()
        self._streams: set[int] = set()  # other streams on which unrecorded code has run since
        self._running = 0  # calls of unrecorded code that are under way
        self.forgets = False  # all recordings are given up before anything else is recorded
        self.step_mark = self.step_marks.mark_step_counter
        self.callers = Callers(self)
        self.sleepers = Sleepers(device)
        self.lending = Lending(self)
        in_the_way = self._others_are_in_the_way
        self.warm_ups = WarmUps(self, self.lock, self.room, self.sharing, self.settling, in_the_way)

    # ---------------------------------------------------------------- every call

    def undisturbed(self, piece: PieceState) -> bool:
        """Whether nothing has happened since the last call that `choose` must look at first."""
        if self.step_marks.mark_step_counter != self.step_mark:
            return False
        self._attend(piece)
        return True

    def _follow_stream(self) -> None:
        """Let the caller's stream wait for what ran on the last one."""
        stream = self.device_stream()
        if stream != self.stream:
            self._wait_for_others(stream)
            self._streams.clear()
            self.stream = self._last_stream = stream

    def _catch_up(self) -> None:
        """Let the caller's stream wait for what threads aside have launched since the call began."""
        if self.stream == _NO_STREAM:
            self._follow_stream()

    def _wait_for_others(self, stream: int) -> None:
        for other in sorted({self._last_stream, *self._streams} - {stream}):
            self.device.wait_for(other)

    def _attend(self, piece: PieceState) -> None:
        """Take note of the stream and the thread that call."""
        self._follow_stream()
        if piece.spec.is_backward:  # autograd runs backwards in threads of its own
            return
        self.callers.attend(piece)

    # ---------------------------------------------------------------- calls that no child of the path answers at once

    def choose(self, keyed: KeyedPiece, inputs: list[object]) -> Node | None:
        """What answers a call off the recorded paths, beginning a new step or recording; None: the code, as it is."""
        if self.sleepers.any:
            self.sleepers.refuse(inputs, keyed.piece.spec.label, keyed.piece.spec.constants)
        if keyed.unprofitable and keyed.refused is not None:  # at each call: no more than needs to be done
            self._count_unrecorded(keyed, keyed.refused)
            return None
        call = Call(self.turns)
        try:
            taken = call.begin(keyed.piece.awaited, 0.0)
            assert taken, "a call that is out of turn chose"
            self.turns.choosing = True
            try:
                if self.forgets:
                    self._forget()
                if self.lending.on:
                    self._end_lending()
                # once: another thread may say meanwhile that a step begins
                step_mark = self.step_marks.mark_step_counter
                self._sweep()
                self._attend(keyed.piece)
                if step_mark != self.step_mark:
                    self._restart(self._gradients_kept(keyed, inputs))
                    self.step_mark = step_mark
                with _compat.without_torch_function():  # of inputs whose classes answer what is asked about them
                    node = self._node_for(keyed, inputs)
                self._catch_up()
            except (NotRecorded, DeviceFailed, RuntimeError) as error:
                if type(error) is not NotRecorded and from_outside(error):
                    raise
                reason = str(error) if isinstance(error, NotRecorded) else f"the driver failed: {error}"
                if isinstance(error, NotRecorded) and error.always:
                    keyed.refused = reason
                self._count_unrecorded(keyed, reason)
                if (index := getattr(error, "index", None)) is not None and (trace_of := keyed.piece.spec.trace(index)):
                    keyed.piece.stacks[reason] = trace_of
                if keyed.piece.spec.required and reason != FIRST_CALL:
                    message = f"{keyed.piece.spec.label}: cudagraphs='require', but this call runs unrecorded: {reason}"
                    raise NotAllRecorded(message) from error
                node = None
        finally:
            self.turns.choosing = False
            call.end()
        return node

    def as_it_is(self, code: Callable[[list[Any]], Any], inputs: list[Any], warming: PieceState | None = None) -> Any:
        """Run code unrecorded, without the lock; `warming`: the piece that it is of, where it may warm up in the pool.

        Another thread may record and replay meanwhile.  What `code` reads of the pool stays alive until it has
        launched all that reads it; and the next call on another stream waits for that.
        """
        began = False
        held: list[torch.Tensor] = []
        if self.sleepers.any:
            self.sleepers.refuse(inputs)
        try:
            with self.lock:
                stream = self.device_stream()
                if stream != self.stream:
                    self._wait_for_others(stream)
                self._running, began = self._running + 1, True
                keyed = None if warming is None else warming.keyed_for(inputs)
                warm = None if keyed is None else self.warm_ups.place_for(keyed)
                if keyed is not None and warm is not None:
                    # nothing of these is held here: a backward frees what was saved for it as it goes
                    outputs = self.warm_ups.run(warm, keyed, code, inputs)
                    if outputs is not None:
                        keyed.piece.note_gradients(outputs)
                        return outputs
                if self.path:
                    handles = {slot.handle for node in self.path for slot in node.slots}
                    held += [
                        value
                        for value in inputs
                        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in handles
                    ]
            outputs = code(inputs)
            if warming is not None:
                warming.note_gradients(outputs)
            return outputs
        finally:
            if began:
                with self.lock:
                    self._running -= 1  # first: Ctrl-C may arrive here too
                    if stream != self.stream:
                        self._streams.add(stream)
                        self.stream = _NO_STREAM
            del held

    def _end_warm_up(self, warm: WarmUp, keyed: KeyedPiece) -> None:
        """Before a call of `keyed` behind `warm`: end it, if nothing of it is alive, or if the step begins again and
        what is alive can be moved out."""
        warm.look()
        aside = self.shared and threading.get_ident() != self.callers.first
        if not warm.alive():
            self._shorten()
        elif keyed.called and not aside and warm.repeats(keyed):
            self._restart()

    def _others_are_in_the_way(self) -> bool:
        """Whether nothing may warm up in the pool, for other threads or loans are there."""
        return bool(self.shared or self.turns.aside or self.lending.in_the_way())

    def holds_memory(self) -> bool:
        """Whether recordings, or first calls, may have memory that serves nobody else."""
        return self.room.holds_memory()

    def make_way(self) -> None:
        """Code of a call that runs unrecorded has run out of memory: let recordings give way.  While another thread is
        in the midst of a call, that is left to the end of it."""
        with self.lock:
            self.counts["ran out of memory"] += 1
            if self.turns.choosing or self.turns.owner not in (None, threading.get_ident()):
                self.forgets = True
                return
            self._look()
            self._shorten()
            self.lending.give_up()
            self.room.give_way()

    def _end_lending(self) -> None:
        """Before a call that recordings may answer.  Raises `NotRecorded` while memory of theirs is lent."""
        if self.lending.over():
            return
        if not self.lending.stays:
            raise NotRecorded(LENT)
        log.info("recordings leave their pool to what it has lent, and begin anew in another one")
        self._give_up_all()

    def _look(self) -> None:
        """See what of a warm-up is still there."""
        for node in self.path:
            if isinstance(node, WarmUp):
                node.look()

    def _abandon_pool(self) -> None:
        """Leave the pool to blocks in it that nobody knows: recordings there would write over them."""
        self.unlink_all()
        self.device.new_pool()
        self.counts["abandoned pools"] += 1
        log.info(
            "something that is no output of compiled code has stayed in the memory of recordings, which begin anew"
        )

    def copied_out(self, piece: PieceState, outputs: Sequence[Any]) -> Sequence[Any]:
        """Outputs of unrecorded code with copies in place of what lies in the pool and a user may hold."""
        with self.lock:
            stream = self.device_stream()
            if stream != self.stream and not self.capturing():  # others may have replayed while the code ran
                self._wait_for_others(stream)
            slots = {slot.handle: slot for node in self.path for slot in node.slots}
            taken: dict[int, torch.UntypedStorage] = {}
            return [
                replay.copied(self.device, None, output, taken)
                if shown and _lies_in(slots, output, self.device)
                else output
                for output, shown in zip(outputs, piece.spec.visible, strict=True)
            ]

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Inside, the user's code runs in a capture: it is this thread's turn, and the lock is free."""
        self.turns.captures = True
        try:
            self.lock.release()
            yield
        finally:
            self.lock.acquire()
            self.turns.captures = False

    def patience(self, required: bool, limits: Limits) -> float:
        """Seconds that a call waits for its turn."""
        return max(_PATIENCE, limits.patience) if required else limits.patience

    def count_aside(self, piece: PieceState, inputs: Sequence[object]) -> None:
        """Take note of a call that did not get its turn.  Raises `NotAllRecorded` where that is an error."""
        with self.lock:
            self._count_unrecorded(piece.keyed_for(inputs), OUT_OF_TURN)
        if piece.spec.required:
            raise NotAllRecorded(
                f"{piece.spec.label}: cudagraphs='require', but this call runs unrecorded: {OUT_OF_TURN}"
            )

    def _node_for(self, keyed: KeyedPiece, inputs: list[object]) -> Node:
        """The node that answers this call, recorded now if need be.  Raises `NotRecorded`."""
        if keyed.refused is not None:
            raise NotRecorded(keyed.refused)
        if self.collectives.ending is not None and keyed.piece.spec.groups:
            raise NotRecorded(self.collectives.ending)
        if self.path and isinstance(last := self.path[-1], WarmUp):
            self._end_warm_up(last, keyed)
            last = self.root  # a pool is left when its last node is gone
        first, keyed.called = not keyed.called, True
        if (
            (first and keyed.piece.warms_up)
            or (self.path and isinstance(self.path[-1], WarmUp))
            or (not self.path and self.settling.moves(keyed, inputs))
        ):
            keyed.warms_up = True
            planning.look(self.device, keyed, inputs)
            self.gathered.look(inputs, keyed.piece.spec.static)
            if keyed.piece.limits.pool_bytes is None:  # else it warms up elsewhere
                self._make_way(keyed, inputs)
            raise NotRecorded(FIRST_CALL)
        if self.path and self._new_step(keyed, inputs):
            kept = self._gradients_kept(keyed, inputs)
            self._restart(kept)
            if kept:
                try:
                    return self._behind(keyed, inputs, first)
                except NotRecorded as why:
                    log.info("%s: gradients are copied from now on: %s", keyed.piece.spec.label, why)
                    self._keep_no_gradients()
                    self._restart()
        return self._behind(keyed, inputs, first)

    def _behind(self, keyed: KeyedPiece, inputs: list[object], first: bool) -> Node:
        """The node behind the path that answers this call, recorded now if need be.  Raises `NotRecorded`."""
        parent = self.path[-1] if self.path else self.root
        anew = self.sharing.settled(keyed) and self._make_way(keyed, inputs)
        found = self._child(parent, keyed, inputs)
        if found is not None:
            return found
        self._look_at_gathered(keyed, inputs)
        if not self.linked(parent):  # nothing would ever find what is recorded behind it
            raise NotRecorded(GIVEN_UP)
        limits = keyed.piece.limits
        if parent.depth >= limits.depth:
            raise NotRecorded(
                f"{parent.depth} recordings follow one another in this step, whose outputs are still alive"
            )
        if not keyed.piece.spec.required and not keyed.piece.uses.wanted((parent.number, keyed.key), limits.unreplayed):
            raise NotRecorded(NOT_REPLAYED)
        plan = planning.plan(self, parent, keyed, inputs, first, self.gathered)
        if self.turns.aside:
            raise NotRecorded(BESIDE)
        if (late := sealing.refused(f"{keyed.piece.spec.label} is recorded")) is not None:
            raise NotRecorded(late)
        self.room.hear(keyed, limits)
        self.room.make(limits)
        anew = self._make_way(keyed, inputs) or self._leave_tuned(keyed) or anew
        self.room.admit(keyed, inputs, plan, limits)
        return self._record(parent, keyed, inputs, plan, first, anew)

    def _look_at_gathered(self, keyed: KeyedPiece, inputs: Sequence[object]) -> None:
        """Give up what reads parameters in place that are gathered and move (see `gathered`).  Not where ranks have to
        record alike, for each has addresses of its own, nor where nothing is recorded any more, and of the path nothing
        where all has to be recorded: what follows in this step could not be."""
        if not self.gathered.look(inputs, keyed.piece.spec.static):
            return
        if keyed.piece.spec.groups or self.collectives.held() or sealing.sealed():
            return
        addresses = self.gathered.copy_from_now_on()
        self.lasting -= addresses
        log.info("%s: parameters that are gathered move; they are copied from now on", keyed.piece.spec.label)
        stay = {id(node) for node in self.path} if keyed.piece.spec.required else ()
        for node in list(self.root.below()):
            if id(node) not in stay and node.reads_any_of(addresses) and self.linked(node):
                for given_up in node.below():
                    assert given_up.keyed is not None
                    given_up.keyed.piece.uses.begin_anew()
                self.unlink(node)

    def _make_way(self, keyed: KeyedPiece, inputs: list[object]) -> bool:
        """Let all recordings give way to the one of this call, where that saves memory, nothing in the pool is alive
        and nobody else has to do with it: other threads, or other ranks, which record collectives as often as this.
        Whether they did."""
        if self.path:
            return False
        self.sharing.look(keyed, inputs)
        if self.shared or self._running or self.turns.aside or keyed.piece.spec.groups:
            return False
        if not self.sharing.asks(keyed) or self.collectives.held():
            return False
        self.sharing.give_way(keyed)
        return True

    def _leave_tuned(self, keyed: KeyedPiece) -> bool:
        """Leave a pool in which kernels were tuned, where nobody else has to do with it, as above; whether it was."""
        if self.path or self.shared or self._running or self.turns.aside or keyed.piece.spec.groups:
            return False
        return self.room.leave_tuned(keyed)

    def _child(self, parent: Node, keyed: KeyedPiece, inputs: list[object]) -> Node | None:
        """The child of `parent` that answers this call, perhaps after its code was built again."""
        found = parent.child(keyed, inputs)
        return parent.child(keyed, inputs) if found is None and self._rebuild(parent, keyed) else found

    def _rebuild(self, parent: Node, keyed: KeyedPiece) -> bool:
        """Build again what a user has resized or what was unbuilt, where that can be done; whether anything was."""
        built = False
        for node in parent.children.get(keyed, ()):
            if node.ready and node.resized():
                node.unbuild()
            if not node.ready and not node.destroyed and not node.alive():
                replay.build(node)
                built = True
        return built

    def _count_unrecorded(self, keyed: KeyedPiece, why: str) -> None:
        keyed.reasons[why] += 1
        self.counts["unrecorded"] += 1
        events.count("unrecorded_pieces")
        if why != FIRST_CALL and not keyed.unprofitable:  # that is a choice, and was logged as one
            label = keyed.piece.spec.label
            events.warn_once(f"{label}: unrecorded: {why}", "%s runs unrecorded: %s", label, why)

    # ---------------------------------------------------------------- steps

    def _new_step(self, keyed: KeyedPiece, inputs: list[object]) -> bool:
        """Whether this call begins a new step although outputs of the last are alive: it repeats what is on the path,
        or begins as a recorded step began, of this model or of another of its class, and nothing alive is on its way
        into compiled code."""
        device = self.device
        alive = [
            slot for node in self.path for slot in node.slots if slot.alive(device.use_count) and slot.lies(device)
        ]
        if any(not slot.visible or not slot.movable for slot in alive):
            return False
        if self.shared and alive and threading.get_ident() != self.callers.first:
            return False
        if len(self.path) >= keyed.piece.limits.depth:
            return True
        if any([self._is_of(node, keyed, inputs) for node in self.path]):  # noqa: C419 - see `Node.alive`
            return True
        begins = self._child(self.root, keyed, inputs)
        made = None if begins is None else begins.recording
        # with parameters that are copied it may be of any layer
        if made is not None and self.gathered.same(inputs, made.plan.gathered):
            return True
        return self._begins_as_one_did(keyed, inputs, alive)

    def _is_of(self, node: Node, keyed: KeyedPiece, inputs: list[object]) -> bool:
        """Whether `node` is a recording of this piece, with these parameters."""
        if node.keyed is not keyed or node.recording is None:
            return False
        plan = node.recording.plan
        lasting = [index for index in plan.fixed if index not in plan.managed]
        return self.device.same_addresses(inputs, plan.addresses, lasting) and self.gathered.same(inputs, plan.gathered)

    def _begins_as_one_did(self, keyed: KeyedPiece, inputs: list[object], alive: Sequence[Slot]) -> bool:
        """Whether this forward, of code that begins recorded training steps, comes behind one whose backward is done:
        of another model of the same class.  Recorded behind that one, it would keep the gradients of all models that
        take turns in the pool; and as these are still there when the first comes again, they would have memory of
        their own as well."""
        if keyed.piece.spec.is_backward or keyed not in self.root.children:
            return False
        if not any(node.keyed is not None and node.keyed.piece.spec.is_backward for node in self.path):
            return False
        slots = {slot.handle: slot for slot in alive}
        return not any(_lies_in(slots, value, self.device) for value in inputs)

    def _gradients_kept(self, keyed: KeyedPiece, inputs: list[object]) -> int:
        """How many nodes stay at the path's begin because gradients of them are held, where a micro-batch begins.

        Gradients that are accumulated are held from the first micro-batch to the end of the step.  The next ones are
        recorded behind it, once, and replayed there: those gradients are dead when they have been added.  Moved out
        instead, all gradients of all micro-batches would be copied, which small models feel and large ones do not.  But
        what is held for longer makes each step longer than the last: where `keyed` is on that path twice, it is moved.
        """
        last = nbytes = 0
        for number, node in enumerate(self.path, 1):
            if not node.is_backward or not node.alive():
                continue
            if node.keyed is None or not node.keyed.piece.accumulates:
                return 0
            last, nbytes = number, nbytes + sum(slot.nbytes for slot in node.watched)
        if nbytes > self.stay:
            return 0
        times = sum(self._is_of(node, keyed, inputs) for node in self.path[:last])
        if times > 1:
            self._keep_no_gradients()
        return last if times == 1 else 0

    def _keep_no_gradients(self) -> None:
        """Those that are held are moved out, where the path has any."""
        for node in self.path:
            if node.keyed is not None and node.is_backward:
                node.keyed.piece.accumulates = False

    def _restart(self, kept: int = 0) -> None:
        """Begin a new step: move out what is alive, if all of it can be moved, and nobody is about to read it.

        `kept`: so many nodes stay on the path, with what is held of their gradients."""
        use_count = self.device.use_count
        moving = [node for node in self.path if not (kept and node.is_backward)]
        alive = [(node, slot) for node in moving for slot in node.slots if slot.alive(use_count)]
        held = [slot for _, slot in alive if slot.lies(self.device)]
        busy = alive or any(isinstance(node, WarmUp) and node.running for node in self.path)
        if not all(slot.movable for slot in held) or (busy and self._running) or (held and not self._settled()):
            return
        try:
            # any of the device's calls may fail: then those before are moved, and the path goes on
            for node, slot in alive:
                self._move(node, slot)
        finally:
            if held:  # another stream may be ordered behind the work that made them, but not behind these copies
                self.device.finish()
        strangers = any(isinstance(node, WarmUp) and node.strangers for node in self.path)
        del self.path[kept:]
        if strangers:
            self._abandon_pool()
        for node in {id(node): node for node, _ in alive}.values():
            if node.recording is not None:
                replay.build(node)

    def _move(self, node: Node, slot: Slot) -> None:
        """Give what is alive over `slot` other memory, if the user has not done so."""
        lies = slot.lies(self.device)
        if isinstance(slot, WarmSlot):
            if lies and (storage := slot.held()) is not None:
                moved = self.device.move_out(storage)
                assert moved, "memory of a warm-up could not be moved out"
                self.counts["moved from warm-ups"] += 1
            return
        assert node.keyed is not None
        if lies:
            moved = self.device.move_out(slot.storage)
            assert moved, "memory of a recording could not be moved out"
            node.keyed.piece.moved += 1
            self.counts["clones"] += 1
            events.count("moved_outputs")
        replay.renew(node, slot, resized=not lies)

    def _settled(self) -> bool:
        """Whether nothing reads or writes, on a stream that is not known here, what is about to be moved.

        Whoever holds an output may have given it to any stream: a copy to the host that runs behind the program, a
        collective that is not waited for yet.  That one may be waiting for another rank, which may be waiting for this
        one: so the device is given some time, and then the path goes on.
        """
        if time.monotonic() < self._not_before:
            return False
        settled = self.device.settle(_PATIENCE if rank.live() else _PATIENCE_ALONE)
        if not settled:
            self._not_before = time.monotonic() + _RETRY
            log.info("outputs that are held stay where they are: the device is busy, maybe with other ranks")
        return settled

    # ---------------------------------------------------------------- recording

    def _record(
        self, parent: Node, keyed: KeyedPiece, inputs: list[object], plan: recording.InputPlan, first: bool, anew: bool
    ) -> Node:
        """`first`: this is its first call; `anew`: all others have given way to it."""
        use_count = self.device.use_count
        state, after, alive = self.at_path_end()
        if not alive <= after:
            raise NotRecorded("something that was expected to be dead is alive")
        surely_dead = {id(slot) for node in self.path for slot in node.surely_dead()}
        dead = [
            slot
            for node in self.path
            for slot in node.slots
            if not slot.alive(use_count) and id(slot) not in surely_dead
        ]
        again = bool(parent.children.get(keyed))
        in_place = [index for index in plan.fixed if index in keyed.piece.spec.static and index not in plan.managed]
        self.gathered.read(inputs, in_place)
        gathered = {index for index in in_place if self.gathered.has(inputs[index])}
        had = self.room.reserved()
        try:
            made = self._captured(keyed, inputs, plan, state, alive, anew)
            plan = made.plan
        except NotRecorded as why:
            self.counts["failed"] += 1
            events.count("failed_recordings")
            taken = self.room.grew(had)
            if out_of_memory.is_behind(why):
                self.room.ran_out(keyed, taken)
                raise NotRecorded(RAN_OUT) from why
            if first:  # it may be what a first call does
                keyed.piece.warms_up = keyed.piece.each_warms_up = True
                raise NotRecorded(FIRST_CALL) from why
            keyed.failures += 1
            why.always = why.always or keyed.failures >= keyed.piece.limits.failures
            raise
        except BaseException:  # also Ctrl-C
            self.room.used = True  # the driver failed around a capture, whose blocks may be in the pool
            raise
        keyed.piece.warms_up = keyed.piece.each_warms_up
        keyed.piece.look_at_gradients()
        grew = self.room.keep(keyed, made, keyed.piece.limits, had)
        if again and grew is not None:
            planning.note_again(keyed, parent.children[keyed])
            self.counts["recorded again"] += 1
        for slot in made.slots:
            slot.copied = (self.shared or keyed.piece.spec.copies) and slot.visible
        if not keyed.piece.spec.is_backward:
            self.lasting.update(
                address for index in in_place if index not in gathered and (address := plan.addresses[index])
            )
        keyed.recorded(parent.depth + 1, plan.addresses)
        if parent is self.root:
            self.settling.recorded(keyed)
        freed = {slot.address for slot, _ in made.consumed}
        node = Node(
            self, made.state, parent, keyed, made, dead, (alive - freed) | {slot.address for slot in made.slots}
        )
        for earlier in self.path:
            if any([slot.visible and slot.kept is not None for slot in earlier.slots]):  # noqa: C419
                earlier.unbuild()  # this piece hands it out: a user may hold it from now on
        replay.build(node)
        node.holds = replay.build_holds(node)
        self.room.recorded(node, grew or 0)
        if keyed.piece.spec.groups:
            self.collectives.recorded(node)
        if grew is None:  # it is launched once, and no call finds it
            return node
        siblings = parent.children.get(keyed, [])
        if len(siblings) < keyed.piece.spec.most:
            # what moves was seen to move elsewhere: one copying recording serves
            for other in [other for other in siblings if other.reads_in_place(keyed.copied)]:
                self.unlink(other)
        self.room.used = True
        self.link(node)
        self.sharing.recorded(node, self.path[0] if self.path else node, self.room.reserved() - had)
        node.final = keyed.piece.uses.recorded(node)
        self.counts["recordings"] += 1
        events.count("recordings")
        return node

    def _captured(
        self,
        keyed: KeyedPiece,
        inputs: list[object],
        plan: recording.InputPlan,
        state: PoolState,
        alive: frozenset[int],
        anew: bool,
    ) -> recording.Recording:
        """The recording; captured again where it has to pay for large copies and the pool grew, for then its code was
        timed with finding memory, and where memory ran out that was only cached; but not where it issues collectives:
        all ranks capture these as often.

        `anew`: it is the first in its pool, which is to be no larger than one that a warm-up has made.  So it is
        captured without its copied inputs first: their buffers find room beside what else it needs, but segments of
        their own have no room for that.  To find out which inputs can be patched it is captured beforehand, too.
        """
        piece = keyed.piece

        def capture(
            plan: recording.InputPlan = plan, elsewhere: Mapping[int, torch.Tensor] | None = None
        ) -> recording.Recording:
            self._catch_up()
            return recording.record(
                self.device,
                piece.spec,
                piece.function,
                inputs,
                plan,
                lambda owned: self.device.restore(state, alive, owned),
                self.unlocked,
                *([] if elsewhere is None else [elsewhere]),
            )

        def captured(
            plan: recording.InputPlan = plan, elsewhere: Mapping[int, torch.Tensor] | None = None
        ) -> recording.Recording:
            if piece.spec.groups:
                return capture(plan, elsewhere)
            return self.room.captured(functools.partial(capture, plan, elsewhere))

        patched = patching.candidates(self.device, keyed, inputs, plan)
        if anew and not set(plan.copied) <= set(patched):
            captured(dataclasses.replace(plan, copied=())).graph.reset()
        if patched:
            found = patching.attempt(self.device, self.room, keyed, inputs, plan, patched, captured)
            if found is not None:
                return found
        copied = sum(value.nbytes for index in plan.copied if isinstance(value := inputs[index], torch.Tensor))
        if not piece.spec.must_pay or piece.spec.groups or not copied or copied < piece.limits.copied_bytes:
            return captured()
        had = self.room.reserved()
        made = captured()
        if self.room.reserved() <= had:
            return made
        made.graph.reset()
        again = captured()
        again.grown += made.grown
        return again

    # ---------------------------------------------------------------- giving recordings up

    def drop(self, pieces: Iterable[PieceState]) -> None:
        """Give up all recordings of `pieces`, whose code is gone.  May be called at any time, from any thread."""
        self._dropped.extend(pieces)
        if self.lock.acquire(blocking=False):
            try:
                if not self.turns.choosing and not self.sleepers.all:
                    self._sweep()
            finally:
                self.lock.release()

    def _sweep(self) -> None:
        if not self._dropped:
            return
        gone = set()
        while self._dropped:
            gone.add(self._dropped.popleft())
        for node in list(self.root.below()):
            if node.keyed is not None and node.keyed.piece in gone and self.linked(node):
                self.unlink(node)
        for piece in gone:  # nobody calls it any more
            piece.end()
        self._shorten()
        self.room.used = self.room.used or (self.room.warmed and not self.path)
        if not self.size:
            self.lending.give_up()
        self.room.leave_pools()

    def forget(self) -> None:
        """Give up all recordings.  What is alive stays valid.  While another thread is in the midst of a call, or a
        recording is made, this is left to the end of that call, or to the next one that is not replayed."""
        with self.lock:
            if self.sleepers.all or self.turns.choosing or self.turns.owner not in (None, threading.get_ident()):
                self.forgets = True
                return
            self._forget()

    def lend(self) -> bool:
        """Let memory that is dead between replays serve others, if no call is under way; whether that is new."""
        with self._idle() as idle:
            if not idle:
                return False
            self._look()
            self._shorten()
            return self.lending.begin()

    def take(self, calls: Calls) -> bool:
        """Let calls be native from now on, if none is under way; whether they are.  Recordings that are there are built
        again, now or when what is alive of them is not any more."""
        with self._idle() as idle:
            if not idle or self.lending.in_the_way():
                return False
            self.device.take(calls)
            self.calls, self.shorten = calls, calls.shorten
            for node in self.reachable():
                if node.recording is None or node.destroyed or (node.holds is never and node.slept is None):
                    continue  # given up
                if node.slept is None:
                    node.holds = replay.build_holds(node)
                else:
                    node.slept = replay.build_holds(node)
                if node.ready:
                    node.unbuild()
                    if not node.alive():
                        replay.build(node)
            for piece in list(self.pieces):
                piece.on_native()
            return True

    def give_way(self) -> bool:
        """Give up all recordings that nothing holds, if no call is under way; whether there were any.  Outputs that are
        alive stay where they are, with their pool.  Waits for nobody."""
        with self._idle() as idle:
            if not idle or not self.size:
                return False
            self._give_up_all()
            return True

    @contextlib.contextmanager
    def _idle(self) -> Iterator[bool]:
        """Inside, under the lock, if that is free: whether no call is under way, and nothing sleeps."""
        if not self.lock.acquire(blocking=False):
            yield False
            return
        try:
            yield self.turns.owner is None and not self.turns.aside and not self._running and not self.sleepers.any
        finally:
            self.lock.release()

    def _give_up_all(self) -> None:
        self.counts["evicted"] += self.size
        for _ in range(self.size):
            events.count("evicted_recordings")
        self.lending.give_up()
        self.unlink_all()
        self._shorten()
        self.room.used = True
        self.room.leave_pools()

    def memory_sleeps(self, now: Sequence[Sleeper]) -> None:
        """All that sleeps on the device from now on.  Raises `Asleep` where it is more, and a call is under way."""
        with self.lock:
            idle = self.turns.owner is None and not self.turns.aside and not self._running
            if not idle and len(now) > len(self.sleepers.now):
                raise Asleep("a call of compiled code is under way")
            if self.lending.on and now and not self.lending.over():
                raise Asleep("memory of recordings is lent to others")
            self.sleepers.change(self.reachable(), now)
            if idle and self.forgets and not self.sleepers.all:  # it was asked for meanwhile
                self._forget()

    def _forget(self) -> None:
        self._follow_stream()
        self._restart()
        self.lending.give_up()
        self.unlink_all()
        self.lasting.clear()
        self.gathered.forget()
        self.callers.forget()
        self._not_before = 0.0
        self._shorten()
        self.room.used = self.room.used or (self.room.warmed and not self.path)
        self.room.leave_pools()
        self.forgets = False

    def _shorten(self) -> None:
        """Take off the path what is dead at its end."""
        while self.path and not self.path[-1].alive():
            self.path.pop()
