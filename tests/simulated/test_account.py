"""explain() about recordings: what is recorded after what, what is copied and moved, what memory all of it takes, and
why the rest is not."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from expecttest import assert_expected_inline

import multigraph_backend
from multigraph_backend.cudagraphs import account, runtime, snapshot
from multigraph_backend.cudagraphs.devices.simulated.device import KERNEL_BYTES, PAGE, SimulatedDevice
from multigraph_backend.cudagraphs.recordings import memory
from tests.support.simulated.pieces import Bench, call_right, values


def test_the_account_of_a_tree() -> None:
    def double(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2,)

    def grown(n: int, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.repeat(n),)

    def fetches(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * x.sum().item(),)

    bench = Bench()
    first, second, third = bench.piece(double, 1, 1), bench.piece(grown, 2, 1), bench.piece(fetches, 1, 1)
    inputs = [values() for _ in range(6)]  # all alive, so that none lies where another lay
    held: list[torch.Tensor] = []
    for number, x in enumerate(inputs):
        (y,) = first([x])
        (z,) = second([2 + number % 2, y])
        held = [z]
        third([x])
        del y, z
    report = account.of(bench.tree)
    assert held
    assert json.loads(json.dumps(asdict(report)))["recordings"] == bench.tree.size
    assert_expected_inline(
        str(report),
        """\
recordings on device 0: 3 in 0.0 MiB; 2 outputs moved, 2 failed
  pool: 256 B held: 0 B live, 0 B lent, 256 B dead
  graphs: 2.0 MiB of the driver's own
  double: 1 recorded, 5 replays, copies x0
  fetches: 0 recorded, 0 replays
    not recorded, 5 calls: recording failed: RuntimeError: operation not permitted when stream is capturing: aten._local_scalar_dense.default
  grown: 2 recorded, 4 replays, hands out 1 copies, 2 outputs moved
  double: 5 replays; keeps 32 B, peak 128 B (96 B shared)
    grown [2]: 2 replays; keeps 64 B, peak 64 B
    grown [3]: 2 replays; keeps 96 B, peak 128 B (32 B shared), made the pool 64 B larger""",
    )


def test_the_account_names_inputs_and_the_users_lines() -> None:
    def weighted(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ w,)

    def appended(cache: torch.Tensor) -> tuple[torch.Tensor]:
        return (cache.add_(1).sum() * 2,)

    bench = Bench()
    first = bench.piece(weighted, 2, 1, static=[1])
    second = bench.piece(
        appended, 1, 1, mutated=[0], traces=('File "model.py", line 7, in forward\n    cache.add_(1)',)
    )
    inputs = [torch.randn(3, 8) for _ in range(6)]  # all alive, so that none lies where another lay
    weights = [torch.eye(8) * (number + 1) for number in range(3)]
    for number, x in enumerate(inputs):
        call_right(first, weighted, x, weights[number // 2])
    for _ in range(3):
        call_right(second, appended, values())
    report = account.of(bench.tree)
    assert json.loads(json.dumps(asdict(report)))["pieces"][1]["again"] == {"x1 at another address": 2}
    assert_expected_inline(
        str(report),
        """\
recordings on device 0: 3 in 0.0 MiB; 2 recorded again
  pool: 256 B held: 0 B live, 0 B lent, 256 B dead
  graphs: 2.0 MiB of the driver's own
  appended: 0 recorded, 0 replays
    2 calls unrecorded: it changes input x0, which is no parameter, buffer or output of a recording and came at another address than before
      File "model.py", line 7, in forward
      cache.add_(1)
  weighted: 3 recorded, 5 replays, copies x0
    recorded again 2 times, for x1 at another address
  weighted: 2 replays; keeps 96 B, peak 256 B (160 B shared)
  weighted: 2 replays; keeps 96 B, peak 256 B (160 B shared)
  weighted: 1 replays; keeps 96 B, peak 256 B (160 B shared), made the pool 128 B larger""",
    )


def widened(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = x.repeat(8)
    return wide[:64] + 1, wide.sum().reshape(1)


def narrowed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.repeat(4)[:16] * 2,)


def test_memory_of_recordings_and_of_their_pool() -> None:
    """64 bytes are the least that the pool gives out, and 4 those of a number."""
    bench = Bench()
    first, second = bench.piece(widened, 1, 2), bench.piece(narrowed, 1, 1)
    few = total = torch.empty(0)
    for _ in range(3):
        del few, total  # else they were moved out
        wide, total = first([values(8)])
        (few,) = second([wide])
        del wide
    (pool,) = memory.of_pools(bench.tree)
    one, other = memory.of_recordings(bench.tree).values()
    # its input's copy and what it repeats stay for as long as the function has them
    assert (one.label, one.kept, one.alive, one.peak) == ("widened", 256 + 4, 4, 64 + 256 + 256 + 64)
    # it reads `wide` where that is, and repeats it
    assert (other.label, other.kept, other.alive, other.peak) == ("narrowed", 64, 64, 1024 + 64)
    assert (one.shared, other.shared) == (one.peak - one.kept, other.peak - other.kept)
    assert max(one.peak, other.peak) <= pool.held == bench.device.pool_bytes() < one.peak + other.peak
    assert (pool.live, pool.lent, pool.warm, pool.dead) == (4 + 64, 0, 0, pool.held - 68)
    few.resize_(1000)  # lies elsewhere now
    (pool,) = memory.of_pools(bench.tree)
    assert (pool.live, pool.dead) == (4, pool.held - 4)
    del total, few
    (pool,) = memory.of_pools(bench.tree)
    assert (pool.live, pool.dead) == (0, pool.held)


def test_what_first_calls_leave_is_live_and_of_no_recording() -> None:
    kept: list[torch.Tensor] = []

    def keeps(x: torch.Tensor) -> tuple[torch.Tensor]:
        kept.append(x + 1)
        return (x.repeat(4),)

    bench = Bench()
    piece = bench.piece(keeps, 1, 1)
    (y,) = piece([values(8)])
    (pool,) = memory.of_pools(bench.tree)
    assert (pool.live, pool.warm) == (128 + 32, 128 + 32)
    assert "160 B of what is live from first calls" in str(account.of(bench.tree))
    kept.clear()
    (pool,) = memory.of_pools(bench.tree)
    assert (pool.live, pool.warm) == (128, 128)
    del y
    (pool,) = memory.of_pools(bench.tree)
    assert (pool.live, pool.warm, pool.dead) == (0, 0, pool.held)


def test_recordings_that_were_given_up_are_in_the_account_while_an_output_is_alive() -> None:
    bench = Bench()
    piece = bench.piece(narrowed, 1, 1)
    held = torch.empty(0)
    for _ in range(3):
        del held
        (held,) = piece([values(8)])
    bench.tree.unlink_all()
    (left,) = memory.of_recordings(bench.tree).values()
    assert (left.given_up, left.alive) == (True, 64)
    assert "  given up, with outputs alive: narrowed: 2 replays; keeps 64 B (64 B alive)" in str(account.of(bench.tree))
    del held
    piece([values(8)])
    assert not any(entry.given_up for entry in memory.of_recordings(bench.tree).values())


def test_graphs_take_pages_of_the_driver() -> None:
    bench = Bench()
    kernels = PAGE // KERNEL_BYTES

    def long(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(kernels // 2 + 1):
            x = x + 1
        return (x,)

    taken = []
    for _ in range(3):
        piece = bench.piece(long, 1, 1)
        for _ in range(2):
            piece([values(8)])
        taken.append(account.of(bench.tree).graph_bytes)
    assert taken == [PAGE, 2 * PAGE, 2 * PAGE]  # the second page has room for the third graph
    bench.tree.forget()
    assert account.of(bench.tree).graph_bytes == 2 * PAGE  # the driver keeps them
    assert "  graphs: 4.0 MiB of the driver's own" in str(account.of(bench.tree))


def test_counts_have_bytes_of_now() -> None:
    device = 77
    before = multigraph_backend.stats()
    try:
        tree = runtime.tree(device, lambda index: SimulatedDevice())
        bench = Bench()
        bench.tree, bench.device = tree, tree.device
        piece = bench.piece(narrowed, 1, 1)
        for _ in range(2):
            (y,) = piece([values(8)])
        (pool,) = memory.of_pools(tree)
        multigraph_backend.reset_stats()
        now = multigraph_backend.stats()
        names = ("held", "live", "lent", "dead")
        assert [now[f"pool_{name}_bytes"] - before[f"pool_{name}_bytes"] for name in names] == [
            pool.held, y.nbytes, 0, pool.held - y.nbytes
        ]  # fmt: skip
        assert now["graph_bytes"] - before["graph_bytes"] == PAGE
        del y
        assert multigraph_backend.stats()["pool_live_bytes"] == before["pool_live_bytes"]
    finally:
        del runtime._trees[device]
        runtime._measured.pop(0, None)


def test_a_snapshot_of_memory_has_recordings_by_name() -> None:
    bench = Bench()
    first, second = bench.piece(widened, 1, 2), bench.piece(narrowed, 1, 1)
    few = torch.empty(0)
    for _ in range(3):
        del few
        wide, total = first([values(8)])
        del wide, total
        (few,) = second([values(8)])
    ((_, alive), (_, two)) = ((node, node.slots) for node in memory.of_recordings(bench.tree))
    base, (pool,) = bench.device._pool.base, memory.of_pools(bench.tree)
    blocks = [
        {
            "address": address,
            "size": 64,
            "state": "active_allocated",
            "frames": [{"name": "f", "filename": "m", "line": 1}],
        }
        for address in sorted({*(slot.address for slot in (*alive, *two)), base + pool.held})
    ]
    segments = [
        {"device": 0, "segment_pool_id": pool.id, "address": base, "blocks": blocks},
        {"device": 1, "segment_pool_id": pool.id, "address": base, "blocks": [dict(block) for block in blocks]},
        {"device": 0, "segment_pool_id": (0, 0), "address": 1 << 40, "blocks": []},
    ]
    made = snapshot.named({"segments": segments, "device_traces": [[]]}, [bench.tree])
    assert few is not None
    (device,) = made["multigraph"]["devices"]
    assert [entry["label"] for entry in device["recordings"]] == ["widened", "narrowed"]
    assert [(entry["held"], entry["live"]) for entry in device["pools"]] == [(pool.held, 64)]
    ours, others, ordinary = made["segments"]
    assert ours["frames"][0]["name"] == "recordings, pool 1 of device 0"
    assert "frames" not in others
    assert "frames" not in ordinary
    assert [[frame["name"] for frame in block["frames"]] for block in others["blocks"]] == [["f"]] * len(blocks)
    assert_expected_inline(
        "\n".join(" < ".join(frame["name"] for frame in block["frames"]) for block in blocks),
        """\
output of narrowed < f
dead outputs of widened < f
dead outputs of widened < f
f""",
    )
