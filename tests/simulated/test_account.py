"""explain() about recordings: what is recorded after what, what is copied and moved, and why the rest is not."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from expecttest import assert_expected_inline

from multigraph_backend.cudagraphs import account
from tests.simulated.pieces import Bench, values


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
  grown: 2 recorded, 4 replays, hands out 1 copies
  double: 5 replays
    grown [2]: 2 replays
    grown [3]: 2 replays""",
    )
