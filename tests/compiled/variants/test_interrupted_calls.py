"""What a signal's handler raises while a call compiles is the caller's; what it calls itself returns."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

from multigraph_backend.backend import multigraph
from tests.support.activity import assert_right, ran, variants


class Late(Exception):
    """As an alarm's handler of the user's own raises it."""


class NeverAnswered(Exception):
    pass


@contextlib.contextmanager
def handled(handler: Callable[[], None], number: int = signal.SIGALRM) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        handler()

    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def by_signal() -> None:
    os.kill(os.getpid(), signal.SIGALRM)


def by_another_thread() -> None:
    """As libraries do that give functions a time limit."""
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Late))


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).cumsum(0) * x.shape[0]


class Compiler:
    """Compiles nothing; the first compile makes `interrupt` happen, and ends when it is given up."""

    def __init__(self, interrupt: Callable[[], None], until: threading.Event | None = None) -> None:
        self.interrupt, self.until, self.began = interrupt, until or threading.Event(), 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.began += 1
        if self.began == 1:
            self.interrupt()
            end = time.monotonic() + 30
            while not self.until.is_set():
                time.sleep(0.005)
                assert time.monotonic() < end, "nobody gave this compile up"
        return graph.forward


def compiled(compiler: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"specialize": [{"x[0]": 8}], "compiler": compiler, **options}
    return torch.compile(f, backend=multigraph, dynamic=True, options=options)


def raises(kind: type[BaseException]) -> Callable[[], None]:
    def handler() -> None:
        raise kind

    return handler


@pytest.mark.parametrize("kind", [Late, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["lazy", "eager"])
def test_what_a_handler_raises_while_a_call_waits_for_its_compile_is_the_callers(
    kind: type[BaseException], when: str
) -> None:
    compiler = Compiler(by_signal)
    run = compiled(compiler, compile=when)
    with ran(), handled(raises(kind)), pytest.raises(kind) as caught:
        run(torch.randn(8, 3))
    assert caught.value.__cause__ is None
    assert [entry["state"] for entry in variants()] == ["declared"], "the compile did not fail: nobody waited for it"
    with ran(variants=1, generic=1):
        assert_right(run, f, torch.randn(8, 3))
        assert_right(run, f, torch.randn(5, 3))


def test_what_another_thread_sends_to_a_call_that_waits_for_its_compile_is_the_callers() -> None:
    run = compiled(Compiler(by_another_thread))
    with ran(), pytest.raises(Late):
        run(torch.randn(8, 3))
    with ran(variants=1):
        assert_right(run, f, torch.randn(8, 3))


def test_what_a_handler_raises_in_the_first_run_of_new_code_is_the_callers() -> None:
    runs: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def code(*args: Any) -> Any:
            runs.append(1)
            if len(runs) == 1:
                signal.raise_signal(signal.SIGALRM)
            return graph.forward(*args)

        return code

    run = compiled(compiler)
    with ran(), handled(raises(Late)), pytest.raises(Late):
        run(torch.randn(8, 3))
    with ran(variants=2):
        assert_right(run, f, torch.randn(8, 3))
        assert_right(run, f, torch.randn(8, 3))
    assert len(runs) == 3


def test_the_compilers_own_error_is_still_a_failure_of_the_compile() -> None:
    def fails(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise Late

    run = compiled(fails)
    with handled(raises(Late)), ran(eager=1, failures=2):
        assert_right(run, f, torch.randn(8, 3))


@pytest.mark.parametrize("limit", [600.0, None])
def test_a_handler_may_call_what_it_interrupts_in_its_compile(limit: float | None) -> None:
    """It waited for a lock that it held itself: for good, or as long as a compile may take."""
    answers: list[torch.Tensor] = []
    answered = threading.Event()
    compiler = Compiler(by_signal, until=answered)
    run = compiled(compiler, compile_timeout=limit, specialize=[])
    inner, outer = torch.randn(8, 3), torch.randn(8, 3)

    def handler() -> None:
        answers.append(run(inner))
        answered.set()

    with handled(handler), handled(raises(NeverAnswered), signal.SIGUSR1), ran(generic=1, eager=1):
        watch = threading.Timer(20, os.kill, (os.getpid(), signal.SIGUSR1))
        watch.start()
        try:
            torch.testing.assert_close(run(outer), f(outer))
        finally:
            watch.cancel()
            watch.join()
    torch.testing.assert_close(answers, [f(inner)])
