"""What is read of the pieces that Inductor has made, as text: of code it generated for a GPU, and of code it generates
here, where pieces are forced upon it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from multigraph_backend import _compat
from multigraph_backend.cudagraphs.partition import cuts, of_inductor
from multigraph_backend.cudagraphs.partition.cuts import CutRules
from multigraph_backend.cudagraphs.partition.generated_code import GeneratedCode, NotUnderstood
from multigraph_backend.cudagraphs.partition.graph_spec import Cut, GraphSpec, Placeholder
from multigraph_backend.cudagraphs.partition.of_inductor import BrokenCode, Taken
from multigraph_backend.lower import one_body

FIXTURES = Path(__file__).with_name("fixtures_partitions")


@torch.library.custom_op("mgparts::attn", mutates_args=())
def attn(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@attn.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


attn.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("mgparts::two", mutates_args=())
def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


@two.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@dataclass
class Map:
    """As Inductor's of the same attributes."""

    input_index_mapping: Sequence[int | None]
    output_index_mapping: Sequence[Any]
    constant_names: Sequence[str] = ()


@dataclass
class Code:
    """What is read of Inductor's `CompiledFxGraph`."""

    source_code: str
    partition_maps: Sequence[Map] | None
    mutated_input_idxs: Sequence[int] = ()


@dataclass
class Example:
    """A fixture and what came with it.  `outputs`: how many, of which the first `seen` are the user's."""

    name: str
    inputs: str
    outputs: int
    maps: Sequence[Map] | None
    seen: int | None = None
    static: Sequence[int] = ()
    mutated: Sequence[int] = ()
    is_backward: bool = False
    cuts: Sequence[Cut] = ()
    forbidden: dict[str, str] = field(default_factory=dict)

    def read(self, source: str | None = None) -> GraphSpec:
        names = self.inputs.split()
        graph = GraphSpec(
            is_backward=self.is_backward,
            inputs=tuple(Placeholder(name) for name in names),
            outputs=self.outputs,
            static=tuple(self.static),
            mutated=(),
            visible=tuple(index < (self.outputs if self.seen is None else self.seen) for index in range(self.outputs)),
            pieces=(),
            whole=False,
            cuts=tuple(self.cuts),
            devices=(0,),
        )
        code = Code(self.source if source is None else source, self.maps, self.mutated)
        spec = of_inductor.from_inductor(code, Taken(graph, (), self.forbidden))
        spec.verify()
        return spec

    @property
    def source(self) -> str:
        return (FIXTURES / f"{self.name}.txt").read_text()


def a_whole() -> Example:
    return Example("whole", "arg0_1 arg1_1", 1, [Map([0, 1], [0])])


def a_cpu_op() -> Example:
    cuts = [Cut("cpu op", ("aten.add.Tensor",))]
    maps = [Map([2, 3], [1, None]), Map([None, None], [0, 1])]
    return Example("cpu_in_the_middle", "arg0_1 arg1_1 arg2_1 arg3_1", 2, maps, cuts=cuts)


def a_forward() -> Example:
    names = "primals_1 primals_2 primals_3 primals_4 primals_5 primals_6"
    maps = [Map([1, 0, 2, 3, 5, 4], [3, 0, 1, 2])]
    return Example("train_forward", names, 4, maps, seen=1, static=[0, 2, 3, 4, 5], mutated=[0])


def a_backward() -> Example:
    names = "primals_2 primals_5 relu tangents_1"
    maps = [Map([3, 1, 2, 0], [4, 5, 3, 2])]
    return Example("train_backward", names, 6, maps, static=[0, 1, 2], is_backward=True)


def a_custom_op() -> Example:
    maps = [Map([0, 1, 2], [[], [], [], []]), Map([None, None, 1, 2], [[0]])]
    return Example("custom_op", "arg0_1 arg1_1 arg2_1", 1, maps, mutated=[2])


def a_data_dependent_op() -> Example:
    maps = [Map([None, 0, 1], [None, 1, None]), Map([None, 1], [0])]
    return Example("data_dependent", "arg0_1 arg1_1", 2, maps)


# ---------------------------------------------------------------- code that Inductor generated


def test_one_piece_is_all_there_is() -> None:
    assert_expected_inline(
        a_whole().read().describe(),
        """\
forward on device 0, as one: (arg0_1, arg1_1) -> 1 outputs
piece 0: (arg0_1, arg1_1) -> (0)
""",
    )


def test_a_cpu_op_in_the_middle_with_sizes_that_change() -> None:
    assert_expected_inline(
        a_cpu_op().read().describe(),
        """\
forward on device 0: (arg0_1, arg1_1, arg2_1, arg3_1) -> 2 outputs
piece 0: (arg2_1, arg3_1, arg0_1, arg1_1) -> (1, inside)
piece 1: (buf1, buf6, arg0_1, arg1_1) -> (0, 1)
cut by cpu op: aten.add.Tensor
""",
    )


def test_a_forward_that_changes_a_buffer_and_saves_inputs() -> None:
    assert_expected_inline(
        a_forward().read().describe(),
        """\
forward on device 0, as one: (primals_1*!, primals_2, primals_3*, primals_4*, primals_5*, primals_6*) -> 4 outputs
piece 0: (primals_2, primals_1*!, primals_3*, primals_4*, primals_6*, primals_5*) -> (saved 3, 0, saved 1, saved 2)
""",
    )


def test_a_backward_whose_gradients_are_all_seen() -> None:
    assert_expected_inline(
        a_backward().read().describe(),
        """\
backward on device 0, as one: (primals_2*, primals_5*, relu*, tangents_1) -> 6 outputs
piece 0: (tangents_1, primals_5*, relu*, primals_2*) -> (4, 5, 3, 2)
""",
    )


def test_a_custom_operator_that_is_handed_fresh_memory_back() -> None:
    assert_expected_inline(
        a_custom_op().read().describe(),
        """\
forward on device 0: (arg0_1, arg1_1, arg2_1!) -> 1 outputs
piece 0: (arg0_1, arg1_1, arg2_1!) -> (inside, inside, inside, inside)
piece 1: (buf3, buf2, arg1_1, arg2_1!) -> (0)
cut by Inductor, which keeps it out of its pieces: aten.relu, mgparts.attn
""",
    )


def test_a_piece_that_is_given_a_number_of_unknown_value() -> None:
    assert_expected_inline(
        a_data_dependent_op().read().describe(),
        """\
forward on device 0: (arg0_1, arg1_1) -> 2 outputs
piece 0: (buf0, arg0_1, arg1_1, u0) -> (inside, 1, inside)
piece 1: (buf6, arg1_1) -> (0)
cut by Inductor, which keeps it out of its pieces: aten.select, aten.nonzero, mgparts.attn
""",
    )


# ---------------------------------------------------------------- maps that say something else


def test_maps_may_hold_more_than_the_code() -> None:
    """Inductor makes its maps before it finds that a buffer need not exist."""
    example = a_forward()
    expected = example.read()
    example.maps = [Map([None, 1, 0, 2, 3, 5, 4], [None, 3, 0, 1, 2])]
    assert example.read() == expected


def test_a_map_that_contradicts_the_code_is_not_trusted() -> None:
    example = a_forward()
    example.maps = [Map([0, 1, 2, 3, 5, 4], [3, 0, 1, 2])]
    spec = example.read()
    assert spec.pieces == ()
    assert (spec.refused or "").startswith("Inductor's map of a piece has inputs [0, 1, 2, 3, 5, 4]")


def test_a_piece_that_reads_what_nothing_has_made_there_is_no_code_to_run() -> None:
    """As a piece behind a cut, when the reduction that it was to end has become a part of one before the cut."""
    example = a_forward()
    given = example.source.replace("buf1 = ", "buf99 = ", 1)
    assert given != example.source
    with pytest.raises(BrokenCode, match="reads buf1 in piece 0, and nothing has made it there"):
        example.read(given)


def test_maps_are_taken_where_the_code_is_not_understood_and_they_fit() -> None:
    example = a_forward()
    odd = example.source.replace("(buf2, buf3, primals_2, primals_5) = self", "result = self")
    with pytest.raises(NotUnderstood):
        _ = GeneratedCode(odd).call
    spec, expected = example.read(odd), example.read()
    assert not spec.whole
    assert [piece.inputs for piece in spec.pieces] == [piece.inputs for piece in expected.pieces]
    assert [piece.outputs for piece in spec.pieces] == [piece.outputs for piece in expected.pieces]
    assert spec.pieces[0].static == expected.pieces[0].static
    example.maps = [Map([None, 1, 0, 2, 3, 5, 4], [None, 3, 0, 1, 2])]
    assert "nor does its map fit piece 0" in (example.read(odd).refused or "")


@pytest.mark.parametrize(
    ("maps", "source", "message"),
    [
        (None, "", "Inductor did not look for pieces in it"),
        ([], "// not Python: {", "Inductor's code is not understood: it is not Python"),
        ([], a_forward().source, "Inductor tells of 0 pieces, and its code has 1"),
    ],
)
def test_what_cannot_be_read_is_not_recorded(maps: Any, source: str, message: str) -> None:
    example = a_forward()
    example.maps = maps
    assert message in (example.read(source).refused or "")


def test_an_operator_that_may_be_in_no_recording_is_looked_for_in_the_pieces() -> None:
    example = a_custom_op()
    example.forbidden = {"torch.ops.mgparts.attn.default": "an operator in Python"}
    assert example.read().refused is None
    inside = example.source.replace("        torch.ops", "        pass # torch.ops").replace(
        "    buf4 = empty", "    helper()\n    buf4 = empty"
    )
    inside = "def helper():\n    torch.ops.mgparts.attn.default(None)\n\n\n" + inside
    spec = example.read(inside)
    why = "torch.ops.mgparts.attn.default is in piece 1, and may be in no recording: an operator in Python"
    assert spec.refused == why


def test_what_inductor_keeps_out_by_itself_is_named() -> None:
    example = a_cpu_op()
    example.cuts = ()
    (cut,) = example.read().cuts
    assert (cut.reason, cut.ops) == (of_inductor.LEFT_OUT, (of_inductor.NO_OPERATOR,))
    assert a_data_dependent_op().read().cuts[0].ops == ("aten.select", "aten.nonzero", "mgparts.attn")


# ---------------------------------------------------------------- code that Inductor generates here


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor takes the CPU for a device whose work can be recorded."""
    scheduler = pytest.importorskip("torch._inductor.scheduler")
    from torch._inductor import config, ir
    from torch._inductor.utils import get_op_names

    def should_partition(self: Any, node: Any, *_: Any, **__: Any) -> str | None:
        if isinstance(node, scheduler.FusedSchedulerNode):
            return next((why for part in node.snodes if (why := should_partition(self, part))), None)
        op = node.node.op_overload if isinstance(node.node, ir.FallbackKernel) else None
        if op is not None and set(get_op_names(op)) & set(config.custom_should_partition_ops):
            return "custom"
        return "unbacked" if getattr(node.node, "unbacked_bindings", None) else None

    monkeypatch.setattr(scheduler.Scheduler, "should_partition", should_partition)


RULES = CutRules(device_type="cpu")


def compiled(
    function: Callable[..., Any], specs: list[GraphSpec], repeat: bool = False, **how: Any
) -> Callable[..., Any]:
    """`function`, whose pieces are checked in each call to be what the spec says; with bodies for blocks that come
    again, where it is to `repeat`."""

    def inner_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        settings["cudagraphs"] = _compat.BoxedBool(False)
        static, backward = settings.get("static_input_idxs") or (), bool(settings.get("is_backward"))
        taken = of_inductor.take(gm, static, backward, RULES)
        with _compat.inductor_config.patch(custom_should_partition_ops=list(taken.cut_ops)):
            code = _compat.compile_fx_inner(gm, inputs, **settings)
        spec = of_inductor.from_inductor(code, taken)
        assert spec.refused is None
        spec.verify()
        specs.append(spec)
        return _checked(code, spec)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        patches = {"triton.cudagraphs": True, "graph_partition": True}
        inner = inner_compile
        if repeat:
            inner = one_body.inner_compile(inner, cut_at=functools.partial(cuts.unsupported, rules=RULES))
        return _compat.compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)

    return torch.compile(function, backend=backend, fullgraph=True, **how)


def _checked(code: Any, spec: GraphSpec) -> Callable[[list[Any]], Any]:
    given: list[Any] = []
    calls: list[tuple[int, list[Any], list[Any]]] = []

    def wrapper(number: int) -> Callable[..., Any]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(inputs: list[Any]) -> Any:
                kept = list(inputs)
                outputs = function(inputs)
                calls.append((number, kept, list(outputs)))
                return outputs

            return run

        return wrap

    code.recursively_apply_fns([wrapper(number) for number in range(len(spec.pieces))])

    def call(inputs: list[Any]) -> Any:
        given[:] = inputs
        calls.clear()
        results = code(inputs)
        assert [number for number, _, _ in calls] == list(range(len(spec.pieces)))
        assert len(results) == spec.outputs
        for (_, kept, outputs), piece in zip(calls, spec.pieces, strict=True):
            assert len(kept) == len(piece.inputs)
            assert len(outputs) == len(piece.outputs)
            for value, index in zip(kept, piece.inputs, strict=True):
                assert index is None or value is given[index] or value == given[index]
                if index is None and isinstance(value, torch.Tensor):
                    assert not any(value is entry for entry in given)
            seen = {_address(result) for result, shown in zip(results, spec.visible, strict=True) if shown}
            for value, index, shown in zip(outputs, piece.outputs, piece.visible, strict=True):
                assert index is None or _address(value) == _address(results[index])
                assert shown or _address(value) not in seen
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    call.source_code = code.source_code  # type: ignore[attr-defined]
    return call


def _address(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def check(function: Callable[..., Any], *inputs: Any, **how: Any) -> list[GraphSpec]:
    """The specs of what was compiled, after a call whose results are right."""
    specs: list[GraphSpec] = []
    run = compiled(function, specs, **how)
    mine, theirs = ([value.clone() for value in inputs] for _ in "ab")
    torch.testing.assert_close([run(*mine), mine], [function(*theirs), theirs])
    return specs


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dynamic", [False, True])
def test_pieces_around_a_custom_operator(dynamic: bool) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, cache: torch.Tensor) -> Any:
        h = (x @ w).relu()
        cache[2:4] = h[2:4]
        a = torch.ops.mgparts.attn(h)
        return (a @ w) + h + cache, a.t(), h

    (spec,) = check(f, torch.randn(8, 6), torch.randn(6, 6), torch.zeros(8, 6), dynamic=dynamic)
    (changed,) = (spec.inputs[at] for at in spec.mutated)
    assert "cache[2:4] = h[2:4]" in (changed.stack_trace or "")
    assert "cache[2:4] = h[2:4]" in (changed.mutated_at or "")
    assert len(spec.pieces) == 2
    assert not spec.whole
    assert [cut.ops for cut in spec.cuts] == [("mgparts.attn",)]


@pytest.mark.usefixtures("forced")
def test_pieces_of_a_training_step() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (x @ w).relu()
        return ((torch.ops.mgparts.attn(h) @ w) + h).softmax(-1)

    specs: list[GraphSpec] = []
    run = compiled(f, specs)
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    result = run(x, w)
    torch.testing.assert_close(result, f(x, w))
    result.sum().backward()
    forward, backward = specs
    assert (len(forward.pieces), forward.is_backward) == (2, False)
    assert forward.visible == (True,) + (False,) * (forward.outputs - 1)
    assert (backward.whole, backward.is_backward) == (True, True)
    assert len(backward.static) == len(backward.inputs) - 1 or backward.static == ()
    assert all(backward.visible)


@pytest.mark.usefixtures("forced")
def test_pieces_around_an_operator_with_two_results() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        a, b = torch.ops.mgparts.two(x @ w)
        return a @ w + b, b

    specs: list[GraphSpec] = []
    run = compiled(f, specs)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    torch.testing.assert_close(run(x, w), f(x, w))
    (spec,) = specs
    assert [piece.results for piece in spec.pieces] == [(), (2, 0)]
    assert spec.pieces[1].describe(spec) == "piece 1: (2 of buf1, arg1_1) -> (1, 0)"
    assert GraphSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(y.sigmoid() * 2 + y).tanh()


class Layers(torch.nn.Module):
    """`cut_in`: numbers of the layers behind which a custom operator cuts the graph."""

    def __init__(self, cut_in: Sequence[int]) -> None:
        super().__init__()
        self.layers, self.cut_in = torch.nn.ModuleList(Layer() for _ in range(6)), cut_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in self.cut_in:
                x = torch.ops.mgparts.attn(x)
        return x


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "cut_in",
    [pytest.param((), id="one piece", marks=pytest.mark.slow), pytest.param((2,), id="two pieces"),
     pytest.param(range(5), id="a cut in each layer")],
)  # fmt: skip
def test_pieces_call_bodies_and_no_body_is_cut(cut_in: Sequence[int], training: bool) -> None:
    model, specs = Layers(cut_in).double(), list[GraphSpec]()
    run = compiled(model, specs, repeat=True)
    with one_body.collecting() as found:
        for _ in range(3):
            x = torch.randn(4, 8, dtype=torch.float64, requires_grad=training)
            with torch.set_grad_enabled(training):
                result, expected = run(x), model(x)
            torch.testing.assert_close(result, expected)
            if training:
                wanted = torch.autograd.grad(expected.square().sum(), [x, *model.parameters()])
                torch.testing.assert_close(torch.autograd.grad(result.square().sum(), [x, *model.parameters()]), wanted)
    assert [graph.graph for graph in found] == (["forward", "backward"] if training else ["inference"])
    assert all(graph.calls >= 4 for graph in found)
    assert cut_in or not any(spec.random for spec in specs)  # nothing is known of a custom operator
    assert len(specs[0].pieces) == len(cut_in) + 1
    assert all(spec.whole for spec in specs[1:])


# ---------------------------------------------------------------- what speaks against recording a graph at all


def refused(function: Callable[..., Any], *inputs: torch.Tensor, cut: Sequence[str] = ()) -> str | None:
    gm = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*inputs)
    return of_inductor.take(gm, (), False, CutRules(cut=frozenset(cut), device_type="cpu")).graph.refused


def test_an_operator_that_inductor_cannot_cut_around_is_in_no_recording_all_the_same() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mgparts.attn(x @ x) + 1

    x = torch.randn(4, 4)
    assert refused(function, x) is None
    assert refused(function, x, cut=["mgparts::attn"]) is None
    assert refused(function, x, cut=["aten::mm"]) == (
        "Inductor generates code for aten::mm, and cannot cut there as asked"
    )
    assert refused(function, x, cut=["mgparts::*", "aten::add"]) == (
        "Inductor generates code for aten::add.Tensor, and cannot cut there as asked"
    )


def test_only_what_torch_itself_has_is_known_to_leave_nothing_behind() -> None:
    def taken(function: Callable[..., Any]) -> GraphSpec:
        gm = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(torch.randn(4, 4))
        return of_inductor.take(gm, (), False, CutRules(device_type="cpu")).graph

    assert taken(lambda x: torch.softmax(x @ x, -1).sum()).pure
    assert not taken(lambda x: torch.ops.mgparts.attn(x @ x) + 1).pure


def test_a_size_that_comes_as_no_number_speaks_against_recording() -> None:
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.randn(5, 3))
    reason = of_inductor.take(gm, (), False, CutRules(device_type="cpu")).graph.refused
    assert reason is not None
    assert reason.endswith("of input x_1 is no input")
