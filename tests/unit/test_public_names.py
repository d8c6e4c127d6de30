"""`dir(multigraph_backend)` shows what is public, in a fresh interpreter and in one that has loaded everything."""

from __future__ import annotations

import json
import subprocess
import sys

import multigraph_backend

MODULES = {"allocator", "doctor", "metrics"}


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_dir_shows_what_is_public_before_anything_is_loaded() -> None:
    program = (
        "import json, sys, multigraph_backend\nnames = dir(multigraph_backend)\n"
        "print(json.dumps([names, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    names, torch_is_loaded = json.loads(done.stdout)
    assert public(names) == {*multigraph_backend.__all__, *MODULES}
    assert {"__all__", "__doc__", "__file__", "__version__"} <= set(names)
    assert names == sorted(names)
    assert not torch_is_loaded


def test_what_is_loaded_beneath_is_not_shown() -> None:
    import multigraph_backend.events
    import multigraph_backend.region.region

    assert {"events", "region", "process"} <= set(vars(multigraph_backend))
    assert public(dir(multigraph_backend)) == {*multigraph_backend.__all__, *MODULES}


def test_each_name_that_is_shown_is_there() -> None:
    """Tools that list a package ask for every name that it shows, and expect AttributeError or a value."""
    for name in dir(multigraph_backend):
        value = getattr(multigraph_backend, name)
        assert name not in MODULES or value is sys.modules[f"multigraph_backend.{name}"]


def test_a_star_import_brings_names_and_no_modules() -> None:
    namespace: dict[str, object] = {}
    exec("from multigraph_backend import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(multigraph_backend.__all__)
