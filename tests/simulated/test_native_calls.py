"""Calls become native while a program runs, whatever it is in the midst of; until then all is as it was."""

from __future__ import annotations

import time

import pytest
import torch

from multigraph_backend import native
from multigraph_backend.cudagraphs import account, runtime
from multigraph_backend.cudagraphs.recordings.asleep import never
from tests.support.simulated.pieces import Bench, values


def double(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * 2,)


def test_recordings_of_before_are_built_again_and_found_again() -> None:
    calls = native.ready()
    assert calls is not None
    bench = Bench(native_calls=False)
    piece = bench.piece(double, 1, 1)
    for _ in range(4):
        x = values()
        assert torch.equal(piece([x])[0], x * 2)
    assert bench.recorded() == 1
    held = piece([x := values()])[0]
    assert bench.tree.take(calls)
    for _ in range(4):
        y = values()
        assert torch.equal(piece([y])[0], y * 2)
    assert torch.equal(held, x * 2)
    assert bench.recorded() == 1
    (node,) = [node for node in bench.tree.root.below() if node.recording is not None]
    assert type(node.holds).__name__ == "Holds"


def test_it_waits_for_a_call_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = native.ready()
    assert calls is not None
    bench = Bench(native_calls=False)
    tree = bench.tree
    taken: list[bool] = []

    def looks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not taken:  # its first call, which runs as it is
            runtime._native(tree, calls)
            taken.append(tree.calls is not None)
        return (x * 2,)

    piece = bench.piece(looks, 1, 1)
    x = values()
    assert torch.equal(piece([x])[0], x * 2)
    assert taken == [False]
    for _ in range(500):
        if tree.calls is not None:
            break
        time.sleep(0.01)
    assert tree.calls is calls
    for _ in range(3):
        x = values()
        assert torch.equal(piece([x])[0], x * 2)


def test_recordings_that_were_given_up_stay_so() -> None:
    calls = native.ready()
    assert calls is not None
    bench = Bench(native_calls=False)
    piece = bench.piece(double, 1, 1)
    for _ in range(3):
        held = piece([values()])[0]
    (node,) = [node for node in bench.tree.root.below() if node.recording is not None]
    node.holds = never  # as when the pool's memory was lent, and stays with whom it was lent to
    assert bench.tree.take(calls)
    assert node.holds is never
    del held


def test_the_account_says_why_calls_are_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(native_calls=False)
    monkeypatch.setattr(native, "_calls", None)
    for why, said in ((native.NOT_ASKED, False), ("no compiler of C++ was found (g++, clang++)", True)):
        monkeypatch.setattr(native, "_why", why)
        assert (f"calls go by way of Python: {why}" in str(account.of(bench.tree))) is said
    monkeypatch.undo()
    assert "by way of Python" not in str(account.of(Bench().tree))
