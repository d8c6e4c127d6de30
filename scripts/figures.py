"""Figures for readers, from benchmarks/results/*.json: the README's table and picture, and docs/benchmarks.md.

    python scripts/figures.py            write README.md's table, docs/figures-*.svg and docs/benchmarks.md's tables
    python scripts/figures.py --check    exit 1, with what differs, where one of them is not up to date
    python scripts/figures.py --print    show the tables

No figure is typed in by hand. The README's rows are named in `HEADLINES`: a result file, and in it the row of
multigraph, the row of stock and perhaps of a peer, all of one run. docs/benchmarks.md shows all result files; each says
itself which columns its rows have and which rows are headlines, and only these are shown, all rows where none is. Files
without rows (the matrix of versions) are no business of this script.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import xml.sax.saxutils
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


Where = Mapping[str, object]


class NotUsable(ValueError):
    """A result file or a page is not as this script needs it."""


@dataclass(frozen=True)
class Headline:
    """One row of the README: `key` of the rows of `file` that `where` and one of the three choose, in `unit`.

    `over`: for each of the three, the row of the same run by which its figure is divided; then there is no unit.
    `keys`: other keys for stock and the peer, where one row holds all.  Less is better in every row.
    """

    title: str
    file: str
    key: str
    unit: str
    where: Where = field(default_factory=dict)
    ours: Where = field(default_factory=lambda: {"form": "multigraph"})
    stock: Where = field(default_factory=lambda: {"form": "stock"})
    peer: Where | None = None
    peer_name: str = ""
    over: tuple[Where, Where] | None = None
    keys: tuple[str, str] | None = None
    digits: int = 0


@dataclass(frozen=True)
class Figure:
    """A headline with its figures."""

    headline: Headline
    ours: float
    stock: float
    peer: float | None

    @property
    def ratio(self) -> float:
        """Ours over stock's."""
        return self.ours / self.stock


HEADLINES = (
    Headline(
        "Host time of a tiny recorded call",
        "replay.json",
        "host_us",
        "us",
        {"program": "tiny function"},
        peer={"form": "inductor"},
        peer_name="Inductor",
    ),
    Headline(
        "Host time of a call that copies 32 inputs",
        "replay.json",
        "host_us",
        "us",
        {"program": "32 copied inputs"},
        peer={"form": "inductor"},
        peer_name="Inductor",
    ),
    Headline(
        "Four decoder layers, calls in a row",
        "replay.json",
        "row_us",
        "us",
        {"program": "decoder, 4 layers"},
        peer={"form": "hand-made"},
        peer_name="a capture made by hand",
    ),
    Headline(
        "Four decoder layers, a call that is waited for",
        "replay.json",
        "end_us",
        "us",
        {"program": "decoder, 4 layers"},
        peer={"form": "hand-made"},
        peer_name="a capture made by hand",
    ),
    Headline(
        "The same, compiled ahead of time",
        "replay.json",
        "end_us",
        "us",
        {"program": "decoder, 4 layers"},
        ours={"form": "multigraph, ahead"},
        peer={"form": "hand-made"},
        peer_name="a capture made by hand",
    ),
    Headline(
        "To record one more batch size",
        "capture_sizes.json",
        "ms",
        "ms",
        peer={"form": "bare"},
        peer_name="a bare capture",
        digits=1,
    ),
    Headline(
        "To compile GPT-2 for eight batch sizes, on a CPU",
        "first_calls_sizes_cpu.json",
        "cpu_seconds",
        "s",
        {"model": "gpt2", "passes": "inference"},
        ours={"form": "multigraph, 8 sizes, auto"},
        stock={"form": "inductor, 8 sizes"},
        peer={"form": "multigraph, 8 sizes"},
        peer_name="no block compiled once",
        digits=1,
    ),
    Headline(
        "A decode step at a declared batch of 8",
        "variants.json",
        "us",
        "us",
        {"workload": "decoder decode", "shape": "8x1x512", "condition": "Eq", "headline": True},
        ours={},
        stock={},
        peer={},
        peer_name="`dynamic=True`",
        keys=("static_us", "dynamic_us"),
    ),
    Headline(
        "A waited decode step of a small language model, sealed",
        "decode.json",
        "us",
        "us",
        {"model": "chat", "rows": 1},
        ours={"form": "multigraph, sealed"},
        stock={"form": "reduce-overhead"},
        peer={"form": "static loop"},
        peer_name="a loop of captures by hand",
    ),
    Headline(
        "A token of a decoder whose weights torchao has made int8",
        "quantized.json",
        "us",
        "us",
        {"weights": "Int8WeightOnly", "call": "decode, 1"},
        stock={"form": "reduce-overhead"},
        peer={"form": "eager"},
        peer_name="eager",
    ),
    Headline(
        "Saved for the backward, 12 decoder blocks, fp8",
        "saved_tensors.json",
        "saved_mib",
        "MiB",
        ours={"form": "multigraph, fp8, pointwise"},
        stock={"form": "inductor, fp8"},
        peer={"form": "inductor"},
        peer_name="nothing packed",
    ),
    Headline(
        "Time of that step, over the same form unpacked",
        "saved_tensors_recorded.json",
        "step_ms",
        "x",
        ours={"form": "multigraph, fp8, pointwise"},
        stock={"form": "inductor, fp8"},
        over=({"form": "multigraph"}, {"form": "inductor"}),
        digits=3,
    ),
    Headline(
        "Memory that a capture over two streams holds",
        "allocator.json",
        "reserved_mib",
        "MiB",
        {"program": "ping-pong"},
        peer={"form": "stock, reuse"},
        peer_name="stock's reuse switch",
    ),
    Headline(
        "Reserved by a training process, two lengths",
        "memory.json",
        "reserved_mib",
        "MiB",
        {"program": "two lengths"},
        peer={"form": "inductor"},
        peer_name="Inductor, no graphs",
    ),
    Headline(
        "DDP, a training step on four GPUs",
        "distributed_training_four.json",
        "us",
        "us",
        {"work": "ddp"},
        ours={"form": "multigraph, whole"},
        stock={"form": "stock, whole"},
        peer={"form": "inductor, whole"},
        peer_name="Inductor",
    ),
    Headline(
        "FSDP2, a training step on four GPUs",
        "distributed_training_four.json",
        "us",
        "us",
        {"work": "fsdp"},
        ours={"form": "multigraph, whole"},
        stock={"form": "stock, whole"},
        peer={"form": "inductor, whole"},
        peer_name="Inductor",
    ),
)


def table(result: Mapping[str, Any], name: str = "") -> str:
    """One result file, which is called `name`: a title, the table, and where it was measured."""
    try:
        columns, rows = result["columns"], result["rows"]
        shown = [row for row in rows if row.get("headline")] or rows
        shown_columns = [column for column in columns if any(row.get(column["key"]) is not None for row in shown)]
        lines = [
            f"**{result['title']}**",
            "",
            _line(_cell(column["title"]) for column in shown_columns),
            _line("---" if column.get("digits") is None else "---:" for column in shown_columns),
            *(_line(_value(row, column) for column in shown_columns) for row in shown),
            "",
            _where(result, rows, name),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise NotUsable(f"{result.get('benchmark')}: not written by a benchmark of this checkout: {error!r}") from error
    return "\n".join(lines)


def _where(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], name: str) -> str:
    parts = [str(result["device"]), f"torch {result['torch']}"]
    if result.get("triton"):
        parts.append(f"triton {result['triton']}")
    parts += [f"Python {result['python']}", f"commit {_short(result['commit'])}", str(result["date"])[:10]]
    failed = sum(row.get("error") is not None for row in rows)
    if failed:
        parts.append(f"{failed} of {len(rows)} rows failed")
    said = f"`{_script(str(result['benchmark']))}{' --quick' if result.get('quick') else ''}`"
    if name and name != f"{result['benchmark']}.json":  # one of several runs of it, which the name tells apart
        said += f" (`{name}`)"
    return f"{said}: {', '.join(parts)}."


def _script(benchmark: str) -> str:
    """What wrote a file that says it is of `benchmark`: one beside the benchmarks, or else one among the tests."""
    found = CHECKOUT.glob(f"tests/**/*_{benchmark}.py")
    others = [path.relative_to(CHECKOUT) for path in found if not path.name.startswith("test_")]
    own = Path("benchmarks") / f"{benchmark}.py"
    return str(own if (CHECKOUT / own).exists() or len(others) != 1 else others[0])


def _short(commits: str) -> str:
    named = [commit.partition("-") for commit in commits.split(", ")]
    return " and ".join(name[:12] + dash + dirty for name, dash, dirty in named)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _value(row: Mapping[str, Any], column: Mapping[str, Any]) -> str:
    value = row.get(column["key"])
    if value is None:
        return "failed" if row.get("error") is not None else ""
    digits = column.get("digits")
    return f"{value:.{digits}f}" if digits is not None else _cell(value)


def figures(folder: Path) -> str:
    """All result files of a folder, by name."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        result = _read(path)
        if isinstance(result, dict) and result.get("rows"):
            parts.append(table(result, path.name))
    return "\n\n".join(parts)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise NotUsable(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise NotUsable(f"{path.name} is not JSON: {error}") from error


# ---------------------------------------------------------------- the README's rows


def figure(headline: Headline, folder: Path) -> Figure:
    """The figures of one row, out of its result file.

    Raises `NotUsable` where a row is missing, or the choice fits several.
    """
    rows = _read(folder / headline.file)["rows"]

    def value(where: Where, key: str) -> float:
        wanted = {**headline.where, **where}
        found = [row for row in rows if all(row.get(name) == text for name, text in wanted.items())]
        if len(found) != 1 or not isinstance(found[0].get(key), int | float):
            raise NotUsable(f"{headline.file}: {len(found)} rows for {wanted}, of which one has to have {key}")
        return float(found[0][key])

    stock_key, peer_key = headline.keys or (headline.key, headline.key)
    ours, stock = value(headline.ours, headline.key), value(headline.stock, stock_key)
    if headline.over is not None:
        ours, stock = ours / value(headline.over[0], headline.key), stock / value(headline.over[1], stock_key)
    peer = None if headline.peer is None else value(headline.peer, peer_key)
    return Figure(headline, ours, stock, peer)


def headline_table(rows: Sequence[Figure]) -> str:
    """The README's table."""
    lines = [
        "| what, and less is better | multigraph | stock | ours / stock | a peer |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:

        def said(number: float, headline: Headline = row.headline) -> str:
            return f"{number:,.{headline.digits}f} {headline.unit}"

        peer = "" if row.peer is None else f"{said(row.peer)}, {row.headline.peer_name}"
        cells = (row.headline.title, said(row.ours), said(row.stock), f"**{row.ratio:.2f}**", peer)
        lines.append(_line(cells))
    return "\n".join(lines)


@dataclass(frozen=True)
class Colours:
    text: str
    faint: str
    better: str
    worse: str


THEMES = {
    "light": Colours(text="#1f2328", faint="#8c959f", better="#0969da", worse="#bc4c00"),
    "dark": Colours(text="#e6edf3", faint="#6e7681", better="#4493f8", worse="#f0883e"),
}
WIDTH, LEFT, ONE, ROW, TOP = 760, 330, 330, 26, 34  # pixels; ONE is the length of a bar for 1.0


def picture(rows: Sequence[Figure], colours: Colours) -> str:
    """The rows as bars, ours over stock's, as SVG.  What is longer than the picture is cut, and its number says so."""
    height = TOP + ROW * len(rows) + 12
    font = 'font-family="system-ui, sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="multigraph over stock, less is better" {font}>',
        f'<text x="{LEFT + ONE}" y="18" text-anchor="middle" fill="{colours.faint}">stock = 1</text>',
        f'<text x="{LEFT}" y="18" fill="{colours.faint}">multigraph over stock, less is better</text>',
        f'<line x1="{LEFT + ONE}" y1="24" x2="{LEFT + ONE}" y2="{height - 8}" stroke="{colours.faint}" '
        'stroke-dasharray="3 3"/>',
    ]
    for index, row in enumerate(rows):
        y = TOP + ROW * index
        length = max(2, min(round(ONE * row.ratio), WIDTH - LEFT - 50))
        title = xml.sax.saxutils.escape(row.headline.title)
        colour = colours.better if row.ratio <= 1 else colours.worse
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end" fill="{colours.text}">{title}</text>',
            f'<rect x="{LEFT}" y="{y + 2}" width="{length}" height="16" rx="2" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6}" y="{y + 14}" fill="{colours.text}">{row.ratio:.2f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


# ---------------------------------------------------------------- the pages


def with_figures(page: str, text: str, name: str = "README.md") -> str:
    """The page with `text` between its markers."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise NotUsable(f"{name} needs {BEGIN} and after it {END}, each once")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}{chr(10) if text else ''}{END}{rest.split(END)[1]}"


def pages(root: Path, results: Path, headlines: Sequence[Headline]) -> dict[Path, str]:
    """Every file that this script writes, with what it is to hold."""
    rows = [figure(headline, results) for headline in headlines]
    made = {}
    for name, text in (("README.md", headline_table(rows)), ("docs/benchmarks.md", figures(results))):
        path = root / name
        if not path.exists():
            raise NotUsable(f"{name} is missing")
        made[path] = with_figures(path.read_text(), text, name)
    made |= {root / "docs" / f"figures-{theme}.svg": picture(rows, colours) for theme, colours in THEMES.items()}
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something is not up to date")
    parser.add_argument("--print", action="store_true", help="print the tables alone")
    parser.add_argument("--root", type=Path, default=CHECKOUT, help="the checkout")
    parser.add_argument("--results", type=Path, default=CHECKOUT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    try:
        if args.print:
            print(figures(args.results))
            return 0
        made = pages(args.root, args.results, HEADLINES)
    except NotUsable as error:
        print(f"scripts/figures.py: {error}", file=sys.stderr)
        return 1
    stale = {path: text for path, text in made.items() if not path.exists() or path.read_text() != text}
    if args.check and stale:
        for path, text in stale.items():
            old = path.read_text() if path.exists() else ""
            names = (f"{path.name} as it is", f"{path.name} from the results")
            sys.stderr.writelines(difflib.unified_diff(old.splitlines(True), text.splitlines(True), *names))
        print("scripts/figures.py: run `python scripts/figures.py`", file=sys.stderr)
        return 1
    for path, text in stale.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
