"""Every private torch symbol is where `_compat` says, and carries what multigraph uses of it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def is_private(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "torch" and (any(part.startswith("_") for part in parts) or "experimental" in parts)


def modules() -> list[tuple[Path, ast.AST]]:
    """All of the package but `_compat`, parsed."""
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_compat.py"]


def test_no_other_module_touches_private_torch() -> None:
    """Imports of and attribute paths through private torch modules appear in `_compat` alone."""
    offenders = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and is_private(node.module or ""):
                offenders.append(f"{path.name}: from {node.module}")
            elif isinstance(node, ast.Import):
                offenders += [f"{path.name}: {item.name}" for item in node.names if is_private(item.name)]
            elif isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text.startswith("torch._"):
                    offenders.append(f"{path.name}: {text}")
    assert offenders == []


#: attributes with an underscore that are Python's, or namespaces and operators
PYTHON = {"_current_frames", "_getframe", "_fields"}
OPERATORS = {"_c10d_functional", "_assert_scalar", "_scaled_mm", "_unsafe_view"}
#: names by which the package knows objects of torch's tracing
TRACING = ("shape_env", "fake_mode", "guards_context")


def known_names() -> set[str]:
    rows = _compat.SYMBOLS.values()
    parts = {part for row in rows for part in (*row.shape, *row.carried, *row.attribute.split("."))}
    return parts | set(_compat.CARRIED)


def unlisted(known: set[str]) -> dict[str, str]:
    """The private attributes of torch that are used and not `known`, with a place; known by their underscore, or by the
    object of torch's tracing that they are asked of."""
    own, used = set[str](), dict[str, str]()
    for path, tree in modules():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=value, attr=name):
                    owner = ast.unparse(value).rpartition(".")[2]
                    if owner in TRACING or (name.startswith("_") and not name.startswith("__")):
                        used.setdefault(name, f"{path.name}:{node.lineno} {ast.unparse(node)}")
    return {name: where for name, where in used.items() if name not in known | own | PYTHON | OPERATORS}


def test_every_private_attribute_of_torch_that_is_used_has_a_row() -> None:
    assert set(unlisted(known_names())) == {"_multigraph_marks"}  # of our own making


@pytest.mark.parametrize("name", ["settings", "var_to_range", "var_to_sources", "replacements", "_dynamo_source"])
def test_one_that_stands_in_no_row_is_found(name: str) -> None:
    """These once did not, and renaming one of them reached the user."""
    assert name in unlisted(known_names() - {name})


def test_a_stride_that_torch_writes_with_a_maximum_is_the_size_where_nothing_is_empty() -> None:
    env = _compat.ShapeEnv(specialize_zero_one=False)
    source = _compat.ConstantSource("rows")
    rows = env.create_symintnode(env.create_symbol(5, source, _compat.DimDynamic.DYNAMIC), hint=5)
    with _compat.FakeTensorMode(shape_env=env):
        stride = torch.empty(2, rows // 2, 3).stride(0)
    assert "Max" in str(stride)
    assert _compat.plain_size(stride) == _compat.plain_size(rows // 2 * 3)


STASHED = """
import json, os, sys, threading, time
import torch
from multigraph_backend import _compat

kept = []

def first():
    from torch._inductor.cudagraph_trees import local
    kept.extend([local.tree_manager_containers, local.tree_manager_locks] * 2)
    _compat.hold_stashed()
    _compat.hold_stashed()

thread = threading.Thread(target=first)
thread.start()
number = thread.native_id
thread.join()
while os.path.exists(f"/proc/self/task/{number}"):  # torch lets go when the system's thread has ended
    time.sleep(0.01)
print(json.dumps([sys.getrefcount(entry) for entry in kept]), flush=True)
os._exit(0)  # what was let go of once too often would be met at the end
"""


def test_what_a_thread_has_stashed_is_held_when_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", STASHED], capture_output=True, text=True, check=True, timeout=300)
    own = 2 + 2  # by the list, and here by the loop and the call
    assert json.loads(done.stdout.splitlines()[-1]) == [own] * 4
