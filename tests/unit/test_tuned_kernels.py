"""What a process without a pool has tuned is found by those who look as Inductor's pool does, without a tag."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from multigraph_backend import _compat
from multigraph_backend.lower import tuned_kernels

CONFIG: Any = types.SimpleNamespace(kwargs={"XBLOCK": 128}, num_warps=4, num_stages=1)


def found(source: Path, tag: str) -> Any:
    with _compat.compiler_config.patch(cache_key_tag=tag):
        return _compat.AutotuneCache.create({}, str(source), "hash")._read()


@pytest.mark.parametrize("pools_tag", ["", "the program's"])
def test_a_tuned_kernel_is_found_without_the_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools_tag: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", pools_tag)
    sources = [tmp_path / "ab" / f"{name}.py" for name in (f"ab{len(pools_tag)}", "abother")]
    sources[0].parent.mkdir()
    for source in sources:
        source.write_text("# a kernel")
    with _compat.compiler_config.patch(cache_key_tag="a compile of ours"):
        noted = _compat.noted_artifacts()
        _compat.AutotuneCache.create({}, str(sources[0]), "hash").save(CONFIG, 1)
        artifacts = _compat.artifact_keys(noted)
        assert [kind for kind, _ in artifacts] == ["autotune"]
        assert found(sources[0], pools_tag) is None
        assert tuned_kernels.hand_over(artifacts) == 1
        assert tuned_kernels.hand_over(artifacts) == 0
    assert found(sources[0], pools_tag) == found(sources[0], "a compile of ours")
    assert found(sources[0], pools_tag)["XBLOCK"] == 128
    assert found(sources[1], pools_tag) is None
    assert not [entry for entry in sources[0].parent.iterdir() if entry.name.startswith(".")]


def test_what_is_not_there_any_more_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert tuned_kernels.hand_over([("autotune", "ab/nothing.best_config"), ("inductor", "key")]) == 0
