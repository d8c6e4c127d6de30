"""What random programs found: orders of drops, failures, threads and streams that ordinary tests do not have."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from multigraph_backend.cudagraphs.devices.device import DeviceFailed
from multigraph_backend.cudagraphs.limits import Limits
from tests.support.simulated.pieces import Bench, assert_equal, call_right, one, values


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


def halve(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x / 2 - 1,)


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2 + 1, x / 2 - 1


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results.pop()


def content(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0).set_(storage).clone()


# ---------------------------------------------------------------- who holds an output


def test_a_storage_held_alone_counts_after_the_code_of_a_replay_was_built_again() -> None:
    bench = Bench()
    piece = bench.piece(both, 1, 2)
    for _ in range(2):
        x = values()
        held = piece([x])[0]
    call_right(piece, both, values())  # moves `held`: the other output's storage stays, and is in new code
    assert bench.clones() == 1
    gc.collect()
    x = values()
    storage = piece([x])[1].untyped_storage()
    del held
    call_right(piece, both, values())
    assert_equal((content(storage),), (both(x)[1],))


def test_a_storage_held_alone_counts_while_its_recording_waits_to_be_built_again() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    call_right(piece, double, values())
    x = values()
    storage = piece([x])[0].untyped_storage()
    for _ in range(3):
        in_thread(lambda: call_right(piece, double, values()))
        assert_equal((content(storage),), double(x))
    assert bench.tree.shared


def test_what_follows_a_recording_that_was_given_up_is_copied_for_threads_too() -> None:
    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    held = None
    for _ in range(3):
        del held
        held = call_right(first, double, values())[0]
        call_right(second, halve, held)
    bench.tree.drop([first])
    replays = bench.replays()
    z = in_thread(lambda: second([held]))[0]
    assert bench.replays() == replays + 1
    assert_equal((z,), halve(held))
    assert bench.device._memory.of(z.untyped_storage()) is None


def ahead(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(), x * 3


def back(args: list[Any]) -> tuple[torch.Tensor]:
    """As compiled code does it: what is needed no more goes at once, and its memory serves again."""
    gradient, saved = args
    args.clear()
    scaled = saved * gradient
    del saved
    shifted = scaled + 1
    del scaled
    return (shifted * 2,)


@pytest.mark.parametrize("holder", ["a variable", "autograd"])
def test_a_saved_tensor_that_is_used_twice_stays_after_its_recording_was_made_for_once(holder: str) -> None:
    bench = Bench()
    forward = bench.piece(ahead, 1, 2, visible=[True, False])
    backward = bench.piece(double, 2, 1, static=[1], is_backward=True)
    backward.function = back

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            total, saved = forward([x])
            ctx.save_for_backward(saved)
            return total

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            args = [gradient, *ctx.saved_tensors]
            ctx.maybe_clear_saved_tensors()  # does nothing where the graph is retained
            return backward(args)[0]

    def step(uses: int) -> None:
        x = values().requires_grad_()
        if holder == "autograd":
            total = Both.apply(x)
            gradients = [torch.autograd.grad(total, x, retain_graph=use + 1 < uses)[0] for use in range(uses)]
        else:
            gradients = []
            _, saved = forward([x.detach()])
            for use in range(uses):
                args = [one(), saved]
                if use + 1 == uses:
                    del saved
                gradients.append(backward(args)[0])
                del args
        for gradient in gradients:
            assert_equal((gradient,), ((x.detach() * 3 + 1) * 2,))

    for _ in range(4):
        step(1)
    node = next(node for node in bench.tree.root.below() if node.depth == 2)
    assert node.recording is not None
    assert node.recording.consumed
    replays = bench.replays()
    for uses in (2, 1, 2, 3, 1):
        step(uses)
    assert bench.unrecorded(forward, backward) == {}
    assert bench.replays() == replays + 5 + 9


# ---------------------------------------------------------------- steps and streams


@pytest.mark.parametrize("after", range(6))
def test_a_step_that_another_thread_marks_during_a_call_is_not_lost(after: int) -> None:
    reads = [1 << 30]

    def marks() -> int:
        reads[0] -= 1
        return -1 if reads[0] < 0 else 0

    bench = Bench(marks=marks)
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    for _ in range(2):
        held = call_right(first, double, values())[0]
    call_right(second, halve, values())
    reads[0] = after
    call_right(second, halve, values())
    reads[0] = 0
    call_right(second, halve, values())
    assert bench.clones() == 1
    del held


def test_recordings_are_forgotten_on_another_stream_after_the_last_work_on_them() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    for _ in range(2):
        x = values()
        held = piece([x])
    bench.device.set_stream(5)
    bench.tree.forget()
    assert_equal(held, double(x))
    assert bench.device.calls("wait_for") == [(5, 0)]


def test_an_output_that_dies_just_before_what_follows_is_recorded_must_be_dead_whenever_that_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def several(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (((x * 3 + 1) * 5 - 2) * 7,)

    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(several, 1, 1)
    for _ in range(2):
        held: list[torch.Tensor] = list(call_right(first, double, values()))
    held.clear()
    call_right(second, several, values())
    held[:] = call_right(first, double, values())
    wait_for = bench.device.wait_for

    def drops(stream: int) -> None:  # as another thread may meanwhile
        held.clear()
        wait_for(stream)

    with monkeypatch.context() as patch:
        patch.setattr(bench.device, "wait_for", drops)
        bench.device.set_stream(5)
        call_right(second, several, values())
    assert bench.recorded() == 2
    for _ in range(3):
        x = values()
        (output,) = call_right(first, double, x)
        call_right(second, several, values())
        assert_equal((output,), double(x))


# ---------------------------------------------------------------- recordings that were given up


def test_nothing_is_recorded_behind_a_recording_that_was_given_up() -> None:
    bench = Bench()
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    for _ in range(2):
        held = call_right(first, double, values())[0]
    call_right(second, halve, values())
    bench.tree.drop([first])
    for _ in range(2):
        call_right(second, halve, held)
    assert bench.tree.size == 0
    (reason,) = bench.unrecorded(second)
    assert "was given up" in reason
    del held
    for _ in range(2):
        call_right(second, halve, values())
    assert bench.tree.size == 1
    bench.tree.forget()
    assert (bench.tree.size, list(bench.device._pools)) == (0, [bench.device.generation])


# ---------------------------------------------------------------- a driver that fails


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("call", ["restore", "storage_at", "move_out", "new_pool", "leave"])
def test_a_failure_of_the_driver_costs_recordings_and_nothing_else(call: str, after: int) -> None:
    marks = [0]
    bench = Bench(Limits(per_device=2), marks=lambda: marks[0])
    first, second = bench.piece(both, 1, 2), bench.piece(double, 1, 1)
    held: list[tuple[torch.Tensor, ...]] = []
    expected: list[tuple[torch.Tensor, ...]] = []

    def go(rounds: int) -> None:
        for _ in range(rounds):
            for piece, function in ((first, both), (second, double)):
                x = values()
                held.append(tuple(piece([x])))
                expected.append(function(x))
                for outputs, wanted in zip(held, expected, strict=True):
                    assert_equal(outputs, wanted)
                del held[:-3], expected[:-3]
            marks[0] -= 1

    go(2)
    bench.device.fail_at(call, after)
    go(3)
    for _ in range(after + 2):
        with contextlib.suppress(DeviceFailed, torch.OutOfMemoryError):  # which `forget` does not hide
            bench.tree.forget()
        go(2)
    assert call not in bench.device._failures, "nothing failed"
    before = bench.replays()
    go(4)
    assert bench.replays() >= before + 6
    held.clear()
    bench.tree.forget()
    assert list(bench.device._pools) == [bench.device.generation]
    assert not bench.device._pools[bench.device.generation].arena.blocks


def test_blocks_of_a_recording_that_failed_in_the_end_are_given_back() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    call_right(piece, double, values())
    bench.device.fail_at("storage_at")  # over the buffer of its input, after the capture
    call_right(piece, double, values())
    assert (bench.tree.size, bench.device.calls("capture_end")) == (0, [None])
    bench.tree.forget()
    assert not bench.device._pools[bench.device.generation].arena.blocks


def test_a_pool_that_could_not_be_given_back_is_given_back_later() -> None:
    bench = Bench()
    piece = bench.piece(double, 1, 1)
    for _ in range(2):
        call_right(piece, double, values())
    bench.device.fail_at("new_pool")
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        bench.tree.forget()
    bench.tree.forget()
    assert list(bench.device._pools) == [1]


def test_of_several_pools_those_that_could_not_be_given_back_are_given_back_later() -> None:
    bench = Bench()
    bench.device.failures_spoil_the_pool = True
    for function in (double, halve):
        piece = bench.piece(function, 1, 1)
        call_right(piece, function, values())
        call_right(piece, function, values())
        spoilt = bench.piece(function, 1, 1)
        call_right(spoilt, function, values())
        bench.device.fail_at("capture_end")
        call_right(spoilt, function, values())
    assert list(bench.device._pools) == [0, 1, 2]
    bench.device.fail_at("leave", after=1)
    with pytest.raises(DeviceFailed, match="injected"):
        bench.tree.forget()
    bench.tree.forget()
    assert list(bench.device._pools) == [3]


def test_a_pool_stays_while_a_recording_in_it_may_answer_the_next_call_of_the_step() -> None:
    bench = Bench()
    bench.device.failures_spoil_the_pool = True
    first, second = bench.piece(double, 1, 1), bench.piece(halve, 1, 1)
    for _ in range(2):
        held = None
        held = call_right(first, double, values())[0]
    call_right(second, halve, held)
    bench.device.fail_at("capture_end")
    call_right(second, halve, held)
    call_right(second, halve, held)  # recorded in another pool than what it follows
    bench.tree.drop([first])
    call_right(second, halve, held)
    del held
    bench.tree.forget()
    assert list(bench.device._pools) == [bench.device.generation]


# ---------------------------------------------------------------- outputs that are no memory of the recording


def test_empty_outputs_of_different_calls_share_nothing() -> None:
    def some(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty((0, 3)), x + 1

    bench = Bench()
    piece = bench.piece(some, 1, 2)
    for _ in range(3):
        empty = call_right(piece, some, values())[0]
        assert empty.shape == (0, 3)
        other = call_right(piece, some, values())[0]
        torch.add(torch.ones(4), 1, out=empty)  # grows it
        torch.add(torch.ones(4), 2, out=other)
        assert_equal((empty, other), (torch.full((4,), 2.0), torch.full((4,), 3.0)))
    assert bench.unrecorded(piece) == {}


@pytest.mark.parametrize("stays", [False, True])
def test_an_output_over_one_of_several_inputs_that_share_memory(stays: bool) -> None:
    """Whichever of them it is described by, it is the memory that the plain code returns, in the same layout."""

    def parts(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y[1:], z.t(), x.view(-1, 2), y, z, x, y.sum()

    bench = Bench()
    piece = bench.piece(parts, 3, 7, static=[0, 1, 2] if stays else [])
    base = torch.randn(24)
    for round_ in range(6):
        if not stays:
            base = torch.randn(24)
        base.normal_()
        if stays or round_ % 3:
            x, y, z = base[2:14], base[5:12], base[8:20].view(3, 4)
        else:  # other parts than when it was recorded, and memory of their own
            x, y, z = base[4:16], base[3:10], torch.randn(30)[1:13].view(3, 4)
        outputs = call_right(piece, parts, x, y, z)
        for output, expected in zip(outputs[:6], parts(x, y, z)[:6], strict=True):
            assert (output.data_ptr(), output.stride()) == (expected.data_ptr(), expected.stride())
    assert bench.unrecorded(piece) == {}
    assert bench.replays() == 5
