"""Inputs of MiB size that lie elsewhere at each call, on a CUDA device: kernels are told where, nothing is copied, and
every number is eager's, wherever inputs lie, whatever they share memory with, and whatever libraries do with addresses.

Values are whole numbers, which every order of adding leaves exact, so results are compared bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import multigraph_backend
from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.recordings.nodes import MOST_STRAYS, Node

SIDE = 1024  # of square float32 matrices of 4 MiB
_held: list[torch.Tensor] = []


@pytest.fixture(scope="module", autouse=True)
def _native() -> Iterator[None]:
    runtime.begin_native_calls()
    native.wait()
    assert native.state() == "native"
    yield
    multigraph_backend.release()


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    multigraph_backend.release()
    torch.manual_seed(0)
    yield
    _held.clear()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(
        function, backend="multigraph", options={"on_failure": "raise", "record_small": True, **options}
    )


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, at an address that no other test tensor has had: all are held until the test ends."""
    _held.append(torch.randint(-8, 9, shape or (SIDE, SIDE), device="cuda").to(dtype))
    return _held[-1]


def recordings() -> list[Node]:
    return [node for tree in runtime.trees() for node in tree.root.below() if node.recording is not None]


def patched() -> set[str]:
    """Names of the inputs that recordings read where they lie."""
    return {
        node.keyed.piece.spec.names[index]
        for node in recordings()
        if node.keyed is not None and node.recording is not None
        for index in node.recording.plan.patched
    }


def copied() -> dict[str, str | None]:
    """Names of those that are copied, and why, where it was tried otherwise."""
    return {
        node.keyed.piece.spec.names[index]: node.keyed.unpatched.get(index)
        for node in recordings()
        if node.keyed is not None and node.recording is not None
        for index in node.recording.plan.copied
    }


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- what is told


@torch.no_grad()
def test_kernels_read_inputs_where_they_lie() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    run = compiled(function)
    for _ in range(12):
        x, y = whole(), whole()
        same(run(x, y), function(x, y))
    assert len(patched()) == 2, str(multigraph_backend.explain())
    assert copied() == {}
    assert all(node.recording is not None and not node.recording.buffers for node in recordings())
    assert "where it lies (1 kernel is told)" in str(multigraph_backend.explain())
    assert multigraph_backend.stats()["patched_recordings"] > 0


@torch.no_grad()
def test_thirty_two_inputs_at_new_addresses() -> None:
    def function(*xs: torch.Tensor) -> torch.Tensor:
        total = xs[0]
        for number, x in enumerate(xs[1:], 2):
            total = total + x * number
        return total

    run = compiled(function)
    for _ in range(8):
        xs = [whole(512, 1024) for _ in range(32)]
        same(run(*xs), function(*xs))
    assert len(patched()) == 32, str(multigraph_backend.explain())


@torch.no_grad()
def test_nothing_is_copied_on_the_gpu() -> None:
    run = compiled(lambda x, y: x + y)
    for _ in range(6):
        run(whole(), whole())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            run(whole(), whole())
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.device_time_total > 0]
    assert not [name for name in names if "copy_words" in name or "Memcpy DtoD" in name or "foreach" in name], names


@torch.no_grad()
def test_small_inputs_beside_large_ones_are_copied_within() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x * y + z

    run = compiled(function)
    for _ in range(10):
        x, y, z = whole(), whole(SIDE), whole(1)
        same(run(x, y, z), function(x, y, z))
    assert len(patched()) == 1, str(multigraph_backend.explain())
    assert len(copied()) == 2


@torch.no_grad()
def test_large_inputs_that_cannot_be_patched_are_copied_beside_those_that_can() -> None:
    """20 MiB, more than the kernel within copies."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(0) + y.sum(0), y.clone(), y.contiguous().view(-1)[:7] * 2

    run = compiled(function)
    for call in range(10):
        x, y = whole(), whole(5 * SIDE + 1, SIDE)[call % 2 : 5 * SIDE + call % 2]
        aside = whole(5 * SIDE * SIDE + 1)[1:].view(5 * SIDE, SIDE)
        same(run(x, aside), function(x, aside))
        same(run(x, y), function(x, y))
    assert patched(), str(multigraph_backend.explain())


# ---------------------------------------------------------------- what lies otherwise


@torch.no_grad()
def test_inputs_that_do_not_lie_as_they_did() -> None:
    function = compiled(lambda x, y: x * 2 + y)
    for _ in range(4):
        x, y = whole(), whole()
        same(function(x, y), x * 2 + y)
    assert len(patched()) == 2
    for call in range(MOST_STRAYS - 2):
        x, y = whole(), whole(SIDE * SIDE + 32)[4 + call : SIDE * SIDE + 4 + call].view(SIDE, SIDE)
        same(function(x, y), x * 2 + y)
        x, y = whole(), whole()
        same(function(x, y), x * 2 + y)
    assert multigraph_backend.stats()["stray_inputs"] > 0
    assert len(patched()) == 2
    for _ in range(2 * MOST_STRAYS):
        x, y = whole(), whole(SIDE * SIDE + 1)[1:].view(SIDE, SIDE)
        same(function(x, y), x * 2 + y)
    assert len(patched()) == 1, str(multigraph_backend.explain())


@torch.no_grad()
def test_views_at_many_offsets_of_one_buffer() -> None:
    function = compiled(lambda x: x + 1)
    base = whole(64, SIDE, SIDE)
    for number in range(40):
        x = base[number % 64]
        same(function(x), x + 1)
    assert len(patched()) == 1


@torch.no_grad()
def test_conjugate_inputs() -> None:
    function = compiled(lambda x, y: torch.view_as_real(x * 2 + y))
    for call in range(10):
        x = torch.complex(whole(512, SIDE), whole(512, SIDE))
        y = torch.complex(whole(512, SIDE), whole(512, SIDE))
        x = x.conj() if call % 3 == 2 else x
        same(function(x, y), torch.view_as_real(x * 2 + y))


@torch.no_grad()
def test_inputs_that_are_the_same_or_share_memory() -> None:
    function = compiled(lambda x, y: (x * 2 + y, x - y))
    for _ in range(4):
        x = whole()
        same(function(x, x), (x * 3, x - x))
        base = whole(2 * SIDE, SIDE)
        x, y = base[:SIDE], base[256 : SIDE + 256]
        same(function(x, y), (x * 2 + y, x - y))
        x, y = whole(), whole()
        same(function(x, y), (x * 2 + y, x - y))


@torch.no_grad()
def test_other_strides_are_other_recordings() -> None:
    function = compiled(lambda x: x * 2 + 1)
    for call in range(12):
        x = whole().t() if call % 2 else whole()
        same(function(x), x * 2 + 1)


# ---------------------------------------------------------------- libraries


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) + tl.load(y + at, mask=at < count), mask=at < count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_products_are_right_whether_proven_or_not(dtype: torch.dtype) -> None:
    function = compiled(lambda x, y: torch.relu(x @ y) + 1)
    for _ in range(8):
        x, y = whole(SIDE, SIDE, dtype=dtype), whole(SIDE, 512, dtype=dtype)
        torch.testing.assert_close(function(x, y), torch.relu(x @ y) + 1, rtol=2e-2, atol=2e-2)
    if dtype is torch.float32:  # whole numbers are exact in any order
        x, y = whole(), whole()
        same(function(x, y).double(), torch.relu(x.double() @ y.double()) + 1)
    said = str(multigraph_backend.explain())
    assert {*patched(), *copied()}, said


@pytest.mark.parametrize(
    "what", ["attention", "convolution", "batched", "sum", "sort", "index", "cat", "norm", "scatter", "cumsum"]
)
@torch.no_grad()
def test_operators_of_libraries(what: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if what == "attention":
            query, key = x.view(8, 8, 256, 64).bfloat16(), y.view(8, 8, 256, 64).bfloat16()
            return torch.nn.functional.scaled_dot_product_attention(query, key, key).float()
        if what == "convolution":
            return torch.nn.functional.conv2d(x.view(4, 16, 128, 128), y.view(-1)[: 8 * 16 * 9].view(8, 16, 3, 3))
        if what == "batched":
            return torch.bmm(x.view(16, 256, 256), y.view(16, 256, 256))
        if what == "sum":
            return x.sum() + y.sum(0)
        if what == "sort":
            return torch.sort(x, dim=1).values + y
        if what == "index":
            return x[y.abs().long().view(-1)[:100]]
        if what == "cat":
            return torch.cat([x, y])
        if what == "norm":
            return torch.nn.functional.layer_norm(x, (SIDE,)) + y
        if what == "scatter":
            return x.scatter_add(0, y.abs().long(), y)
        return torch.cumsum(x, 0) + y

    run = compiled(function)
    for _ in range(8):
        x, y = whole(), whole()
        torch.testing.assert_close(run(x, y), function(x, y), rtol=1e-2, atol=1e-1)


@torch.no_grad()
def test_an_operator_of_the_users_own() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        add[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
        return out * 2

    run = compiled(function)
    for _ in range(8):
        x, y = whole(), whole()
        same(run(x, y), (x + y) * 2)


# ---------------------------------------------------------------- programs


def test_training_with_inputs_that_are_saved() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(3))).cuda()
    step = compiled(lambda x, y: (torch.nn.functional.gelu(model(x)) * x * y).square().mean())
    for _ in range(10):
        x, y = whole() / 8, (whole() / 8).requires_grad_()
        other = y.detach().clone().requires_grad_()
        model.zero_grad()
        (torch.nn.functional.gelu(model(x)) * x * other).square().mean().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        step(x, y).backward()
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close([*found, y.grad], [*expected, other.grad], rtol=1e-3, atol=1e-5)
    assert patched(), str(multigraph_backend.explain())


def test_gradients_that_a_backward_is_given() -> None:
    function = compiled(lambda x: x * x * 3)
    for _ in range(8):
        x, gradient = whole().requires_grad_(), whole()
        function(x).backward(gradient)
        assert x.grad is not None
        same(x.grad, 6 * x.detach() * gradient)
    assert any(node.is_backward and node.recording is not None and node.recording.plan.patched for node in recordings())


def test_dropout_draws_anew_and_keeps_its_inputs() -> None:
    function = compiled(lambda x, y: torch.nn.functional.dropout(x, 0.5) + y)
    seen = set()
    with torch.no_grad():
        for _ in range(8):
            x, y = whole(), whole()
            found = function(x, y) - y
            assert bool(((found == 0) | (found == 2 * x)).all())
            seen.add(int((found != 0).sum()))
    assert len(seen) > 4


@torch.no_grad()
def test_pieces_that_change_a_buffer() -> None:
    state = torch.zeros(SIDE, SIDE, device="cuda")
    expected = state.clone()

    def change(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2 + x

    model = torch.nn.Module()
    model.register_buffer("state", state)
    run = compiled(lambda x: change(model.state, x))
    for _ in range(10):
        x = whole()
        same(run(x), change(expected, x))
        same(state, expected)


@torch.no_grad()
def test_an_output_of_a_recording_may_be_the_input_of_another_or_of_itself() -> None:
    first, second = compiled(lambda x: x * 2), compiled(lambda x, y: x + y)
    for _ in range(4):
        same(first(whole()), _held[-1] * 2)
        x, y = whole(), whole()
        same(second(x, y), x + y)
    for _ in range(6):
        x, y = whole(), whole()
        made = first(x)
        same(second(made, y), x * 2 + y)
        same(second(y, made), x * 2 + y)
        same(second(made, made), x * 4)
        same(made, x * 2)
        same(first(made), x * 4)
        same(made, x * 2)
    x, expected = torch.ones(SIDE, SIDE, device="cuda"), 1.0
    for _ in range(10):
        x, expected = first(x), expected * 2
        same(x, torch.full_like(x, expected))


@torch.no_grad()
def test_inputs_that_are_freed_behind_the_call() -> None:
    function = compiled(lambda x: (x * 2).cumsum(0))
    for _ in range(30):
        x = torch.randint(-8, 9, (SIDE, SIDE), device="cuda").float()
        expected = (x * 2).cumsum(0)
        found = function(x)
        del x
        torch.empty(SIDE, SIDE, device="cuda").fill_(float("nan"))  # where the input was, as likely as not
        same(found, expected)


@torch.no_grad()
def test_calls_on_other_streams() -> None:
    function = compiled(lambda x, y: x * 3 + y)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for call in range(18):
        with torch.cuda.stream(streams[call // 2 % 3]):
            x, y = whole(), whole()
            same(function(x, y), x * 3 + y)
        torch.cuda.synchronize()


@torch.no_grad()
def test_an_output_that_is_an_input_or_a_view_of_it() -> None:
    function = compiled(lambda x: (x * 2, x, x[4:]))
    for _ in range(8):
        x = whole()
        doubled, itself, part = function(x)
        same(doubled, x * 2)
        assert itself.data_ptr() == x.data_ptr()
        assert part.data_ptr() == x[4:].data_ptr()


@torch.no_grad()
def test_pieces_between_cuts() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x * 2
        number = z.sum().cpu()
        return (z + y) * number.to("cuda").sign()

    run = compiled(function)
    for _ in range(10):
        x, y = whole(), whole()
        same(run(x, y), function(x, y))


@torch.no_grad()
def test_much_memory_is_not_needed_to_try_it() -> None:
    xs = [whole(8 * SIDE, SIDE) for _ in range(8)]  # 256 MiB

    def function(*xs: torch.Tensor) -> torch.Tensor:
        total = xs[0][:8]
        for x in xs:
            total = total + x[8:16] + x.sum(0)
        return total

    run, expected = compiled(function), function(*xs)
    same(run(*xs), expected)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        ys = [x.clone() for x in xs]
        same(run(*ys), expected)
        del ys
    assert torch.cuda.max_memory_allocated() - before < (256 + 128) << 20


SWITCHED_OFF = """
import json, torch, multigraph_backend
from multigraph_backend import native
from multigraph_backend.cudagraphs import runtime
runtime.begin_native_calls()
native.wait()
run = torch.compile(lambda x: x + 1, backend="multigraph", options={"record_small": True})
with torch.no_grad():
    for _ in range(6):
        x = torch.randn(1024, 1024, device="cuda")
        assert torch.equal(run(x), x + 1)
patched, said = multigraph_backend.stats()["patched_recordings"], str(multigraph_backend.explain())
print(json.dumps({"patched": patched, "said": said}))
"""


@pytest.mark.parametrize("switch", ["patched_inputs", "native_calls", ""])
def test_a_switch_turns_it_off(switch: str) -> None:
    environ = {**os.environ, "MULTIGRAPH_DISABLE": switch}
    done = subprocess.run(
        [sys.executable, "-c", SWITCHED_OFF], env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["patched"] > 0) is (not switch), found["said"]
    assert ("copies" in found["said"]) is bool(switch)
