"""CUDA graphs end to end: programs that users write, equal to eager, run from recordings."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import multigraph_backend
from multigraph_backend import allocator
from multigraph_backend.allocator import ended_pools
from multigraph_backend.backend import multigraph
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.devices.cuda import CudaDevice
from multigraph_backend.cudagraphs.devices.extension_pool import ExtensionPool
from multigraph_backend.cudagraphs.devices.memory_pool import TorchPool
from multigraph_backend.cudagraphs.recordings import settling
from multigraph_backend.cudagraphs.recordings.recording import NotAllRecorded
from tests.support.gpu.programs import CUDA, close, compiled, fresh, tree_counts


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    fresh()


def counts() -> dict[str, int]:
    return multigraph_backend.stats()


def unrecorded() -> dict[str, int]:
    """Reasons of calls that ran unrecorded though they were not first ones, over all pieces in the trees."""
    found: dict[str, int] = {}
    for tree in runtime.trees():
        for node in tree.root.below():
            if node.keyed is not None:
                for reason, count in node.keyed.reasons.items():
                    if reason != "first call":
                        found[reason] = count
    return found


class Recorded:
    """What was recorded and replayed since it was made."""

    def __init__(self) -> None:
        self.before = {name: tree_counts(name) for name in ("recordings", "unrecorded", "clones", "failed")}

    def __getattr__(self, name: str) -> int:
        return tree_counts(name) - self.before[name]


class Net(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        self.calls.add_(h.detach().mean(0))
        return self.second(h).softmax(-1)


# ---------------------------------------------------------------- inference


def test_epsilons_of_norms_cut_nothing_off() -> None:
    """With dynamic sizes they are inputs on the CPU, which nothing reads once they are constants."""
    model = torch.nn.Sequential(*(torch.nn.RMSNorm(64, eps=1e-6) for _ in range(3))).to(CUDA)
    run = torch.compile(model, backend=multigraph, dynamic=True, options={"record_small": True})
    before = Recorded()
    with torch.no_grad():
        for rows in (4, 4, 4, 8):
            x = torch.randn(rows, 64, device=CUDA)
            close(run(x), model(x))
    assert before.recordings >= 1
    assert "cut by" not in str(multigraph_backend.explain())


class Scaled(torch.nn.Module):
    """A norm as models write it, and a scale: floats that the GPU computes with, of which the backward wants one."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.eps, self.scale = torch.nn.Parameter(torch.randn(64)), 1e-6, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return x + (y * self.scale).sin()


def _scaled() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(Scaled(scale) for scale in (0.5, 1.25, -0.75))).to(CUDA)


def test_floats_that_the_gpu_computes_with_cut_nothing_off() -> None:
    model = _scaled()
    run = torch.compile(model, backend=multigraph, dynamic=True, options={"record_small": True})
    before = Recorded()
    with torch.no_grad():
        for call in range(12):
            if call in (6, 9):
                model[1].scale = float(call)  # from now on another value, and then one more
            x = torch.randn(4 + call % 2, 64, device=CUDA)
            close(run(x), model(x))
    assert before.recordings >= 1
    assert before.unrecorded <= 3
    assert "cut by" not in str(multigraph_backend.explain())


def test_floats_that_are_saved_for_a_backward_stay_where_it_expects_them() -> None:
    model = _scaled()
    run = torch.compile(model, backend=multigraph, dynamic=True, options={"record_small": True})
    before = Recorded()
    for call in range(8):
        if call == 5:
            model[2].scale = 3.0
        x = torch.randn(4, 64, device=CUDA, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        parameters = list(model.parameters())
        grads = torch.autograd.grad(run(x).square().sum(), (x, *parameters))
        wanted = torch.autograd.grad(model(same).square().sum(), (same, *parameters))
        for grad, want in zip(grads, wanted, strict=True):  # sums of what is as large as the largest of them
            torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    assert before.recordings >= 2
    assert "cut by" not in str(multigraph_backend.explain())


def test_numbers_of_a_program_are_where_it_has_them() -> None:
    """One is a tensor on the CPU that the program changes; what it computes of it stays there."""

    def step(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * t + x.sin(), t + 1

    run = torch.compile(step, backend=multigraph, dynamic=True, options={"record_small": True})
    t = torch.tensor(0.25)
    for value in (0.25, 0.5, -0.0, 0.0, float("inf"), 0.5, 0.5, 2.0, 2.0):
        t.fill_(value)
        x = torch.randn(64, device=CUDA)
        y, after = run(x, t)
        assert after.device.type == "cpu"
        close(y, x * t + x.sin())
        close(after, t + 1)


def test_a_graph_of_the_users_own_reads_its_numbers_at_each_replay() -> None:
    model = _scaled()
    run = torch.compile(model, backend=multigraph, dynamic=True, options={"record_small": True})
    x = torch.randn(4, 64, device=CUDA)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(x)
        with torch.cuda.graph(graph, stream=stream):
            y = run(x)
        wanted = model(x).clone()
        with torch.cuda.stream(stream):
            for scale in range(40):  # others push the values out of what is kept
                model[0].scale = float(scale)
                run(x)
        for _ in range(2):
            torch.cuda.synchronize()
            graph.replay()
            close(y, wanted)


def test_a_thread_that_looks_at_frames_spoils_no_recording() -> None:
    """As profilers do that sample within the process: frames of operators hold what these were given."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            frames = sys._current_frames()
            stop.wait(0.003)
            del frames

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            q = (x * 2).sin()
            x = torch.nn.functional.scaled_dot_product_attention(q, q + 1, q * 3, attn_mask=mask)
        return x

    run, made = compiled(f), Recorded()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        for size in range(2, 10):
            mask = torch.randn(64, 64, device=CUDA)
            for _ in range(3):
                x = torch.randn(size, 4, 64, 32, device=CUDA)
                with torch.no_grad():
                    close(run(x, mask), f(x, mask))
    finally:
        stop.set()
        looking.join()
    assert made.recordings >= 8
    assert made.failed == 0


def test_inference_is_recorded_once_for_each_size_and_replayed() -> None:
    model = Net().to(CUDA).eval()
    reference = copy.deepcopy(model)
    run, seen = compiled(model), Recorded()
    with torch.no_grad():
        for batch in (4, 8, 4, 8, 4, 8, 4, 8):
            x = torch.randn(batch, 64, device=CUDA)
            close(run(x), reference(x))
    close(model.calls, reference.calls)
    assert seen.recordings >= 2
    assert unrecorded() == {}


def test_the_first_call_takes_the_memory_that_its_recording_takes_later() -> None:
    rows = 1 << 21  # 16 MiB for each column of an intermediate, in float64: sums of so many are exact enough

    def wide(x: torch.Tensor) -> torch.Tensor:
        y = x.expand(rows, 16).cumsum(1)  # no fusion across a scan
        return y.cumsum(0)[-1] + y.sum(0)

    run = compiled(wide)
    x = torch.randn(16, device=CUDA, dtype=torch.float64)
    device = runtime.tree(0).device
    device.empty_cache()
    before = device.reserved_bytes()
    run(x)
    torch.cuda.synchronize()
    device.empty_cache()
    after_one = device.reserved_bytes() - before
    for _ in range(4):
        run(x)
    assert after_one > rows * 16 * 8
    assert tree_counts("warm-ups in the pool") >= 1
    assert device.reserved_bytes() - before <= after_one + (32 << 20)
    torch.testing.assert_close(run(x), wide(x), rtol=1e-2, atol=1.0)


def test_the_last_output_is_held_while_the_next_is_made() -> None:
    run = compiled(lambda x: (x * 2).sin() + 1)
    outputs, inputs = [], [torch.randn(32, 32, device=CUDA) for _ in range(10)]
    for x in inputs:
        y = run(x)
        outputs.append(y)
    close(outputs, [(x * 2).sin() + 1 for x in inputs])
    assert unrecorded() == {}


def test_one_compiled_function_after_another_and_an_output_fed_back() -> None:
    f, g = compiled(lambda x: torch.relu(x @ x.t()) + 1), compiled(lambda y: (y.cos() * 2).sum(0))
    x = torch.randn(32, 32, device=CUDA)
    for _ in range(6):
        y = f(x)
        z = g(y)
        close(z, ((torch.relu(x @ x.t()) + 1).cos() * 2).sum(0))
        x = torch.randn(32, 32, device=CUDA)
    step = compiled(lambda h: torch.tanh(h + 0.5))
    h = torch.randn(16, device=CUDA)
    expected = h
    for _ in range(12):
        h, expected = step(h), torch.tanh(expected + 0.5)
        close(h, expected)


def test_a_second_function_changes_the_output_of_the_first_in_place() -> None:
    f, g = compiled(lambda x: x * 2), compiled(lambda y: y.add_(1))
    for _ in range(5):
        x = torch.randn(64, device=CUDA)
        y = f(x)
        g(y)
        close(y, x * 2 + 1)


def test_a_copy_to_the_host_in_the_middle_costs_one_cut() -> None:
    def fetches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x @ w)
        scale = (h.mean().cpu() + 1).to(CUDA)
        return (h * scale).sin()

    run, seen = compiled(fetches), Recorded()
    w = torch.randn(64, 64, device=CUDA)
    for _ in range(6):
        x = torch.randn(32, 64, device=CUDA)
        close(run(x, w), fetches(x, w))
    assert seen.recordings >= 2
    assert unrecorded() == {}
    assert "recordings on device 0" in str(multigraph_backend.explain())


def test_pools_end_while_the_user_has_one_open() -> None:
    """torch aborts a process in which a pool's object goes then."""
    run = compiled(lambda x: torch.relu(x @ x).sum(1))
    x = torch.randn(512, 512, device=CUDA)
    for _ in range(3):
        close(run(x), torch.relu(x @ x).sum(1))
    assert not ended_pools.allocates_into_a_pool(0)
    mine = torch.cuda.MemPool()
    seen: list[bool] = []
    with torch.cuda.use_mem_pool(mine):
        thread = threading.Thread(target=lambda: seen.append(ended_pools.allocates_into_a_pool(0)))
        thread.start()
        thread.join()
        assert seen == [True]
        multigraph_backend.release()
        for _ in range(3):
            close(run(x), torch.relu(x @ x).sum(1))
        multigraph_backend.release()
        pool = allocator.pool()
        pool.close()
    for _ in range(3):
        close(run(x), torch.relu(x @ x).sum(1))
    multigraph_backend.release()
    assert not ended_pools._over
    assert counts()["pool_held_bytes"] == 0


def test_inside_a_capture_of_the_user() -> None:
    run = compiled(lambda x: (x * 3).cos())
    x = torch.randn(64, device=CUDA)
    for _ in range(3):
        run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    x.normal_()
    graph.replay()
    close(y, (x * 3).cos())


def test_a_custom_op_that_reads_a_global_is_not_recorded_unless_declared_safe() -> None:
    state = {"scale": 1.0}

    @torch.library.custom_op("multigraph_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * state["scale"]

    scaled.register_fake(lambda x: torch.empty_like(x))

    def f(x: torch.Tensor) -> torch.Tensor:
        return scaled((x + 1).sin()).cos() * 2

    run, seen = compiled(f), Recorded()
    for round_ in range(6):
        state["scale"] = 1.0 + round_
        x = torch.randn(64, device=CUDA)
        close(run(x), f(x))
    assert seen.recordings >= 2
    torch._dynamo.reset()
    state["scale"] = 2.0
    declared, seen = compiled(f, safe=["multigraph_test::scaled"], cudagraphs="require"), Recorded()
    for _ in range(4):
        x = torch.randn(64, device=CUDA)
        close(declared(x), f(x))
    assert seen.recordings >= 1


def test_an_operator_with_two_results_costs_one_cut() -> None:
    @torch.library.custom_op("multigraph_test::both", mutates_args=())
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    both.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = both(x @ w)
        return a @ w + b

    run, seen = compiled(function), Recorded()
    w = torch.randn(64, 64, device=CUDA)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(8, 64, device=CUDA)
            close(run(x, w), function(x, w))
    assert 2 <= seen.recordings <= 3  # the results may lie where they lay at first, and are read there once
    assert unrecorded() == {}


def test_require_names_each_op_that_cannot_be_recorded() -> None:
    def fetches(x: torch.Tensor) -> torch.Tensor:
        return x * (x.mean().cpu() + 1).to(CUDA)

    with pytest.raises(NotAllRecorded, match="cudagraphs='require'") as caught:
        compiled(fetches, cudagraphs="require")(torch.randn(8, device=CUDA))
    text = str(caught.value)
    assert text.count("device_put") + text.count("_to_copy") >= 2
    assert re.search(r"(device_put|_to_copy).* \(and \d+ more\)$", text.splitlines()[0])  # some show that line alone
    assert "x.mean().cpu()" in text
    run = compiled(lambda x: x.sin() + 1, cudagraphs="require")
    for _ in range(3):
        x = torch.randn(8, device=CUDA)
        close(run(x), x.sin() + 1)


def test_switched_off() -> None:
    seen = Recorded()
    run = compiled(lambda x: x.sin() + 1, cudagraphs=False)
    for _ in range(3):
        x = torch.randn(8, device=CUDA)
        close(run(x), x.sin() + 1)
    assert (seen.recordings, seen.unrecorded) == (0, 0)


# ---------------------------------------------------------------- parameters that move


def test_ten_layers_of_one_compiled_function() -> None:
    @torch.compile(backend=multigraph)
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w) + x

    weights = [torch.nn.Parameter(torch.randn(32, 32, device=CUDA) / 8) for _ in range(10)]
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 32, device=CUDA)
            expected = x
            for w in weights:
                x, expected = layer(x, w), torch.relu(expected @ w) + expected
            close(x, expected)


def test_parameters_that_the_user_replaces() -> None:
    model = Net().to(CUDA).eval()
    run = compiled(model)
    with torch.no_grad():
        for round_ in range(8):
            if round_ % 2:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone() + 0.01
            x = torch.randn(4, 64, device=CUDA)
            h = torch.relu(model.first(x))
            close(run(x), model.second(h).softmax(-1))


# ---------------------------------------------------------------- training


def train(
    run: Callable[..., Any], model: torch.nn.Module, steps: int, micro: int, batches: list[torch.Tensor], late: bool
) -> list[torch.Tensor]:
    """`steps` of SGD over `micro` batches each; `late`: gradients are zeroed after the forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        if not late:
            optimizer.zero_grad()
        for index in range(micro):
            loss = run(batches[step * micro + index]).square().mean()
            if late and index == 0:
                optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses


@pytest.mark.parametrize("late", [False, True], ids=["zeroed before", "zeroed after the forward"])
@pytest.mark.parametrize("micro", [1, 3])
def test_training_with_gradient_accumulation(micro: int, late: bool) -> None:
    model = Net().to(CUDA)
    reference = copy.deepcopy(model)
    batches = [torch.randn(16, 64, device=CUDA) for _ in range(8 * micro)]
    seen = Recorded()
    losses = train(compiled(model), model, 8, micro, batches, late)
    expected = train(reference, reference, 8, micro, batches, late)
    close(torch.stack(losses), torch.stack(expected))
    close(dict(model.named_parameters()), dict(reference.named_parameters()))
    assert seen.recordings >= 2
    assert unrecorded() == {}
    assert late or seen.clones == 0  # accumulated gradients stay where they are


def test_several_forwards_before_their_backwards_and_a_backward_twice() -> None:
    model = Net().to(CUDA)
    reference = copy.deepcopy(model)
    run = compiled(model, inductor={"joint_graph_constant_folding": True})
    for step in range(6):
        xs = [torch.randn(8, 64, device=CUDA) for _ in range(3)]
        for callee, net in ((run, model), (reference, reference)):
            net.zero_grad()
            losses = [callee(x).square().sum() for x in xs]
            if step % 2:
                losses[1].backward(retain_graph=True)
            sum(losses).backward()
        close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_checkpointing_inside_and_around() -> None:
    model = Net().to(CUDA)
    reference = copy.deepcopy(model)
    model.register_buffer("calls", None)
    reference.register_buffer("calls", None)
    for net in (model, reference):
        net.forward = lambda x, net=net: net.second(torch.relu(net.first(x))).softmax(-1)  # type: ignore[method-assign]

    def inside(net: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.utils.checkpoint.checkpoint(net.forward, x, use_reentrant=False).square()

    around = compiled(model.forward)
    for run in (
        compiled(inside(model)),
        lambda x: torch.utils.checkpoint.checkpoint(around, x, use_reentrant=False).square(),
    ):
        for _ in range(5):
            x = torch.randn(8, 64, device=CUDA)
            model.zero_grad()
            reference.zero_grad()
            run(x).sum().backward()
            inside(reference)(x).sum().backward()
            close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


_held: list[torch.Tensor] = []


def _emptied(saved: torch.Tensor) -> torch.Tensor:
    """As those do that keep activations on the host."""
    host = saved.cpu()
    saved.data = torch.empty(0, device=CUDA, dtype=saved.dtype)
    return host


def _kept(saved: torch.Tensor) -> torch.Tensor:
    _held.append(saved)
    return saved


@pytest.mark.parametrize("pack", [_emptied, _kept])
def test_hooks_for_saved_tensors_in_some_steps(pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In the steps without them the tensors that are saved are those of the last such step."""
    model = Net().to(CUDA)
    reference = copy.deepcopy(model)
    run, seen = compiled(model), Recorded()
    for step in range(16):
        x = torch.randn(8, 64, device=CUDA)
        model.zero_grad()
        reference.zero_grad()
        lasting = {tensor.data_ptr() for tensor in (x, *model.parameters(), *model.buffers())}

        def packed(saved: torch.Tensor, lasting: set[int] = lasting) -> torch.Tensor:
            return saved if saved.data_ptr() in lasting else pack(saved)

        with contextlib.ExitStack() as hooks:
            if step % 3 == 2:
                hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(packed, lambda saved: saved.to(CUDA)))
            output = run(x)
        output.square().sum().backward()
        reference(x).square().sum().backward()
        close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
        if step % 4 == 3:
            _held.clear()
    _held.clear()
    assert seen.recordings >= 2


def test_a_tensor_that_is_taken_out_of_the_graph_stays_what_it_is() -> None:
    model = Net().to(CUDA)
    run = compiled(model)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(10):
        output = run(torch.randn(8, 64, device=CUDA))
        node = output.grad_fn
        while node is not None and not hasattr(node, "saved_tensors"):
            node = node.next_functions[0][0]
        assert node is not None
        saved = list(node.saved_tensors)
        output.square().sum().backward()  # may write to what is saved for it, as in stock
        held += [(tensor, tensor.clone()) for tensor in saved]
        del output, node, saved
        for tensor, content in held:
            close(tensor, content)
        held = held[-3:]


def test_gradients_kept_by_hooks_and_on_inputs() -> None:
    model = Net().to(CUDA)
    run = compiled(model)
    kept: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    model.first.weight.register_hook(kept.append)
    reference = copy.deepcopy(model)
    reference.first.weight._backward_hooks = None
    reference.first.weight.register_hook(lambda grad: expected.append(grad.clone()))
    inputs = []
    for _ in range(6):
        data = torch.randn(8, 64, device=CUDA)
        x, y = data.clone().requires_grad_(), data.clone().requires_grad_()
        run(x).square().sum().backward()
        reference(y).square().sum().backward()
        inputs.append((x, y))
    close(kept, expected)
    close([x.grad for x, _ in inputs], [y.grad for _, y in inputs])


# ---------------------------------------------------------------- threads, failures, memory


def test_eight_threads_share_one_set_of_recordings() -> None:
    model = Net().to(CUDA).eval()
    model.register_buffer("calls", None)
    model.forward = lambda x: model.second(torch.relu(model.first(x)))  # type: ignore[method-assign]
    run, seen = compiled(model.forward), Recorded()
    with torch.no_grad():
        run(torch.randn(4, 64, device=CUDA))
    errors: list[BaseException] = []

    def work(drawn: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                for row in drawn:
                    x = row * 1
                    y = run(x)
                    z = y * 2
                    close(z, model.second(torch.relu(model.first(x))) * 2)
        except BaseException as error:
            errors.append(error)

    # not in the threads: torch raises where one draws while a capture begins (docs/sharp-edges.md)
    threads = [threading.Thread(target=work, args=(torch.randn(30, 4, 64, device=CUDA),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert seen.recordings <= 3


@pytest.mark.parametrize("safe", [False, True], ids=["between recordings", "inside of a recording"])
def test_an_operator_waits_for_a_thread_that_calls_compiled_code(safe: bool) -> None:
    name = f"multigraph_test::waits_{'inside' if safe else 'between'}"
    waits = [True]
    given = torch.randn(8, device=CUDA)  # a capture with an operator that may draw random numbers has the generator

    @torch.library.custom_op(name, mutates_args=())
    def waiting(x: torch.Tensor) -> torch.Tensor:
        def work() -> None:
            with torch.no_grad():
                y = given * 2
                close(other(y), y.cos() + 1)

        if waits[0]:
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "it never returns"
        return x * 3

    waiting.register_fake(lambda x: torch.empty_like(x))
    other = compiled(lambda y: y.cos() + 1)
    run = compiled(lambda x: waiting(x.sin()) - 1, safe=[name] if safe else [])
    seen = Recorded()
    with torch.no_grad():
        for _ in range(2):
            other(torch.randn(8, device=CUDA))
        for _ in range(4):
            x = torch.randn(8, device=CUDA)
            close(run(x), x.sin() * 3 - 1)
        waits[0] = False
        for _ in range(2):
            x = torch.randn(8, device=CUDA)
            close(run(x), x.sin() * 3 - 1)
            close(other(x), x.cos() + 1)
    assert seen.recordings >= 2


def test_a_copy_from_unpinned_memory_leaves_the_process_healthy() -> None:
    @torch.library.custom_op("multigraph_test::table", mutates_args=())
    def table(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(float(x.shape[0])).to(x.device)

    table.register_fake(lambda x: torch.empty_like(x))
    run = compiled(lambda x: table(x * 2) + 1, safe=["multigraph_test::table"])
    other = compiled(lambda x: torch.nn.functional.dropout(x.sin(), 0.5) + x)
    for _ in range(6):
        x = torch.randn(32, device=CUDA)
        close(run(x), x * 2 + torch.arange(32.0, device=CUDA) + 1)
        y = other(x)
        kept = y == x
        close(y[~kept], (x.sin() * 2 + x)[~kept])
    torch.randn(8, device=CUDA).sum().item()


def test_recordings_go_with_the_code_and_their_memory_with_them() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = allocator.memory_reserved()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(CUDA)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            run(torch.randn(2048, 1024, device=CUDA))
    assert runtime.tree(0).size > 0
    del run, model
    torch._dynamo.reset()
    gc.collect()
    assert runtime.tree(0).size == 0
    torch.cuda.empty_cache()
    assert allocator.memory_reserved() <= before + (4 << 20)


def test_they_live_in_pools_of_the_process_s_allocator() -> None:
    device = runtime.tree(0).device
    assert isinstance(device, CudaDevice)
    extension = os.environ.get("MULTIGRAPH_ALLOCATOR") == "1"  # the allocator's tests run this file with it
    assert isinstance(device._pool, ExtensionPool if extension else TorchPool)


# argument 1, if any: "save" or "load"; argument 2: the file of artifacts
TRAINED_ELSEWHERE = """
import torch, json, sys
import multigraph_backend
from torch._dynamo.utils import counters
from multigraph_backend.cudagraphs import runtime
mode, file = sys.argv[1:] or (None, None)
torch.manual_seed(0)
if mode == "load":
    torch.compiler.load_cache_artifacts(open(file, "rb").read())
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
inputs = {batch: torch.randn(batch, 64, device="cuda") for batch in (4, 6)}  # new ones might lie elsewhere
run = torch.compile(model, backend="multigraph", dynamic=True, options={"specialize": [{"input[0]": 4}]})
for batch in (4, 6, 4, 6, 4, 6):
    x = inputs[batch].normal_()
    y = run(x)
    torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-3)
    y.sum().backward()
if mode == "save":
    open(file, "wb").write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({
    "recordings": sum(tree.counts["recordings"] for tree in runtime.trees()),
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "codegen": counters["inductor"]["fxgraph_cache_miss"],
    "failures": multigraph_backend.stats()["failures"],
}))
"""


def trained_elsewhere(cache: Any, *arguments: str) -> dict[str, int]:
    """What a process with this folder of caches counted."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    words = [sys.executable, "-c", TRAINED_ELSEWHERE, *arguments]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    counted: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return counted


def test_another_process_takes_everything_from_the_caches_and_records_again(tmp_path: Any) -> None:
    first, second = trained_elsewhere(tmp_path), trained_elsewhere(tmp_path)
    assert first["recordings"] >= 4
    assert second["recordings"] == first["recordings"]
    assert (second["misses"], second["codegen"], second["failures"]) == (0, 0, 0)
    assert second["hits"] >= 2


def test_artifacts_carry_the_compiled_code_to_a_machine_without_caches(tmp_path: Any) -> None:
    file = str(tmp_path / "artifacts")
    saved = trained_elsewhere(tmp_path / "here", "save", file)
    loaded = trained_elsewhere(tmp_path / "there", "load", file)
    assert saved["misses"] > 0
    assert (loaded["misses"], loaded["codegen"], loaded["failures"]) == (0, 0, 0)
    assert loaded["recordings"] == saved["recordings"]


# ---------------------------------------------------------------- copies that are handed out


@torch.no_grad()
@pytest.mark.usefixtures("_without_poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_copies_of_outputs_that_are_held_take_one_kernel(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x[:1] - 2, (x * 2)[:3].clone(), x.t() + 3

    run = compiled(function, record_small=True)
    held: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
    for _ in range(10):
        x = torch.randint(-8, 9, (513, 1024), device=CUDA).to(dtype)
        held.append((x, run(x)))  # so that each call finds the last one's results alive
    for x, outputs in held:
        for output, expected in zip(outputs, function(x), strict=True):
            close(output, expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        held.append((x, run(x)))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.device_time_total > 0]
    assert any("copy_words" in name for name in names), names
    assert not any("multi_tensor" in name for name in names), names
    for output, expected in zip(held[-1][1], function(x), strict=True):
        close(output, expected)


@torch.no_grad()
def test_copies_of_outputs_of_odd_sizes_are_right() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x > 0, x[:0] + 1, x[:1] > 1, x.sum(), x.to(torch.int8)

    run = compiled(function, record_small=True)
    held = []
    for number in range(10):
        x = torch.randn(7 + number % 2, device=CUDA)
        held.append((x, run(x)))
    for x, outputs in held:
        for output, expected in zip(outputs, function(x), strict=True):
            close(output, expected)


# ---------------------------------------------------------------- what a recording costs


@pytest.fixture
def _without_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where costs are measured: filling memory takes longer than any replay."""
    monkeypatch.setattr(runtime.tree(0), "poisons", False)


@pytest.fixture
def _without_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large inputs that move are copied."""
    monkeypatch.setattr(runtime.tree(0).device, "patching", None)


@pytest.mark.usefixtures("_without_poison", "_without_patches")
def test_a_piece_that_does_not_pay_runs_unrecorded_unless_asked_for() -> None:
    inputs = [torch.randn(128 << 20, device=CUDA) for _ in range(3)]  # to copy one takes longer than to launch a kernel
    for small, kept in ((False, 0), (True, 1)):
        fresh()
        run = compiled(lambda x: x + 1, record_small=small)
        for number in range(30):
            x = inputs[number % 3]
            close(run(x), x + 1)
        assert runtime.tree(0).size >= kept
        (report,) = multigraph_backend.explain().recordings
        refused = [piece.refused for piece in report.pieces if piece.refused]
        assert len(refused) == 1 - kept
        assert all("it does not pay: a replay takes" in reason for reason in refused)


@pytest.mark.usefixtures("_without_poison")
def test_a_piece_that_pays_is_kept() -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = torch.softmax(x @ x.t() / 64, -1)
        return x

    run = compiled(many, record_small=False)
    with torch.no_grad():
        for _ in range(30):
            x = torch.randn(64, 64, device=CUDA)
            close(run(x), many(x))
    assert runtime.tree(0).size >= 1
    assert unrecorded() == {}


def test_what_loading_a_kernel_takes_is_no_cost_of_copying() -> None:
    # in a process of its own: the first copy of a number of two bytes loads torch's kernel for that
    environment = {name: value for name, value in os.environ.items() if name != "MULTIGRAPH_DEBUG"}
    words = [sys.executable, str(Path(__file__).parents[1] / "support/gpu/paying.py")]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == ""


def test_inputs_of_all_kinds_are_staged_by_one_launch() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool]

    def total(*xs: torch.Tensor) -> torch.Tensor:
        return sum((x.double() * (index + 1) for index, x in enumerate(xs)), torch.zeros((), device=CUDA))

    def made() -> list[torch.Tensor]:
        return [(torch.randn(48, 32, device=CUDA) * 9).to(kind) for kind in kinds]

    run = compiled(total)
    for step in range(8):
        xs = made()
        if step == 5:  # does not lie on 16 bytes
            xs[1] = torch.randn(48 * 32 + 1, device=CUDA).bfloat16()[1:].view(48, 32)
        close(run(*xs), total(*xs))
    nodes = [node for node in runtime.tree(0).root.below() if node.recording is not None and node.recording.buffers]
    assert nodes
    # the kernel's, not torch's copy
    assert all(node.recording.stager is not None and node.recording.stager.kernel is not None for node in nodes)


def test_recordings_stay_within_their_limits() -> None:
    run = compiled(lambda x: torch.softmax(x @ x.t(), -1), specialize=[])
    multigraph_backend.limit_recordings(count=3)
    try:
        for _ in range(2):
            for size in (8, 16, 24, 32, 40, 48):
                for _ in range(2):
                    x = torch.randn(size, 64, device=CUDA)
                    close(run(x), torch.softmax(x @ x.t(), -1))
                assert runtime.tree(0).size <= 3
        assert tree_counts("evicted") > 0
    finally:
        multigraph_backend.limit_recordings()


@pytest.mark.parametrize("as_a_fraction", [False, True])
def test_what_does_not_fit_the_limit_of_bytes_runs_unrecorded_and_the_rest_stays(as_a_fraction: bool) -> None:
    fresh()
    run = compiled(lambda x: torch.softmax(x @ x.t(), -1), specialize=[])
    limit: float = 256 << 20  # of which the workspace of cuBLAS takes 32 MiB, or twice
    if as_a_fraction:
        limit = (limit + 0.5) / runtime.tree(0).device.total_bytes()
    multigraph_backend.limit_recordings(pool_bytes=limit)
    evicted = tree_counts("evicted")
    try:
        for _ in range(3):
            for size in (64, 128, 256, 512, 8192, 1024, 8256):
                x = torch.randn(size, 64, device=CUDA)
                close(run(x), torch.softmax(x @ x.t(), -1))
        tree = runtime.tree(0)
        assert tree.size >= 5
        assert tree_counts("evicted") - evicted <= 5
        assert tree.device.pool_bytes() <= 256 << 20
    finally:
        multigraph_backend.limit_recordings()


@pytest.mark.parametrize("order", ["ascending", "at random"])
def test_sizes_in_any_order_take_what_the_largest_takes_alone(order: str) -> None:
    sizes = range(1024, 8193, 1024)
    shuffled = list(sizes) if order == "ascending" else random.Random(0).sample(sizes, len(sizes))
    largest, _ = _pool_of_sizes([max(sizes)])
    gave_way = tree_counts("gave way")
    taken, recordings = _pool_of_sizes(shuffled)
    assert tree_counts("gave way") > gave_way
    assert recordings >= len(sizes)
    assert taken <= 1.02 * largest + (8 << 20)  # segments for small blocks, and what is not of the pool


def _pool_of_sizes(sizes: list[int]) -> tuple[int, int]:
    """The most that was reserved after calls of an MLP with so many rows, and how many recordings there are."""
    fresh()
    device = runtime.tree(0).device
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).to(CUDA)
    run = torch.compile(model, backend=multigraph, dynamic=True, options={"record_small": True})
    # all alive, so that none lies where another lay; the recordings of all sizes copy their inputs then
    inputs = {rows: [torch.randn(rows, 1024, device=CUDA) for _ in range(3)] for rows in sizes}
    with torch.no_grad():
        torch.cuda.synchronize()
        device.empty_cache()
        before = taken = device.reserved_bytes()
        for rows in sizes:
            for x in inputs[rows]:
                run(x)
                taken = max(taken, device.reserved_bytes())
        torch.cuda.synchronize()
        for rows in reversed(sizes):  # those that gave way are recorded again
            close(run(inputs[rows][1]), model(inputs[rows][1]))
            close(run(inputs[rows][2]), model(inputs[rows][2]))
    return taken - before, runtime.tree(0).size


def reasons() -> dict[str, int]:
    """Why calls ran unrecorded, first calls left out, also of pieces without a recording."""
    found: dict[str, int] = {}
    for tree in runtime.trees():
        for piece in tree.pieces:
            for keyed in piece.by_key.values():
                for reason, count in keyed.reasons.items():
                    if reason != "first call":
                        found[reason] = found.get(reason, 0) + count
    return found


def test_the_device_tells_what_is_free_and_what_is_cached() -> None:
    device = runtime.tree(0).device
    device.settle(60.0)
    device.empty_cache()
    free, cached, some = device.free_bytes(), device.cached_bytes(), 1 << 30
    assert 0 < free < device.total_bytes()
    kept = torch.empty(some, dtype=torch.uint8, device=CUDA)  # a part of it may lie in what is cached
    assert device.free_bytes() + device.cached_bytes() <= free + cached - some
    del kept
    assert device.cached_bytes() >= max(cached, some)
    torch.cuda.synchronize()
    device.empty_cache()
    assert device.free_bytes() > free - (64 << 20)


def test_a_process_with_little_free_memory_trains_as_without_recordings() -> None:
    fresh()
    runtime.forget()
    torch.cuda.empty_cache()
    model = Net().to(CUDA)
    reference = copy.deepcopy(model)
    run, seen = compiled(model), Recorded()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, reference)]
    elsewhere, failed = tree_counts("warm-ups elsewhere"), tree_counts("ran out of memory")
    free, total = torch.cuda.mem_get_info()
    ballast = torch.empty(free - int(0.04 * total), dtype=torch.uint8, device=CUDA)  # keep_free is 0.05
    try:
        for _ in range(6):
            x = torch.randn(32, 64, device=CUDA)
            for net, optimizer in zip((run, reference), optimizers, strict=True):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
            close(list(model.parameters()), list(reference.parameters()))
        assert seen.recordings == 0
        assert tree_counts("warm-ups elsewhere") > elsewhere
        assert tree_counts("ran out of memory") == failed
        assert any("too little of the device's memory" in reason for reason in reasons())
    finally:
        del ballast
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _only(nbytes: int) -> Iterator[int]:
    """Inside, the process may take so many bytes more of the device; gives what it may have reserved then."""
    device, (free, total) = runtime.tree(0).device, torch.cuda.mem_get_info()
    if torch.cuda.get_allocator_backend() == "pluggable":  # torch limits the share of its own allocator alone
        ballast = torch.empty(free - nbytes, dtype=torch.uint8, device=CUDA)
        yield device.reserved_bytes() + nbytes
        del ballast
        device.empty_cache()
        return
    allowed = device.reserved_bytes() + nbytes
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        yield allowed
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_recordings_give_way_to_code_that_runs_out_of_memory() -> None:
    rows = 1 << 21  # 256 MiB for an intermediate, in float64

    def wide(x: torch.Tensor) -> torch.Tensor:
        y = x.expand(rows, 16).cumsum(1)  # no fusion across a scan
        return y.cumsum(0)[-1] + y.sum(0)

    def wider(x: torch.Tensor) -> torch.Tensor:
        return wide(x + 1)

    fresh()
    runtime.forget()
    x = torch.randn(16, device=CUDA, dtype=torch.float64)
    expected = wider(x)
    first = compiled(wide)
    for _ in range(4):
        first(x)
    tree = runtime.tree(0)
    assert tree.size >= 1
    tree.device.settle(60.0)
    tree.device.empty_cache()
    held, out = tree.device.pool_bytes(), tree_counts("ran out of memory")
    assert held > 2 * rows * 16 * 8
    # more than half of what a call takes is missing, and the recording has that
    with _only(int(0.6 * held)) as allowed:
        torch.testing.assert_close(compiled(wider)(x), expected, rtol=1e-2, atol=1.0)
        assert tree_counts("ran out of memory") == out + 1
        assert tree.size == 0
        assert tree.device.reserved_bytes() <= allowed
    for _ in range(4):
        torch.testing.assert_close(first(x), wide(x), rtol=1e-2, atol=1.0)
    assert tree.size >= 1


def test_a_number_that_grows_at_each_call_is_recorded_no_more() -> None:
    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return torch.softmax(x, -1) * position

    run, seen = compiled(at, specialize=[]), Recorded()
    for position in range(2, 202):
        x = torch.randn(8, 64, device=CUDA)
        close(run(x, position), at(x, position))
    assert seen.recordings <= 40


def test_the_account_of_memory_adds_up() -> None:
    fresh()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x @ x.t()) + 1, x.sum(0)

    run = compiled(both)
    y = z = torch.empty(0, device=CUDA)
    for _ in range(4):
        del y, z  # else they were moved out
        x = torch.randn(512, 512, device=CUDA)
        y, z = run(x)
    close((y, z), both(x))
    said = multigraph_backend.explain()
    (device,) = [entry for entry in said.recordings if entry.device == 0]
    alive = y.nbytes + z.nbytes
    assert sum(pool.live for pool in device.pools) == alive, said
    assert sum(entry.alive for entry in device.memory) + sum(pool.warm for pool in device.pools) == alive, said
    for pool in device.pools:
        assert pool.held == pool.live + pool.lent + pool.dead, said
        assert min(pool.live, pool.lent, pool.dead) >= 0, said
        segments = allocator.memory_snapshot()["segments"]
        held = sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == pool.id)
        assert pool.held == held, said
    for entry in device.memory:
        held = next(pool.held for pool in device.pools if pool.generation == entry.generation)
        assert alive == entry.kept <= entry.peak <= held, said
        assert entry.peak == entry.kept + entry.shared, said
    of_variants = [
        variant.memory
        for region in said.regions
        for variant in (*region.variants, region.generic)
        if variant.memory is not None
    ]
    assert sum(memory.recordings for memory in of_variants) == len(device.memory) >= 1, said
    assert sum(memory.kept for memory in of_variants) == sum(entry.kept for entry in device.memory), said
    now = counts()
    assert now["pool_live_bytes"] == alive
    assert now["pool_held_bytes"] == now["pool_live_bytes"] + now["pool_lent_bytes"] + now["pool_dead_bytes"]
    assert 0 <= now["graph_bytes"] == sum(entry.graph_bytes for entry in said.recordings) < 1 << 30
    del y, z
    assert counts()["pool_live_bytes"] == 0
    assert counts()["pool_held_bytes"] == now["pool_held_bytes"]


def test_a_snapshot_of_memory_has_recordings_by_name() -> None:
    fresh()
    run = compiled(shifted)
    y = torch.empty(0, device=CUDA)
    for _ in range(4):
        del y
        x = torch.randn(1 << 20, device=CUDA)
        y = run(x)
    close(y, shifted(x))
    snapshot = multigraph_backend.memory_snapshot()
    (device,) = [entry for entry in snapshot["multigraph"]["devices"] if entry["device"] == 0]
    ids = {tuple(pool["id"]) for pool in device["pools"]}
    ours = [segment for segment in snapshot["segments"] if tuple(segment["segment_pool_id"]) in ids]
    assert ours
    assert all(segment["frames"][0]["name"].startswith("recordings, pool ") for segment in ours)
    named = {
        block["address"]: block["frames"][0]["name"]
        for segment in ours
        for block in segment["blocks"]
        if block.get("frames")
    }
    label = device["recordings"][-1]["label"]
    assert named[y.untyped_storage().data_ptr()] == f"output of {label}"


def test_counts_walk_the_allocator_s_books_only_when_memory_was_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(shifted)
    for _ in range(3):
        run(torch.randn(1 << 20, device=CUDA))
    counts()
    walked = []
    monkeypatch.setattr(TorchPool, "segments", lambda pool: walked.append(pool) or [])
    assert counts()["pool_held_bytes"] > 0
    assert walked == []


def test_meta_tensors_are_no_reason_to_skip() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        shape = torch.empty(4, 8, device="meta").t()
        return torch.relu(x @ x.t()) + shape.shape[0]

    run, seen = compiled(mixed), tree_counts("recordings")
    for _ in range(4):
        x = torch.randn(16, 16, device=CUDA)
        close(run(x), mixed(x))
    assert tree_counts("recordings") > seen


def test_every_replay_is_checked_by_poison() -> None:
    assert runtime.tree(0).poisons  # all tests of this folder run in this mode


def test_a_call_on_another_stream_waits_for_what_the_default_stream_still_reads() -> None:
    function = compiled(lambda x: (x.sin() * 2).cos())
    side = torch.cuda.Stream()
    for _ in range(4):
        function(torch.randn(1 << 16, device=CUDA))
    for _ in range(4):
        first, second = torch.randn(1 << 16, device=CUDA), torch.randn(1 << 16, device=CUDA)
        torch.cuda.synchronize()
        y = function(first)
        torch.cuda._sleep(100_000_000)
        kept = y.clone()
        del y
        with torch.cuda.stream(side):
            got = function(second).clone()
        torch.cuda.synchronize()
        close(kept, (first.sin() * 2).cos())
        close(got, (second.sin() * 2).cos())
    assert tree_counts("recordings") >= 1


# ---------------------------------------------------------------- held outputs and other streams


LATE = 200_000_000  # cycles: some tenths of a second


def shifted(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin() + 1


def test_copies_to_the_host_behind_the_program_are_right() -> None:
    run, side, seen = compiled(shifted), torch.cuda.Stream(), Recorded()
    held, hosts = [], []
    for _ in range(6):
        x = torch.randn(1 << 20, device=CUDA)
        y = run(x)
        side.wait_stream(torch.cuda.current_stream())
        host = torch.empty(1 << 20, pin_memory=True)
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            host.copy_(y, non_blocking=True)
        held.append((x, y))
        hosts.append(host)
    side.synchronize()
    for (x, y), host in zip(held, hosts, strict=True):
        close(host, shifted(x).cpu())
        close(y, shifted(x))
    assert (seen.recordings, seen.clones) == (1, 1)
    assert unrecorded() == {}


def test_what_another_stream_writes_to_a_held_output_moves_with_it() -> None:
    run, side, seen = compiled(shifted), torch.cuda.Stream(), Recorded()
    held = []
    for _ in range(5):
        x = torch.randn(1 << 20, device=CUDA)
        y = run(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            y.add_(3)
        held.append((x, y))
    side.synchronize()
    for x, y in held:
        close(y, shifted(x) + 3)
    assert seen.clones == 1


def test_what_was_moved_is_there_for_a_stream_that_was_behind_it_before() -> None:
    run, side = compiled(shifted), torch.cuda.Stream()
    first, x, other = (torch.randn(1 << 26, device=CUDA) for _ in range(3))  # at three addresses: the input is copied
    run(first)
    y = run(x)
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    before, moved = y.data_ptr(), tree_counts("clones")
    z = run(other)
    assert tree_counts("clones") == moved + 1
    assert y.data_ptr() != before
    with torch.cuda.stream(side):
        read = y.clone()
    side.synchronize()
    close(read, shifted(x))
    close(z, shifted(other))


def test_the_device_is_not_waited_for_while_another_thread_captures() -> None:
    device = runtime.tree(0).device
    assert device.settle(5.0)
    begun, asked = threading.Event(), threading.Event()
    results: list[Any] = []

    def capture() -> None:
        x, graph = torch.randn(4096, device=CUDA), torch.cuda.CUDAGraph()
        x.sin()
        with torch.cuda.graph(graph):
            begun.set()
            asked.wait(30)
            y = x.sin()
        graph.replay()
        results.extend((y, x))

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(30)
    settled = device.settle(5.0)
    asked.set()
    thread.join()
    assert not settled
    (y, x) = results
    close(y, x.sin())
    assert device.settle(5.0)


# ---------------------------------------------------------------- outputs that are resized


def _grown(y: torch.Tensor) -> None:
    count = y.numel()
    y.resize_(3 * count)[count:] = 7


def _written_to(y: torch.Tensor) -> None:
    torch.mul(torch.ones(3 * y.numel(), device=CUDA), 3, out=y.resize_(0))


def _emptied(y: torch.Tensor) -> None:
    y.untyped_storage().resize_(0)


def _emptied_and_back(y: torch.Tensor) -> None:
    nbytes = y.untyped_storage().nbytes()
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(nbytes)
    y.fill_(5)


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("resize", [_grown, _written_to, _emptied, _emptied_and_back])
def test_outputs_that_the_user_resizes(resize: Callable[[torch.Tensor], None], kept: bool) -> None:
    run, seen, before = compiled(shifted), Recorded(), counts()["resized_outputs"]
    other, held = compiled(lambda x: (x.cos() + 1, x * x)), []
    for _ in range(6):
        x = torch.randn(4096, device=CUDA)
        y = run(x)
        close(y, shifted(x))
        resize(y)
        if kept:
            held.append((y, y.clone() if y.untyped_storage().nbytes() >= y.nbytes else None))
        del y
        close(other(x), (x.cos() + 1, x * x))
    for y, content in held:
        if content is not None:
            close(y, content)
    assert seen.recordings >= 2
    assert counts()["resized_outputs"] == before + 1
    assert unrecorded() == {}


def test_saved_tensors_that_hooks_take_out_and_put_back() -> None:
    """As code does that offloads them: the memory is given back in forward, and taken again in backward."""

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.host = tensor, tensor.cpu()
            self.nbytes = tensor.untyped_storage().nbytes()

    def pack(tensor: torch.Tensor) -> Any:
        if (tensor.is_leaf and tensor.requires_grad) or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return tensor
        kept = Kept(tensor)
        tensor.untyped_storage().resize_(0)
        return kept

    def unpack(kept: Any) -> torch.Tensor:
        if not isinstance(kept, Kept):
            return kept
        if kept.tensor.untyped_storage().nbytes() == 0:
            kept.tensor.untyped_storage().resize_(kept.nbytes)
        return kept.tensor.copy_(kept.host)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).sin() @ w).cos().sum()

    run, seen = compiled(function), Recorded()
    w = torch.randn(64, 64, device=CUDA, requires_grad=True)
    for _ in range(6):
        data = torch.randn(32, 64, device=CUDA)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            # the hooks empty what they are given, also an input that is saved
            loss = run(data.clone(), w)
        (gradient,) = torch.autograd.grad(loss, w)
        (expected,) = torch.autograd.grad(function(data, w), w)
        close(gradient, expected)
    assert seen.recordings >= 1


# ---------------------------------------------------------------- addresses that others keep


class Interface:
    """What another library knows of a tensor: where it lies."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__)


def _by_dlpack(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_dlpack(tensor.detach())


def _by_interface(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(Interface(tensor.detach()), device=CUDA)


@pytest.mark.parametrize("asked", [True, False], ids=["copies from the start", "copies once one was held"])
@pytest.mark.parametrize("share", [_by_dlpack, _by_interface])
def test_what_others_see_of_outputs_stays_right(share: Callable[[torch.Tensor], torch.Tensor], asked: bool) -> None:
    run, seen = compiled(shifted, copy_outputs=asked), Recorded()
    held, shared = [], []
    for step in range(10):
        x = torch.randn(4096, device=CUDA)
        y = run(x)
        held.append((x, y))
        if asked or step >= 2:  # the second call's output is moved by the third
            shared.append((y.data_ptr(), share(y)))
    for (x, y), (address, other) in zip(held[-len(shared) :], shared, strict=True):
        assert y.data_ptr() == other.data_ptr() == address
        close(other, shifted(x))
        y.add_(1)
        close(other, shifted(x) + 1)
    assert seen.recordings == 1
    assert seen.clones == (0 if asked else 1)
    assert unrecorded() == {}


def test_a_graph_of_the_user_over_an_output() -> None:
    run, seen = compiled(shifted, copy_outputs=True), Recorded()
    for _ in range(3):
        x = torch.randn(4096, device=CUDA)
        y = run(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        z = y * 2
    for _ in range(5):
        other = torch.randn(4096, device=CUDA)
        held = run(other)
        graph.replay()
        close(z, shifted(x) * 2)
        close(held, shifted(other))
    y.fill_(3)
    graph.replay()
    close(z, torch.full_like(z, 6))
    assert (seen.recordings, seen.clones) == (1, 0)


def test_a_graph_of_the_user_over_gradients() -> None:
    """An optimizer's step that the user has captured; gradients are zeroed in place."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(CUDA)
    reference = copy.deepcopy(model)
    run, seen = compiled(model, copy_outputs=True), Recorded()

    def backward(net: Callable[..., Any], x: torch.Tensor) -> None:
        net(x).square().mean().backward()

    def step(net: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.05)
                parameter.grad.zero_()

    batches = [torch.randn(16, 64, device=CUDA) for _ in range(10)]
    for x in batches[:3]:
        backward(run, x)
        backward(reference, x)
        step(model)
        step(reference)
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step(model)
    for x in batches[3:]:
        backward(run, x)
        backward(reference, x)
        graph.replay()
        step(reference)
    close(dict(model.named_parameters()), dict(reference.named_parameters()))
    assert addresses == [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    assert seen.recordings >= 2
    assert seen.clones == 0
    assert unrecorded() == {}


# ---------------------------------------------------------------- subclasses


class Weight(torch.nn.Parameter):
    """As bitsandbytes has them."""


class Loaded(torch.nn.Parameter):
    """As vLLM has them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Weight, Loaded])
def test_parameters_and_inputs_of_classes_that_change_nothing_beneath(kind: Any) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = kind(torch.randn(64, 64, device=CUDA) / 8, requires_grad=False)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ self.weight) * scale + self.weight.sum(0)

    layer = Layer()
    run, seen = compiled(layer), Recorded()
    with torch.no_grad():
        for _ in range(settling.MOST_STEPS + 6):  # a parameter that lies elsewhere at each call has steps warm up
            x = torch.randn(16, 64, device=CUDA)
            scale = kind(torch.randn(64, device=CUDA), requires_grad=False)
            y = run(x, scale)
            expected = torch.relu(x @ layer.weight.data) * scale.data + layer.weight.data.sum(0)
            close(y, expected)
            assert type(y) is torch.Tensor
    assert seen.recordings >= 1
    assert unrecorded() == {}
    assert all(node.calls for node in runtime.tree(0).root.below() if node.recording is not None)


def test_a_parameter_of_a_class_is_trained() -> None:
    model = Net().to(CUDA)
    model.first.weight = Weight(model.first.weight.detach().clone())
    reference = copy.deepcopy(model)
    seen = Recorded()
    batches = [torch.randn(16, 64, device=CUDA) for _ in range(8)]
    losses = train(compiled(model), model, 8, 1, batches, False)
    expected = train(reference, reference, 8, 1, batches, False)
    close(torch.stack(losses), torch.stack(expected))
    assert seen.recordings >= 2
    assert unrecorded() == {}
