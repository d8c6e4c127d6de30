"""The programs whose memory `memory.py` measures, and the forms in which they run.

Each program compiles what it is given to compile, and yields a number after each step: a loss, the mean of an output,
a batch size.  So its memory can be looked at in between, and its numbers compared.  Those that train take a number of
steps for `step_times.py`, which times them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import workloads

from multigraph_backend.backend import multigraph

FORMS = ("eager", "inductor", "stock", "multigraph", "multigraph, over the extension")
ORDERS = ("largest", "ascending", "descending", "at random")
SHARDED = "fsdp2"
EDGE = "at the edge"
KEPT = "three models, gradients kept"
SIZES = tuple(f"sizes, {order}" for order in ORDERS)
PROGRAMS = ("two lengths", "accumulation", *SIZES, "three models", KEPT, EDGE, SHARDED)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Loss = Callable[[torch.Tensor], torch.Tensor]


def _model(layers: int, width: int, device: str) -> workloads.Decoder:
    return workloads.Decoder(layers, width, width // 64).to(device, workloads.dtype_on(device))


def _loss(model: torch.nn.Module) -> Loss:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).float().pow(2).mean()  # type: ignore[no-any-return]

    return loss


def two_lengths(compiled: Compile, device: str, quick: bool, steps: int = 0) -> Iterator[float]:
    layers, width, batch, lengths, usual = (2, 64, 2, (8, 4), 4) if quick else (12, 1024, 8, (1024, 512), 40)
    steps = steps or usual
    model = _model(layers, width, device)
    loss, optimizer = compiled(_loss(model)), torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        x = torch.randn(batch, lengths[step % 2], width, device=device, dtype=workloads.dtype_on(device))
        optimizer.zero_grad()
        value = loss(x)
        value.backward()
        optimizer.step()
        yield float(value.detach())


def accumulation(compiled: Compile, device: str, quick: bool, steps: int = 0) -> Iterator[float]:
    layers, width, batch, length, usual = (2, 64, 2, 8, 3) if quick else (12, 1024, 8, 512, 10)
    steps = steps or usual
    model = _model(layers, width, device)
    loss, mark = marked_by_step(compiled(_loss(model)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        total = 0.0
        mark()
        optimizer.zero_grad()
        for _ in range(4):
            x = torch.randn(batch, length, width, device=device, dtype=workloads.dtype_on(device))
            value = loss(x) / 4
            value.backward()
            total += float(value.detach())
        optimizer.step()
        yield total


def sizes(compiled: Compile, device: str, quick: bool, order: str) -> Iterator[float]:
    layers, width = (1, 64) if quick else (8, 1024)
    all_sizes = [2, 3, 4] if quick else [2, 4, *range(8, 241, 8)]
    if order == "largest":
        all_sizes = all_sizes[-1:]
    if order == "descending":
        all_sizes.reverse()
    if order == "at random":
        random.Random(0).shuffle(all_sizes)
    model = _model(layers, width, device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)  # type: ignore[no-any-return]

    run = compiled(forward)
    with torch.no_grad():
        for batch in all_sizes:
            for _ in range(3):
                x = torch.randn(batch, 16, width, device=device, dtype=workloads.dtype_on(device))
                # a mean that takes no memory of its own: that of other sizes would lie in other segments
                yield float(torch.linalg.vector_norm(run(x), 1, dtype=torch.float32)) / x.numel()


def three_models(compiled: Compile, device: str, quick: bool, kept: bool = False, steps: int = 0) -> Iterator[float]:
    layers, width, batch, length, usual = (1, 64, 2, 8, 3) if quick else (4, 1024, 8, 512, 10)
    steps = steps or usual
    models = [_model(layers, width, device) for _ in range(3)]
    losses = [compiled(_loss(model)) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    for _ in range(steps):
        for loss, optimizer in zip(losses, optimizers, strict=True):
            x = torch.randn(batch, length, width, device=device, dtype=workloads.dtype_on(device))
            optimizer.zero_grad()
            value = loss(x)
            value.backward()
            optimizer.step()
            if not kept:
                optimizer.zero_grad()
            yield float(value.detach())
    if kept:
        for model in models:
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in model.parameters()]
            yield float(torch.stack(norms).norm())


def at_the_edge(compiled: Compile, device: str, quick: bool) -> Iterator[float]:
    """Yields batch sizes, each when its steps have run."""
    layers, width, length, batches = (1, 64, 4, (2, 3)) if quick else (12, 1024, 256, range(8, 1024, 2))
    model = _model(layers, width, device)
    loss, optimizer = compiled(_loss(model)), torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in batches:
        try:
            for _ in range(3):
                x = torch.randn(batch, length, width, device=device, dtype=workloads.dtype_on(device))
                optimizer.zero_grad()
                loss(x).backward()
                optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return
        yield float(batch)


def sharded(compiled: Compile, device: str, quick: bool) -> Iterator[float]:
    from distributed_programs import Block
    from torch.distributed.fsdp import fully_shard

    layers, width, batch, length, steps = (1, 64, 2, 8, 3) if quick else (12, 1024, 4, 1024, 10)
    dtype = workloads.dtype_on(device)
    model: Any = torch.nn.Sequential(*(Block(width) for _ in range(layers))).to(device, dtype)
    mark: Callable[[], object] = nothing
    for index, block in enumerate(model):
        model[index], mark = marked_by_step(compiled(block))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        x = torch.randn(batch, length, width, device=device, dtype=dtype)
        mark()
        optimizer.zero_grad()
        value = model(x).float().pow(2).mean()
        value.backward()
        optimizer.step()
        yield float(value.detach())


def program(name: str) -> Callable[[Compile, str, bool], Iterator[float]]:
    if name.startswith("sizes, "):
        return partial(sizes, order=name.removeprefix("sizes, "))
    programs: dict[str, Callable[[Compile, str, bool], Iterator[float]]] = {
        "two lengths": two_lengths,
        "accumulation": accumulation,
        "three models": three_models,
        KEPT: partial(three_models, kept=True),
        EDGE: at_the_edge,
        SHARDED: sharded,
    }
    return programs[name]


# ---------------------------------------------------------------- forms


def compiled_as(form: str, device: str, dynamic: bool) -> Compile:
    """What compiles a function as `form` says; a function of its own each time, as users have."""
    if form == "eager":
        return lambda function: function
    if form == "inductor":
        return lambda function: torch.compile(function, dynamic=dynamic)
    if form == "stock":
        return lambda function: Marked(torch.compile(function, mode="reduce-overhead", dynamic=dynamic))
    options: dict[str, Any] = {"cudagraphs": "auto"} if device == "cuda" else {}
    return lambda function: torch.compile(function, backend=multigraph, dynamic=dynamic, options=options)


class Marked:
    """`function`, with a mark before each call that a step begins."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, x: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return self.function(x)


def nothing() -> None: ...


def marked_by_step(function: Callable[..., Any]) -> tuple[Any, Callable[[], object]]:
    """`function`, and what to call before each step: for programs whose calls keep what others of the step made."""
    if isinstance(function, Marked):
        return function.function, torch.compiler.cudagraph_mark_step_begin
    return function, nothing
