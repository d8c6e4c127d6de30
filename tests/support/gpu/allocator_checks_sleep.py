"""Memory that sleeps and wakes, under pools of torch's allocator and under the installed extension.

Outputs before and after are of the same recordings and the same values, so they have to be equal bit by bit.  What the
device has free is asked of the driver.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import multigraph_backend
from multigraph_backend import allocator
from multigraph_backend.allocator import Asleep
from multigraph_backend.cudagraphs import runtime
from tests.support.gpu.allocator_process import GIB, MIB, check, clean, cuda, expect
from tests.support.gpu.programs import close, compiled, fresh

CYCLES = 100
GIVEN = 0.98  # of what is held, at least


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def refused(call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except RuntimeError as error:
        expect(any(word in str(error) for word in words), error)
    else:
        raise AssertionError("it was not refused")


def layers(count: int = 8, width: int = 2048) -> torch.nn.Sequential:
    made = (torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(count))
    return torch.nn.Sequential(*made).cuda().eval()


def cycles(sleep: Callable[[], int], wake: Callable[[], int], held: int, replayed: Callable[[], None]) -> None:
    """Sleeps and wakes with replays between; what is given back, and that nothing grows."""
    after: list[int] = []
    for number in range(CYCLES):
        before = free_bytes()
        given = sleep()
        gained = free_bytes() - before
        expect(given >= GIVEN * held and gained >= GIVEN * held, number, given, gained, held)
        wake()
        replayed()
        after.append(free_bytes())
    expect(after[-1] >= after[4] - 8 * MIB, "used memory has grown by", after[4] - after[-1])


@check("pools")
def a_pool_sleeps_under_recordings_and_graphs() -> None:
    fresh()
    clean()
    pool = allocator.pool(sleeps=True)
    expect(pool.reason is None, pool.reason)
    _recordings_and_a_graph(pool)
    fresh()
    pool.close()
    clean()
    expect(pool.reserved_bytes == 0, pool.reserved_bytes)


def _recordings_and_a_graph(pool: allocator.Pool) -> None:
    with pool:
        model = layers()
        other = layers(1)
    x = cuda(64, 2048)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            run(x)
        expected = run(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.id):
            y = other(x)
        graph.replay()
        captured = y.clone()
    view = other[0][0].weight[3:5]
    kept = view.clone()
    recorded = multigraph_backend.stats()["recordings"]
    held = pool.reserved_bytes
    expect(held > 100 * MIB, held)

    def replayed() -> None:
        with torch.no_grad():
            expect(torch.equal(run(x), expected), "a recording has other outputs after a sleep")
        y.zero_()
        graph.replay()
        expect(torch.equal(y, captured), "a graph has other outputs after a sleep")
        expect(torch.equal(view, kept), "a view has other values after a sleep")

    cycles(pool.sleep, pool.wake, held, replayed)
    expect(multigraph_backend.stats()["recordings"] == recorded, multigraph_backend.explain())
    expect(pool.reserved_bytes == held, pool.reserved_bytes)
    pool.sleep()
    expect(pool.asleep and pool.reserved_bytes == 0, pool.reserved_bytes)
    with torch.no_grad():
        refused(lambda: run(x), "sleeps; wake it first")
    refused(pool.sleep, "sleeps already")
    refused(pool.__enter__, "sleeps: wake it first")
    refused(lambda: pool.id, "sleeps: wake it first")
    other[0][0].bias = None  # a tensor dies meanwhile
    pool.wake()
    refused(pool.wake, "does not sleep")
    with torch.no_grad():
        expect(torch.equal(run(x), expected))


@check("pools")
def a_wake_without_memory_fails_and_can_be_tried_again() -> None:
    clean()
    pool = allocator.pool(sleeps=True)
    with pool:
        values = torch.arange(GIB // 4, dtype=torch.int32, device="cuda")
    total = int(values.sum())
    pool.sleep()
    ballast = torch.empty(free_bytes() - 256 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        refused(pool.wake, "the device has no")
        expect(pool.asleep)
    del ballast
    clean()
    pool.wake()
    expect(int(values.sum()) == total, "contents were lost")
    del values
    pool.close()
    clean()


@check("pools")
def contents_that_are_not_kept_are_written_again() -> None:
    clean()
    pool = allocator.pool(sleeps=True)
    with pool:
        model = layers(2)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    x = cuda(16, 2048)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            run(x)
        expected = run(x).clone()
        pool.sleep(keep="nothing")
        os.environ["MULTIGRAPH_DEBUG"] = "poison"
        try:
            pool.wake()
        finally:
            del os.environ["MULTIGRAPH_DEBUG"]
        expect(all(bool(parameter.isnan().all()) for parameter in model.parameters()))
        model.load_state_dict(state)
        expect(torch.equal(run(x), expected))
    del model, run
    fresh()
    pool.close()
    clean()


@check("pools")
def no_pool_sleeps_in_a_capture_or_while_it_is_open() -> None:
    pool = allocator.pool(sleeps=True)
    with pool:
        w = cuda(512, 512)
        refused(pool.sleep, "the pool is open")
    x = cuda(512, 512)
    x @ w
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refused(pool.sleep, "a capture is under way")
        y = x @ w
    graph.replay()
    close(y, x @ w)
    plain = allocator.pool()
    refused(plain.sleep, "make it with pool(sleeps=True)")
    plain.close()
    del graph, y, w
    pool.close()


@check("pools")
def release_gives_recordings_back_and_they_are_made_again() -> None:
    fresh()
    clean()
    model = layers(4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return model(x)[:8] * 2

    run = compiled(program)
    x = cuda(4096, 2048)
    with torch.no_grad():
        for _ in range(4):
            held = run(x)
        expected = held.clone()
        recorded = multigraph_backend.stats()["recordings"]
        before = free_bytes()
        given = multigraph_backend.release()
        expect(given > 0 and free_bytes() > before, given, free_bytes() - before)
        expect(torch.equal(held, expected), "an output that was held has other values")
        for _ in range(3):
            close(run(x), program(x))
    expect(multigraph_backend.stats()["recordings"] > recorded, multigraph_backend.explain())
    del run, held
    fresh()


# ---------------------------------------------------------------- the extension is installed


def _mapped() -> int:
    """Bytes that the extension holds in segments that can sleep."""
    segments = allocator.memory_snapshot()["segments"]
    return sum(segment["total_size"] for segment in segments if segment["is_expandable"])


@check("recorded")
def the_whole_process_sleeps_under_recordings() -> None:
    fresh()
    clean()
    allocator.empty_cache()
    _recordings_of_the_process()
    fresh()


def _recordings_of_the_process() -> None:
    model = layers()
    x = cuda(64, 2048)
    run = compiled(model, cudagraphs="require")
    side = torch.nn.Linear(512, 512).cuda()
    z = cuda(32, 512)
    with torch.no_grad():
        for _ in range(4):
            run(x)
        expected = run(x).clone()
        side(z)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = side(z)
        graph.replay()
        captured = y.clone()
    recorded = multigraph_backend.stats()["recordings"]
    gc.collect()
    allocator.empty_cache()
    held = _mapped()
    expect(held > 100 * MIB, held)

    def replayed() -> None:
        with torch.no_grad():
            expect(torch.equal(run(x), expected), "a recording has other outputs after a sleep")
        y.zero_()
        graph.replay()
        expect(torch.equal(y, captured), "a graph has other outputs after a sleep")
        allocator.empty_cache()

    cycles(allocator.sleep, allocator.wake, held, replayed)
    expect(multigraph_backend.stats()["recordings"] == recorded, multigraph_backend.explain())
    allocator.sleep()
    expect(allocator.memory_reserved() <= (1 - GIVEN) * held, allocator.memory_reserved())
    refused(lambda: torch.empty(1, device="cuda"), "the pool sleeps")
    refused(allocator.sleep, "sleeps already")
    with torch.no_grad():
        refused(lambda: run(x), "sleeps; wake it first")
    refused(multigraph_backend.release, "wake it first")
    allocator.wake()
    refused(allocator.wake, "does not sleep")
    with torch.no_grad():
        expect(torch.equal(run(x), expected))


@check("recorded")
def recordings_copy_their_inputs_after_a_sleep_of_the_process_without_contents() -> None:
    model = layers(1, 512)
    run = compiled(model, cudagraphs="require")
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    with torch.no_grad():
        inputs = [cuda(64, 512) for _ in range(4)]  # at addresses of their own, so they are copied
        for x in inputs:
            run(x)
        recorded = multigraph_backend.stats()["recordings"]
        for _ in range(2):
            del inputs
            allocator.sleep(keep="nothing")
            allocator.wake()
            model.load_state_dict(state)
            inputs = [cuda(64, 512) for _ in range(4)]
            for x in inputs:
                close(run(x), model(x))
    expect(multigraph_backend.stats()["recordings"] == recorded, multigraph_backend.explain())
    del model, run
    fresh()


@check("pools")
def a_pool_is_open_several_times_at_once() -> None:
    pool, inner = allocator.pool(), allocator.pool()
    with pool:
        one = torch.full((MIB,), 1.0, device="cuda")
        with inner, pool:
            before = pool.reserved_bytes
            two = torch.full((8 * MIB,), 2.0, device="cuda")
            expect(pool.reserved_bytes >= before + 32 * MIB, before, pool.reserved_bytes)
        three = torch.full((8 * MIB,), 3.0, device="cuda")
        expect(pool.reserved_bytes >= before + 64 * MIB, before, pool.reserved_bytes)
        thread = threading.Thread(target=lambda: pool.__enter__() and pool.__exit__(None, None, None))
        thread.start()
        thread.join()
    for number, each in enumerate((one, two, three), 1):
        expect(bool((each == number).all()), number)
    del one, two, three, each
    pool.close()
    inner.close()
    clean()
    expect(pool.reserved_bytes == 0, pool.reserved_bytes)


@check("recorded")
def a_trainer_sleeps_between_its_steps() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    reference = copy.deepcopy(model)
    batches = [cuda(128, 512) for _ in range(12)]

    def train(run: Callable[..., Any], module: torch.nn.Module, sleeps: bool) -> torch.Tensor:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        losses = []
        for number, batch in enumerate(batches):
            loss = run(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
            del loss
            if sleeps and number % 3 == 2:
                allocator.sleep()
                allocator.wake()
        return torch.stack(losses)

    close(train(compiled(model), model, True), train(reference, reference, False))
    close(dict(model.named_parameters()), dict(reference.named_parameters()))
    del model, reference
    fresh()


@check("recorded")
def one_pool_of_two_sleeps() -> None:
    pools = [allocator.pool(sleeps=True) for _ in range(2)]
    _in_turns(pools)
    fresh()
    for pool in pools:
        pool.close()


def _in_turns(pools: list[allocator.Pool]) -> None:
    models, runs, expected = [], [], []
    x = cuda(32, 2048)
    with torch.no_grad():
        for pool in pools:
            with pool:
                models.append(layers(4))
            runs.append(compiled(models[-1]))
            for _ in range(4):
                runs[-1](x)
            expected.append(runs[-1](x).clone())
        for turn in range(6):
            asleep, awake = turn % 2, 1 - turn % 2
            before = free_bytes()
            held = pools[asleep].reserved_bytes
            pools[asleep].sleep()
            expect(free_bytes() - before >= GIVEN * held, free_bytes() - before, held)
            expect(torch.equal(runs[awake](x), expected[awake]))
            refused(partial(runs[asleep], x), "sleeps; wake it first")
            pools[asleep].wake()
            expect(torch.equal(runs[asleep](x), expected[asleep]))


@check("installed")
def out_of_memory_asks_recordings_to_give_way() -> None:
    fresh()
    clean()
    model = layers(4)
    run = compiled(model)
    x = cuda(16384, 2048)
    with torch.no_grad():
        for _ in range(4):
            run(x)
        torch.cuda.synchronize()
        pool = runtime.tree(0).device.pool_bytes()
        expect(pool > 128 * MIB, pool)
        allocator.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((allocator.memory_reserved() + 16 * MIB) / total)
        try:
            served = torch.empty(pool // 2, dtype=torch.uint8, device="cuda")
            served.zero_()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        del served
        close(run(x), model(x))
    del model, run
    fresh()


@check("plain")
def plain_segments_cannot_sleep() -> None:
    pool = allocator.pool(sleeps=True)
    with pool:
        kept = cuda(1024)
    before = kept.clone()
    try:
        pool.sleep()
    except Asleep as error:
        expect("segments are plain" in str(error), error)
    else:
        raise AssertionError("it was not refused")
    expect(torch.equal(kept, before) and not pool.asleep)
    del kept
    pool.close()
