"""The example of a compiler for vLLM's mode 3, against vLLM's interface: its own, from the unpacked wheels that
MULTIGRAPH_VLLM names (see `tests/processes/test_vllm_modules.py`), or one with the same methods.

The pieces come to it as vLLM hands them over: inside of Dynamo's trace, with fake inputs, for all sizes and for one.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WHEELS = [Path(folder) for folder in os.environ.get("MULTIGRAPH_VLLM", "").split(os.pathsep) if folder]


def interface(wheel: Path | None) -> type:
    """vLLM's `CompilerInterface`, by its text: the rest of its module needs a GPU."""
    if wheel is None:
        return type("CompilerInterface", (), {"compile": None, "compute_hash": None, "initialize_cache": None})
    text = (wheel / "vllm" / "compilation" / "compiler_interface.py").read_text()
    (found,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "CompilerInterface"
    )
    names: dict[str, Any] = {"fx": torch.fx, "Any": Any, "Callable": Callable, "VllmConfig": object, "Range": object}
    exec(compile(ast.Module([found], []), "compiler_interface.py", "exec"), names)
    made: type = names["CompilerInterface"]
    return made


@pytest.fixture(params=[None, *WHEELS], ids=str)
def adaptor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("vllm", "vllm.compilation", "vllm.compilation.compiler_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = sys.modules["vllm.compilation.compiler_interface"]
    vars(module)["CompilerInterface"] = base = interface(request.param)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "vllm_piecewise", raising=False)
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", '{"*": {"compiler": "aot_eager"}}')
    made = importlib.import_module("vllm_piecewise").MultigraphAdaptor()
    assert isinstance(made, base)
    yield made
    del sys.modules["vllm_piecewise"]


def test_it_compiles_a_piece_for_a_range_and_for_one_size(adaptor: Any) -> None:
    compiled: dict[str, Callable[..., Any]] = {}

    def vllm(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        compiled["range"], handle = adaptor.compile(gm, fakes, {}, (1, 512), "artifact")
        assert handle is None
        with torch._subclasses.FakeTensorMode():  # one size has a fake mode of its own, and numbers
            one = [4 if isinstance(fake, torch.SymInt) else torch.empty(4, 8) for fake in fakes]
        compiled["one"], _ = adaptor.compile(gm, one, {}, (4, 4), "artifact")
        return gm

    def piece(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * x.shape[0]

    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    torch.testing.assert_close(torch.compile(piece, backend=vllm, fullgraph=True)(x), piece(x))
    for rows in (6, 3, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled["range"](rows, x)[0], piece(x))
    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled["one"](4, x)[0], piece(x))


def test_its_hash_tells_options_apart(adaptor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = adaptor.compute_hash(None)
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", '{"*": {"compile_timeout": 9}}')
    assert adaptor.compute_hash(None) != first
