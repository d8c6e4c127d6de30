"""Workers beside a GPU: none takes memory of it unless that was allowed, and what one compiled is recorded as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend.lower import workers
from multigraph_backend.region import background

OPTIONS: dict[str, Any] = {"specialize": [{"x[0]": 8}], "compile": "background"}


@pytest.fixture(autouse=True)
def _around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    assert background.wait(300)
    torch._dynamo.reset()
    workers.pool.end()
    workers.pool = workers.Pool()


def call(run: Callable[..., Any], f: Callable[..., Any], size: int, device: str) -> None:
    x = torch.randn(size, 24, device=device)
    torch.testing.assert_close(run(x), f(x))


def variant() -> dict[str, Any]:
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    found: dict[str, Any] = region["variants"][0]
    return found


@torch.no_grad()
def test_no_worker_is_started_for_a_gpu_unless_it_is_allowed() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    run = torch.compile(f, backend="multigraph", dynamic=True, options=OPTIONS)
    for size in (5, 8, 8, 8):
        call(run, f, size, "cuda")
    assert workers.pool.pids == []
    assert variant()["state"] == "ready"
    assert not variant()["by_worker"]
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    assert any("it is for a GPU" in note for note in region["notes"])


@torch.no_grad()
@pytest.mark.parametrize("asked", [{"workers": {"gpu": True}}, {"inductor": {"coordinate_descent_tuning": True}}])
def test_one_that_is_allowed_to_compiles_and_its_code_is_recorded(asked: dict[str, Any]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 3 + 1

    run = torch.compile(f, backend="multigraph", dynamic=True, options={**OPTIONS, **asked})
    for size in (5, 8, 8):
        call(run, f, size, "cuda")
    assert background.wait(300)
    before = multigraph_backend.stats()["recordings"]
    for _ in range(4):
        call(run, f, 8, "cuda")
    assert variant()["by_worker"], variant()
    assert variant()["calls"] == 4
    assert multigraph_backend.stats()["recordings"] > before
    assert multigraph_backend.stats()["failures"] == multigraph_backend.stats()["failed_recordings"] == 0


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_call_of_what_a_worker_compiled_measures_no_kernel(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`threads`: with and without Inductor's pool of processes in this one, which looks for tuned kernels elsewhere."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def f(q: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(q.shape[-2], device=q.device) <= places[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(q, q.sin(), q * 2, attn_mask=mask)
        return torch.nn.functional.silu(attended).softmax(-1) + attended.sum(-1, keepdim=True)

    def again(size: int) -> None:
        q, places = torch.randn(size, 4, 64, 32, device="cuda"), torch.arange(64, device="cuda")
        torch.testing.assert_close(run(q, places), f(q, places), rtol=1e-3, atol=1e-3)

    measured: list[str] = []
    tune = CachingAutotuner.autotune_to_one_config

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        measured.append(str(self.inductor_meta.get("kernel_name")))
        return tune(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", noted)
    monkeypatch.setattr(torch._inductor.config, "compile_threads", threads)
    options = {"specialize": [{"q[0]": 8}], "compile": "background", "workers": {"gpu": True}}
    run = torch.compile(f, backend="multigraph", dynamic=True, options=options)
    for size in (5, 8, 8):
        again(size)
    assert background.wait(300)
    assert measured, "generic's kernels have nothing to choose from"
    measured.clear()
    for _ in range(3):
        again(8)
    assert variant()["by_worker"], variant()
    assert measured == []


@torch.no_grad()
def test_one_that_compiles_for_the_cpu_takes_no_memory_of_a_gpu_that_is_full() -> None:
    """The worker is alive still when the memory is counted, and would have its context."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 5

    torch.cuda.init()
    torch.empty(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    filled = torch.empty(max(0, free - total // 50), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    run = torch.compile(f, backend="multigraph", dynamic=True, options=OPTIONS)
    for size in (5, 8):
        call(run, f, size, "cpu")
    assert background.wait(300)
    assert workers.pool.pids
    now, _ = torch.cuda.mem_get_info()
    assert free - now < 32 << 20
    call(run, f, 8, "cpu")
    assert variant()["by_worker"], variant()
    del filled
