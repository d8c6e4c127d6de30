"""Worker processes that compile while calls go on.

In: tasks, each of which makes a job (`worker.Job`) and is told what became of it.  Out: code in torch's caches, and
the `Outcome`.  A thread of this process stands behind each worker: it starts it when there is something to do, sends
one job at a time, and waits for the answer, at most so many seconds.  A worker that has nothing to do for a while ends.

Guarantees: each task hears once what became of it, in a thread that no call waits for; a worker that crashes, hangs, or
is killed fails the one task that it was at, and nothing else; no worker outlives this process.  A worker that has done
something before and was killed may have had nothing to do then, so its task is given to a new one, once.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from multigraph_backend.lower.worker import LENGTH, Hello, Job, Outcome, send
from multigraph_backend.process import sources

log = logging.getLogger(__name__)

IDLE = 60.0  # seconds after which a worker without anything to do ends: it holds some hundred MB
START = 120.0  # seconds that a worker has to import torch and its compilers
PROGRAM = "multigraph_backend.lower.worker"
_MOST_SAID = 4000  # characters of what a worker that crashed has said


def default_count() -> int:
    """Workers at a time: half of the processors, for calls need the others."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(usable // 2, 8))


@dataclass(frozen=True)
class Task:
    """`job` makes what is sent, in the worker's thread, or gives an `Outcome` itself; `done` is told the outcome."""

    job: Callable[[], Job | Outcome]
    done: Callable[[Outcome], None]


class Pool:
    """The workers of this process."""

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.RLock())  # a handler of a signal may call what it interrupts
        self._waiting: collections.deque[Task] = collections.deque()
        self._threads = 0
        self._idle = 0
        self._open = 0  # tasks that have not heard
        self._ended = False
        self._registered = False
        self._waited_for = 0
        self._processes: set[_Process] = set()

    def submit(self, task: Task, count: int | None = None) -> bool:
        """Have a task done, with so many workers at a time; False where the process ends."""
        most = default_count() if count is None else count
        with self._lock:
            if self._ended:
                return False
            if not self._registered:
                self._registered = True
                atexit.register(self.end)
            self._waiting.append(task)
            self._open += 1
            if self._idle < len(self._waiting) and self._threads < most:
                self._threads += 1
                try:
                    threading.Thread(target=self._serve, name="multigraph-worker", daemon=True).start()
                except RuntimeError:  # no thread can be started
                    self._threads -= 1
                    if self._threads == 0:
                        self._waiting.pop()
                        self._open -= 1
                        return False
            self._lock.notify()
        return True

    def wait(self, seconds: float | None = None) -> bool:
        """Until no task is left; whether that is so."""
        with self._lock:
            return self._lock.wait_for(lambda: self._open == 0, seconds)

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Inside, somebody waits for tasks: nobody gives way to calls."""
        with self._lock:
            self._waited_for += 1
        try:
            yield
        finally:
            with self._lock:
                self._waited_for -= 1

    @property
    def gives_way(self) -> bool:
        """Whether calls come first."""
        return not self._waited_for

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        with self._lock:
            return [process.pid for process in self._processes]

    def end(self) -> None:
        """No worker runs any more, and none starts."""
        with self._lock:
            self._ended = True
            self._waiting.clear()
            processes = list(self._processes)
        for process in processes:
            process.kill()

    def forget(self) -> None:
        """In a forked process: the workers are the parent's, and must not wait for this one to end."""
        self._ended = True
        for process in list(self._processes):
            process.forget()

    def _serve(self) -> None:
        process: _Process | None = None
        try:
            while (task := self._next()) is not None:
                outcome, process = self._run(task, process)
                try:
                    if not self._ended:
                        task.done(outcome)
                except Exception:
                    log.debug("after a compile in a worker", exc_info=True)
                del task  # it may be the last to hold something
                with self._lock:
                    self._open -= 1
                    self._lock.notify_all()
        finally:
            if process is not None:
                self._stop(process)

    def _next(self) -> Task | None:
        with self._lock:
            self._idle += 1
            try:
                self._lock.wait_for(lambda: self._waiting or self._ended, IDLE)
            finally:
                self._idle -= 1
            if self._waiting and not self._ended:
                return self._waiting.popleft()
            self._threads -= 1
            return None

    def _run(self, task: Task, process: _Process | None) -> tuple[Outcome, _Process | None]:
        try:
            job = task.job()
            if isinstance(job, Outcome):
                return job, process
            if process is not None:
                try:
                    return process.compile(job), process
                except _Lost as problem:
                    self._stop(process)
                    process = None
                    if not problem.killed:
                        raise
            # a new one, also where the last was killed: it may have had nothing to do then
            process = _Process()
            with self._lock:
                self._processes.add(process)
                ended = self._ended
            if ended:
                raise _Lost("the process ends")
            process.greet()
            return process.compile(job), process
        except _Lost as problem:
            if process is not None:
                self._stop(process)
            return Outcome("failed", reason=str(problem), details=problem.said), None
        except Exception as error:
            if process is not None:
                self._stop(process)
            log.debug("a worker could not be used", exc_info=True)
            return Outcome("failed", reason=f"{type(error).__name__}: {error}"), None

    def _stop(self, process: _Process) -> None:
        process.kill()
        with self._lock:
            self._processes.discard(process)


class _Lost(Exception):
    """A worker is of no use any more; `said` is the end of what it has written.  `killed`: it ended by a signal."""

    def __init__(self, why: str, said: str = "", killed: bool = False) -> None:
        super().__init__(why)
        self.said, self.killed = said, killed


class _Process:
    """One worker, as its thread has it."""

    def __init__(self) -> None:
        if not sys.executable:
            raise _Lost("there is no Python that could be started")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=_environment(),
                start_new_session=True,  # a group of its own: with it ends what it has started
            )
        except OSError as error:
            self._said.close()
            raise _Lost(f"no worker can be started: {error}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.pid = self._process.pid

    def greet(self) -> None:
        """Wait until it is there.  Raises `_Lost`, also for one that runs something else than this process."""
        hello = self._answer(START, "a worker did not start")
        own = Hello(str(torch.version.__version__), sources.key())
        if hello != own:
            raise _Lost(f"workers run something else than this process: {hello}, and here {own}")

    def compile(self, job: Job) -> Outcome:
        """Raises `_Lost`."""
        try:
            send(self._to, job)
        except OSError:
            raise self._lost(self._end_of_it()) from None
        limit = "the compile in a worker took longer than"
        outcome: Outcome = self._answer(job.seconds, limit)
        return outcome

    def _answer(self, seconds: float | None, late: str) -> Any:
        until = None if seconds is None else time.monotonic() + seconds
        head = self._read(LENGTH.size, until, f"{late} {seconds:g} s" if seconds is not None else late)
        return pickle.loads(self._read(LENGTH.unpack(head)[0], until, late))

    def _read(self, count: int, until: float | None, late: str) -> bytes:
        poller = select.poll()
        poller.register(self._from, select.POLLIN)
        content = bytearray()
        while len(content) < count:
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            if not poller.poll(left):
                raise self._lost(f"{late}, and was ended")
            part = os.read(self._from, min(count - len(content), 1 << 20))
            if not part:
                raise self._lost(self._end_of_it())
            content += part
        return bytes(content)

    def _end_of_it(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in {*map(int, signal.Signals)} else str(-code)
            memory = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
            return f"the worker was ended by {name}{memory}"
        return f"the worker ended with status {code}"

    def _lost(self, why: str) -> _Lost:
        said = ""
        with contextlib.suppress(OSError, ValueError):
            size = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, size - _MOST_SAID))
            said = self._said.read().decode(errors="replace")
        return _Lost(why, said, (self._process.poll() or 0) < 0)

    def kill(self) -> None:
        """It and all that it has started end now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.close()

    def forget(self) -> None:
        """In a forked process."""
        self._process.returncode = 0  # it is not this one's to wait for
        self.close()

    def close(self) -> None:
        """Let go of the pipes."""
        for stream in (self._process.stdin, self._process.stdout, self._said):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()


def _environment() -> dict[str, str]:
    """As here, with the same modules; nothing is compiled in further processes, and nothing is said of calls."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own = {"PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_WARM_POOL": "0"}
    left = {name: value for name, value in os.environ.items() if name not in ("MULTIGRAPH_OPTIONS", "PYTHONSTARTUP")}
    return {**left, **own, "MULTIGRAPH_MANIFESTS": ""}


pool = Pool()


def _begin_anew() -> None:
    global pool
    parents, pool = pool, Pool()
    parents.forget()


os.register_at_fork(after_in_child=_begin_anew)
