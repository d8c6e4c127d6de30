"""What models allocate and free, in order: programs run on tensors without memory, on any machine.

Why: what an allocator reserves follows from sizes and lifetimes alone. So the programs run under a `FakeTensorMode`, at
the sizes of a GPU, and each storage that comes to be and dies is written down. Compiled programs are Inductor's
generated code, made by `compile_fx` and run with kernels that do nothing; their allocations, reuses and frees are the
lines that it would run. (It is code for the CPU, whose kernels are fused by the same scheduler.)

In: a program and its sizes. Out: a trace, a list of events in the words of `allocator_ext/stress/replay.cc`:

    ("begin", 1, 1), ("capture", 1)       a capture on stream 1, in pool 1
    ("allocate", 7, 4194304, 1)           block 7 of 4 MiB, for stream 1
    ("kernel", 1)                         something is launched there
    ("free", 7)
    ("captured", 1), ("end", 1)

Stream 0 is what runs outside of captures, 1 the stream of captures, 2 a second one. Pool 1 is that of the captures, and
is never given back.

recorded    multigraph's recordings: the first call of each piece runs as it is, in the pool, and all later calls are
            captured; when a step begins, what is alive of the last one is moved out of the pool. Only the pool is in
            the trace.
captured    steps that a program captures as a whole, one graph each, in one pool. Only the pool is in the trace.
uncaptured  no graphs; all that the process allocates
"""

from __future__ import annotations

import ast
import contextlib
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, cast

import torch
import workloads
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Event = tuple[Any, ...]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

OUTSIDE, CAPTURES, SIDE = range(3)  # streams
POOL = 1
LENGTHS = (384, 128, 512, 256, 448, 64, 320, 192)
MIB = 1 << 20


class Trace(TorchDispatchMode):
    """Writes down what is allocated and freed while it is on."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # Dynamo compiles under it

    def __init__(self, pool_only: bool = False) -> None:
        """`pool_only`: what lies outside of the pool is not written down."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.stream = OUTSIDE
        self._pool_only, self._in_pool = pool_only, False
        self._blocks: dict[int, int] = {}  # by storage
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._homes: dict[int, int] = {}  # of blocks: their streams
        self._pooled: dict[int, int] = {}  # blocks of the pool by storage
        self._last = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if TracingContext.try_get() is None:
            new = [self._seen(each) for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
            if any(new) or not function.is_view:
                self.kernel()
            if self.stream != OUTSIDE:
                self._used(each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        return output

    def _seen(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._blocks or nbytes == 0:
            return False
        self._blocks[key] = self.allocate(nbytes)
        if self._in_pool:
            self._pooled[key] = self._blocks[key]
        self._watched[key] = weakref.ref(storage, lambda _: self._died(key))
        return True

    def _died(self, key: int) -> None:
        del self._watched[key]
        self._pooled.pop(key, None)
        self.free(self._blocks.pop(key))

    def _used(self, tensors: Iterator[torch.Tensor]) -> None:
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is not None and self._homes.get(block, OUTSIDE) not in (OUTSIDE, self.stream):
                self.record(block)

    # ---- events

    def allocate(self, nbytes: int) -> int:
        self._last += 1
        if not self._pool_only or self._in_pool:
            self._homes[self._last] = self.stream
            self.events.append(("allocate", self._last, nbytes, self.stream))
        return self._last

    def free(self, block: int) -> None:
        if self._homes.pop(block, None) is not None:
            self.events.append(("free", block))

    def record(self, block: int) -> None:
        if self.events[-1] != ("record", block, self.stream):
            self.events.append(("record", block, self.stream))

    def kernel(self) -> None:
        if not self._pool_only or self._in_pool:
            self.events.append(("kernel", self.stream))

    def join(self, waiting: int, awaited: int) -> None:
        self.events.append(("join", waiting, awaited))

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def pool(self, captures: bool = True, streams: int = 1) -> Iterator[None]:
        """Inside, allocations are the pool's, and of a capture, whose first stream the others follow."""
        used = range(CAPTURES, CAPTURES + streams)
        self.events += [("begin", POOL, stream) for stream in used]
        self.events += [("capture", CAPTURES)] if captures else []
        for side in used[1:]:
            self.join(side, CAPTURES)
        self._in_pool = True
        with self.on(CAPTURES):
            yield
        self._in_pool = False
        for side in used[1:]:
            self.join(CAPTURES, side)
        self.events += [("captured", CAPTURES)] if captures else [("run",)]
        self.events += [("end", POOL) for _ in used]

    def moved(self) -> None:
        """What is alive in the pool gets memory elsewhere."""
        for key, block in self._pooled.items():
            self.free(block)
            self._blocks[key] = self.allocate(self._watched[key]().nbytes())  # type: ignore[union-attr]
        self._pooled.clear()


# ---------------------------------------------------------------- compiled code


class Recorded:
    """A backend for torch.compile: Inductor's code, whose calls are what multigraph would do with them.  The calls of a
    step are those up to the next call of its first graph."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.warm = False  # whether the first calls have been made
        self._first: object = None

    def __call__(self, program: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(program, backend=self._backend, dynamic=True)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=cast("Any", self._inner))

    def _inner(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        call = _generated(graph, inputs, self.trace.kernel, **how)
        forward = not how.get("is_backward", False)

        def run(arguments: list[Any]) -> Any:
            if forward:
                self.trace.moved()
            with self.trace.pool(captures=self.warm):
                return call(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _generated(graph: torch.fx.GraphModule, inputs: Sequence[Any], kernel: Callable[[], None], **how: Any) -> Any:
    """Inductor's generated function, with kernels that call `kernel` and do nothing else."""
    made = "\n".join([graph.code, *(str(node.meta.get("val")) for node in graph.graph.nodes), *map(str, inputs)])
    if made not in _modules:
        _modules[made] = _module(graph, inputs, how.get("is_inference", False), how.get("is_backward", False))
    names: dict[str, Any] = {"_kernel": lambda *_: kernel(), "__name__": "generated"}
    exec(_modules[made], names)
    names["empty_strided_cpu"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    names["assert_size_stride"] = lambda *_: None  # a convolution without memory has the strides that it was given
    names["reinterpret_tensor"] = lambda base, size, stride, offset=0: torch.as_strided(
        base, size, stride, base.storage_offset() + offset
    )
    return names["call"]


_modules: dict[str, CodeType] = {}  # several programs have the same graphs


def _module(graph: torch.fx.GraphModule, inputs: Sequence[Any], inference: bool, backward: bool) -> CodeType:
    mode = detect_fake_mode(inputs)
    assert mode is not None
    view_to_reshape(graph)
    compile_fx._recursive_record_original_output_strides(graph)
    with _disable_current_modes(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        compile_fx._recursive_post_grad_passes(graph, is_inference=inference)
        lowering = GraphLowering(
            graph, example_inputs=inputs, shape_env=mode.shape_env, is_inference=inference, is_backward=backward
        )
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code: Any = lowering.codegen()[0]
    tree = ast.parse(code if isinstance(code, str) else code.value)
    kept: list[ast.stmt] = []
    for statement in tree.body:
        text = ast.unparse(statement)
        if isinstance(statement, ast.Assign) and "async_compile." in text:  # a kernel
            assert isinstance(statement.targets[0], ast.Name)
            kept.append(ast.parse(f"{statement.targets[0].id} = _kernel").body[0])
        elif isinstance(statement, (ast.ClassDef, ast.FunctionDef)) or "async_compile" not in text:
            kept.append(statement)
    tree.body = [statement for statement in kept if not isinstance(statement, ast.If)]
    return compile(ast.fix_missing_locations(tree), "<generated>", "exec")


# ---------------------------------------------------------------- programs


def _training(
    model: torch.nn.Module, batches: Sequence[torch.Tensor], compiled: Compile, begun: Callable[[int], Any]
) -> None:
    """A step of each batch; `begun(number)` is a context around it."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).float().pow(2).mean()  # type: ignore[no-any-return]

    step = compiled(loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        with begun(number):
            step(x).backward()
        optimizer.step()


def recorded_training(model: Callable[[], torch.nn.Module], batches: Callable[[], Sequence[torch.Tensor]]) -> Trace:
    """Steps of several sizes, as multigraph records them; the first one once more before."""
    trace = Trace(pool_only=True)
    with _fake(), trace:
        backend = Recorded(trace)

        @contextlib.contextmanager
        def begun(number: int) -> Iterator[None]:
            yield
            backend.warm = True

        sizes = batches()
        _training(model(), [sizes[0], *sizes], backend, begun)
    return trace


def recorded_inference(
    model: Callable[[], torch.nn.Module], calls: Callable[[], Sequence[tuple[torch.Tensor, ...]]]
) -> Trace:
    """The same of calls without gradients; outputs are held until the next call has returned."""
    trace = Trace(pool_only=True)
    with _fake(), torch.no_grad(), trace:
        backend = Recorded(trace)
        module, held = model(), None
        step = backend(lambda *inputs: module(*inputs))
        arguments = calls()
        for inputs in [arguments[0], *arguments]:
            held = step(*inputs)
            backend.warm = True
        del held
    return trace


def captured_training(
    model: Callable[[], torch.nn.Module],
    batches: Callable[[], Sequence[torch.Tensor]],
    micro: int = 1,
    captures: bool = True,
) -> Trace:
    """Whole steps, the optimizer's included, as eager code captured by hand, one graph for each size; with `micro`
    backward passes that accumulate.  Without `captures` the steps run as they are, twice."""
    trace = Trace(pool_only=captures)
    with _fake(), trace:
        module = model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            for _ in range(micro):
                module(x).float().pow(2).mean().backward()
            optimizer.step()

        sizes = batches()
        step(sizes[0])  # makes the optimizer's state
        optimizer.zero_grad()
        for x in sizes if captures else (*sizes, *sizes):
            with trace.pool() if captures else contextlib.nullcontext():
                step(x)
                optimizer.zero_grad()
            trace.events.append(("run",))
    return trace


class _Residual(torch.nn.Module):
    """A bottleneck of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()

        def convolution(a: int, b: int, size: int, step: int = 1) -> torch.nn.Module:
            made = torch.nn.Conv2d(a, b, size, step, size // 2, bias=False)
            return torch.nn.Sequential(made, torch.nn.BatchNorm2d(b))

        self.first, self.second = convolution(inside, width, 1), convolution(width, width, 3, stride)
        self.third = convolution(width, 4 * width, 1)
        same = stride == 1 and inside == 4 * width
        self.around = torch.nn.Identity() if same else convolution(inside, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        y = self.second(y).relu()
        y = (self.third(y) + self.around(x)).relu()
        assert isinstance(y, torch.Tensor)
        return y


class Residual(torch.nn.Module):
    """ResNet-50, or a part of it."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.begin = torch.nn.Sequential(torch.nn.Conv2d(3, width, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(width))
        inside, made = width, []
        for stage, count in enumerate(blocks):
            for number in range(count):
                made.append(_Residual(inside, width << stage, 2 if number == 0 and stage > 0 else 1))
                inside = 4 * (width << stage)
        self.blocks, self.end = torch.nn.Sequential(*made), torch.nn.Linear(inside, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(self.begin(x).relu(), 3, 2, 1)
        x = self.end(self.blocks(x).mean((2, 3)))
        return x


def experts(layers: int, width: int, tokens: int, count: int, steps: int, streams: int) -> Trace:
    """Layers of experts, each of which gets a number of tokens that depends on the data: a capture for each step's
    numbers.  On two streams, experts take turns on them."""
    drawn = random.Random(0)
    trace = Trace(pool_only=True)
    with _fake(), torch.no_grad(), trace:
        up = [torch.empty(width, 4 * width, dtype=torch.bfloat16) for _ in range(layers)]
        down = [torch.empty(4 * width, width, dtype=torch.bfloat16) for _ in range(layers)]
        x = torch.empty(tokens, width, dtype=torch.bfloat16)
        for _ in range(steps):
            with trace.pool(streams=streams):
                y = x
                for layer in range(layers):
                    bounds = sorted(drawn.randrange(tokens) for _ in range(count - 1))
                    shares = [b - a for a, b in zip([0, *bounds], [*bounds, tokens], strict=True)]
                    out = torch.empty_like(y)
                    for side in range(1, streams):
                        trace.join(CAPTURES + side, CAPTURES)
                    for number, share in enumerate(shares):
                        with trace.on(CAPTURES + number % streams):
                            if share:
                                chosen = y[:share].clone()
                                hidden = torch.nn.functional.silu(chosen @ up[layer])
                                out[:share].add_(hidden @ down[layer])
                                del chosen, hidden
                    for side in range(1, streams):
                        trace.join(CAPTURES, CAPTURES + side)
                    y = torch.nn.functional.layer_norm(y + out, (width,))
                    del out
                del y
    return trace


def sharded(layers: int, width: int, tokens: int) -> Trace:
    """A training step over sharded parameters, captured, from shapes: a block's parameters are gathered on a second
    stream while the one before is computed, and gradients are reduced there, as FSDP2 does."""
    trace = Trace()
    full, shard = 2 * (4 * width * width + 3 * width * (width * 11 // 4)), 8
    hidden = width * 11 // 4
    saved_sizes = [2 * tokens * each for each in (width, 3 * width, width, width, hidden, hidden, hidden)]

    def gathered() -> int:
        with trace.on(SIDE):
            block = trace.allocate(full)
            trace.kernel()
        return block

    def temporary(*sizes: int) -> None:
        blocks = []
        for nbytes in sizes:
            blocks.append(trace.allocate(nbytes))
            trace.kernel()
        for block in blocks:
            trace.free(block)

    def used(block: int) -> None:
        trace.join(CAPTURES, SIDE)
        trace.record(block)
        trace.kernel()

    for _ in range(2):
        with trace.pool(streams=2):
            saved: list[list[int]] = []
            next_one = gathered()
            for layer in range(layers):
                block, next_one = next_one, gathered() if layer + 1 < layers else 0
                used(block)
                saved.append([])
                for nbytes in saved_sizes:
                    saved[-1].append(trace.allocate(nbytes))
                    trace.kernel()
                    temporary(nbytes)
                trace.free(block)
                trace.join(SIDE, CAPTURES)
            next_one, shards = gathered(), []
            for layer in reversed(range(layers)):
                block, next_one = next_one, gathered() if layer else 0
                used(block)
                gradient = trace.allocate(full)
                for nbytes, kept in zip(reversed(saved_sizes), reversed(saved.pop()), strict=True):
                    temporary(nbytes, nbytes)
                    trace.free(kept)
                trace.free(block)
                trace.join(SIDE, CAPTURES)
                with trace.on(SIDE):
                    shards.append(trace.allocate(full // shard))
                    trace.record(gradient)
                    trace.kernel()
                trace.free(gradient)
            trace.join(CAPTURES, SIDE)
            for each in shards:
                trace.free(each)
    return trace


def large_blocks(count: int) -> Trace:
    """Blocks of 40 MiB in a capture: what it costs that a pool grows, with nothing to gain."""
    trace = Trace()
    with trace.pool():
        made = [trace.allocate(40 * MIB) for _ in range(count)]
        for block in made:
            trace.free(block)
    return trace


@contextlib.contextmanager
def _fake() -> Iterator[None]:
    """Tensors without memory, of bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(shape_env=ShapeEnv()):
            yield
    finally:
        torch.set_default_dtype(before)
        torch._dynamo.reset()


def _decoder(layers: int, width: int) -> Callable[[], workloads.Decoder]:
    return lambda: workloads.Decoder(layers, width, width // 64)


def _texts(batch: int, width: int, lengths: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.empty(batch, length, width) for length in lengths]


def _images(batch: int, sizes: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.empty(batch, 3, size, size) for size in sizes]


def ordered(sizes: Sequence[int], order: str) -> list[int]:
    if order == "random":
        return random.Random(0).sample(sizes, len(sizes))
    return sorted(sizes, reverse=order == "descending")


def programs(quick: bool) -> dict[str, Callable[[], Trace]]:
    """The programs by name; each makes its trace."""
    long: Sequence[int]
    lengths: Sequence[int]
    images: Sequence[int]
    blocks: Sequence[int]
    if quick:
        layers, width, long, batch, lengths = 1, 256, (128, 64), 2, LENGTHS[:2]
        sizes, images, blocks = [2, 4, 6], (64, 96), (1, 1, 1, 1)
    else:
        layers, width, long, batch, lengths = 12, 1024, (1024, 512), 8, LENGTHS
        sizes, images, blocks = [2, 4, *range(8, 241, 8)], (224, 160, 256, 192), (3, 4, 6, 3)
    serving = 1 if quick else 8

    def serve(order: str, decode: bool) -> Callable[[], Trace]:
        def calls() -> list[tuple[torch.Tensor, ...]]:
            found: list[tuple[torch.Tensor, ...]] = []
            for size in ordered(sizes, order):
                found.append((torch.empty(size, 16, width),))
                if decode:
                    past = torch.empty(size, 2 * serving, width // 64, 16, 64)
                    found.append((torch.empty(size, 1, width), past))
            return found

        return lambda: recorded_inference(_decoder(serving, width), calls)

    return {
        "training, two lengths": lambda: recorded_training(_decoder(layers, width), _texts(batch, width, long)),
        "training, many lengths": lambda: recorded_training(_decoder(layers, width), _texts(batch, width, lengths)),
        **{f"sizes, {order}": serve(order, False) for order in ("ascending", "descending", "random")},
        "prefill and decode": serve("random", True),
        "whole steps": lambda: captured_training(_decoder(layers, width), _texts(batch, width, lengths)),
        "accumulation": lambda: captured_training(_decoder(layers, width), _texts(batch, width, long[1:]), micro=4),
        "images": lambda: captured_training(lambda: Residual(blocks), _images(4 * batch, images)),
        "experts": lambda: experts(layers, width, batch * long[0], 8, 2 if quick else 8, 1),
        "experts, two streams": lambda: experts(layers, width, batch * long[0], 8, 2 if quick else 8, 2),
        "sharded": lambda: sharded(layers, width, batch * long[1]),
        "large blocks": lambda: large_blocks(4 if quick else 256),
        "no captures": lambda: captured_training(
            _decoder(layers, width), _texts(batch, width, lengths), captures=False
        ),
    }


def log(trace: Sequence[Event]) -> str:
    """As `allocator_ext/stress/replay.cc` reads it."""
    return "".join(" ".join(map(str, event)) + "\n" for event in trace)
