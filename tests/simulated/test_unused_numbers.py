"""Floats that a trace has made constants are inputs that nothing reads: Inductor does not copy them to the GPU.

Proven with Inductor's own pass, which gathers numbers on the CPU where graphs are recorded, on a graph of a GPU's
tensors that are fake: no GPU is needed.
"""

from __future__ import annotations

import torch
from torch._inductor import config
from torch._inductor.fx_passes.post_grad import move_constructors_to_gpu
from torch._subclasses import FakeTensor, FakeTensorMode

from multigraph_backend.cudagraphs import output_code
from multigraph_backend.cudagraphs.partition import of_inductor
from multigraph_backend.cudagraphs.partition.cuts import CutRules


def _graph(mode: FakeTensorMode, used: bool) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A number of the program's twice, and a step on a GPU that reads one of them if it is `used`."""
    numbers = [mode.from_tensor(torch.tensor(0.5, dtype=torch.float64)) for _ in range(2)]
    x = FakeTensor(mode, torch.empty(3, device="meta"), torch.device("cuda:0"))
    graph = torch.fx.Graph()
    places = [graph.placeholder(name) for name in ("first", "second", "x")]
    step = graph.call_function(torch.ops.aten.mul.Tensor, (places[2], places[0] if used else 2.0))
    step.meta["val"] = x
    graph.output((step,))
    return torch.fx.GraphModule({}, graph), [*numbers, x]


def _hidden(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What Inductor is given for `inputs`, each of which the graph has a note of."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value
    return output_code._unread_numbers_hidden(of_inductor.take(gm, (), False, CutRules()).graph.unread, inputs)


def _gathered(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> int:
    """How many numbers Inductor copies to the GPU before the rest of `gm`."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value  # as Inductor does, of the inputs that it is given
    with config.patch({"triton.cudagraphs": True, "graph_partition": True}):
        move_constructors_to_gpu(gm.graph)
    return len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.unsqueeze.default))


def test_numbers_that_nothing_reads_are_not_copied_to_the_gpu() -> None:
    mode = FakeTensorMode()
    gm, inputs = _graph(mode, used=False)
    hidden = _hidden(gm, inputs)
    assert _gathered(gm, hidden) == 0
    assert [tuple(value.shape) for value in hidden] == [(0,), (0,), (3,)]
    gm, inputs = _graph(mode, used=False)
    assert _gathered(gm, inputs) == 2  # what Inductor does otherwise


def test_a_number_that_is_read_stays_what_it_is() -> None:
    gm, inputs = _graph(FakeTensorMode(), used=True)
    hidden = _hidden(gm, inputs)
    assert hidden[0] is inputs[0]
    assert hidden[2] is inputs[2]
    assert _gathered(gm, hidden) == 1
