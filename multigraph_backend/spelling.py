"""What errors say of a word or a value that was given and is not right.

In:  what the user wrote, and what is known.  Out: text for the end of a message.  Pure; every part may use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`` (did you mean 'x'?)`` with the nearest of `known`, or nothing if none is near `word`."""
    found = nearest(word, known, cutoff)
    return f" (did you mean {found!r}?)" if found is not None else ""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `known` that is most like `word`, whatever the case of letters, and with or without underscores."""
    plain: dict[str, str] = {}
    for name in known:
        plain.setdefault(_plain(name), name)
    found = difflib.get_close_matches(_plain(word), list(plain), n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def _plain(word: str) -> str:
    return word.casefold().replace("-", "").replace("_", "")


def shown(value: object) -> str:
    """A value that was given, as an error's text shows it: shortened, and with its type."""
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:197] + '...'} ({type(value).__name__})"
