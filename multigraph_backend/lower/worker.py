"""A worker process: it compiles what it is sent, and leaves the code in torch's caches.

    python -m multigraph_backend.lower.worker PARENT

In, on standard input: jobs, each a length of eight bytes and a pickle (`Job`).  Out, on what was standard output: at
the start `Hello`, then for each job an `Outcome`.  What compilers print goes to standard error.

It ends with its parent: when the pipe ends, or another process has become its parent, it ends itself and all that it
has started, whatever it is at.  A server's memory and processor come first: the system takes workers first where memory
runs out, and gives them what calls leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

if TYPE_CHECKING:
    from multigraph_backend.cache.manifest import RepeatedBlocks

LENGTH = struct.Struct("<Q")
_LOOK = 1.0  # seconds between two looks at who the parent is
_MOST_RESTS = 30.0  # seconds of one job
_TO_END = 30.0  # seconds past its limit that a job in C code has until the process ends itself


@dataclass(frozen=True)
class Job:
    """`parcel`: the compile, packed.  `folder`: of torch's caches.  `seconds`, `memory`: limits; None: none.

    `rest`: seconds before each benchmark of a kernel, in which the GPU is left to calls.
    """

    parcel: bytes
    folder: str
    seconds: float | None = None
    memory: int | None = None
    rest: float = 0.0


@dataclass(frozen=True)
class Hello:
    """A worker is ready: with which torch and package."""

    torch: str
    package: str


@dataclass(frozen=True)
class Outcome:
    """What became of a job: the code is in torch's caches now ("made"), or was there before ("found"), the compile
    failed, or cannot be done there.

    "done": no worker was needed.  `floats`, `repeated`: see `lowering.Lowered`.
    """

    kind: Literal["made", "found", "failed", "cannot", "done"]
    seconds: float = 0.0
    reason: str = ""
    details: str = ""
    floats: str = ""
    repeated: RepeatedBlocks | None = None


def send(stream: int, message: object) -> None:
    """Write a message whole.  Raises OSError where nobody reads."""
    content = pickle.dumps(message)
    view = memoryview(LENGTH.pack(len(content)) + content)
    while view:
        view = view[os.write(stream, view) :]


def serve(parent: int, hello: Callable[[], Hello], do: Callable[[Job], Outcome]) -> None:
    """Do one job after the other, until the parent ends."""
    replies = os.dup(1)
    os.dup2(2, 1)
    _ends_with(parent)
    _comes_last()
    send(replies, hello())
    while (job := _next(sys.stdin.buffer)) is not None:
        send(replies, do(job))


def _hello() -> Hello:
    import torch

    from multigraph_backend.lower import inductor, lowering, parcel  # noqa: F401 - no job shall wait for them
    from multigraph_backend.process import sources

    return Hello(str(torch.version.__version__), sources.key())


def _next(stream: BinaryIO) -> Job | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    job: Job = pickle.loads(stream.read(LENGTH.unpack(head)[0]))
    return job


def _done(job: Job) -> Outcome:
    began = time.perf_counter()
    if job.seconds is not None:
        faulthandler.dump_traceback_later(job.seconds + _TO_END, exit=True)
    try:
        with _memory_limit(job.memory):
            made = _compile(job)
        return dataclasses.replace(made, seconds=time.perf_counter() - began)
    except Exception as error:
        from multigraph_backend.lower.compile_thread import describe

        details = "".join(traceback.format_exception(error))
        # a lack of memory has many forms: no thread, no process, a compiler that ends
        limited = "" if job.memory is None else f" (the worker's memory is limited to {job.memory} bytes)"
        return Outcome("failed", time.perf_counter() - began, describe(error) + limited, details)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _compile(job: Job) -> Outcome:
    """Compile; raises what a compile raises."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = job.folder
    from multigraph_backend import _compat
    from multigraph_backend.lower import lowering, parcel
    from multigraph_backend.lower.compile_thread import describe

    try:
        read = parcel.unpack(job.parcel)
    except Exception as error:
        return Outcome("cannot", reason=f"a worker cannot read it: {describe(error)}")
    counts = _compat.counters["aot_autograd"]
    past, hits = counts["autograd_cache_bypass"], counts["autograd_cache_hit"]
    sent = read.sent
    of_floats = lowering.new_name()
    with read.state() as state, _rests(job):
        args = read.arguments()
        made = lowering.lower(
            read.graph, sent.facts, args, sent.options, state, sent.pinned, sent.name, floats=of_floats
        )
    if counts["autograd_cache_hit"] > hits:
        return Outcome("found")
    for kind, key in made.cached:
        if kind == "aot_autograd" and _written(_compat.cache_entry(kind, key)):
            return Outcome("made", floats=made.floats, repeated=made.repeated)
    if counts["autograd_cache_bypass"] > past:
        return Outcome("cannot", reason="torch's caches do not take its code")
    if len(lowering.constant_floats(read.graph, read.arguments())) < len(read.graph.floats):
        return Outcome("cannot", reason="torch's caches do not keep its code, which takes Python floats")
    raise OSError(f"torch's caches in {job.folder} have not kept its code: is there room, and may it be written to?")


def _rests(job: Job) -> contextlib.AbstractContextManager[None]:
    """Inside, kernels are benchmarked with rests in between, as the job says."""
    from multigraph_backend import _compat
    from multigraph_backend.process import giving_way

    if not job.rest or not (only := _compat.benchmarking_code()):
        return contextlib.nullcontext()
    most = _MOST_RESTS if job.seconds is None else min(_MOST_RESTS, job.seconds / 4)
    always = itertools.count().__next__  # calls come
    return giving_way.GivesWay(always, most, work=0.0, rest=job.rest, only=only).inside()


def _written(place: Any) -> bool:
    try:
        return any(not name.startswith(".") for name in os.listdir(place))
    except OSError:
        return False


# ---------------------------------------------------------------- what kind of process it is


def _ends_with(parent: int) -> None:
    """A thread that ends this process, and all of its group, when the parent is gone."""

    def watch() -> None:
        poller = select.poll()
        poller.register(0, 0)  # only the end of the pipe: it is read elsewhere
        while os.getppid() == parent and not poller.poll(_LOOK * 1000):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="multigraph-parent", daemon=True).start()


def _comes_last() -> None:
    with contextlib.suppress(OSError):
        os.nice(10)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


@contextlib.contextmanager
def _memory_limit(most: int | None) -> Any:
    import resource

    if most is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


if __name__ == "__main__":
    # what is pickled has the name of the module, which the parent imports
    from multigraph_backend.lower import worker

    worker.serve(int(sys.argv[1]), worker._hello, worker._done)
