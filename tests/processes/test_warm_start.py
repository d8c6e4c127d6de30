"""A second process compiles nothing, and has everything that the first one used when its first call has returned.

Misses of torch's caches are counted, and times are not judged.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from multigraph_backend.cache import manifests
from tests.support import forked


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    environ.pop(manifests.VARIABLE, None)
    return forked.run(*command, env=environ, timeout=600)


def program(folder: Path, **arguments: Any) -> dict[str, Any]:
    done = python(folder, "-m", "tests.support.warm_start", json.dumps(arguments))
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of caches in which one process compiled and used generic and two variants."""
    folder = tmp_path_factory.mktemp("caches")
    said = program(folder, sizes=[5, 8, 8, 48])
    assert said["stats"]["loaded_ahead"] == 0
    assert said["aot_autograd"]["autograd_cache_miss"] == 3
    print("cold", said["calls"])
    return folder


def nothing_compiled(said: dict[str, Any]) -> bool:
    misses = [said["aot_autograd"].get(f"autograd_cache_{kind}", 0) for kind in ("miss", "bypass", "saved")]
    return misses == [0, 0, 0] and said["inductor"].get("fxgraph_cache_miss", 0) == 0


def test_a_second_process_has_all_of_it_after_its_first_call(cold: Path) -> None:
    said = program(cold, sizes=[48, 5, 8, 64])
    assert nothing_compiled(said)
    assert said["aot_autograd"]["autograd_cache_hit"] == 3
    # the first call took its own variant out of the caches, and no later call took anything
    assert said["stats"]["variants_compiled"] == 1
    assert said["stats"]["generic_compiled"] == 0
    assert said["stats"]["loaded_ahead"] == 2
    assert set(said["states"].values()) == {"ready"}
    assert said["stats"]["variant_calls"] == 3
    assert said["stats"]["generic_calls"] == 1
    print("second process", said["calls"], "settled in", said["settled"])


def test_one_that_uses_one_variant_has_the_others_ready(cold: Path) -> None:
    said = program(cold, sizes=[5])
    assert said["states"] == {"x[0] == 8": "ready", "x[0] % 16 == 0": "ready", "generic": "ready"}
    assert said["stats"]["loaded_ahead"] == 2
    assert nothing_compiled(said)


IN_A_FOLDER_OF_ITS_OWN = """
import os, sys, torch
from torch._inductor.utils import fresh_cache
with fresh_cache(dir=sys.argv[1]):
    torch.compile(lambda x: x.sin() + 1, backend="multigraph")(torch.randn(4))
from multigraph_backend import wait_until_warm
assert wait_until_warm()
print(os.listdir(sys.argv[1]))
"""


def test_a_program_removes_its_own_folder_of_caches_right_behind_its_call(tmp_path: Path) -> None:
    """Nothing is written into it meanwhile, which torch would warn of, nor afterwards, or to where torch's are now."""
    own, usual = tmp_path / "own", tmp_path / "usual"
    own.mkdir()
    done = python(usual, "-c", IN_A_FOLDER_OF_ITS_OWN, str(own))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Failed to remove" not in done.stderr
    assert list(usual.glob("*/*.json")) == []


def test_training(tmp_path: Path) -> None:
    """Forward and backward of a variant come together."""
    assert program(tmp_path, sizes=[5, 8, 48], train=True)["aot_autograd"]["autograd_cache_miss"] == 3
    said = program(tmp_path, sizes=[8, 5, 64], train=True)
    assert nothing_compiled(said)
    assert said["stats"]["loaded_ahead"] == 2


def test_the_manifest_says_what_was_used_how_often_and_in_which_order(cold: Path) -> None:
    (found,) = manifests.find(cold / manifests.name()).manifests
    assert [entry.condition for entry in found.used] == ["generic", "x[0] == 8", "x[0] % 16 == 0"]
    assert found.names == ("Model", "forward", "Model.forward")
    assert all(entry.calls >= 1 for entry in found.used)
    assert all(form.key is not None for entry in found.used for form in entry.forms)


@pytest.mark.slow
def test_a_process_that_is_over_is_carried_to_another_folder(cold: Path, tmp_path: Path) -> None:
    """Saved by a process that compiled nothing, out of torch's folders; there, every compile is a hit."""
    path = tmp_path / "file"
    done = python(cold, "-m", "multigraph_backend", "cache", "save", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 entries of torch's caches, 6 libraries of kernels and 1 manifests" in done.stdout
    there = tmp_path / "there"
    done = python(there, "-m", "multigraph_backend", "cache", "load", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    libraries = {path.name: path.stat().st_mtime_ns for path in there.rglob("*.main.so")}
    assert len(libraries) == 6
    said = program(there, sizes=[8, 5, 48])
    assert {path.name: path.stat().st_mtime_ns for path in there.rglob("*.main.so")} == libraries  # none was made again
    assert nothing_compiled(said)
    assert said["aot_autograd"]["autograd_cache_hit"] == 3
    assert said["stats"]["loaded_ahead"] == 2


@pytest.mark.slow
def test_a_process_that_lives_saves_and_the_next_one_loads(cold: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    said = program(cold, sizes=[5, 8], save=path)
    assert "1 manifests" in said["saved"]
    said = program(tmp_path / "there", sizes=[8, 48], load=path)
    assert nothing_compiled(said)
    assert said["stats"]["loaded_ahead"] == 2


def test_a_file_that_is_refused_changes_nothing(cold: Path, tmp_path: Path) -> None:
    path, there = tmp_path / "file", tmp_path / "there"
    assert python(cold, "-m", "multigraph_backend", "cache", "save", str(path)).returncode == 0
    path.write_bytes(path.read_bytes()[:-1])
    done = python(there, "-m", "multigraph_backend", "cache", "load", str(path))
    assert done.returncode == 1
    assert "it was cut off" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(there.rglob("*.json")) == []
    done = python(cold, "-m", "multigraph_backend", "cache", "save", str(path), "--model", "Another")
    assert done.returncode == 1
    assert "no manifest is of 'Another'" in done.stderr


@pytest.mark.slow
def test_manifests_of_nonsense_cost_nothing_but_the_warm_start(cold: Path, tmp_path: Path) -> None:
    """Torn, or about code that is gone: the calls are right, and what they need comes as they need it."""
    import shutil

    there = tmp_path / "there"
    shutil.copytree(cold, there)
    (path,) = (there / manifests.name()).glob("*.json")
    path.write_bytes(path.read_bytes()[:100])
    said = program(there, sizes=[5, 8, 48])
    assert said["stats"]["refused_manifests"] >= 1
    assert said["stats"]["loaded_ahead"] == 0
    assert nothing_compiled(said)
    shutil.rmtree(there / "aotautograd")
    said = program(there, sizes=[5, 8])
    assert said["stats"]["loaded_ahead"] == 0
    assert said["stats"]["generic_compiled"] == said["stats"]["variants_compiled"] == 1
