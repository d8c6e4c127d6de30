"""What a check found, and all findings together: for people, for programs, as an exit status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]
_LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """What one check found: one line, what to do where something is to be done, and the same as data for programs."""

    check: str
    level: Level
    text: str
    remedy: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order of the checks; `str` is for reading."""

    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        """The worst level of all findings."""
        return max((finding.level for finding in self.findings), key=_LEVELS.index, default="ok")

    @property
    def exit_code(self) -> int:
        """0 where no finding is an error, else 1."""
        return int(self.level == "error")

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, as JSON has them."""
        loaded: dict[str, Any] = json.loads(self.to_json())
        return loaded

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps({"level": self.level, "findings": [asdict(finding) for finding in self.findings]}, indent=2)

    def __str__(self) -> str:
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level:<7}  {finding.check:<{width}}  {finding.text}")
            if finding.remedy is not None:
                lines.append(f"{'':<7}  {'':<{width}}  remedy: {finding.remedy}")
        count = {level: sum(finding.level == level for finding in self.findings) for level in _LEVELS}
        lines.append(f"errors: {count['error']}, warnings: {count['warning']}")
        return "\n".join(lines)


def one_line(error: BaseException) -> str:
    """An error's type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
