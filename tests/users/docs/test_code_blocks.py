"""The documentation runs: every block of every page is run or checked, and the output that it shows is what it prints.

- ```python runs, the blocks of one page in order in one namespace, in this process. What it prints stands in a ```text
  block right after it. The page is the file of its code, so that reports name lines of the page.
- ```python whose first line is ``# name.py`` is a file beside the page's commands, one of which runs it.
- ```python whose first line is ``# needs: library`` (or several) runs where these are installed; elsewhere it has to be
  Python, and what it imports of multigraph has to be there. ``scripts/clients`` installs all of them.
- ```python of nothing but dicts shows conditions; `specialize` accepts each.
- ```console has commands after ``$ ``, continued after a backslash, and below a command what it prints, if the page
  shows that. ``python`` runs in a process of its own, beside the page's files. ``scripts/...`` has to be
  there.
- ```json is a value of MULTIGRAPH_OPTIONS.
- ``` without a language lists scripts or modules of this repository, one a line.

Anything else is an error. Seconds, ids of graphs, numbers of symbols, places in files, and the width of columns differ
from run to run, so they are no part of a comparison.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from multigraph_backend.options import VARIABLE, Options
from tests.support import forked

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "multigraph_backend"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

# What a page takes for granted, run before its first block.
PRELUDES = {"README.md": "import torch; model = torch.nn.Embedding(16, 4)"}

# The doctor's test of the machine takes long, and the machine may well lack something (exit 1).
DOCTOR = "python -m multigraph_backend doctor"

_FENCE = re.compile(r"^( *)(?:```|~~~)(.*)$")


class Uncovered(AssertionError):
    """A block that nothing runs or checks, or that shows something else than what it prints."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` of the page is the first of its text, from 1; `shown` is the ```text right after it."""

    page: Path
    language: str
    text: str
    line: int
    shown: str | None = None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def needs(self) -> list[str]:
        """Libraries without which it cannot run."""
        named = re.match(r"# needs: ([\w, ]+)\n", self.text)
        return re.findall(r"\w+", named.group(1)) if named else []

    @property
    def file_name(self) -> str | None:
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named.group(1) if named and self.language == "python" else None


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    index, adjacent = 0, False  # whether only blank lines came since the last block
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening is None:
            if lines[index].startswith("    "):
                raise Uncovered(f"{page.name}:{index + 1}: a block without a fence")
            adjacent = adjacent and not lines[index].strip()
            index += 1
            continue
        indent, language = len(opening.group(1)), opening.group(2).strip()
        end = next(at for at in range(index + 1, len(lines)) if lines[at].strip() in ("```", "~~~"))
        text = "".join(f"{line[indent:]}\n" for line in lines[index + 1 : end])
        if language == "text" and adjacent and found[-1].language == "python" and found[-1].shown is None:
            found[-1] = Block(page, "python", found[-1].text, found[-1].line, text)
        else:
            found.append(Block(page, language, text, index + 2))
        index, adjacent = end + 1, True
    return found


def run_page(page: Path, folder: Path, prelude: str = "") -> None:
    """Run or check every block of `page`; its files and commands live in `folder`."""
    files = {block.file_name: block.text for block in blocks(page) if block.file_name is not None}
    for name, text in files.items():
        (folder / name).write_text(text)
    commands = {block: [*_commands(block)] for block in blocks(page) if block.language == "console"}
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = [pool.submit(_run_in_order, row, folder) for row in _rows(commands)]
        _run_here(page, prelude)
        for result in results:
            for block, shown, printed in result.result():
                if shown:
                    _compare(block, shown, printed)
    ran = [command for entries in commands.values() for command, _ in entries]
    not_run = set(files) - {word for command in ran for word in shlex.split(command)}
    if not_run:
        raise Uncovered(f"{page.name}: no command runs {', '.join(sorted(not_run))}")


def _run_here(page: Path, prelude: str) -> None:
    """All but the files and commands."""
    with _as_module(page) as namespace:
        exec(prelude, namespace)
        for block in blocks(page):
            if block.file_name is not None or block.language == "console":
                continue
            if block.language == "python" and not all(map(importlib.util.find_spec, block.needs)):
                _check_imports(block)
            elif block.language == "python":
                _compare(block, block.shown or "", _run_python(block, namespace))
            elif block.language == "json":
                Options.build(environ={VARIABLE: block.text}, model_names=["LlamaForCausalLM"])
            elif block.language == "":
                _check_listing(block)
            else:
                raise Uncovered(f"{block}: nothing runs or checks this block ({block.language})")


@contextlib.contextmanager
def _as_module(page: Path) -> Iterator[dict[str, object]]:
    """A namespace that Dynamo finds by its name, as it finds that of a script; the environment is restored."""
    module = types.ModuleType("page_" + page.stem.replace("-", "_"))
    before = dict(os.environ)
    sys.modules[module.__name__] = module
    try:
        yield vars(module)
    finally:
        del sys.modules[module.__name__]
        os.environ.clear()
        os.environ.update(before)


def _run_python(block: Block, namespace: dict[str, object]) -> str:
    source = "\n" * (block.line - 1) + block.text
    tree = ast.parse(source)
    values = [entry.value for entry in tree.body if isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Dict)]
    if len(values) == len(tree.body):
        Options.build({"specialize": [ast.literal_eval(value) for value in values]})
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(block.page), "exec"), namespace)
    return printed.getvalue()


def _check_imports(block: Block) -> None:
    """Of a block that cannot run here."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multigraph_backend"):
            module = importlib.import_module(node.module or "")
            if lacking := [item.name for item in node.names if not hasattr(module, item.name)]:
                raise Uncovered(f"{block}: {node.module} has no {', '.join(lacking)}")


def _commands(block: Block) -> Iterator[tuple[str, str]]:
    """Each command with the output shown below it."""
    first, *entries = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    if first:
        raise Uncovered(f"{block}: output before the first command")
    for entry in entries:
        command = re.match(r"(?:[^\n]*\\\n)*[^\n]*\n", entry)
        assert command is not None
        yield command.group().replace("\\\n", " ").strip(), entry[command.end() :]


#: commands one after the other: their block, what is run, and what is shown of it
Row = list[tuple[Block, str, str]]


def _rows(commands: dict[Block, list[tuple[str, str]]]) -> list[Row]:
    """Those of a block are a row, for a second one may be there to show what the first has left; and so are those of
    blocks that begin with the same setting, such as a folder."""
    rows: dict[object, Row] = {}
    for block, entries in commands.items():
        settings = [word for command, _ in entries for word in shlex.split(command) if re.match(r"[A-Z_]+=", word)]
        rows.setdefault(settings[0] if settings else block, []).extend((block, *entry) for entry in entries)
    return list(rows.values())


def _run_in_order(row: Row, folder: Path) -> Row:
    """What is shown of each, and what it prints."""
    return [(block, shown, _run_command(block, command, folder)) for block, command, shown in row]


def _run_command(block: Block, command: str, folder: Path) -> str:
    words = shlex.split(command)
    if "vllm" in words:  # which has to be installed; what it is given is checked
        _check_vllm(block, words)
        return ""
    given = {}
    while re.match(r"\w+=", words[0]):
        name, given[name] = words.pop(0).split("=", 1)
    if words in (["pip", "install", "."], ["pip", "install", "./allocator_ext"]):  # tests/built/packaging does it
        assert (ROOT / words[2] / "pyproject.toml").is_file()
        return ""
    if words[0].startswith("scripts/"):
        _check_script(block, words[0])
        return ""
    if words[0] != "python":
        raise Uncovered(f"{block}: nothing runs or checks the command {command}")
    if set(words) & {">", ">>", "<", "|", "&", "&&", ";"}:
        raise Uncovered(f"{block}: no shell runs the command {command}")
    ran = forked.run(
        *words[1:],
        *(["--no-self-test"] if command == DOCTOR else []),
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            **given,
        },
        timeout=120,
        merged=True,
    )
    assert ran.returncode == 0 or (command == DOCTOR and ran.returncode == 1), f"{block}: {command}\n{ran.stdout}"
    return ran.stdout


def _check_vllm(block: Block, words: list[str]) -> None:
    """Variables, and vLLM's configuration of compiling: JSON, with options that are options."""
    given = dict(word.split("=", 1) for word in words[: words.index("vllm")])
    if VARIABLE in given:
        Options.build(environ={VARIABLE: given[VARIABLE]}, model_names=["LlamaForCausalLM"])
    configuration = json.loads(words[words.index("--compilation-config") + 1])
    if configuration["mode"] not in (1, 2, 3):
        raise Uncovered(f"{block}: vLLM has no such mode")


def _check_script(block: Block, name: str) -> None:
    if not os.access(ROOT / name, os.X_OK):
        raise Uncovered(f"{block}: there is no {name}")


def _check_listing(block: Block) -> None:
    names = [line.split()[0] for line in block.text.splitlines() if line.strip()]
    scripts = [name for name in names if name.startswith("scripts/")]
    modules = [name for name in names if name.endswith(".py")]
    if not scripts and not modules:
        raise Uncovered(f"{block}: a block without a language that lists neither scripts nor modules")
    for name in scripts:
        _check_script(block, name)
    folders = [PACKAGE, *(PACKAGE / name for name in names if name.endswith("/"))]
    for name in modules:
        if not any((folder / name).is_file() for folder in folders):
            raise Uncovered(f"{block}: there is no {name}")


def _compare(block: Block, shown: str, printed: str) -> None:
    if normalized(shown) != normalized(printed):
        raise Uncovered(f"{block} shows\n{shown}\nand prints\n{printed}")


def normalized(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern in (r"\bgraph (\d+)", r"\bs(\d+)\b", r"\bu(\d+)\b"):
        numbers: dict[str, int] = {}

        def number(match: re.Match[str], numbers: dict[str, int] = numbers) -> str:
            start, end = match.start(1) - match.start(), match.end(1) - match.start()
            index = numbers.setdefault(match.group(1), len(numbers))
            return f"{match.group()[:start]}{index}{match.group()[end:]}"

        text = re.sub(pattern, number, text)
    text = re.sub(r"\([^()\s]*?([^()/\s]+):\d+\)", r"(\1)", text)  # a place in a file: its name alone
    # the head of a line of torch's log: its level and module
    text = re.sub(
        r"^([A-Z])\d{4} [\d:.]+ \d+ \S*?(multigraph_backend/\S+?\.py|\w+/\w+\.py):\d+\]",
        r"\1 \2]",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"\b\d+\.\d+ s\b", "0.00 s", text)
    # columns of a report are as wide as the longest condition
    return "\n".join(re.sub(r"(?<=\S)  +", "  ", line.rstrip()) for line in text.strip("\n").splitlines())


# ---------------------------------------------------------------- the pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, PRELUDES.get(str(page.relative_to(ROOT)), ""))


def test_architecture_lists_every_module() -> None:
    (listing,) = blocks(ROOT / "docs" / "architecture.md")
    listed = {line.split()[0] for line in listing.text.splitlines()}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert modules | folders <= listed, "docs/architecture.md does not list these"


def test_options_of_the_environment_merge_as_the_page_says() -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "how-to" / "serve.md") if block.language == "json")
    options = Options.build(environ={VARIABLE: block.text}, model_names=["LlamaForCausalLM", "forward"])
    assert (options.compile_timeout, options.compile) == (120.0, "eager")
    assert [str(entry) for entry in options.specialize] == [
        f"input_ids[0] == {rows} and input_ids[1] == 1" for rows in (1, 2, 4, 8)
    ]


# ---------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nprint(1)\n```\n", "prints"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "prints"),
        ("```python\nprint(1)\n```\n\nWords.\n\n```text\n1\n```\n", "prints"),
        ("```text\n1\n```\n", r"nothing runs or checks this block \(text\)"),
        ("```python\npass\n```\n\n```text\n1\n```\n", "prints"),
        ("```yaml\na: 1\n```\n", r"nothing runs or checks this block \(yaml\)"),
        ("```python title\npass\n```\n", r"nothing runs or checks this block \(python title\)"),
        ("Words.\n\n```python\npass\n```\n\n    print(1)\n", "without a fence"),
        ("```python\n# lost.py\nprint(1)\n```\n", "no command runs lost.py"),
        ("```console\n$ curl example.org\n```\n", "nothing runs or checks the command"),
        ("```console\n$ scripts/nothing --here\n```\n", "there is no scripts/nothing"),
        ("```console\npython\n```\n", "output before"),
        ("```console\n$ python -c 'print(1)'\n2\n```\n", "prints"),
        ("```\nscripts/nothing   # does it\n```\n", "there is no scripts/nothing"),
        ("```\nnothing.py   does it\n```\n", "there is no nothing.py"),
        ("```\nsome words\n```\n", "lists neither"),
    ],
)
def test_a_block_that_is_not_covered_is_an_error(text: str, complaint: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(Uncovered, match=complaint):
        run_page(page, tmp_path)


def test_a_page_that_is_right(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# hello.py\nimport os\nprint(os.environ['WHOM'])\n```\n\n"
        "```console\n$ WHOM=you \\\n    python hello.py\nyou\n$ WHOM=me python hello.py\nme\n```\n\n"
        "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    )
    run_page(page, tmp_path)


def test_commands_that_share_a_folder_run_one_after_the_other() -> None:
    page = Path("page.md")
    texts = ["$ KEPT=a first\n", "$ other\n", "$ KEPT=a second\nshown\n$ third\n", "$ KEPT=b fourth\n"]
    commands = {
        block: [*_commands(block)] for line, text in enumerate(texts) for block in [Block(page, "console", text, line)]
    }
    assert [[command for _, command, _ in row] for row in _rows(commands)] == [
        ["KEPT=a first", "KEPT=a second", "third"],
        ["other"],
        ["KEPT=b fourth"],
    ]


def test_differences_from_run_to_run_are_ignored() -> None:
    first = "graph 3: f (/a/page.md:7)\n  sizes: x[0] = s77, x[1] = s27\n  generic  ready   1 calls  compiled in 0.31 s"
    second = "graph 9: f (page.md:8)\n  sizes: x[0] = s1, x[1] = s0\n  generic  ready   1 calls  compiled in 12.00 s\n"
    assert normalized(first) == normalized(second)
    assert normalized(first) != normalized(second.replace("s0", "s1"))
    assert normalized(first) != normalized(second.replace("1 calls", "2 calls"))
    logged = "I1121 07:00:47.521000 12881 multigraph_backend/region/region.py:171] f (/home/f.py:6): compiling generic"
    assert normalized(logged) == "I multigraph_backend/region/region.py] f (f.py): compiling generic"
