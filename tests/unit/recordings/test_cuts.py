"""What a recording cannot hold is told from what it can, with the reason, and the user's rules are heeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.cudagraphs.partition import cuts
from multigraph_backend.cudagraphs.partition.cuts import CutRules, cuts_of, operators_never_recorded, unsupported

CPU = CutRules(device_type="cpu")


@torch.library.custom_op("mgcuts::attention", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@attention.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("mgcuts::update", mutates_args=("x",))
def update(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


LIBRARY = torch.library.Library("mgcuts", "FRAGMENT")
LIBRARY.define("plain(Tensor x) -> Tensor")
LIBRARY.impl("plain", lambda x: x + 1, "CPU")
LIBRARY.impl("plain", lambda x: torch.empty_like(x), "Meta")
LIBRARY.define("everywhere(Tensor x) -> Tensor")
LIBRARY.impl("everywhere", lambda x: x + 1, "CompositeExplicitAutograd")
LIBRARY.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("tagged", lambda x: x + 1, "CompositeExplicitAutograd")
for name in ("named", "named.other"):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def after_autograd(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> GraphModule:
    """The graph that a compiler is given by AOTAutograd."""
    seen: list[GraphModule] = []

    def compiler(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(gm)
        return gm.forward

    torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True, dynamic=dynamic)(*inputs)
    return seen[0]


def reasons(gm: GraphModule, rules: CutRules = CPU) -> dict[str, str]:
    """Of the operators of a graph that are cut."""
    return {cuts.shown(node): why for node in gm.graph.nodes if (why := unsupported(node, rules)) is not None}


def on(devices: Sequence[str], target: Any, result: str, *others: Any) -> Node:
    """A node that calls `target` with tensors on `devices`."""
    graph = Graph()
    with FakeTensorMode():
        inputs = [graph.placeholder(f"x{index}") for index in range(len(devices))]
        for node, device in zip(inputs, devices, strict=True):
            node.meta["val"] = torch.empty(4, device=device)
        node = graph.call_function(target, (*inputs, *others))
        node.meta["val"] = torch.empty(4, device=result)
    return node


# ---------------------------------------------------------------- devices


def never_recorded(gm: torch.fx.GraphModule, rules: CutRules) -> list[str]:
    """Names of operators, as Inductor is told them."""
    return sorted({op.name() for op in operators_never_recorded(gm, rules)})


def test_what_runs_on_the_cpu_is_cut_out_of_a_cuda_graph() -> None:
    add = torch.ops.aten.add.Tensor
    assert unsupported(on(["cuda", "cuda"], add, "cuda"), CutRules()) is None
    assert unsupported(on(["cpu", "cpu"], add, "cpu"), CutRules()) == "cpu op"
    assert unsupported(on([], torch.ops.aten.ones.default, "cpu", [4]), CutRules()) == "cpu op"
    assert unsupported(on(["cuda", "cpu"], add, "cuda"), CutRules()) == "an input on the cpu"
    assert unsupported(on(["cpu", "cpu"], add, "cpu"), CPU) is None
    assert unsupported(on(["cuda", "cuda"], add, "cuda"), CPU) == "cuda op"


def test_copies_between_devices_are_cut_out() -> None:
    to_copy, copy_ = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
    assert unsupported(on(["cuda"], to_copy, "cpu"), CutRules()) == cuts.COPY
    assert unsupported(on(["cpu"], to_copy, "cuda"), CutRules()) == cuts.COPY
    assert unsupported(on(["cuda", "cpu"], copy_, "cuda"), CutRules()) == cuts.COPY
    assert unsupported(on(["cuda:0"], to_copy, "cuda:1"), CutRules()) == cuts.COPY
    assert unsupported(on(["cuda"], to_copy, "cuda"), CutRules()) is None


def test_meta_tensors_and_views_are_no_reason() -> None:
    assert unsupported(on(["cuda", "meta"], torch.ops.aten.add.Tensor, "cuda"), CutRules()) is None
    assert unsupported(on(["cpu"], torch.ops.aten.t.default, "cpu"), CutRules()) is None
    gm = traced(lambda x: x.split(2)[0].t(), torch.ones(4, 2))
    assert reasons(gm, CutRules()) == {}


# ---------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.nonzero(), "aten.nonzero"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: x.unique(), "aten._unique2"),
    ],
)
def test_results_that_depend_on_data_are_cut_out(function: Callable[..., Any], op: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm = after_autograd(lambda x: function(x) + 1, torch.ones(4))
    assert reasons(gm) == {op: cuts.DATA}


def test_a_number_taken_out_of_a_tensor_is_cut_out_and_sizes_are_not() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        gm = after_autograd(
            lambda x: (x * x.int().sum().item()).view(-1, x.shape[0] * 2), torch.ones(4, 6), dynamic=True
        )
    assert reasons(gm) == {"aten._local_scalar_dense": cuts.DATA}
    assert reasons(gm, CutRules()).keys() >= {"aten._local_scalar_dense", "aten.mul.Tensor"}


def test_a_mask_that_chooses_elements_is_cut_out() -> None:
    masked = traced(lambda x, m: x.index_put_((m,), torch.ones(())), torch.ones(4), torch.ones(4, dtype=torch.bool))
    by_index = traced(lambda x, i: x.index_put_((i,), torch.ones(())), torch.ones(4), torch.tensor([1, 2]))
    assert reasons(masked) == {"aten.index_put_": cuts.DATA}
    assert reasons(by_index) == {}
    gathered = traced(lambda x, i: x[i], torch.ones(4), torch.tensor([1, 2]))  # its size is that of the indices
    assert reasons(gathered) == {}


def test_sparse_results_are_cut_out() -> None:
    assert reasons(traced(lambda x: x.to_sparse(), torch.ones(4)))["aten._to_sparse"] == cuts.SPARSE


# ---------------------------------------------------------------- higher-order operators


def test_control_flow_is_cut_out() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + 1

    assert reasons(after_autograd(f, torch.ones(4))) == {"higher_order.cond": cuts.CONTROL}


def test_an_operator_that_changes_its_input_is_known_in_its_wrapping() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.ops.mgcuts.update(y, x)
        return y * 2

    gm = after_autograd(f, torch.ones(4))
    assert reasons(gm) == {"mgcuts.update": cuts.PYTHON}
    assert never_recorded(gm, CPU) == ["mgcuts::update"]
    assert reasons(gm, CutRules(safe=frozenset(["mgcuts::*"]), device_type="cpu")) == {}


# ---------------------------------------------------------------- custom operators and the user's rules


@pytest.mark.parametrize("name", ["attention", "plain", "everywhere", "named"])
def test_operators_in_python_are_cut_out_unless_declared_safe(name: str) -> None:
    op = getattr(torch.ops.mgcuts, name)
    gm = traced(lambda x: op(x * 2) + 1, torch.ones(4))
    assert reasons(gm) == {f"mgcuts.{name}": cuts.PYTHON}
    assert never_recorded(gm, CPU) == [f"mgcuts::{name}"]
    for pattern in (
        f"mgcuts::{name}",
        f"mgcuts.{name}",
        f"mgcuts::{name}.default",
        f"mgcuts.{name}.default",
        "mgcuts*",
    ):
        assert reasons(gm, CutRules(safe=frozenset([pattern]), device_type="cpu")) == {}, pattern


def test_compiled_operators_of_other_libraries_are_recorded() -> None:
    gm = traced(lambda x: torch.ops._test.leaky_relu(x), torch.ones(4))
    assert reasons(gm) == {}
    assert cuts.compiled(torch.ops._test.leaky_relu.default, "cpu")
    assert cuts.compiled(torch.ops.aten.mm.default, "cpu")
    assert not cuts.compiled(torch.ops.mgcuts.plain.default, "cpu")
    assert not cuts.compiled(torch.ops.mgcuts.plain.default, "cuda")  # no kernel at all: nothing clear is said


def test_a_tag_counts_also_for_a_safe_operator() -> None:
    gm = traced(lambda x: torch.ops.mgcuts.tagged(x), torch.ones(4))
    assert reasons(gm, CutRules(safe=frozenset(["mgcuts::tagged"]), device_type="cpu")) == {
        "mgcuts.tagged": cuts.UNSAFE
    }


@pytest.mark.parametrize("pattern", ["aten::sin", "aten.sin", "aten::sin.default", "aten::s*"])
def test_the_users_cut_points_are_heeded(pattern: str) -> None:
    gm = traced(lambda x: x.sin().cos(), torch.ones(4))
    rules = CutRules(cut=frozenset([pattern]), device_type="cpu")
    assert reasons(gm, rules) == {"aten.sin": cuts.LISTED}
    assert never_recorded(gm, rules) == ["aten::sin"]


def test_one_overload_can_be_cut_and_a_cut_point_wins_over_safe() -> None:
    gm = traced(lambda x: torch.ops.mgcuts.named.other(torch.ops.mgcuts.named(x)), torch.ones(4))
    rules = CutRules(frozenset(["mgcuts::named.other"]), frozenset(["mgcuts::named*"]), "cpu")
    assert reasons(gm, rules) == {"mgcuts.named.other": cuts.LISTED}
    assert never_recorded(gm, rules) == ["mgcuts::named.other"]  # as Inductor compares it


if hasattr(torch.Tag, "out"):  # where it is not, Inductor calls no out variants of custom operators

    def test_what_inductor_may_call_in_place_of_an_operator_is_cut_too() -> None:
        tag = torch.Tag.out  # type: ignore[attr-defined]
        LIBRARY.define("filling(Tensor x) -> Tensor")
        LIBRARY.define("filling.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(tag,))
        LIBRARY.impl("filling", lambda x: x + 1, "CompositeExplicitAutograd")
        LIBRARY.impl("filling.out", lambda x, *, out: out.copy_(x), "CompositeExplicitAutograd")
        gm = traced(lambda x: torch.ops.mgcuts.filling(x), torch.ones(4))
        assert never_recorded(gm, CPU) == ["mgcuts::filling", "mgcuts::filling.out"]
        assert never_recorded(gm, CutRules(safe=frozenset(["mgcuts::filling"]), device_type="cpu")) == []


def test_each_cut_names_the_line_it_comes_from() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y = torch.ops.mgcuts.attention(y)  # the line
        return torch.ops.mgcuts.attention(y) + 1

    first, second = cuts_of(after_autograd(f, torch.ones(4)), CPU)
    assert (first.reason, first.ops) == (cuts.PYTHON, ("mgcuts.attention",))
    assert "# the line" in (first.stack_trace or "")
    assert "# the line" not in (second.stack_trace or "")
