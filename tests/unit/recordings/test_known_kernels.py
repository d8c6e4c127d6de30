"""A kernel of our own that was compiled is found again by a note, and compiled where the note is not about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from multigraph_backend.cudagraphs.devices import known_kernels


@dataclass
class Source:
    """As much as is asked of Triton's."""

    text: str

    def hash(self) -> str:
        return self.text


@dataclass
class Made:
    hash: str
    metadata_group: dict[str, str]


@dataclass
class Compiler:
    folder: Path
    compiled: list[str] = field(default_factory=list)

    def __call__(self, source: Source, target: Any = None, options: Any = None) -> Made:
        self.compiled.append(source.text)
        binary = self.folder / f"{source.text}.cubin"
        binary.write_text(source.text)
        return Made(f"hash of {source.text}", {binary.name: str(binary)})

    def found(self, source: Source, files: dict[str, str], digest: str) -> Made:
        for path in files.values():
            Path(path).read_text()
        return Made(digest, files)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = Compiler(tmp_path)
    monkeypatch.setattr("triton.compiler.CompiledKernel", made.found)
    return made


def ask(compiler: Compiler, text: str = "copy", target: str = "cuda:90", **options: Any) -> Made:
    found: Made = known_kernels.found_or_compiled(compiler, Source(text), target, options)
    return found


def test_what_was_compiled_is_found(compiler: Compiler) -> None:
    assert ask(compiler) == ask(compiler) == ask(compiler)
    assert compiler.compiled == ["copy"]


def test_another_kernel_target_option_or_variable_is_another_compile(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(compiler)
    ask(compiler, "copy of eight")
    ask(compiler, target="cuda:100")
    ask(compiler, num_warps=8)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    ask(compiler)
    assert len(compiler.compiled) == 5


def test_what_is_gone_damaged_or_of_another_torch_is_compiled_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(compiler)
    (compiler.folder / "copy.cubin").unlink()
    ask(compiler)
    (note,) = (compiler.folder / "multigraph-kernels").iterdir()
    note.write_text("{")
    ask(compiler)
    assert len(compiler.compiled) == 3
    note.chmod(0o666)  # others could have written it
    ask(compiler)
    assert len(compiler.compiled) == 4
    monkeypatch.setattr("multigraph_backend.cache.torch_files.identity", lambda: "other")
    ask(compiler)
    assert len(compiler.compiled) == 5
    monkeypatch.setattr("multigraph_backend.cache.torch_files.identity", lambda: "")
    ask(compiler)
    ask(compiler)
    assert len(compiler.compiled) == 7
