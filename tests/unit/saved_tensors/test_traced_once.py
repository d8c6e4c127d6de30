"""Equal units are traced once, and what is put into the graphs for each shares nothing with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multigraph_backend import Scaled, saved_hook
from multigraph_backend.saved_tensors import tracing
from tests.support.saved_tensors.partitioned import everything, gradients, partition


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    trace_functions = tracing.trace_functions

    def counting(unit: Any, *args: Any) -> Any:
        names.append(unit.name)
        return trace_functions(unit, *args)

    monkeypatch.setattr(tracing, "trace_functions", counting)
    return names


def layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = (x @ w).sin() @ v
    return x.cos()


@pytest.mark.parametrize("dynamic", [False, True])
def test_units_of_one_form_are_traced_once(traces: list[str], dynamic: bool) -> None:
    made = partition(layers, everything(Scaled("int8")), dynamic)
    args = torch.randn(8, 4), torch.randn(4, 64) / 8, torch.randn(64, 4) / 8
    got, wanted = gradients(made.run, *args), gradients(layers, *args)
    assert all((one - two).norm() < 0.05 * two.norm() for one, two in zip(got, wanted, strict=True))
    (said,) = made.accounts
    assert said.packed > len(traces) > 0
    for gm in (*made.forward, *made.backward):
        values = [node.meta["val"] for node in gm.graph.nodes if "pack" in node.name and node.op == "call_function"]
        storages = [value.untyped_storage()._cdata for value in values if value.dtype == torch.int8]
        assert len(set(storages)) == len(storages)
        assert all(node.meta["val"] is not None for node in gm.graph.nodes if node.op == "call_function")


def test_what_cannot_be_packed_is_asked_once_and_said_of_each(traces: list[str]) -> None:
    hook = saved_hook(lambda x: x, lambda x: x.double())
    made = partition(layers, everything(hook))
    gradients(made.run, torch.randn(8, 4), torch.randn(4, 64), torch.randn(64, 4))
    (said,) = made.accounts
    refused = [entry for entry in said.tensors if "unpack returned torch.float64" in (entry.reason or "")]
    assert len(refused) > len(traces) > 0
