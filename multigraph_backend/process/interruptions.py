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
    """Let go of the frames in which `error`, and what it was raised from or during, were raised: through their callers
    they hold all of a call, and the error itself, until garbage is collected."""
    found: list[BaseException | None] = [error]
    seen: set[int] = set()
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        found += [one.__cause__, one.__context__]


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
