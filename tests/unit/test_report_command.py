"""`python -m multigraph_backend report SCRIPT`: it runs as python runs it, and a page says what became of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multigraph_backend.__main__ import main
from tests.support.pages import Element, parse

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """\
import sys
import torch


def run():  # the function, and with it its graph, ends here
    def f(x):
        return x.sin() * x.shape[0]

    compiled = torch.compile(
        f, backend="multigraph", dynamic=True, options={"specialize": [{"x[0]": 8}], "compiler": "eager"}
    )
    for rows in (8, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), f(x))


run()
print("done", sys.argv[1:])
sys.exit(3)
"""


def report(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIGRAPH_", "TORCH"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "multigraph_backend", "report", *arguments],
        env=environ, cwd=cwd, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def page(text: str) -> Element:
    root, wrong = parse(text)
    assert wrong == []
    return root


def test_the_page_has_graphs_that_have_ended_and_the_script_its_own_output(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = report("-o", "out.html", "script.py", "--output", "x", cwd=tmp_path)
    assert done.stdout == "done ['--output', 'x']\n"
    assert done.stderr == f"multigraph: what script.py compiled and ran is in {tmp_path}/out.html\n"
    assert done.returncode == 3
    root = page((tmp_path / "out.html").read_text())
    assert root.all("h1")[0].text == "multigraph: what script.py compiled and ran"
    rows = [row.words for row in root.all("table", class_="variants")[0].all("tr")]
    assert [row.split(" ready ")[0] for row in rows[1:]] == ["x[0] == 8", "generic"]


def test_a_script_without_torch_has_a_page_that_says_so_and_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is none')")
    (tmp_path / "script.py").write_text("print('<first>')")
    done = report("script.py", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("<first>\n", 0)
    assert done.stderr == f"multigraph: what script.py compiled and ran is in {tmp_path}/multigraph.html\n"
    said = page((tmp_path / "multigraph.html").read_text()).all("section", id="nothing")[0].words
    assert "it did not import torch in this process" in said


def test_the_page_goes_to_stdout_after_what_the_script_prints(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\nprint('first')")
    done = report("-o", "-", "--model", "Nobody", "script.py", cwd=tmp_path)
    first, text = done.stdout.split("\n", 1)
    assert (first, done.stderr) == ("first", "")
    assert "no call of what torch.compile" in page(text).all("section", id="nothing")[0].words


def test_a_page_that_cannot_be_written_costs_nothing_but_a_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    done = report("-o", str(tmp_path), "script.py", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("multigraph: the account of script.py could not be written: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["report"], ["report", "no_such_script.py"], ["report", "-o", "no/such/folder/x.html", __file__]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m multigraph_backend" in capsys.readouterr().err
