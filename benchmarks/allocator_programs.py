"""What the allocator's benchmark and its GPU tests run: programs of allocations over streams, and their least memory.

A program is a plain list of operations, so the same one is run under every allocator (`captured`) and judged by a
checker that knows no allocator (`bounds`): vector clocks say which kernels a stream is behind, and a freed block counts
until somebody is behind all that its users had launched when it was freed. Sizes are bytes, rounded to 512 as all
allocators do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

MIB = 1 << 20
GRAIN = 512


class Make(NamedTuple):
    """A new block on a stream, of `nbytes`; a kernel writes source * factor + plus, or a constant without a source."""

    block: int
    stream: int
    nbytes: int
    source: int | None = None
    factor: float = 1.0
    plus: float = 0.0
    kernel: bool = True


class Use(NamedTuple):
    """A kernel on a stream that uses a block."""

    block: int
    stream: int


class Record(NamedTuple):
    """`record_stream` without a kernel."""

    block: int
    stream: int


class Free(NamedTuple):
    block: int


class Wait(NamedTuple):
    """A stream waits for all that another has been given."""

    waiting: int
    awaited: int


Operation = Make | Use | Record | Free | Wait


@dataclass(frozen=True)
class Program:
    """Stream 0 is where a capture begins.  Block 0, where something reads it, is there before the program."""

    name: str
    streams: int
    operations: tuple[Operation, ...]
    input_bytes: int = 0
    output: int | None = None  # the block that is left


# ---------------------------------------------------------------- the programs


def ping_pong(steps: int = 32, nbytes: int = 64 * MIB, kept: int = 1) -> Program:
    """t = acc * 0.5 on one stream, u = t + 1 on another, acc = u * 1 on the first; t and u of `kept` steps are dropped
    together, after the joins."""
    operations: list[Operation] = []
    acc, block, held = 0, 0, []
    for step in range(steps):
        t, u, new = block + 1, block + 2, block + 3
        block += 3
        operations += [Make(t, 0, nbytes, acc, factor=0.5), Wait(1, 0), Make(u, 1, nbytes, t, plus=1.0), Wait(0, 1)]
        operations.append(Make(new, 0, nbytes, u))
        if acc != 0:
            operations.append(Free(acc))
        acc = new
        held += [t, u]
        if step % kept == kept - 1:
            operations += [Free(each) for each in held]
            held = []
    operations += [Free(each) for each in held]
    return Program("ping-pong" if kept == 1 else "late frees", 2, tuple(operations), nbytes, acc)


def random_program(streams: int, operations: int = 10_000, alive: int = 280, seed: int = 0) -> Program:
    """Allocations and frees in equal parts around `alive` blocks of 4 KiB to 4 MiB, a kernel on each; half of them are
    also used on another stream; every 50 operations all streams are joined."""
    draw = random.Random(seed)
    plan: list[Operation] = []
    live: list[int] = []
    block = 0
    for number in range(operations):
        if live and draw.random() < len(live) / (2 * alive):
            plan.append(Free(live.pop(draw.randrange(len(live)))))
        else:
            block += 1
            stream = draw.randrange(streams)
            plan.append(Make(block, stream, int(4096 * 2 ** draw.uniform(0, 10)) // GRAIN * GRAIN))
            live.append(block)
            if draw.random() < 0.5:
                other = (stream + draw.randrange(1, streams)) % streams
                plan += [Wait(other, stream), Use(block, other)]
        if number % 50 == 49:
            plan += joined(streams)
    return Program(f"random, {streams} streams", streams, (*plan, *(Free(each) for each in live)))


def joined(streams: int) -> list[Operation]:
    """All streams behind all others."""
    sides = range(1, streams)
    return [*(Wait(0, side) for side in sides), *(Wait(side, 0) for side in sides)]


def without_use(rounds: int = 29, nbytes: int = 37 * MIB) -> Program:
    """Three blocks a round on two streams, recorded on the other one, freed, and never used by a kernel."""
    plan: list[Operation] = []
    for number in range(rounds):
        blocks = [3 * number + each for each in (1, 2, 3)]
        for each, stream in zip(blocks, (0, 1, 0), strict=True):
            plan += [Make(each, stream, nbytes, kernel=False), Record(each, 1 - stream)]
        plan += [Free(each) for each in blocks]
    return Program("no use", 2, tuple(plan))


# ---------------------------------------------------------------- what they need at least


@dataclass(frozen=True)
class Bounds:
    """Bytes, at most at a time: what is alive; that and what is freed and not behind the block's own stream yet; that
    and what is behind no stream yet."""

    live: int
    own_stream: int
    any_stream: int


class _Waiting(NamedTuple):
    size: int
    stream: int
    marks: tuple[tuple[int, int], ...]  # (stream, how many kernels it had been given)


def bounds(program: Program) -> Bounds:
    """What any allocator needs that gives a block back by what its users had launched at its free."""
    streams = range(program.streams)
    seen = [[0] * program.streams for _ in streams]  # seen[s][u]: how many kernels of u stream s is behind
    sizes: dict[int, tuple[int, int]] = {}
    users: dict[int, set[int]] = {}
    used: set[int] = set()
    waiting: dict[str, list[_Waiting]] = {"own": [], "any": []}
    live = 0
    peak = dict.fromkeys(("live", "own", "any"), 0)

    def behind(entry: _Waiting, stream: int) -> bool:
        return all(seen[stream][user] >= count for user, count in entry.marks)

    def settle() -> None:
        waiting["own"] = [entry for entry in waiting["own"] if not behind(entry, entry.stream)]
        waiting["any"] = [entry for entry in waiting["any"] if not any(behind(entry, stream) for stream in streams)]

    for operation in program.operations:
        match operation:
            case Make(block, stream, nbytes, source, _, _, kernel):
                size = -(-nbytes // GRAIN) * GRAIN
                sizes[block], users[block] = (size, stream), {stream}
                live += size
                settle()
                peak["live"] = max(peak["live"], live)
                for rule, entries in waiting.items():
                    peak[rule] = max(peak[rule], live + sum(entry.size for entry in entries))
                if source is not None and source in users:
                    users[source].add(stream)
                    used.add(source)
                if kernel:
                    seen[stream][stream] += 1
                    used.add(block)
            case Use(block, stream):
                users[block].add(stream)
                used.add(block)
                seen[stream][stream] += 1
            case Record(block, stream):
                users[block].add(stream)
            case Free(block):
                size, stream = sizes.pop(block)
                live -= size
                if block in used and users[block] != {stream}:
                    entry = _Waiting(size, stream, tuple((user, seen[user][user]) for user in sorted(users[block])))
                    for entries in waiting.values():
                        entries.append(entry)
            case Wait(later, earlier):
                seen[later] = [max(counts) for counts in zip(seen[later], seen[earlier], strict=True)]
    return Bounds(peak["live"], peak["own"], peak["any"])


# ---------------------------------------------------------------- running them


@dataclass
class Captured:
    """A program as a CUDA graph: what it left, and how long its operations took while it was captured."""

    graph: torch.cuda.CUDAGraph
    input: torch.Tensor | None
    output: torch.Tensor | None
    wrong: torch.Tensor
    milliseconds: float


def captured(program: Program, streams: Sequence[torch.cuda.Stream], checked: bool = False) -> Captured:
    """Capture a program; `checked`: each use counts in `wrong` the bytes that are not what the block was filled with.
    Raises what torch raises."""
    device = torch.device("cuda", torch.cuda.current_device())
    given = torch.rand(program.input_bytes // 4, device=device) if program.input_bytes else None
    wrong = torch.zeros(len(streams), dtype=torch.int64, device=device)
    for stream in streams:  # what a first launch on a stream needs is there before the capture
        with torch.cuda.stream(stream):
            torch.zeros(1, device=device).add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    blocks: dict[int, torch.Tensor] = {} if given is None else {0: given}
    with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
        started = time.perf_counter()
        for side in streams[1 : program.streams]:
            side.wait_stream(streams[0])
        try:
            _run(program.operations, streams, blocks, wrong if checked else None)
        finally:
            torch.cuda.set_stream(streams[0])
        taken = time.perf_counter() - started
        for side in streams[1 : program.streams]:
            streams[0].wait_stream(side)
        wrong[:1].add_(0)  # a graph is not empty
    output = None if program.output is None else blocks[program.output]
    return Captured(graph, given, output, wrong, taken * 1e3)


def expected(program: Program, given: torch.Tensor) -> torch.Tensor:
    """The output, computed one operation after the other."""
    blocks = {0: given}
    for operation in program.operations:
        match operation:
            case Make(block, _, _, int(source), factor, plus, _):
                blocks[block] = blocks[source] * factor + plus
            case Free(block):
                del blocks[block]
            case _:
                pass
    assert program.output is not None
    return blocks[program.output]


def _run(
    operations: Iterable[Operation],
    streams: Sequence[torch.cuda.Stream],
    blocks: dict[int, torch.Tensor],
    wrong: torch.Tensor | None,
) -> None:
    homes: dict[int, int] = {}
    use_stream = torch.cuda.set_stream
    for operation in operations:
        match operation:
            case Make(block, stream, nbytes, source, factor, plus, kernel):
                use_stream(streams[stream])
                homes[block] = stream
                if source is None:
                    blocks[block] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                    if kernel:
                        blocks[block].fill_(block % 251)
                    continue
                read = blocks[source]
                # one kernel each: a product, or a sum
                blocks[block] = read + plus if factor == 1 and plus else read * factor
                if homes.get(source, 0) != stream:
                    read.record_stream(streams[stream])
                del read
            case Use(block, stream):
                use_stream(streams[stream])
                if wrong is None:
                    blocks[block].add_(0)
                else:
                    wrong[stream].add_((blocks[block] != block % 251).sum())
                if homes[block] != stream:
                    blocks[block].record_stream(streams[stream])
            case Record(block, stream):
                blocks[block].record_stream(streams[stream])
            case Free(block):
                del blocks[block]
            case Wait(waiting, awaited):
                streams[waiting].wait_stream(streams[awaited])
