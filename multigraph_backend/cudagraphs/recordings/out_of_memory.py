"""A call of unrecorded code that ran out of memory: recordings give way, and it is run again where that is safe.

Memory that recordings hold serves nobody else, so code that runs beside them may run out of memory though it would not
without them. Then they are given up, as far as nothing of theirs is alive, and the code is run once more, in ordinary
memory. That may be done only where the code has changed nothing: a piece that writes to none of its inputs, nor uses
the memory of temporaries among them again, draws no random numbers, issues no collectives, and calls no operator that
is not known to be pure (`PieceSpec.repeatable`); and only with the inputs that it had. Compiled code frees those as it
goes: where one is gone, the error is the caller's, with a word on what was given up.

In:  the inputs, noted before the call; the error.  Out: the inputs again; None where the error is the caller's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from multigraph_backend.process.interruptions import without_frames

HINT = (
    "multigraph: recordings of compiled code held memory, and were given up for this; the next attempt may succeed. "
    "limit_recordings(pool_bytes=..., keep_free=...) leaves more memory to everything else."
)
_GONE = object()


def is_behind(error: BaseException) -> bool:
    """Whether the device's memory ran out, and `error` comes of that."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, torch.OutOfMemoryError):
        found = found.__cause__
    return found is not None


class Given:
    """The inputs of a call.  Those at positions `passing` are not kept alive; others, parameters, live anyway."""

    def __init__(self, inputs: Sequence[Any], passing: Iterable[int]) -> None:
        self._inputs = list(inputs)
        for index in passing:
            if isinstance(inputs[index], torch.Tensor):
                self._inputs[index] = weakref.ref(inputs[index])

    def again(self) -> list[Any] | None:
        """The inputs; None where one is gone."""
        inputs = [self._alive(value) for value in self._inputs]
        return None if any(value is _GONE for value in inputs) else inputs

    @staticmethod
    def _alive(value: Any) -> Any:
        if not isinstance(value, weakref.ref):
            return value
        tensor = value()
        return _GONE if tensor is None else tensor


class Recordings(Protocol):
    """All recordings of a device; `tree.Tree` is that."""

    def holds_memory(self) -> bool:
        """Whether they may have memory that serves nobody else."""

    def make_way(self) -> None:
        """Give them up, and their memory as far as nothing in it is alive."""


def inputs_again(given: Given | None, error: torch.OutOfMemoryError, recordings: Recordings) -> list[Any] | None:
    """What to call the code with again.  `given`: None where it may not be."""
    if not recordings.holds_memory():
        return None
    inputs = None if given is None else given.again()
    if inputs is None:
        error.add_note(HINT)
    else:
        without_frames(error)  # they hold what the code has allocated
    recordings.make_way()
    return inputs
