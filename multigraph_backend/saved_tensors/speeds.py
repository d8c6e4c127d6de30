"""How fast this device is, measured once: what packing and computing again cost, in place of round figures.

Packs and unpacks of ours are limited by memory, once a compiler has made one kernel of each; so a copy on the device
says what they take, by their bytes.  A matmul says what computing one again takes.  The link to the host is measured
where offloading needs it.

Figures of the same machine differ from run to run, and plans by them would, too.  So they are rounded (two steps to a
factor of two), and the first process that measured leaves them in the folder of manifests for all others of this user,
by the device's name and torch's version.  Where nothing is kept, rounding has to do.

In: a device.  Out: a `costs.Machine` and the link's bytes in a second, 0 on the CPU.  What cannot be measured, within
a capture or where memory is out, is the round figure of `costs`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch

from multigraph_backend import _compat
from multigraph_backend.cache import manifests, trusted
from multigraph_backend.saved_tensors import costs
from multigraph_backend.saved_tensors.costs import Machine
from multigraph_backend.saved_tensors.offload import transfers

log = logging.getLogger(__name__)

_COPIED = 32 << 20  # bytes
_ROWS = {"cuda": 4096, "cpu": 512}
_TIMES = 5  # of which the fastest counts: what else runs only makes one slower
_MOST = 4096  # bytes of a file


def of(device: torch.device) -> tuple[Machine, float]:
    """The machine, and bytes a second from and to the host, the slower of the two."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return costs.machine_of(device), 0.0
    return _known(device.type, device.index)


@functools.cache
def _known(kind: str, index: int | None) -> tuple[Machine, float]:
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    path = _path(device)
    found = None if path is None else _read(path)
    if found is None:
        try:
            found = _measured(device)
        except RuntimeError as error:  # no memory for it, or an operation that this device lacks
            log.debug("%s is not measured: %s", device, error)
            return costs.machine_of(device), 0.0
        if path is not None:
            _write(path, found)
    return Machine(*found[:3]), found[3]


def rounded(speed: float) -> float:
    """One of two figures in a factor of two, as a number that JSON keeps as it is."""
    return float(round(2 ** (round(math.log2(max(speed, 1.0)) * 2) / 2)))


# ---------------------------------------------------------------- measuring


def _measured(device: torch.device) -> tuple[float, float, float, float]:
    with _compat.disable_current_modes(), torch.no_grad():
        source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
        to = torch.zeros_like(source)
        copied = 2 * _COPIED / _fastest(device, lambda: to.copy_(source))
        wide = _operations(device, torch.float32)
        narrow = _operations(device, torch.bfloat16) if device.type == "cuda" else wide
        link = min(transfers.of(device).stream.bytes_per_second()) if device.type == "cuda" else 0.0
    return rounded(copied), rounded(narrow), rounded(wide), rounded(link) if link else 0.0


def _operations(device: torch.device, dtype: torch.dtype) -> float:
    rows = _ROWS.get(device.type, _ROWS["cuda"])
    # no zeros: a GPU is faster at these
    one = torch.arange(rows * rows, dtype=torch.float32, device=device).sin_().view(rows, rows).to(dtype)
    return 2 * rows**3 / _fastest(device, lambda: one @ one)


def _fastest(device: torch.device, run: Any) -> float:
    """Seconds; the first run is a warm-up."""
    run()
    found = []
    for _ in range(_TIMES):
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(torch.cuda.current_stream(device))
            run()
            after.record(torch.cuda.current_stream(device))
            after.synchronize()
            found.append(float(before.elapsed_time(after)) / 1e3)
        else:
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)


# ---------------------------------------------------------------- keeping


def _path(device: torch.device) -> Path | None:
    """Where figures of this device lie; None where nothing is kept."""
    if not manifests.kept():
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    said = f"{name}|{torch.version.__version__}|{_COPIED}|{sorted(_ROWS.items())}"
    try:
        return manifests.folder() / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.speeds"
    except OSError:
        return None


def _read(path: Path) -> tuple[float, float, float, float] | None:
    try:
        trusted.own_folder(path.parent)
        found = json.loads(trusted.read(path, _MOST))
        first, second, third, link = map(float, found)
    except (OSError, ValueError, TypeError):  # none is there, or it is nobody's to trust
        return None
    return (first, second, third, link) if min(first, second, third) >= 1 and link >= 0 else None


def _write(path: Path, found: tuple[float, ...]) -> None:
    try:
        trusted.own_folder(path.parent)
        trusted.write(path, json.dumps(found).encode(), durable=False)
    except (OSError, ValueError) as problem:
        log.debug("%s is not written: %s", path, problem)
