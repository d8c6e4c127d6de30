"""Inputs that share memory, begin anywhere in their storage, or are changed in place: right at every call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import multigraph_backend
from multigraph_backend.backend import multigraph
from multigraph_backend.capture import effects
from tests.support.activity import variants


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    options = {"compiler": "aot_eager", "specialize": [{"x[0]": 4}, {"x[0]": {"multiple_of": 3}}]}
    return torch.compile(function, backend=multigraph, dynamic=True, options=options)


def assert_nothing_fell_back() -> None:
    ran = multigraph_backend.stats()
    assert ran["failures"] == ran["eager_calls"] == 0, str(multigraph_backend.explain())


def add_into(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2 + y


def read_only(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y.sum(0)


# where x and y begin in one buffer of 40 rows, and how many rows they have
PLACES = [
    (0, 20, 4),
    (3, 20, 4),
    (0, 4, 4),
    (2, 4, 4),
    (4, 2, 4),
    (5, 5, 4),
    (0, 20, 6),
    (1, 3, 6),
    (0, 20, 5),
    (4, 6, 5),
]


@pytest.mark.parametrize("function", [add_into, read_only], ids=lambda function: function.__name__)
def test_slices_of_one_buffer_apart_touching_overlapping_or_the_same(function: Callable[..., torch.Tensor]) -> None:
    run = compiled(function)
    for first, second, rows in (*PLACES, *PLACES):
        buffer = torch.randn(40, 2)
        twin = buffer.clone()
        wanted = function(twin[first : first + rows], twin[second : second + rows])
        torch.testing.assert_close(run(buffer[first : first + rows], buffer[second : second + rows]), wanted)
        torch.testing.assert_close(buffer, twin)
    ran = multigraph_backend.stats()
    # forms for ways of sharing are few by design: past them generic and then eager serve
    assert ran["variant_calls"] > 0
    if function is read_only:
        assert_nothing_fell_back()


@pytest.mark.parametrize("function", [add_into, read_only], ids=lambda function: function.__name__)
def test_the_same_tensor_twice_and_then_two_tensors(function: Callable[..., torch.Tensor]) -> None:
    run = compiled(function)
    for same in (False, True, False, True):
        for rows in (4, 6, 5):
            x = torch.randn(rows, 2)
            y = x if same else torch.randn(rows, 2)
            a = x.clone()
            b = a if same else y.clone()
            torch.testing.assert_close(run(x, y), function(a, b))
            torch.testing.assert_close((x, y), (a, b))
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 8


def test_a_window_that_moves_through_a_buffer_needs_one_compile() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1

    run = compiled(scale)
    buffer = torch.randn(64, 2)
    twin = buffer.clone()
    for start in range(0, 60, 4):
        torch.testing.assert_close(run(buffer[start : start + 4]), scale(twin[start : start + 4]))
    torch.testing.assert_close(buffer, twin)
    assert_nothing_fell_back()
    ran = multigraph_backend.stats()
    # the slice at 0 and the others may be two graphs of Dynamo
    assert ran["variants_compiled"] == ran["regions"]
    assert ran["variant_calls"] == 15


def test_a_view_that_needs_gradients_is_changed_in_place() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    run = compiled(scale)
    for start, rows in ((0, 4), (3, 4), (0, 6), (2, 5), (3, 4)):
        leaf, twin = (torch.ones(12, 2, requires_grad=True) for _ in range(2))
        with torch.no_grad():
            twin.copy_(leaf.copy_(torch.randn(12, 2)))
        base, base_twin = leaf * 1, twin * 1
        y = run(base[start : start + rows])
        wanted = scale(base_twin[start : start + rows])
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(base, base_twin)
        (y.sum() + base.square().sum()).backward()
        (wanted.sum() + base_twin.square().sum()).backward()
        torch.testing.assert_close(leaf.grad, twin.grad)


def returns_chunk(y: torch.Tensor) -> torch.Tensor:
    view = y.chunk(2, -1)[1]
    y.add_(0.5)
    return view


def returns_rows(y: torch.Tensor) -> torch.Tensor:
    view = y[1:]
    y.add_(0.5)
    return view


@pytest.mark.parametrize("function", [returns_chunk, returns_rows], ids=lambda function: function.__name__)
def test_views_of_a_changed_input_that_is_a_window_itself(function: Callable[..., torch.Tensor]) -> None:
    """Stock is wrong here, in each torch version, where sizes are symbolic."""
    options = {"compiler": "aot_eager", "specialize": [{"y[0]": 4, "y[1]": 6}]}
    for dynamic in (True, None):
        torch._dynamo.reset()
        run = torch.compile(function, backend=multigraph, dynamic=dynamic, options=options)
        for rows, columns in ((4, 6), (6, 8), (4, 6)):
            for window in (
                lambda x: x[2:-2, 3:-3].clone(),
                lambda x: x[2:-2, 3:-3],
                lambda x: x.reshape(-1)[6 : 6 + (x.shape[0] - 4) * (x.shape[1] - 6)].view(x.shape[0] - 4, -1),
            ):
                whole = torch.randn(rows + 4, columns + 6)
                twin = whole.clone()
                torch.testing.assert_close(run(window(whole)), function(window(twin)))
                torch.testing.assert_close(whole, twin)


def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += y.sum()
    return x


def adds_and_bounds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.relu(x.add_(y.sum()), inplace=True)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels last": lambda whole: whole.to(memory_format=torch.channels_last),
    "transposed": lambda whole: whole.transpose(0, 1),
    "slice": lambda whole: whole[1:-1, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("function", [adds, adds_and_bounds], ids=lambda function: function.__name__)
def test_a_changed_input_that_is_returned_is_compiled_in_any_layout(
    function: Callable[..., torch.Tensor], layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    run = compiled(function)
    for size in (4, 5, 6, 9):
        whole, y = torch.randn(size, size, 3, 3), torch.randn(size)
        x, twin = layout(whole), layout(whole.clone())
        assert run(x, y) is x
        torch.testing.assert_close(x, function(twin, y))
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] > 0


def test_a_view_beside_a_changed_input_that_is_returned() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x += 1
        return x, x[1:]

    run = compiled(function)
    for size in (4, 5, 6):
        whole = torch.randn(size + 2, size)
        twin = whole.clone()
        torch.testing.assert_close(run(whole[1:-1, 1:]), function(twin[1:-1, 1:]))
        torch.testing.assert_close(whole, twin)


# ---------------------------------------------------------------- what a graph writes to


@torch.library.custom_op("multigraph_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


def in_a_checkpoint(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def body(x: torch.Tensor) -> torch.Tensor:
        bump(y)
        return x * 2

    return checkpoint(body, x, use_reentrant=False)  # type: ignore[no-any-return]


def bump_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    bump(x[1:])
    return x + y


def bump_a_copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x + y
    bump(z)
    return z


def batch_norm(training: bool) -> Callable[..., torch.Tensor]:
    return lambda x, y: F.batch_norm(x.reshape(2, 2), y[:2], y[2:] + 1, training=training)


WRITES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], set[int]]] = {
    "overload": (lambda x, y: torch.ops.aten.add.Tensor(x, y), set()),
    "packet": (lambda x, y: torch.ops.aten.add(x, y), set()),
    "packet and a number": (lambda x, y: torch.ops.aten.add(y, 1) + x, set()),
    "packet with out": (lambda x, y: torch.ops.aten.add(x, y, out=y), {1}),
    "out of its own": (lambda x, y: torch.ops.aten.add.out(x, y, out=torch.empty_like(x)), set()),
    "in place": (lambda x, y: x.add_(y), {0}),
    "data": (lambda x, y: x.data.add_(y), {0}),
    "custom operator": (bump_a_view, {0}),
    "custom operator on a copy": (bump_a_copy, set()),
    "custom operator in a checkpoint": (in_a_checkpoint, {1}),
    "running statistics": (batch_norm(training=True), {1}),
    "running statistics that are read": (batch_norm(training=False), set()),
}


@pytest.mark.parametrize(("function", "written"), WRITES.values(), ids=WRITES)
def test_what_a_graph_writes_to_is_known_by_input(function: Callable[..., Any], written: set[int]) -> None:
    seen: dict[str, bool] = {}

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found = effects.written(gm)
        seen.update({node.name: i in found for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))})
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(torch.randn(4), torch.randn(4))
    names = [name for index, name in enumerate("xy") if index in written]
    assert [name for name, wrote in seen.items() if wrote] == [f"l_{name}_" for name in names]


# ways to lie in one memory without being views: torch then makes fakes by an operation that counts up their versions;
# versions leave it open only where one that begins where the memory does comes after one that does not
TIED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "all of it": lambda buffer: (buffer, buffer.data),
    "a window first": lambda buffer: (buffer.data[2:6], buffer[:4]),
    "two windows": lambda buffer: (buffer.data[2:6], buffer.data[3:7]),
    "two windows that are no views": lambda buffer: (buffer[2:6].data, buffer[3:7].data),
    "a window that is no view": lambda buffer: (buffer[:4].data, buffer[2:6].data),
    "transposed": lambda buffer: (buffer.view(4, 2).t().data, buffer),
    "transposed, second": lambda buffer: (buffer, buffer.view(4, 2).t().data),
}
TOUCHES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], bool]] = {
    "neither": (lambda x, y: x.sum() + y.t() * 2, False),
    "x": (lambda x, y: x.add_(1).sum() + y, True),
    "y": (lambda x, y: y.add_(1) + x.sum(), True),
    "data of x": (lambda x, y: x.data.add_(1).sum() + y, True),
    "a view of y": (lambda x, y: y[1:].add_(1).sum() + x, True),
    "both": (lambda x, y: x.add_(1).sum() + y.mul_(2), True),
    "y by a custom operator": (lambda x, y: (bump(y), x + 1), True),
}


@pytest.mark.parametrize("tied", TIED.values(), ids=TIED)
@pytest.mark.parametrize(("function", "writes"), TOUCHES.values(), ids=TOUCHES)
def test_what_a_graph_writes_to_is_known_where_its_inputs_share_memory(
    function: Callable[..., Any], writes: bool, tied: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    found: list[list[int]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        found.append([tensors.index(i) for i in sorted(effects.written(gm))])
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*tied(torch.randn(8)))
    assert found == [[0, 1] if writes else []]


class Tied(torch.nn.Module):
    """An embedding and a head: two parameters over one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 2)
        self.head = torch.nn.Linear(2, 7)
        self.head.weight.data = self.embedding.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("attributes", [False, True], ids=["inputs", "attributes"])
def test_weights_tied_through_data_are_compiled(attributes: bool) -> None:
    eager = Tied()
    model = Tied()
    model.load_state_dict(eager.state_dict())
    with torch._dynamo.config.patch(prepare_freezing=attributes), torch.no_grad():
        run = compiled(model)
        for rows in (4, 5, 6, 4):
            x = torch.randint(7, (rows, 2))
            torch.testing.assert_close(run(x), eager(x))
            for owner in (model, eager):
                owner.embedding.weight.mul_(0.5)
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 3


READ_ONLY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    name: WRITES[name][0]
    for name in ("overload", "packet", "packet and a number", "out of its own", "custom operator on a copy")
}


@pytest.mark.parametrize("function", READ_ONLY.values(), ids=READ_ONLY)
def test_overlapping_inputs_that_are_only_read_are_compiled_and_nothing_is_checked(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    run = compiled(function)
    for first, second, rows in ((0, 2, 4), (3, 9, 4), (1, 0, 6), (1, 0, 5), (5, 5, 4)):
        buffer = torch.randn(16, 2)
        x, y = (buffer[start : start + rows] for start in (first, second))
        torch.testing.assert_close(run(x, y), function(x, y))
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 4
    torch._dynamo.reset()
    run = compiled(function)
    run(torch.randn(4, 2), torch.randn(4, 2))
    assert variants()[0]["forms"] == ["True"]


def test_inputs_that_overlap_beside_a_changed_one_are_compiled() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        z.add_(1)
        return x * 2 + y.sum(0) + z

    run = compiled(function)
    for first, second, rows in ((0, 2, 4), (1, 3, 4), (2, 0, 6), (20, 0, 6)):
        buffer, z = torch.randn(40, 2), torch.randn(2)
        twin = z.clone()
        x, y = (buffer[start : start + rows] for start in (first, second))
        torch.testing.assert_close(run(x, y, z), function(x, y, twin))
        torch.testing.assert_close(z, twin)
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 4


def test_a_view_of_a_window_is_returned_beside_a_changed_input() -> None:
    def function(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        z.add_(1)
        return x.chunk(2, -1)[1]

    run = compiled(function)
    for rows in (4, 6, 5):
        buffer, z = torch.randn(12, 8), torch.randn(2)
        twin = z.clone()
        x = buffer[2 : 2 + rows, 2:6]
        torch.testing.assert_close(run(x, z), function(x, twin))
        torch.testing.assert_close(z, twin)
    assert_nothing_fell_back()


# ---------------------------------------------------------------- inputs that share memory with parameters and buffers


class ChangesItsInput(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(9, 2))
        self.register_buffer("buffer", torch.randn(9, 2))
        self.register_buffer("other", torch.randn(9, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return x.sum() + self.weight * 2 + self.buffer + self.other


class ChangesItsBuffer(ChangesItsInput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer.add_(1)
        return x.sum() * 2 + self.weight + self.other + self.buffer


Place = Callable[[Any], torch.Tensor]
INSIDE: dict[str, Place] = {
    "weight": lambda model: model.weight.data,
    "rows of the weight": lambda model: model.weight.detach()[2:6],
    "buffer": lambda model: model.buffer,
    "rows of the buffer": lambda model: model.buffer[3:],
}


@pytest.mark.parametrize("attributes", [False, True], ids=["inputs", "attributes"])
@pytest.mark.parametrize("first_shared", [False, True], ids=["later", "at first"])
@pytest.mark.parametrize("place", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("kind", [ChangesItsInput, ChangesItsBuffer])
def test_an_input_is_a_window_into_a_parameter_or_buffer_in_some_calls_only(
    kind: type[ChangesItsInput], place: Place, first_shared: bool, attributes: bool
) -> None:
    """Stock reads the old values of the parameter, in each torch version."""
    eager = kind()
    model = copy.deepcopy(eager)
    with torch._dynamo.config.patch(prepare_freezing=attributes), torch.no_grad():
        run = compiled(model)
        for shared in (first_shared, False, True, True, False):
            rows = place(model).shape[0]
            apart = torch.randn(rows, 2)
            x, y = (place(owner) if shared else apart.clone() for owner in (model, eager))
            torch.testing.assert_close(run(x), eager(y))
            torch.testing.assert_close(x, y)
            torch.testing.assert_close(model.state_dict(), eager.state_dict())
    ran = multigraph_backend.stats()
    assert ran["variant_calls"] + ran["generic_calls"] >= 2


def test_a_buffer_that_the_graph_changes_is_tied_to_a_parameter_later() -> None:
    eager = ChangesItsBuffer()
    model = copy.deepcopy(eager)
    with torch.no_grad():
        run = compiled(model)
        for tied in (False, True, True):
            for owner in (model, eager):
                if tied:
                    owner.other.data = owner.buffer.data
            x = torch.randn(4, 2)
            torch.testing.assert_close(run(x), eager(x))
            torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert multigraph_backend.stats()["variant_calls"] >= 1


# ---------------------------------------------------------------- an input beside its gradient, a view beside its base


def odd(rows: int) -> torch.Tensor:
    """Rows of two numbers, in the order of columns."""
    return torch.randn(2, rows).t()


def part(rows: int) -> torch.Tensor:
    """A window into a buffer of gradients."""
    return torch.randn(3 * rows, 2)[rows : 2 * rows]


def step(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.sub_(x.grad, alpha=0.1)  # type: ignore[arg-type]
        x.grad.zero_()  # type: ignore[union-attr]
    return x.detach() * 2


def reads_both(x: torch.Tensor) -> torch.Tensor:
    return x.detach() * 2 + x.grad  # type: ignore[operator]


def reads_the_gradient_first(x: torch.Tensor) -> torch.Tensor:
    return x.grad.sin() + x.detach() * 2  # type: ignore[union-attr]


def leaves_the_gradient_alone(x: torch.Tensor) -> torch.Tensor:
    return x.detach().sin() * 2


@pytest.mark.parametrize("gradient", [lambda rows: torch.randn(rows, 2), odd, part], ids=["plain", "odd", "window"])
@pytest.mark.parametrize("function", [step, reads_both, reads_the_gradient_first, leaves_the_gradient_alone])
def test_an_input_has_a_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], gradient: Callable[[int], torch.Tensor]
) -> None:
    run = compiled(function)
    for rows in (4, 5, 6, 4, 7):
        x, y = (torch.empty(rows, 2).requires_grad_() for _ in range(2))
        with torch.no_grad():
            y.copy_(x.normal_())
        x.grad = gradient(rows)
        y.grad = x.grad.clone()
        torch.testing.assert_close(run(x), function(y))
        torch.testing.assert_close((x, x.grad), (y, y.grad))
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 3


class Stepped(torch.nn.Module):
    """Two layers with the update of plain gradient descent in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                parameter.grad.zero_()  # type: ignore[union-attr]
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]


def test_parameters_are_updated_from_their_gradients() -> None:
    eager = Stepped()
    model = copy.deepcopy(eager)
    run = compiled(model)
    for owner in (model, eager):
        for parameter in owner.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for rows in (4, 5, 6, 4, 7):
        x = torch.randn(rows, 3)
        made, wanted = run(x), eager(x)
        torch.testing.assert_close(made, wanted)
        made.exp().mean().backward()
        wanted.exp().mean().backward()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close((a, a.grad), (b, b.grad))
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 3


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("changes", [False, True], ids=["read", "another is changed"])
def test_a_view_comes_before_what_it_is_a_view_of(start: int, changes: bool) -> None:
    def function(x: torch.Tensor, whole: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        if changes:
            z.add_(1)
        return x.sum() * z + whole.cos()

    run = compiled(function)
    for rows in (4, 5, 6, 4, 7):
        for apart in (False, True):
            whole, z = torch.randn(rows + start, 2), torch.randn(2)
            x = torch.randn(rows, 2) if apart else whole[start:]
            twin = z.clone()
            torch.testing.assert_close(run(x, whole, z), function(x, whole, twin))
            torch.testing.assert_close(z, twin)
    assert_nothing_fell_back()
    assert multigraph_backend.stats()["variant_calls"] == 6


def slice_of_compiled(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.compile(lambda x: (x + 1)[:, 4:8], backend="aot_eager", dynamic=True)(x)
    return made


def part_of_data(x: torch.Tensor) -> torch.Tensor:
    held = torch.nn.Parameter(torch.empty(4))
    held.data = (x + 1).view(-1)[4:8]
    return held


def set_anywhere(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_((x + 1).untyped_storage(), 5, (len(x), 3), (6, 2))


@pytest.mark.parametrize("given", [slice_of_compiled, part_of_data, set_anywhere])
@pytest.mark.parametrize("changes", [False, True])
def test_what_begins_anywhere_and_is_no_view_counts_as_changed_where_it_is(
    given: Callable[[torch.Tensor], torch.Tensor], changes: bool
) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if changes:
            x.mul_(2)
        return x.sin() * x.shape[0], x[:2]

    found: list[set[int]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        tensors = [
            isinstance(node.meta["example_value"], torch.Tensor) for node in gm.graph.find_nodes(op="placeholder")
        ]
        found.append({sum(tensors[:at]) for at in effects.written(gm)})
        return gm.forward

    with torch.no_grad():
        first = given(torch.randn(5, 12))
        torch.compile(f, backend=backend, dynamic=True)(first)
        assert found == [{0} if changes else set()]
        run = compiled(f)  # type: ignore[arg-type]
        for rows in (5, 7):
            x = torch.randn(rows, 12)
            mine, twin = given(x), given(x)
            torch.testing.assert_close(run(mine), f(twin))
            torch.testing.assert_close(mine, twin)
    if not changes:
        assert_nothing_fell_back()


# ---------------------------------------------------------------- gradients, of what a buffer was when it was read


class Decays(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5)
        return x * self.weight * self.scale


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_buffer_that_is_changed_and_then_read_by_what_has_a_gradient(compiler: str) -> None:
    """torch's partitioner has the backward compute the new value again, of what is the new value by then."""

    def steps(model: Decays, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for rows in (4, 5, 3):
            model.weight.grad = None
            run(torch.arange(2.0 * rows).reshape(rows, 2)).sum().backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad)
        return found

    eager = Decays()
    stock, ours = copy.deepcopy(eager), copy.deepcopy(eager)
    wanted = steps(eager, eager)
    for found, expected in zip(steps(stock, torch.compile(stock, backend=compiler, dynamic=True)), wanted, strict=True):
        torch.testing.assert_close(found, expected / 2)
    torch._dynamo.reset()
    options = {"compiler": compiler, "specialize": [{"x[0]": 4}]}
    run = torch.compile(ours, backend=multigraph, dynamic=True, options=options)
    torch.testing.assert_close(steps(ours, run), wanted)
    assert_nothing_fell_back()


def test_a_graph_that_only_exchanges_memory_runs_as_it_is() -> None:
    """`x.data = y` of tensors that share memory, between graph breaks: nothing to compile, nothing that failed."""

    class Held(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
            self.state = self.weight.data

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            torch._dynamo.graph_break()
            self.weight.data = self.state
            return y

    model = Held()
    run = torch.compile(model, backend="multigraph", dynamic=True, options={"compiler": "aot_eager"})
    for turn in range(3):
        if turn:
            model.state = torch.full((4,), 2.0 * turn)
        x = torch.randn(3, 4)
        expected = x * model.weight
        torch.testing.assert_close(run(x), expected, rtol=0, atol=0)
        assert model.weight.data_ptr() == model.state.data_ptr()
    assert multigraph_backend.stats()["failures"] == 0
