"""The snapshot of the process's memory with recordings in it by name, for PyTorch's memory_viz page.

In a snapshot of torch's, or of the allocator extension's, the memory of recordings is one more private pool: its blocks
were allocated in a capture that nobody watched, and say nothing.  Here each block of such a pool that is the output of
a recording gets a frame on top of its stack, which names the recording, and each segment one that names the pool; the
page shows stacks.  The account of memory is there in numbers, under "multigraph".

torch's user metadata (`torch.cuda.memory._set_memory_metadata`) is not used for it: torch writes that into events of
the history alone, so without a history there is nothing, in segments and blocks never; and it is the user's, to be put
aside and back around each capture.  This costs nothing until somebody asks.

In:  a snapshot, and what is recorded now.  Out: the same snapshot, with more in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from multigraph_backend.allocator import statistics
from multigraph_backend.cudagraphs import runtime
from multigraph_backend.cudagraphs.recordings import memory
from multigraph_backend.cudagraphs.recordings.tree import Tree

_MOST_NAMES = 3  # of recordings that have their outputs in one place


def memory_snapshot() -> dict[str, Any]:
    """Segments, blocks and history of all devices, with recordings named, as PyTorch's memory_viz page reads them.

    `pickle.dump(multigraph_backend.memory_snapshot(), file)`, then drop the file on pytorch.org/memory_viz.  Under
    "multigraph" it has, for each device, `graph_bytes` and what each pool and each recording takes (`explain()` prints
    the same).  Walks all of the allocator's books.
    """
    return named(statistics.memory_snapshot(), runtime.trees())


def named(snapshot: dict[str, Any], trees: Iterable[Tree]) -> dict[str, Any]:
    """`snapshot`, with what the recordings of `trees` have in it."""
    said = []
    for tree in trees:
        with tree.lock:
            pools, recordings = memory.of_pools(tree), memory.of_recordings(tree)
            names = {pool.generation: _names(tree, pool.generation) for pool in pools}
            graphs = tree.device.graph_bytes()
        said.append({
            "device": tree.device.index,
            "graph_bytes": graphs,
            "pools": [asdict(pool) for pool in pools],
            "recordings": [asdict(entry) for entry in recordings.values()],
        })  # fmt: skip
        of_id = {pool.id: pool for pool in pools}
        for segment in snapshot["segments"]:
            found = of_id.get(tuple(segment["segment_pool_id"]))
            if found is None or segment["device"] != tree.device.index:
                continue
            _put_on_top(segment, f"recordings, pool {found.generation} of device {tree.device.index}")
            for block in segment["blocks"]:
                if (name := names[found.generation].get(block["address"])) is not None:
                    _put_on_top(block, name)
    snapshot["multigraph"] = {"devices": said}
    return snapshot


def _put_on_top(entry: dict[str, Any], name: str) -> None:
    entry["frames"] = [{"name": name, "filename": "multigraph", "line": 0}, *entry.get("frames", ())]


def _names(tree: Tree, generation: int) -> dict[int, str]:
    """What lies at each address of a pool where recordings have outputs: one that is alive, or all that take turns."""
    alive: dict[int, str] = {}
    dead: dict[int, list[str]] = {}
    for node in memory.of_recordings(tree):
        for slot in node.slots if node.generation == generation else ():
            if memory.alive(tree, slot):
                alive[slot.address] = f"output of {memory.label(node)}"
            elif (label := memory.label(node)) not in dead.setdefault(slot.address, []):
                dead[slot.address].append(label)
    for address, labels in dead.items():
        more = f" and {len(labels) - _MOST_NAMES} more" if len(labels) > _MOST_NAMES else ""
        alive.setdefault(address, f"dead outputs of {', '.join(labels[:_MOST_NAMES])}{more}")
    return alive
