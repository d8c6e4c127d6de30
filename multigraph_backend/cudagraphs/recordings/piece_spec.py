"""What is known of a piece of compiled code before it is called: plain, frozen facts.

In:  what was read off the graph and the generated code, and what the user wants.  Out: a `PieceSpec`, which the rest of
the runtime reads and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: compiled code as Inductor calls it: with a list of inputs, which the callee clears
Boxed = Callable[[list[Any]], Sequence[Any]]

MOST = 5


@dataclass(frozen=True)
class PieceSpec:
    """names: of its inputs, for messages.  visible: per output, whether a user may hold it.  traces: where the user's
    code first uses each input, as far as that is known; empty: of none.  static: positions whose addresses are expected
    to stay.  mutated: positions that it changes.  reused: positions of temporaries, whose memory it may use for
    something else.  constants: tensors that the code holds itself.  label: what messages call it.  random: whether it
    draws random numbers.  required: whether a call that runs unrecorded after the first is an error.  must_pay: whether
    a recording that costs more than it saves is given up.  most: recordings at one key after the same parent, or as
    deep in a step, before inputs at new addresses are copied.  groups: names of the process groups whose collectives
    it issues.  copies: whether what a user may hold is never memory of the pool, but a copy.  repeatable: whether its
    code, where it ended with an error, may be run again: it changes nothing but what it returns.  fresh: whether
    inputs that are not static are made for each call, as by padding: that one comes at the same address twice says
    nothing.  unread: positions that the code does not read, which may hold anything.  given: of `reused`, positions of
    what the user has given, whose memory it leaves as it is.
    """

    names: tuple[str, ...]
    visible: tuple[bool, ...]
    traces: tuple[str | None, ...] = ()
    static: frozenset[int] = frozenset()
    mutated: frozenset[int] = frozenset()
    reused: frozenset[int] = frozenset()
    constants: tuple[torch.Tensor, ...] = ()
    is_backward: bool = False
    label: str = "a piece"
    random: bool = True
    required: bool = False
    must_pay: bool = False
    most: int = MOST
    groups: tuple[str, ...] = ()
    copies: bool = False
    repeatable: bool = False
    fresh: bool = False
    unread: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()

    def trace(self, index: int) -> str | None:
        """Where the user's code first uses input `index`, if that is known."""
        return self.traces[index] if self.traces else None
