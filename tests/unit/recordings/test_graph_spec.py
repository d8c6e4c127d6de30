"""A graph's spec survives pickle and JSON, one that contradicts itself is not accepted, and what draws is known."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch

from multigraph_backend.cudagraphs.partition import of_inductor
from multigraph_backend.cudagraphs.partition.graph_spec import Cut, GraphSpec, PartitionSpec, Placeholder

PIECE = PartitionSpec(
    number=0,
    inputs=(1, None, 0),
    outputs=(1, None),
    static=(0,),
    mutated=(0,),
    visible=(False, True),
    names=("weight", "buf0", "x"),
    constants=("constant0",),
)
SPEC = GraphSpec(
    is_backward=False,
    inputs=(Placeholder("x", "at x"), Placeholder("weight", None, "at copy_")),
    outputs=2,
    static=(1,),
    mutated=(1,),
    visible=(True, False),
    pieces=(PIECE,),
    whole=False,
    cuts=(Cut("cpu op", ("aten.add.Tensor",), "at add"),),
    devices=(0,),
)


def test_it_goes_through_json_and_pickle_unchanged() -> None:
    SPEC.verify()
    assert GraphSpec.from_dict(json.loads(json.dumps(SPEC.to_dict()))) == SPEC
    assert GraphSpec.from_dict(SPEC.to_dict()) == SPEC
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC
    assert hash(SPEC) == hash(GraphSpec.from_dict(SPEC.to_dict()))


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.whole = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": 3}, "lengths differ: 3 outputs, 2 visible"),
        ({"static": (2,)}, "static: 2 is not below 2"),
        ({"static": (1, 1)}, "static: listed twice"),
        ({"mutated": (-1,)}, "mutated: -1 is not below 2"),
        ({"static": ()}, "piece 0: input 0 is static in the piece and not in the graph"),
        ({"devices": (0, 0)}, "devices are listed twice"),
        ({"whole": True}, "it is one piece, and is cut"),
        ({"whole": True, "cuts": (), "pieces": ()}, "it is one piece, and has 0"),
        ({"refused": "no"}, "it is refused, and has pieces"),
    ],
)
def test_a_graph_that_contradicts_itself_is_not_accepted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **changes).verify()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 1}, "pieces are not numbered from 0 on"),
        ({"names": ("a",)}, "piece 0: lengths differ: 3 inputs, 1 names"),
        ({"outputs": (1,)}, "piece 0: lengths differ: 1 outputs, 2 visible"),
        ({"inputs": (2, None, 0), "static": ()}, "piece 0: inputs: 2 is not below 2"),
        ({"outputs": (1, 2)}, "piece 0: outputs: 2 is not below 2"),
        ({"mutated": (3,)}, "piece 0: mutated: 3 is not below 3"),
        ({"results": (2,)}, "piece 0: lengths differ: 3 inputs, 1 results"),
        ({"results": (2, 0, 0)}, "piece 0: input 0 is a tuple of results, and an input of the graph"),
        ({"outputs": (0, None)}, "piece 0: output 0 of the graph is visible and not as output of the piece"),
    ],
)
def test_a_piece_that_contradicts_the_graph_is_not_accepted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, pieces=(dataclasses.replace(PIECE, **changes),)).verify()


ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention.default


@pytest.mark.parametrize(
    ("target", "args", "drawn"),
    [
        (ATTENTION, (None, True), False),
        (ATTENTION, (None, True, 0.0), False),
        (ATTENTION, (None, True, 0), False),
        (ATTENTION, (None, True, 0.1), True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (), False),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (0.5,), True),
    ],
)
def test_attention_draws_where_it_drops_something(target: Any, args: tuple[Any, ...], drawn: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x, x, x, *args)))
    assert of_inductor.draws(torch.fx.GraphModule(torch.nn.Module(), graph)) is drawn


def test_a_dropout_that_is_not_known_draws() -> None:
    graph = torch.fx.Graph()
    x, p = graph.placeholder("x"), graph.placeholder("p")
    graph.output(graph.call_function(ATTENTION, (x, x, x, None, True), {"dropout_p": p}))
    assert of_inductor.draws(torch.fx.GraphModule(torch.nn.Module(), graph)) is True
