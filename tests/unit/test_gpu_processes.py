"""The processes in which the allocator's checks run on a GPU, as far as they go without one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.support.gpu import allocator_process


@pytest.mark.parametrize("group", sorted(allocator_process.WATCHED))
def test_what_the_sanitizer_watches_is_there(group: str) -> None:
    assert set(allocator_process.WATCHED[group]) <= allocator_process.all_checks()[group].keys()


def test_a_check_that_fails_is_told_and_ends_the_process_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def fails() -> None:
        raise ValueError("no")

    checks: dict[str, Callable[[], None]] = {
        "one": lambda: ran.append("one"), "two": fails, "three": lambda: ran.append("three"),
    }  # fmt: skip
    monkeypatch.setattr(allocator_process, "all_checks", lambda: {"pools": checks})
    monkeypatch.setattr(allocator_process, "WATCHED", {"pools": ("one", "three")})
    assert allocator_process.main("pools") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ran"] == ["one", "two", "three"]
    assert told["failed"]["two"].startswith("ValueError: no\n")
    assert allocator_process.main("pools", watched=True) == 0
    assert ran == ["one", "three", "one", "three"]
