"""Where the memory of recordings lies, and how long: read off what the tree itself decides by."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import torch

from multigraph_backend.cudagraphs import account, memory_map
from multigraph_backend.cudagraphs.memory_map import Block, RecordingReport
from tests.support.simulated.pieces import Bench, values


def test_blocks_of_a_path_as_the_tree_knows_them() -> None:
    """`h` is held by compiled code alone and dies in the second piece, whose output may lie where it lay."""
    bench = Bench()
    first = bench.piece(lambda x: (x * 2, x + 1), 1, 2, visible=(False, True), label="first")
    second = bench.piece(lambda h: (h.repeat(4),), 1, 1, label="second")
    third = bench.piece(lambda y: (y.sum(0, keepdim=True),), 1, 1, label="third")
    for _ in range(4):
        h, kept = first([values(16)])
        (y,) = second([h])
        del h, kept
        (z,) = third([y])
        del y, z
    report = account.of(bench.tree)
    nodes = report.nodes
    assert json.loads(json.dumps(asdict(report)))["nodes"][0]["label"] == "first"
    assert [(node.label, node.replays) for node in nodes] == [
        (line.strip().split(":")[0], int(line.split(": ")[1].split()[0])) for line in report.tree
    ]
    assert [node.parent for node in nodes] == [None, nodes[0].number, nodes[1].number]
    assert [(block.kind, block.name, block.bytes) for block in nodes[0].blocks] == [
        ("input", "x0", 64), ("inside", "", 64), ("output", "", 64)
    ]  # fmt: skip
    assert nodes[0].bytes == 128
    h_at, kept_at = (block.address for block in nodes[0].blocks[1:])
    (path,) = memory_map.paths(nodes)
    spans = {(entry.block.address, entry.block.kind): (entry.first, entry.last) for entry in memory_map.lifetimes(path)}
    assert {h_at, kept_at} & {*nodes[2].over, *nodes[1].consumes, *nodes[2].consumes}
    assert spans[kept_at, "output"] == (0, 1)  # dropped before the third ran


def test_what_is_drawn_at_one_time_never_overlaps() -> None:
    """On every path of a tree that grew under many orders: two blocks alive at one time share no byte."""
    bench = Bench()
    pieces = [
        bench.piece(lambda x: (x * 2, x.repeat(2)), 1, 2, label="wide"),
        bench.piece(lambda x: (x + 1,), 1, 1, label="plain"),
        bench.piece(lambda x: (x.repeat(3)[:16],), 1, 1, label="narrow"),
    ]
    for _ in range(3):
        for order in itertools.permutations(pieces):
            held: list[torch.Tensor] = []
            for number, piece in enumerate(order):
                x = held[-1][:16] if held and number == 2 else values(16)
                held += list(piece([x]))
                if number == 1:
                    del held[0]
                del x
            held.clear()
    nodes = account.of(bench.tree).nodes
    found = memory_map.paths(nodes)
    assert len(found) > 2
    assert [path[-1].replays for path in found] == sorted((path[-1].replays for path in found), reverse=True)
    for path in found:
        spans = [entry for entry in memory_map.lifetimes(path) if entry.block.kind != "input"]
        for one, other in itertools.combinations(spans, 2):
            # while the recording runs in which one dies, the other may begin where it lay
            if max(one.first, other.first) < min(one.last, other.last) or one.first == other.first:
                low, high = sorted((one.block, other.block), key=lambda block: block.address)
                assert low.address + low.bytes <= high.address


def node(number: int, parent: int | None, *blocks: Block, over: tuple[int, ...] = (), consumes: tuple[int, ...] = ()
         ) -> RecordingReport:  # fmt: skip
    return RecordingReport(number, parent, f"r{number}", number, 0, blocks, over, consumes)


def test_an_output_lives_until_a_recording_may_write_over_it() -> None:
    kept, read, dropped = Block(0, 64, "output"), Block(64, 64, "inside"), Block(128, 64, "output")
    buffer, later = Block(256, 64, "input", "x"), Block(64, 32, "output")
    path = (
        node(3, None, kept, read, dropped),
        node(4, 3, buffer, later, consumes=(64,)),
        node(5, 4, over=(128, 999)),
    )
    assert [(entry.block, entry.first, entry.last) for entry in memory_map.lifetimes(path)] == [
        (kept, 0, 2), (read, 0, 1), (dropped, 0, 1), (later, 1, 2), (buffer, 1, 1)
    ]  # fmt: skip


def test_paths_end_where_nothing_follows() -> None:
    nodes = [node(1, None), node(2, 1), node(3, 2), node(4, 1), node(5, None)]
    assert [[entry.number for entry in path] for path in memory_map.paths(nodes)] == [[5], [1, 4], [1, 2, 3]]
    assert memory_map.paths([]) == []
