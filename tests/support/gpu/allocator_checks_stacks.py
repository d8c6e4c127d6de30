"""Python's stacks in the snapshots of the installed extension."""

from __future__ import annotations

from typing import Any

import torch

from multigraph_backend import allocator
from tests.support.gpu.allocator_process import check, clean, cuda, expect


def frames_of(address: int) -> list[str]:
    """Names of the functions that a snapshot gives for the block there, innermost first."""
    segments: list[dict[str, Any]] = allocator.memory_snapshot()["segments"]
    blocks = [block for entry in segments for block in entry["blocks"] if block["address"] == address]
    return [frame["name"] for block in blocks for frame in block["frames"]]


def makes_a_tensor() -> torch.Tensor:
    return cuda(1000, 1000)


@check("installed")
def a_snapshot_says_who_allocated_and_who_freed() -> None:
    unseen = makes_a_tensor()
    allocator.record_memory_history(max_entries=1000)
    try:
        tensor = makes_a_tensor()
        address = tensor.data_ptr()
        expect("makes_a_tensor" in frames_of(address), frames_of(address))
        expect(frames_of(unseen.data_ptr()) == [], frames_of(unseen.data_ptr()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = makes_a_tensor()
        expect("makes_a_tensor" in frames_of(captured.data_ptr()))
        del tensor
        trace = allocator.memory_snapshot()["device_traces"][torch.cuda.current_device()]
        told = {
            entry["action"]: [frame["name"] for frame in entry["frames"]] for entry in trace if entry["addr"] == address
        }
        expect("makes_a_tensor" in told["alloc"], told)
        expect("a_snapshot_says_who_allocated_and_who_freed" in told["free_requested"], told)
        del graph, captured
        clean()
    finally:
        allocator.record_memory_history(None)
    expect(frames_of(makes_a_tensor().data_ptr()) == [])
