"""Which saved tensors are packed, offloaded or computed again, so that what is left fits a number of bytes.

In: moves, each of which makes one saved tensor smaller and costs an estimated time; how many bytes are saved now, and
how many may be.  Out: the moves that are made, in order.

Moves are made one after the other, those first that cost the least for each byte; for one that loses precision a
second counts as `LOSSY` seconds; those that are to come `last` follow all others.  One that would raise the estimated
peak of the step is left out.

    20 bytes are saved, 10 may be              price
    compute g again   saves 6 for 1.2 seconds    0.2   made: 14 are left
    offload h         saves 8 for 4 seconds      0.5   would raise the estimated peak: not made
    cast h            saves 4 for 1 second, x 4  1.0   made: 10 are left, which is enough
    bits of m         saves 2 for 2.4 seconds    1.2   not needed any more

The order does not depend on the budget: a smaller one begins with the same moves, and goes further.

Invariant: so a smaller budget never saves more, and never has a higher estimated peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LOSSY = 4.0  # how many seconds one second counts for, where precision is lost
_GROUPS = 16  # moves are tried together in so many groups: estimating takes time
_ROUNDS = 3


@dataclass(frozen=True)
class Budget:
    """What may be saved: a number of bytes, or a fraction of what is saved without a budget."""

    bytes: int | None = None
    fraction: float | None = None

    @classmethod
    def of(cls, value: int | float) -> Budget:
        """Raises ValueError or TypeError."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError("a budget is a number of bytes, or a fraction")
        if isinstance(value, int):
            if value < 0:
                raise ValueError("a budget of bytes is 0 or more")
            return cls(bytes=value)
        if not 0 <= value <= 1:
            raise ValueError("a fraction is from 0.0 to 1.0; whole numbers are bytes")
        return cls(fraction=value)

    def goal(self, saved: int) -> int:
        """Bytes, where `saved` are saved without a budget."""
        return self.bytes if self.bytes is not None else int(saved * (self.fraction or 0.0))

    def __str__(self) -> str:
        return f"{self.bytes} bytes" if self.bytes is not None else f"{self.fraction} of what is saved"


@dataclass(frozen=True)
class Move:
    """`unit` becomes `saves` bytes smaller, for `seconds` in a step; `way`: an index of the caller's.

    `last`: it is to be made where no other is left.
    """

    unit: str
    way: int
    saves: int
    seconds: float
    lossy: bool = False
    last: bool = False

    @property
    def price(self) -> float:
        return self.seconds * (LOSSY if self.lossy else 1.0) / max(self.saves, 1)


class Plan(Protocol):
    """What moves are made on."""

    def make(self, move: Move) -> bool:
        """Make it, if that is possible beside those that are made."""

    def undo(self, move: Move) -> None:
        """As if it had not been made."""

    def peak(self) -> int:
        """The estimated peak of the step."""


def choose(moves: Sequence[Move], saved: int, goal: int, plan: Plan, most: int | None = None) -> list[Move]:
    """Make moves on `plan` until no more than `goal` of `saved` bytes are left and the peak is no more than `most`, or
    none is left to make."""
    order = sorted((move for move in moves if move.saves > 0), key=lambda move: (move.last, move.price))  # stable
    first = sum(not move.last for move in order)
    groups = [*_parted(order[:first]), *_parted(order[first:])]
    made: dict[str, Move] = {}
    peak = plan.peak()
    for _ in range(_ROUNDS):
        before = len(made)
        for group in groups:
            if saved <= goal and (most is None or peak <= most):
                return list(made.values())
            for part in [group] if len(group) == 1 else [group, *([move] for move in group)]:
                new = _made(part, made, plan)
                if not new:
                    continue
                found = plan.peak()
                if found <= peak:
                    peak = found
                    made.update({move.unit: move for move in new})
                    saved -= sum(move.saves for move in new)
                else:
                    for move in reversed(new):
                        plan.undo(move)
        if len(made) == before:
            break
    return list(made.values())


def _parted(order: Sequence[Move]) -> list[Sequence[Move]]:
    size = max(1, len(order) // _GROUPS)
    return [order[start : start + size] for start in range(0, len(order), size)]


def _made(moves: Sequence[Move], made: dict[str, Move], plan: Plan) -> list[Move]:
    new: list[Move] = []
    for move in moves:
        if move.unit not in made and all(move.unit != other.unit for other in new) and plan.make(move):
            new.append(move)
    return new
