"""Variants issue what the generic graph issues, or are refused with that reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import multigraph_backend
from multigraph_backend.region import registry
from tests.support.distributed import random_collectives as programs

c10d: Any = torch.ops._c10d_functional


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("seed", range(4))
def test_every_form_of_a_random_program_issues_what_it_issues_eagerly(seed: int) -> None:
    assert list(programs.problems(programs.made(seed))) == []


def reduced_twice(x: torch.Tensor) -> torch.Tensor:
    y = functional.all_reduce(x.sin(), "sum", dist.group.WORLD)
    return functional.all_reduce(y.sum(0), "max", dist.group.WORLD) + y


def merge_where_static(graph: torch.fx.Graph) -> None:
    """A pass of a user that only static sizes let do its work: the second collective goes in there."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if node.args[1] == "max" and all(isinstance(size, int) for size in node.args[0].meta["val"].shape):
            with graph.inserting_after(node):
                again = graph.call_function(c10d.all_reduce.default, (node, "sum", node.args[2]))
                again.meta.update(node.meta)
            node.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)


def reduce_in_place_of_max(graph: torch.fx.Graph) -> None:
    """The same after the graph was read: what is generated is another collective than the graph's."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if node.args[1] == "max" and all(isinstance(size, int) for size in node.args[0].meta["val"].shape):
            node.target = c10d.broadcast.default
            node.args = (node.args[0], 0, node.args[2])


class Pass:
    """As Inductor wants passes: with a name for its caches."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.function(graph)

    def uuid(self) -> str:
        return f"{self.function.__name__}"


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("generic_first", [True, False])
@pytest.mark.parametrize(
    ("knob", "function", "reason"),
    [
        ("joint_custom_pre_pass", merge_where_static, "its forward issues 3 collectives, and generic's 2"),
        ("post_grad_custom_pre_pass", reduce_in_place_of_max, "Inductor's code issues all_reduce, broadcast, and its"),
    ],
)
def test_a_variant_that_issues_something_else_is_refused_and_generic_serves(
    knob: str, function: Any, reason: str, generic_first: bool
) -> None:
    compiled = torch.compile(
        reduced_twice,
        backend="multigraph",
        dynamic=True,
        options={"specialize": [{"x[0]": 6, "x[1]": 5}], "inductor": {knob: Pass(function)}},
    )
    sizes = [(4, 7), (6, 5), (6, 5)]
    for rows, columns in sizes if generic_first else sizes[1:]:
        x = torch.randn(rows, columns)
        torch.testing.assert_close(compiled(x), reduced_twice(x))
    (region,) = multigraph_backend.explain().regions
    (variant,) = region.variants
    assert variant.state == "failed"
    assert variant.reason is not None
    assert "OtherCollectives" in variant.reason
    assert reason in variant.reason
    assert region.generic.calls == (3 if generic_first else 2)
    assert multigraph_backend.stats()["refused_collectives"] == 1


@pytest.mark.usefixtures("group_of_one")
def test_what_is_issued_is_kept_with_each_variant_and_found_again_in_the_caches() -> None:
    def compiled_once() -> list[Any]:
        compiled = torch.compile(
            reduced_twice, backend="multigraph", dynamic=True, options={"specialize": [{"x[0]": {"multiple_of": 4}}]}
        )
        for rows in (8, 5):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x), reduced_twice(x))
        (region,) = registry.living()
        return [form.lowered.issued for entry in (*region.variants, region.generic) for form in entry.forms]

    first = compiled_once()
    assert [entry.count for entry in first] == [2, 2]
    assert first[0].forward[0].counts[0].startswith("4*")
    torch._dynamo.reset()
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    assert compiled_once() == first
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == hits + 2


@pytest.mark.usefixtures("group_of_one")
def test_a_graph_that_makes_dtensors_itself_is_taken_to_issue_collectives() -> None:
    """Which ones, only AOTAutograd's graph shows; in a group of one there are none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (1,))

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = DTensor.from_local(x, mesh, [Shard(0)], run_check=False) * 2
        return y.redistribute(mesh, [Replicate()]).to_local()  # type: ignore[no-any-return]

    function = torch.compile(doubled, backend="multigraph", dynamic=False, options={"on_failure": "raise"})
    x = torch.randn(4, 3)
    torch.testing.assert_close(function(x), x * 2)
    (region,) = registry.living()
    assert region._graph.communicates
    assert not region._graph.repeatable
    (form,) = region.generic.forms
    assert form.lowered.issued is not None
    assert form.lowered.issued.unknown is None
