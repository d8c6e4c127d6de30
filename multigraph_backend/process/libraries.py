"""Libraries that are loaded for whoever loads them, in a process that loads all libraries for everybody.

With RTLD_GLOBAL among `sys.setdlopenflags`, as some of MPI's libraries need it, what one library defines takes the
place of what the next one defines by the same name.  Inductor's kernels have one and the same name, each in its own.

In:  a function that loads such libraries.  Out: the same, with the flag set aside for as long.

The flag is the process's: what another thread loads meanwhile is loaded so, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def for_everybody() -> bool:
    """Whether this process loads libraries for everybody."""
    return hasattr(sys, "getdlopenflags") and bool(sys.getdlopenflags() & os.RTLD_GLOBAL)


@contextlib.contextmanager
def for_nobody_else() -> Iterator[None]:
    """Libraries that are loaded inside take nobody's place."""
    if not for_everybody():
        yield
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags & ~os.RTLD_GLOBAL)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)
