"""Where Python 3.11 runs in circles while an exception waits for a thread, and the way out.

An exception that is sent to another thread waits until that thread runs Python again; one that is in C code may never.
Until then a flag of the interpreter is up, for all threads.  In 3.11 a thread that is profiled or traced and calls a
function while the flag is up looks at it again and again and never gets into the function: `cProfile`, a debugger or a
measurement of coverage would stop the program for good.

So while an exception waits, a thread looks whether another one is not getting into a function, and if so takes the flag
down by an exception for itself.  The first one still waits: the thread that it is for meets it as soon as another one
wants Python's lock.
"""

from __future__ import annotations

import _thread
import ctypes
import dis
import sys
import threading
import time

from multigraph_backend.process import frames

#: Python versions that do
AFFECTED = sys.version_info < (3, 12)

_PERIOD = 0.05  # seconds between two looks
_LOOKS = 4  # in a row that find a thread at the same beginning of a function
_RESUME = dis.opmap.get("RESUME")


_Beginning = tuple[int, int, int]  # thread, frame, instruction


class _Met(BaseException):
    pass


def look_out(thread: int, waiting: threading.Lock) -> None:
    """To be called before an exception is sent to `thread`; `waiting` is locked until that has met it."""
    if AFFECTED:
        _thread.start_new_thread(_look, (thread, waiting))  # one of `threading` may be profiled itself


def _look(thread: int, waiting: threading.Lock) -> None:
    seen: dict[_Beginning, int] = {}
    while waiting.locked():
        time.sleep(_PERIOD)
        if thread not in (places := _beginnings()):
            return
        seen = {place: seen.get(place, 0) + 1 for place in places.values() if place is not None}
        if seen and max(seen.values()) >= _LOOKS:
            _take_down()
            return


def _beginnings() -> dict[int, _Beginning | None]:
    """Each other thread, and where it is if that is the beginning of a function."""
    own = _thread.get_ident()
    return {
        thread: (thread, place.frame, place.at) if place.code.co_code[place.at] == _RESUME else None
        for thread, place in frames.innermost().items()
        if thread != own
    }


def _take_down() -> None:
    """Meet an exception: Python takes its flag down with any."""
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(_thread.get_ident()), ctypes.py_object(_Met))
        for _ in range(1000):
            pass
    except _Met:
        pass
