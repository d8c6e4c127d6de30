"""What happens is counted here, process-wide, and logged once.

Counting a call must cost next to nothing and lose nothing when threads race, so a call counter is an
`itertools.count`: its `next` is one atomic step of the interpreter.  Everything rarer is a plain integer under a lock.

torch's own instruments are served too: `torch._dynamo.utils.counters["multigraph"]`, an artifact per compile in the
structured trace (tlparse shows them), a phase per compile in the Chromium trace.  All of it happens when something is
compiled, never at a call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

from multigraph_backend import _compat
from multigraph_backend.process import rank

log = logging.getLogger(__name__)

CallKind = Literal["generic_calls", "variant_calls", "padded_calls"]
Event = Literal[
    "regions", "generic_compiled", "variants_compiled", "loaded_ahead", "worker_compiles", "refused_manifests",
    "whole_graphs_taken", "whole_graphs_refused",
    "eager_calls", "failures",
    "recordings", "failed_recordings", "evicted_recordings", "unprofitable_recordings",
    "recordings_that_gave_way", "pool_loans",
    "patched_recordings", "refused_patches", "stray_inputs",
    "unrecorded_pieces", "moved_outputs", "resized_outputs", "shared_by_threads",
    "refused_collectives", "waited_for_ranks", "late_collectives",
    "packed_tensors", "kept_tensors", "unpacked_retries", "body_calls", "repeat_retries",
    "kernels_together", "failed_kernels_together",
    "retained_backwards", "copied_backwards", "after_seal", "refused_padding",
]  # fmt: skip

#: what is measured when somebody asks
Gauge = Literal["pool_held_bytes", "pool_live_bytes", "pool_lent_bytes", "pool_dead_bytes", "graph_bytes"]

_CALLS: tuple[CallKind, ...] = get_args(CallKind)
_EVENTS: tuple[Event, ...] = get_args(Event)
_GAUGES: tuple[Gauge, ...] = get_args(Gauge)

_lock = threading.RLock()  # guards everything below; a finalizer may run inside
_events: dict[str, int] = dict.fromkeys(_EVENTS, 0)
_counters: dict[str, list[CallCounter]] = {kind: [] for kind in _CALLS}
_ended: dict[str, int] = dict.fromkeys(_CALLS, 0)  # calls of owners that are gone
_start: dict[str, int] = dict.fromkeys(_CALLS, 0)  # the sum at the last reset
_said: set[str] = set()
_gauges: list[Callable[[], Mapping[Gauge, int]]] = []


class CallCounter:
    """Counts calls; `tick()` is atomic and takes no lock."""

    def __init__(self) -> None:
        count = itertools.count()
        self.tick = count.__next__
        self._reads = 0

    @property
    def value(self) -> int:
        with _lock:
            seen = self.tick() - self._reads
            self._reads += 1
            return seen


def call_counter(kind: CallKind, owner: Any) -> CallCounter:
    """A counter that is part of the process-wide sum of its kind, also after `owner` is gone."""
    counter = CallCounter()
    with _lock:
        _counters[kind].append(counter)
    weakref.finalize(owner, _retire, kind, counter).atexit = False
    return counter


def _retire(kind: CallKind, counter: CallCounter) -> None:
    with _lock:
        _counters[kind].remove(counter)
        _ended[kind] += counter.value


def count(event: Event) -> None:
    """One more of `event`, here and among torch's counters."""
    with _lock:
        _events[event] += 1
        if not _compat.missing("instruments"):
            _compat.counters["multigraph"][event] += 1


def gauge(read: Callable[[], Mapping[Gauge, int]]) -> None:
    """Have `stats()` ask `read`, which may take locks of its own."""
    _gauges.append(read)


def current_compile_id() -> Any:
    """torch's id of the compile in progress, None where there is none."""
    return None if _compat.missing("instruments") else _compat.CompileContext.current_compile_id()


@contextlib.contextmanager
def compile_phase(code: str, condition: str, compile_id: Any) -> Iterator[None]:
    """A late compile as torch's tools see it: under the id of its trace, as a phase of its own."""
    if _compat.missing("instruments"):
        yield
        return
    metadata = {"graph": code, "condition": condition}
    with contextlib.ExitStack() as stack:
        if compile_id is not None:
            stack.enter_context(_compat.compile_context(_compat.CompileContext(compile_id)))
        stack.enter_context(_compat.dynamo_timed("multigraph_compile", phase_name="multigraph", metadata=metadata))
        yield


def compile_artifact(said: Mapping[str, object], graph: Callable[[], str], compile_id: Any) -> None:
    """What a compile was for and what came of it, with its graph, for the structured trace (TORCH_TRACE)."""
    if _compat.missing("instruments"):
        return
    for name, encoding, payload in (
        ("multigraph_variant", "json", lambda: json.dumps(dict(said))),
        ("multigraph_variant_graph", "string", graph),
    ):
        metadata = {"name": name, "encoding": encoding}
        _compat.trace_structured(
            "artifact",
            metadata_fn=lambda metadata=metadata: metadata,
            payload_fn=payload,
            compile_id=compile_id,
            expect_trace_id=False,
        )


def _calls(kind: CallKind) -> int:
    return _ended[kind] + sum(counter.value for counter in _counters[kind])


def calls() -> int:
    """Calls of generic and of variants since the process began."""
    with _lock:
        return _calls("generic_calls") + _calls("variant_calls")


def stats() -> dict[str, int]:
    """Process-wide counts since the start or the last `reset_stats()`.

    `regions`: Dynamo graphs taken; `generic_compiled`, `variants_compiled`: backend compiles; `generic_calls`,
    `variant_calls`: calls run by them; `padded_calls`: those of them that were padded up to a declared size, and
    `refused_padding`: graphs whose calls are not, though they were to be; `loaded_ahead`: compiled code that was taken
    from torch's caches alone, before a call asked for it, or after `seal()`; `worker_compiles`: of the variants
    compiled, those that a worker process compiled; `refused_manifests`: manifests and files of caches that were not to
    be trusted; `eager_calls`: calls run without compiled code; `failures`: compiles that failed, hung, or gave
    wrong outputs; `packed_tensors`, `kept_tensors`: tensors saved for backward, by compiles with rules for them;
    `refused_collectives`: variants refused
    because they would issue other collectives than generic;
    `pool_loans`: how often memory of recordings began to serve others, for the device was out of memory;
    `waited_for_ranks`: compiles that waited for another process of the host that compiled the same;
    `late_collectives`: warnings that this rank waits in a collective for others;
    `unpacked_retries`: compiles that failed with packs and were done again without;
    `body_calls`: in how many places graphs, when they are compiled, call a body for a block that comes again;
    `repeat_retries`: compiles that failed with them and were done again without;
    `kernels_together`: C++ kernels that were compiled together with others of their graph;
    `failed_kernels_together`: how often that failed, and each was compiled by itself;
    `whole_graphs_taken`, `whole_graphs_refused`: how often the whole graph's code, compiled in the background, took the
    place of code that calls bodies, and how often it did not;
    `retained_backwards`: backwards compiled once more, for calls after which the graph stays; `copied_backwards`: such
    calls that ran on copies, because there was no such code.

    Bytes of now, which no reset touches: `pool_held_bytes`: of the device, for recordings; of these `pool_live_bytes`,
    where something alive lies, `pool_lent_bytes`, which serve others, and `pool_dead_bytes`, free for the next
    recording; `graph_bytes`: what the driver took for the graphs themselves.
    """
    gauges: dict[str, int] = dict.fromkeys(_GAUGES, 0)
    for read in _gauges:  # without the lock: they have locks under which events are counted
        for name, now in read().items():
            gauges[name] += now
    with _lock:
        return {**_events, **{kind: _calls(kind) - _start[kind] for kind in _CALLS}, **gauges}


def reset_stats() -> None:
    """Let every count of `stats()` start at 0 again.  What `explain()` shows per variant is not touched."""
    with _lock:
        for event in _EVENTS:
            _events[event] = 0
        for kind in _CALLS:
            _start[kind] = _calls(kind)


def warn_once(key: str, message: str, *args: object) -> None:
    """Log a warning the first time something of this kind happens, at debug level afterwards."""
    with _lock:
        first = key not in _said
        _said.add(key)
    if (where := rank.current()) is not None and where.world_size > 1:
        message = f"rank {where.rank}: {message}"
    log.log(logging.WARNING if first else logging.DEBUG, message, *args)
