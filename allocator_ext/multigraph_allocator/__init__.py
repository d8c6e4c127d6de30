"""Where the allocator's library lies.  The library has no dependency; loading it touches no driver."""

from __future__ import annotations

from pathlib import Path


def library() -> Path:
    """The shared library, as it was installed with this package."""
    return Path(__file__).with_name("libmultigraph_allocator.so")
