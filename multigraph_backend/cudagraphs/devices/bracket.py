"""A capture from its begin to its end, whatever arrives in between.

A capture that nobody ends leaves the stream capturing, and a process whose stream captures can do nothing on its device
any more.  So it is ended after every kind of exception, also those that come from outside: Ctrl-C, an alarm, an
exception that another thread sends.  These are the caller's, who gets them once the capture has ended; an error of
the captured code itself only means that it cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from multigraph_backend.process.interruptions import from_outside

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
