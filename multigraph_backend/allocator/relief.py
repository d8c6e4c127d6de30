"""Memory that is given up before an allocation fails: what is asked for it, and the thread in which that happens.

The extension cannot call Python from inside of an allocation: that thread may hold a lock of torch's, which another
thread waits for that has Python's own, so that waiting for this one would stop both for good.  So a thread of ours
waits in the library, without Python's lock; it is asked, and the allocation waits for its answer, `PATIENCE` seconds at
most.  Threads that allocate while they have Python's lock ask nobody, and neither does what allocates in a capture.

In:  functions that give memory up.  Out: whether any did, to the allocation, which is then tried again; they are asked
twice at most, for what is given first may be too little.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
from collections.abc import Callable

from multigraph_backend.allocator import installing

log = logging.getLogger(__name__)

PATIENCE = 5.0

#: given a device and how many bytes it lacks, says whether it gave anything up. Called in a thread of its own, in which
#: nothing may be waited for that an allocation may be holding up
Giver = Callable[[int, int], bool]

_givers: list[Giver] = []
_lock = threading.Lock()
_thread: threading.Thread | None = None


def ask(giver: Giver) -> None:
    """From now on ask `giver` before an allocation of the installed extension fails; nothing where there is none."""
    global _thread
    installed = installing.installed()
    with _lock:
        if giver not in _givers:
            _givers.append(giver)
        if installed is None or _thread is not None:
            return
        installed.library.call("mg_torch_relief", PATIENCE)
        _thread = threading.Thread(target=_serve, args=(installed,), name="multigraph-relief", daemon=True)
        _thread.start()


def _serve(installed: installing.Installed) -> None:
    index, lacking = ctypes.c_int(), ctypes.c_size_t()
    while True:
        installed.library.call("mg_torch_relief_wait", ctypes.byref(index), ctypes.byref(lacking))
        if index.value < 0:
            return
        gave = False
        try:
            for giver in list(_givers):
                try:
                    gave = giver(index.value, lacking.value) or gave
                except Exception:
                    log.exception("memory could not be given up before an allocation fails")
        finally:
            installed.library.call("mg_torch_relief_done", int(gave))


@atexit.register
def _end() -> None:
    installed = installing.installed()
    if installed is not None and _thread is not None:
        installed.library.call("mg_torch_relief", 0.0)
