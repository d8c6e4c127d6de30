"""Programs of two ranks over NCCL, each compared with the same program run eagerly, in one pair of processes.

    python tests/support/gpu/ranks_on_gpu.py RANK WORLD_SIZE PORT [NAME...]

A line `NAME: ok` says that a program was right, and that what it is about was at work.  Programs of the allocator
extension run only by name: some where it is the process's allocator (MULTIGRAPH_ALLOCATOR=1), some where it is not.
"""

from __future__ import annotations

import copy
import datetime
import faulthandler
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import multigraph_backend
from multigraph_backend.cudagraphs import output_code, runtime
from multigraph_backend.cudagraphs.output_code import RecordedCode
from multigraph_backend.cudagraphs.partition import cuts
from multigraph_backend.distributed import groups

PROGRAMS: dict[str, Callable[[int], None]] = {}
BY_NAME: dict[str, Callable[[int], None]] = {}
DEVICE = "cuda"
TIMEOUT = 60.0  # seconds of a collective


def program(function: Callable[[int], None]) -> Callable[[int], None]:
    PROGRAMS[function.__name__] = function
    return function


def installed(function: Callable[[int], None]) -> Callable[[int], None]:
    """A program for processes whose allocator is the extension."""
    BY_NAME[function.__name__] = function
    return function


def beside(function: Callable[[int], None]) -> Callable[[int], None]:
    """A program for processes in which the extension supplies pools."""
    BY_NAME[function.__name__] = function
    return function


def compiled(function: Any, **options: Any) -> Any:
    dynamic = options.pop("dynamic", False)
    options = {"record_small": True, "on_failure": "raise", **options}
    return torch.compile(function, backend="multigraph", dynamic=dynamic, options=options)


def counts(name: str) -> int:
    return multigraph_backend.stats()[name]


def replays() -> int:
    return sum(piece.replays for device in multigraph_backend.explain().recordings for piece in device.pieces)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    group: Any = dist.group.WORLD
    y = functional.all_reduce(torch.relu(x @ up) @ down, "sum", group)
    return x + functional.all_reduce(y.tanh(), "avg", group)


def weights(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(rank)
    return (
        torch.randn(64, 32, device=DEVICE, generator=generator) / 8,
        torch.randn(32, 64, device=DEVICE, generator=generator) / 8,
    )


def right(function: Any, rank: int, steps: int = 12, rows: Callable[[int], int] = lambda step: 16) -> None:
    parts = weights(rank)
    for step in range(steps):
        x = torch.randn(rows(step), 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(100 + step))
        with torch.no_grad():
            torch.testing.assert_close(function(x, *parts), mlp(x, *parts), rtol=1e-4, atol=1e-4)


_earlier: list[RecordedCode] = []


def made_here() -> list[RecordedCode]:
    """What was compiled since the program began."""
    return [code for code in output_code.living() if not any(code is other for other in _earlier)]


@program
def collectives_are_recorded_and_replayed(rank: int) -> None:
    right(compiled(mlp, cudagraphs="require"), rank)
    assert counts("recordings") == 1, multigraph_backend.explain()
    assert replays() >= 10
    assert any(tree.collectives.held() for tree in runtime.trees())
    (code,) = made_here()
    assert code.spec.whole
    assert [entry.kind for entry in code.spec.collectives] == ["all_reduce", "all_reduce"]


@program
def collectives_are_cut_where_asked(rank: int) -> None:
    right(compiled(mlp, collectives="cut"), rank)
    (code,) = made_here()
    assert code.spec.groups == ()
    assert {entry.reason for entry in code.spec.cuts} == {cuts.COLLECTIVES}
    assert not any(tree.collectives.held() for tree in runtime.trees())
    assert counts("recordings") >= 1


@program
def one_rank_replays_and_the_other_runs_the_same_code_unrecorded(rank: int) -> None:
    right(compiled(mlp, cudagraphs="auto" if rank == 0 else False), rank, 20)
    assert (counts("recordings") > 0) == (rank == 0)


@program
def one_rank_gives_its_recordings_up_and_records_again(rank: int) -> None:
    function = compiled(mlp)
    right(function, rank)
    if rank == 0:
        runtime.forget()
    right(function, rank)
    assert counts("recordings") == (2 if rank == 0 else 1)


@program
def another_variant_on_each_rank(rank: int) -> None:
    function = compiled(mlp, dynamic=True, specialize=[{"x[0]": 16}] if rank == 0 else [])
    right(function, rank, 24, lambda step: 16 if step % 3 else 8)
    assert counts("variant_calls") == (16 if rank == 0 else 0)
    assert counts("failures") == counts("eager_calls") == 0
    assert counts("recordings") >= 2


@program
def a_wait_behind_a_cut_keeps_both_out_of_recordings(rank: int) -> None:
    c10d: Any = torch.ops._c10d_functional
    group: Any = dist.group.WORLD
    name = group.group_name

    def apart(x: torch.Tensor) -> torch.Tensor:
        started = c10d.all_reduce(x.sin() * 2, "sum", name)
        on_host = x.cos().sum().cpu() + 1
        return c10d.wait_tensor(started) + on_host.to(x.device)

    function = compiled(apart)
    for step in range(6):
        x = torch.full((1024,), float(step + rank), device=DEVICE)
        torch.testing.assert_close(function(x), apart(x))
    specs = [code.spec for code in made_here()]
    # either Inductor has moved the wait to its start, or neither is recorded
    halves = [piece for spec in specs for piece in spec.pieces if piece.groups]
    assert all(piece.unrecorded in (None, cuts.APART) for piece in halves)
    assert counts("failed_recordings") == 0, multigraph_backend.explain()


@program
def a_collective_of_the_users_on_an_output_is_over_before_that_is_moved(rank: int) -> None:
    def local(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ up) @ down

    function, every = compiled(local), [weights(other) for other in range(dist.get_world_size())]
    generator = torch.Generator(DEVICE).manual_seed(5)
    inputs = [torch.randn(16, 64, device=DEVICE, generator=generator) for _ in range(6)]  # none at another's address
    with torch.no_grad():
        for x in inputs[:4]:
            torch.testing.assert_close(function(x, *every[rank]), local(x, *every[rank]), rtol=1e-4, atol=1e-4)
        assert counts("recordings") == 1
        reduced = function(inputs[4], *every[rank])
        torch.cuda.synchronize()
        time.sleep(rank)  # the others wait for the last
        begun = dist.all_reduce(reduced, async_op=True)
        other = function(inputs[5], *every[rank])
        assert begun is not None
        begun.wait()
        torch.testing.assert_close(other, local(inputs[5], *every[rank]), rtol=1e-4, atol=1e-4)
        wanted = torch.stack([local(inputs[4], *parts) for parts in every]).sum(0)
        torch.testing.assert_close(reduced, wanted, rtol=1e-4, atol=1e-4)
    assert counts("recordings") == 1
    assert counts("moved_outputs") == 1, multigraph_backend.explain()


@program
def tensor_parallel_through_dtensor(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = parallelize_module(copy.deepcopy(base), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    function = compiled(model)
    with torch.no_grad():
        for step in range(8):
            x = torch.randn(16, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(step))
            torch.testing.assert_close(function(x), base(x), rtol=1e-3, atol=1e-3)
    assert counts("recordings") >= 1, multigraph_backend.explain()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def losses(model: Any, rank: int, count: int = 20) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(count):
        x = torch.randn(32, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return torch.stack(found)


def trains(wrap: Callable[[torch.nn.Module], Any], rank: int, blocks: bool) -> None:
    torch.manual_seed(1)
    base = torch.nn.Sequential(Block(), Block()).to(DEVICE)
    wanted = losses(wrap(copy.deepcopy(base)), rank)
    mine = copy.deepcopy(base)
    if blocks:
        for index, block in enumerate(mine):
            mine[index] = compiled(block)
    model = wrap(mine)
    got = losses(model if blocks else compiled(model), rank)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    assert counts("recordings") >= 1, multigraph_backend.explain()
    assert counts("failures") == counts("eager_calls") == 0


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def replicated(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


@program
def ddp_as_a_whole(rank: int) -> None:
    trains(replicated, rank, blocks=False)


@program
def ddp_block_by_block(rank: int) -> None:
    trains(replicated, rank, blocks=True)


@program
def fsdp2_block_by_block(rank: int) -> None:
    trains(sharded, rank, blocks=True)


@program
def compiled_autograd(rank: int) -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(1)
    base = torch.nn.Sequential(Block(), Block()).to(DEVICE)
    wanted = losses(replicated(copy.deepcopy(base)), rank)
    captures = counters["compiled_autograd"]["captures"]
    with torch._dynamo.config.patch(compiled_autograd=True, optimize_ddp="python_reducer"):
        model = replicated(copy.deepcopy(base))

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        function, optimizer, got = compiled(loss_of), torch.optim.SGD(model.parameters(), lr=0.05), []
        for step in range(20):
            x = torch.randn(32, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(10 * step + rank))
            got.append(function(x).detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-3, atol=1e-4)
    assert counters["compiled_autograd"]["captures"] > captures
    issued = [entry.kind for code in made_here() for entry in code.spec.collectives]
    assert "all_reduce" in issued, issued
    assert counts("recordings") >= 1, multigraph_backend.explain()


def attention(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ qkv).view(x.shape[0], x.shape[1], 3, 4, 32).permute(2, 0, 3, 1, 4)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + y.transpose(1, 2).reshape(x.shape) @ out


def divided_sequence(rank: int, trains: bool) -> None:
    """Causal attention over a sequence of which each rank has a part, as ring attention, in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    generator = torch.Generator(DEVICE).manual_seed(9)
    parts = [
        (torch.randn(128, size, device=DEVICE, generator=generator) / 12).bfloat16().requires_grad_()
        for size in (384, 128)
    ]

    def step(function: Any, seed: int) -> list[torch.Tensor]:
        x = torch.randn(2, 256, 128, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).bfloat16()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]), torch.set_grad_enabled(trains):
            y = function(x, *parts)
            gradients = torch.autograd.grad(y.float().square().sum() / 128, parts) if trains else ()
        (whole,) = context_parallel_unshard(mesh, [y.detach()], [1])
        return [whole, *gradients]

    function = compiled(attention)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for seed in range(8):
            torch.testing.assert_close(step(function, seed), step(attention, seed), rtol=2e-2, atol=2e-2)
        x = torch.randn(2, 256, 128, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(7)).bfloat16()
        torch.testing.assert_close(step(function, 7)[0], attention(x, *parts).detach(), rtol=3e-2, atol=3e-2)
    issued = [entry.kind for code in made_here() for entry in code.spec.collectives]
    assert any(kind.startswith(("all_gather", "all_to_all")) for kind in issued), issued
    assert counts("generic_calls") >= 9, multigraph_backend.stats()
    assert counts("failures") == counts("eager_calls") == 0, multigraph_backend.explain()
    assert not any(cuts.APART in str(code.spec) for code in made_here())
    assert counts("recordings") >= 1, multigraph_backend.explain()


@program
def context_parallel_inference(rank: int) -> None:
    divided_sequence(rank, trains=False)


@program
def context_parallel_training(rank: int) -> None:
    divided_sequence(rank, trains=True)


@program
def pipeline_stages(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(10)
    base = torch.nn.Sequential(Block(), Block()).to(DEVICE)
    mine = copy.deepcopy(base[rank])
    stage = PipelineStage(compiled(mine), rank, 2, torch.device(DEVICE, rank))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, wanted: (y - wanted).square().mean())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (mine, base)]
    for step in range(20):
        generator = torch.Generator(DEVICE).manual_seed(step)
        x, wanted = (torch.randn(32, 64, device=DEVICE, generator=generator) for _ in range(2))
        found: list[torch.Tensor] = []
        schedule.step(x) if rank == 0 else schedule.step(target=wanted, losses=found)
        for part, goal in zip(x.chunk(2), wanted.chunk(2), strict=True):
            loss = (base(part) - goal).square().mean()
            (loss / 2).backward()
            if rank == 1:
                torch.testing.assert_close(found.pop(0), loss, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(list(mine.parameters()), list(base[rank].parameters()), rtol=1e-3, atol=1e-4)
    assert counts("recordings") >= 1, multigraph_backend.explain()
    assert counts("failures") == counts("eager_calls") == 0


@program
def a_rank_that_waits_says_what_for(rank: int) -> None:
    """The device of rank 0 waits in a replayed collective until rank 1 comes, which it does when that was said."""
    from multigraph_backend.distributed import watchdog

    function = compiled(mlp, cudagraphs="require")
    right(function, rank)
    parts = weights(rank)
    x = torch.randn(16, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    wanted = mlp(x, *parts)
    torch.cuda.synchronize()
    store, before = dist.distributed_c10d._get_default_store(), len(watchdog.said())
    part, looks = watchdog.PART, watchdog.LOOKS
    watchdog.PART, watchdog.LOOKS = 0.02, 600
    try:
        with torch.no_grad():
            if rank == 0:
                got = function(x, *parts)
                until = time.monotonic() + 40
                while len(watchdog.said()) == before and time.monotonic() < until:
                    time.sleep(0.05)
                store.set("waited for", "said" if len(watchdog.said()) > before else "not said")
            else:
                assert store.get("waited for") == b"said"
                got = function(x, *parts)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    finally:
        watchdog.PART, watchdog.LOOKS = part, looks
    if rank == 0:
        line = watchdog.said()[-1]
        assert line.startswith("rank 0: for "), line
        assert "its device has not finished mlp (" in line, line
        assert "all_reduce(float32[1024], sum)" in line, line


# ---------------------------------------------------------------- under the allocator extension


def books_are_right(rank: int) -> None:
    from multigraph_backend.allocator import library

    loaded = library.load().library
    assert loaded is not None
    loaded.call("mg_verify", loaded.call("mg_torch_device", rank))


@installed
def the_allocator_serves_each_rank(rank: int) -> None:
    from multigraph_backend import allocator

    status = allocator.status()
    assert status.installed, status
    assert torch.cuda.get_allocator_backend() == "pluggable"
    right(compiled(mlp), rank)
    assert counts("recordings") >= 1
    assert replays() >= 10
    held = any(tree.collectives.held() for tree in runtime.trees())
    assert held == (groups.growing_ranges() is None), multigraph_backend.explain()
    assert counts("generic_calls") == 12
    assert allocator.memory_allocated() > 0
    books_are_right(rank)


@installed
def a_capture_of_the_users_holds_collectives(rank: int) -> None:
    parts, place = weights(rank), torch.zeros(16, 64, device=DEVICE)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        mlp(place, *parts)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output = mlp(place, *parts)
        for seed in range(6):
            place.copy_(torch.randn(16, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)))
            graph.replay()
            torch.testing.assert_close(output, mlp(place, *parts), rtol=1e-4, atol=1e-4)
    torch.cuda.synchronize()
    del output
    graph.reset()  # NCCL waits for it when the group ends
    books_are_right(rank)


@installed
def training_is_right(rank: int) -> None:
    trains(replicated, rank, blocks=False)
    trains(sharded, rank, blocks=True)
    books_are_right(rank)


@beside
def the_model_of_each_rank_lies_in_a_pool(rank: int) -> None:
    from multigraph_backend import allocator

    pool = allocator.pool(limit=256 << 20)
    assert pool.reason is None, pool.reason
    with pool:
        parts = weights(rank)
    assert 0 < pool.reserved_bytes <= 256 << 20
    function = compiled(mlp, cudagraphs="require")
    with torch.no_grad():
        for seed in range(12):
            x = torch.randn(16, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))
            torch.testing.assert_close(function(x, *parts), mlp(x, *parts), rtol=1e-4, atol=1e-4)
    assert counts("recordings") == 1, multigraph_backend.explain()
    assert replays() >= 10
    assert any(tree.collectives.held() for tree in runtime.trees())


def main() -> int:
    rank, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.cuda.set_device(rank)
    device = torch.device(DEVICE, rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=size, device_id=device, timeout=datetime.timedelta(seconds=TIMEOUT)
    )
    for name in sys.argv[4:] or PROGRAMS:
        faulthandler.dump_traceback_later(TIMEOUT * 0.7)  # a rank that hangs says where
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        for tree in runtime.trees():
            tree.forget()
        multigraph_backend.reset_stats()
        _earlier[:] = output_code.living()
        began = time.monotonic()
        {**PROGRAMS, **BY_NAME}[name](rank)
        torch.cuda.synchronize()
        print(f"{name}: ok ({time.monotonic() - began:.1f} s)", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
