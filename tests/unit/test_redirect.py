"""`python -m multigraph_backend run`: a program runs as python runs it, with multigraph in place of Inductor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multigraph_backend import redirect
from multigraph_backend.__main__ import main
from multigraph_backend.doctor.settings import environment
from multigraph_backend.environment import OptionsError

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """\
import sys
import torch


def f(x):
    return x.sin() * x.shape[0]


if __name__ == "__main__":
    compiled = torch.compile(f, backend="inductor", mode="reduce-overhead")
    x = torch.randn(8)
    torch.testing.assert_close(compiled(x), f(x))
    from multigraph_backend import stats
    print(__name__, sys.argv[1:], sys.flags.dev_mode, stats()["generic_calls"])
    sys.exit(3)
"""


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIGRAPH_", "TORCH_"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *arguments], env=environ, cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    """With the interpreter's options, its arguments, its exit status, and options from a file."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "options.json").write_text('{"f": {"compiler": "eager", "on_failure": "raise"}}')
    run = ("-X", "dev", "-m", "multigraph_backend", "run", "--options", "options.json", "script.py", "--options", "x")
    done = command("-W", "ignore", *run, cwd=tmp_path)
    assert done.stdout == "__main__ ['--options', 'x'] True 1\n", done.stderr
    assert done.returncode == 3


@pytest.mark.slow
def test_a_module_runs_as_it_is_and_so_do_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT.replace("sys.exit(3)", ""))
    (tmp_path / "options.json").write_text('{"f": {"compiler": "eager"}}')
    run = ("-m", "multigraph_backend", "run", "--options", "options.json", "-m", "program", "-m", "x")
    assert command(*run, cwd=tmp_path).stdout == "__main__ ['-m', 'x'] False 1\n"
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = command(*ranks, *run[:-4], "program.py", cwd=tmp_path)
    assert done.stdout.count("__main__ [] False 1\n") == 2, done.stderr


def test_the_interpreters_own_options_are_kept() -> None:
    def kept(*given: str) -> list[str]:
        return redirect.interpreter_options(["python", *given, "run", "x.py"], ["/p/__main__.py", "run", "x.py"])

    assert kept("-m", "multigraph_backend") == []
    assert kept("-X", "dev", "-u", "-m", "multigraph_backend") == ["-X", "dev", "-u"]
    assert kept("-um", "multigraph_backend") == ["-u"]
    assert kept("-O", "/p/multigraph_backend/__main__.py") == ["-O"]


def test_what_cannot_be_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    for arguments, said in (
        ([], "run takes a Python file, or -m and a module"),
        (["-m"], "run takes a Python file, or -m and a module"),
        ([str(tmp_path / "other.py")], "there is no file"),
        (["--options", str(tmp_path / "none.json"), str(script)], "which is not there"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["run", *arguments])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_the_environment_of_the_program(tmp_path: Path) -> None:
    options = tmp_path / "options.json"
    options.write_text('{"*": {"compile": "eager"}}')
    made = redirect.program_environment({"HOME": "/h"}, str(options))
    assert made == {"HOME": "/h", redirect.OVERRIDE: ">=0:multigraph", "MULTIGRAPH_OPTIONS": f"@{options}"}
    some = {redirect.OVERRIDE: "3:multigraph"}
    assert redirect.program_environment(some, None) == some
    assert redirect.program_environment({redirect.OVERRIDE: ""}, None) == {redirect.OVERRIDE: ">=0:multigraph"}
    with pytest.raises(redirect.CannotRedirect, match="names another backend; unset it"):
        redirect.program_environment({redirect.OVERRIDE: ">5:eager"}, None)
    broken = tmp_path / "broken.json"  # a file is read once
    broken.write_text("{")
    with pytest.raises(OptionsError, match="line 1"):
        redirect.program_environment({}, str(broken))


@pytest.mark.parametrize(
    ("rules", "level"), [(">=0:multigraph", "ok"), ("0-5:multigraph;>5:eager", "warning"), (">=0:eager", "warning")]
)
def test_the_doctor_says_when_it_is_in_force(rules: str, level: str) -> None:
    found = [finding for finding in environment({redirect.OVERRIDE: rules}) if redirect.OVERRIDE in finding.text]
    assert [finding.level for finding in found] == [level]
    said = "what asks for Inductor is compiled by multigraph" if level == "ok" else "go to another backend"
    assert said in found[0].text
