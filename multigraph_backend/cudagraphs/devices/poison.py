"""The bytes of `MULTIGRAPH_DEBUG=poison`, and the memory of a pool that they go to.

In:  the segments of a pool, and the ranges of it that are alive.  Out: the ranges between them, which nobody may read.
The byte makes NaN in every floating-point type, and -1 in integers.  When a pool is filled is decided in
`recordings.poison`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

BYTE = 0xFF


def others(segments: Iterable[tuple[int, int]], kept: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each range of `segments` outside of `kept`, which may overlap one another."""
    ordered = sorted(kept)
    for start, nbytes in sorted(segments):
        at, end = start, start + nbytes
        for address, size in ordered:
            if address >= end:
                break
            if address > at:
                yield at, address - at
            at = max(at, address + size)
        if at < end:
            yield at, end - at
