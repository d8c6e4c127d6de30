"""Copies of a graph's structure, while another thread has to do with the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multigraph_backend.capture.structure import copy_structure


class Grows:
    """An attribute whose copy is made while another thread writes into the module."""

    def __init__(self, module: torch.nn.Module, times: int) -> None:
        self.module, self.left = module, times

    def __deepcopy__(self, memo: Any) -> int:
        if self.left:
            self.left -= 1
            vars(self.module)[f"written{self.left}"] = "code"
        return 7


@pytest.mark.parametrize(("times", "right"), [(0, True), (3, True), (4, False)])
def test_a_graph_into_which_another_thread_writes_is_copied_once_more(times: int, right: bool) -> None:
    gm = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    vars(gm)["grows"] = Grows(gm, times)
    vars(gm)["behind"] = 1
    if not right:  # somebody writes at each copy
        with pytest.raises(RuntimeError, match="changed size"):
            copy_structure(gm)
        return
    made = copy_structure(gm)
    assert [node.name for node in made.graph.nodes] == [node.name for node in gm.graph.nodes]
