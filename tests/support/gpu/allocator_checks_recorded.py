"""multigraph's recordings in pools of the installed extension: programs of users, equal to eager, run from recordings.

`test_recordings_on_gpu.py` runs as a whole over it too; here is what only the extension can get wrong.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

import multigraph_backend
from multigraph_backend import allocator
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.devices.extension_pool import ExtensionPool
from tests.support.gpu.allocator_process import (
    MIB,
    check,
    clean,
    cuda,
    expect,
    out_of_memory,
    private_bytes,
    room_for,
    verified,
)
from tests.support.gpu.programs import close, compiled, fresh, tree_counts


@contextlib.contextmanager
def recorded(least: int = 1, failed: int = 0) -> Iterator[None]:
    """What runs inside makes so many recordings at least, fails to make so many, and leaves the books right."""
    before, failures = tree_counts("recordings"), tree_counts("failed")
    yield
    torch.cuda.synchronize()
    verified()
    said = multigraph_backend.explain()
    expect(tree_counts("recordings") - before >= least, said)
    expect(tree_counts("failed") - failures <= failed, said)
    expect(isinstance(runtime.tree(0).device._pool, ExtensionPool))  # type: ignore[attr-defined]


def replays() -> int:
    return sum(piece.replays for device in multigraph_backend.explain().recordings for piece in device.pieces)


@check("recorded")
def a_function_is_recorded_and_right_on_fresh_inputs() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(x @ w)
        return torch.softmax(h @ w.t(), -1), h.sum(0)

    w = cuda(256, 512)
    run = compiled(program, cudagraphs="require")
    with torch.no_grad(), recorded():
        for rows in (64, 64, 64, *(32, 64) * 4):
            x = cuda(rows, 256)
            close(run(x, w), program(x, w))
    expect(replays() >= 4, multigraph_backend.explain())
    expect(private_bytes(runtime.tree(0).device._pool.id) > 0)  # type: ignore[attr-defined]
    fresh()


@check("recorded")
def outputs_that_are_held_stay_as_they_are() -> None:
    run = compiled(lambda x: (x * 2).sin() + 1)
    inputs = [cuda(256, 256) for _ in range(12)]
    with recorded():
        outputs = [run(x) for x in inputs]
        close(outputs, [(x * 2).sin() + 1 for x in inputs])
        views = [output[3:, ::2] for output in outputs]
        del outputs
        for x in inputs:
            run(x)
        close(views, [((x * 2).sin() + 1)[3:, ::2] for x in inputs])
    fresh()


@check("recorded")
def one_recording_reads_another_s_output() -> None:
    first, second = compiled(lambda x: torch.relu(x @ x.t()) + 1), compiled(lambda y: (y.cos() * 2).cumsum(0))
    with recorded(2):
        for _ in range(8):
            x = cuda(128, 128)
            close(second(first(x)), ((torch.relu(x @ x.t()) + 1).cos() * 2).cumsum(0))
    step = compiled(lambda h: torch.tanh(h + 0.5))
    h = expected = cuda(4096)
    with recorded():
        for _ in range(12):
            h, expected = step(h), torch.tanh(expected + 0.5)
            close(h, expected)
    fresh()


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.register_buffer("calls", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        self.calls.add_(x.detach().mean(0))
        return x.softmax(-1)


def train(run: Callable[..., Any], model: torch.nn.Module, batches: list[torch.Tensor], micro: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, batch in enumerate(batches):
        loss = run(batch).square().sum(-1).mean()
        loss.backward()
        losses.append(loss.detach())
        if number % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


@check("recorded")
def a_training_step_is_recorded_forward_and_backward() -> None:
    for micro in (1, 3):
        model = Net(256).cuda()
        reference = copy.deepcopy(model)
        batches = [cuda(128, 256) for _ in range(24)]
        with recorded(2):
            losses = train(compiled(model), model, batches, micro)
        close(losses, train(reference, reference, batches, micro))
        close(dict(model.named_parameters()), dict(reference.named_parameters()))
        close(model.calls, reference.calls)
        del model, reference, losses
        fresh()


@check("recorded")
def saved_tensors_give_their_memory_to_the_backward() -> None:
    """What a forward saves dies in its backward, and is used again there, so both need little more than the forward."""
    width, rows, layers = 1024, 4096, 8
    blocks = (torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers))
    model = torch.nn.Sequential(*blocks).cuda()
    run = compiled(model)
    with recorded(2):
        for _ in range(6):
            x = cuda(rows, width)
            run(x).square().mean().backward()
            got = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad()
            model(x).square().mean().backward()
            close(got, [parameter.grad for parameter in model.parameters()])
            model.zero_grad()
            del got
    pool = runtime.tree(0).device.pool_bytes()
    activation = rows * width * 4
    # each layer saves two of them; a pool without reuse would need as much again for the backward
    expect(pool <= (2 * layers + 12) * activation, pool / activation)
    del model, run
    fresh()


@check("recorded")
def statistics_stay_the_same_from_step_to_step() -> None:
    model = Net(512).cuda()
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = cuda(256, 512)

    def step() -> None:
        run(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with recorded(2):
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        gc.collect()
        before = allocator.memory_stats()
        for _ in range(200):
            step()
        torch.cuda.synchronize()
        gc.collect()
        after = allocator.memory_stats()
    for name in ("allocated_bytes", "active_bytes", "reserved_bytes", "segment", "allocation"):
        expect(after[f"{name}.all.current"] == before[f"{name}.all.current"], name, before, after)
    expect(0 < after["allocated_bytes.all.current"] <= after["reserved_bytes.all.current"], after)
    expect(after["multigraph.verify_failures"] == 0, after)
    fresh()


@check("recorded")
def memory_of_recordings_goes_with_the_code() -> None:
    fresh()
    clean()
    before = private_bytes()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    run = compiled(model)
    with torch.no_grad(), recorded():
        for _ in range(4):
            x = cuda(2048, 1024)
            close(run(x), model(x))
    expect(private_bytes() > before)
    del model, run
    fresh()
    clean()
    expect(private_bytes() <= before + 4 * MIB, before, private_bytes())


@check("recorded")
def a_recording_that_fails_costs_no_more_than_itself() -> None:
    @torch.library.custom_op("multigraph_allocator_test::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()  # not allowed in a capture
        return x + 1

    waits.register_fake(lambda x: torch.empty_like(x))
    fine = compiled(lambda x: torch.softmax(x @ x.t(), -1))
    bad = compiled(lambda x: waits(x * 2).cos(), safe=["multigraph_allocator_test::waits"])
    with recorded(failed=3):
        for _ in range(8):
            x = cuda(64, 64)
            close(fine(x), torch.softmax(x @ x.t(), -1))
            close(bad(x), (x * 2 + 1).cos())
    expect(tree_counts("failed") >= 1)
    fresh()


@check("recorded")
def out_of_memory_in_a_recording_leaves_the_process_healthy() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.repeat(64, 1) @ x.t()).softmax(-1).cumsum(0)

    run = compiled(program)
    large = cuda(4096, 512)
    clean()
    with torch.no_grad():
        with room_for(64 * MIB):
            for _ in range(3):
                out_of_memory(lambda: run(large))
        with recorded(0, failed=3):
            for _ in range(5):
                x = cuda(64, 512)
                close(run(x), program(x))
    fresh()


@check("recorded")
def recorded_beside_a_pool_of_the_user_s() -> None:
    run = compiled(lambda x: torch.relu(x @ x.t()) + 1)
    pool = allocator.pool()
    with pool, recorded():
        for _ in range(6):
            x = cuda(128, 128)
            close(run(x), torch.relu(x @ x.t()) + 1)
    del x
    pool.close()
    fresh()


@check("recorded")
def inside_a_capture_of_the_user_s() -> None:
    run = compiled(lambda x: (x * 3).cos() @ x)
    x = cuda(128, 128)
    with torch.no_grad(), recorded():
        for _ in range(4):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
    for _ in range(3):
        x.copy_(cuda(128, 128))
        run(x)
        graph.replay()
        close(y, (x * 3).cos() @ x)
    del graph, y
    fresh()


@check("recorded")
def threads_share_recordings() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
    run = compiled(model)
    problems: list[BaseException] = []
    inputs = [cuda(16, 64) for _ in range(25)]

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.no_grad(), torch.cuda.stream(stream):
                for x in inputs:  # drawn before: torch raises where a capture begins in the middle of a draw
                    close(run(x) * 2, model(x) * 2)
        except BaseException as problem:
            problems.append(problem)

    with recorded():
        with torch.no_grad():
            for _ in range(2):
                run(cuda(16, 64))
        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expect(problems == [], problems)
    fresh()


@check("recorded")
def an_output_that_another_stream_reads() -> None:
    run = compiled(lambda x: x * 2 + 1)
    side = torch.cuda.Stream()
    sums, inputs = [], [cuda(MIB) for _ in range(8)]
    with recorded():
        for x in inputs:
            y = run(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                sums.append(y.sum())
            y.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            del y
    side.synchronize()
    for x, total in zip(inputs, sums, strict=True):
        torch.testing.assert_close(total, (x * 2 + 1).sum(), rtol=1e-3, atol=1e-1)
    fresh()


# ---------------------------------------------------------------- the same over plain segments, to their own stream


for _check in (
    a_function_is_recorded_and_right_on_fresh_inputs,
    outputs_that_are_held_stay_as_they_are,
    a_training_step_is_recorded_forward_and_backward,
    memory_of_recordings_goes_with_the_code,
    a_recording_that_fails_costs_no_more_than_itself,
):
    check("plain")(_check)
