"""First calls run unrecorded, in the memory where their recordings will lie."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from multigraph_backend.cudagraphs.limits import Limits
from multigraph_backend.cudagraphs.recordings.warm_up import MOST_LAYERS, WarmUp
from tests.support.simulated.pieces import Bench, assert_equal, call_right, one, values

KIB = 1024


def in_pool(bench: Bench, tensor: torch.Tensor) -> bool:
    return bench.device.address(tensor) >= 1 << 48


def wide(x: torch.Tensor) -> tuple[torch.Tensor]:
    first = x.repeat(64) * 2
    second = first + 1
    del first
    return (second.view(64, -1).sum(0),)


def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    saved = x.repeat(16).sin()
    return saved.sum(), saved


def backward(saved: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor]:
    return ((saved * grad).view(16, -1).sum(0),)


def test_the_first_call_takes_the_memory_that_its_recording_takes_later() -> None:
    bench = Bench()
    piece = bench.piece(wide, 1, 1)
    (y,) = call_right(piece, wide, values())
    assert in_pool(bench, y)
    after_one = bench.device.pool_bytes()
    del y
    for _ in range(5):
        call_right(piece, wide, values())
    assert bench.recorded() == 1
    assert bench.replays() == 5
    # the recording has its input's copy besides
    assert bench.device.pool_bytes() <= after_one + 64
    assert bench.clones() == 0


def test_a_training_step_warms_up_as_a_whole_and_frees_as_it_goes() -> None:
    bench = Bench()
    ahead = bench.piece(forward, 1, 2, visible=(True, False))
    back = bench.piece(backward, 2, 1, is_backward=True)
    peaks = []
    for step in range(5):
        x = values()
        loss, saved = ahead([x])
        assert in_pool(bench, saved) == (step != 5)
        expected = backward(forward(x)[1], torch.ones(()))
        boxed = [saved, one()]
        del saved
        assert_equal(back(boxed), expected)
        del loss
        peaks.append(bench.device.pool_bytes())
    assert bench.recorded() == 2
    assert bench.replays() == 2 * 4
    assert bench.tree.counts["warm-ups in the pool"] == 2
    assert peaks[-1] <= peaks[0] + 2 * 64
    assert not bench.unrecorded(ahead, back)


def test_a_backward_that_warms_up_frees_what_was_saved_for_it_as_it_goes() -> None:
    bench, layers, words = Bench(), 8, 4 * KIB

    def ahead(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sum() * 1, *(x.repeat(words // 8) + layer for layer in range(layers)))

    def behind(*inputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(saved.view(2, -1).sum(0) for saved in inputs)

    def freeing(inputs: list[Any]) -> tuple[torch.Tensor, ...]:
        gradients = []
        while inputs:
            gradients += behind(inputs.pop(0))
        return tuple(gradients)

    first = bench.piece(ahead, 1, 1 + layers, visible=(True, *(False,) * layers))
    second = bench.piece(behind, layers, layers, is_backward=True)
    second.function = freeing
    for _ in range(4):
        x = values()
        loss, *saved = first([x])
        expected = behind(*ahead(x)[1:])
        boxed = list(saved)
        del saved
        assert_equal(second(boxed), expected)
        del loss
        # one gradient lies beside all that was saved, and each further one where the tensor before it lay
        assert bench.device.pool_bytes() <= 4 * words * (layers + 1) + KIB
    assert bench.recorded() == 2


def test_what_kernels_are_tuned_with_is_given_back_before_anything_is_recorded() -> None:
    """Inductor counts how often it times a kernel, which takes copies of its inputs and a buffer to fill the cache."""
    bench, tuned = Bench(), False

    def tuning(x: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal tuned
        if not tuned:
            counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 1
            x.repeat(8 * KIB)  # dead at once
            tuned = True
        return wide(x)

    alone = Bench()
    untuned = alone.piece(wide, 1, 1)
    for _ in range(4):
        call_right(untuned, wide, values())
    piece = bench.piece(tuning, 1, 1)
    x = values()
    assert_equal(piece([x]), wide(x))
    assert bench.device.pool_bytes() >= 256 * KIB
    for _ in range(5):
        call_right(piece, wide, values())
        assert bench.device.pool_bytes() <= alone.device.pool_bytes()
    assert bench.recorded() == 1
    assert bench.replays() == 5
    assert len(bench.device.pools()) == 1
    assert not bench.unrecorded(piece)


@pytest.mark.parametrize("order", ["large first", "small first"])
def test_of_two_sizes_that_have_warmed_up_only_the_larger_one_begins_a_new_pool(order: str) -> None:
    """One that the smaller begins would have only pieces for the larger: what was warmed up is kept for that then."""
    bench, tuned = Bench(), set()

    def tuning(size: int, x: torch.Tensor) -> tuple[torch.Tensor]:
        if size not in tuned:
            tuned.add(size)
            counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 1
            x.repeat(128 * KIB // size)
        return wide(x)

    small, large = 16, 256
    piece = bench.piece(tuning, 2, 1)

    def call(size: int) -> None:
        call_right(piece, lambda _, x: wide(x), size, values(size))

    call(small)
    call(large)  # whose first call begins with an empty pool
    taken = bench.device.pool_bytes()
    for size in (large, small) if order == "large first" else (small, large):
        call(size)
    for size in (small, large, large, small):
        call(size)
    assert bench.recorded() == 2
    assert bench.replays() == 6
    assert (bench.device.pool_bytes() < taken / 2) == (order == "large first")
    assert len(bench.device.pools()) == 1


def test_a_pool_in_which_something_is_recorded_is_kept_though_kernels_are_tuned_there() -> None:
    def tuning(x: torch.Tensor) -> tuple[torch.Tensor]:
        counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 1
        return wide(x)

    bench = Bench()
    first, later = bench.piece(wide, 1, 1), bench.piece(tuning, 1, 1)
    for _ in range(3):
        call_right(first, wide, values())
    for _ in range(4):
        call_right(later, tuning, values())
        call_right(first, wide, values())
    assert bench.recorded() == 2
    assert bench.device.generation == 0


def test_a_first_call_takes_what_it_takes_alone_whatever_first_calls_of_other_code_took() -> None:
    def of(times: int) -> Any:
        def code(x: torch.Tensor) -> tuple[torch.Tensor]:
            blocks = [x.repeat(times) + at for at in range(6)]
            return (torch.stack([block.sum() for block in blocks]).sum() + x,)

        return code

    taken = {}
    for sizes in ([40], [32], [40, 32]):
        bench = Bench()
        for times in sizes:
            (y,) = call_right(bench.piece(of(times * 16), 1, 1), of(times * 16), values())
            assert in_pool(bench, y)
            del y
        taken[tuple(sizes)] = bench.device.pool_bytes()
    assert taken[40, 32] == taken[32,] < taken[40,]
    assert bench.tree.counts["warm-ups in the pool"] == 2


def test_a_first_call_leaves_the_memory_of_recordings_to_them() -> None:
    bench = Bench()
    first, second = bench.piece(wide, 1, 1), bench.piece(wide, 1, 1)
    for _ in range(3):
        call_right(first, wide, values())
    generation = bench.device.generation
    call_right(second, wide, values())
    assert bench.device.generation == generation
    call_right(first, wide, values())
    assert bench.recorded() == 1


def test_what_is_held_of_a_warm_up_is_moved_out_when_the_step_begins_again() -> None:
    bench = Bench()
    piece = bench.piece(wide, 1, 1)
    held = []
    for _ in range(4):
        x = values()
        held.append((call_right(piece, wide, x), wide(x)))
        for mine, right in held:
            assert_equal(mine, right)
    assert bench.recorded() == 1
    assert bench.tree.counts["moved from warm-ups"] == 1
    assert not in_pool(bench, held[0][0][0])


def test_saved_tensors_of_a_forward_whose_backward_never_comes_are_moved_out_in_the_end() -> None:
    bench = Bench()
    ahead = bench.piece(forward, 1, 2, visible=(True, False))
    kept = []
    for _ in range(MOST_LAYERS + 2):
        x = values()
        kept.append((ahead([x]), forward(x)))
    for mine, right in kept:
        assert_equal(mine, right)
    assert bench.tree.counts["warm-ups in the pool"] == MOST_LAYERS
    assert bench.recorded() > 0


class Keeps:
    """Keeps memory that it allocated in its first call, as a library does that sets itself up."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if self.kept is None:
            self.kept = torch.arange(8.0) + 0
        return (x * self.kept,)


def right(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * torch.arange(8.0),)


def test_memory_that_code_keeps_for_itself_is_never_written_over() -> None:
    bench = Bench()
    other = bench.piece(wide, 1, 1)
    for _ in range(3):
        call_right(other, wide, values())
    keeps = Keeps()
    piece = bench.piece(keeps, 1, 1)
    for _ in range(5):
        x = values()
        assert_equal(piece([x]), right(x))
        assert keeps.kept is not None
        torch.testing.assert_close(keeps.kept, torch.arange(8.0))
        call_right(other, wide, values())
    assert bench.tree.counts["abandoned pools"] == 1
    assert not any(isinstance(node, WarmUp) for node in bench.tree.path)
    before = bench.replays()
    for _ in range(3):
        call_right(other, wide, values())
        x = values()
        assert_equal(piece([x]), right(x))
    assert bench.replays() == before + 6


def test_code_that_raises_while_it_warms_up_leaves_nothing_behind() -> None:
    bench = Bench()
    fails = [True]

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x * 3
        if fails[0]:
            raise ValueError("not yet")
        return (y,)

    piece = bench.piece(code, 1, 1)
    with pytest.raises(ValueError, match="not yet"):
        piece([values()])
    fails[0] = False
    gc.collect()
    for _ in range(4):
        x = values()
        assert_equal(piece([x]), (x * 3,))
    assert bench.recorded() == 1
    assert bench.device.generation == 0


def test_an_error_that_is_kept_keeps_its_tensors_right() -> None:
    bench = Bench()
    seen: list[torch.Tensor] = []

    def code(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x * 3
        if not seen:
            seen.append(y)
            raise ValueError("not yet")
        return (y,)

    piece = bench.piece(code, 1, 1)
    x = values()
    with pytest.raises(ValueError, match="not yet"):
        piece([x])
    for _ in range(5):
        z = values()
        assert_equal(piece([z]), (z * 3,))
        torch.testing.assert_close(seen[0], x * 3)
    assert bench.recorded() == 1


@pytest.mark.parametrize(
    ("known", "limits"),
    [({"copies": True}, None), ({}, Limits(pool_bytes=64 * KIB))],
    ids=["outputs are copies", "the pool has a limit"],
)
def test_where_it_may_not_a_first_call_runs_in_ordinary_memory(known: Any, limits: Limits | None) -> None:
    bench = Bench(limits)
    piece = bench.piece(wide, 1, 1, **known)
    (y,) = call_right(piece, wide, values())
    assert not in_pool(bench, y)
    assert bench.tree.counts["warm-ups in the pool"] == 0


def test_driver_errors_before_it_leave_a_first_call_in_ordinary_memory() -> None:
    bench = Bench()
    piece = bench.piece(wide, 1, 1)
    bench.device.fail_at("restore")
    (y,) = call_right(piece, wide, values())
    assert not in_pool(bench, y)
    for _ in range(3):
        call_right(piece, wide, values())
    assert bench.recorded() == 1


def test_the_memory_goes_when_the_code_goes() -> None:
    bench = Bench()
    piece = bench.piece(wide, 1, 1)
    (y,) = call_right(piece, wide, values())
    expected = y.clone()
    bench.tree.drop([piece])
    del piece
    torch.testing.assert_close(y, expected)
    del y
    other = bench.piece(wide, 1, 1)
    for _ in range(3):
        call_right(other, wide, values())
    bench.tree.forget()
    assert len(bench.device.generations()) == 1
    assert bench.device.pool_bytes() == 0


def test_gradients_that_accumulate_over_the_first_steps_stay_right() -> None:
    bench = Bench()
    ahead = bench.piece(forward, 1, 2, visible=(True, False))
    back = bench.piece(backward, 2, 1, is_backward=True)
    grad: torch.Tensor | None = None
    expected = torch.zeros(8)
    for step in range(12):
        x = values()
        _, saved = ahead([x])
        boxed = [saved, one()]
        del saved
        (made,) = back(boxed)
        grad = made if grad is None else grad.add_(made)
        del made
        expected += backward(forward(x)[1], torch.ones(()))[0]
        torch.testing.assert_close(grad, expected)
        if step % 4 == 3:
            grad = None
            expected.zero_()
    assert bench.recorded() >= 2


def test_a_driver_that_fails_before_the_code_runs_leaves_the_call_to_ordinary_memory() -> None:
    bench = Bench()
    piece = bench.piece(wide, 1, 1)
    bench.device.fail_at("run_in_pool")
    (y,) = call_right(piece, wide, values())
    assert not in_pool(bench, y)
    for _ in range(3):
        call_right(piece, wide, values())
    assert bench.recorded() == 1


@pytest.mark.parametrize("call", ["new_pool", "leave"])
def test_a_pool_that_cannot_be_left_costs_a_first_call_nothing(call: str) -> None:
    bench = Bench(Limits(keep_free=0.5), device_bytes=1 << 20)
    first, second = bench.piece(wide, 1, 1), bench.piece(wide, 1, 1)
    call_right(first, wide, values())  # leaves a pool that holds nothing
    bench.device.ballast = 1 << 19
    bench.device.fail_at(call)
    (y,) = call_right(second, wide, values())
    assert call not in bench.device._failures  # it was asked for, and has failed
    assert not in_pool(bench, y)
    bench.device.ballast = 0
    for _ in range(4):
        call_right(second, wide, values())
    assert bench.recorded() == 1
