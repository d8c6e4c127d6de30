"""What a variant gains over generic, measured on the user's own calls while he asks for it.

Generated code never comes here.  While `measure_gains()` is open, regions keep their variants to themselves instead of
handing them to generated code, so every call goes through `Region.missed`, and that runs each call of a variant by the
generic graph as well and times both.

Guarantees: the outputs are the variant's, as without measuring; random numbers are drawn once; a graph that changes its
inputs runs once and is not measured.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from multigraph_backend.lower.compile_thread import describe
from multigraph_backend.process.interruptions import from_outside
from multigraph_backend.region import registry

log = logging.getLogger(__name__)

Run = Callable[..., Any]

_lock = threading.Lock()
_open = 0


class Gain:
    """Times of one variant and of generic in the same calls: the newest 256; not the first, which has cold code.

    `factor`: how many times as fast the variant is, the median of (seconds of generic / its own); None before that.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._ratios: deque[float] = deque(maxlen=256)

    def add(self, variant_seconds: float, generic_seconds: float) -> None:
        self.taken += 1
        if self.taken > 1:
            self._ratios.append(generic_seconds / max(variant_seconds, 1e-9))

    @property
    def calls(self) -> int:
        return len(self._ratios)

    @property
    def factor(self) -> float | None:
        ratios = list(self._ratios)
        return statistics.median(ratios) if ratios else None


def measuring() -> bool:
    """Whether a `measure_gains()` is open."""
    return _open > 0


@contextlib.contextmanager
def measure_gains() -> Iterator[None]:
    """While open, every call that a variant runs is run by the generic graph too, and both are timed.

    Times are those of a caller who waits for the device (seconds of the wall clock, synchronized before and after), so
    calls take more than twice as long, and outputs of both are alive one after the other.  Afterwards `explain()`
    shows each variant's gain.  Calls of graphs that change their inputs are not measured.
    """
    global _open
    with _lock:
        _open += 1
        _publish_all()
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            _publish_all()


def _publish_all() -> None:
    for entry in registry.living():
        entry.publish()


def run_beside(variant: Run, generic: Run, args: Sequence[Any], gain: Gain) -> Any:
    """Outputs of `variant`.  Both are timed, each first in turn; an error in `generic` costs the figure alone."""
    devices = sorted({arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda})
    outputs: Any = None
    seconds = generic_seconds = 0.0
    for run in (variant, generic) if gain.taken % 2 else (generic, variant):
        if run is variant:
            outputs, seconds = _timed(variant, args, devices)
            continue
        try:
            with torch.random.fork_rng(devices):
                generic_seconds = _timed(generic, args, devices)[1]
        except Exception as error:
            if from_outside(error):
                raise
            log.info("a gain could not be measured: generic raised %s", describe(error))
    if generic_seconds:
        gain.add(seconds, generic_seconds)
    return outputs


def _timed(run: Run, args: Sequence[Any], devices: Sequence[int]) -> tuple[Any, float]:
    for device in devices:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    outputs = run(*args)
    for device in devices:
        torch.cuda.synchronize(device)
    return outputs, time.perf_counter() - started
