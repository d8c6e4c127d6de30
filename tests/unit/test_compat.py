"""Every private torch symbol is where `_compat` says, and carries what multigraph uses of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import multigraph_backend
from multigraph_backend import _compat

PACKAGE = Path(multigraph_backend.__file__).parent


@pytest.mark.parametrize("row", _compat.expected().values(), ids=lambda row: row.name)
def test_the_symbol_is_there_with_the_shape_expected(row: _compat.PrivateSymbol) -> None:
    assert row.problem() is None


def test_what_is_missing_is_named_with_the_feature_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _compat.PrivateSymbol("gone", "torch._dynamo", "no_such_thing", feature="example")
    monkeypatch.setitem(_compat.SYMBOLS, "gone", row)
    assert _compat.missing("example") == (
        "torch._dynamo.no_such_thing is missing (module 'torch._dynamo' has no attribute 'no_such_thing')",
    )
    with pytest.raises(_compat.MissingSymbol, match="which example needs"):
        _ = _compat.gone


def test_a_symbol_that_lost_a_parameter_is_a_problem() -> None:
    row = _compat.PrivateSymbol("lock", "torch._dynamo.convert_frame", "compile_lock", shape=("acquire", "no_such"))
    assert row.problem() == "torch._dynamo.convert_frame.compile_lock lacks no_such"


def test_no_other_module_touches_private_torch() -> None:
    """Imports of and attribute paths through private torch modules appear in `_compat` alone."""
    offenders = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
                offenders.append(f"{path.name}: from {node.module}")
            elif isinstance(node, ast.Import):
                offenders += [f"{path.name}: {item.name}" for item in node.names if item.name.startswith("torch._")]
            elif isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text.startswith("torch._"):
                    offenders.append(f"{path.name}: {text}")
    assert offenders == []
