"""A model that one process compiled ahead of time is loaded by another, which compiles nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support import forked, saved_function, saved_training


def run(
    what: str, path: Path, cache: Path, disabled: str = "", program: str = saved_function.__file__, **environ: str
) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "MULTIGRAPH_DISABLE": disabled, **environ}
    done = forked.run(program, what, str(path), env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_a_second_process_loads_what_the_first_has_saved_and_compiles_nothing(tmp_path: Path) -> None:
    first = run("save", tmp_path / "model", tmp_path / "cache")
    assert first["states"] == {"x[0] == 4": "ready", "x[0] == 8": "declared", "generic": "ready"}
    second = run("load", tmp_path / "model", tmp_path / "cache")
    assert second["states"] == first["states"]  # what was used, and nothing else
    assert (second["caches"]["autograd_cache_hit"], second["caches"].get("autograd_cache_miss", 0)) == (2, 0)
    # generic by the call that needed it, the variant beside the calls
    assert second["stats"] == {
        "regions": 1, "generic_compiled": 1, "loaded_ahead": 1, "generic_calls": 2, "variant_calls": 1
    }  # fmt: skip
    assert max(first["furthest"], second["furthest"]) < 1e-5
    assert (second["graph"], second["compiler"]) == (False, False)  # nor loaded the graph, or what compiles
    by_inductor = run("load", tmp_path / "model", tmp_path / "cache", "stored_code")
    assert by_inductor["compiler"]
    assert (second["past_inductor"], by_inductor["past_inductor"]) == ([True, True], [False, False])
    assert (by_inductor["caches"], by_inductor["stats"]) == (second["caches"], second["stats"])
    # without the caches it is compiled again, and right
    third = run("load", tmp_path / "model", tmp_path / "other")
    assert (third["states"], third["caches"]["autograd_cache_miss"]) == (first["states"], 2)
    assert third["furthest"] < 1e-5


def test_without_the_libraries_of_its_kernels_it_asks_the_compiler(tmp_path: Path) -> None:
    run("save", tmp_path / "model", tmp_path / "cache")
    libraries = list((tmp_path / "cache").rglob("*.main.so"))
    assert libraries
    for number, library in enumerate(libraries):
        library.write_bytes(b"") if number % 2 else library.unlink()
    second = run("load", tmp_path / "model", tmp_path / "cache")
    assert second["furthest"] < 1e-5


def test_where_nothing_may_be_compiled_it_is_loaded_all_the_same(tmp_path: Path) -> None:
    first = run("save", tmp_path / "model", tmp_path / "cache")
    second = run("fail_on_recompile", tmp_path / "model", tmp_path / "cache")
    assert second["states"] == first["states"]
    assert second["caches"].get("autograd_cache_miss", 0) == second["eager_calls"] == second["failures"] == 0
    assert second["furthest"] < 1e-5
    eagerly = run("force_eager", tmp_path / "model", tmp_path / "cache")
    assert eagerly["eager_calls"] > 0  # until code was loaded beside the calls, which are no frames of Dynamo's
    assert (eagerly["failures"], eagerly["furthest"] < 1e-5) == (0, True)


def test_with_damaged_caches_it_is_right_and_asks_inductor(tmp_path: Path) -> None:
    run("save", tmp_path / "model", tmp_path / "cache")
    data = (tmp_path / "model").read_bytes()
    for entry in (tmp_path / "cache" / "aotautograd").rglob("*"):
        if entry.is_file():
            entry.write_bytes(entry.read_bytes()[:-20])
    damaged = run("load", tmp_path / "model", tmp_path / "cache")
    assert damaged["compiler"]
    assert damaged["furthest"] < 1e-5
    assert damaged["stats"].get("failures", 0) == damaged["stats"].get("eager_calls", 0) == 0
    assert (tmp_path / "model").read_bytes() == data


def test_what_trains_with_packed_tensors_is_loaded_with_its_backward_and_needs_no_compiler(tmp_path: Path) -> None:
    program = saved_training.__file__
    # with a variable that is read early each has an interpreter of its own, which has not found the compiler before
    own = {"PYTHONHASHSEED": "1"}
    first = run("save", tmp_path / "model", tmp_path / "cache", program=program, **own)
    (tmp_path / "nothing").mkdir()
    nowhere = {**own, "PATH": str(tmp_path / "nothing")}
    second = run("load", tmp_path / "model", tmp_path / "cache", program=program, **nowhere)
    assert (first["compiler"], second["compiler"]) == (True, False)
    assert second["packed_tensors"] == first["packed_tensors"] > 0
    for process in (first, second):
        assert process["furthest"] < 0.05
        assert process["failures"] == process["eager_calls"] == 0
    by_inductor = run("load", tmp_path / "model", tmp_path / "cache", "stored_code", program, **nowhere)
    assert by_inductor["failures"] > 0  # which looks for one
    assert by_inductor["furthest"] < 0.05  # eagerly
