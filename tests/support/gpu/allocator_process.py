"""What the checks of the allocator extension on a GPU share, and the process in which they run.

An allocator cannot be changed once CUDA has started, so a process installs the extension (or opens pools of it) and
runs a group of checks one after the other; what each raised is printed as JSON.  `test_allocator_on_gpu.py` starts it.

    python -c "from tests.support.gpu.allocator_process import main; main('installed')"
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from multigraph_backend import _compat, allocator
from multigraph_backend.allocator import installing, library, statistics

MIB = 1 << 20
GIB = 1 << 30
Check = Callable[[], None]
CHECKS: dict[str, dict[str, Check]] = {
    name: {} for name in ("installed", "stitched", "plain", "compiled", "recorded", "lending", "pools")
}
MODULES = tuple(
    f"tests.support.gpu.allocator_checks_{name}"
    for name in ("installed", "stacks", "forked", "beside", "recorded", "lending", "sleep")
)


def check(group: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[group][function.__name__] = function
        return function

    return add


def expect(condition: bool, *said: object) -> None:
    if not condition:
        raise AssertionError(" ".join(map(str, said)) or "not so")


def cuda(*shape: int, **how: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **how)


def clean() -> None:
    torch.cuda.synchronize()
    gc.collect()
    _compat.clear_cublas_workspaces()  # one that was made in a capture keeps the capture's pool
    torch.cuda.empty_cache()


def private_bytes(pool: tuple[int, int] | None = None) -> int:
    segments = allocator.memory_snapshot()["segments"]
    meant = [entry for entry in segments if entry["segment_pool_id"] == pool] if pool else [
        entry for entry in segments if entry["segment_pool_id"] != (0, 0)
    ]  # fmt: skip
    return sum(entry["total_size"] for entry in meant)


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """The process may reserve so much more than it has now."""
    clean()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((allocator.memory_reserved() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(call: Callable[[], object]) -> str:
    try:
        call()
    except torch.OutOfMemoryError as error:
        return str(error)
    raise AssertionError("it was not out of memory")


def verified() -> None:
    """The extension's books are right."""
    loaded = library.load().library
    assert loaded is not None
    loaded.call("mg_verify", loaded.call("mg_torch_device", 0))


# ---------------------------------------------------------------- a process


def start(group: str) -> None:
    """What a group's process does before its checks."""
    if group == "plain":
        expect(bool(allocator.install(reuse="own_stream", expandable=False)), allocator.status())
    if group == "installed" and os.environ.get("MULTIGRAPH_ALLOCATOR") != "1":  # else torch has done so
        expect(bool(allocator.install()), allocator.status())
    if group == "stitched":
        expect(bool(allocator.install(stitch=True)), allocator.status())
    if group in ("compiled", "recorded"):
        expect(bool(allocator.install(reuse="any_stream", history=1000)), allocator.status())
    if group == "lending":
        expect(bool(allocator.install(lend=True)), allocator.status())
    if group != "pools":
        expect(installing.installed() is not None, allocator.status())
        torch.cuda.init()
        torch.empty(1, device="cuda")
        torch.cuda.current_blas_handle()
        cuda(8, 8) @ cuda(8, 8)  # its workspace is there before anything is counted


def all_checks() -> dict[str, dict[str, Check]]:
    """By group, in the order in which they run."""
    for name in MODULES:
        importlib.import_module(name)
    return CHECKS


#: what compute-sanitizer watches: no call in these fails, none waits for a time, and none counts on a tensor's end, for
#: under the tool frames of Python were seen to stay, with what is in them
WATCHED = {
    "installed": (
        "a_graph_on_one_stream_replays",
        "ping_pong_within_258_mib",
        "in_capture_reclaim_on_two_streams",
        "blocks_without_use_have_nothing_to_wait_for",
        "streams_of_a_capture_share_one_range",
    ),
    "recorded": (
        "a_function_is_recorded_and_right_on_fresh_inputs",
        "outputs_that_are_held_stay_as_they_are",
    ),
}


def main(group: str, watched: bool = False) -> int:
    """Run a group's checks, or those of `WATCHED`, and print what came of them as a line of JSON.

    Returns 0 where none failed.
    """
    failed: dict[str, str] = {}
    ran: list[str] = []
    checks = all_checks()[group]
    if watched:
        checks = {name: checks[name] for name in WATCHED[group]}
    try:
        start(group)
    except BaseException:
        failed["start"] = traceback.format_exc()
    for name, function in checks.items() if not failed else ():
        ran.append(name)
        try:
            function()
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        gc.collect()
    stats = statistics.memory_stats()
    counts = {name: count for name, count in stats.items() if name.startswith(("multigraph.", "num_"))}
    print("\n" + json.dumps({"ran": ran, "failed": failed, "counts": counts}))
    return 1 if failed else 0
