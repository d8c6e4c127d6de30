"""A graph that is cut runs as the graph does, changes what the graph changes, and lets go of tensors as early."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from multigraph_backend.cudagraphs.partition.cuts import CutRules
from multigraph_backend.cudagraphs.partition.graph_spec import GraphSpec
from tests.support.splitter import Split, split

Function = Callable[..., Any]
CUT = ("aten::sin", "aten::mm", "aten::max.dim", "aten::copy_", "aten::add_.Tensor", "aten::cat", "aten::relu")


def cutting(*names: str) -> CutRules:
    return CutRules(cut=frozenset(names), device_type="cpu")


def traced(function: Function, *inputs: torch.Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def checked(cut: Split, see: Callable[[int, Sequence[Any]], None] = lambda number, inputs: None) -> Function:
    """The cut graph as a function of arguments; its pieces are checked for the way they are called."""

    def piece(number: int) -> Function:
        part = cut.spec.pieces[number]

        def run(inputs: list[Any]) -> Sequence[Any]:
            assert len(inputs) == len(part.inputs)
            see(number, inputs)
            outputs = cut.functions[number](inputs)
            assert inputs == []
            assert len(outputs) == len(part.outputs)
            return outputs

        return run

    run = cut.bind([piece(number) for number in range(len(cut.spec.pieces))])

    def call(*args: Any) -> Sequence[Any]:
        boxed = list(args)
        result = run(boxed)
        assert boxed == []
        return result

    return call


def assert_same(gm: GraphModule, cut: Split, *inputs: Any) -> None:
    """Runs both on the same values, and compares results and what became of the inputs."""
    mine, theirs = ([value.clone() if isinstance(value, torch.Tensor) else value for value in inputs] for _ in "ab")
    results = checked(cut)(*mine)
    expected = gm(*theirs)
    expected = tuple(expected) if isinstance(expected, list | tuple) else (expected,)
    assert len(results) == len(expected)
    for result, value in zip([*results, *mine], [*expected, *theirs], strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)


# ---------------------------------------------------------------- random programs


def program(seed: int) -> tuple[Function, Any]:
    """A function of three 4x4 tensors, with views, parts of results, and changes in place."""
    steps = random.Random(seed).choices(range(10), k=14)

    def run(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[Any]:
        choose = random.Random(seed)
        made = [x, y, z]
        for step in steps:
            a, b = choose.choice(made), choose.choice(made)
            if step == 0:
                made.append(a.sin())
            elif step == 1:
                made.append(a @ b)
            elif step == 2:
                made.append(a.t())
            elif step == 3:
                made.append(a.reshape(2, 8)[1].view(2, 4).repeat(2, 1))
            elif step == 4:
                values, _ = a.max(1)
                made.append(values.unsqueeze(1).expand(4, 4) - b)
            elif step == 5:
                made.append(torch.cat(a.split(2)[::-1]))
            elif step == 6:
                a.add_(b)
            elif step == 7:
                x.copy_(b.relu())
            elif step == 8:
                a[1:3].mul_(0.5)
            else:
                made.append(a.relu() + b)
        return [made[-1], choose.choice(made), None, made[3 % len(made)].t()]

    return run, choose_cut(seed)


def choose_cut(seed: int) -> tuple[str, ...]:
    choose = random.Random(seed + 1)
    return tuple(name for name in CUT if choose.random() < 0.4)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_run_as_they_do_uncut(seed: int) -> None:
    function, names = program(seed)
    inputs = [torch.randn(4, 4) for _ in range(3)]
    gm = traced(function, *inputs)
    cut = split(gm, cutting(*names))
    assert_same(gm, cut, *inputs)
    spec = cut.spec
    assert GraphSpec.from_dict(spec.to_dict()) == spec
    if not names:
        assert spec.whole
        assert len(spec.pieces) == 1


# ---------------------------------------------------------------- lifetimes


def test_tensors_die_after_their_last_use() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = x.relu()
        b = a.sin()  # cut
        c = b.cos() * w
        return c.sin() + 1  # cut

    x, w = torch.randn(4), torch.randn(4)
    cut = split(traced(f, x, w), cutting("aten::sin"))
    assert [piece.names for piece in cut.spec.pieces] == [("x_1",), ("sin", "w_1"), ("sin_1",)]
    given: list[list[weakref.ref[Any]]] = []

    def see(number: int, inputs: Sequence[Any]) -> None:
        assert all(reference() is None for piece in given for reference in piece), f"piece {number}"
        given.append([weakref.ref(value) for value in inputs])

    expected = f(x, w)
    boxed = [x, w]
    del x, w
    run = cut.bind([_seeing(cut, number, see) for number in range(3)])
    torch.testing.assert_close(run(boxed)[0], expected)
    assert all(reference() is None for piece in given for reference in piece)
    assert len(given) == 3


def _seeing(cut: Split, number: int, see: Callable[[int, Sequence[Any]], None]) -> Function:
    def run(inputs: list[Any]) -> Sequence[Any]:
        see(number, inputs)
        return cut.functions[number](inputs)

    return run


def test_tensors_die_inside_of_a_piece_too() -> None:
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    @torch.library.custom_op("mgsplit::watch", mutates_args=())
    def watch(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        result = x + 1
        made.append(weakref.ref(result.untyped_storage()))
        return result

    watch.register_fake(torch.empty_like)

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.ops.mgsplit.watch(x * 2)
        return x

    x = torch.ones(4)
    gm = traced(f, x)
    cut = split(gm, CutRules(safe=frozenset(["mgsplit::*"]), device_type="cpu"))
    assert cut.spec.whole
    cut.bind()([x])
    assert max(alive) == 0


def test_an_unused_input_is_given_up_at_once() -> None:
    def f(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x.relu()

    x, unused = torch.ones(4), torch.ones(4)
    cut = split(traced(f, x, unused), cutting())
    reference = weakref.ref(unused)

    def see(number: int, inputs: Sequence[Any]) -> None:
        assert reference() is None

    boxed = [x, unused]
    del unused
    cut.bind([_seeing(cut, 0, see)])(boxed)


# ---------------------------------------------------------------- what pieces are told


def test_what_a_piece_changes_is_known_through_views() -> None:
    def f(x: torch.Tensor, cache: torch.Tensor, unchanged: torch.Tensor) -> torch.Tensor:
        y = x.sin()  # cut
        cache.view(-1)[2:4].add_(y[0, 2:])
        z = y.sin()  # cut
        return z + cache + unchanged

    inputs = [torch.randn(4, 4) for _ in range(3)]
    gm = traced(f, *inputs)
    cut = split(gm, cutting("aten::sin"), static=(1, 2))
    first, second = cut.spec.pieces
    assert cut.spec.mutated == (1,)
    assert [first.names[at] for at in first.mutated] == ["cache_1"]
    assert second.mutated == ()
    assert [second.names[at] for at in second.static] == ["cache_1", "unchanged_1"]
    assert_same(gm, cut, *inputs)


def test_outputs_that_only_the_backward_sees_are_not_visible() -> None:
    specs: list[GraphSpec] = []

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().relu()

    def forward(gm: GraphModule, inputs: Sequence[Any]) -> Function:
        gm.graph.output_node().meta["user_visible_output_idxs"] = [0]
        cut = split(gm, cutting("aten::sin"))
        specs.append(cut.spec)
        return _boxed(cut)

    def backward(gm: GraphModule, inputs: Sequence[Any]) -> Function:
        cut = split(gm, cutting("aten::cos"), static=range(len(inputs) - 1), is_backward=True)
        specs.append(cut.spec)
        return _boxed(cut)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    result = torch.compile(f, backend=backend)(x, w)
    result.sum().backward()
    gradients = [x.grad, w.grad]
    x.grad = w.grad = None
    f(x, w).sum().backward()
    torch.testing.assert_close(gradients, [x.grad, w.grad])
    saving, back = specs
    assert saving.visible == (True,) + (False,) * (saving.outputs - 1)
    assert saving.pieces[0].visible == (False,)  # the product: only saved
    assert all(back.visible)
    assert back.is_backward


def _boxed(cut: Split) -> Function:
    run = cut.bind()

    def call(args: list[Any]) -> Sequence[Any]:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def test_numbers_that_sizes_are_made_of_are_inputs_of_each_piece() -> None:
    """A piece is recorded once for each of them, also where no operator of it is given the number."""
    cuts: list[Split] = []

    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.relu().sin().relu().view(-1), x.shape[0]

    def compiler(gm: GraphModule, inputs: Sequence[Any]) -> Function:
        cuts.append(split(gm, cutting("aten::sin")))
        return _boxed(cuts[-1])

    compiled = torch.compile(f, backend=aot_autograd(fw_compiler=compiler), dynamic=True)
    for rows, columns in ((4, 6), (3, 8), (5, 7)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(compiled(x), f(x))
    assert len(cuts) == 1
    spec = cuts[0].spec
    assert [piece.inputs for piece in spec.pieces] == [(2, 0, 1), (None, 0, 1)]


def test_sizes_that_no_input_tells_are_asked_of_the_tensors() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y]).sin().relu() + x.shape[0]

    inputs = [torch.randn(4, 2), torch.randn(3, 2)]
    gm = traced(f, *inputs, mode="symbolic")
    cut = split(gm, cutting("aten::sin"))
    first, second = cut.spec.pieces
    assert first.names == ("x_1", "y_1", "x_1.size(0)", "x_1.size(1)", "y_1.size(0)")
    assert second.names == ("sin", "sym_size_int", "sin.size(0)", "sin.size(1)")
    assert_same(gm, cut, *inputs)
    assert_same(gm, cut, torch.randn(7, 2), torch.randn(1, 2))


def test_a_number_out_of_a_tensor_is_an_input_of_what_uses_it() -> None:
    cuts: list[Split] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        n = x.int().sum().item()
        torch._check(n >= 0)
        return torch.ones(n) + x.sum()

    def compiler(gm: GraphModule, inputs: Sequence[Any]) -> Function:
        cuts.append(split(gm, cutting()))
        return _boxed(cuts[-1])

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(f, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
        for value in (2.0, 3.0):
            x = torch.full((2,), value)
            torch.testing.assert_close(compiled(x), f(x))
    assert len(cuts) == 1
    first, second = cuts[0].spec.pieces
    assert first.inputs == (0,)
    assert None in second.inputs


# ---------------------------------------------------------------- forms of graphs


def test_outputs_may_be_inputs_numbers_and_the_same_twice() -> None:
    def f(x: torch.Tensor) -> list[Any]:
        y = x.relu()
        return [x, y, None, 3, y, y.t(), x.t()]

    x = torch.randn(4, 4)
    gm = traced(f, x)
    cut = split(gm, cutting())
    assert cut.spec.whole
    assert cut.spec.pieces[0].outputs == (1,)
    assert_same(gm, cut, x)
    given = x.clone()
    results = checked(cut)(given)
    assert results[0] is given
    assert results[1] is results[4]
    assert results[5].data_ptr() == results[1].data_ptr()


def test_what_is_changed_in_place_stays_one_tensor() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x.add_(1)
        z = y.sin()  # cut
        z[1:].mul_(2)
        return y, z.relu_(), z + y.copy_(z)

    x = torch.randn(4)
    gm = traced(f, x)
    cut = split(gm, cutting("aten::sin"))
    assert_same(gm, cut, x)
    first, second = cut.spec.pieces
    assert (first.names, first.outputs, first.mutated) == (("x_1",), (), (0,))
    assert (set(second.names), len(second.mutated)) == ({"sin", "x_1"}, 2)
    given = x.clone()
    assert checked(cut)(given)[0] is given


def test_parts_of_a_result_leave_a_piece_one_by_one() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        values, indices = x.max(1)
        a = values.sin()  # cut
        left, right = a.split(2)
        return left.relu() + right + indices[:2]

    x = torch.randn(4, 4)
    for names in (("aten::sin",), ("aten::max.dim",), ("aten::max.dim", "aten::sin")):
        gm = traced(f, x)
        cut = split(gm, cutting(*names))
        assert_same(gm, cut, x)
        checked(cut, lambda number, inputs: _assert_tensors(inputs))(x)


def _assert_tensors(inputs: Sequence[Any]) -> None:
    assert all(isinstance(value, torch.Tensor) for value in inputs)


def test_constants_belong_to_the_piece() -> None:
    held = torch.arange(4.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x + held).sin() * held + float("inf")

    x = torch.randn(4)
    gm = traced(f, x, mode="real")
    cut = split(gm, cutting("aten::sin"))
    assert all(len(piece.constants) == 1 for piece in cut.spec.pieces)
    assert [piece.names for piece in cut.spec.pieces] == [("x_1",), ("sin",)]
    assert_same(gm, cut, x)


def test_a_graph_of_which_nothing_can_be_recorded_runs() -> None:
    gm = traced(lambda x: x.sin().t(), torch.randn(4, 4))
    cut = split(gm, cutting("aten::sin"))
    assert cut.spec.pieces == ()
    assert not cut.spec.whole
    assert_same(gm, cut, torch.randn(4, 4))


def test_random_numbers_come_in_the_order_of_the_graph() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        a = torch.nn.functional.dropout(x)
        b = torch.rand_like(x).sin()
        return a + b + torch.rand_like(x)

    x = torch.ones(8)
    gm = traced(f, x)
    cut = split(gm, cutting("aten::sin", "aten::rand_like"))
    torch.manual_seed(3)
    expected = gm(x)
    torch.manual_seed(3)
    torch.testing.assert_close(checked(cut)(x)[0], expected, rtol=0, atol=0)
