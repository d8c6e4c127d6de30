"""Counts for Prometheus, read when they are asked for.

    from prometheus_client import REGISTRY
    from multigraph_backend import metrics

    REGISTRY.register(metrics.Collector())  # in a server of one process: each scrape reads the counts of that moment
    metrics.publish()                       # in each worker of a server that has several behind one address

Needs prometheus_client (`pip install multigraph[metrics]`); without it this module is imported all the same, and says
so when it is used.

In:  what `stats()` counts, and what the live regions and trees of recordings keep for `explain()`.  Out: families of
samples.  Guarantees: a call of a compiled function costs nothing for it, for nothing is counted here; a counter does
not go down when the graph that it counted ends, but only where `reset_stats()` lets it start anew; of pairs of a model
and a condition at most `limit` have samples of their own, and what comes later is counted as "other".
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from multigraph_backend import __version__, events
from multigraph_backend.region import registry

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

OTHER = "other"
_LONGEST = 120  # characters of a label

_HELP = {
    "regions": "Dynamo graphs taken",
    "generic_compiled": "Compiles of generic graphs",
    "variants_compiled": "Compiles of variants",
    "loaded_ahead": "Compiled code taken from torch's caches alone",
    "worker_compiles": "Variants that worker processes compiled",
    "whole_graphs_taken": "Whole graphs, compiled in the background, that took the place of code that calls bodies",
    "whole_graphs_refused": "Whole graphs, compiled in the background, that did not",
    "refused_manifests": "Manifests and files of caches that were not to be trusted",
    "generic_calls": "Calls run by generic graphs",
    "variant_calls": "Calls run by variants",
    "padded_calls": "Calls padded up to a declared size",
    "refused_padding": "Graphs whose calls are not padded though they were to be",
    "eager_calls": "Calls run without compiled code",
    "failures": "Compiles that failed, hung or gave wrong outputs",
    "recordings": "Recordings made in CUDA graphs",
    "failed_recordings": "Recordings that failed",
    "evicted_recordings": "Recordings given up for others",
    "unprofitable_recordings": "Recordings given up because they did not pay",
    "unrecorded_pieces": "Reasons why calls of recorded code ran unrecorded",
    "moved_outputs": "Outputs that were held when their memory was needed",
    "packed_tensors": "Tensors saved for backward that compiled code packs",
    "kept_tensors": "Tensors saved for backward that compiled code keeps as they are",
    "after_seal": "Compiles and recordings that came after seal()",
}
_STATES = ("declared", "compiling", "ready", "failed", "inactive")


@dataclass
class Family:
    """One metric: its samples by the values of its labels."""

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...] = ()
    samples: dict[tuple[str, ...], float] = field(default_factory=dict)


class Reader:
    """What is there to tell, as plain data; it remembers what ended graphs have counted.

    `limit`: how many pairs of model and condition have samples of their own.
    """

    def __init__(self, limit: int = 256) -> None:
        if not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be a number from 1 on, got {limit!r}")
        self._limit = limit
        self._lock = threading.Lock()  # scrapes may come in several threads
        self._labels: dict[tuple[str, str], tuple[str, str]] = {}
        self._models: set[str] = set()
        self._seen: dict[int, dict[tuple[str, str], tuple[float, float]]] = {}  # of each region, at the last look
        self._ended: dict[tuple[str, str], tuple[float, float]] = {}
        self._pools: dict[int, tuple[object, int]] = {}

    def read(self) -> list[Family]:
        """All families, with the samples of this moment."""
        with self._lock:
            return [*_counts(), *self._of_variants(), *self._of_recordings(), _build()]

    def names(self) -> list[Family]:
        """The families that there are; no region and no recording is asked."""
        return [*_counts(), *_variant_families(), *_recording_families(), _build()]

    def _label(self, model: str, condition: str) -> tuple[str, str]:
        pair = _short(model), _short(condition)
        if pair not in self._labels:
            if len(self._labels) >= self._limit:
                return OTHER, OTHER
            self._labels[pair] = pair
            self._models.add(pair[0])
        return pair

    def _of_variants(self) -> tuple[Family, ...]:
        calls, seconds, states, gains = families = _variant_families()
        module = sys.modules.get("multigraph_backend.region.region")  # not loaded: nothing was compiled
        alive = [entry for entry in registry.living() if module is not None and isinstance(entry, module.Region)]
        now: dict[int, dict[tuple[str, str], tuple[float, float]]] = {}
        counted: Counter[tuple[str, str]] = Counter()
        best: dict[tuple[str, str], tuple[int, float]] = {}
        for region in sorted(alive, key=lambda entry: entry.serial):
            mine = now.setdefault(region.serial, {})
            for variant in (*region.variants, region.generic):
                label = self._label(region.user_code.title, variant.text)
                _add(mine, label, variant.calls, variant.compile_seconds)
                counted[label[0], variant.state] += 1
                if (factor := variant.gain.factor) is not None:
                    best[label] = max(best.get(label, (0, 0.0)), (variant.gain.calls, factor))
        for serial, before in self._seen.items():
            for label, (times, spent) in before.items() if serial not in now else ():
                _add(self._ended, label, times, spent)
        self._seen = now
        total = dict(self._ended)
        for counts in now.values():
            for label, (times, spent) in counts.items():
                _add(total, label, times, spent)
        for label, (times, spent) in total.items():
            calls.samples[label], seconds.samples[label] = times, spent
        models = {model for model, _ in counted}
        states.samples.update({(model, state): counted[model, state] for model in models for state in _STATES})
        gains.samples.update({label: factor for label, (_, factor) in best.items()})
        return families

    def _of_recordings(self) -> tuple[Family, ...]:
        held, pools = families = _recording_families()
        runtime = sys.modules.get("multigraph_backend.cudagraphs.runtime")
        for tree in () if runtime is None else runtime.trees():
            index = tree.device.index
            held.samples[str(index),] = tree.size
            # asking the allocator takes long and stops calls; a pool grows by new recordings alone
            state = (tree.size, tree.counts["recordings"], tree.device.generation)
            if self._pools.get(index, (None, 0))[0] != state and tree.lock.acquire(timeout=0.05):
                try:
                    self._pools[index] = state, tree.device.pool_bytes()
                finally:
                    tree.lock.release()
            if index in self._pools:
                pools.samples[str(index),] = self._pools[index][1]
        return families


def _add(into: dict[tuple[str, str], tuple[float, float]], label: tuple[str, str], calls: float, spent: float) -> None:
    had = into.get(label, (0, 0.0))
    into[label] = had[0] + calls, had[1] + spent


def _short(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _counts() -> Iterator[Family]:
    for name, count in events.stats().items():
        about = _HELP.get(name, f"The count {name} of multigraph_backend.stats()")
        yield Family(f"multigraph_{name}", about, "counter", (), {(): count})


def _variant_families() -> tuple[Family, Family, Family, Family]:
    pair = ("model", "condition")
    return (
        Family("multigraph_model_calls", "Calls run by the code of each condition of a model", "counter", pair),
        Family("multigraph_model_compile_seconds", "Seconds spent compiling it", "counter", pair),
        Family("multigraph_model_variants", "Variants of live graphs, generic ones too", "gauge", ("model", "state")),
        Family(
            "multigraph_model_gain_ratio", "How many times as fast as generic, under measure_gains()", "gauge", pair
        ),
    )


def _recording_families() -> tuple[Family, Family]:
    return (
        Family("multigraph_recordings_held", "Recordings that can be replayed", "gauge", ("device",)),
        Family("multigraph_recordings_pool_bytes", "Device memory of their pools", "gauge", ("device",)),
    )


def _build() -> Family:
    torch = sys.modules.get("torch")
    version = "" if torch is None else str(torch.version.__version__)
    return Family(
        "multigraph_build_info", "Versions", "gauge", ("version", "torch"), {(__version__, version): 1}
    )  # fmt: skip


# ---------------------------------------------------------------- as prometheus_client has it


def _client(module: str = "") -> ModuleType:
    try:
        importlib.import_module("prometheus_client")
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ImportError(
            "multigraph_backend.metrics needs prometheus_client: pip install multigraph[metrics]"
        ) from None
    return importlib.import_module(f"prometheus_client{module}")


class Collector:
    """For a registry of prometheus_client: `REGISTRY.register(Collector())`.  Each scrape reads the counts anew."""

    def __init__(self, limit: int = 256) -> None:
        self._core = _client(".metrics_core")
        self._reader = Reader(limit)

    def describe(self) -> list[Metric]:
        """What there may be: a registry asks for it when it is given this, so that no name is there twice."""
        return [self._metric(family) for family in self._reader.names()]

    def collect(self) -> Iterator[Metric]:
        """What there is now."""
        yield from map(self._metric, self._reader.read())

    def _metric(self, family: Family) -> Metric:
        kind = self._core.CounterMetricFamily if family.kind == "counter" else self._core.GaugeMetricFamily
        made = kind(family.name, family.help, labels=family.labels)
        for labels, value in family.samples.items():
            made.add_metric(labels, value)
        metric: Metric = made
        return metric


class Publisher:
    """Copies the counts of this process into ordinary counters and gauges of prometheus_client, from time to time.

    Those are what its multiprocess mode adds up over processes, which it does not do for collectors: each process
    keeps them in a file of the folder PROMETHEUS_MULTIPROC_DIR, and `MultiProcessCollector` reads all of these.
    """

    def __init__(self, interval: float = 5.0, limit: int = 256) -> None:
        if not interval > 0:
            raise ValueError(f"interval must be a number of seconds greater than 0, got {interval!r}")
        self._core = _client()
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            raise RuntimeError(
                "PROMETHEUS_MULTIPROC_DIR is not set, so nothing adds up over processes: set it before "
                "prometheus_client is imported, or register metrics.Collector() in a server of one process"
            )
        self._reader, self._interval = Reader(limit), interval
        self._instruments: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multigraph metrics", daemon=True)
        atexit.register(self.stop)
        self.write()
        self._thread.start()

    def write(self) -> None:
        """Copy the counts of this moment."""
        with self._lock:
            for family in self._reader.read():
                instrument = self._instrument(family)
                for labels, value in family.samples.items():
                    child = instrument.labels(*labels) if labels else instrument
                    if family.kind == "gauge":
                        child.set(value)
                        continue
                    had = self._counted.get((family.name, labels), 0)
                    child.inc(value - had if value >= had else value)  # less: `reset_stats()` was called
                    self._counted[family.name, labels] = value

    def stop(self) -> None:
        """Copy once more, and no more then."""
        if not self._stopped.is_set():
            self._stopped.set()
            atexit.unregister(self.stop)
            self.write()

    def _instrument(self, family: Family) -> Any:
        if family.name not in self._instruments:
            # no registry: MultiProcessCollector tells of what is in the folder's files, of this process too
            if family.kind == "counter":
                made = self._core.Counter(family.name, family.help, family.labels, registry=None)
            else:
                summed = family.name not in ("multigraph_model_gain_ratio", "multigraph_build_info")
                mode = "livesum" if summed else "livemax"
                made = self._core.Gauge(family.name, family.help, family.labels, registry=None, multiprocess_mode=mode)
            self._instruments[family.name] = made
        return self._instruments[family.name]

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self.write()


def publish(interval: float = 5.0, limit: int = 256) -> Publisher:
    """Let prometheus_client's multiprocess mode tell of this process too, at most `interval` seconds late.

    To be called in each worker, after it was forked.  The endpoint is prometheus_client's own: a registry with a
    `MultiProcessCollector`; `mark_process_dead(pid)` when a worker ends, as for any gauge.
    """
    return Publisher(interval, limit)
