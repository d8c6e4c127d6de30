"""Random numbers beside recordings and in them: none twice, and those of other threads are what they were to be."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from multigraph_backend.cudagraphs.devices.memory_pool import generator_set_free
from tests.support.gpu.programs import CUDA, close, compiled, fresh, tree_counts


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    fresh()


def drawn() -> list[float]:
    numbers: list[float] = torch.rand(3, device=CUDA).tolist()
    return numbers


def in_a_thread(function: Callable[[], list[float]]) -> list[float]:
    results: list[list[float]] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_dropout_draws_anew_at_each_replay() -> None:
    run = compiled(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(4096, device=CUDA)
    drawn = [run(x).clone() for _ in range(6)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(drawn))
    assert all(0.4 < (a == 0).float().mean() < 0.6 for a in drawn)
    torch.manual_seed(3)
    first = [run(x).clone() for _ in range(3)]
    torch.manual_seed(3)
    close([run(x).clone() for _ in range(3)], first)


def test_another_thread_draws_during_a_capture_what_it_would_have_drawn_without() -> None:
    torch.manual_seed(1)
    expected = [drawn() for _ in range(4)]
    torch.manual_seed(1)
    stream, current, x = torch.cuda.Stream(), torch.cuda.current_stream(), torch.zeros(4, device=CUDA)
    numbers = []
    for during in (True, False):
        numbers.append(drawn())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), generator_set_free(torch.cuda.current_device(), current) as free:
            graph.capture_begin(capture_error_mode="thread_local")
            free()
            x.add_(1)
            if during:
                numbers.append(in_a_thread(drawn))
            graph.capture_end()
    numbers.append(drawn())
    assert numbers == expected


def test_recordings_without_random_numbers_leave_their_order_as_it_is() -> None:
    torch.manual_seed(2)
    expected = [drawn() for _ in range(6)]
    run = compiled(lambda x: (x * 3).cos())
    before = tree_counts("recordings")
    torch.manual_seed(2)
    numbers = []
    for size in (64, 64, 64, 128, 128, 128):
        run(torch.zeros(size, device=CUDA))
        numbers.append(drawn())
    assert numbers == expected
    assert tree_counts("recordings") > before
