"""scripts/figures.py: result files in; the README's table and picture and the page of benchmarks out."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load

figures = load("figures")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

RESULT: dict[str, Any] = {
    "benchmark": "dispatch",
    "title": "Dispatch",
    "quick": False,
    "commit": "0123456789abcdef0123456789abcdef01234567-dirty",
    "date": "2026-11-21T05:37:47+00:00",
    "torch": "2.13.0",
    "triton": "3.7.0",
    "python": "3.12.3",
    "device": "NVIDIA H100",
    "columns": [
        {"key": "kind", "title": "a|b", "digits": None},
        {"key": "us", "title": "us", "digits": 2},
        {"key": "host", "title": "host", "digits": 1},
    ],
    "rows": [
        {"kind": "Eq", "us": 1.234, "headline": True, "error": None},
        {"kind": "Range", "headline": True, "error": "RuntimeError: no\nTraceback"},
        {"kind": "hidden", "us": 5.0, "headline": False, "error": None},
    ],
}

TABLE = """\
**Dispatch**

| a\\|b | us |
| --- | ---: |
| Eq | 1.23 |
| Range | failed |

`benchmarks/dispatch.py`: NVIDIA H100, torch 2.13.0, triton 3.7.0, Python 3.12.3, commit 0123456789ab-dirty, \
2026-11-21, 1 of 3 rows failed."""

PAGE = f"before\n\n{figures.BEGIN}\nold\n{figures.END}\nafter\n"
HEADLINE = figures.Headline(
    "A <kind>", "few.json", "us", "us", {"kind": "Eq"}, peer={"form": "other"}, peer_name="a peer", digits=1
)
ROWS = [
    {"kind": "Eq", "form": "multigraph", "us": 1.0},
    {"kind": "Eq", "form": "stock", "us": 4.0},
    {"kind": "Eq", "form": "other", "us": 2.0},
    {"kind": "Range", "form": "multigraph", "us": 9.0},
    {"kind": "Range", "form": "stock", "us": 6.0},
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs" / "benchmarks.md").write_text(PAGE)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "dispatch.json").write_text(json.dumps(RESULT))
    (tmp_path / "results" / "matrix.json").write_text(json.dumps({"commit": "0", "versions": []}))
    monkeypatch.setattr(figures, "HEADLINES", ())
    return tmp_path


def run(checkout: Path, *options: str) -> int:
    status: int = figures.main(["--root", str(checkout), "--results", str(checkout / "results"), *options])
    return status


def page(checkout: Path) -> str:
    return (checkout / "docs" / "benchmarks.md").read_text()


def test_headline_rows_and_columns_that_have_values_become_a_table() -> None:
    assert figures.table(RESULT) == TABLE


def test_several_results_of_one_benchmark_are_told_apart_by_their_files() -> None:
    assert figures.table(RESULT, "dispatch.json") == TABLE
    assert "`benchmarks/dispatch.py` (`dispatch_many.json`): NVIDIA" in figures.table(RESULT, "dispatch_many.json")


def test_without_headlines_every_row_is_shown() -> None:
    rows = [{**row, "headline": False} for row in RESULT["rows"]]
    assert "| hidden | 5.00 |" in figures.table({**RESULT, "rows": rows})


def test_the_text_between_the_markers_is_replaced_and_nothing_else(checkout: Path) -> None:
    assert run(checkout) == 0
    expected = f"before\n\n{figures.BEGIN}\n{TABLE}\n{figures.END}\nafter\n"
    assert page(checkout) == expected
    assert run(checkout) == 0
    assert page(checkout) == expected


def test_no_results_leave_nothing_between_the_markers(checkout: Path) -> None:
    (checkout / "results" / "dispatch.json").unlink()
    assert run(checkout) == 0
    expected = f"before\n\n{figures.BEGIN}\n{figures.END}\nafter\n"
    assert page(checkout) == expected


def test_check_changes_nothing_and_shows_the_difference(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkout, "--check") == 1
    assert page(checkout) == PAGE
    printed = capsys.readouterr().err
    assert "-old" in printed
    assert "+| Eq | 1.23 |" in printed
    assert run(checkout) == 0
    assert run(checkout, "--check") == 0


@pytest.mark.parametrize(
    "text",
    ["no markers", f"{figures.END} {figures.BEGIN}", PAGE + PAGE],
    ids=["none", "turned round", "twice"],
)
@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_a_page_without_its_two_markers_is_an_error(
    checkout: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / name).write_text(text)
    assert run(checkout) == 1
    assert (checkout / name).read_text() == text
    assert "each once" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"benchmark": "other", "rows": [{"us": 1}]}'], ids=["cut short", "no columns"])
def test_a_result_that_no_benchmark_wrote_is_an_error(
    checkout: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "results" / "other.json").write_text(text)
    assert run(checkout, "--check") == 1
    assert "other" in capsys.readouterr().err
    assert page(checkout) == PAGE


def test_what_a_script_among_the_tests_wrote_names_that_script() -> None:
    assert figures._script("dispatch") == "benchmarks/dispatch.py"
    assert figures._script("endings") == "tests/support/distributed/soak_endings.py"
    assert figures._short("0123456789abcdef, fedcba9876543210-dirty") == "0123456789ab and fedcba987654-dirty"


def test_a_headline_is_a_row_of_one_run_beside_stock_and_a_peer(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "results" / "few.json").write_text(json.dumps({"rows": ROWS, "benchmark": "few"}))
    vague = figures.Headline("over", "few.json", "us", "x", {"kind": "Range"}, ours={})
    rows = [figures.figure(HEADLINE, checkout / "results")]
    with pytest.raises(figures.NotUsable, match=r"2 rows for \{'kind': 'Range'\}"):
        figures.figure(vague, checkout / "results")
    assert figures.headline_table(rows).splitlines()[2:] == [
        "| A <kind> | 1.0 us | 4.0 us | **0.25** | 2.0 us, a peer |"
    ]


def test_a_ratio_is_divided_by_the_rows_of_its_own_form(checkout: Path) -> None:
    (checkout / "results" / "few.json").write_text(json.dumps({"rows": ROWS}))
    where = {"kind": "Range"}
    own, stock = {"form": "multigraph", "kind": "Eq"}, {"form": "stock", "kind": "Eq"}
    row = figures.figure(
        figures.Headline("over", "few.json", "us", "x", where, over=(own, stock)), checkout / "results"
    )
    assert (row.ours, row.stock, row.peer) == (9.0, 1.5, None)


def test_a_bar_is_as_long_as_its_ratio_and_worse_ones_have_another_colour(checkout: Path) -> None:
    (checkout / "results" / "few.json").write_text(json.dumps({"rows": ROWS}))
    rows = [
        figures.figure(figures.Headline(kind, "few.json", "us", "us", {"kind": kind}), checkout / "results")
        for kind in ("Eq", "Range")
    ]
    for colours in figures.THEMES.values():
        drawn = figures.picture(rows, colours)
        widths = re.findall(r'<rect [^>]*width="(\d+)" [^>]*fill="([^"]+)"', drawn)
        assert widths == [(str(round(figures.ONE * 0.25)), colours.better), ("380", colours.worse)]
        assert xml.etree.ElementTree.fromstring(drawn).tag.endswith("svg")


def test_every_headline_of_the_readme_is_found() -> None:
    rows = [figures.figure(headline, RESULTS) for headline in figures.HEADLINES]
    assert all(row.ours > 0 and row.stock > 0 for row in rows)
