"""Each finding of `doctor` is triggered, and `explain SCRIPT` leaves the script as python would run it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.__main__ import main
from multigraph_backend.backend import multigraph
from multigraph_backend.doctor import diagnose
from multigraph_backend.doctor.findings import Diagnosis, Finding
from multigraph_backend.doctor.installation import LOST, SUPPORTED_TORCH, entry_point, private_symbols, versions
from multigraph_backend.doctor.machine import GpuFacts, cpp_compiler, gpu, native_calls
from multigraph_backend.doctor.self_test import run_self_test
from multigraph_backend.doctor.settings import cache_folders, caches, environment

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(("MULTIGRAPH_", "TORCH"))}


def told(findings: Any) -> str:
    """Findings as text, without those that are fine."""
    return "\n".join(
        f"{entry.level}: {entry.text}" + (f" -> {entry.remedy}" if entry.remedy else "")
        for entry in findings
        if entry.level != "ok"
    )


def run(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = [variables.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**ENVIRON, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environ, cwd=cwd, capture_output=True, text=True, timeout=300
    )


def command(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "multigraph_backend", *arguments, cwd=cwd, **variables)


# ---------------------------------------------------------------- the account


def test_the_account_as_text_as_data_and_as_an_exit_status() -> None:
    found = Diagnosis(
        (
            Finding("versions", "ok", "torch 2.13.0", facts={"torch": "2.13.0"}),
            Finding("c++ compiler", "error", "none found", "install g++"),
            Finding("gpu", "warning", "none", "update the driver"),
        )
    )
    assert_expected_inline(
        str(found),
        """\
ok       versions      torch 2.13.0
error    c++ compiler  none found
                       remedy: install g++
warning  gpu           none
                       remedy: update the driver
errors: 1, warnings: 1""",
    )
    assert json.loads(found.to_json()) == found.to_dict()
    assert found.to_dict()["level"] == "error"
    assert [Finding(**entry) for entry in found.to_dict()["findings"]] == list(found.findings)
    assert [Diagnosis(found.findings[:count]).exit_code for count in (0, 1, 2)] == [0, 0, 1]
    assert Diagnosis(found.findings[2:]).exit_code == 0


def test_this_machine_can_run_the_tests() -> None:
    found = diagnose(ENVIRON, self_test=False)
    assert told(entry for entry in found.findings if entry.level == "error") == ""
    checks = ["versions", "entry point", "private symbols", "c++ compiler", "gpu", "caches", "environment", "self-test"]
    assert [check for check in checks if not any(entry.check == check for entry in found.findings)] == []


# ---------------------------------------------------------------- what is installed


def test_the_supported_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (first, last) = (".".join(map(str, release)) for release in SUPPORTED_TORCH)
    assert f"torch>={first},<{last}" in project["dependencies"]


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("2.11.0+cu130", ""),
        ("2.15.1", ""),
        ("2.10.1", "error: torch 2.10.1 is older than multigraph supports (>=2.11,<2.16)"),
        ("2.16.0.dev1", "warning: torch 2.16.0.dev1 is newer than what multigraph was tested with (>=2.11,<2.16)"),
        (None, "error: torch is not installed"),
    ],
)
def test_a_torch_out_of_range(torch: str | None, expected: str) -> None:
    text = told(versions({"python": "3.11.7", "torch": torch}))
    assert text.partition(" -> ")[0] == expected
    assert not expected or text.endswith("pip install 'torch>=2.11,<2.16'")


class _Entry(importlib.metadata.EntryPoint):
    dist: Any = None


def _entry(value: str = "multigraph_backend.backend:multigraph", version: str | None = None) -> _Entry:
    entry = _Entry("multigraph", value, "torch_dynamo_backends")
    if version is not None:
        vars(entry)["dist"] = type("Distribution", (), {"version": version})
    return entry


def test_the_backend_s_name() -> None:
    assert told(entry_point([_entry(version=multigraph_backend.__version__)], multigraph)) == ""
    assert "error: not registered" in told(entry_point([], multigraph))
    assert "is not the backend of the package" in told(entry_point([_entry("json:dumps")], multigraph))
    assert "error: no_such:thing cannot be loaded: ModuleNotFoundError" in told(
        entry_point([_entry("no_such:thing")], multigraph)
    )
    assert told(entry_point([_entry(version="0.0.1")], multigraph)).startswith("warning: registered by version 0.0.1")


def test_missing_private_symbols_name_the_feature_that_is_off() -> None:
    table = {
        "here": _compat.SYMBOLS["ShapeEnv"],
        "gone": _compat.PrivateSymbol("gone", "torch._dynamo", "no_such_thing"),
        "moved": _compat.PrivateSymbol("moved", "torch._no_such_module", "thing"),
        "changed": _compat.PrivateSymbol(
            "changed", "torch._dynamo.utils", "counters", feature="instruments", shape=("no_such_part",)
        ),
        "new": _compat.PrivateSymbol("new", "torch._dynamo", "no_such_thing", feature="a feature of tomorrow"),
    }
    found = list(private_symbols(table, "2.99.0"))
    assert [(entry.level, entry.facts["feature"]) for entry in found] == [
        ("error", "variants"),
        ("warning", "instruments"),
        ("warning", "a feature of tomorrow"),
    ]
    assert found[0].text == (
        "'variants' is off: no graph gets variants: each is compiled at once, as any backend would. torch 2.99.0: "
        "torch._dynamo.no_such_thing is missing (module 'torch._dynamo' has no attribute 'no_such_thing') (and 1 more)"
    )
    assert "counters lacks no_such_part" in found[1].text


def test_all_features_of_private_symbols_have_words_for_their_loss() -> None:
    assert {row.feature for row in _compat.SYMBOLS.values()} <= set(LOST)


# ---------------------------------------------------------------- the machine


def _program(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_works() -> None:
    (found,) = cpp_compiler((None, "no-such-compiler", os.environ.get("CXX", "g++")), (2, 13), ENVIRON, has_gpu=False)
    assert (found.level, found.facts["works"]) == ("ok", True)


def test_no_compiler() -> None:
    assert told(cpp_compiler((None, "no-such-compiler"), (2, 13), ENVIRON, has_gpu=False)) == (
        "error: none found (tried: no-such-compiler); graphs on the CPU run eagerly"
        " -> install g++ or clang (apt-get install g++ python3-dev), or set CXX to a C++ compiler"
    )
    assert told(cpp_compiler("no-such-compiler", (2, 13), ENVIRON, has_gpu=True)).startswith("warning: none found")
    assert "none found (tried: nothing)" in told(cpp_compiler(None, (2, 13), ENVIRON, has_gpu=False))


def test_a_compiler_that_builds_nothing(tmp_path: Path) -> None:
    broken = _program(tmp_path, 'test "$1" = --version && echo toy 1.0 && exit; echo fatal error: no disk >&2; exit 1')
    text = told(cpp_compiler(broken, (2, 13), ENVIRON, has_gpu=False))
    assert "compiler is there but builds nothing: fatal error: no disk; graphs on the CPU run eagerly" in text
    silent = _program(tmp_path, "echo toy 1.0")
    assert "no library came out" in told(cpp_compiler(silent, (2, 13), ENVIRON, has_gpu=False))
    headless = _program(tmp_path, 'test "$1" = --version || { echo error: Python.h: No such file >&2; exit 1; }')
    assert "apt-get install python3-dev" in told(cpp_compiler(headless, (2, 13), ENVIRON, has_gpu=False))


def test_a_compiler_with_arguments_depends_on_torch() -> None:
    name = f"env {os.environ.get('CXX', 'g++')}"
    assert told(cpp_compiler((None, name), (2, 15), ENVIRON, has_gpu=False)) == ""
    assert "set CXX to one program, without arguments" in told(cpp_compiler(name, (2, 14), ENVIRON, has_gpu=False))


H200: dict[str, Any] = {
    "devices": (("NVIDIA H200", (9, 0)), ("NVIDIA H200", (9, 0))),
    "runtime": "13.0",
    "driver": "13.1",
    "architectures": ("sm_80", "sm_90", "compute_120"),
    "triton": "3.6.0",
    "c_compiler": "gcc",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"devices": (("old", (8, 6)),)}, ""),
        ({"devices": (("new", (12, 1)),)}, ""),
        ({"devices": (("newer", (10, 0)),)}, "error: this torch has no code for newer"),
        ({"devices": (("P100", (6, 0)),), "architectures": ("sm_60",)}, "error: Triton, which makes Inductor's GPU"),
        ({"triton": None, "triton_problem": "ImportError: no"}, "error: Triton, which makes Inductor's GPU code, can"),
        ({"c_compiler": None}, "error: Triton found no C compiler"),
        ({"devices": ()}, ""),
        ({"devices": (), "driver": None, "triton": None}, ""),
        ({"devices": (), "runtime": None}, "warning: none: graphs run on the CPU (torch is built without CUDA"),
        ({"devices": (), "visible": ""}, "warning: none: graphs run on the CPU (torch is built for CUDA 13.0; the dri"),
        ({"devices": (), "complaint": "too old"}, "warning: none: graphs run on the CPU (torch is built for CUDA 13.0"),
    ],
)
def test_gpus(changes: dict[str, Any], expected: str) -> None:
    text = told(gpu(GpuFacts(**{**H200, **changes})))
    assert text.startswith(expected)
    assert bool(text) == bool(expected)
    assert not text or " -> " in text


def test_gpus_are_named_once_with_what_they_need() -> None:
    first, second = gpu(GpuFacts(**H200))
    assert first.text == (
        "2 x NVIDIA H200 (capability 9.0); torch is built for CUDA 13.0; the driver runs up to CUDA 13.1"
    )
    assert second.text == "triton 3.6.0 can be imported"


# ---------------------------------------------------------------- caches and environment

ON = {"FX graph cache": True, "AOTAutograd cache": True}


def test_the_folder_is_the_one_that_inductor_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # torch sets it: after the test it is as it was
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert str(cache_folders(ENVIRON)["Inductor"]) == cache_dir()
    assert str(cache_folders({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})["Inductor"]) == str(tmp_path)


def test_sizes_of_caches(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"0" * 2_500_000)
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "none yet")}
    found = list(caches(environ, ON, "me"))
    assert [entry.text for entry in found] == [
        f"Inductor keeps 2.5 MB in {tmp_path}",
        f"Triton keeps 0.0 MB in {tmp_path}/none yet",
        "on: FX graph cache, AOTAutograd cache",
    ]
    assert found[0].facts["bytes"] == 2_500_000


def test_the_home_folder_is_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = Diagnosis(tuple(caches({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}, ON, "me")))
    assert "in ~/cache" in str(found)
    assert str(tmp_path) not in found.to_json()


def test_caches_that_do_not_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    text = told(caches({"TORCHINDUCTOR_CACHE_DIR": str(file / "cache")}, ON, "me"))
    assert text.startswith("error: Inductor keeps 0.0 MB in ")
    assert "which cannot be written to: compiles fail -> set TORCHINDUCTOR_CACHE_DIR" in text
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    assert told(caches(environ, {**ON, "FX graph cache": False}, "me")) == (
        "warning: off: FX graph cache: each process compiles anew -> unset TORCHINDUCTOR_FX_GRAPH_CACHE"
    )
    assert "this user has no name" in told(caches({}, ON, None))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ('{"*": {"compile": "eager"}, "Llama*": {"specialize": [{"x[0]": [1, 2]}]}}', ""),
        ("{", "error: MULTIGRAPH_OPTIONS is not valid JSON: Expecting property name"),
        ("[1]", "error: MULTIGRAPH_OPTIONS must be an object of model names to options"),
        ('{"Llama*": {"spezialize": []}}', "error: unknown option 'spezialize' (did you mean 'specialize'?) (in MULTI"),
        ('{"*": {}, "m": {"compiler": "indutor"}}', "error: option 'compiler': expected the name of a backend, or a c"),
        ("/no/such/file.json", "error: MULTIGRAPH_OPTIONS names the file /no/such/file.json, which is not there"),
    ],
)
def test_options_of_the_environment(options: str, expected: str) -> None:
    text = told(environment({"MULTIGRAPH_OPTIONS": options}))
    assert text.startswith(expected)
    assert bool(text) == bool(expected)
    assert len(text.splitlines()) <= 1
    assert not text or "-> mend MULTIGRAPH_OPTIONS" in text


def test_an_option_that_has_no_effect_is_a_warning() -> None:
    options = '{"*": {"compiler": "eager"}, "m": {"mode": "max-autotune"}}'
    assert told(environment({"MULTIGRAPH_OPTIONS": options})) == (
        "warning: MULTIGRAPH_OPTIONS, 'm': mode 'max-autotune' has no effect, for the compiler is 'eager', and only "
        "Inductor tunes its code -> take that option away, or the compiler"
    )


def test_options_in_a_file_are_judged_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text('{"*": {"compile": "eager"},\n "Llama*": {"spezialize": []}}')
    text = told(environment({"MULTIGRAPH_OPTIONS": f"@{file}"}))
    assert text.startswith("error: unknown option 'spezialize' (did you mean 'specialize'?)")
    assert f"(in {file}, line 2, column 13, for 'Llama*')" in text
    assert f"-> mend MULTIGRAPH_OPTIONS ({file}); as it is" in text


def test_options_that_are_right_are_listed() -> None:
    options = '{"*": {"compile": "eager"}, "Llama*": {"specialize": [{"x[0]": [1, 2]}]}}'
    first = next(environment({"MULTIGRAPH_OPTIONS": options}))
    assert first.text == "MULTIGRAPH_OPTIONS is right: '*' (0 variants), 'Llama*' (2 variants)"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        ({"MULTIGRAPH_DISABLE": "variant"}, "error: MULTIGRAPH_DISABLE: unknown piece 'variant' (did you mean 'varia"),
        ({"MULTIGRAPH_DISABLE": "variants"}, "warning: MULTIGRAPH_DISABLE turns off variants: every call runs the ge"),
        ({"MULTIGRAPH_DISABLE": "all"}, "warning: MULTIGRAPH_DISABLE turns off all: multigraph compiles each graph a"),
        ({"TORCH_COMPILE_DISABLE": "1"}, "error: TORCH_COMPILE_DISABLE=1: torch.compile compiles nothing"),
        ({"TORCHDYNAMO_DISABLE": "1"}, "error: TORCHDYNAMO_DISABLE=1: torch.compile compiles nothing"),
        ({"TORCHDYNAMO_DISABLE": "0", "TORCH_COMPILE_DISABLE": "0", "TORCHDYNAMO_SUPPRESS_ERRORS": ""}, ""),
        ({"TORCHDYNAMO_SUPPRESS_ERRORS": "0"}, "warning: TORCHDYNAMO_SUPPRESS_ERRORS=0: what fails to compile runs ea"),
        ({"TORCH_COMPILE_OVERRIDE_BACKENDS": "0:eager"}, "warning: TORCH_COMPILE_OVERRIDE_BACKENDS=0:eager: graphs th"),
        ({"TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES": "0"}, "warning: TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES=0: sizes bec"),
    ],
)
def test_variables_of_the_environment(variables: dict[str, str], expected: str) -> None:
    text = told(environment(variables))
    assert text.startswith(expected)
    assert bool(text) == bool(expected)
    assert not text or " -> unset " in text


def test_no_other_variable_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-thing")
    main(["doctor", "--json", "--no-self-test"])
    assert "a-secret-thing" not in capsys.readouterr().out


# ---------------------------------------------------------------- the self-test


def test_the_self_test_runs_a_variant() -> None:
    # what the environment is judged for elsewhere does not reach the self-test
    environ = {**ENVIRON, "MULTIGRAPH_DISABLE": "all", "TORCH_COMPILE_DISABLE": "1"}
    (found,) = run_self_test("cpu", "aot_eager", environ, 300.0)
    assert told([found]) == ""
    assert "aot_eager on cpu: a variant and the generic graph gave eager's numbers" in found.text
    assert found.facts["problem"] is None


def test_a_compiler_that_fails_is_named_by_the_self_test(tmp_path: Path) -> None:
    (found,) = run_self_test("cpu", "no_such_backend", ENVIRON, 300.0)
    assert found.level == "error"
    assert "OptionsError: option 'compiler'" in found.text


def test_a_self_test_that_hangs_or_dies(tmp_path: Path) -> None:
    hangs = _program(tmp_path, "sleep 600 & wait")
    text = told(run_self_test("cpu", "inductor", ENVIRON, 0.2, python=hangs))
    assert text.startswith("error: inductor on cpu: gave up after 0.2 seconds")
    dies = _program(tmp_path, "echo out of luck >&2; kill -9 $$")
    text = told(run_self_test("cpu", "inductor", ENVIRON, 60.0, python=dies))
    assert text.startswith("error: inductor on cpu: the process ended with signal 9; its last words: out of luck")


# ---------------------------------------------------------------- the commands


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--help"], ["explain", "--help"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom multigraph_backend.__main__ import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = run("-c", program)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("0 False", "")
    assert multigraph_backend.__version__ in done.stdout or arguments[-1] == "--help"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["doctr"],
        ["doctor", "--timeout", "soon"],
        ["doctor", "--timeout", "0"],
        ["doctor", "more"],
        ["explain"],
        ["explain", "no_such_script.py"],
        ["explain", "--json", "no/such/folder/account.json", __file__],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m multigraph_backend" in capsys.readouterr().err


def test_doctor_exits_with_0_or_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIGRAPH_OPTIONS", raising=False)
    monkeypatch.delenv("MULTIGRAPH_DISABLE", raising=False)
    assert main(["doctor", "--no-self-test"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("errors: 0")
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "everything")
    assert main(["doctor", "--json", "--no-self-test"]) == 1
    loaded = json.loads(capsys.readouterr().out)
    (entry,) = (entry for entry in loaded["findings"] if entry["level"] == "error")
    pieces = (
        "variants, padding, cudagraphs, native_calls, patched_inputs, saved_tensors, stored_code, kernels_together, all"
    )
    assert entry["text"] == f"MULTIGRAPH_DISABLE: unknown piece 'everything'; pieces: {pieces}"


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    done = command("doctor", "--json", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    entry = json.loads(done.stdout)["findings"][-1]
    assert (entry["check"], entry["level"]) == ("torch", "error")
    assert "ImportError: libcudart.so.13" in entry["text"]


# ---------------------------------------------------------------- explain: without torch, all is as python does it

NOTHING = "multigraph: script.py compiled nothing with multigraph\n  it did not import torch in this process\n"


@pytest.mark.parametrize(
    "text",
    [
        "import sys; print(sys.argv[1:], sys.path[0], __name__, __file__)",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a message')",
        "def inner():\n    return 1 / 0\n\ntry:\n    inner()\nexcept ZeroDivisionError as error:\n"
        "    raise KeyError(1) from error",
        "raise KeyboardInterrupt",
        "not python at all",
        "import atexit, threading, time\nvalue = 'global'\natexit.register(lambda: print('at exit', value))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', value))).start()",
        "import os, sys\nif os.fork() == 0:\n    sys.exit()\nos.wait()\nprint('parent')",
        "import sys; sys.excepthook = lambda kind, error, trace: print(kind); raise ValueError",
    ],
)
def test_a_script_runs_as_python_runs_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "script.py"
    script.write_text(text)
    arguments = ["--json", "x", "--", "--version"]
    python = run("script.py", *arguments, cwd=tmp_path)
    ours = command("explain", "script.py", *arguments, cwd=tmp_path)
    assert ours.stdout.startswith(python.stdout + NOTHING)
    assert '  remedy: pass backend="multigraph" to torch.compile' in ours.stdout
    assert (ours.stdout.count("multigraph: "), ours.stderr, ours.returncode) == (1, python.stderr, python.returncode)


def test_the_script_s_folder_is_searched_and_the_current_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside.py").write_text("")
    (tmp_path / "here.py").write_text("")
    (folder / "script.py").write_text("import beside\ntry:\n    import here\nexcept ImportError:\n    print('right')")
    assert command("explain", "folder/script.py", cwd=tmp_path).stdout.startswith("right\n")


def test_the_account_of_nothing_as_json(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('first')")
    done = command("explain", "--json", "-", "script.py", cwd=tmp_path)
    first, account = done.stdout.splitlines()
    assert (first, json.loads(account), done.stderr) == ("first", {"regions": []}, "")


def test_nobody_reads_the_account(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    line = f"{sys.executable} -m multigraph_backend explain script.py | true; exit ${{PIPESTATUS[0]}}"
    environ = {**ENVIRON, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_switch_of_torch_s_is_why_nothing_was_compiled(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    done = command("explain", "script.py", cwd=tmp_path, TORCH_COMPILE_DISABLE="1")
    assert "TORCH_COMPILE_DISABLE=1: torch.compile compiles nothing" in done.stdout
    assert "remedy: unset TORCH_COMPILE_DISABLE" in done.stdout


# ---------------------------------------------------------------- explain: with torch

COMPILING = """\
import sys
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x.sin() * x.shape[0]


def run():  # the model, and with it its graph, ends here
    model = torch.compile(
        Model(), backend="multigraph", dynamic=True, options={"specialize": [{"x[0]": 8}], "compiler": "aot_eager"}
    )
    for rows in (8, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(model(x), x.sin() * rows)


if __name__ == "__main__":
    run()
    torch._dynamo.reset()
    print("done")
"""


def test_a_graph_that_has_ended_is_in_the_account(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COMPILING)
    done = command("explain", "script.py", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[:2] == ["done", "multigraph: what script.py compiled and ran"]
    assert f"Model.forward ({tmp_path}/script.py:6)" in lines[2]
    assert [line.partition(" calls")[0].split() for line in lines[4:]] == [
        ["x[0]", "==", "8", "ready", "1"],
        ["generic", "ready", "1"],
    ]


def test_a_script_that_raises_has_its_account_and_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COMPILING + "    raise ValueError('enough')\n")
    done = command("explain", "--json", "account.json", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "done\n")
    assert done.stderr.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/script.py", line 23, in <module>',
        "    raise ValueError('enough')",
        "ValueError: enough",
    ]
    (region,) = json.loads((tmp_path / "account.json").read_text())["regions"]
    assert [(entry["state"], entry["calls"]) for entry in (*region["variants"], region["generic"])] == [
        ("ready", 1)
    ] * 2


def test_a_script_that_exits_with_3_and_a_model_that_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COMPILING + "    sys.exit(3)\n")
    done = command("explain", "--model", "Llama*", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "done\nmultigraph: no graph of a model 'Llama*'; script.py has graphs of Model.forward\n"


def test_a_script_that_compiles_nothing_with_multigraph(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        COMPILING.replace("    run()\n", "    torch.compile(Model(), backend='eager')\n")
    )
    done = command("explain", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert '  no call of what torch.compile(..., backend="multigraph") returned was traced' in done.stdout


def test_native_calls_need_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (found,) = native_calls(False)
    assert (found.level, found.text.endswith("and the headers of torch and Python are there")) == ("ok", True)
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "variants, native_calls")
    (found,) = native_calls(True)
    assert found.level == "ok"
    assert "recorded calls go by way of Python" in found.text
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    (found,) = native_calls(True)
    assert (found.level, found.facts["works"]) == ("warning", False)
    assert found.text.startswith(f"no compiler of C++ was found ({tmp_path / 'none'})")
    assert found.remedy is not None
    assert "g++" in found.remedy
