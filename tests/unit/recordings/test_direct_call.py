"""The way past AOTAutograd's wrappers: taken where they do nothing, by real wrappers of this torch; nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor

from multigraph_backend import _compat
from multigraph_backend.cudagraphs import direct_call
from multigraph_backend.cudagraphs.direct_call import DirectCall
from multigraph_backend.cudagraphs.output_code import only_changes


class Code:
    """Stands for recorded code: its `run` is what AOTAutograd's wrappers call in the end."""

    _boxed_call = True
    pieces = ("one",)

    def __init__(self, forward: Callable[..., Any], inference: bool, changes: tuple[int, ...] | None = ()) -> None:
        self.inference, self.only_changes = inference, changes
        self.calls = 0

        def run(inputs: list[Any]) -> Any:
            self.calls += 1
            args = list(inputs)
            inputs.clear()
            return forward(*args)

        self.run = run

    def __call__(self, inputs: list[Any]) -> Any:
        return self.run(inputs)


class Compiled:
    """A function compiled by AOTAutograd around `Code`, and what `direct_call.find` makes of it."""

    def __init__(self, function: Callable[..., Any], *args: Any, keep_changes: bool = False) -> None:
        """`keep_changes`: inputs are changed by the code, as Inductor's does, and not by the wrappers."""
        codes: list[Code] = []

        def compiler(inference: bool) -> Callable[..., Any]:
            def compile(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Code:
                metadata = _compat.TracingContext.try_get().fw_metadata
                codes.append(Code(gm.forward, inference, only_changes(metadata)))
                return codes[-1]

            return compile

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            compile_all = aot_autograd(
                fw_compiler=compiler(False),
                bw_compiler=compiler(False),
                inference_compiler=compiler(True),
                keep_inference_input_mutations=keep_changes,
            )
            self.wrapped = _compat.innermost_fn(compile_all(gm, inputs))
            self.inputs = inputs
            self.direct = direct_call.find(self.wrapped, codes)
            return self.first if self.direct is None else self.direct.first

        self.codes = codes
        self.called = torch.compile(function, backend=backend, fullgraph=True)
        self.called(*args)

    def first(self, *args: Any) -> Any:
        return self.wrapped(*args)

    @property
    def function(self) -> Callable[..., Any] | None:
        return None if self.direct is None else self.direct.function


def changed(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


DIRECT: dict[str, Callable[..., Any]] = {
    "one output": lambda x: x.sin() + 1,
    "several": lambda x: (x + 1, x.sum(), (x * 2).relu()),
    "views of one intermediate": lambda x: ((y := x + 1), y.t()),
    "a number": lambda x: (x + 1, 3),
    "matmul": lambda x: (torch.softmax(x @ x.t(), -1) + 1).sum(0),
}

WRAPPED: dict[str, Callable[..., Any]] = {
    "an input changed": changed,
    "a view of an input": lambda x: (x + 1, x.t()),
}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", DIRECT.values(), ids=DIRECT)
def test_wrappers_that_do_nothing_are_left_out(function: Callable[..., Any], grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        compiled = Compiled(function, torch.randn(4, 4))
        assert compiled.function is not None
        assert compiled.direct is not None
        assert compiled.direct.boxed is (None if grad else compiled.codes[0])
        x = torch.randn(4, 4)
        outputs = compiled.function(x)
        expected = function(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        tensors = [value for value in expected if isinstance(value, torch.Tensor)]
        torch.testing.assert_close(list(outputs)[: len(tensors)], tensors)
        assert torch.is_grad_enabled() == grad
        assert not any(output.requires_grad for output in outputs if isinstance(output, torch.Tensor))


@pytest.mark.parametrize("function", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_that_have_something_to_do_stay(function: Callable[..., Any]) -> None:
    with torch.no_grad():
        assert Compiled(function, torch.randn(4, 4)).direct is None


@pytest.mark.parametrize("grad", [False, True])
def test_inputs_that_the_code_changes_count_as_changed(grad: bool) -> None:
    def store(cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.index_put_((rows,), x)
        return cache.sum(0)

    with torch.set_grad_enabled(grad):
        rows = torch.tensor([2, 0])
        compiled = Compiled(store, torch.zeros(4, 3), rows, torch.randn(2, 3), keep_changes=True)
        assert compiled.function is not None
        assert compiled.direct is not None
        assert compiled.direct.boxed is None
        cache, expected, x = torch.zeros(4, 3), torch.zeros(4, 3), torch.randn(2, 3)
        versions = cache._version, rows._version, x._version
        # in the order of the graph's inputs
        by_shape = {(4, 3): cache, (2,): rows, (2, 3): x}
        outputs = compiled.function(*[by_shape[tuple(entry.shape)] for entry in compiled.inputs])
        torch.testing.assert_close(outputs[0], store(expected, rows, x))
        torch.testing.assert_close(cache, expected)
        assert cache._version > versions[0]
        assert (rows._version, x._version) == versions[1:]


class Scaled(torch.Tensor):
    """A weight of a product, with a scale: as quantized ones are made."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        made.values, made.scale = values, scale
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return "Scaled()"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Scaled:
        return Scaled(parts["values"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten.mm.default:
            return torch.mm(args[0], args[1].values) * args[1].scale
        aten = torch.ops.aten
        assert func in (aten.detach.default, aten.alias.default, aten.view.default), func  # of the same shape
        return Scaled(args[0].values, args[0].scale)


def scaled(nested: bool) -> Scaled:
    values = torch.randn(3, 3)
    return Scaled(Scaled(values, torch.randn(())) if nested else values, torch.randn(()))


@pytest.mark.parametrize("nested", [False, True])
def test_subclasses_are_opened_by_the_names_of_their_parts(nested: bool) -> None:
    def store(weight: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.index_put_((rows,), x @ weight)
        return cache.sum(0)

    with torch.no_grad():
        rows = torch.tensor([2, 0])
        compiled = Compiled(store, scaled(nested), torch.zeros(4, 3), rows, torch.randn(2, 3), keep_changes=True)
        assert compiled.function not in (None, compiled.wrapped)
        cache, expected, x, weight = torch.zeros(4, 3), torch.zeros(4, 3), torch.randn(2, 3), scaled(nested)
        by_shape = {(3, 3): weight, (4, 3): cache, (2,): rows, (2, 3): x}
        version = cache._version
        outputs = compiled.function(*[by_shape[tuple(entry.shape)] for entry in compiled.inputs])
        torch.testing.assert_close(outputs[0], store(weight, expected, rows, x))
        torch.testing.assert_close(cache, expected)
        assert cache._version > version


def test_parts_may_have_any_names() -> None:
    text = direct_call._read("args[1]", "values.from.two words")
    assert text == "getattr(getattr(args[1].values, 'from'), 'two words')"


def test_a_subclass_that_is_returned_keeps_the_wrappers() -> None:
    with torch.no_grad():
        one = TwoTensor(torch.randn(3), torch.randn(3))
        compiled = Compiled(lambda x: x + 1, one)
        assert compiled.function is None or compiled.function == compiled.wrapped


def test_autograd_sees_that_what_it_saved_was_changed_by_the_code() -> None:
    """By a code that changes memory behind torch's back, as kernels do: only the direct call can have told it."""

    def through_numpy(x: torch.Tensor) -> tuple[torch.Tensor]:
        x.numpy()[:] += 1
        return (x * 2,)

    code = Code(through_numpy, True)
    call = direct_call._calling(code, True, (0,))  # type: ignore[arg-type]
    x, weight = torch.randn(3), torch.randn(3, requires_grad=True)
    loss = (weight * x).sum()
    call(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_training_graph_stays_wrapped() -> None:
    assert Compiled(lambda x: x.sin() + 1, torch.randn(4, requires_grad=True)).direct is None


def test_under_autocast_the_wrappers_stay() -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        assert Compiled(lambda x: x @ x, torch.randn(4, 4)).direct is None


def test_grad_mode_comes_back_after_an_error() -> None:
    def fail(inputs: list[Any]) -> Any:
        raise ValueError("no")

    direct = direct_call._calling(SimpleNamespace(run=fail), True)  # type: ignore[arg-type]
    with torch.enable_grad(), pytest.raises(ValueError, match="no"):
        direct(1)
    assert torch.is_grad_enabled()


SEEN: dict[str, Callable[[Code, tuple[Any, ...]], Any]] = {
    "inputs in another order": lambda code, args: code([args[1], args[0]]),
    "an input more": lambda code, args: code([*args, 1]),
    "an equal tensor": lambda code, args: code([args[0].clone(), args[1]]),
    "outputs in another order": lambda code, args: tuple(reversed(code(list(args)))),
    "other outputs": lambda code, args: [output + 0 for output in code(list(args))],
    "called twice": lambda code, args: [code(list(args)), code(list(args))][0],
    "not called": lambda code, args: (args[0], args[1]),
}


@pytest.mark.parametrize("wrapped", SEEN.values(), ids=SEEN)
def test_what_was_not_seen_to_do_nothing_stays(wrapped: Callable[[Code, tuple[Any, ...]], Any]) -> None:
    code = Code(lambda *args: (args[0] + 1, args[1] * 2), True)
    direct = DirectCall(lambda *args: wrapped(code, args), code, False)  # type: ignore[arg-type]
    run = code.run
    direct.first(torch.ones(2), torch.ones(2))
    assert direct.function is None
    assert code.run is run


def test_what_several_calls_have_not_proven_is_asked_no_more() -> None:
    code = Code(lambda *args: (args[0] + 1,), True)
    wrapped = lambda *args: [output + 0 for output in code(list(args))]  # noqa: E731
    direct = DirectCall(wrapped, code, False)  # type: ignore[arg-type]
    for _ in range(3):
        assert direct.function is None
        direct.first(torch.ones(2))
    assert direct.function is wrapped


def test_after_the_first_call_it_is_the_direct_one() -> None:
    code = Code(lambda *args: (args[0] + 1,), True)
    through = []

    def wrapped(*args: Any) -> Any:
        through.append(args)
        return code(list(args))

    direct = DirectCall(wrapped, code, False)  # type: ignore[arg-type]
    for _ in range(3):
        direct.first(torch.ones(2), 5)
    assert (len(through), code.calls) == (1, 3)
