"""Two devices in one process: each has recordings of its own, and a graph that spans both runs unrecorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import multigraph_backend
from multigraph_backend.cudagraphs import runtime
from tests.support.gpu.programs import close, compiled, fresh

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    fresh()
    yield
    fresh()


def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1) + torch.relu(x)


def test_each_device_has_recordings_of_its_own_whichever_is_current() -> None:
    run = compiled(body)
    weights = {device: torch.randn(32, 32, device=device) for device in (FIRST, SECOND)}
    held = []
    with torch.no_grad():
        for current in (FIRST, SECOND, FIRST):
            for device in (SECOND, FIRST):
                with torch.cuda.device(current):
                    for _ in range(4):
                        x = torch.randn(16, 32, device=device)
                        y = run(x, weights[device])
                        assert y.device == device
                        close(y, body(x, weights[device]))
                    held.append((y, body(x, weights[device])))
    for mine, right in held:
        close(mine, right)
    assert {tree.device.index for tree in runtime.trees() if tree.size} == {0, 1}
    assert [tree.counts["failed"] for tree in runtime.trees()] == [0, 0]


def test_training_on_the_second_device_is_recorded_there() -> None:
    model, reference = (torch.nn.Linear(32, 32, device=SECOND) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    run = compiled(lambda x: torch.tanh(model(x)).square().mean())
    before = runtime.tree(1).counts["recordings"]
    for _ in range(5):
        x = torch.randn(8, 32, device=SECOND)
        run(x).backward()
        torch.tanh(reference(x)).square().mean().backward()
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        close(mine.grad, right.grad)
    assert runtime.tree(1).counts["recordings"] - before >= 2


def test_a_graph_over_both_devices_runs_unrecorded_and_says_why() -> None:
    def spans(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).to(SECOND) + y.cos()

    run = compiled(spans)
    for _ in range(4):
        x, y = torch.randn(64, device=FIRST), torch.randn(64, device=SECOND)
        close(run(x, y), spans(x, y))
    told = [report.refused for report in multigraph_backend.explain().graphs if "spans" in report.label]
    assert told == ["it spans 2 devices"]
    with pytest.raises(RuntimeError, match="it spans 2 devices"):
        compiled(spans, cudagraphs="require")(x, y)
