"""Native calls on a CUDA device: what is copied, launched and made in one call is what Python's way gives, wherever
inputs lie, on any stream, and whenever calls become native."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import multigraph_backend
from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime


@pytest.fixture(scope="module", autouse=True)
def _native() -> Iterator[None]:
    runtime.begin_native_calls()
    native.wait()
    assert native.state() == "native"
    yield
    multigraph_backend.release()


def weighted(*xs: torch.Tensor) -> torch.Tensor:
    total = xs[0] * 1.5
    for number, x in enumerate(xs[1:], 2):
        total = total + x * number
    return total


def compiled(function: object) -> object:
    return torch.compile(function, backend="multigraph", options={"on_failure": "raise", "record_small": True})


def launches() -> set[str]:
    """What launches the recordings that there are."""
    nodes = [node for tree in runtime.trees() for node in tree.root.below() if node.recording is not None]
    return {type(node.run.__globals__["launch"]).__name__ for node in nodes if hasattr(node.run, "__globals__")}


@pytest.mark.parametrize("count", [1, 2, 3, 17, 32, 64, 70])
@torch.no_grad()
def test_inputs_are_copied_wherever_they_lie(count: int) -> None:
    torch._dynamo.reset()
    multigraph_backend.release()
    function = compiled(lambda *xs: weighted(*xs))
    for call in range(12):
        aside = call % 3 == 2  # not on 16 bytes
        xs = [torch.randn(101, device="cuda")[1:] if aside else torch.randn(100, device="cuda") for _ in range(count)]
        torch.testing.assert_close(function(*xs), weighted(*xs), rtol=1e-5, atol=1e-4)  # type: ignore[operator]
    assert multigraph_backend.stats()["failures"] == 0
    assert ("Launch" in launches()) is (count <= 64)


@torch.no_grad()
def test_inputs_that_repeat_elements_or_stand_in_another_order_are_copied() -> None:
    torch._dynamo.reset()
    function = compiled(lambda x, y, z: x + 2 * y - z)
    for call in range(12):
        at = call % 2  # every other call not on 16 bytes
        x = torch.randn(8 + at, device="cuda")[at:].expand(16, 8)
        y = torch.randn(16 + at, 1, device="cuda")[at:].expand(16, 8)
        z = torch.randn(128 + at, device="cuda")[at:].view(8, 16).t()
        torch.testing.assert_close(function(x, y, z), x + 2 * y - z)  # type: ignore[operator]
    assert "Launch" in launches()


@torch.no_grad()
def test_calls_of_threads_that_asked_nothing_of_the_device_are_right() -> None:
    torch._dynamo.reset()
    function = compiled(lambda x: weighted(x, x).tanh())
    x = torch.randn(64, device="cuda")
    expected, found = weighted(x, x).tanh(), []

    def call() -> None:
        with torch.no_grad():
            found.append(function(x))  # type: ignore[operator]

    for _ in range(8):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(found) == 8
    for each in found:
        torch.testing.assert_close(each, expected)


@torch.no_grad()
def test_calls_on_other_streams_and_in_other_threads_are_right() -> None:
    torch._dynamo.reset()
    function = compiled(lambda x, y: weighted(x, y).sin())
    streams = [torch.cuda.Stream() for _ in range(3)]
    for call in range(24):
        with torch.cuda.stream(streams[call // 3 % 3]):
            x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
            found = function(x, y)  # type: ignore[operator]
            torch.testing.assert_close(found, weighted(x, y).sin())
        torch.cuda.synchronize()
    assert "Launch" in launches()


def test_training_steps_are_eagers() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)), torch.nn.Dropout(0.0)).cuda()
    step = compiled(lambda x: torch.nn.functional.gelu(model(x)).square().mean())
    for _ in range(10):
        x = torch.randn(16, 32, device="cuda")
        model.zero_grad()
        torch.nn.functional.gelu(model(x)).square().mean().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        step(x).backward()  # type: ignore[operator]
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    assert "Launch" in launches()


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_attention_that_drops_nothing_is_launched_natively(backend: str) -> None:
    torch._dynamo.reset()
    multigraph_backend.release()
    attend = torch.nn.functional.scaled_dot_product_attention

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return attend(x, x.sin(), x.cos(), is_causal=True)

    run = compiled(function)
    for _ in range(8):
        x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(run(x), function(x), rtol=3e-2, atol=3e-2)  # type: ignore[operator]
    assert launches() == {"Launch"}
    for node in [node for tree in runtime.trees() for node in tree.root.below() if node.recording is not None]:
        assert not node.recording.random


def test_random_numbers_are_drawn_anew_at_each_call() -> None:
    torch._dynamo.reset()
    drop = compiled(lambda x: torch.nn.functional.dropout(x, 0.5))
    with torch.no_grad():
        seen = {tuple(drop(torch.ones(64, device="cuda")).tolist()) for _ in range(12)}  # type: ignore[operator]
    assert len(seen) == 12


@torch.no_grad()
def test_recordings_of_before_become_native_when_nothing_is_under_way() -> None:
    torch._dynamo.reset()
    multigraph_backend.release()
    (tree,) = runtime.trees()
    calls, tree.calls, tree.device._calls = tree.calls, None, None  # type: ignore[attr-defined]
    function = compiled(lambda x: weighted(x, x).cos())
    for _ in range(6):
        x = torch.randn(500, device="cuda")
        torch.testing.assert_close(function(x), weighted(x, x).cos())  # type: ignore[operator]
    assert "Launch" not in launches()
    assert calls is not None
    assert tree.take(calls)
    held = []
    for _ in range(6):
        x = torch.randn(500, device="cuda")
        held.append((function(x), weighted(x, x).cos()))  # type: ignore[operator]
        del held[:-2]
        for found, expected in held:
            torch.testing.assert_close(found, expected)
    assert "Launch" in launches()
