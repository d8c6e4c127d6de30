"""scripts/merge_results.py: parts of one benchmark's run become one file, and nothing else does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.scripts import load

merge_results = load("merge_results")


def part(date: str, *rows: int, **others: Any) -> dict[str, Any]:
    head = {"benchmark": "models", "commit": "0123", "torch": "2.11.0", "columns": [{"key": "n", "title": "n"}]}
    return {**head, "date": date, **others, "rows": [{"n": row} for row in rows]}


def test_rows_come_in_the_order_given_under_what_is_common() -> None:
    whole = merge_results.merged([part("2026-11-21T10", 2, 1), part("2026-11-21T09", 3)])
    assert whole == part("2026-11-21T10", 2, 1, 3)


@pytest.mark.parametrize(("key", "other"), [("commit", "4567"), ("torch", "2.13.0"), ("columns", []), ("device", "x")])
def test_parts_of_other_conditions_are_refused(key: str, other: Any) -> None:
    with pytest.raises(merge_results.NotAlike, match=f"the parts differ: {key}: "):
        merge_results.merged([part("2026-11-21", 1), part("2026-11-21", 2, **{key: other})])


def test_one_that_differs_leaves_the_old_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("whole.json", "a.json", "b.json")]
    for path, written in zip(paths, (part("1", 0), part("1", 1), part("1", 2, commit="4567")), strict=True):
        path.write_text(json.dumps(written))
    with mock.patch.object(sys, "argv", ["merge_results.py", *map(str, paths)]):
        assert merge_results.main() == 1
    assert "commit: '0123' and '4567'" in capsys.readouterr().err
    assert json.loads(paths[0].read_text()) == part("1", 0)


def test_summaries_of_tests_are_merged_alike() -> None:
    def summary(name: str, gpus: int) -> dict[str, Any]:
        return {"commit": "0123", "gpus": ["H200"] * gpus, "parts": [{"name": name, "status": 0}]}

    whole = merge_results.merged([summary("one", 1), summary("two", 2)])
    assert [part["name"] for part in whole["parts"]] == ["one", "two"]
    assert whole["gpus"] == ["H200"] * 2


def test_parts_of_several_commits_where_that_is_asked_for() -> None:
    whole = merge_results.merged([part("1", 1), part("2", 2, commit="4567"), part("3", 3)], several_commits=True)
    assert whole["commit"] == "0123, 4567"
    assert [(row["n"], row["commit"]) for row in whole["rows"]] == [(1, "0123"), (2, "4567"), (3, "0123")]


def test_a_row_that_failed_and_came_right_later_is_left_out() -> None:
    def forms(commit: str, **errors: str | None) -> dict[str, Any]:
        rows = [{"form": form, "goals": str(error), "error": error} for form, error in errors.items()]
        return {**part("1", commit=commit), "rows": rows}

    parts = [forms("0", a="wrong", b="wrong", c=None), forms("1", a=None, c="wrong")]
    whole = merge_results.merged(parts, several_commits=True)
    told = [(row["form"], row["commit"], row["error"]) for row in whole["rows"]]
    assert told == [("b", "0", "wrong"), ("c", "0", None), ("a", "1", None), ("c", "1", "wrong")]
