"""A piece of compiled code as the rest of the program calls it, and the short way of a call to its recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from multigraph_backend.cudagraphs.recordings.cost import Uses
from multigraph_backend.cudagraphs.recordings.turns import Awaited, Call

if TYPE_CHECKING:
    from multigraph_backend.cudagraphs.limits import Limits
    from multigraph_backend.cudagraphs.recordings.recording import Boxed
    from multigraph_backend.cudagraphs.recordings.tree import Node, Tree

MOST = 5
FUNCTIONS = 256  # that are kept without a recording

_NONE: list[Node] = []


class Function:
    """A piece at one key (the numbers among its inputs): what the tree records.

    `addresses`: where inputs that may stay in place lay at the last call off the recorded paths.  `copied`: static
    inputs that came at too many addresses.  `reasons` counts why calls ran unrecorded; `refused`: why none is recorded;
    `unprofitable`: because that costs more than it saves.
    `nodes`: recordings of it that may be found; `needs`: bytes that one was seen to need of an empty pool.
    `recorded_at`: how often it was recorded at each depth of a step; `_places`: where its static inputs lay then.
    """

    def __init__(self, piece: Piece, key: tuple[Any, ...]) -> None:
        self.piece, self.key = piece, key
        self.called = False
        self.failures = self.nodes = self.needs = 0
        self.refused: str | None = None
        self.unprofitable = False
        self.addresses: dict[int, int] = {}
        self.copied: set[int] = set()
        self.reasons: Counter[str] = Counter()
        self.recorded_at: Counter[int] = Counter()
        self._places: dict[tuple[int, int], set[int]] = {}

    def moves(self, index: int, depth: int, address: int) -> bool:
        """Whether static input `index`, now at `address`, has lain elsewhere in recordings as deep in a step."""
        return bool(self._places.get((depth, index), set()) - {address})

    def recorded(self, depth: int, addresses: Sequence[int | None]) -> None:
        """Note a recording at that depth, with inputs that are read at `addresses` (None: copied, or no tensor)."""
        self.recorded_at[depth] += 1
        for index in self.piece.static:
            if (address := addresses[index]) is not None:
                self._places.setdefault((depth, index), set()).add(address)


class Piece:
    """Called with a list of inputs, which it clears; returns a tuple of outputs.

    function: the compiled code.  names: of its inputs, for messages.  traces: where the user's code first uses each
    input, as far as that is known.  static: positions whose addresses are expected to
    stay.  mutated: positions that it changes.  reused: positions of temporaries, whose memory it may use for something
    else.  visible: per output, whether a user may hold it.  constants: tensors that the code holds itself.  random:
    whether it draws random numbers.  required: whether a call that runs unrecorded after the first is an error.
    must_pay: whether a recording that costs more than it saves is given up.  most: recordings of one function after the
    same parent, or as deep in a step, before inputs at new addresses are copied.  groups: names of the process groups
    whose collectives it issues.  copies: whether what a user may hold is never memory of the pool, but a copy.
    limits: tells its own, in place of the tree's.
    """

    def __init__(
        self,
        tree: Tree,
        function: Boxed,
        *,
        names: Sequence[str],
        visible: Sequence[bool],
        traces: Sequence[str | None] = (),
        static: Iterable[int] = (),
        mutated: Iterable[int] = (),
        reused: Iterable[int] = (),
        constants: Sequence[torch.Tensor] = (),
        is_backward: bool = False,
        label: str = "a piece",
        random: bool = True,
        required: bool = False,
        must_pay: bool = False,
        most: int = MOST,
        groups: Iterable[str] = (),
        copies: bool = False,
        limits: Callable[[], Limits] | None = None,
    ) -> None:
        self.tree, self.function, self._limits = tree, function, limits
        self.must_pay, self.most, self.copies = must_pay, most, copies
        self.names, self.label, self.random, self.required = tuple(names), label, random, required
        self.traces = tuple(traces) or (None,) * len(self.names)
        self.static, self.mutated, self.reused = frozenset(static), frozenset(mutated), frozenset(reused)
        self.visible, self.constants, self.is_backward = tuple(visible), tuple(constants), is_backward
        self.groups = tuple(groups)
        self.functions: dict[tuple[Any, ...], Function] = {}
        #: for reports: how often an input at another address was why it was recorded again; outputs moved out; where
        #: the user's code first uses the input that a reason for an unrecorded call names
        self.again: Counter[str] = Counter()
        self.moved = 0
        self.stacks: dict[str, str] = {}
        #: where inputs lay at the last call off the recorded paths
        self.addresses: dict[int, int] = {}
        #: whether a function is called unrecorded first: until one was recorded, and always once that went wrong
        self.warms_up = True
        self.each_warms_up = False
        self.awaited = Awaited()
        self.uses = Uses()
        self.reasons: Counter[str] = Counter()  # of functions that are not kept any more
        self._numbers: tuple[int, ...] | None = None
        self._floats = False  # among them are floats
        tree.pieces.add(self)
        self._only: Function | None = None  # where no numbers are among the inputs

    @property
    def limits(self) -> Limits:
        """What its recordings may cost."""
        return self.tree.limits if self._limits is None else self._limits()

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        tree = self.tree
        if tree.capturing():  # a recording of the caller's own: this becomes part of it
            return self._copying(inputs) if self.copies else self.function(inputs)
        turns = tree.turns
        with tree.lock:
            mine = not turns.aside if turns.owner is None else turns.owner == get_ident()
            if mine:
                function = self._only or self.functions.get(self._key(inputs)) or self._new(inputs)
                path, use_count = tree.path, tree.use_count
                while path:
                    for slot in path[-1].watched:  # `Slot.alive`, without the call
                        if use_count(slot.handle) > slot.base or getrefcount(slot.storage) > slot.refs:
                            break
                    else:
                        path.pop()
                        continue
                    break
                if (
                    tree.marks() == tree.mark
                    and tree.device_stream() == tree.stream
                    and (self.is_backward or get_ident() == tree.thread)
                ) or tree.undisturbed(self):
                    nodes = (path[-1] if path else tree.root).children.get(function, _NONE)
                    for node in nodes:
                        if node.ready and node.holds(inputs):
                            if node is not nodes[0]:  # the next call is likely to be answered by the same one
                                nodes.remove(node)
                                nodes.insert(0, node)
                            return node.run(node, inputs)
                chosen = tree.choose(function, inputs)
                if chosen is not None:
                    return chosen.run(chosen, inputs)
        return self._out_of_turn(inputs, mine)

    def _as_it_is(self, inputs: list[Any]) -> Sequence[Any]:
        """Run its code unrecorded."""
        outputs: Sequence[Any] = self.tree.as_it_is(self._copying if self.copies else self.function, inputs)
        return outputs

    def _copying(self, inputs: list[Any]) -> Sequence[Any]:
        return self.tree.copied_out(self, self.function(inputs))

    def _out_of_turn(self, inputs: list[Any], chosen: bool) -> Sequence[Any]:
        """A call that is not answered under the lock.  `chosen`: its code is to run as it is, in its turn, for nothing
        may be captured beside it; else another thread is in the midst of a call, or this one runs aside already."""
        tree, call = self.tree, Call(self.tree)
        try:
            if call.begin(self.awaited, tree.patience(self.required, self.limits)):
                return self._as_it_is(inputs) if chosen else self(inputs)
            if not chosen:
                tree.count_aside(self, inputs)
            return self._as_it_is(inputs)
        finally:
            call.end()

    def function_for(self, inputs: Sequence[Any]) -> Function:
        """The one that these inputs ask for, made now if need be.  Under the tree's lock."""
        return self._only or self.functions.get(self._key(inputs)) or self._new(inputs)

    def _key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if self._numbers is None:
            self._numbers = tuple(index for index, value in enumerate(inputs) if isinstance(value, int | float))
            self._floats = any(isinstance(inputs[index], float) for index in self._numbers)
        numbers = tuple([inputs[index] for index in self._numbers]) if self._numbers else ()
        # both zeros are equal, and NaN equals nothing; their texts are what they are
        return tuple([n if n and n == n else repr(n) for n in numbers]) if self._floats else numbers

    def _new(self, inputs: Sequence[Any]) -> Function:
        key = self._key(inputs)
        if len(self.functions) >= 2 * FUNCTIONS:
            self._forget_functions()
        function = self.functions[key] = Function(self, key)
        if not key:
            self._only = function
        return function

    def end(self) -> None:
        """Nobody calls it any more: let go of what refers to it."""
        self.functions.clear()
        self._only = None

    def _forget_functions(self) -> None:
        """Keep those that are recorded, and of the others the newest: numbers may be others at each call."""
        idle = [key for key, function in self.functions.items() if not function.nodes]
        for key in idle[:-FUNCTIONS]:
            self.reasons.update(self.functions.pop(key).reasons)
