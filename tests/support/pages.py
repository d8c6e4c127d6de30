"""A page of HTML taken apart, with what is wrong about its structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "hr"}
#: of SVG, whose empty elements close themselves
CLOSED = {"rect", "line"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of this element and all in it, in the order of the page."""
        return "".join(self.pieces)

    @property
    def words(self) -> str:
        """The same, with one space between any two words."""
        return " ".join(" ".join(self.pieces).split())

    def all(self, tag: str | None = None, **wanted: str) -> list[Element]:
        """Elements in it, by tag and attributes; `class_` names one class of several."""
        found = []
        for child in self.children:
            classes = child.attributes.get("class", "").split()
            others = {name: value for name, value in wanted.items() if name != "class_"}
            if (
                tag in (None, child.tag)
                and wanted.get("class_", "") in ("", *classes)
                and all(child.attributes.get(name) == value for name, value in others.items())
            ):
                found.append(child)
            found += child.all(tag, **wanted)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]
        self.wrong: list[str] = []

    def _add(self, tag: str, attributes: list[tuple[str, str | None]]) -> Element:
        names = [name for name, _ in attributes]
        if len(set(names)) < len(names):
            self.wrong.append(f"<{tag}> names an attribute twice")
        element = Element(tag, {name: value or "" for name, value in attributes})
        self.open[-1].children.append(element)
        return element

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = self._add(tag, attrs)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in CLOSED:
            self.wrong.append(f"<{tag}/> does not close itself")
        self._add(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self.open[-1].tag != tag:
            self.wrong.append(f"</{tag}> where <{self.open[-1].tag}> is open, line {self.getpos()[0]}")
        if tag in [element.tag for element in self.open[1:]]:
            while self.open.pop().tag != tag:
                pass

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.pieces.append(data)

    def handle_comment(self, data: str) -> None:
        self.wrong.append(f"a comment: {data[:40]}")

    def unknown_decl(self, data: str) -> None:
        self.wrong.append(f"a declaration: {data[:40]}")


def parse(page: str) -> tuple[Element, list[str]]:
    """The page's elements, and what is wrong: tags that are not closed, attributes named twice, comments."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    parser.wrong += [f"<{element.tag}> is not closed" for element in parser.open[1:]]
    return parser.root, parser.wrong
