"""Tuned kernels, under the name by which another process looks for them.

Which configuration of a Triton kernel has won is kept beside its source, in a file whose name is made of that of the
source and of `cache_key_tag`, by which multigraph tells compiles of one graph apart.  Inductor's pool of processes that
compile kernels is sent no such tag, so kernels that come from there look without it; a kernel that was made and tuned
without a pool has written with it.  A worker has no pool, and the process that takes its code may have one: without
this, such kernels are measured again in the call that runs them first (torch 2.11 to 2.15).

In: what torch noted as tuned during a compile, whose tag is in force.  Out: the same files under the other name, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from multigraph_backend import _compat

_POOLS_TAG = "TORCH_COMPILE_CACHE_KEY_TAG"  # all that its processes know of a tag


def hand_over(artifacts: Iterable[tuple[str, str]]) -> int:
    """How many files there are more.  What cannot be written is tuned again where it is needed."""
    written = 0
    for place in {_compat.cache_entry(kind, key) for kind, key in artifacts if kind == "autotune"}:
        source = next((source for source in place.parent.glob("*.py") if _name_of(source) == place), None)
        if source is None:
            continue
        with _compat.compiler_config.patch(cache_key_tag=os.environ.get(_POOLS_TAG, "")):
            other = _name_of(source)
        if other is None or other.exists():
            continue
        with contextlib.suppress(OSError):
            _copy(place, other)
            written += 1
    return written


def _name_of(source: Path) -> Path | None:
    """Where a kernel's configuration is kept, under the tag that is in force."""
    cache = _compat.AutotuneCache.create({}, str(source), "")
    return None if cache is None or cache.local_cache is None else Path(cache.local_cache[1])


def _copy(place: Path, other: Path) -> None:
    """Whole, or not at all: others may read it at any time."""
    handle, name = tempfile.mkstemp(dir=other.parent, prefix=".multigraph-")
    os.close(handle)
    try:
        shutil.copyfile(place, name)
        os.replace(name, other)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
