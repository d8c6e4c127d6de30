"""A piece of compiled code as the rest of the program calls it, and the short way of a call to its recording.

In:  a list of inputs, which is cleared.  Out: a tuple of outputs, from a recording or from the code itself.

`Piece.__call__` is the hot path, and says what a call does; `Piece.entry` is what is called: natively where calls are
native, and there `__call__` is left with what is not answered at once.  In the order of its lines: a capture of the
user's own is left alone; the lock is taken; the numbers among the inputs are the key; nodes with nothing alive leave
the end of the path; if step, stream and thread are those of the last call, the recording behind the path's last node
that fits is run.  Everything else is decided in `Tree.choose`, and a call that has to wait for its turn, or runs
unrecorded, leaves the lock first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch

from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings.out_of_memory import Given, inputs_again
from multigraph_backend.cudagraphs.recordings.piece_spec import Boxed, PieceSpec
from multigraph_backend.cudagraphs.recordings.piece_state import PieceState
from multigraph_backend.cudagraphs.recordings.tree import Tree
from multigraph_backend.cudagraphs.recordings.turns import Call


class Piece(PieceState):
    """Called with a list of inputs, which it clears; returns a tuple of outputs.

    It is its own state, and not a holder of it, so that a call reads attributes of one object.
    `limits`: tells its own, in place of the tree's.
    """

    def __init__(
        self, tree: Tree, function: Boxed, spec: PieceSpec, limits: Callable[[], Limits] | None = None
    ) -> None:
        super().__init__(function, spec, (lambda: tree.limits) if limits is None else limits)
        self.tree, self.is_backward = tree, spec.is_backward
        self._passing = tuple(index for index in range(len(spec.names)) if index not in spec.static)
        tree.pieces.add(self)

    def entry(self) -> Boxed:
        """The quickest way to call it: of now, for calls become native while the program runs (see `on_native`)."""
        tree = self.tree
        if tree.calls is None:
            return self
        return tree.calls.Entry(
            piece=self, tree=tree, turns=tree.turns, path=tree.path, marks=tree.step_marks, capturing=tree.capturing,
            stream=tree.device_stream, lock=tree.lock, any_thread=self.is_backward,
            otherwise=functools.partial(Piece.__call__, self),
        )  # fmt: skip

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        tree = self.tree
        if tree.capturing():  # a recording of the caller's own: this becomes part of it
            return self._copying(inputs) if self.spec.copies else self.function(inputs)
        turns = tree.turns
        with tree.lock:
            mine = not turns.aside if turns.owner is None else turns.owner == get_ident()
            if mine:
                keyed = self._only or self.by_key.get(self._key(inputs)) or self._new(inputs)
                if path := tree.path:
                    tree.shorten(path)
                if (
                    tree.step_marks.mark_step_counter == tree.step_mark
                    and tree.device_stream() == tree.stream
                    and (self.is_backward or get_ident() == tree.thread)
                ) or tree.undisturbed(self):
                    found = (path[-1] if path else tree.root).child(keyed, inputs)
                    if found is not None:
                        return found.run(found, inputs)
                chosen = tree.choose(keyed, inputs)
                if chosen is not None:
                    return chosen.run(chosen, inputs)
        return self._out_of_turn(inputs, mine)

    def _as_it_is(self, inputs: list[Any], in_turn: bool) -> Sequence[Any]:
        """Run its code unrecorded; once more, where memory ran out and recordings gave way."""
        code, warming = (self._copying, None) if self.spec.copies else (self.function, self if in_turn else None)
        given = Given(inputs, self._passing) if self.spec.repeatable else None
        outputs: Sequence[Any]
        try:
            outputs = self.tree.as_it_is(code, inputs, warming)
        except torch.OutOfMemoryError as error:
            again = inputs_again(given, error, self.tree)
            if again is None:
                raise
        else:
            return outputs
        inputs.clear()
        outputs = self.tree.as_it_is(code, again)
        return outputs

    def _copying(self, inputs: list[Any]) -> Sequence[Any]:
        return self.tree.copied_out(self, self.function(inputs))

    def _out_of_turn(self, inputs: list[Any], chosen: bool) -> Sequence[Any]:
        """A call that is not answered under the lock.  `chosen`: its code is to run as it is, in its turn, for nothing
        may be captured beside it; else another thread is in the midst of a call, or this one runs aside already."""
        tree, call = self.tree, Call(self.tree.turns)
        try:
            if call.begin(self.awaited, tree.patience(self.spec.required, self.limits)):
                return self._as_it_is(inputs, True) if chosen else self(inputs)
            if not chosen:
                tree.count_aside(self, inputs)
            return self._as_it_is(inputs, False)
        finally:
            call.end()
