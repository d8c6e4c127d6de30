"""What was learnt of a piece in its calls, and the piece at each of its keys.

A *key* is the numbers among the inputs (sizes, mostly): code that was captured for one set of numbers is wrong for
others.  What the tree records is therefore a piece at one key.

In:  the inputs of calls.  Out: the `KeyedPiece` that they ask for, with what is known of it.  `piece.Piece` adds the
call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings.cost import Uses
from multigraph_backend.cudagraphs.recordings.piece_spec import Boxed, PieceSpec
from multigraph_backend.cudagraphs.recordings.turns import Awaited

MOST_KEYS = 256  # of one piece that are remembered without a recording
MOST_NOTED = 16  # unrecorded calls of a backward whose gradients are watched


class KeyedPiece:
    """A piece at one key (the numbers among its inputs): what the tree records.

    `addresses`: where inputs that may stay in place lay at the last call off the recorded paths.  `copied`: static
    inputs that came at too many addresses.  `rests`: positions of static inputs, and addresses at which they have come
    to rest (see `settling`).  `reasons`: skip reasons, why calls ran unrecorded, counted; `refused`: the
    skip reason of all calls to come; `unprofitable`: it is that a recording costs more than it saves.
    `warms_up`: its next call is to run in the pool, as it is.
    `nodes`: recordings of it that may be found; `needs`: bytes that one was seen to need of an empty pool.
    `nbytes`: bytes of its inputs; `gave_way`: recordings of it that gave way to larger ones and were not made again
    since; `settled`: whether a fragmented pool waits, or has waited, for it (see `sharing`).
    `recorded_at`: how often it was recorded at each depth of a step; `_lay_at`: where its static inputs lay then.
    `unpatched`: why inputs are copied that might have been patched, by position; `strays`: how often a patched one did
    not lie as it had to.
    """

    def __init__(self, piece: PieceState, key: tuple[Any, ...]) -> None:
        self.piece, self.key = piece, key
        self.called = False
        self.failures = self.nodes = self.needs = 0
        self.nbytes = self.gave_way = 0
        self.settled = False
        self.refused: str | None = None
        self.unprofitable = False
        self.warms_up = False
        self.addresses: dict[int, int] = {}
        self.copied: set[int] = set()
        self.rests: set[tuple[int, int]] = set()
        self.reasons: Counter[str] = Counter()
        self.recorded_at: Counter[int] = Counter()
        self._lay_at: dict[tuple[int, int], set[int]] = {}
        self.unpatched: dict[int, str] = {}
        self.strays: Counter[int] = Counter()

    def moves(self, index: int, depth: int, address: int) -> bool:
        """Whether static input `index`, now at `address`, has lain elsewhere in recordings as deep in a step."""
        return bool(self._lay_at.get((depth, index), set()) - {address})

    def recorded(self, depth: int, addresses: Sequence[int | None]) -> None:
        """Note a recording at that depth, with inputs that are read at `addresses` (None: copied, or no tensor)."""
        self.recorded_at[depth] += 1
        for index in self.piece.spec.static:
            if (address := addresses[index]) is not None:
                self._lay_at.setdefault((depth, index), set()).add(address)


class PieceState:
    """`function`: the compiled code.  `spec`: what is known of it.  `limits`: tells what its recordings may cost."""

    def __init__(self, function: Boxed, spec: PieceSpec, limits: Callable[[], Limits]) -> None:
        self.function, self.spec, self._limits = function, spec, limits
        self.by_key: dict[tuple[Any, ...], KeyedPiece] = {}
        #: for reports: how often an input at another address was why it was recorded again; outputs moved out; where
        #: the user's code first uses the input that a reason for an unrecorded call names
        self.again: Counter[str] = Counter()
        self.moved = 0
        self.stacks: dict[str, str] = {}
        #: where inputs lay at the last call off the recorded paths
        self.addresses: dict[int, int] = {}
        #: inputs that are not static, were read where they lay by a recording, and came elsewhere then
        self.moving: set[int] = set()
        #: whether it is called unrecorded first at a new key: until one was recorded, and always once that went wrong
        self.warms_up = True
        self.each_warms_up = False
        #: of a backward: whether gradients are held until it is called again, as where they are accumulated; and those
        #: of an unrecorded call, weakly
        self.accumulates = False
        self._gradients: list[StorageWeakRef] = []
        self._noted = 0
        self.awaited = Awaited()
        self.uses = Uses()
        self.reasons: Counter[str] = Counter()  # at keys that are forgotten
        self._numbers: tuple[int, ...] | None = None
        self._floats = False  # among them are floats
        self._only: KeyedPiece | None = None  # where no numbers are among the inputs
        #: called once calls are native, under the tree's lock
        self.on_native: Callable[[], object] = _nobody

    @property
    def limits(self) -> Limits:
        """What its recordings may cost."""
        return self._limits()

    def keyed_for(self, inputs: Sequence[Any]) -> KeyedPiece:
        """The one that these inputs ask for, made now if need be.  Under the tree's lock."""
        return self._only or self.by_key.get(self._key(inputs)) or self._new(inputs)

    def _key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if self._numbers is None:
            self._numbers = tuple(index for index, value in enumerate(inputs) if isinstance(value, int | float))
            self._floats = any(isinstance(inputs[index], float) for index in self._numbers)
        numbers = tuple([inputs[index] for index in self._numbers]) if self._numbers else ()
        # both zeros are equal, and NaN equals nothing; their texts are what they are
        return tuple([n if n and n == n else repr(n) for n in numbers]) if self._floats else numbers

    def _new(self, inputs: Sequence[Any]) -> KeyedPiece:
        key = self._key(inputs)
        if len(self.by_key) >= 2 * MOST_KEYS:
            self._forget_keys()
        keyed = self.by_key[key] = KeyedPiece(self, key)
        if not key:
            self._only = keyed
        return keyed

    def note_gradients(self, outputs: Sequence[Any]) -> None:
        """Note what an unrecorded call of a backward has returned, of the first such calls: some are never recorded."""
        if self.spec.is_backward and self._noted < MOST_NOTED:
            self._noted += 1
            shown = [
                output.untyped_storage()
                for output, visible in zip(outputs, self.spec.visible, strict=False)
                if visible and type(output) is torch.Tensor and output.layout is torch.strided
            ]
            self._gradients = [StorageWeakRef(storage) for storage in shown if storage.nbytes()]

    def look_at_gradients(self) -> None:
        """It has been called again, and recorded: see whether any that were noted are still there."""
        if self._gradients:
            self.accumulates = not all([storage.expired() for storage in self._gradients])  # noqa: C419
            self._gradients = []

    def end(self) -> None:
        """Nobody calls it any more: let go of what refers to it."""
        self.by_key.clear()
        self._only = None

    def _forget_keys(self) -> None:
        """Keep those that are recorded, and of the others the newest: numbers may be others at each call."""
        idle = [key for key, keyed in self.by_key.items() if not keyed.nodes]
        for key in idle[:-MOST_KEYS]:
            self.reasons.update(self.by_key.pop(key).reasons)


def _nobody() -> None:
    """Nobody asked to be told."""
