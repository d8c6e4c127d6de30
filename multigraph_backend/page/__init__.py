"""The account of `explain()` as one page of HTML that a browser shows without any network.

`contents` arranges the account for reading (what to look at first, graphs, recordings as a tree), with numbers as
people read them from `figures`; `drawing` lays out memory over addresses and time; `template.html` puts all of it on
the page, with `style.css` and `script.js` inside of it.

In:  the account as plain data (`Explanation.to_dict()`), so that nothing here asks torch or the runtime for anything.
Out: text.  Guarantees: nothing is loaded from anywhere, and a policy in the page keeps browsers to that; whatever
comes from the program (names, paths, conditions, reasons) is text and never markup; without JavaScript everything can
be read, with it also searched.

    account = {"regions": [{"function": "f", ...}], ...}   ->   <!doctype html> ... <h3>f</h3> ...
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Iterable, Mapping
from typing import Any

from multigraph_backend.page import contents, figures


def render(
    account: Mapping[str, Any],
    stats: Mapping[str, int] | None = None,
    title: str = "multigraph",
    about: Mapping[str, str] | None = None,
    said: Iterable[str] = (),
) -> str:
    """The page.  `stats`: counts of the process; `about`: facts for its head (versions, time); `said`: lines that are
    shown where the account is empty."""
    import jinja2  # torch depends on it; most programs never come here
    from markupsafe import Markup

    files = importlib.resources.files(__package__)
    template, style, script = (
        files.joinpath(name).read_text(encoding="utf-8") for name in ("template.html", "style.css", "script.js")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters |= {"number": figures.number, "bytes": figures.size, "seconds": figures.seconds}
    return environment.from_string(template).render(
        page=contents.arrange(account, stats or {}),
        title=title,
        about=dict(about or {}),
        said=list(said),
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; "
        "form-action 'none'",
    )


def _digest(text: str) -> str:
    """What a policy calls an inline part by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_CONTROLS = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
_DIRECTIONS = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_UNSEEN = dict.fromkeys(_CONTROLS | _DIRECTIONS | {*range(0xD800, 0xE000)}, "\N{REPLACEMENT CHARACTER}")


def _shown(value: object) -> object:
    """Text of the program without what no page may hold (halves of surrogate pairs) and no reader sees (control
    characters, those that turn the direction of text around)."""
    return value.translate(_UNSEEN) if type(value) is str else value
