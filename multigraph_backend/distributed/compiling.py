"""What a compile owes to the other ranks: it is done once a host, and never lets them wait on the device.

In:  a text that says what is compiled, and for how long it is worth to wait for another process that compiles the same.
Out: a lock, and knobs of Inductor.

The lock is one of the operating system on a file beside Inductor's caches: the first rank compiles, the others then
find its result there.  It goes with the process that holds it, so a rank that dies blocks nobody; one that hangs is
waited for until the patience ends.  Where there can be no such lock (a read-only folder), each compiles on its own.
Devices are part of what is compiled: torch's caches hold code for one device.

Measuring kernels waits for the whole device, and with it for collectives that other ranks have yet to enter; with two
groups in flight that can be a deadlock.  So under a process group Inductor's benchmarks are off, or run in a worker
process, unless the user sets the knob himself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from multigraph_backend import _compat, events
from multigraph_backend.process import rank

log = logging.getLogger(__name__)

PERIOD = 0.02  # seconds between two tries
PATIENCE = 300.0  # seconds, where a compile has no limit

#: knobs that measure on the device while other ranks may wait, and what they are under a process group
QUIET: Mapping[str, object] = {
    "shape_padding": False,
    "autotune_in_subproc": True,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_epilogue_fusion": False,
    "benchmark_combo_kernel": False,
}


def quiet(knobs: Sequence[tuple[str, object]]) -> tuple[tuple[str, object], ...]:
    """`knobs` of the user, and what keeps a compile from waiting for the device where other ranks may wait for it."""
    if not rank.live():
        return tuple(knobs)
    known, chosen = _compat.inductor_config_names(), dict(knobs)
    more = [(name, value) for name, value in QUIET.items() if name in known and name not in chosen]
    return tuple(sorted([*knobs, *more], key=lambda knob: knob[0]))


def patience(limit: float | None) -> float:
    """How long to wait for another rank's compile, of `limit` seconds in all: then there is time for an own one."""
    return PATIENCE if limit is None else limit / 2


@contextlib.contextmanager
def once_a_host(what: str, seconds: float) -> Iterator[None]:
    """Hold the lock of `what` in the body, where other ranks are; after `seconds` of waiting, or where there can be no
    lock, go on without."""
    if not rank.live() or _compat.missing("one compile"):
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(_path(what), seconds))
        except (OSError, TimeoutError) as error:
            log.info("compiled without the lock of this host: %s", error)
        yield


def _path(what: str) -> Path:
    folder = Path(_compat.cache_dir()) / "multigraph-locks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.lock"


@contextlib.contextmanager
def _locked(path: Path, seconds: float) -> Iterator[None]:
    """Raises OSError where the file cannot be locked, TimeoutError where another process holds it for `seconds`."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline, waited = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process has compiled the same for {seconds:g} s") from None
                waited = True
                time.sleep(PERIOD)
        if waited:
            events.count("waited_for_ranks")
        yield
    finally:
        os.close(file)  # and the lock goes with it
