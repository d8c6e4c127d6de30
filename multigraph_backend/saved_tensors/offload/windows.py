"""From where to where an offloaded tensor takes memory of the device: its window.

    forward    offload .... wait        the copy to the host runs in between, beside the steps; then its memory is free
    backward   prefetch ... needed      and here the copy back; its memory is taken from the prefetch on

Three tensors of 4 bytes leave at the steps 0, 1 and 2 of a forward of ten steps of 1 second each; a copy takes 1.5
seconds, one after the other, and the user lets one further tensor leave before a copy is waited for (`waiting=1`):

    waits(...)      1, 2, 2     where each is waited for at the soonest: there the device would stand still for it
    arrivals(...)   2, 3, 5     where each copy has arrived by itself
    later(0 bytes)  1, 2, 2     with no room for more bytes at any step: the device stands still for the copies
    later(4)        2, 3, 2     with room for one tensor more: the first two take it, one after the other
    later(8)        2, 5, 5     with room for two: the last two can be waited for at one place
    later(12)       5, 5, 5     with room for three: all of them can

In backward the same is done from the other end: `prefetches` begins each copy as late as the user's bounds (`ahead`)
say, `departures` is where it has to begin to be there in time, and `earlier` moves towards that where there is room.

In: where tensors leave and are needed, as positions of steps; when each step begins and what each copy takes, in
seconds; how many bytes there is room for at each step.  Out: positions at which copies are waited for, and prefetched.

So time is bought with memory that is there anyway.  The user's bounds give the shortest windows, and with them an
estimated peak; a window is then made longer, until the copy fits into it, as long as the peak does not rise.  Windows
that can begin or end at one place do: each such place is a cut for recordings.

Invariant: no window is shorter than the user's bounds or the copy allow, none is longer than the copy needs unless it
ends with another one, and the estimated peak is the one of the shortest windows.  Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

NEAR = 250e-6  # seconds between two waits, below which a recording of what is between them gains nothing


def arrivals(packed: Sequence[int], seconds: Sequence[float], times: Sequence[float]) -> list[int]:
    """For each offload, in order, the first position at which its copy has arrived: copies run one after the other.

    `packed`: positions; `times`: when each step begins, and behind them when the last one ends.
    """
    found, clock = [], 0.0
    for at, taken in zip(packed, seconds, strict=True):
        clock = max(clock, times[at]) + taken
        found.append(max(bisect_left(times, clock), at))
    return found


def waits(packed: Sequence[int], waiting: Sequence[int], end: int) -> list[int]:
    """Where each copy is waited for at the soonest: when `waiting` further ones leave; at once, if there are none."""
    found = []
    for index, further in enumerate(waiting):
        later = index + max(further, 1)
        found.append(packed[later] if later < len(packed) else min(packed[index], end))
    return found


def departures(needed: Sequence[int], seconds: Sequence[float], times: Sequence[float]) -> list[int]:
    """For each reload, in order, the last position from which its copy still arrives in time."""
    found: list[int] = []
    latest = float("inf")
    for at, taken in zip(reversed(needed), reversed(seconds), strict=True):
        latest = min(times[at], latest) - taken
        found.append(max(bisect_right(times, latest) - 1, 0) if latest >= 0 else 0)
    return [min(at, begin) for at, begin in zip(needed, reversed(found), strict=True)]


def prefetches(needed: Sequence[int], departing: Sequence[int], ahead: Sequence[int]) -> list[int]:
    """Where each copy begins at the latest: no more than `ahead` reloads before it is needed."""
    found: list[int] = []
    for index, further in enumerate(ahead):
        at = max(departing[index], needed[max(index - further, 0)])
        found.append(max(at, found[-1]) if found else at)
    return found


def together(needed: Sequence[int], times: Sequence[float]) -> list[int]:
    """`needed` with those that follow closely moved to the first of them: they are waited for at one place."""
    found: list[int] = []
    for at in needed:
        near = found and times[at] - times[found[-1]] <= NEAR
        found.append(found[-1] if near else at)
    return found


def later(room: Sequence[int], ends: Sequence[int], wanted: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """`ends` moved on towards `wanted`, as far as `room` (bytes, for each step) goes; then together."""
    left, found = list(room), list(ends)
    for index, size in enumerate(sizes):
        found[index] = _moved(left, found[index], max(wanted[index], found[index]), size, partly=True)
    for index in reversed(range(len(found) - 1)):
        found[index] = _moved(left, found[index], max(found[index + 1], found[index]), sizes[index])
    return found


def earlier(room: Sequence[int], starts: Sequence[int], wanted: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """`starts` moved back in the same way, in the order in which the copies run."""
    left, found = list(room), list(starts)
    for index, size in enumerate(sizes):
        first = max(wanted[index], found[index - 1] if index else 0)
        found[index] = _moved(left, found[index], min(first, found[index]), size, partly=True)
    for index in range(1, len(found)):
        found[index] = _moved(left, found[index], min(found[index - 1], found[index]), sizes[index])
    return found


def _moved(left: list[int], at: int, to: int, size: int, partly: bool = False) -> int:
    """Where an end of a window comes to lie that is to move from `at` to `to`; what it takes is taken from `left`."""
    between = range(at, to) if to >= at else range(at - 1, to - 1, -1)
    fitting = 0
    for position in between:
        if left[position] < size:
            break
        fitting += 1
    if fitting < len(between) and not partly:
        return at
    for position in between[:fitting]:
        left[position] -= size
    return at + fitting if to >= at else at - fitting
