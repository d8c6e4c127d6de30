"""Recordings whose dead memory serves others where the device is full (`allocator.install(lend=True)`).

The process may have little more than what it has, so that what is asked for between two replays is in the pool of the
recordings, or nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import multigraph_backend
from multigraph_backend.cudagraphs import runtime
from tests.support.gpu.allocator_process import MIB, check, clean, cuda, expect, out_of_memory, room_for, verified
from tests.support.gpu.programs import close, compiled, fresh, tree_counts

WIDTH = 4096  # a matrix has 64 MiB


def large(x: torch.Tensor) -> torch.Tensor:
    """What is alive in between is some hundred MiB, and the output is small."""
    products = [torch.relu(x @ x.t() + number) for number in range(6)]
    return torch.stack([a @ b for a, b in zip(products, reversed(products), strict=True)]).amax((0, 1))


def small(x: torch.Tensor) -> torch.Tensor:
    return (x[:8] * 3).sum(0)


def recorded(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[..., torch.Tensor]:
    run = compiled(function)
    for _ in range(4):
        close(run(x), function(x))
    return run


def begin() -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and the output of `large`, with nothing recorded."""
    fresh()
    runtime.forget()
    clean()
    x = cuda(WIDTH, WIDTH) / WIDTH**0.5
    return x, large(x)


def replays() -> int:
    return sum(piece.replays for device in multigraph_backend.explain().recordings for piece in device.pieces)


@check("lending")
def what_is_dead_serves_others_between_replays() -> None:
    with torch.no_grad():
        x, expected = begin()
        run = recorded(large, x)
        made, loans = tree_counts("recordings"), multigraph_backend.stats()["pool_loans"]
        with room_for(16 * MIB):
            for number in range(5):
                before = replays()
                output = run(x)
                expect(replays() == before + 1, multigraph_backend.explain())
                moment = torch.full((128 * MIB,), number, dtype=torch.uint8, device="cuda")
                expect(runtime.tree(0).device.lent_bytes() >= 128 * MIB)
                expect(bool((moment == number).all()))
                close(output, expected)
                del moment
        expect(multigraph_backend.stats()["pool_loans"] == loans + 5, multigraph_backend.stats())
        expect(tree_counts("recordings") == made)
        verified()


@check("lending")
def a_loan_that_is_alive_is_not_written_over() -> None:
    with torch.no_grad():
        x, expected = begin()
        runs = recorded(large, x), recorded(small, x)
        made = tree_counts("recordings")
        with room_for(16 * MIB):
            kept = torch.full((128 * MIB,), 7, dtype=torch.uint8, device="cuda")
            before = replays()
            for _ in range(3):
                close(runs[1](x), small(x))
                expect(bool((kept == 7).all()))
            expect(replays() == before, multigraph_backend.explain())
            del kept
            close(runs[0](x), expected)
            close(runs[1](x), small(x))
            expect(replays() == before + 2, multigraph_backend.explain())
        expect(tree_counts("recordings") == made)
        verified()


@check("lending")
def a_loan_of_another_stream_is_waited_for() -> None:
    with torch.no_grad():
        x, expected = begin()
        run = recorded(large, x)
        side = torch.cuda.Stream()
        with room_for(16 * MIB):
            for number in range(5):
                output = run(x)
                with torch.cuda.stream(side):
                    moment = torch.full((64 * MIB,), number, dtype=torch.uint8, device="cuda")
                    torch.cuda._sleep(20_000_000)
                    total = moment.sum(dtype=torch.int64)
                    del moment
                close(run(x), expected)
                close(output, expected)
                expect(int(total) == number * 64 * MIB)
        verified()


@check("lending")
def what_no_loan_can_serve_costs_the_recordings_and_fails() -> None:
    with torch.no_grad():
        x, expected = begin()
        run = recorded(large, x)
        held = runtime.tree(0).device.pool_bytes()
        with room_for(16 * MIB):
            expect("out of memory" in out_of_memory(lambda: torch.empty(2 * held, dtype=torch.uint8, device="cuda")))
            expect(runtime.tree(0).size == 0, multigraph_backend.explain())
            close(run(x), expected)
        for _ in range(4):
            close(run(x), expected)
        expect(runtime.tree(0).size == 1, multigraph_backend.explain())
        verified()
