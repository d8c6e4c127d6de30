"""The check before each call of a graph that changes inputs: it sees whatever shares memory with them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from multigraph_backend.capture import aliasing


def _graph(held: list[torch.Tensor]) -> Any:
    """Of three tensors and a number, and one that it holds; it writes to the first and third argument."""
    return SimpleNamespace(inputs=[None] * 4, tensor_inputs=(0, 2, 3), written={0, 2}, held=held)


def test_every_way_in_which_arguments_share_memory_is_seen() -> None:
    one, two, alone = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    given = [one, one[1:], one.detach(), two, two[:2], alone]
    found = {True: 0, False: 0}
    for first, second, read, held in itertools.product(given, repeat=4):
        check = aliasing.written_alone(_graph([held]))
        changing, reading = [first, second], [read, held]
        storages = [tensor.untyped_storage().data_ptr() for tensor in changing]
        expected = storages[0] != storages[1] and not any(
            tensor.untyped_storage().data_ptr() in storages for tensor in reading
        )
        assert check((first, 7, second, read)) == expected
        found[expected] += 1
    assert min(found.values()) > 0


def test_a_tensor_that_nothing_else_lies_over_is_told_from_others() -> None:
    sole = aliasing._sole_use()
    tensor = torch.randn(3)
    key = tensor.untyped_storage()._cdata
    assert sole(key)
    view = tensor[1:]
    assert not sole(key)
    del view
    assert sole(key)
    other = torch.nn.Parameter(tensor.detach())  # its storage was never asked for
    del tensor
    assert sole(other.untyped_storage()._cdata)
