"""What a training step may need in all, as the user says it; the rules by which that is reached where he gives none.

    {"saved_tensors": "auto", "memory_goal": "30 GiB"}      text with a unit, bytes as an integer, a fraction of the
                                                            device as a float
    {"memory_goal": {"peak": 0.9, "optimizer": 8}}          with what cannot be seen when the first step is compiled
    {"saved_tensors": "auto"}                               no goal: only what costs nothing

In: a value of the option.  Out: a frozen `Goal`; the default rules for a kind of device.

Invariant: a `Goal` is plain data and says nothing about a process; what a process holds is `reckoning`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multigraph_backend.saved_tensors.rules import SMALL_BYTES, Bits, Match, Offload, Rule, Scaled
from multigraph_backend.spelling import did_you_mean, shown

AUTO = "auto"
KEYS = ("peak", "optimizer", "calls", "gradients_in_forward")
LONG = 8 << 20  # bytes from which on a copy to the host is worth its cut in a recording
_UNITS = {
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate(("", "k", "m", "g", "t"))},
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)},
}
_PEAK = 'a goal is text with a unit ("30 GiB", "30GB"), bytes (an integer), or a fraction of the device (0.0 to 1.0)'


@dataclass(frozen=True)
class Goal:
    """The most that a step may need at its peak, of a device or of a counted CPU, parameters and all.

    bytes, fraction: that much, or that much of the device's memory; neither: as little time as possible
    optimizer: bytes of an optimizer's state for each number of a trained parameter; None: read off the optimizer
    calls: how many calls of a graph wait for their backward at one time
    gradients_in_forward: whether gradients of the step before may be there in the forward
    auto: the rules are `default_rules`
    """

    bytes: int | None = None
    fraction: float | None = None
    optimizer: float | None = None
    calls: int = 1
    gradients_in_forward: bool = True
    auto: bool = False

    @classmethod
    def of(cls, value: object) -> Goal:
        """Raises ValueError or TypeError, which say what is accepted."""
        if not isinstance(value, Mapping):
            return cls(**_peak(value))
        for key in value:
            if key not in KEYS:
                raise ValueError(f"a goal has no {key!r}{did_you_mean(str(key), KEYS)}; it has {', '.join(KEYS)}")
        read: dict[str, Any] = {} if value.get("peak") is None else _peak(value["peak"])
        optimizer, calls = value.get("optimizer"), value.get("calls", 1)
        forward = value.get("gradients_in_forward", True)
        if optimizer is not None and (not _number(optimizer) or not 0 <= optimizer < 1024):
            raise ValueError(
                f'"optimizer" is bytes for each number of a parameter (8 for Adam), got {shown(optimizer)}'
            )
        if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
            raise ValueError(f'"calls" is a number from 1 on, got {shown(calls)}')
        if not isinstance(forward, bool):
            raise ValueError(f'"gradients_in_forward" is True or False, got {shown(forward)}')
        if "peak" not in value:
            raise ValueError('a goal as a dict has a "peak"; None stands for as little time as possible')
        return cls(**read, optimizer=optimizer, calls=calls, gradients_in_forward=forward)

    def wanted(self, memory: int) -> int | None:
        """The goal in bytes on a device with so much memory; None where there is none."""
        return self.bytes if self.fraction is None else int(memory * self.fraction)

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.fraction} of the device"
        return "as little time as possible" if self.bytes is None else size(self.bytes)


def default_rules(device: str, goal: bool = True) -> tuple[Rule, ...]:
    """What may be done for "auto", on a device of this type; computing again needs no rule.

    Blocks of int8: in 200 steps of a language model they ended no higher than unpacked, as did fp8, whose error is
    eight times as large for next to the same bytes (benchmarks/results/saved_tensors_loss_curve.json).  Nothing of
    this is free, so without a `goal` there is no rule.
    """
    if not goal:
        return ()
    packs = (Rule(Match(dtype="bool", min_bytes=SMALL_BYTES), Bits()), Rule(Match(), Scaled("int8", per=64)))
    if device != "cuda":
        return packs
    return (*packs, Rule(Match(min_bytes=LONG), Offload()))


def size(count: int) -> str:
    """Bytes, for reading."""
    sign, count = ("-" if count < 0 else ""), abs(count)
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= one:
            return f"{sign}{count / one:.2f} {unit}"
    return f"{sign}{count} byte" + ("" if count == 1 else "s")


def _peak(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", value.casefold())
        if found is None:
            raise ValueError(f"{_PEAK}, got {shown(value)}")
        whole, _, part = found[1].partition(".")
        one = _UNITS[found[2]]
        return {"bytes": int(whole) * one + int(part or 0) * one // 10 ** len(part)}
    if not _number(value):
        raise TypeError(f"{_PEAK}, got {shown(value)}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a goal of bytes is 0 or more")
        return {"bytes": value}
    assert isinstance(value, float)
    if not 0 <= value <= 1:
        raise ValueError("a fraction of the device is from 0.0 to 1.0; whole numbers are bytes")
    return {"fraction": value}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
