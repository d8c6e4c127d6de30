"""Hooks through Inductor: torch's own `saved_tensors_hooks` placed by us, `saved_hook` in rules, and caches.

Rows of the table of stock's defects are named where a test is about one.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import _compat, saved_hook
from multigraph_backend.saved_tensors import partitioner
from tests.support.saved_tensors.models import Mlp, accounts, assert_step, compiled, rules, step

Hook = Callable[[Any], Any]


def graph_modules(pack: Hook, unpack: Hook) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    return torch.fx.symbolic_trace(pack), torch.fx.symbolic_trace(unpack)


def narrow(x: Any) -> Any:
    return x.to(torch.bfloat16)


def widen(x: Any) -> Any:
    return x.to(torch.float32)


@torch.fx.wrap
def rounding(x: Any) -> Any:
    return (x * 100 + torch.rand_like(x)).floor().to(torch.int16)


@torch.fx.wrap
def by_value(x: Any) -> Any:
    return x * (3 if bool((x.sum() > 0).item()) else 4)


def unseen() -> float:
    """A constant of a program that no cache has seen."""
    return 1 + random.SystemRandom().random()


def cache_counts() -> tuple[int, int, int]:
    counters = _compat.counters["aot_autograd"]
    return tuple(counters[f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass"))  # type: ignore[return-value]


def test_stock_hooks_are_placed_and_run_nowhere_else() -> None:
    model = Mlp()
    run = compiled(model, [])
    with torch.autograd.graph.saved_tensors_hooks(*graph_modules(narrow, widen)):
        for _ in range(2):
            x = torch.randn(8, 16)
            got = step(model, run, x)
    expected = step(model, model, x)
    torch.testing.assert_close(got[0], expected[0])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got[1:], expected[1:], strict=True)]
    assert 1e-5 < max(errors) < 0.02
    (said,) = accounts()
    assert said.packed == 3
    assert {entry.packed for entry in said.tensors} == {"hook saved_tensors_hooks", None}
    assert said.order == ("placed", "placed")
    # outside of the compiled code the hooks are in force again
    with torch.autograd.graph.saved_tensors_hooks(*graph_modules(lambda x: x * 2, lambda x: x)):
        y = torch.ones(3, requires_grad=True)
        (y * y).sum().backward()
    assert y.grad.tolist() == [4.0, 4.0, 4.0]


def test_without_hooks_no_packs() -> None:
    """Dynamo's guards know of hooks: the call outside of them has code of its own."""
    model = Mlp()
    run = compiled(model, [])
    with torch.autograd.graph.saved_tensors_hooks(*graph_modules(narrow, widen)):
        step(model, run, torch.randn(8, 16))
    assert_step(model, run, torch.randn(8, 16), 0.0)
    assert sorted(said.packed for said in accounts()) == [3]


def test_turned_off_stock_hooks_run_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "saved_tensors")
    model = Mlp()
    x = torch.randn(8, 16)
    with torch.autograd.graph.saved_tensors_hooks(*graph_modules(lambda x: x * 3, lambda x: x)):
        got = step(model, compiled(model, []), x)
    expected = step(model, model, x)
    assert any((a - b).norm() > 0.1 * b.norm() for a, b in zip(got[1:], expected[1:], strict=True))
    assert accounts() == []


def test_stock_hooks_with_random_numbers() -> None:
    """Row 1: an InductorError in stock."""
    model = Mlp()
    run = compiled(model, [])
    hooks = graph_modules(lambda x: rounding(x), lambda q: q.to(torch.float32) / 100)
    x = torch.randn(8, 16)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        first, second = step(model, run, x), step(model, run, x)
    expected = step(model, model, x)
    for got in (first, second):
        assert all((a - b).norm() < 0.1 * b.norm() for a, b in zip(got, expected, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert accounts()[0].packed == 3


class Pooling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.max_pool1d(self.last(x).sin()[None], 2)[0]
        return torch.relu(h).exp()


def test_a_naive_int8_hook_leaves_indices_and_masks_alone() -> None:
    """Row 8: silently wrong or a C++ compile error in stock."""
    model = Pooling()
    run = compiled(model, [])
    hooks = graph_modules(
        lambda x: (x * 40).round().clamp(-127, 127).to(torch.int8), lambda q: q.to(torch.float32) / 40
    )
    x = torch.randn(16, 8)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        got = step(model, run, x)
    expected = step(model, model, x)
    for gradient, wanted in zip(got, expected, strict=True):
        assert (gradient - wanted).norm() < 0.1 * wanted.norm()
    (said,) = accounts()
    others = [entry for entry in said.tensors if not entry.dtype.startswith("float")]
    assert said.packed > 0
    assert others
    assert all(entry.packed is None for entry in others)


class Pooling2d(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Conv2d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(self.last(x).sin(), 3, 2).exp()


def test_indices_of_max_pooling_reach_no_hook_though_inductor_hands_them_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's gradients are off by more than half; eager refuses, and so does a graph that is compiled at once."""
    torch.manual_seed(0)
    model, x = Pooling2d(), torch.randn(2, 1, 9, 9)
    hooks = graph_modules(
        lambda x: (x * 40).round().clamp(-127, 127).to(torch.int8), lambda q: q.to(torch.float32) / 40
    )
    expected = step(model, model, x)

    def error(run: Any) -> float:
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            got = step(model, run, x)
        return max(float((one - other).norm() / other.norm()) for one, other in zip(got, expected, strict=True))

    assert error(compiled(model, [])) < 0.01
    assert accounts()[0].packed > 0
    torch._dynamo.reset()
    assert error(torch.compile(model, backend="inductor")) > 0.3
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "all")
    for run in (model, compiled(model, [])):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="expected scalar type Long but found Float"):
            error(run)


def test_stock_hooks_that_cannot_be_traced_run_in_eager() -> None:
    model = Mlp()
    run = compiled(model, [])
    hooks = graph_modules(lambda x: by_value(x), lambda x: x)  # unpacks to something else: gradients show that it ran
    x = torch.randn(8, 16)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        got = step(model, run, x)
    expected = step(model, model, x)
    assert any((a - b).norm() > 0.1 * b.norm() for a, b in zip(got[1:], expected[1:], strict=True))
    (said,) = accounts()
    assert said.packed == 0
    assert any("pack cannot be traced" in str(entry.reason) for entry in said.tensors)


# ---------------------------------------------------------------- saved_hook, caches


def rotated(by: float) -> multigraph_backend.SavedHook:
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0] * by

    def pack(x: torch.Tensor) -> Any:
        return (x @ turn + torch.tensor(0.5)).to(torch.float16), x.dtype, None

    def unpack(packed: Any) -> torch.Tensor:
        narrow, dtype, _ = packed
        return (narrow.to(dtype) - torch.tensor(0.5)) @ turn.T / by**2

    return saved_hook(pack, unpack)


def test_a_hook_with_tensors_comes_from_the_cache_and_a_changed_one_does_not() -> None:
    """Rows 2, 3, 9 and 10: a buffer, constants, no promise by the user, and another body under the same name."""
    model = Mlp()
    x = torch.randn(8, 16)
    seen = []
    by = unseen()
    for factor in (by, by, by + 1):
        torch._dynamo.reset()
        _compat.counters["aot_autograd"].clear()
        assert_step(model, compiled(model, rules(rotated(factor))), x, 0.02)
        (said,) = accounts()
        assert said.packed == 3
        seen.append(cache_counts())
    assert seen == [(0, 1, 0), (1, 0, 0), (0, 1, 0)]


def test_stock_hooks_come_from_the_cache() -> None:
    """Row 9: stock goes past AOTAutograd's cache for a plain traced hook."""
    model = Mlp()
    by = unseen()
    seen = []
    for _ in range(2):
        torch._dynamo.reset()
        _compat.counters["aot_autograd"].clear()
        with torch.autograd.graph.saved_tensors_hooks(
            *graph_modules(lambda x: (x * by).half(), lambda x: x.float() / by)
        ):
            step(model, compiled(model, []), torch.randn(8, 16))
        assert accounts()[0].packed == 3
        seen.append(cache_counts())
    assert seen == [(0, 1, 0), (1, 0, 0)]


def test_equal_hooks_built_anew_each_step_recompile_nothing() -> None:
    """Row 11: stock recompiles to its limit and then runs eagerly."""
    model = Mlp()
    for _ in range(12):
        step(model, compiled(model, rules(rotated(2.0))), torch.randn(8, 16))
    stats = multigraph_backend.stats()
    assert (stats["regions"], stats["generic_compiled"], stats["generic_calls"]) == (1, 1, 12)
    assert accounts()[0].packed == 3


def test_hooks_live_as_long_as_the_code_that_has_them_in_it() -> None:
    """Row 13: torch's guards hold bare ids, which another hook could get."""
    model = Mlp()
    run = compiled(model, [])
    hooks = graph_modules(narrow, widen)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        step(model, run, torch.randn(8, 16))
    ids = {id(hook) for hook in hooks}
    del hooks
    assert accounts()[0].packed == 3
    assert not ids & {id(graph) for _ in range(50) for graph in graph_modules(narrow, widen)}


def test_a_hook_in_a_model_with_dynamic_sizes() -> None:
    model = Mlp()
    eager = copy.deepcopy(model)
    run = compiled(model, rules(rotated(1.5)), dynamic=True)
    for rows in (8, 5, 21):
        assert_step(model, run, torch.randn(rows, 16), 0.02)
    assert multigraph_backend.stats()["generic_calls"] == 3
    assert accounts()[0].packed == 3
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), model.parameters(), strict=True))


def test_json_names_a_hook_by_its_place() -> None:
    pack = f"{__name__}:EXACT"
    options = multigraph_backend.Options.build({"saved_tensors": [{"pack": pack}]}, environ={})
    assert options.saved_tensors[0].pack is EXACT
    with pytest.raises(multigraph_backend.OptionsError, match="cannot be imported"):
        multigraph_backend.Options.build({"saved_tensors": [{"pack": f"{pack}_"}]}, environ={})


EXACT = saved_hook(narrow, widen)


def test_keys_of_caches_say_every_module_that_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = shutil.copytree(Path(partitioner.__file__).parent, tmp_path / "saved_tensors")
    monkeypatch.setattr(partitioner, "__file__", str(package / "partitioner.py"))
    partitioner.source_hash.cache_clear()
    known = set()
    try:
        for module in sorted(package.rglob("*.py")):
            known.add(partitioner.source_hash())
            partitioner.source_hash.cache_clear()
            module.write_text(module.read_text() + "\n")
        known.add(partitioner.source_hash())
    finally:
        partitioner.source_hash.cache_clear()
    assert len(known) == 1 + len(list(package.rglob("*.py"))) > 20
