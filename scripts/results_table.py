"""The README's figures: benchmarks/results/*.json as Markdown tables, between two markers.

    python scripts/results_table.py            write them into README.md
    python scripts/results_table.py --check    exit 1, with what differs, where README.md is not up to date
    python scripts/results_table.py --print    show them

A result file that a benchmark wrote says itself which columns its rows have and which rows are headlines; only these
are shown, all rows where none is. Files without rows (the matrix of versions) are no business of this script.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


class NotUsable(ValueError):
    """A result file or the README is not as this script needs it."""


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
    found = CHECKOUT.glob(f"tests/*/*_{benchmark}.py")
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
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise NotUsable(f"{path.name} is not JSON: {error}") from error
        if isinstance(result, dict) and result.get("rows"):
            parts.append(table(result, path.name))
    return "\n\n".join(parts)


def with_figures(readme: str, text: str) -> str:
    """The README with `text` between its markers."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise NotUsable(f"README.md needs {BEGIN} and after it {END}, each once")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{text}{chr(10) if text else ''}{END}{rest.split(END)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where README.md is not up to date")
    parser.add_argument("--print", action="store_true", help="print the tables alone")
    parser.add_argument("--readme", type=Path, default=CHECKOUT / "README.md")
    parser.add_argument("--results", type=Path, default=CHECKOUT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    try:
        text = figures(args.results)
        if args.print:
            print(text)
            return 0
        readme = args.readme.read_text()
        wanted = with_figures(readme, text)
    except NotUsable as error:
        print(f"scripts/results_table.py: {error}", file=sys.stderr)
        return 1
    if wanted == readme:
        return 0
    if args.check:
        names = (f"{args.readme.name} as it is", f"{args.readme.name} from the results")
        sys.stderr.writelines(difflib.unified_diff(readme.splitlines(True), wanted.splitlines(True), *names))
        print("scripts/results_table.py: run `python scripts/results_table.py`", file=sys.stderr)
        return 1
    args.readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
