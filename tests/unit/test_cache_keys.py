"""Compiles are told apart by words that are in no name of a tuned kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codecache import FxGraphHashDetails
from torch._inductor.runtime.autotune_cache import AutotuneCache

from multigraph_backend import _compat
from multigraph_backend.lower import cache_keys


def key() -> str:
    """Of all that Inductor hashes but the graph."""
    details: Any = FxGraphHashDetails(None, [torch.zeros(1)], {}, [])  # type: ignore[arg-type]
    return str(details.inductor_config)


def test_keys_are_others_for_other_words_and_the_same_for_the_same() -> None:
    plain = key()
    with cache_keys.told_apart("a"):
        first = key()
        with cache_keys.told_apart("b"):
            within = key()
    with cache_keys.told_apart("b"):
        other = key()
    with cache_keys.told_apart("a"):
        assert key() == first
    assert len({plain, first, within, other}) == 4
    assert key() == plain


def test_the_programs_metadata_stays() -> None:
    with _compat.inductor_config.patch({"aot_inductor.metadata": {"mine": "1"}}), cache_keys.told_apart("a"):
        assert _compat.inductor_config.aot_inductor.metadata == {"mine": "1", "multigraph": "a"}


def test_a_tuned_kernel_is_found_in_and_outside_of_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's pool of processes, which compiles most kernels, knows nothing of the words."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    source = str(tmp_path / "kernel.py")
    outside: Any = AutotuneCache.create({}, source, "hash")
    with cache_keys.told_apart("a"):
        within: Any = AutotuneCache.create({}, source, "hash")
    assert outside.local_cache[1] == within.local_cache[1]


@pytest.mark.parametrize(
    "before", ["import multiprocessing", "sys.modules['under_way'] = __import__('types').ModuleType('m')"]
)
def test_torch_has_the_names_that_it_has_in_other_processes(before: str, tmp_path: Path) -> None:
    """As pickle finds them: a main module that multiprocessing has entered, and one that is being imported."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import pickle, sys
{before}
import torch
if "under_way" in sys.modules:
    sys.modules["under_way"].torch = torch
    sys.modules["under_way"].own = 7
from multigraph_backend.lower import cache_keys
modules = dict(sys.modules)
before = pickle.dumps(torch.contiguous_format)
cache_keys.put_torch_first()
after = pickle.dumps(torch.contiguous_format)
assert b"torch._utils" not in before, before
assert b"torch._utils" in after, after
assert dict(sys.modules) == modules
"""
    )
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=os.environ | path)
    assert done.returncode == 0, done.stderr
