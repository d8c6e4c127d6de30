"""What `aot_compile` makes is recorded, and so is what was saved and loaded: as vLLM's mode 2 runs it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import multigraph_backend
from tests.support.gpu.programs import CUDA, close, fresh, tree_counts


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with torch._dynamo.config.patch(enable_aot_compile=True):  # off by default in torch 2.11
        yield
    fresh()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).softmax(-1)


def test_a_loaded_model_without_guards_is_recorded_for_each_size(tmp_path: Path) -> None:
    model, path = Net().to(CUDA), tmp_path / "net"
    x = torch.randn(6, 64, device=CUDA)
    torch._dynamo.decorators.mark_unbacked(x, 0, hint_override=6)
    options = {
        "specialize": [{"x[0]": [8, 1]}],
        "record_small": True,
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
    }
    made = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="multigraph", options=options)
    with torch.no_grad():
        ahead = made.aot_compile(((x,), {}))
        ahead.save_compiled_function(str(path))
        loaded = torch.compiler.load_compiled_function(io.BytesIO(path.read_bytes()))
        loaded.disable_guard_check()
        before = tree_counts("recordings")
        for rows in (8, 1, 5):
            for _ in range(4):  # one compiles, one records, two replay
                x = torch.randn(rows, 64, device=CUDA)
                close(loaded(model, x), model(x))
        assert tree_counts("recordings") - before >= 3
        stats = multigraph_backend.stats()
        assert (stats["eager_calls"], stats["failures"]) == (0, 0)

        # vLLM may capture the whole step itself: inside of that the code runs unrecorded and is right
        static = torch.randn(8, 64, device=CUDA)
        loaded(model, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = loaded(model, static)
        static.copy_(torch.randn(8, 64, device=CUDA))
        graph.replay()
        close(output, model(static))
