"""What the pages say of the folders is what is there: parts of the package, modules of a part, folders of tests, paths.

All of it is read off the files.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "multigraph_backend"
TESTS = ROOT / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = sorted(path for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"] if path.is_file())


def said_by(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_the_page_of_the_architecture_lists_the_stations_as_the_package_does() -> None:
    listed = re.findall(r"^    (\S+ +.+)$", said_by(PACKAGE / "__init__.py"), re.MULTILINE)
    listed = [line for line in listed if "torch.compile(" not in line]
    (block,) = re.findall(
        r"^```\n(.*?)^```$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert block.splitlines() == listed
    assert len(listed) > 10


def test_a_module_opens_with_why_it_is_there() -> None:
    opening = {str(path.relative_to(PACKAGE)): said_by(path) for path in MODULES}
    assert [name for name, said in opening.items() if len(said) < 60] == []
    assert [name for name, said in opening.items() if not said.split("\n\n")[0].endswith((".", ":"))] == []


def test_a_folder_says_the_way_through_its_modules() -> None:
    missing = {}
    for folder in {path.parent for path in MODULES} - {PACKAGE}:
        names = {path.stem for path in folder.glob("*.py")} | {
            path.parent.name for path in folder.glob("*/__init__.py")
        }
        text = said_by(folder / "__init__.py")
        rows = ", ".join(re.findall(r"^ {4}([\w, ./]+?)  ", text, re.MULTILINE))
        said = {*re.findall(r"`(\w+)`", text), *(row.removesuffix(".py").rstrip("/") for row in rows.split(", "))}
        left = names - said - {"__init__"}
        if left:
            missing[str(folder.relative_to(PACKAGE))] = left
    assert missing == {}


def test_there_is_a_row_for_each_folder_of_tests() -> None:
    rows = re.findall(r"^\| `(tests/[\w/]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    holding = {folder for path in TESTS.rglob("test_*.py") for folder in path.parents if TESTS in folder.parents}
    assert sorted(rows) == sorted(str(path.relative_to(ROOT)) for path in holding | {TESTS / "support"})


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS, ROOT / "pyproject.toml"], ids=lambda path: path.name)
def test_tests_that_are_named_are_there(path: Path) -> None:
    named = set(re.findall(r"\btests/[\w/]+(?:\.\w+)?", path.read_text()))
    assert [name for name in named if not (ROOT / name).exists()] == []
