"""A driver call that fails while a recording is made: the call gives the right result, and the process stays healthy.

Each call that the way to a recording makes is let fail at each of its turns, once before and once after it has done its
work, by putting a function that raises in its place.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.allocator import ended_pools
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.devices.memory_pool import TorchPool
from tests.support.gpu.programs import CUDA, close, compiled, fresh, tree_counts

DRIVER: list[tuple[Any, str]] = [
    (torch.cuda.CUDAGraph, "capture_begin"),
    (torch.cuda.CUDAGraph, "capture_end"),
    (_compat, "clear_cublas_workspaces"),
    (_compat, "pool_state"),
    (_compat, "set_pool_state"),
    (_compat, "pool_holds_only"),
    (_compat, "storage_at"),
]


class Injected(RuntimeError):
    """The failure."""


class Failing:
    """Fails at one turn, counted from 0, before or after the call proper."""

    def __init__(self, function: Callable[..., Any], turn: int, after: bool, error: type[BaseException]) -> None:
        self.function, self.turn, self.after, self.error = function, turn, after, error
        self.turns = 0

    def method(self) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn, self.turns = self.turns, self.turns + 1
        if turn != self.turn:
            return self.function(*args, **kwargs)
        if self.after:
            self.function(*args, **kwargs)
        raise self.error(f"turn {turn}")

    @property
    def failed(self) -> bool:
        return self.turns > self.turn


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1) + torch.relu(x)


def healthy() -> None:
    """Random numbers, plain memory, and captures of the user's own work."""
    torch.manual_seed(3)
    first = torch.randn(8, device=CUDA)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(8, device=CUDA), first)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device=CUDA)
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    assert x.sum().item() == 4


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), DRIVER, ids=[name for _, name in DRIVER])
def test_each_turn_of_a_driver_call_may_fail(
    owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = runtime.tree(0)  # its own set-up is not what fails here
    monkeypatch.setattr(tree, "poisons", tree.poisons and name != "storage_at")  # the aid itself calls that
    w = torch.randn(32, 32, device=CUDA)
    reached = 0
    for turn in range(6):
        fresh()
        f, g = compiled(chain), compiled(lambda y: y.cos().sum(0))
        with torch.no_grad():
            f(torch.randn(16, 32, device=CUDA), w)
            g(torch.randn(16, 32, device=CUDA))
        failing = Failing(getattr(owner, name), turn, after, Injected)
        held = []
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(owner, name, failing.method())
            for _ in range(4):
                x = torch.randn(16, 32, device=CUDA)
                y = f(x, w)
                close(y, chain(x, w))
                close(g(y), chain(x, w).cos().sum(0))
                held.append((y, chain(x, w)))
        reached += failing.failed
        for mine, right in held:
            close(mine, right)
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(16, 32, device=CUDA)
                close(f(x, w), chain(x, w))
        healthy()
    assert reached >= 1
    assert tree_counts("recordings") > 0


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), DRIVER, ids=[name for _, name in DRIVER])
def test_each_turn_of_a_driver_call_may_be_interrupted(
    owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = runtime.tree(0)
    monkeypatch.setattr(tree, "poisons", tree.poisons and name != "storage_at")
    w = torch.randn(32, 32, device=CUDA)
    reached = 0
    for turn in range(4):
        fresh()
        f = compiled(chain)
        with torch.no_grad():
            f(torch.randn(16, 32, device=CUDA), w)
        failing = Failing(getattr(owner, name), turn, after, KeyboardInterrupt)
        interrupted = 0
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(owner, name, failing.method())
            for _ in range(4):
                x = torch.randn(16, 32, device=CUDA)
                try:
                    y = f(x, w)
                except KeyboardInterrupt:
                    interrupted += 1
                    continue
                close(y, chain(x, w))
        assert interrupted == failing.failed
        reached += failing.failed
        assert not torch.cuda.is_current_stream_capturing()
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(16, 32, device=CUDA)
                close(f(x, w), chain(x, w))
        healthy()
    assert reached >= 1
    assert tree_counts("recordings") > 0


class Late(Exception):
    """What the handler of an alarm raises."""


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Late)])
def test_a_signal_inside_of_a_capture_reaches_the_caller_and_all_goes_on(
    number: signal.Signals, error: type[BaseException]
) -> None:
    name = f"multigraph_test::signalled_{number.name.lower()}"
    signals = [False]

    @torch.library.custom_op(name, mutates_args=())
    def signalled(x: torch.Tensor) -> torch.Tensor:
        if signals[0]:
            signal.raise_signal(number)
        return x * 3

    signalled.register_fake(lambda x: torch.empty_like(x))

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(number, late if error is Late else signal.default_int_handler)
    try:
        fresh()
        run = compiled(lambda x: signalled(x + 1) * 2, safe=[name])
        x = torch.randn(64, device=CUDA)
        close(run(x), (x + 1) * 6)
        recorded = tree_counts("recordings")
        signals[0] = True
        with pytest.raises(error):
            run(x)
        signals[0] = False
        assert tree_counts("recordings") == recorded
        assert not torch.cuda.is_current_stream_capturing()
        torch.cuda.synchronize()
        healthy()
        for _ in range(3):
            x = torch.randn(64, device=CUDA)
            close(run(x), (x + 1) * 6)
        assert tree_counts("recordings") > recorded
    finally:
        signal.signal(number, before)


def test_a_thousand_failed_captures_leak_nothing() -> None:
    @torch.library.custom_op("multigraph_test::synchronizes", mutates_args=())
    def synchronizes(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    synchronizes.register_fake(lambda x: torch.empty_like(x))
    fresh()
    tree = runtime.tree(0)
    run = compiled(lambda x: synchronizes(x + 1) * 2, safe=["multigraph_test::synchronizes"])
    x = torch.randn(256, 256, device=CUDA)
    reserved = []
    for turn in range(1000):
        for piece in tree.pieces:
            for keyed in piece.by_key.values():  # else it is not tried any more
                keyed.failures, keyed.refused = 0, None
        y = run(x)
        if turn % 333 == 0:
            close(y, (x + 1) * (x + 1).sum() * 2)
            torch.cuda.empty_cache()  # else torch keeps the memory of pools that are gone until it needs it
            reserved.append(torch.cuda.memory_reserved())
    assert tree.counts["failed"] >= 998
    assert reserved[-1] <= reserved[1] + (4 << 20)
    healthy()


def test_a_thread_that_waits_for_the_device_spoils_nothing_for_good() -> None:
    """It fails while another one captures, and so does that capture, also of a new pool's anchor."""
    fresh()
    run = compiled(lambda x: torch.relu(x @ x).sum(1))
    x = torch.randn(64, 64, device=CUDA)
    ended, refused = threading.Event(), 0

    def wait() -> None:
        nonlocal refused
        while not ended.wait(2e-4):
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                refused += 1

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        for _ in range(60):
            multigraph_backend.release()  # what comes next is in a new pool
            for _ in range(3):
                close(run(x), torch.relu(x @ x).sum(1))
    finally:
        ended.set()
        thread.join()
    assert refused
    assert not ended_pools.allocates_into_a_pool(0)
    healthy()


ENDS = """
import sys, threading, torch, multigraph_backend
run = torch.compile(lambda x: torch.relu(x @ x).sum(1), backend="multigraph", options={"cudagraphs": "auto"})
x = torch.randn(64, 64, device="cuda")
for _ in range(4):
    run(x)
assert multigraph_backend.stats()["recordings"] == 1
there = threading.Event()

def work():
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        there.set()
        threading.Event().wait()

threading.Thread(target=work, daemon=True).start()
there.wait()
print("the last line")
"""


def test_a_process_ends_while_a_thread_has_a_pool_open() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "the last line\n"), done.stderr


def test_to_ask_for_the_memory_of_a_pool_does_not_harm_its_id() -> None:
    while torch.cuda.graph_pool_handle()[1] <= 256:  # smaller numbers are never freed
        pass
    pool = TorchPool(0, torch.cuda.Stream())
    with torch.cuda.use_mem_pool(pool._pool):
        block = torch.ones(1 << 20, device=CUDA)
    held = [sys.getrefcount(number) for number in pool.id]
    for _ in range(3):
        [(address, nbytes)] = pool.segments()
        assert address == block.data_ptr()
        assert nbytes >= block.nbytes
    assert [sys.getrefcount(number) for number in pool.id] == held
