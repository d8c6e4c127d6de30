"""A piece of compiled code on the simulated device that is recorded with collectives of the process groups named."""

from __future__ import annotations

from typing import Any

import torch

from multigraph_backend.cudagraphs.devices.simulated.device import SimulatedDevice
from multigraph_backend.cudagraphs.recordings.piece import Piece
from multigraph_backend.cudagraphs.recordings.piece_spec import PieceSpec
from multigraph_backend.cudagraphs.recordings.tree import Tree


def doubled(inputs: list[Any]) -> tuple[Any, ...]:
    (x,) = inputs
    inputs.clear()
    return (x * 2,)


def recorded(groups: tuple[str, ...]) -> tuple[SimulatedDevice, Tree, Piece]:
    device = SimulatedDevice()
    tree = Tree(device)
    piece = Piece(tree, doubled, PieceSpec(("x",), (True,), groups=groups))
    for _ in range(3):
        right(piece)
    assert tree.counts["recordings"] == 1
    return device, tree, piece


def right(piece: Piece) -> torch.Tensor:
    x = torch.randn(8)
    (y,) = piece([x])
    torch.testing.assert_close(y, x * 2)
    return y  # type: ignore[no-any-return]
