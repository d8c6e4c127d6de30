"""Worker processes alone, over a stub that does as it is told: whatever becomes of one, each task hears of it once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multigraph_backend import _compat
from multigraph_backend.lower import worker, workers
from multigraph_backend.lower.worker import Job, Outcome
from multigraph_backend.process import giving_way, sources


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[workers.Pool]:
    monkeypatch.setattr(workers, "PROGRAM", "tests.support.stub_worker")
    monkeypatch.setenv("STUB_HELLO", f"{torch.__version__} {sources.key()}")
    made = workers.Pool()
    yield made
    made.end()


class Heard:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def task(self, what: str, seconds: float | None = 60.0) -> workers.Task:
        return workers.Task(lambda: Job(what.encode(), "", seconds), self.outcomes.append)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int, within: float = 10.0) -> bool:
    until = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


def ask(pool: workers.Pool, what: str, seconds: float | None = 60.0) -> Outcome:
    heard = Heard()
    assert pool.submit(heard.task(what, seconds), 1)
    assert pool.wait(60)
    (outcome,) = heard.outcomes
    return outcome


def test_one_worker_does_one_job_after_the_other(pool: workers.Pool) -> None:
    first, second = ask(pool, "fine"), ask(pool, "fine")
    assert first.kind == "made"
    assert [first.reason] == [second.reason] == [str(pid) for pid in pool.pids]


def test_as_many_at_a_time_as_are_asked_for(pool: workers.Pool) -> None:
    heard = Heard()
    began = time.monotonic()
    for _ in range(4):
        pool.submit(heard.task("sleep 1"), 2)
    assert len(pool.pids) <= 2
    assert pool.wait(60)
    assert time.monotonic() - began >= 2
    assert len({outcome.reason for outcome in heard.outcomes}) == 2


@pytest.mark.parametrize(
    ("what", "seconds", "reason"),
    [
        ("exit 3", 60.0, "the worker ended with status 3"),
        ("kill", 60.0, "the worker was ended by SIGKILL, perhaps because memory ran out"),
        ("hang", 0.3, "the compile in a worker took longer than 0.3 s, and was ended"),
        ("raise", 60.0, "CompileError: no such thing"),
    ],
)
def test_what_becomes_of_a_worker_is_said_and_the_next_job_is_done(
    pool: workers.Pool, what: str, seconds: float, reason: str
) -> None:
    outcome = ask(pool, what, seconds)
    assert (outcome.kind, outcome.reason) == ("failed", reason)
    if what == "exit 3":
        assert "last words" in outcome.details
    assert ask(pool, "fine").kind == "made"


def test_one_that_was_killed_while_it_had_nothing_to_do_costs_nothing(pool: workers.Pool) -> None:
    ask(pool, "fine")
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert ask(pool, "fine").kind == "made"
    assert gone(pid)


def test_one_that_is_killed_by_what_it_does_is_tried_twice_at_most(pool: workers.Pool) -> None:
    ask(pool, "fine")
    assert ask(pool, "kill").reason == "the worker was ended by SIGKILL, perhaps because memory ran out"
    assert pool.pids == []


def test_one_that_runs_something_else_is_not_used(pool: workers.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_HELLO", "1.0 other")
    assert "workers run something else than this process" in ask(pool, "fine").reason


def test_none_can_be_started(pool: workers.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "no worker can be started: [Errno 2]" in ask(pool, "fine").reason
    monkeypatch.setattr(sys, "executable", "")
    assert ask(pool, "fine").reason == "there is no Python that could be started"


def test_a_failure_under_a_limit_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(job: Job) -> str | None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker, "_compile", fails)
    said = [worker._done(Job(b"", "", memory=memory)).reason for memory in (None, 1 << 50)]
    assert said[0] == "RuntimeError: can't start new thread"
    assert said[1] == f"{said[0]} (the worker's memory is limited to {1 << 50} bytes)"


@pytest.mark.parametrize(("rest", "seconds"), [(0.01, None), (0.01, 0.06), (0.0, None)])
def test_it_rests_before_it_benchmarks_a_kernel(rest: float, seconds: float | None) -> None:
    """`seconds`: of a compile at most, a quarter of which may be rests."""
    benchmarker = _compat.Benchmarker()
    with worker._rests(Job(b"", "", seconds, rest=rest)):
        way = giving_way.of_this_thread()
        for _ in range(5):
            with contextlib.suppress(Exception):  # without a GPU
                benchmarker.benchmark_gpu(lambda: None)
    if not rest:
        assert way is None
    else:
        assert way is not None
        assert way.rested == pytest.approx(0.05 if seconds is None else 0.02)
    assert giving_way.of_this_thread() is None


def test_what_a_worker_has_started_ends_with_it(pool: workers.Pool) -> None:
    heard = Heard()
    pool.submit(heard.task("child 1000", 2.0), 1)
    until = time.monotonic() + 30
    children: list[int] = []
    while not children and time.monotonic() < until:
        for pid in pool.pids:
            with contextlib.suppress(OSError):
                children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    assert children
    assert pool.wait(30)
    assert gone(*children)


def test_killed_at_random_times_a_hundred_times_each_task_hears_once(pool: workers.Pool) -> None:
    dice = random.Random(7)
    heard, ended = Heard(), threading.Event()

    def kill() -> None:
        while not ended.wait(dice.uniform(0, 0.1)):
            for pid in pool.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    for _ in range(100):
        pool.submit(heard.task(f"sleep {dice.uniform(0, 0.02)}"), 2)
    assert pool.wait(120)
    ended.set()
    killer.join()
    assert len(heard.outcomes) == 100
    failed = [outcome for outcome in heard.outcomes if outcome.kind == "failed"]
    assert failed
    assert all("ended by SIGKILL" in outcome.reason or "reached" in outcome.reason for outcome in failed)
    assert ask(pool, "fine").kind == "made"


PARENT = """
import sys, time
from multigraph_backend.lower import workers
from multigraph_backend.lower.worker import Job
workers.PROGRAM = "tests.support.stub_worker"
for what in ("hang", "child 1000"):
    workers.pool.submit(workers.Task(lambda what=what: Job(what.encode(), ""), print), 2)
while len(workers.pool.pids) < 2:
    time.sleep(0.01)
time.sleep({later})
print(*workers.pool.pids, flush=True)
input()
{then}
"""


@pytest.mark.parametrize("how", ["killed", "ends", "forks"])
def test_no_worker_outlives_its_parent(how: str) -> None:
    """Nor what one has started; also where a process that was forked from the parent lives on with its pipes."""
    then = {
        "killed": "time.sleep(1000)",
        "ends": "sys.exit()",
        "forks": "import os\nif os.fork() == 0: time.sleep(20); os._exit(0)\ntime.sleep(1000)",
    }[how]
    environ = {**os.environ, "STUB_HELLO": f"{torch.__version__} {sources.key()}"}
    program = PARENT.format(then=then, later=1.0)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True, env=environ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pids = list(map(int, parent.stdout.readline().split()))
        group = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _group(path) in pids]
        assert len(pids) == 2
        assert len(group) == 3
        parent.stdin.write("\n")
        parent.stdin.flush()
        if how != "ends":
            time.sleep(0.2)
            parent.kill()
        assert gone(*group)
        parent.stdout.close()
        parent.wait()


def _group(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return -1


def test_a_forked_process_has_workers_of_its_own(pool: workers.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "pool", pool)
    ask(pool, "fine")
    (pid,) = pool.pids
    child = os.fork()
    if child == 0:
        heard = Heard()
        workers.pool.submit(heard.task("fine"), 1)
        workers.pool.wait(30)
        good = workers.pool is not pool and [o.kind for o in heard.outcomes] == ["made"]
        workers.pool.end()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.pids == [pid]
    assert ask(pool, "fine").reason == str(pid)
