"""A capture from its begin to its end, whatever arrives in between.

A capture that nobody ends leaves the stream capturing, and a process whose stream captures can do nothing on its device
any more.  So it is ended after every kind of exception, also those that come from outside: Ctrl-C, an alarm, an
exception that another thread sends.  These are the caller's, who gets them once the capture has ended; an error of
the captured code itself only means that it cannot be recorded.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

_TRIES = 8


@dataclass
class Outcome:
    """What came of a capture: its result, or the first problem, or the first one from outside.

    broken: it did not begin, or did not end, as it should.
    """

    result: Any = None
    problem: BaseException | None = None
    broken: bool = False

    def met(self, error: BaseException) -> None:
        if error.__traceback__ is not None:  # the frame that caught it holds this outcome, and would be held by it
            error.__traceback__ = error.__traceback__.tb_next
        if self.problem is None or (from_outside(error) and not from_outside(self.problem)):
            self.problem = error


def captured(
    begin: Callable[[], object], function: Callable[[], Any], end: Callable[[], object], capturing: Callable[[], bool]
) -> Outcome:
    """Run `function` between `begin` and `end`.  Raises nothing; the stream captures no more when it returns."""
    outcome = Outcome()
    try:
        try:
            begin()
            outcome.result = function()
        except BaseException as error:
            outcome.met(error)
        end()
    except BaseException as error:
        outcome.met(error)
        outcome.broken = True
    for _ in range(_TRIES if outcome.broken else 0):
        try:
            if not capturing():
                break
            end()
        except BaseException as error:  # torch says that the capture was invalidated, which ends it
            outcome.met(error)
    return outcome


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
