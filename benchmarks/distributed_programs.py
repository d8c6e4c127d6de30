"""What distributed.py runs on each rank: its models, and the forms that they are compiled in.

A part of benchmarks/distributed.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from measure import Call, own_code

from multigraph_backend import _compat


@dataclass(frozen=True)
class Size:
    """Of the models: width, layers, tokens of a call; and how often is measured."""

    width: int
    layers: int
    tokens: int
    calls: int
    rounds: int


def size_of(work: str, quick: bool) -> Size:
    if quick:
        return Size(64, 2, 16, 2, 2)
    if work.startswith(("ddp", "fsdp")):
        return Size(1024, 12, 1024, 4, 9)
    return Size(4096, 4, 16, 40, 15)


# ---------------------------------------------------------------- models


class ParallelBlock(torch.nn.Module):
    """A decoder block of which this rank has some heads and a part of the hidden layer."""

    def __init__(self, width: int, ranks: int) -> None:
        super().__init__()
        self.width, self.heads = width // ranks, max(1, width // 128 // ranks)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * self.width, bias=False)
        self.out = torch.nn.Linear(self.width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * self.width, bias=False)
        self.down = torch.nn.Linear(4 * self.width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        q, k, v = (
            part.view(tokens, self.heads, -1).transpose(0, 1) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + reduced(self.out(y.transpose(0, 1).reshape(tokens, self.width)))
        return x + reduced(self.down(F.silu(self.up(self.norms[1](x)))))


def reduced(x: torch.Tensor) -> torch.Tensor:
    group: Any = dist.group.WORLD
    whole: torch.Tensor = functional.all_reduce(x, "sum", group)
    return whole


class Block(torch.nn.Module):
    """A block of the models that are trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, width))
        done: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return done


# ---------------------------------------------------------------- forms of inference


def inference_program(work: str, size: Size, device: str, dtype: torch.dtype) -> Call:
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    if work == "decoder":
        model: torch.nn.Module = torch.nn.Sequential(*(ParallelBlock(size.width, ranks) for _ in range(size.layers)))
        model = model.to(device, dtype)
        return lambda x: model(x)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (ranks,))
    parts = []
    for _ in range(size.layers):
        mlp = torch.nn.Sequential(
            torch.nn.Linear(size.width, 4 * size.width, bias=False),
            torch.nn.SiLU(),
            torch.nn.Linear(4 * size.width, size.width, bias=False),
        ).to(device, dtype)
        parts.append(parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))
    whole = torch.nn.Sequential(*parts)
    return lambda x: whole(x)


def by_hand(plain: Call, x: torch.Tensor) -> Call:
    """Inductor's code captured, with a place for its input.

    With cuBLAS' workspaces in the graph's own pool: outside they are anybody's, and stock's capture frees them.
    """
    place = x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            plain(place)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    _compat.clear_cublas_workspaces()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output = plain(place)
    _compat.clear_cublas_workspaces()

    def call(x: torch.Tensor) -> torch.Tensor:
        place.copy_(x)
        graph.replay()
        assert isinstance(output, torch.Tensor)
        return output

    return call


def inference_form(name: str, program: Call, x: torch.Tensor) -> Call:
    match name:
        case "eager":
            return program
        case "inductor":
            return torch.compile(own_code(program), dynamic=False)
        case "by hand":
            return by_hand(torch.compile(own_code(program), dynamic=False), x)
        case "multigraph":
            return torch.compile(own_code(program), backend="multigraph", dynamic=False)
    return torch.compile(own_code(program), mode="reduce-overhead", dynamic=False)


# ---------------------------------------------------------------- forms of training


def training_form(name: str, base: torch.nn.Module, work: str, x: torch.Tensor) -> Call:
    """A step, which returns the loss.  `work`: "ddp" or "fsdp", "zeroed" or "marked"."""
    kind, _, part = name.partition(", ")
    settings: dict[str, Any] = {"dynamic": False}
    settings |= {"multigraph": {"backend": "multigraph"}, "stock": {"mode": "reduce-overhead"}}.get(kind, {})
    model: Any = copy.deepcopy(base)
    if part == "blocks":
        for index, block in enumerate(model):
            model[index] = torch.compile(block, **settings)
    if work.startswith("ddp"):
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = torch.compile(model, **settings) if part == "whole" else model

    def step() -> torch.Tensor:
        if kind == "stock" or "marked" in work:
            torch.compiler.cudagraph_mark_step_begin()
        loss = run(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none="zeroed" not in work)
        taken: torch.Tensor = loss.detach().clone()
        return taken

    return step
