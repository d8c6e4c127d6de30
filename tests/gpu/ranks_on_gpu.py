"""Programs of two ranks over NCCL, each compared with the same program run eagerly, in one pair of processes.

    python tests/gpu/ranks_on_gpu.py RANK WORLD_SIZE PORT

A line `NAME: ok` says that a program was right, and that what it is about was at work.
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
from multigraph_backend.cudagraphs import cuts, output_code, runtime
from multigraph_backend.cudagraphs.output_code import RecordedCode

PROGRAMS: dict[str, Callable[[int], None]] = {}
DEVICE = "cuda"


def program(function: Callable[[int], None]) -> Callable[[int], None]:
    PROGRAMS[function.__name__] = function
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
    assert any(tree.holds_collectives() for tree in runtime.trees())
    (code,) = made_here()
    assert code.spec.whole
    assert [entry.kind for entry in code.spec.collectives] == ["all_reduce", "all_reduce"]


@program
def collectives_are_cut_where_asked(rank: int) -> None:
    right(compiled(mlp, collectives="cut"), rank)
    (code,) = made_here()
    assert code.spec.groups == ()
    assert {entry.reason for entry in code.spec.cuts} == {cuts.COLLECTIVES}
    assert not any(tree.holds_collectives() for tree in runtime.trees())
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


def main() -> int:
    rank, size, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    faulthandler.dump_traceback_later(110, exit=True)  # a rank that hangs says where
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.cuda.set_device(rank)
    device = torch.device(DEVICE, rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=size, device_id=device, timeout=datetime.timedelta(seconds=60)
    )
    for name in sys.argv[4:] or PROGRAMS:
        torch._dynamo.reset()
        gc.collect()
        multigraph_backend.reset_stats()
        _earlier[:] = output_code.living()
        began = time.monotonic()
        PROGRAMS[name](rank)
        torch.cuda.synchronize()
        print(f"{name}: ok ({time.monotonic() - began:.1f} s)", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
