"""Programs of two ranks over gloo, each compared with the same program run eagerly; several in one pair of processes.

    python tests/support/distributed/ranks.py RANK WORLD_SIZE PORT NAME...

A line `NAME: ok` says that a program was right, and that what it is about was at work.
"""

from __future__ import annotations

import copy
import datetime
import faulthandler
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import multigraph_backend
from multigraph_backend.cudagraphs import output_code
from multigraph_backend.region import registry

PROGRAMS: dict[str, Callable[[int], None]] = {}


def program(function: Callable[[int], None]) -> Callable[[int], None]:
    PROGRAMS[function.__name__] = function
    return function


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="multigraph", dynamic=options.pop("dynamic", True), options=options)


def only_region() -> Any:
    (region,) = registry.living()
    return region


def everything_issued() -> list[Any]:
    """What all compiled graphs of this process issue."""
    return [entry for code in output_code.living() for entry in code.spec.collectives]


def synced(seed: int) -> None:
    torch.manual_seed(seed)


# ---------------------------------------------------------------- local decisions


def averaged(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A data-parallel gradient: rows may differ by rank, what is reduced does not."""
    y = torch.relu(x @ w)
    scale = functional.all_reduce(y.mean(), "sum", dist.group.WORLD)
    return functional.all_reduce(x.t() @ (y - scale), "sum", dist.group.WORLD)


def steps(
    function: Any, rows: Callable[[int], int], count: int = 12, after: Callable[[int], None] | None = None
) -> None:
    """Ranks call `function` the same number of times, with rows of their own, and compare with eager each time."""
    w = torch.linspace(-1, 1, 15).view(5, 3)
    for step in range(count):
        x = torch.randn(rows(step), 5)
        torch.testing.assert_close(function(x, w), averaged(x, w))
        if after is not None:
            after(step)


@program
def another_variant_on_each_rank_with_ragged_sizes(rank: int) -> None:
    function = compiled(averaged, specialize=[{"x[0]": 4}, {"x[0]": {"multiple_of": 8}}], on_failure="raise")
    sizes = [[4, 16, 6, 4, 24, 7], [6, 4, 16, 9, 4, 24]][rank]
    steps(function, lambda step: sizes[step % len(sizes)], 200)
    calls = [entry.calls for entry in (*only_region().variants, only_region().generic)]
    assert calls == [67, 67, 66] or min(calls) >= 66, calls
    said = multigraph_backend.explain()
    assert (said.rank, said.world_size) == (rank, 2)
    assert f"rank {rank} of 2" in str(said)
    assert "2 collectives of 64 bytes in all" in str(said), str(said)


@program
def one_rank_compiles_late_and_the_other_goes_on(rank: int) -> None:
    function = compiled(averaged, specialize=[{"x[0]": 4}], on_failure="raise")
    steps(function, lambda step: 4 if rank == 0 and step >= 5 else 6)
    assert [entry.calls for entry in only_region().variants] == [7 if rank == 0 else 0]


def for_four_rows(graph: torch.fx.Graph) -> bool:
    tensors = [node.meta.get("val") for node in graph.nodes]
    return any(isinstance(value, torch.Tensor) and tuple(value.shape[:1]) == (4,) for value in tensors)


class Raises:
    """A pass of Inductor that fails in the variant for four rows."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        if for_four_rows(graph):
            raise RuntimeError("injected")

    def uuid(self) -> str:
        return "raises"


class Hangs(Raises):
    def __call__(self, graph: torch.fx.Graph) -> None:
        if for_four_rows(graph):
            time.sleep(60)

    def uuid(self) -> str:
        return "hangs"


@program
def a_compile_that_fails_on_one_rank(rank: int) -> None:
    knobs = {"post_grad_custom_pre_pass": Raises()} if rank == 0 else {}
    function = compiled(averaged, specialize=[{"x[0]": 4}], inductor=knobs)
    steps(function, lambda step: 4 if step % 2 else 6)
    assert only_region().variants[0].state == ("failed" if rank == 0 else "ready"), str(multigraph_backend.explain())
    assert rank or "injected" in only_region().variants[0].reason


@program
def a_compile_that_hangs_on_one_rank(rank: int) -> None:
    settings = {"inductor": {"post_grad_custom_pre_pass": Hangs()}, "compile_timeout": 400.0} if rank == 0 else {}
    function = compiled(averaged, specialize=[{"x[0]": 4}], **settings)
    steps(function, lambda step: 6, 2)  # generic is compiled
    if rank == 0:
        only_region().options = __import__("dataclasses").replace(only_region().options, compile_timeout=1.0)
    steps(function, lambda step: 4, 6)
    assert only_region().variants[0].state == ("failed" if rank == 0 else "ready"), str(multigraph_backend.explain())
    assert rank or "CompileTimeout" in only_region().variants[0].reason


@program
def a_variant_that_is_given_up_and_comes_back_on_one_rank(rank: int) -> None:
    function = compiled(averaged, specialize=[{"x[0]": 4}], on_failure="raise")

    def give_up(step: int) -> None:
        if rank == 0 and step == 3:
            region = only_region()
            region.variants[0].forms = ()
            region.publish()

    steps(function, lambda step: 4, 10, give_up)
    assert multigraph_backend.stats()["variants_compiled"] == (2 if rank == 0 else 1)


# ---------------------------------------------------------------- one compile a host


@program
def the_same_variant_is_compiled_once_for_all_ranks(rank: int) -> None:
    counters.clear()
    dist.barrier()

    def unseen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return averaged(x, w) * 3.25 + float(os.environ["NONCE"])

    function = compiled(unseen, on_failure="raise")
    w, x = torch.randn(5, 3), torch.randn(6, 5)
    torch.testing.assert_close(function(x, w), unseen(x, w))
    found = [counters["aot_autograd"][key] for key in ("autograd_cache_hit", "autograd_cache_miss")]
    both: list[Any] = [None, None]
    dist.all_gather_object(both, (found, multigraph_backend.stats()["waited_for_ranks"]))
    assert sorted(entry for entry, _ in both) == [[0, 1], [1, 0]], both


# ---------------------------------------------------------------- training


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def trained(model: Any, optimizer: Any, rank: int) -> list[torch.Tensor]:
    losses = []
    for step in range(20):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(4, 8)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_trained_alike(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.stack(list(ours)), torch.stack(list(theirs)), rtol=1e-4, atol=1e-5)
    assert torch.stack(list(theirs)).std() > 0


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def ran_compiled(least: int) -> None:
    stats = multigraph_backend.stats()
    assert stats["generic_calls"] + stats["variant_calls"] >= least, stats
    assert not stats["eager_calls"], stats
    assert not stats["failures"], stats


@program
def ddp(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    synced(3)
    base = Model()
    theirs = DistributedDataParallel(copy.deepcopy(base))
    wanted = trained(theirs, sgd(theirs), rank)
    ours = DistributedDataParallel(copy.deepcopy(base))
    step = compiled(ours, dynamic=False)
    assert_trained_alike(trained(step, sgd(ours), rank), wanted)
    ran_compiled(20)


@program
def fsdp2_block_by_block(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    synced(4)
    base = Model()

    def sharded(compile: bool) -> Any:
        model = copy.deepcopy(base)
        for index, layer in enumerate(model.layers):
            if compile:
                model.layers[index] = layer = compiled(layer, dynamic=False, saved_tensors=SAVED)
            fully_shard(layer)
        fully_shard(model)
        return model

    from multigraph_backend.saved_tensors.rules import rule_from_json

    SAVED = [
        rule_from_json({"match": {"min_bytes": 0, **role}, "pack": {"cast": "bfloat16"}})
        for role in ({}, {"role": "parameter"}, {"role": "input"})
    ]
    theirs = sharded(False)
    wanted = trained(theirs, sgd(theirs), rank)
    ours = sharded(True)
    got = trained(ours, sgd(ours), rank)
    torch.testing.assert_close(torch.stack(got), torch.stack(wanted), rtol=2e-2, atol=2e-3)
    ran_compiled(20)
    kept = [
        entry
        for region in multigraph_backend.explain().regions
        for saved in region.generic.saved
        for entry in saved.tensors
    ]
    assert any("FSDP2" in (entry.reason or "") for entry in kept), kept
    assert not any(entry.packed for entry in kept if "FSDP2" in (entry.reason or ""))
    between = [entry for entry in kept if entry.packed and entry.held]
    assert any(entry.held and "free once nobody else holds it" in entry.held for entry in between), kept
    shapes = {str(list(parameter.shape)) for parameter in base.parameters()}
    assert not shapes & {entry.shape for entry in between}, between


@program
def functional_tensor_parallel_training(rank: int) -> None:
    size = dist.get_world_size()
    synced(5)
    up, down = torch.randn(8, 8 * size) / 3, torch.randn(8 * size, 8) / 3

    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ up) @ down
        return x + functional.all_reduce(y, "sum", dist.group.WORLD)

    def run(function: Any) -> list[torch.Tensor]:
        ours = [up.chunk(size, 1)[rank].clone().requires_grad_(), down.chunk(size, 0)[rank].clone().requires_grad_()]
        losses = []
        for step in range(20):
            torch.manual_seed(step)
            x = torch.randn(4 if step % 3 else 6, 8)
            loss = function(x, *ours).square().mean()
            loss.backward()
            with torch.no_grad():
                for weight in ours:
                    weight -= 0.01 * weight.grad  # type: ignore[operator]
                    weight.grad = None
            losses.append(loss.detach())
        return losses

    function = compiled(mlp, specialize=[{"x[0]": 4}] if rank == 0 else [], on_failure="raise")
    torch.testing.assert_close(torch.stack(run(function)), torch.stack(run(mlp)), rtol=1e-4, atol=1e-5)
    ran_compiled(20)
    region = only_region()
    assert [entry.calls for entry in region.variants] == ([13] if rank == 0 else [])
    assert len(region._issued.issued.backward) == 1


@program
def dtensor_tensor_parallel(rank: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    synced(6)
    base = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def parallel() -> Any:
        return parallelize_module(copy.deepcopy(base), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    theirs, ours = parallel(), parallel()
    wanted = trained(theirs, sgd(theirs), 0)
    assert_trained_alike(trained(compiled(ours, dynamic=False), sgd(ours), 0), wanted)
    ran_compiled(20)
    with torch.no_grad():
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(compiled(parallel(), dynamic=False)(x), base(x))


@program
def dtensor_weights_and_another_variant_on_each_rank(rank: int) -> None:
    """Rows are the same on both ranks, as tensor parallelism has it; which of the variants there are is not."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    synced(11)
    base = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ours, theirs = (parallelize_module(copy.deepcopy(base), mesh, plan) for _ in range(2))
    specialize = [{"input[0]": 4}, {"input[0]": {"multiple_of": 8}}]
    function = compiled(ours, specialize=specialize[:1] if rank == 0 else specialize[1:], on_failure="raise")
    optimizers = sgd(ours), sgd(theirs)
    for step in range(12):
        torch.manual_seed(step)
        x = torch.randn((3, 4, 8, 6)[step % 4], 8)
        losses = []
        for model, optimizer in zip((function, theirs), optimizers, strict=True):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted.full_tensor())
    ran_compiled(12)
    assert [entry.calls for entry in only_region().variants] == [3]
    assert only_region()._issued.issued.forward


class Said(logging.Handler):
    """What is logged as a warning, and warned of, while it is entered: texts before their values."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: set[str] = set()
        known = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
        named = [logging.getLogger(name) for name in ("torch", "multigraph_backend", *known)]
        self.loggers = [logger for logger in named if logger.parent is logging.root or not logger.propagate]
        self.warned = warnings.catch_warnings(record=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.add(str(record.msg))

    def __enter__(self) -> Said:
        self.caught = self.warned.__enter__()
        warnings.simplefilter("always")
        for logger in self.loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *error: Any) -> None:
        for logger in self.loggers:
            logger.removeHandler(self)
        self.warned.__exit__(*error)
        self.texts.update(str(entry.message) for entry in self.caught or ())


def as_eager_and_as_quiet_as_stock(made: Callable[[str], tuple[Any, Any]], rank: int, least: int) -> None:
    """`made(backend)`: a model and what is called.  Losses, gradients and parameters are eager's, and multigraph warns
    of nothing that stock does not warn of."""
    texts, found = {}, {}
    for backend in ("eager", "inductor", "multigraph"):
        torch._dynamo.reset()
        model, called = made(backend)
        with Said() as said:
            called(torch.linspace(-1, 1, 32).view(4, 8)).square().mean().backward()
            gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
            model.zero_grad()
            losses = trained(called, torch.optim.AdamW(model.parameters(), 0.01), rank)
        texts[backend] = said.texts
        found[backend] = losses, gradients, [parameter.detach().full_tensor() for parameter in model.parameters()]
    for backend in ("inductor", "multigraph"):
        assert_trained_alike(found[backend][0], found["eager"][0])
        torch.testing.assert_close(found[backend][1:], found["eager"][1:], rtol=1e-3, atol=1e-4)
    assert texts["multigraph"] <= texts["inductor"], texts["multigraph"] - texts["inductor"]
    ran_compiled(least)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(8, 16), torch.nn.LayerNorm(8), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@program
def tensor_parallel_blocks_that_fsdp2_shards(rank: int) -> None:
    """torch's recipe for both, over a mesh of one by two: blocks are divided, then sharded, then compiled in place."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    synced(12)
    base = torch.nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))

    def made(backend: str) -> tuple[Any, Any]:
        model = copy.deepcopy(base)
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if backend != "eager":
                block.compile(backend=backend)
            fully_shard(block, mesh=mesh["dp"])
        return (fully_shard(model, mesh=mesh["dp"]),) * 2

    as_eager_and_as_quiet_as_stock(made, 0, 2 * 21)


@program
def fsdp2_whole(rank: int) -> None:
    """The whole model compiled, over blocks that are sharded; and its gradients are eager's."""
    from torch.distributed.fsdp import fully_shard

    synced(13)
    base = torch.nn.Sequential(Block(), Block())

    def made(backend: str) -> tuple[Any, Any]:
        model = copy.deepcopy(base)
        for block in model:
            fully_shard(block)
        fully_shard(model)
        return model, model if backend == "eager" else torch.compile(model, backend=backend)

    as_eager_and_as_quiet_as_stock(made, rank, 2 * 21)  # hooks run between the blocks: each is a graph


@program
def tensor_parallel(rank: int) -> None:
    """The whole model compiled, all of whose parameters are divided."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    synced(14)
    base = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made(backend: str) -> tuple[Any, Any]:
        model = parallelize_module(copy.deepcopy(base), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
        return model, model if backend == "eager" else torch.compile(model, backend=backend)

    as_eager_and_as_quiet_as_stock(made, 0, 21)


@program
def checkpointed(rank: int) -> None:
    from torch.utils.checkpoint import checkpoint

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.all_reduce(x @ w, "sum", dist.group.WORLD))

    def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, checkpoint(block, x, w, use_reentrant=False), w, use_reentrant=False)  # type: ignore[no-any-return]

    function = compiled(whole, specialize=[{"x[0]": 4}] if rank == 0 else [], on_failure="raise")
    for rows in (4, 6, 4):
        torch.manual_seed(rows)
        x, w = torch.randn(rows, 5), torch.randn(5, 5, requires_grad=True)
        ours, theirs = function(x, w), whole(x, w)
        (mine,), (wanted,) = torch.autograd.grad(ours.sum(), w), torch.autograd.grad(theirs.sum(), w)
        torch.testing.assert_close((ours, mine), (theirs, wanted))
    ran_compiled(3)


@program
def compiled_autograd(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    synced(8)
    base = Model()
    theirs = DistributedDataParallel(copy.deepcopy(base))
    wanted = trained(theirs, sgd(theirs), rank)
    captures = counters["compiled_autograd"]["captures"]

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = ours(x).square().mean()
        loss.backward()
        return loss

    got = []
    with torch._dynamo.config.patch(compiled_autograd=True, optimize_ddp="python_reducer"):
        ours = DistributedDataParallel(copy.deepcopy(base))
        optimizer = sgd(ours)
        step = compiled(loss_of, dynamic=False)  # torch compiles the backwards that run inside of it
        for number in range(20):
            torch.manual_seed(1000 * number + rank)
            got.append(step(torch.randn(4, 8)).detach())
            optimizer.step()
            optimizer.zero_grad()
    assert_trained_alike(got, wanted)
    assert counters["compiled_autograd"]["captures"] > captures
    # the graph of the backward came to multigraph too, with the gradients' reduction inside
    assert multigraph_backend.stats()["regions"] >= 2
    issued = [str(entry) for entry in everything_issued()]
    assert any("all_reduce" in entry for entry in issued), issued
    ran_compiled(40)


@program
def context_parallel(rank: int) -> None:
    """Attention over a sequence of which each rank has a part.  On the CPU torch serves attention as its math alone."""
    from torch.distributed.tensor.experimental import context_parallel as divided
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    synced(9)
    weights = [(torch.randn(16, size) / 4).requires_grad_() for size in (48, 16)]

    def attention(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ qkv).view(x.shape[0], x.shape[1], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(x.shape) @ out

    def step(function: Any, rows: int, seed: int, trains: bool) -> list[torch.Tensor]:
        """The output for the whole sequence, and each rank's part of the gradients."""
        x = torch.randn(rows, 8, 16, generator=torch.Generator().manual_seed(seed))
        with divided(mesh, buffers=[x], buffer_seq_dims=[1]), torch.set_grad_enabled(trains):
            torch._dynamo.mark_dynamic(x, 0)  # torch cannot trace it where the sequence's length is a symbol too
            y = function(x, *weights)
            gradients = torch.autograd.grad(y.square().sum(), weights) if trains else ()
        (whole,) = context_parallel_unshard(mesh, [y.detach()], [1])
        return [whole, *gradients]

    # ranks choose on their own here too: one has a variant for three rows
    settings = {"specialize": [{"x[0]": 3}]} if rank == 0 else {}
    with sdpa_kernel(SDPBackend.MATH):
        for trains in (False, True):
            torch._dynamo.reset()
            function = compiled(attention, dynamic=None, on_failure="raise", **settings)
            for seed, rows in enumerate((2, 3, 2, 3)):
                ours, theirs = step(function, rows, seed, trains), step(attention, rows, seed, trains)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
                x = torch.randn(rows, 8, 16, generator=torch.Generator().manual_seed(seed))
                torch.testing.assert_close(ours[0], attention(x, *weights).detach(), rtol=1e-4, atol=1e-5)
            variants = [variant for region in registry.living() for variant in region.variants]
            assert sum(variant.calls for variant in variants) == (2 if rank == 0 else 0)
            assert all(form.lowered.issued.forward for variant in variants for form in variant.forms)
            assert any(entry.kind.startswith("all_gather") for entry in everything_issued()), everything_issued()
    ran_compiled(8)


@program
def the_allocator_is_asked_for(rank: int) -> None:
    """Where the extension cannot serve, as without a GPU: each rank says the same, and trains with torch's own."""
    from multigraph_backend import allocator

    status = allocator.install(reuse="any_stream", expandable=True)
    pool = allocator.pool(limit=1 << 30)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, (status.installed, status.reason, pool.reason, os.environ["MULTIGRAPH_ALLOCATOR"]))
    assert both[0] == both[1] == (False, status.reason, pool.reason, "1")
    assert status.reason
    assert pool.reason
    with pool:
        ddp(rank)
    pool.close()


@program
def pipeline_stages(rank: int) -> None:
    """Each rank has a stage; microbatches go through them in turns, forward and backward."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    synced(10)
    base = torch.nn.Sequential(Model(), Model())
    mine = copy.deepcopy(base[rank])
    stage = PipelineStage(compiled(mine, dynamic=False, on_failure="raise"), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, wanted: (y - wanted).square().mean())
    ours, theirs = sgd(mine), sgd(base)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        x, wanted = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
        found: list[torch.Tensor] = []
        schedule.step(x) if rank == 0 else schedule.step(target=wanted, losses=found)
        for part, goal in zip(x.chunk(2), wanted.chunk(2), strict=True):
            loss = (base(part) - goal).square().mean()
            (loss / 2).backward()
            if rank == 1:
                torch.testing.assert_close(found.pop(0), loss, rtol=1e-4, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(list(mine.parameters()), list(base[rank].parameters()), rtol=1e-4, atol=1e-5)
    ran_compiled(40)


def main() -> int:
    rank, size, port, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(450, exit=True)  # a rank that hangs says where
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120))
    for name in names:
        torch._dynamo.reset()
        multigraph_backend.reset_stats()
        began = time.monotonic()
        PROGRAMS[name](rank)
        print(f"{name}: ok", f"({time.monotonic() - began:.1f} s)", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
