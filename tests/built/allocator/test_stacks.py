"""Which call an entry of the history belongs to, and what is asked of the program for it."""

from __future__ import annotations

import ctypes
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from multigraph_backend import _compat
from multigraph_backend.allocator import installing, record_memory_history, stacks
from multigraph_backend.allocator.stacks import Call, stacks_of
from tests.support.allocator.extension import SOURCE

A, B = 0x1000, 0x2000


def alloc(address: int, stack: int, began: int, ended: int) -> Call:
    return Call(0, address, 512, stack, began, ended, 0)


def free(address: int, stack: int, began: int, ended: int) -> Call:
    return Call(1, address, 0, stack, began, ended, 0)


def happened(action: str, where: int, time: int) -> dict[str, Any]:
    """`where`: an address, or at out-of-memory the bytes that were asked for."""
    return {"action": action, "size" if action == "oom" else "addr": where, "time_us": time}


def test_calls_at_one_address_are_told_apart_by_their_times() -> None:
    trace = [
        happened("segment_alloc", A, 10), happened("alloc", A, 10), happened("free_requested", A, 20),
        happened("free_completed", A, 21), happened("alloc", A, 30), happened("alloc", B, 30),
    ]  # fmt: skip
    calls = [alloc(A, 1, 9, 11), free(A, 2, 19, 22), alloc(A, 3, 29, 30), alloc(B, 4, 30, 31)]
    assert stacks_of(trace, calls) == [1, 1, 2, 1, 3, 4]


def test_calls_of_threads_that_wait_for_one_another() -> None:
    # the second thread has begun before the first one's call, and the first is slow to note that it has freed
    trace = [
        happened("alloc", A, 11), happened("free_requested", A, 12), happened("alloc", A, 13),
        happened("free_requested", A, 14),
    ]  # fmt: skip
    calls = [alloc(A, 1, 10, 11), alloc(A, 3, 9, 13), free(A, 4, 14, 15), free(A, 2, 12, 20)]
    assert stacks_of(trace, calls) == [1, 2, 3, 4]


def test_a_free_that_was_not_asked_has_the_stack_of_what_it_frees() -> None:
    trace = [happened("alloc", A, 10), happened("free_requested", A, 20), happened("free_completed", A, 25)]
    assert stacks_of(trace, [alloc(A, 1, 10, 10), free(A, 0, 20, 20)]) == [1, 1, 1]


def test_what_no_call_explains_has_no_stack() -> None:
    # a state that was restored, calls that the ring has lost, another's time
    trace = [happened("alloc", A, 10), happened("free_requested", B, 11), happened("alloc", A, 50)]
    assert stacks_of(trace, [alloc(A, 1, 20, 30), alloc(B, 2, 10, 50)]) == [0, 0, 0]


def test_out_of_memory_has_the_stack_of_who_asked() -> None:
    calls = [Call(2, 0, 4096, 7, 9, 11, 0), Call(2, 0, 8192, 8, 9, 11, 0)]
    assert stacks_of([happened("oom", 8192, 10), happened("oom", 4096, 11)], calls) == [8, 7]


def test_a_stack_has_one_number_and_its_frames_are_those_of_the_program() -> None:
    def inner() -> int:
        return int(stacks._called())

    def outer() -> list[int]:
        return [inner() for _ in range(2)]

    first, second = outer()
    assert first == second > 0
    (stack,) = [stack for stack, number in stacks._numbers.items() if number == first]
    names = [name for _, _, name in stack]
    assert names[0] == "inner"
    assert "outer" in names[1:3]
    assert stack[0][0] == __file__
    assert stack[0][1] == inner.__code__.co_firstlineno + 1


def test_dynamo_does_not_compile_what_is_asked_in_an_allocation() -> None:
    _compat.skip_code(stacks._number.__code__)
    again = types.FunctionType(stacks._number.__code__.replace(co_name="again"), vars(stacks))
    unmarked = ctypes.CFUNCTYPE(ctypes.c_uint64)(again)

    def frames(asked: Callable[[], int]) -> int:
        """How many Dynamo meets in a program that is asked between two graphs."""
        torch._dynamo.reset()
        counters.clear()

        @torch.compile(backend="eager")
        def program(x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            assert asked() > 0
            return x * 2

        assert torch.equal(program(torch.ones(3)), torch.full((3,), 4.0))
        return counters["frames"]["total"]

    try:
        assert frames(stacks._called) < frames(unmarked)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enabled": "alll"}, "enabled is one of state, all or None .did you mean 'all'."),
        ({"context": "frees"}, "context is one of state, alloc, all or None"),
        ({"stacks": "all"}, "stacks is 'python', got 'all'"),
        ({"max_entries": 0}, "max_entries is a number from 1 to 1500000, got 0"),
    ],
)
def test_arguments_are_strict(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        record_memory_history(**arguments)


def test_torch_s_own_is_called_where_the_extension_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(
        _compat, "record_memory_history", lambda *args, **kwargs: said.append((args, kwargs)), raising=False
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(installing, "_gpus", lambda: 0)
    record_memory_history()
    assert said == []
    monkeypatch.setattr(installing, "_gpus", lambda: 1)
    record_memory_history("state", context="alloc", max_entries=7)
    assert said == [(("state",), {"context": "alloc", "stacks": "python", "max_entries": 7})]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_threads_that_are_asked_for_their_stacks_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    sources = [Path(__file__).with_name("stacks_under_threads.cc"), SOURCE / "abi.cc"]
    sources += [path for folder in ("core", "sim", "torch") for path in sorted((SOURCE / folder).glob("*.cc"))]
    program = tmp_path / "stacks"
    command = ["g++", "-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizers}"]
    command += [f"-I{SOURCE}", *map(str, sources), "-ldl", "-lpthread", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 1000
