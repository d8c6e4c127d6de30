"""`MULTIGRAPH_OPTIONS` as JSON and as a file: what is read, what is wrong with it and where; keys without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multigraph_backend import environment
from multigraph_backend.options import Options, OptionsError


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file was read before, and no model was compiled."""
    monkeypatch.setattr(environment, "_read", {})
    monkeypatch.setattr(environment, "_models", {})
    monkeypatch.setattr(environment, "_matched", set())
    yield
    monkeypatch.delenv("MULTIGRAPH_OPTIONS", raising=False)


def build(text: str, *models: str, name: str | None = None) -> Options:
    return Options.build(None, None, models, {"MULTIGRAPH_OPTIONS": text}, name)


def error(text: str, *models: str) -> str:
    with pytest.raises(OptionsError) as caught:
        build(text, *models)
    return str(caught.value)


# ---------------------------------------------------------------- JSON, or the path of a file


def test_what_begins_as_json_does_is_json_and_all_else_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("models.json", "{odd}.json", "@odd.json", "with space.json"):
        Path(name).write_text(json.dumps({"*": {"compile_timeout": len(name)}}))
    for given, wanted in (
        ("@models.json", 11),
        ("models.json", 11),
        ("  @ models.json\n", 11),
        (f"@{tmp_path}/models.json", 11),
        (f"{tmp_path}/models.json", 11),
        ("@~/models.json", 11),
        ("~/models.json", 11),
        ("@{odd}.json", 10),
        ("./{odd}.json", 10),
        ("@@odd.json", 9),
        ("@with space.json", 15),
        ('{"*": {"compile_timeout": 1}}', 1),
        (' \n{"*": {"compile_timeout": 2}}', 2),
    ):
        assert build(given).compile_timeout == wanted, given


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it changes, ends, or is a pipe; and where the working folder is another one later."""
    file = tmp_path / "models.json"
    file.write_text('{"*": {"compile": "eager"}}')
    monkeypatch.chdir(tmp_path)
    assert build("@models.json").compile == "eager"
    file.write_text("{")
    assert build("@models.json").compile == "eager"
    file.unlink()
    monkeypatch.chdir("/")
    assert build("@models.json").compile == "eager"
    read, write = os.pipe()
    os.write(write, b'{"*": {"on_failure": "raise"}}')
    os.close(write)
    assert [build(f"@/dev/fd/{read}").on_failure for _ in range(2)] == ["raise", "raise"]
    os.close(read)


def test_a_file_that_could_not_be_read_is_looked_at_again(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    assert "which is not there" in error(f"@{file}")
    file.write_text("\ufeff{}")  # with the mark that some editors put before the text
    assert build(f"@{file}") == Options()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("@", "MULTIGRAPH_OPTIONS is @ without a path; "),
        ("/no/such.json", " names the file /no/such.json, which is not there; MULTIGRAPH_OPTIONS is JSON, which"),
        ("lazy", "/lazy, which is not there (a path from the working folder, "),
        ("@~no_such_user/x", "no_such_user/x, which is not there"),
        ("/etc", "MULTIGRAPH_OPTIONS names /etc, which is a folder; name a file in it"),
        ("/etc/passwd/models.json", "names the file /etc/passwd/models.json, which is not there"),
        ("*: {compile: " + "eager" * 100, "..., which is not there"),
        ('\'{"*": {}}\'', "MULTIGRAPH_OPTIONS begins and ends with a quote ('); set it without: '{\"*\": {}}'"),
        ('"*": {"compile": "eager"}', "Extra data at line 1, column 4; all entries stand in one object: { ... }"),
    ],
)  # fmt: skip
def test_what_is_no_file_and_no_json(given: str, said: str) -> None:
    assert said in error(given)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert error("/etc/models.json") == (
        "MULTIGRAPH_OPTIONS names the file /etc/models.json, which cannot be read: Permission denied; "
        f"make it readable for the user of this process ({os.geteuid()})"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", " is empty; write an object of model names to options, {} for none"),
        ("[]", " must be an object of model names to options, got [] (list)"),
        ('{\n  "*": {"compile": "eager",}\n}', ", line 2, column 28: not valid JSON: E"),
        ('{\n  "*": {"compile": "eager",}\n}', "; take away the comma before it"),
        ("{\n  '*': {}\n}", 'write double quotes (") for single ones'),
        ('{"*": {}, // all\n "M": {}}', "line 1, column 11: "),
        ('{"*": {}, // all\n "M": {}}', "JSON has no comments: take it away"),
        ('{"*": {"record_small": True}}', "write true"),
        ('{"*": {"compile_timeout": None}}', "write null"),
        ('{*: {}}', ", line 1, column 2: not valid JSON"),
        ('{"*": {compile: "eager"}}', 'write "compile", in double quotes'),
        ('{"*": {"compile": "eager"', "a } or ] is missing at the end"),
        ('{"*": {"compile": "eager}}', 'a quote (") is missing'),
        ('{"*": {"compile": "eager" "on_failure": "raise"}}', "a comma is missing before it"),
        ('{"*": {}} {"M": {}}', "all entries stand in one object: { ... }"),
        ('{"*": {"compile": "ea\nger"}}', "a string ends in the line in which it begins"),
        ('{\n "M": {},\n "M": {}}', ", line 3, column 2: 'M' is in this object already, line 2, column 2; lea"),
        ('{"M": {"compile": "lazy",\n "compile": "eager"}}', "line 2, column 2: 'compile' is in this object already,"),
        ('{\n "M": ["compile"]}', ", line 2, column 2: 'M' must be an object of options, got ['compile'] (list)"),
        ('{\n\n "compile": "eager"}', "line 3, column 2: the file is an object of model names to options, and"),
        ("[" * 100_000, " holds objects or lists in more levels than can be read"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_with_its_place_and_the_remedy(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(content)
    text = error(f"@{file}", "M", "forward")
    assert text.startswith(str(file))
    if not (sys.version_info >= (3, 13) and "the comma before" in said):  # there the comma is what the place is of
        assert said in text


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_bytes('{"*":\n "größe"}'.encode("latin-1"))
    assert error(f"@{file}") == f"{file}, line 2, column 5: byte 0xf6 is not UTF-8; save the file as UTF-8"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ('"specialise": []', "(did you mean 'specialize'?) (in FILE, line 3, column 3, for 'M')"),
        ('"compile": "lasy"', "got 'lasy' (str) (in FILE, line 3, column 3, for 'M')"),
        ('"specialize": [\n{"x[0]": 1},\n {"x[0]": true}]', "got True (bool) (in FILE, line 5, column 2, for 'M')"),
        ('"limits": {"count": 1,\n "depth": true}', "got True (bool) (in FILE, line 4, column 2, for 'M')"),
        ('"cut": ["aten::mm",\n\n 3]', "got 3 (int) (in FILE, line 5, column 2, for 'M')"),
        ('"inductor": {"max_autotune": 1}', "got 1 (int) (in FILE, line 3, column 16, for 'M')"),
        ('"name": "draft"', "options are looked up here by the name; it is given in code, or by"),
    ],
)  # fmt: skip
def test_a_wrong_option_in_a_file_is_said_with_its_place(options: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text('{"*": {},\n "M": {\n  ' + options + "}}")
    assert said.replace("FILE", str(file)) in error(f"@{file}", "M")


def test_places_are_right_for_any_json(tmp_path: Path) -> None:
    """Each key and element that the text has is found at its line and column, however it is laid out."""
    value = {"a": {"b": [1, {"c": []}, 'x]}\\"\n'], "dä": {}}, "e": {"f": -1.5e3, "": None}}
    for indent, separators in ((None, None), (2, None), (None, (" ,", " : ")), (1, (",\r\n", ":\n"))):
        text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=False)
        found = environment._parsed(text, "file")
        assert found.options == value
        for path, start in found.starts.items():
            if path:
                key = path[-1]
                wanted = json.dumps(key, ensure_ascii=False) if isinstance(key, str) else None
                inner: object = value
                for part in path:
                    inner = inner[part]  # type: ignore[index]
                assert text.startswith(wanted if wanted is not None else json.dumps(inner)[:1], start)
        assert len(found.starts) == 11


# ---------------------------------------------------------------- which keys apply, in which order


def test_keys_go_from_general_to_exact_and_the_name_of_an_instance_comes_last() -> None:
    keys = ("draft", "dr*", "Llama", "forward", "Ll*", "[D]raft", "*", "*a*", "other", "Llama.forward")
    found = environment.Entries({key: {} for key in keys})
    models = ("Llama", "forward", "Llama.forward")
    assert found.applying(models, "draft") == [
        "*", "Ll*", "Llama", "forward", "Llama.forward", "dr*", "*a*", "draft",
    ]  # fmt: skip
    assert found.applying(models) == ["*", "Ll*", "*a*", "Llama", "forward", "Llama.forward"]
    assert found.applying(("f",)) == ["*"]


def test_what_is_said_of_an_instance_replaces_what_is_said_of_its_class() -> None:
    text = json.dumps({
        "draft": {"compile_timeout": 4},
        "Llama": {"compile_timeout": 2, "compile": "eager", "max_recordings": 2},
        "dra*": {"compile_timeout": 3, "max_recordings": 3},
        "*": {"compile_timeout": 1, "on_failure": "raise"},
    })  # fmt: skip
    options = build(text, "Llama", "forward", name="draft")
    assert (options.compile_timeout, options.max_recordings, options.compile) == (4.0, 3, "eager")
    assert (options.on_failure, options.name) == ("raise", "draft")
    assert build(text, "Llama", "forward").max_recordings == 2
    in_code = Options.build({"name": "draft", "compile_timeout": 5}, None, ("Llama",), {"MULTIGRAPH_OPTIONS": text})
    assert (in_code.compile_timeout, in_code.max_recordings) == (5.0, 3)


# ---------------------------------------------------------------- keys that no model answers to


def test_a_key_that_matched_no_model_is_named_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("*", "LamaForCausalLM", "Bert*", "drafts", "transformers.GPT2Model", "Qu?n*")
    text = json.dumps({key: {} for key in keys})
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", text)
    assert environment.unmatched(os.environ) == ()  # nothing was compiled
    Options.build(model_names=("LlamaForCausalLM", "forward"))
    Options.build({"name": "draft"}, None, ("GPT2Model", "forward"))
    Options.build(model_names=("BertModel", "forward"))
    assert [(entry.key, entry.nearest) for entry in environment.unmatched(os.environ)] == [
        ("LamaForCausalLM", "LlamaForCausalLM"),
        ("drafts", "draft"),
        ("transformers.GPT2Model", "GPT2Model"),
        ("Qu?n*", None),
    ]
    assert environment.said_of(environment.unmatched(os.environ)[:2]) == (
        "MULTIGRAPH_OPTIONS: no model that was compiled has the name 'LamaForCausalLM' (did you mean "
        "'LlamaForCausalLM'?) or 'drafts' (did you mean 'draft'?); names were: LlamaForCausalLM, forward, "
        "GPT2Model, draft, BertModel"
    )
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", '{"Other": {}}')
    assert [entry.key for entry in environment.unmatched(os.environ)] == ["Other"]
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", "{")
    assert environment.unmatched(os.environ) == ()


def test_an_environment_that_is_not_the_processs_leaves_no_trace() -> None:
    build('{"M": {}, "N": {}}', "M")
    assert environment._models == {}


PROGRAM = """
import os, sys
from multigraph_backend.options import Options
for name in sys.argv[1:]:
    Options.build(model_names=(name,))
if os.fork() == 0:
    sys.exit()
os.wait()
"""


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (["Model"], "no model that was compiled has the name 'Modle' (did you mean 'Model'?); names were: Model\n"),
        (["Modle"], ""),
        ([], ""),
    ],
    ids=str,
)  # fmt: skip
def test_it_is_said_once_when_the_process_ends(models: list[str], said: str) -> None:
    """Not in a process that compiled nothing, nor in one that was forked."""
    environ = {**os.environ, "MULTIGRAPH_OPTIONS": '{"Modle": {}}'}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *models], env=environ, capture_output=True, text=True, check=True
    )
    assert run.stderr == (f"MULTIGRAPH_OPTIONS: {said}" if said else "")
