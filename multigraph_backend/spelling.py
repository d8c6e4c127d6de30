"""What errors say of a word or a value that was given and is not right.

In:  what the user wrote, and what is known.  Out: text for the end of a message.  Pure; every part may use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` with the nearest of `known`, or nothing if none is near `word`."""
    nearest = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def shown(value: object) -> str:
    """A value that was given, as an error's text shows it: shortened, and with its type."""
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:197] + '...'} ({type(value).__name__})"
