"""Which multigraph this is, for keys of caches that outlive the process.

torch's caches keep what this package made of a graph, and how it was compiled.  Another version of the package may make
something else of the same graph, more often than not because it was wrong before; so what one has cached is nothing
for another.  A version number says too little of a checkout that is worked on.

Guarantee: the same text in all processes that run the same files.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def key() -> str:
    """A digest of the package's Python files, read once in a process (milliseconds); "unknown" where there are none."""
    digest = hashlib.sha256()
    files = sorted(_PACKAGE.rglob("*.py"))
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16] if files else "unknown"
