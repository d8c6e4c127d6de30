"""The Python side of the allocator extension without it, or without a GPU: all else goes on, and one line says why."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import multigraph_backend
from multigraph_backend import _compat, allocator
from multigraph_backend.allocator import ended_pools, installing, library, pools, sleeping, statistics
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.doctor.allocator import AllocatorFacts
from multigraph_backend.doctor.allocator import allocator as findings

ROOT = Path(multigraph_backend.__file__).parents[1]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked for nothing yet, without the extension."""
    monkeypatch.setattr(library, "PACKAGE", "multigraph_allocator_that_is_not_there")
    monkeypatch.setattr(library, "_found", None)
    monkeypatch.setattr(installing, "_installed", None)
    monkeypatch.setattr(installing, "_failure", None)
    monkeypatch.setattr("multigraph_backend.events._said", set())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("fresh")
def test_without_the_extension_one_line_says_so_and_torch_s_allocator_serves(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        status = allocator.install()
        assert not status
    assert status.reason is not None
    assert status.reason.startswith("the extension is not installed: pip install multigraph-allocator")
    assert "graph_capture_record_stream_reuse:True" in status.reason
    assert said(caplog) == [f"the allocator extension is not in use, torch's own is: {status.reason}"]
    assert not status.usable
    assert str(allocator.status()) == f"not installed: {status.reason}"


def test_a_process_that_nobody_asked(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_found", library.Found(library=None, reason=None))
    monkeypatch.setattr(installing, "unusable", lambda loaded: None)
    assert allocator.status().reason == installing.NOT_ASKED


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match=r"reuse is one of .* \(did you mean 'own_stream'\?\)"):
        allocator.install(reuse="own_streams")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="history is a number of events"):
        allocator.install(history=2_000_000)
    with pytest.raises(ValueError, match="garbage_threshold lies between 0 and 1"):
        allocator.install(garbage_threshold=2.0)
    with pytest.raises(TypeError, match="expandable is True or False, got 'no'"):
        allocator.install(expandable="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stitch is True or False, got 2"):
        allocator.install(stitch=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit is a number of bytes"):
        allocator.pool(limit=0)


def test_sleep_without_a_gpu_says_why() -> None:
    with pytest.raises(ValueError, match=r"keep is 'host' or 'nothing', got 'hosts' \(did you mean 'host'\?\)"):
        allocator.sleep("hosts")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one that sleeps cannot serve others"):
        allocator.pool(sleeps=True, use_on_oom=True)
    for call in (allocator.sleep, allocator.wake):
        with pytest.raises(RuntimeError, match=r"of the installed extension; here a pool\(sleeps=True\) can sleep"):
            call()
    if torch.cuda.is_available():
        return
    pool, plain = allocator.pool(sleeps=True), allocator.pool()
    with pytest.raises(RuntimeError, match=r"make it with pool\(sleeps=True\)"):
        plain.sleep()
    with pytest.raises(RuntimeError, match="its memory is not the extension's: there is no GPU"):
        pool.sleep()
    with pytest.raises(allocator.Asleep, match="does not sleep"):
        pool.wake()
    assert not pool.asleep
    with pool, pool:
        pass


def test_what_is_in_an_ended_pool_sleeps_until_it_is_gone() -> None:
    key, left = object(), [(64, 64)]
    sleeping.fall_asleep(key, sleeping.Sleeper(62, ((64, 64),)), lambda: 64)
    sleeping.ended(key, lambda: left)
    assert [sleeper.has(100) for sleeper in sleeping.asleep(62)] == [True]
    left.clear()
    assert sleeping.asleep(62) == ()
    left.append((64, 64))  # another pool's, at the same addresses
    assert sleeping.asleep(62) == ()
    sleeping.ended(object(), lambda: left)  # one that did not sleep
    assert sleeping.asleep(62) == ()


def test_a_pool_that_sleeps_is_not_opened_and_one_that_is_open_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Kind(pools._Nothing):
        index = 63

        def sleep(self, keep: bool) -> int:
            calls.append(keep)
            return 5

        def wake(self) -> int:
            if calls[-1] == "full":
                raise allocator.Asleep("the device has no memory")
            return 5

    pool = pools.Pool(Kind(), None, sleeps=True)
    with pool, pytest.raises(allocator.Asleep, match="the pool is open"):
        pool.sleep()
    assert pool.sleep() == 5
    assert pool.asleep
    for call in (pool.__enter__, lambda: pool.id, lambda: pool.mem_pool):
        with pytest.raises(allocator.Asleep, match="wake it first"):
            call()
    with pytest.raises(allocator.Asleep, match="sleeps already"):
        pool.sleep()
    calls.append("full")
    with pytest.raises(allocator.Asleep, match="has no memory"):
        pool.wake()
    assert pool.asleep
    assert sleeping.asleep(63)
    calls.append("room")
    assert pool.wake() == 5
    assert not sleeping.asleep(63)
    pool.sleep(keep="nothing")
    pool.close()
    assert not sleeping.asleep(63)
    with pytest.raises(RuntimeError, match="closed: what is in it may only die"):
        pool.wake()
    assert calls == [True, "full", "room", False]
    monkeypatch.setenv("MULTIGRAPH_DEBUG", "poison")
    assert sleeping.fill() == 0xFF
    monkeypatch.delenv("MULTIGRAPH_DEBUG")
    assert sleeping.fill() == -1


def test_what_the_backend_keeps_on_the_device_is_written_again_where_contents_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sleeping, "_possible", False)
    table, elsewhere, unknown = torch.arange(5.0), torch.arange(3.0), torch.arange(2.0)
    expected = [each.clone() for each in (table, elsewhere)]
    sleeping.survives(unknown)  # nothing here could sleep yet
    sleeping.will_be_possible()
    sleeping.survives(table, table.clone())
    sleeping.survives(elsewhere)

    def sleeps(key: str, *tensors: torch.Tensor, kept: bool = False) -> None:
        ranges = tuple((each.data_ptr(), each.nbytes) for each in tensors)

        def give_up() -> int:
            for each in tensors:
                each.fill_(7)
            return 1

        assert sleeping.fall_asleep(key, sleeping.Sleeper(0, ranges, kept), give_up) == 1

    sleeps("one", table, unknown)
    sleeps("two", elsewhere)
    sleeping.woken("one")
    assert torch.equal(table, expected[0])
    assert elsewhere.eq(7).all()  # its pages are not there yet
    assert unknown.eq(7).all()
    sleeping.woken("two")
    assert torch.equal(elsewhere, expected[1])
    sleeps("one", table, kept=True)
    sleeping.woken("one")  # whoever keeps contents brings them
    assert table.eq(7).all()
    with pytest.raises(RuntimeError, match="not now"):
        sleeping.fall_asleep("one", sleeping.Sleeper(0, None, False), _not_now)
    assert table.eq(7).all()  # it may be a capture that was in the way: nothing is launched
    assert not sleeping.asleep(0)


def _not_now() -> int:
    raise RuntimeError("not now")


def test_a_pool_of_torch_s_that_is_open_is_opened_again_over_the_same_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    is_open: list[tuple[int, int]] = []

    class MemPool:
        def __init__(self, allocator: Any, use_on_oom: bool) -> None:
            made.append((allocator, use_on_oom))
            self.id = (0, len(made))

    @contextlib.contextmanager
    def use(pool: MemPool, index: int) -> Iterator[None]:
        assert pool.id not in is_open, "beginAllocateToPool: already recording to mempool_id"
        is_open.append(pool.id)
        yield
        is_open.remove(pool.id)

    monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(ended_pools, "allocates_into_a_pool", lambda index: bool(is_open))
    kind = pools._OfTorch(0, True, allocator="of slot 3")
    pool = pools.Pool(kind, None)
    for _ in range(2):
        with pool, pools.Pool(pools._Nothing(), None), pool:
            assert is_open == [(0, 1), (0, 2)]
        assert is_open == []
    with pool:
        thread = threading.Thread(target=lambda: pool.__enter__() and pool.__exit__(None, None, None))
        thread.start()
        thread.join()
        assert is_open == [(0, 1)]
    assert made == [("of slot 3", True)] * 2
    assert pool.id == (0, 1)
    with pool, pool:
        pool.close()
    assert is_open == []


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int, bool]] = []

    def install(reuse: str, options: library.Options, path: str | None, lends: bool) -> str:
        asked.append((reuse, options.expandable, options.history, lends))
        return "this test"

    monkeypatch.setattr(installing, "_install", install)
    installing.install_as_asked({})
    installing.install_as_asked(
        {installing.OPTIONS_VARIABLE: '{"expandable": false, "reuse": "own_stream", "history": 7, "lend": false}'}
    )
    installing.install_as_asked({installing.OPTIONS_VARIABLE: '{"stitch": true}'})
    assert asked == [("any_stream", 1, 0, True), ("own_stream", 0, 7, False), ("any_stream", 2, 0, True)]
    for said, error in (
        ('{"expendable": false}', r"install takes no 'expendable' \(did you mean 'expandable'\?\)"),
        ("[1]", "is a JSON object of install's arguments"),
        ("{expandable", "is no JSON"),
        ('{"reuse": "all"}', "reuse is one of"),
    ):
        with pytest.raises(ValueError, match=error):
            installing.install_as_asked({installing.OPTIONS_VARIABLE: said})
    assert len(asked) == 3


@pytest.mark.usefixtures("fresh")
def test_a_pool_without_a_gpu_does_nothing_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "_gpus", lambda: 0)
    for _ in range(2):
        pool = allocator.pool(limit=1 << 20)
        with pool, pool:
            assert torch.ones(3).sum() == 3
    assert (pool.id, pool.mem_pool, pool.reserved_bytes, pool.max_reserved_bytes) == (None, None, 0, 0)
    assert pool.reason == "there is no GPU that torch may use"
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a pool is its process's, and neither copied nor pickled"):
            copied(pool)
    assert said(caplog) == [f"a pool of the allocator extension does nothing: {pool.reason}"]
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"), pool:
        pass


def test_torch_s_settings_are_said_again_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(pools._compat, "set_allocator_settings", told.append, raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert pools.reuse_in_captures_of_torch()
    assert told == ["expandable_segments:True,graph_capture_record_stream_reuse:True"]


def test_this_torch_takes_the_setting() -> None:
    code = "from multigraph_backend.allocator import pools\nassert pools.reuse_in_captures_of_torch()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_statistics_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert allocator.memory_stats() == {}
    assert allocator.memory_allocated() == allocator.max_memory_reserved() == 0
    assert allocator.memory_snapshot() == {"segments": [], "device_traces": []}
    assert allocator.memory_summary() == "CUDA has not started"
    allocator.reset_peak_memory_stats()


def test_the_table() -> None:
    levels = ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes", "allocation", "segment")
    numbers = ("current", "peak", "allocated", "freed")
    stats = {f"{level}.all.{number}": 3 << (4 * place) for level in levels for place, number in enumerate(numbers)}
    assert_expected_inline(
        statistics.table(stats | {"multigraph.proven": 7, "num_ooms": 1}),
        """\
                          now         most        added   taken away
allocated                 3 B         48 B        768 B     12.0 KiB
requested                 3 B         48 B        768 B     12.0 KiB
reserved                  3 B         48 B        768 B     12.0 KiB
active                    3 B         48 B        768 B     12.0 KiB
allocation                  3           48          768        12288
segment                     3           48          768        12288
proven               7
num_ooms             1""",
    )
    assert statistics.table({}) == "nothing was allocated on this device"


def test_importing_it_is_light() -> None:
    code = "import sys, torch\nbefore = set(sys.modules)\nimport multigraph_backend.allocator\n"
    code += (
        "print([n for n in set(sys.modules) - before if n.startswith(('torch._dynamo', 'torch._inductor', 'sympy'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "[]\n")


# ---------------------------------------------------------------- the doctor


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            {"reason": "the extension is not installed"},
            "ok: torch's own; the extension is not installed",
        ),
        (
            {"version": "0.1.0", "abi": 1, "usable": True, "reason": "nobody asked for it"},
            "ok: torch's own; the extension 0.1.0 can serve pools, and the process if it is asked to",
        ),
        (
            {"version": "0.1.0", "abi": 2, "reason": "it has ABI version 2"},
            "ok: torch's own; the extension 0.1.0 cannot be used here: it has ABI version 2",
        ),
        (
            {
                "version": "0.1.0",
                "abi": 1,
                "usable": True,
                "installed": True,
                "features": ("reuse in captures: strict",),
            },
            "ok: the extension 0.1.0 is the allocator of this process (reuse in captures: strict)",
        ),
        (
            {"asked": "1", "reason": "the extension is not installed"},
            "warning: MULTIGRAPH_ALLOCATOR=1, but torch's own allocator is in use: the extension is not installed",
        ),
        (
            {"asked": "yes", "reason": "nobody asked for it", "usable": True, "abi": 1},
            "warning: MULTIGRAPH_ALLOCATOR=yes, but torch's own allocator is in use: nobody asked for it",
        ),
        (
            {"asked": "1", "reason": "nobody asked for it", "usable": True, "abi": 1},
            "warning: MULTIGRAPH_ALLOCATOR=1, but torch's own allocator is in use: nobody asked for it; "
            "torch does not load it by itself",
        ),
        (
            {"asked": "1", "reason": "too late", "usable": True, "abi": 1, "autoloads": True},
            "warning: MULTIGRAPH_ALLOCATOR=1, but torch's own allocator is in use: too late",
        ),
    ],
)
def test_what_the_doctor_says(found: dict[str, Any], expected: str) -> None:
    (finding,) = findings(AllocatorFacts(**found))
    assert f"{finding.level}: {finding.text}" == expected
    assert (finding.remedy is None) == (finding.level == "ok")


# ---------------------------------------------------------------- recordings


@pytest.mark.usefixtures("fresh")
def test_nothing_is_recorded_in_another_pluggable_allocator_or_without_torch_s_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking: dict[str, tuple[str, ...]] = {}
    monkeypatch.setattr(_compat, "missing", lambda feature: lacking.get(feature, ()))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert str(runtime.unavailable()).startswith("the process's allocator is a pluggable one")
    installed: Any = installing.Installed(None, None, "any_stream", True, "", None)  # type: ignore[arg-type]
    monkeypatch.setattr(installing, "_installed", installed)
    assert runtime.unavailable() is None
    lacking["recordings in the extension on CUDA"] = ("no such symbol",)
    assert runtime.unavailable() == "the allocator extension is installed, and this torch differs: no such symbol"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "2.16.0.dev20270101+cu130", "3.0"])
def test_a_torch_whose_setters_were_not_checked_is_left_alone(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    called: list[str] = []

    class Loaded:
        def call(self, name: str, *arguments: Any) -> None:
            called.append(name)

    found = library.Found(library=Loaded(), abi=1)  # type: ignore[arg-type]
    monkeypatch.setattr(library, "_found", found)
    monkeypatch.setattr(installing, "unusable", lambda loaded: None)
    monkeypatch.setattr(torch.version, "__version__", version)
    status = allocator.install()
    assert not status
    assert status.reason is not None
    assert status.reason.startswith(f"torch {version} was not checked: its functions for an allocator are known from")
    assert "allocator.pool()" in status.reason
    assert called == []


def test_this_torch_was_checked() -> None:
    assert installing._unchecked() is None
