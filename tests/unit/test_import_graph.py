"""Imports of the package go down its stations only and never in a circle; tests import no tests.

All of it is read off the files, so that an import counts wherever it stands: at the top, in a function, or for types
alone.  The stations are listed once, in the package's own docstring; docs/architecture.md shows the same lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "multigraph_backend"
TESTS = ROOT / "tests"


def stations() -> tuple[str, ...]:
    """As the package's docstring lists them, from what uses all others to what uses none."""
    listed = re.findall(r"^    (\w+)(?:\.py|/)  ", said_by(PACKAGE / "__init__.py"), re.MULTILINE)
    assert listed
    return tuple(listed)


def said_by(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""


def modules(package: Path) -> dict[str, Path]:
    """By dotted name within the package; a folder's `__init__` goes by that name."""
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}


def imports(package: Path) -> dict[str, set[str]]:
    """Who imports whom in the package."""
    known = modules(package)
    return {name: set(_imported(name, path, known, package.name)) - {name} for name, path in known.items()}


def _imported(name: str, path: Path, known: Mapping[str, Path], package: str) -> Iterator[str]:
    def module(*words: str) -> str | None:
        dotted = ".".join(filter(None, words))
        if not (dotted == package or dotted.startswith(f"{package}.")):
            return None
        inner = dotted[len(package) + 1 :]
        return next((found for found in (inner, f"{inner}.__init__".lstrip(".")) if found in known), None)

    for node in ast.walk(ast.parse(path.read_text())):
        found: Iterable[str | None] = ()
        if isinstance(node, ast.Import):
            found = [module(entry.name) for entry in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports by dots: modules are named in full"
            base = node.module or ""
            found = [module(base, entry.name) or module(base) for entry in node.names]
        yield from filter(None, found)


def upward(graph: Mapping[str, set[str]], order: tuple[str, ...]) -> set[tuple[str, str]]:
    """The pairs of stations between which something is imported against the order."""
    at = {station: index for index, station in enumerate(order)}
    pairs = {(name.split(".")[0], other.split(".")[0]) for name, others in graph.items() for other in others}
    return {(one, other) for one, other in pairs if at[one] > at[other]}


def circles(graph: Mapping[str, set[str]]) -> dict[str, list[set[str]]]:
    """By folder: circles among what lies in it, where a folder in it counts as one."""
    folders = {name.rpartition(".")[0] for name in graph} - {""}
    found = {}
    for folder in sorted(folders):
        inside: dict[str, set[str]] = {}
        for name, others in graph.items():
            if name.startswith(f"{folder}."):
                child = _child(name, folder)
                within = {_child(other, folder) for other in others if other.startswith(f"{folder}.")}
                inside[child] = inside.get(child, set()) | within - {child}
        if groups := list(_together(inside)):
            found[folder] = groups
    return found


def _child(name: str, folder: str) -> str:
    return name[len(folder) + 1 :].split(".")[0]


def _together(graph: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """The largest sets in which each comes to each other one."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            for other in graph.get(todo.pop(), set()) - seen:
                seen.add(other)
                todo.append(other)
        reached[start] = seen
    left = set(graph)
    while left:
        one = min(left)
        group = {other for other in reached[one] if one in reached.get(other, set())} | {one}
        left -= group
        if len(group) > 1:
            yield group


def test_each_module_of_the_package_belongs_to_a_station() -> None:
    assert sorted(stations()) == sorted({name.split(".")[0] for name in modules(PACKAGE)})


def test_imports_go_down() -> None:
    assert upward(imports(PACKAGE), stations()) == set()


def test_imports_go_in_no_circle() -> None:
    """Between stations there is none where imports go down."""
    assert circles(imports(PACKAGE)) == {}


def test_tests_import_no_tests() -> None:
    """What they share is in tests/support, also for programs that they write down as text."""
    named = re.compile(r"\b(?:from|import) (tests\.[\w.]+)(?: import ([\w, ]+))?")
    wrong = {}
    for path in [*TESTS.rglob("*.py"), *(entry for entry in (ROOT / "scripts").iterdir() if entry.is_file())]:
        found = {name for name, _ in named.findall(path.read_text()) if not name.startswith("tests.support")}
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


def test_support_has_no_tests() -> None:
    assert list((TESTS / "support").rglob("test_*.py")) == []
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders == {path.name for path in TESTS.iterdir() if path.is_dir() and path.name[0] != "_"} - {"support"}


# ---------------------------------------------------------------- the checks themselves


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """One in which all is right."""
    text = {
        "__init__.py": "",
        "upper.py": "from few.middle import first, second",
        "middle/__init__.py": "",
        "middle/first.py": "from few.middle.second import Thing\nfrom few import lower as under",
        "middle/second.py": "import few.lower\nimport torch",
        "lower.py": "from pathlib import Path",
    }
    folder = tmp_path / "few"
    (folder / "middle").mkdir(parents=True)
    for name, content in text.items():
        (folder / name).write_text(content)
    return folder


ORDER = ("upper", "middle", "lower", "__init__")


def test_who_imports_whom_is_read_off_the_files(package: Path) -> None:
    graph = imports(package)
    assert graph["upper"] == {"middle.first", "middle.second"}
    assert graph["middle.first"] == {"middle.second", "lower"}
    assert graph["middle.second"] == {"lower"}
    assert graph["lower"] == set()
    assert upward(graph, ORDER) == set()
    assert circles(graph) == {}


@pytest.mark.parametrize(
    "text",
    [
        "from few.upper import Thing",
        "import few.upper",
        "def f():\n    from few import upper",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from few.upper import Thing",
    ],
)
def test_an_import_that_goes_up_is_seen(package: Path, text: str) -> None:
    (package / "lower.py").write_text(text)
    assert upward(imports(package), ORDER) == {("lower", "upper")}


def test_a_circle_is_seen_in_a_folder_and_between_folders(package: Path) -> None:
    (package / "middle" / "second.py").write_text("def f():\n    from few.middle import first")
    assert circles(imports(package)) == {"middle": [{"first", "second"}]}
    (package / "middle" / "inner").mkdir()
    (package / "middle" / "inner" / "__init__.py").write_text("")
    (package / "middle" / "inner" / "deep.py").write_text("import few.middle.second")
    (package / "middle" / "inner" / "other.py").write_text("")
    (package / "middle" / "second.py").write_text("from few.middle.inner import other")
    assert circles(imports(package)) == {"middle": [{"inner", "second"}]}
