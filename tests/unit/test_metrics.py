"""What Prometheus is told: by prometheus_client's own exposition and parsers, of compiled functions that ran."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

import multigraph_backend
from multigraph_backend import events, metrics
from multigraph_backend.backend import multigraph
from multigraph_backend.cudagraphs import runtime
from tests.support.simulated.pieces import Bench, values

Samples = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture(autouse=True)
def _no_graphs_of_others() -> None:
    gc.collect()


def told(registry: CollectorRegistry) -> Samples:
    """All samples as prometheus_client's parser reads them."""
    return read(generate_latest(registry).decode())


def read(text: str) -> Samples:
    """By name, and by the values of the labels in the order below."""
    named = ("model", "condition", "state", "device", "version", "torch")
    return {
        (sample.name, tuple(sample.labels[name] for name in named if name in sample.labels)): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def registered(**how: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(metrics.Collector(**how))
    return registry


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.shape[0]


def compiled(*sizes: int, function: Callable[..., torch.Tensor] = scaled) -> Callable[..., torch.Tensor]:
    options = {"specialize": [{"x[0]": size} for size in sizes], "compiler": "eager"}
    made: Callable[..., torch.Tensor] = torch.compile(function, backend=multigraph, dynamic=True, options=options)
    return made


def call(run: Callable[..., torch.Tensor], *sizes: int) -> None:
    for rows in sizes:
        x = torch.randn(rows, 3)
        torch.testing.assert_close(run(x), x.sin() * rows)


def test_models_with_names_are_told_apart() -> None:
    """Three instances of one class in a server are three models to whoever looks at it."""
    registry, models = registered(), []
    for name, rows in (("chat", 8), ("draft", 9)):
        options = {"specialize": [{"x[0]": 8}], "compiler": "eager", "name": name}
        models.append(torch.compile(scaled, backend=multigraph, dynamic=True, options=options))
        call(models[-1], rows, rows)
    calls = {
        labels: value for (name, labels), value in told(registry).items() if name == "multigraph_model_calls_total"
    }
    assert calls == {
        ("scaled, chat", "x[0] == 8"): 2,
        ("scaled, chat", "generic"): 0,
        ("scaled, draft", "x[0] == 8"): 0,
        ("scaled, draft", "generic"): 2,
    }


def test_counts_and_calls_by_model_and_condition() -> None:
    registry = registered()
    before = told(registry)
    call(compiled(8, 16), 8, 8, 8, 5, 6)
    after = told(registry)
    stats = multigraph_backend.stats()
    assert (stats["variant_calls"], stats["generic_calls"]) == (3, 2)
    for name, count in stats.items():
        assert after[f"multigraph_{name}_total", ()] == count
        assert before[f"multigraph_{name}_total", ()] == 0
    calls = {labels: value for (name, labels), value in after.items() if name == "multigraph_model_calls_total"}
    assert {labels: value for labels, value in calls.items() if labels[0] == "scaled"} == {
        ("scaled", "x[0] == 8"): 3, ("scaled", "x[0] == 16"): 0, ("scaled", "generic"): 2
    }  # fmt: skip
    assert after["multigraph_model_compile_seconds_total", ("scaled", "x[0] == 8")] > 0
    states = [after["multigraph_model_variants", ("scaled", state)] for state in ("ready", "declared", "failed")]
    assert states == [2, 1, 0]
    assert after["multigraph_build_info", (multigraph_backend.__version__, str(torch.__version__))] == 1


def test_names_follow_the_conventions_and_openmetrics_takes_them() -> None:
    """Counters end in _total, names have a prefix and base units; OpenMetrics' stricter parser agrees."""
    registry = registered()
    call(compiled(8), 8)
    text = openmetrics.generate_latest(registry).decode()
    families = {family.name: family for family in parse_openmetrics(text)}
    assert set(families) == {family.name for family in metrics.Reader().names()}
    for family in families.values():
        assert family.name.startswith("multigraph_")
        assert family.documentation
        assert {label for sample in family.samples for label in sample.labels} <= {
            "model", "condition", "state", "device", "version", "torch"
        }  # fmt: skip
        if family.type == "counter":
            assert all(sample.name == f"{family.name}_total" for sample in family.samples)
        assert not family.name.endswith(("_ms", "_mib", "_total"))
    assert set(metrics._HELP) <= set(multigraph_backend.stats())


def test_a_gain_is_told_where_it_was_measured() -> None:
    registry, run = registered(), compiled(8)
    call(run, 8, 5)
    with multigraph_backend.measure_gains():
        call(run, 8, 8, 8)
    gains = {labels: value for (name, labels), value in told(registry).items() if name == "multigraph_model_gain_ratio"}
    assert gains.keys() == {("scaled", "x[0] == 8")}
    assert gains["scaled", "x[0] == 8"] > 0


def test_a_counter_does_not_go_down_when_its_graph_ends() -> None:
    registry = registered()
    key = "multigraph_model_calls_total", ("scaled", "x[0] == 8")
    start = told(registry).get(key, 0)
    for round_ in range(1, 4):
        run = compiled(8)
        call(run, 8, 8)
        assert told(registry)[key] == start + 2 * round_
        torch._dynamo.reset()
        del run
        gc.collect()
        assert told(registry)[key] == start + 2 * round_
    assert told(registry).get(("multigraph_model_variants", ("scaled", "ready")), 0) == 0


def test_labels_are_bounded() -> None:
    """With 40 conditions and a limit of 5, a sixth series holds all the rest, and no call is lost."""
    registry = registered(limit=5)
    call(compiled(*range(2, 42)), *range(2, 42), 50)
    calls = {
        labels: value for (name, labels), value in told(registry).items() if name == "multigraph_model_calls_total"
    }
    assert len(calls) == 6
    assert sum(calls.values()) == 41
    assert calls[metrics.OTHER, metrics.OTHER] == 36
    for limit in (0, "many"):
        with pytest.raises(ValueError, match="limit must be a number from 1 on, got"):
            metrics.Collector(limit=limit)  # type: ignore[arg-type]


def test_names_from_the_program_cannot_break_the_exposition() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.shape[0]

    name = 'f"\\\n} 7\nmultigraph_failures_total 99 # ' + "x" * 200
    f.__code__ = f.__code__.replace(co_name=name)
    call(compiled(8, function=f), 8)
    found = [labels for (key, labels), value in told(registered()).items() if key.endswith("calls_total") and labels]
    (model,) = {model for model, _ in found}
    assert model.startswith('f"\\\n} 7\nmultigraph_failures_total 99 # xxx')
    assert metrics._short("a \udcff in a name") == "a \\udcff in a name"
    assert len(model) == 120


def test_a_call_costs_nothing_and_registering_reads_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code of the module runs at a call, and the dispatcher's code is what it was."""
    run = compiled(8)
    call(run, 8)
    entered: list[str] = []

    def note(frame: object, event: str, argument: object) -> None:
        if getattr(frame, "f_code", None) is not None and frame.f_code.co_filename == metrics.__file__:  # type: ignore[attr-defined]
            entered.append(frame.f_code.co_name)  # type: ignore[attr-defined]

    x = torch.randn(8, 3)
    with monkeypatch.context() as patched:
        patched.setattr(metrics.registry, "living", lambda: pytest.fail("a region was asked"))
        registry = registered()
    sys.setprofile(note)
    try:
        run(x)
    finally:
        sys.setprofile(None)
    assert entered == []
    assert told(registry)["multigraph_model_calls_total", ("scaled", "x[0] == 8")] == 2


def test_counts_may_start_anew() -> None:
    registry = registered()
    call(compiled(8), 8, 8)
    multigraph_backend.reset_stats()
    after = told(registry)
    assert after["multigraph_variant_calls_total", ()] == 0
    assert after["multigraph_model_calls_total", ("scaled", "x[0] == 8")] == 2


def test_scrapes_in_several_threads_while_calls_run() -> None:
    registry, run = registered(), compiled(8)
    call(run, 8)
    wrong: list[float] = []

    def scrape() -> None:
        seen = 0.0
        for _ in range(50):
            now = told(registry)["multigraph_model_calls_total", ("scaled", "x[0] == 8")]
            if now < seen:
                wrong.append(now)
            seen = now

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    call(run, *[8] * 200)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert told(registry)["multigraph_model_calls_total", ("scaled", "x[0] == 8")] == 201


@pytest.fixture
def tree() -> Iterator[Bench]:
    bench = Bench()
    runtime._trees[7] = bench.tree
    yield bench
    del runtime._trees[7]


def test_recordings_and_their_memory(tree: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is asked for its bytes only after something was recorded, and never where that would wait for long."""
    registry, tree.device.index = registered(), 7
    asked: list[int] = []
    pool_bytes = tree.device.pool_bytes
    monkeypatch.setattr(tree.device, "pool_bytes", lambda: (asked.append(1), pool_bytes())[1])
    piece = tree.piece(lambda x: (x * 2,), 1, 1)
    for _ in range(4):
        piece([values()])
    asked.clear()
    for _ in range(3):
        after = told(registry)
    assert after["multigraph_recordings_held", ("7",)] == 1
    assert after["multigraph_recordings_pool_bytes", ("7",)] == pool_bytes() > 0
    assert len(asked) == 1
    other = tree.piece(lambda x: (x.repeat(9),), 1, 1)
    for _ in range(3):
        other([values()])
    asked.clear()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tree.tree.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    after = told(registry)
    done.set()
    thread.join()
    assert (after["multigraph_recordings_held", ("7",)], asked) == (2, [])
    assert told(registry)["multigraph_recordings_pool_bytes", ("7",)] == pool_bytes()


# ---------------------------------------------------------------- several processes

WORKER = """\
import sys
import torch
import multigraph_backend
from multigraph_backend import metrics


def served(x):
    return x.sin() * x.shape[0]


publisher = metrics.publish(interval=0.05)
compiled = torch.compile(
    served, backend="multigraph", dynamic=True, options={"specialize": [{"x[0]": 8}], "compiler": "eager"}
)
for _ in range(int(sys.argv[1])):
    compiled(torch.randn(8, 3))
publisher.write()
multigraph_backend.reset_stats()
publisher.write()
compiled(torch.randn(5, 3))
print("ready", flush=True)
sys.stdin.readline()
"""


def test_processes_add_up_also_those_that_have_ended(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (tmp_path / "worker.py").write_text(WORKER)
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    workers = [
        subprocess.Popen(
            [sys.executable, "worker.py", str(calls)],
            cwd=tmp_path, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for calls in (3, 4)
    ]  # fmt: skip
    scraping = (
        "import sys\nfrom prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\nmultiprocess.MultiProcessCollector(registry)\n"
        "for pid in sys.argv[1:]:\n    multiprocess.mark_process_dead(int(pid))\n"
        "print(generate_latest(registry).decode())"
    )

    def scrape(*ended: int) -> Samples:
        program = [sys.executable, "-c", scraping, *map(str, ended)]
        text = subprocess.run(program, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
        return read(text)

    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        first = scrape()
        assert first["multigraph_model_calls_total", ("served", "x[0] == 8")] == 7
        assert first["multigraph_variant_calls_total", ()] == 7  # although each began its counts anew
        assert first["multigraph_model_variants", ("served", "ready")] >= 2
        workers[0].communicate("\n", timeout=60)
        after = scrape(workers[0].pid)
        assert after["multigraph_model_calls_total", ("served", "x[0] == 8")] == 7
        assert after["multigraph_generic_calls_total", ()] >= 1  # the last call of the one that has ended
        assert after["multigraph_model_variants", ("served", "ready")] == 2
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.communicate("\n", timeout=60)


def test_publishing_without_a_folder_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    with pytest.raises(RuntimeError, match=r"PROMETHEUS_MULTIPROC_DIR is not set.*metrics\.Collector\(\)"):
        metrics.publish()
    with pytest.raises(ValueError, match="interval must be a number of seconds greater than 0, got 0"):
        metrics.publish(0)


def test_without_prometheus_client_the_module_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules['prometheus_client'] = None\nimport multigraph_backend\n"
        "module = multigraph_backend.metrics\n"
        "for use in (module.Collector, module.publish):\n"
        "    try:\n        use()\n    except ImportError as error:\n        print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    line = "multigraph_backend.metrics needs prometheus_client: pip install multigraph[metrics]"
    assert (done.stdout, done.stderr) == (f"{line}\n{line}\n", "")


def test_all_counts_have_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that is added later is told too."""
    monkeypatch.setitem(events._events, "pages_turned", 3)
    assert told(registered())["multigraph_pages_turned_total", ()] == 3
