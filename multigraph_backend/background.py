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
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from multigraph_backend import _compat, circles

Result = TypeVar("Result")

_GRACE = 1.0  # seconds an overdue compile gets to notice
_UNWINDING = 10.0  # seconds it gets to unwind once it has


class CompileTimeout(Exception):
    """A compile took longer than its limit and was given up."""


class _Overdue(BaseException):
    """Raised inside a compile whose time is up; not an Exception, so that no fall back of torch swallows it.

    Python makes the instance in the thread that it interrupts, before any frame is unwound.
    """

    job: _Job[object]

    def __init__(self) -> None:
        super().__init__()
        self.job.noticed()


class _Job(Generic[Result]):
    def __init__(self, compile: Callable[[contextlib.ExitStack], Result], context: contextvars.Context) -> None:
        self._compile = compile
        self._context = context
        self._process_wide = contextlib.ExitStack()
        self._lock = threading.Lock()  # guards _ended against the exception that ends an overdue job
        self._ended = False
        self._abandoned = False
        self._unwinding = False
        self._told = threading.Lock()  # held while an exception waits for the compiling thread to run Python
        self.holds_lock = threading.Event()
        self.finished = threading.Event()
        self.result: Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """In the compiling thread."""
        try:
            with _compat.compile_lock:
                self.holds_lock.set()
                self._context.run(self._compile_here)
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.holds_lock.set()
            self.finished.set()

    def _compile_here(self) -> None:
        try:
            try:
                self.result = self._compile(self._process_wide)
            except BaseException as error:
                self.error = error
            with self._lock:
                self._ended = True
        finally:
            self._process_wide.close()

    def abandon(self, thread: threading.Thread) -> None:
        """In the caller's thread: end the compile, or live without its thread."""
        with self._lock:
            if self._ended:
                self.finished.wait()
                return
            self._interrupt(thread)
        if self.finished.wait(_GRACE):
            return
        with self._lock:
            self._abandoned = not self._unwinding
        if self._abandoned or not self.finished.wait(_UNWINDING):
            self._process_wide.close()
            _compat.take_over_compile_lock()
        with self._lock:
            # it was told, and something dropped what it was told by
            if not (self._abandoned or self._ended or self.finished.is_set()):
                self._abandoned = True
                self._interrupt(thread)

    def _interrupt(self, thread: threading.Thread) -> None:
        overdue = type("_Overdue", (_Overdue,), {"job": self})
        self._told.acquire()
        circles.look_out(thread.ident or 0, self._told)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(overdue))

    def noticed(self) -> None:
        """In the compiling thread, when the exception of `abandon` reaches it; does not return once abandoned."""
        if self._told.locked():
            self._told.release()
        with self._lock:
            self._unwinding = not self._abandoned
        if not self._unwinding:
            threading.Event().wait()


def compile_within(
    seconds: float | None, compile: Callable[[contextlib.ExitStack], Result], context: contextvars.Context
) -> Result:
    """Run `compile(process_wide)` under the compile lock, in a copy of `context`, and return what it returns.

    `process_wide` takes what it changes for the whole process.  Raises what `compile` raises, and `CompileTimeout`
    after `seconds` (None: no limit; waiting for another compile to end does not count).
    """
    job: _Job[Result] = _Job(compile, context.copy())
    if _compat.owns_compile_lock():
        # called while this thread compiles something itself: another thread would wait for it forever
        job.run()
    else:
        thread = threading.Thread(target=job.run, name="multigraph-compile", daemon=True)
        thread.start()
        try:
            job.holds_lock.wait()
            if not job.finished.wait(seconds):
                job.abandon(thread)
        except BaseException:  # Ctrl-C in the waiting caller
            job.abandon(thread)
            raise
    if isinstance(job.error, _Overdue) or not job.finished.is_set():
        raise CompileTimeout(f"the compile took longer than {seconds:g} s and was given up")
    if isinstance(job.error, SystemExit):
        raise RuntimeError("the compiler tried to end the process") from job.error
    if job.error is not None:
        raise job.error
    return job.result  # type: ignore[return-value]


def describe(error: BaseException) -> str:
    """One line for reports: the kind of error and the first line of its text."""
    text = str(error).strip()
    kind = type(error).__name__
    return f"{kind}: {text.splitlines()[0]}" if text else kind


__all__ = ["CompileTimeout", "compile_within", "describe"]
