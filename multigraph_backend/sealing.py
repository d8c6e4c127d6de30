"""Whether anything may still be compiled or recorded: `seal()` says no, from the moment that a server is warm.

A late compile stalls the request that needs it, and a late recording takes memory that nobody planned for.  Both are
asked for here, right before they begin; nothing is asked at a call that runs what there is.

In:  what is about to be made.  Out: whether it may be, in one line for the log or an error where it may not.
"""

from __future__ import annotations

import logging
from typing import Literal, get_args

from multigraph_backend import events

log = logging.getLogger(__name__)

Then = Literal["log", "refuse", "raise"]

_then: Then | None = None


class Sealed(RuntimeError):
    """Something would have been compiled or recorded after `seal(then="raise")`."""


def seal(then: Then = "log") -> None:
    """From now on nothing is compiled or recorded unnoticed, in the whole process; `unseal()` ends it.

    `then`, where a call needs code or a recording that is not there:

    "log"     it is made, with one line in the log
    "refuse"  it is not: the call runs the next safer form (generic for a variant, the graph as it is where there is
              none, code without its recording), with one line in the log for each
    "raise"   the call raises `Sealed`; where Dynamo traces, torch's error has it as its `inner_exception`

    Each is counted as `after_seal` in `stats()`.  Code that torch's caches have is loaded as before, for that compiles
    nothing.  Backwards of what has run forward are compiled all the same: nothing else could give its gradients.

    Raises ValueError for another word.
    """
    if then not in get_args(Then):
        raise ValueError(f"seal(then={then!r}): one of {', '.join(map(repr, get_args(Then)))}")
    global _then
    _then = then


def unseal() -> None:
    """Let things be compiled and recorded again."""
    global _then
    _then = None


def sealed() -> bool:
    """Whether `seal()` holds."""
    return _then is not None


def refused(what: str) -> str | None:
    """Why `what` may not be made now, None where it may.  Raises `Sealed`."""
    if _then is None:
        return None
    events.count("after_seal")
    line = f"{what} after seal()"
    if _then == "raise":
        raise Sealed(f"{line}: warm it up before, or seal with then='refuse'")
    events.warn_once(line, "%s%s", line, "" if _then == "log" else ": refused")
    return None if _then == "log" else line
