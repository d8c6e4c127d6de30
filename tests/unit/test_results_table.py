"""scripts/results_table.py: result files in, the README's figures out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripts import load

results_table = load("results_table")

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

README = f"before\n\n{results_table.BEGIN}\nold\n{results_table.END}\nafter\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "dispatch.json").write_text(json.dumps(RESULT))
    (tmp_path / "matrix.json").write_text(json.dumps({"commit": "0", "versions": []}))
    return tmp_path


def run(checkout: Path, *options: str) -> int:
    status: int = results_table.main(["--readme", str(checkout / "README.md"), "--results", str(checkout), *options])
    return status


def test_headline_rows_and_columns_that_have_values_become_a_table() -> None:
    assert results_table.table(RESULT) == TABLE


def test_several_results_of_one_benchmark_are_told_apart_by_their_files() -> None:
    assert results_table.table(RESULT, "dispatch.json") == TABLE
    assert "`benchmarks/dispatch.py` (`dispatch_many.json`): NVIDIA" in results_table.table(
        RESULT, "dispatch_many.json"
    )


def test_without_headlines_every_row_is_shown() -> None:
    rows = [{**row, "headline": False} for row in RESULT["rows"]]
    assert "| hidden | 5.00 |" in results_table.table({**RESULT, "rows": rows})


def test_the_text_between_the_markers_is_replaced_and_nothing_else(checkout: Path) -> None:
    assert run(checkout) == 0
    expected = f"before\n\n{results_table.BEGIN}\n{TABLE}\n{results_table.END}\nafter\n"
    assert (checkout / "README.md").read_text() == expected
    assert run(checkout) == 0
    assert (checkout / "README.md").read_text() == expected


def test_no_results_leave_nothing_between_the_markers(checkout: Path) -> None:
    (checkout / "dispatch.json").unlink()
    assert run(checkout) == 0
    expected = f"before\n\n{results_table.BEGIN}\n{results_table.END}\nafter\n"
    assert (checkout / "README.md").read_text() == expected


def test_check_changes_nothing_and_shows_the_difference(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkout, "--check") == 1
    assert (checkout / "README.md").read_text() == README
    printed = capsys.readouterr().err
    assert "-old" in printed
    assert "+| Eq | 1.23 |" in printed
    assert run(checkout) == 0
    assert run(checkout, "--check") == 0


@pytest.mark.parametrize(
    "readme",
    ["no markers", f"{results_table.END} {results_table.BEGIN}", README + README],
    ids=["none", "turned round", "twice"],
)
def test_a_readme_without_its_two_markers_is_an_error(
    checkout: Path, readme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "README.md").write_text(readme)
    assert run(checkout) == 1
    assert (checkout / "README.md").read_text() == readme
    assert "each once" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"benchmark": "other", "rows": [{"us": 1}]}'], ids=["cut short", "no columns"])
def test_a_result_that_no_benchmark_wrote_is_an_error(
    checkout: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "other.json").write_text(text)
    assert run(checkout, "--check") == 1
    assert "other" in capsys.readouterr().err
    assert (checkout / "README.md").read_text() == README


def test_what_a_script_among_the_tests_wrote_names_that_script() -> None:
    assert results_table._script("dispatch") == "benchmarks/dispatch.py"
    assert results_table._script("endings") == "tests/distributed/soak_endings.py"
    assert results_table._short("0123456789abcdef, fedcba9876543210-dirty") == "0123456789ab and fedcba987654-dirty"
