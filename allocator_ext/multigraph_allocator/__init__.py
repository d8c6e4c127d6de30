"""Where the allocator's library lies, and what torch calls when it is imported.

The library itself has no dependency, and the package `multigraph` puts it in; loading it touches no driver.  `autoload`
is an entry point of the group `torch.backends`: torch calls it at the end of `import torch`.  It does nothing unless
MULTIGRAPH_ALLOCATOR is set.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

VARIABLE = "MULTIGRAPH_ALLOCATOR"


def library() -> Path:
    """The shared library, as it was installed with this package."""
    return Path(__file__).with_name("libmultigraph_allocator.so")


def autoload() -> None:
    """Make the library this process's allocator if MULTIGRAPH_ALLOCATOR=1.  Raises nothing: torch would not start.

    MULTIGRAPH_ALLOCATOR_OPTIONS names arguments of `install`, as JSON.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if said in ("", "0"):
        return
    try:
        if said != "1":
            warnings.warn(f"{VARIABLE} is 1 or 0, not {said!r}: torch's own allocator is used", stacklevel=2)
            return
        try:
            from multigraph_backend.allocator import installing
        except ModuleNotFoundError as error:
            remedy = "it needs the package multigraph (in a checkout: pip install .)"
            raise ModuleNotFoundError(f"{error}; {remedy}", name=error.name) from None

        installing.install_as_asked(os.environ)
    except Exception as error:
        with contextlib.suppress(Warning):  # where warnings are errors
            warnings.warn(f"{VARIABLE}=1 has no effect: {type(error).__name__}: {error}", stacklevel=2)
