"""Runs the benchmark's programs on an allocator over the simulated driver, as a capture in a pool of its own."""

from __future__ import annotations

from typing import Any

from tests.support.allocator.extension import Allocator


def reserved(programs: Any, program: Any, allocator: Allocator) -> int:
    """Bytes of the pool after a capture of the program."""
    streams = [allocator.stream() for _ in range(program.streams)]
    addresses: dict[int, int] = {}
    homes: dict[int, int] = {}

    def use(block: int, stream: int) -> None:
        if block in homes and homes[block] != stream:  # the input is from outside
            allocator.record_stream(addresses[block], streams[stream])

    allocator.begin_pool(1, lambda _: True)
    allocator.begin_capture(streams[0])
    for side in streams[1:]:
        allocator.join(side, streams[0])
    for operation in program.operations:
        match operation:
            case programs.Make(block, stream, nbytes, source, _, _, kernel):
                addresses[block], homes[block] = allocator.allocate(nbytes, streams[stream]), stream
                if kernel:
                    allocator.kernel(streams[stream])
                if source is not None:
                    use(source, stream)
            case programs.Use(block, stream):
                allocator.kernel(streams[stream])
                use(block, stream)
            case programs.Record(block, stream):
                use(block, stream)
            case programs.Free(block):
                allocator.free(addresses.pop(block))
            case programs.Wait(waiting, awaited):
                allocator.join(streams[waiting], streams[awaited])
    held = int(allocator.stats.reserved)
    for side in streams[1:]:
        allocator.join(streams[0], side)
    allocator.end_capture(streams[0])
    allocator.end_pool(1)
    return held
