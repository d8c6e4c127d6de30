"""The first calls of a step, which run unrecorded, in the memory where their recordings will lie.

Code runs once as it is before it is recorded: kernels are loaded and tuned then, libraries set themselves up.  Were
that in the allocator's ordinary memory, a step's activations would be held twice: there, and in the pool that the
recordings grow a moment later.  So a call that warms up allocates from the pool.  Nothing of that is owned by the
runtime: tensors free it as they die, as in a program without recordings, and the peak is that of such a program.

    step 1   forward, as it is   in the pool: activations A, output y
             backward, as it is  reads A, frees them one by one
    step 2   forward             y is dead, nothing of step 1 is left: captured, in the memory of A
             ...

Before anything is recorded, first calls of other code begin with an empty pool: in what is left of blocks of other
sizes there is room for less than its bytes.  And where kernels were tuned in a first call, which takes memory that no
recording needs, the largest that has warmed up is recorded in an empty pool.

As long as anything of it is alive, no recording may be made or replayed: it does not know of these blocks and would
write over them.  So a `WarmUp` stands at the end of the path like a recording whose outputs are alive, and all calls
behind it warm up too.  What users hold of it is moved out when the step begins again, as of recordings.

In:  the calls, and what they return.  Out: slots that say whether any of it is alive; and for each call whether it
warms up here (`WarmUps`).
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.devices.device import Device, DeviceFailed
from multigraph_backend.cudagraphs.recordings.nodes import Node, Nodes
from multigraph_backend.cudagraphs.recordings.piece_spec import PieceSpec
from multigraph_backend.cudagraphs.recordings.piece_state import KeyedPiece
from multigraph_backend.cudagraphs.recordings.slot import Slot
from multigraph_backend.process.interruptions import from_outside

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.recordings.room import Room
    from multigraph_backend.cudagraphs.recordings.settling import Settling
    from multigraph_backend.cudagraphs.recordings.sharing import Sharing

log = logging.getLogger(__name__)

#: calls of one piece in a step that warms up and does not end, after which the pool is left to it; and of one that
#: takes part in a backward, as layers that are compiled one by one do: as many as a step may have of them
MOST_CALLS, MOST_LAYERS = 4, 128
_NOBODY = object()
_NEVER = sys.maxsize


def most_calls(spec: PieceSpec) -> int:
    """See `MOST_CALLS`.  A forward that saves returns what no user may hold."""
    return MOST_LAYERS if spec.is_backward or not all(spec.visible) else MOST_CALLS


class WarmSlot(Slot):
    """The memory of one storage that a warm-up returned, held weakly: its last tensor's death frees it."""

    __slots__ = ("weak",)

    def __init__(self, address: int, storage: torch.UntypedStorage, visible: bool, generation: int) -> None:
        super().__init__(address, storage, visible, generation)
        self.weak = StorageWeakRef(storage)  # keeps the handle from being used again
        self.copied = True  # nothing is handed out of it by a replay
        self.base, self.refs = 0, _NEVER
        self.storage: Any = _NOBODY

    def held(self) -> torch.UntypedStorage | None:
        """The storage, None if it has died."""
        return torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)

    def alive(self, use_count: Callable[[int], int]) -> bool:
        return use_count(self.handle) > 0

    def lies(self, device: Device) -> bool:
        storage = self.held()
        return storage is not None and device.storage_address(storage) == self.address


class WarmUp(Node):
    """See the module's text.  `calls_of`: how often each piece was called in it.  `strangers`: address and bytes of
    blocks in the pool that none of its slots accounts for.  `running`: calls that are under way, which may have let
    all slots die and still use the pool."""

    __slots__ = ("calls_of", "running", "strangers")

    def __init__(self, tree: Nodes) -> None:
        super().__init__(tree, tree.device.empty_state(), tree.root)
        self.calls_of: Counter[KeyedPiece] = Counter()
        self.running = 0
        self.strangers: dict[int, int] = {}

    def alive(self) -> bool:
        return bool(self.running or self.strangers) or super().alive()

    def repeats(self, keyed: KeyedPiece) -> bool:
        """Whether a call of `keyed` begins the step anew although some of it is alive: what autograd has saved is soon
        read by a backward, or belongs to one that never comes."""
        return self.calls_of[keyed] >= most_calls(keyed.piece.spec) or all(
            slot.visible for slot in self.slots if slot.alive(self.tree.use_count)
        )

    def begin(self) -> None:
        """A call begins to run."""
        self.running += 1
        self.watched = (*self.slots, _STRANGER)

    def took(self, outputs: Sequence[Any], visible: Sequence[bool]) -> None:
        """Note what a call has returned, and what else it has left in the pool."""
        device = self.tree.device
        known = {slot.handle: slot for slot in self.slots if slot.alive(device.use_count)}
        blocks = device.unowned()
        for output, shown in zip(outputs, visible, strict=False):
            if not isinstance(output, torch.Tensor) or output.layout is not torch.strided:
                continue
            storage = output.untyped_storage()
            address = device.storage_address(storage)
            if storage._cdata in known:
                known[storage._cdata].visible |= shown
            elif address in blocks:
                known[storage._cdata] = WarmSlot(address, storage, shown, self.generation)
        self.slots = tuple(known.values())
        self._watch(blocks)

    def look(self) -> None:
        """See whether what none of the slots accounts for is still there."""
        if self.strangers and self.generation == self.tree.device.generation:
            self._watch(self.tree.device.unowned())

    def _watch(self, blocks: Mapping[int, int]) -> None:
        known = {slot.address for slot in self.slots}
        self.strangers = {address: nbytes for address, nbytes in blocks.items() if address not in known}
        # the short way of a call looks at these: one that never dies keeps it from replaying
        self.watched = (*self.slots, _STRANGER) if self.strangers or self.running else self.slots


class Lock(Protocol):
    def acquire(self) -> object: ...

    def release(self) -> None: ...


class WarmUps:
    """Where first calls of a tree run.

    lock: the tree's, held here, and let go while code runs.  in_the_way: whether others are, threads or loans, so that
    nothing may warm up in the pool.
    """

    def __init__(
        self,
        tree: Nodes,
        lock: Lock,
        room: Room,
        sharing: Sharing,
        settling: Settling,
        in_the_way: Callable[[], bool],
    ) -> None:
        self._tree, self._lock, self._room, self._sharing, self._settling = tree, lock, room, sharing, settling
        self._in_the_way = in_the_way

    def place_for(self, keyed: KeyedPiece) -> WarmUp | None:
        """Where this call, which is the first of its kind or follows such a one, warms up; None: in ordinary memory."""
        tree, limits = self._tree, keyed.piece.limits
        wanted, keyed.warms_up = keyed.warms_up, False
        if not wanted or self._in_the_way() or limits.pool_bytes is not None:
            return None
        last = tree.path[-1] if tree.path else None
        if last is not None and not (isinstance(last, WarmUp) and last.generation == tree.device.generation):
            return None
        if not self._room.may_warm_up(limits):
            tree.counts["warm-ups elsewhere"] += 1
            return None
        if isinstance(last, WarmUp):
            return last
        self._room.begin_anew(keyed)
        try:
            tree.device.restore(tree.device.empty_state(), (), ())
        except DeviceFailed as error:
            log.debug("no room to warm up in: %s", error)
            return None
        warm = WarmUp(tree)
        self._room.warms_up(warm, keyed)
        self._settling.begin(keyed)
        tree.path.append(warm)
        return warm

    def run(
        self, warm: WarmUp, keyed: KeyedPiece, code: Callable[[list[Any]], Any], inputs: list[Any]
    ) -> Sequence[Any] | None:
        """Outputs of the code, run in the pool; None: it did not begin to run, for the driver failed."""
        tree = self._tree
        warm.calls_of[keyed] += 1
        with _compat.without_torch_function():
            self._settling.called(keyed, inputs, {slot.handle for slot in warm.slots})
        self._room.warmed_up(keyed)
        outputs: Sequence[Any] = ()
        began, had, timed = False, self._room.reserved(), _compat.kernels_timed()

        def in_pool() -> Any:
            nonlocal began
            began = True
            tree.counts["warm-ups in the pool"] += 1
            warm.begin()
            try:
                self._lock.release()
                return code(inputs)
            finally:
                self._lock.acquire()

        try:
            outputs = tree.device.run_in_pool(in_pool)
            self._sharing.warmed_up(next(iter(warm.calls_of)), self._room.reserved() - had)
        except (DeviceFailed, RuntimeError) as error:
            if began or from_outside(error):
                raise
            log.debug("nothing warms up in the pool: %s", error)
            return None
        finally:  # where it failed, the error holds frames, and they hold tensors
            self._room.grew(had)
            if _compat.kernels_timed() != timed:
                self._room.tuned()
            if began:
                warm.running -= 1
            with _compat.without_torch_function():  # of outputs whose classes answer what is asked about them
                warm.took(outputs, keyed.piece.spec.visible)
        return outputs


class _Stranger:
    """Always alive, as `Slot.alive` and the short way of a call see it."""

    base = refs = -1

    def __init__(self) -> None:
        self.storage = torch.UntypedStorage(1)
        self.handle = self.storage._cdata

    def alive(self, use_count: Any) -> bool:
        return True


_STRANGER: Any = _Stranger()
