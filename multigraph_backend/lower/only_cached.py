"""A compile that takes its code from torch's caches, and ends where they have none.

It runs beside a program that goes on, so it must not come to where torch traces: a trace sets random number generators
back to what they were before it, for one.  AOTAutograd asks its cache first.  Asked in vain, it copies the table of
decompositions that it was given, before it touches anything that other threads see (torch 2.11 to 2.15); so it is given
one that cannot be copied.

Out: `RefusingTable` and `refuse`, to be given to Inductor's `compile_fx`; both raise `NotCached`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class NotCached(Exception):
    """torch's caches lack the code that was to come from them alone."""


class RefusingTable(dict[Any, Any]):
    """Decompositions that end a compile where AOTAutograd begins to trace."""

    def __bool__(self) -> bool:  # an empty one would be passed over
        return True

    def __iter__(self) -> Iterator[Any]:
        raise NotCached("AOTAutograd's cache has no code for it")

    def keys(self) -> Any:
        raise NotCached("AOTAutograd's cache has no code for it")


def refuse(*args: Any, **kwargs: Any) -> Any:
    """In place of Inductor's compile of one graph."""
    raise NotCached("Inductor would generate code")
