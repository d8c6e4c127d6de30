"""explain() about recordings: what is recorded after what, what is copied and moved, and why the rest is not."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from expecttest import assert_expected_inline

from multigraph_backend.cudagraphs import account
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
  double: 1 recorded, 5 replays, copies x0
  fetches: 0 recorded, 0 replays
    not recorded, 5 calls: recording failed: RuntimeError: operation not permitted when stream is capturing: aten._local_scalar_dense.default
  grown: 2 recorded, 4 replays, hands out 1 copies, 2 outputs moved
  double: 5 replays
    grown [2]: 2 replays
    grown [3]: 2 replays""",
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
    for w in (torch.eye(8), torch.eye(8) * 2, torch.eye(8) * 3):
        for _ in range(2):
            call_right(first, weighted, torch.randn(3, 8), w)
    for _ in range(3):
        call_right(second, appended, values())
    report = account.of(bench.tree)
    assert json.loads(json.dumps(asdict(report)))["pieces"][1]["again"] == {"x1 at another address": 2}
    assert_expected_inline(
        str(report),
        """\
recordings on device 0: 3 in 0.0 MiB; 2 recorded again
  appended: 0 recorded, 0 replays
    2 calls unrecorded: it changes input x0, which is no parameter, buffer or output of a recording and came at another address than before
      File "model.py", line 7, in forward
      cache.add_(1)
  weighted: 3 recorded, 5 replays, copies x0
    recorded again 2 times, for x1 at another address
  weighted: 2 replays
  weighted: 2 replays
  weighted: 1 replays""",
    )
