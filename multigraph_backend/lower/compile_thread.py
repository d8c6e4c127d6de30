"""Compiling away from the calling thread, under a time limit.

A compile runs in a thread of its own while its caller waits, at most so many seconds: a compile that hangs must not
take the request with it.  (Compiling while the generic graph serves will use the same thread.)

torch allows one compile at a time, under Dynamo's compile lock, which the compiling thread takes because Inductor's
backward takes it too.  When time is up the thread is asked to end by an exception; one that does not come back (it
waits in C code, or in a callback that drops exceptions) is abandoned: the lock is taken over, process-wide changes are
undone by the caller.  Should it come back later, it is parked for good: unwinding would set random states and
configurations back to what they were before the compile, under the feet of a program that has gone on.  A lock on a
file that Inductor holds while a C++ compiler runs stays with it: other compiles wait for that as long as Inductor lets
them.

Waiting for the lock has a limit too: a thread that compiles with Dynamo may be waiting for this very call.

Invariants: the lock is taken over from a job's own thread, while that holds it, and from nobody else.  No lock is held
while anything is waited for: what two threads must agree on is decided by who claims it first (`_Once`).
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from multigraph_backend import _compat
from multigraph_backend.lower import circles
from multigraph_backend.process import giving_way

Result = TypeVar("Result")

_GRACE = 1.0  # seconds that a compile gets to notice that it was told to end
_UNWINDING = 10.0  # seconds that it gets to unwind after it has noticed, or to clean up after its end
_PATIENCE = 600.0  # seconds to wait for Dynamo's compile lock where compiles have no limit
_MEETS = 0.5  # seconds between two moments at which a waiting caller takes signals that came meanwhile
_LOOK = 0.05  # seconds between two looks at who holds that lock


class CompileTimeout(Exception):
    """A compile took longer than its limit and was given up."""


class Interrupted(BaseException):
    """An `Exception` met the caller while it waited for a compile: from a signal's handler, or from another thread.

    Not an Exception, so that nobody on its way takes `error` for a failure of the compile; see `reaching_the_caller`.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextlib.contextmanager
def reaching_the_caller() -> Iterator[None]:
    """Around what a call of the user compiles: what interrupted the call is raised as it came."""
    try:
        yield
        return
    except Interrupted as interrupted:
        error = interrupted.error
    try:
        raise error
    finally:
        del error  # it holds this frame


class _Overdue(BaseException):
    """Raised inside a compile whose time is up; not an Exception, so that no fall back of torch swallows it.

    Python makes the instance in the thread that it interrupts, before any frame is unwound.
    """

    job: _Job[object]

    def __init__(self) -> None:
        super().__init__()
        self.job.noticed()


class _Once:
    """Something that exactly one of two threads does: the one that claims it first."""

    def __init__(self) -> None:
        self._taken = threading.Lock()

    def claim(self) -> bool:
        return self._taken.acquire(blocking=False)

    @property
    def claimed(self) -> bool:
        return self._taken.locked()


class _Job(Generic[Result]):
    def __init__(
        self,
        compile: Callable[[contextlib.ExitStack], Result],
        context: contextvars.Context,
        seconds: float | None = None,
    ) -> None:
        self._compile = compile
        self._context = context
        self._way = giving_way.of_this_thread()
        self._limited = seconds is not None
        self._process_wide = contextlib.ExitStack()
        self._begin = _Once()  # the compile begins, or the caller no longer waits for its turn
        self._end = _Once()  # the compile is over, or the caller tells it to end
        self._fate = _Once()  # it has noticed and unwinds, or is abandoned; whoever notices from then on is parked
        self._release = _Once()  # who gives the compile lock back: its thread, or the caller who takes it over
        self._told = threading.Lock()  # held while an exception waits for the compiling thread to run Python
        self.given_up = False
        self.begun = threading.Event()
        self.finished = threading.Event()
        self.result: Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """In the compiling thread."""
        try:
            if self._way is giving_way.of_this_thread():  # its caller's own
                self._run()
                return
            with giving_way.also(self._way):
                self._run()
        finally:
            _compat.hold_stashed()

    def _run(self) -> None:
        try:
            while not _compat.compile_lock.acquire(timeout=_LOOK):
                if self._begin.claimed:
                    return
            try:
                if self._begin.claim():
                    if self._limited:
                        _holding.add(self)
                    self.begun.set()
                    self._context.run(self._compile_here)
            finally:
                self._give_lock_back()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.begun.set()
            self.finished.set()

    def _compile_here(self) -> None:
        try:
            try:
                self.result = self._compile(self._process_wide)
            except BaseException as error:
                self.error = error
            if not self._end.claim():  # it was told to end: the exception shall arrive here, and not in what follows
                while self._told.locked():
                    time.sleep(0.001)
        except BaseException as error:
            self.error = error
        self._process_wide.close()

    def _give_lock_back(self) -> None:
        if not self._release.claim():  # the caller did, and went on
            threading.Event().wait()
        _holding.discard(self)
        _compat.compile_lock.release()

    def give_up_waiting(self) -> bool:
        """In the caller's thread: the compile shall not begin any more.  False where it has."""
        self.given_up = self.given_up or self._begin.claim()
        return self.given_up

    def abandon(self, thread: threading.Thread) -> None:
        """In the caller's thread: end the compile, or live without its thread."""
        if self.give_up_waiting():
            return
        if self._release.claimed:  # it is about to finish, or was abandoned before
            self.finished.wait(_GRACE)
            return
        try:
            told = self._tell(thread)
            if self.finished.wait(_GRACE):
                return
            if not (told and self._fate.claim()):  # it unwinds, or has ended and cleans up
                self.finished.wait(_UNWINDING)
        finally:
            if not self.finished.is_set():
                self._live_without(thread)

    def _tell(self, thread: threading.Thread) -> bool:
        """Send the exception that ends the compile, unless that is over; whether one was sent."""
        if not self._told.acquire(blocking=False):
            return True  # one is on its way
        if self._end.claim():
            self._send(thread)
            return True
        self._told.release()
        return False

    def _send(self, thread: threading.Thread) -> None:
        """With `_told` held, to a thread that is certain to meet it."""
        overdue = type("_Overdue", (_Overdue,), {"job": self})
        circles.look_out(thread.ident or 0, self._told)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(overdue))

    def _live_without(self, thread: threading.Thread) -> None:
        self._fate.claim()
        try:
            self._process_wide.close()
        finally:
            if self._release.claim():
                _holding.discard(self)
                _compat.take_over_compile_lock()
                # it was told to end, and some code of its own dropped that exception: it is told once more.  Else it is
                # parked when it comes back
                if self._told.acquire(blocking=False):
                    self._send(thread)

    def noticed(self) -> None:
        """In the compiling thread, when the exception of `abandon` reaches it; does not return once abandoned."""
        if self._told.locked():
            self._told.release()
        if not self._fate.claim():
            threading.Event().wait()


_holding: set[object] = set()  # of jobs with a limit: the one that has the compile lock


def _await_turn(job: _Job[Result], seconds: float | None) -> None:
    """Wait until the compile begins.  Raises CompileTimeout when others have held Dynamo's lock for too long.

    Jobs with a limit do not count: they end, and the next one has its turn.
    """
    limit = _PATIENCE if seconds is None else seconds
    waited, before = 0.0, time.monotonic()
    while not job.begun.wait(_LOOK):
        now = time.monotonic()
        if not _holding:
            waited += now - before
        before = now
        if waited >= limit and job.give_up_waiting():
            raise CompileTimeout(
                f"another compile has held Dynamo's compile lock for {limit:g} s, and may be waiting for this call"
            )


def _await_end(job: _Job[Result], seconds: float | None) -> bool:
    """Wait until the compile is over, at most so many seconds; whether it is.

    In short waits: a signal that comes when Python has just let its own lock go to wait for another is met after that.
    """
    until = float("inf") if seconds is None else time.monotonic() + seconds
    while not job.finished.wait(max(0.0, min(_MEETS, until - time.monotonic()))):
        if time.monotonic() >= until:
            return False
    return True


class Enters(Protocol):
    """A lock under which something is compiled."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...


def enter(lock: Enters, limit: float | None) -> bool:
    """Take a lock whose holder compiles for at most `limit` seconds; whether it was taken."""
    if _compat.owns_compile_lock():  # inside a compile of Dynamo: the holder may be waiting for this very thread
        return lock.acquire(blocking=False)
    return lock.acquire(timeout=-1 if limit is None else limit + 5)


def compile_within(
    seconds: float | None, compile: Callable[[contextlib.ExitStack], Result], context: contextvars.Context
) -> Result:
    """Run `compile(process_wide)` under the compile lock, in a copy of `context`, and return what it returns.

    `process_wide` takes what it changes for the whole process.  Raises what `compile` raises, and `CompileTimeout`
    after `seconds` (None: no limit), or when Dynamo's own compiles have held the lock that long (None: 600 s); waiting
    for other compiles of this module does not count.  The compile is given up too when the waiting caller is
    interrupted: by what is no `Exception`, such as `KeyboardInterrupt`, which is raised as it is, or by an `Exception`,
    which comes as `Interrupted`.
    """
    if _compat.owns_compile_lock():
        # called while this thread compiles something itself: another thread would wait for it forever
        job: _Job[Result] = _Job(compile, context.copy())
        job.run()
    else:
        job = _Job(compile, context.copy(), seconds)
        thread = threading.Thread(target=job.run, name="multigraph-compile", daemon=True)
        try:
            thread.start()  # waits for the thread to begin, and may be interrupted there
            _await_turn(job, seconds)
            if not _await_end(job, seconds):
                job.abandon(thread)
        except CompileTimeout:  # it does not begin any more
            raise
        except BaseException as error:  # Ctrl-C in the waiting caller, or what another handler of a signal raises
            job.abandon(thread)
            if isinstance(error, Exception) and thread.ident is not None:  # else no thread could be started
                raise Interrupted(error) from None
            raise
    # the job lets go of the error, which holds frames that hold the job, and what was compiled for
    failed, job.error = job.error, None
    try:
        if isinstance(failed, _Overdue) or not job.finished.is_set():
            raise CompileTimeout(f"the compile took longer than {seconds:g} s and was given up")
        if isinstance(failed, SystemExit):
            raise RuntimeError("the compiler tried to end the process") from failed
        if failed is not None:
            raise failed
    finally:
        del failed
    return job.result  # type: ignore[return-value]


def describe(error: BaseException) -> str:
    """One line for reports: the kind of error and the first line of its text."""
    text = str(error).strip()
    kind = type(error).__name__
    return f"{kind}: {text.splitlines()[0]}" if text else kind


__all__ = ["CompileTimeout", "Interrupted", "compile_within", "describe", "reaching_the_caller"]
