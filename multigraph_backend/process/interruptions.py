"""Telling an error of the code that ran from an exception that only arrived while it did.

Ctrl-C, an alarm, an exception that another thread sends, and whatever a handler of a signal raises are the caller's: no
part may take them for a failure of what it was doing, and fall back.
"""

from __future__ import annotations

import functools
import signal
from types import CodeType
from typing import Any


def without_frames(error: BaseException) -> None:
    """Let go of the frames in which `error` was raised: through their callers they hold all of a call, and the
    error itself, until garbage is collected."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__


def from_outside(error: BaseException) -> bool:
    """Whether `error` is none of the code's own that ran: no `Exception`, or raised by a handler of a signal."""
    if not isinstance(error, Exception):
        return True
    handlers = _handlers()
    traceback = error.__traceback__
    while handlers and traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _handlers() -> set[CodeType]:
    """The code of all handlers of signals that are Python functions."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        handler = getattr(handler, "__func__", handler)
        called = getattr(type(handler), "__call__", None)  # noqa: B004 - of an object that is a handler
        found |= {code for of in (handler, called) if isinstance(code := getattr(of, "__code__", None), CodeType)}
    return found
