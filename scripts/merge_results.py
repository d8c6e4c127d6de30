"""One result file from a benchmark, or from tests, that ran in parts, beside each other or one after the other.

    python scripts/merge_results.py benchmarks/results/models.json out/gpt2/models.json out/llama/models.json
    python scripts/merge_results.py benchmarks/results/gpu_tests.json out/a/summary.json out/b/summary.json
    python scripts/merge_results.py --several-commits benchmarks/results/endings.json out/*/endings.json

The parts must be of one benchmark, commit, machine and set of versions; what they list comes in the order given. With
`--several-commits` they may be of more than one: the result names each of them, and each row its own. A row that failed
is left out there, if a later part has one of the same words that did not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LISTS = ("rows", "parts")
OWN = ("date", "gpus", *LISTS)  # what may differ


class NotAlike(ValueError):
    """Parts that are not of one run's conditions."""


def merged(parts: Sequence[Mapping[str, Any]], several_commits: bool = False) -> dict[str, Any]:
    """All that `parts` list under what they have in common, dated as the last of them.  Raises NotAlike."""
    if several_commits:
        parts = [{**part, "rows": _not_repeated(part["rows"], parts[at + 1 :])} for at, part in enumerate(parts)]
        together = ", ".join(dict.fromkeys(str(part["commit"]) for part in parts))
        parts = [
            {**part, "rows": [{**row, "commit": part["commit"]} for row in part["rows"]], "commit": together}
            for part in parts
        ]
    heads = [{key: value for key, value in part.items() if key not in OWN} for part in parts]
    for head in heads[1:]:
        different = sorted(key for key in heads[0].keys() | head.keys() if heads[0].get(key) != head.get(key))
        if different:
            told = "; ".join(f"{key}: {heads[0].get(key)!r} and {head.get(key)!r}" for key in different)
            raise NotAlike(f"the parts differ: {told}")
    own: dict[str, Any] = {key: [entry for part in parts for entry in part.get(key, ())] for key in LISTS}
    own["date"] = max(str(part.get("date")) for part in parts)
    own["gpus"] = max((part.get("gpus", []) for part in parts), key=len)
    return {key: own.get(key, value) for key, value in parts[0].items()}


def _not_repeated(rows: Sequence[Mapping[str, Any]], later: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    succeeded = [_words(row) for part in later for row in part["rows"] if row.get("error") is None]
    return [row for row in rows if row.get("error") is None or _words(row) not in succeeded]


def _words(row: Mapping[str, Any]) -> dict[str, str]:
    """What a row is about; words that say how it came out are no part of that."""
    outcome = ("error", "goals", "numbers", "wrong")
    return {key: value for key, value in row.items() if isinstance(value, str) and key not in outcome}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    parser.add_argument("--several-commits", action="store_true", help="parts of more than one commit")
    args = parser.parse_args()
    try:
        result = merged([json.loads(path.read_text()) for path in args.parts], args.several_commits)
    except (OSError, ValueError) as error:
        print(f"scripts/merge_results.py: {error}", file=sys.stderr)
        return 1
    args.to.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
