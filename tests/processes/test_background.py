"""Variants compile in worker processes while generic serves; whatever becomes of a worker, calls are right and wait for
nothing."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import multigraph_backend
from multigraph_backend import Match, Rule, Scaled
from multigraph_backend.lower import parcel, workers
from multigraph_backend.region import background, variant

SIZES: dict[str, Any] = {"specialize": [{"x[0]": 8}, {"x[0]": {"multiple_of": 16}}], "compile": "background"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of caches for all: what the C++ compiler makes once of torch's headers takes long."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def _around(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    counters.clear()
    yield
    assert background.wait(120)
    torch._dynamo.reset()


def end_workers() -> None:
    """The next compile gets a worker of its own, with the environment of now."""
    for pid in workers.pool.pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend="multigraph", dynamic=True, options={**SIZES, **options})
    return made


def call(function: Callable[..., Any], reference: Callable[..., Any], *sizes: int) -> None:
    for size in sizes:
        x = torch.randn(size, 24)
        torch.testing.assert_close(function(x), reference(x))


def told() -> dict[str, dict[str, Any]]:
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    return {entry["condition"]: entry for entry in (*region["variants"], region["generic"])}


def notes() -> list[str]:
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    found: list[str] = region["notes"]
    return found


def test_code_that_computes_with_a_float_comes_from_a_worker_for_whatever_value() -> None:
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        return (x.softmax(-1) * by + (x * (by + 1)).sin()).cos()

    def check(function: Callable[..., Any], *calls: tuple[int, float]) -> None:
        for size, by in calls:
            x = torch.randn(size, 24)
            torch.testing.assert_close(function(x, by), scaled(x, by))

    function = compiled(scaled)
    check(function, (5, 2.5), (8, 3.25))
    assert background.wait(120)
    assert told()["x[0] == 8"]["state"] == "ready", notes()
    assert told()["x[0] == 8"]["by_worker"]
    misses = counters["aot_autograd"]["autograd_cache_miss"]
    check(function, (8, -7.5), (8, 0.5), (5, 11.0), (8, 0.0), (8, 1.0))
    assert counters["aot_autograd"]["autograd_cache_miss"] <= misses + 1  # 0.0 is a form of its own
    assert multigraph_backend.stats()["failures"] == 0


class Model(torch.nn.Module):
    """Parameters, a buffer, a constant, a size in the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(24, 40)
        self.register_buffer("scale", torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x)) * self.scale + torch.tensor([2.5]) * x.shape[0]


@pytest.mark.parametrize("train", [False, True])
def test_generic_serves_until_the_variant_is_there_as_a_whole(train: bool) -> None:
    model = Model()
    run = compiled(model)

    def step(size: int) -> None:
        x = torch.randn(size, 24, requires_grad=train)
        y = run(x)
        torch.testing.assert_close(y, model(x))
        if train:
            (gradient,) = torch.autograd.grad(y.square().sum(), x)
            (expected,) = torch.autograd.grad(model(x).square().sum(), x)
            torch.testing.assert_close(gradient, expected)

    with torch.set_grad_enabled(train):
        for size in (5, 8, 32, 8, 32, 8):
            step(size)
        assert multigraph_backend.stats()["variant_calls"] == 0
        assert multigraph_backend.stats()["generic_calls"] == 6
        assert told()["x[0] == 8"]["state"] == "compiling"
        assert background.wait(120)
        missed = counters["aot_autograd"]["autograd_cache_miss"]
        assert counters["aot_autograd"]["autograd_cache_saved"] == 1  # generic's: this process compiled nothing else
        for size in (8, 48, 8, 5):
            step(size)
    stats = multigraph_backend.stats()
    assert counters["aot_autograd"]["autograd_cache_miss"] == missed
    assert (stats["worker_compiles"], stats["variants_compiled"], stats["failures"]) == (2, 2, 0)
    assert stats["variant_calls"] == 3
    assert told()["x[0] == 8"]["by_worker"]
    assert told()["x[0] == 8"]["forms"] == ["True"]
    assert "by a worker" in str(multigraph_backend.explain())


def test_a_worker_plans_for_the_memory_that_this_process_holds() -> None:
    """What it leaves in the caches is found by what was reckoned here."""
    model = Model()
    sizes = [{"x[0]": 4096}]
    run = compiled(model, specialize=sizes, memory_goal="1 MiB")
    for size in (5, 4096, 4096):
        run(torch.randn(size, 24)).square().sum().backward()
    assert background.wait(120)
    model.zero_grad()
    x = torch.randn(4096, 24)
    run(x).square().sum().backward()
    (variant_told,) = [entry for text, entry in told().items() if text != "generic"]
    assert variant_told["by_worker"]
    assert multigraph_backend.stats()["worker_compiles"] == 1
    (saved,) = variant_told["saved"]
    assert saved["memory"]["goal"] == 1 << 20
    assert saved["memory"]["ways"]
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - wanted).norm() <= 0.03 * wanted.norm()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(24, 48), torch.nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.nn.functional.silu(self.up(x).cos() + 0.5))) * 2


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x)
        return y


def test_rules_by_modules_hold_in_a_worker() -> None:
    """It has the paths of modules, though not their classes.  That it cuts blocks by them is in `test_tiers`."""
    model = Blocks()
    rules = [Rule(Match(module="blocks.0.down", min_bytes=1), Scaled("int8"))]
    run = compiled(model, specialize=[{"x[0]": 8}], saved_tensors=rules)
    for size in (5, 8):
        run(torch.randn(size, 24, requires_grad=True))
    assert background.wait(120)
    found = told()
    assert found["x[0] == 8"]["by_worker"], notes()
    packed = {text: [entry["packed"] for entry in entry["saved"][0]["tensors"]] for text, entry in found.items()}
    assert packed["generic"] == packed["x[0] == 8"]
    assert len(list(filter(None, packed["generic"]))) == 1
    x = torch.randn(8, 24, requires_grad=True)
    (gradient,) = torch.autograd.grad(run(x).square().sum(), x)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    assert (gradient - expected).norm() <= 0.03 * expected.norm()


def test_a_graph_is_packed_once_for_the_compiles_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a worker that runs is asked for the second without a look into torch's caches from this process.

    No collection of all that is alive stops calls meanwhile."""
    packed: list[bool] = []
    pack = parcel._packed_graph
    monkeypatch.setattr(parcel, "_packed_graph", lambda graph: [packed.append(gc.isenabled()), pack(graph)][1])
    model = Model()

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.as_tensor(model(x))

    run = compiled(twice, workers={"count": 1})
    with torch.no_grad():
        call(run, twice, 5)
        with background._one_at_a_time:
            call(run, twice, 8, 32)
        assert background.wait(120)
        call(run, twice, 8, 32)
    assert [told()[text]["by_worker"] for text in ("x[0] == 8", "x[0] % 16 == 0")] == [True, True]
    assert multigraph_backend.stats()["variant_calls"] == 2
    assert packed == [False]
    assert gc.isenabled()


def test_a_variant_that_falls_into_forms_and_what_caches_have_already() -> None:
    """Guards that the compile in the worker added are those of the form here; what a worker finds is loaded."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.round() * 2).sum()  # the same in any order

    for once_more in (False, True):
        run = compiled(f)
        call(run, f, 5)
        for size in (32, 8192, 48, 16384):
            call(run, f, size)
            assert background.wait(120)
            call(run, f, size)
        entry = told()["x[0] % 16 == 0"]
        assert entry["by_worker"] != once_more
        assert multigraph_backend.stats()["eager_calls"] == multigraph_backend.stats()["failures"] == 0
        assert len(entry["forms"]) == 2, entry
        assert all(form != "True" for form in entry["forms"])
        if once_more:
            assert multigraph_backend.stats()["worker_compiles"] == 0
            assert multigraph_backend.stats()["loaded_ahead"] == 2
        torch._dynamo.reset()
        multigraph_backend.reset_stats()


@pytest.mark.parametrize("stance", ["fail_on_recompile", "eager_on_recompile"])
def test_under_stances_that_let_no_call_compile(stance: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1) * (2 if stance == "fail_on_recompile" else 3)

    run = compiled(f)
    call(run, f, 5)
    with torch.compiler.set_stance(stance):
        call(run, f, 8, 8)
        assert multigraph_backend.stats()["generic_calls"] == 3
        assert background.wait(120)
        call(run, f, 8)
        assert multigraph_backend.stats()["variant_calls"] == 1


def test_after_seal_no_worker_begins() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 5

    run = compiled(f)
    call(run, f, 5)
    multigraph_backend.seal("refuse")
    try:
        call(run, f, 8, 8)
        assert told()["x[0] == 8"]["state"] == "declared"
        assert multigraph_backend.stats()["after_seal"] == 2
    finally:
        multigraph_backend.unseal()
    call(run, f, 8)
    assert background.wait(120)
    assert told()["x[0] == 8"]["state"] == "ready"


def test_warm_up_waits_for_the_workers_and_what_they_made_runs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 7

    account = multigraph_backend.warmup(compiled(f), torch.randn(5, 24))
    assert account.ready, account
    assert {ran for row in account.calls for ran in row.ran} == {"generic", "x[0] == 8", "x[0] % 16 == 0"}
    assert multigraph_backend.stats()["worker_compiles"] == 2
    assert multigraph_backend.stats()["generic_calls"] == multigraph_backend.warmup.__globals__["CALLS"]


@torch.library.custom_op("background::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)


def as_it_is(graph: torch.fx.Graph) -> None:
    """A pass of the program's own."""


def test_what_no_worker_can_compile_is_compiled_in_calls_and_said() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return halved(x) + 1

    run = compiled(f)
    call(run, f, 5, 8)
    assert background.wait(120)
    (note,) = [note for note in notes() if "not in the background" in note]
    assert "it cannot be pickled" in note
    assert multigraph_backend.stats()["failures"] == 0
    call(run, f, 8)
    assert told()["x[0] == 8"]["state"] == "ready"
    assert not told()["x[0] == 8"]["by_worker"]
    torch._dynamo.reset()
    multigraph_backend.reset_stats()

    def g(x: torch.Tensor) -> torch.Tensor:
        return x.atan() + 23

    run = compiled(g, inductor={"decompose_mem_bound_mm": False, "pre_grad_custom_pass": as_it_is})
    call(run, g, 5, 8)
    assert background.wait(120)
    (note,) = [note for note in notes() if "not in the background" in note]
    assert "as_it_is is not torch's" in note
    torch._dynamo.reset()
    run = compiled(f, compiler="aot_eager")
    call(run, f, 5, 8)
    assert told()["x[0] == 8"]["state"] == "ready"
    assert any("only Inductor's code" in note for note in notes())


# ---------------------------------------------------------------- workers that fail


def failed(reason: str) -> None:
    """The variant has failed for that reason; it was counted once, and generic goes on."""
    entry = told()["x[0] == 8"]
    assert entry["state"] == "failed"
    assert reason in entry["reason"]
    assert multigraph_backend.stats()["failures"] == 1
    assert multigraph_backend.stats()["variants_compiled"] == 0
    assert multigraph_backend.stats()["eager_calls"] == 0


def test_one_that_hangs_is_ended_and_no_call_compiles_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the C++ compiler, which ends with it."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 11

    compiler = tmp_path / "hangs"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 1234\n")
    compiler.chmod(0o755)
    run = compiled(f, compile_timeout=8)
    call(run, f, 5)
    end_workers()
    monkeypatch.setenv("CXX", str(compiler))
    call(run, f, 8, 8)
    assert background.wait(120)
    call(run, f, 8, 8, 5)
    failed("the compile in a worker took longer than 8 s, and was ended")
    commands = [path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit()]
    assert not any(b"sleep\x001234" in path.read_bytes() for path in commands if path.exists())
    end_workers()


def test_one_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sinh() + 13

    run = compiled(f, workers={"memory": 1 << 20})
    call(run, f, 5, 8)
    assert background.wait(120)
    call(run, f, 8, 8)
    failed("")
    end_workers()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cosh() + 17

    run = compiled(f)
    call(run, f, 5)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "caches"))
    call(run, f, 8)
    assert background.wait(120)
    call(run, f, 8, 8)
    failed("")


@pytest.mark.slow
def test_killed_at_random_times_it_is_tried_again_and_gets_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.log1p().abs() + 19

    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(f(x.abs()))

    monkeypatch.setattr(variant, "_FIRST_RETRY", 0.01)
    dice = random.Random(3)
    run = compiled(g)
    call(run, g, 5)
    for _ in range(4):
        call(run, g, 8)
        time.sleep(dice.uniform(0, 6))
        for pid in workers.pool.pids:
            os.kill(pid, signal.SIGKILL)
        call(run, g, 8, 5)
        assert background.wait(120)
        if told()["x[0] == 8"]["state"] == "ready":
            break
        time.sleep(0.2)
    call(run, g, 8, 8)
    assert background.wait(120)
    call(run, g, 8, 8)
    assert told()["x[0] == 8"]["state"] == "ready"
    assert multigraph_backend.stats()["eager_calls"] == 0


SERVICE = """
import torch
import multigraph_backend

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        return torch.softmax(x * self.scale, dim=-1) * x.shape[0]

scaled = Scaled()

options = {"specialize": [{"x[0]": 8}], "compile": "background"}
compiled = torch.compile(scaled, backend="multigraph", dynamic=True, options=options)
with torch.no_grad():
    for size in (5, 8):
        x = torch.randn(size, 16)
        torch.testing.assert_close(compiled(x), scaled(x))
    print(multigraph_backend.warmup(compiled, torch.randn(5, 16)))
    x = torch.randn(8, 16)
    torch.testing.assert_close(compiled(x), scaled(x))
assert multigraph_backend.stats()["variant_calls"], multigraph_backend.explain()
"""


def test_at_the_import_of_a_module_where_multiprocessing_came_before_torch(tmp_path: Path) -> None:
    """Keys of caches are those of workers there, and no compile waits for the import to end."""
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "main.py").write_text("import multiprocessing\nimport torch\nimport service\n")
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
