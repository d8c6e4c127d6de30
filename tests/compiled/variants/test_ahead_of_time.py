"""What torch's `aot_compile` makes of multigraph can be saved, and is right when loaded, or is refused with a reason.

In one process, and mostly with the compiler "aot_eager", which lowers as Inductor does and generates no code:
`tests/processes/test_saved_functions.py` has two processes and Inductor.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import Match, Rule, Scaled
from multigraph_backend.region.saved_region import CannotLoad, CannotSave
from multigraph_backend.region.serializable import SerializableRegion

QUICK = {"compiler": "aot_eager"}


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    with torch._dynamo.config.patch(enable_aot_compile=True):  # off by default in torch 2.11
        yield


def ahead(function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None) -> Any:
    made = torch.compile(function, fullgraph=True, backend="multigraph", options=QUICK | (options or {}))
    return made.aot_compile((args, {}))


def saved(compiled: Any, path: Path) -> Any:
    """The same, saved and loaded."""
    compiled.save_compiled_function(str(path))
    return torch.compiler.load_compiled_function(io.BytesIO(path.read_bytes()))


def region_bytes(compiled: Any) -> bytes:
    callable_ = compiled._artifacts.compiled_fn
    made: bytes = type(callable_).serialize_compile_artifacts(callable_)
    return made


def dynamic(rows: int, width: int = 8, dim: int = 0) -> torch.Tensor:
    x = torch.randn(rows, width)
    torch._dynamo.mark_dynamic(x, dim)
    return x


def conditions() -> list[dict[str, tuple[str, int]]]:
    """State and calls of each condition, for each region that is alive."""
    found = []
    for region in multigraph_backend.explain().to_dict()["regions"]:
        entries = {entry["condition"]: (entry["state"], entry["calls"]) for entry in region["variants"]}
        found.append({**entries, "generic": (region["generic"]["state"], region["generic"]["calls"])})
    return found


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        return torch.relu(self.inner(x)) * times + self.shift


def test_variants_are_saved_with_their_region_and_those_that_were_used_are_ready_at_the_first_call(
    tmp_path: Path,
) -> None:
    model = Model()
    compiled = ahead(model.forward, dynamic(6), 3, options={"specialize": [{"x[0]": [4, 5]}]})
    assert multigraph_backend.stats()["generic_compiled"] == 1  # ahead of time: for the inputs of the trace
    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(model, x, 3), model(x, 3))
    loaded = saved(compiled, tmp_path / "f")
    del compiled
    x = torch.randn(7, 8)
    torch.testing.assert_close(loaded(model, x, 3), model(x, 3))
    assert conditions() == [{"x[0] == 4": ("ready", 0), "x[0] == 5": ("declared", 0), "generic": ("ready", 1)}]
    for rows in (4, 5, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(model, x, 3), model(x, 3))
    assert conditions() == [{"x[0] == 4": ("ready", 1), "x[0] == 5": ("ready", 1), "generic": ("ready", 2)}]
    assert multigraph_backend.stats()["eager_calls"] == 0


def test_a_loaded_model_uses_the_parameters_that_it_is_called_with(tmp_path: Path) -> None:
    """Parameters are arguments of the graph: no copy of them is in what was saved."""
    model = Model()
    loaded = saved(ahead(model.forward, dynamic(6), 3), tmp_path / "f")
    x, other = torch.randn(3, 8), Model()
    with torch.no_grad():
        model.inner.weight.mul_(2)
    for called in (model, other):
        torch.testing.assert_close(loaded(called, x, 3), called(x, 3))


def test_gradients_of_a_loaded_model(tmp_path: Path) -> None:
    model = Model()
    loaded = saved(ahead(model.forward, dynamic(6).requires_grad_(), 2), tmp_path / "f")
    x = torch.randn(5, 8, requires_grad=True)
    loaded(model, x, 2).square().sum().backward()
    got, got_of_weight = x.grad, model.inner.weight.grad
    x.grad = model.inner.weight.grad = None
    model(x, 2).square().sum().backward()
    torch.testing.assert_close(got, x.grad)
    torch.testing.assert_close(got_of_weight, model.inner.weight.grad)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def test_rules_by_modules_hold_for_what_is_compiled_after_loading(tmp_path: Path) -> None:
    model = Two()
    rules = [Rule(Match(module="first.*", min_bytes=1), Scaled("int8"))]
    options = {"specialize": [{"x[0]": [4, 5]}], "saved_tensors": rules, "compiler": "inductor"}
    loaded = saved(ahead(model.forward, dynamic(6), options=options), tmp_path / "f")
    x = torch.randn(5, 8)
    torch.testing.assert_close(loaded(model, x), model(x))
    told = [entry for region in multigraph_backend.explain().regions for entry in region.variants]
    (found,) = [entry.saved for entry in told if entry.condition == "x[0] == 5" and entry.calls]
    assert found[0].packed == 1


def test_several_saved_functions_in_one_process(tmp_path: Path) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2 + x.shape[0]

    loaded = [saved(ahead(function, dynamic(6)), tmp_path / function.__name__) for function in (double, halve)]
    for rows in (3, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded[0](x), x * 2)
        torch.testing.assert_close(loaded[1](x), x / 2 + rows)


def test_marks_are_saved_as_what_they_were_understood_to_mean(tmp_path: Path) -> None:
    """A lambda cannot be saved; that it asks for multiples of 4 can."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.shape[0]

    x = torch.randn(6, 8)
    multigraph_backend.mark(x, 0, specialize_on=[lambda n: n % 4 == 0])
    loaded = saved(ahead(f, x), tmp_path / "f")
    for rows in (8, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x), x.sin() + rows)
    assert conditions()[-1] == {"x[0] % 4 == 0": ("ready", 1), "generic": ("ready", 1)}


def test_sizes_with_a_shape_id_are_one_size_also_after_loading(tmp_path: Path) -> None:
    """As vLLM marks its inputs where dynamic shapes are unbacked."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    def marked(rows: int) -> list[torch.Tensor]:
        made = [torch.randn(rows, 8), torch.randn(rows, 8)]
        for tensor in made:
            torch._dynamo.decorators.mark_unbacked(tensor, 0, hint_override=rows, shape_id="tokens")
        return made

    compiled = ahead(f, *marked(6), options={"specialize": [{"x[0]": [4, 1]}]})
    loaded = saved(compiled, tmp_path / "f")
    for callable_ in (compiled, loaded):
        for rows in (4, 1, 5):
            x, y = torch.randn(rows, 8), torch.randn(rows, 8)
            torch.testing.assert_close(callable_(x, y), x * 2 + y)
    each = {"x[0] == 4": ("ready", 1), "x[0] == 1": ("ready", 1), "generic": ("ready", 1)}
    assert conditions() == [each, each]


def test_unbacked_sizes_are_made_up_for_the_variants_that_were_used(tmp_path: Path) -> None:
    """The first call compiles for sizes that it has not; from torch 2.13 on that failed where sizes are unbacked."""

    def marked(rows: int) -> torch.Tensor:
        x = torch.randn(rows, 8)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return x

    compiled = ahead(sine, marked(6), options={"specialize": [{"x[0]": 4}], "compile": "eager"})
    loaded = saved(compiled, tmp_path / "f")
    x = torch.randn(4, 8)
    torch.testing.assert_close(loaded(x), x.sin())
    assert conditions()[-1] == {"x[0] == 4": ("ready", 1), "generic": ("ready", 0)}


def test_guards_that_the_user_drops_are_not_needed_to_pick_the_variant(tmp_path: Path) -> None:
    """As vLLM's mode 2 does: no guard of Dynamo's is kept or asked."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(0)

    compiled = torch.compile(
        f,
        fullgraph=True,
        dynamic=False,
        backend="multigraph",
        options=QUICK | {"specialize": [{"x[0]": 4}], "guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    ).aot_compile(((dynamic(6),), {}))
    loaded = saved(compiled, tmp_path / "f")
    loaded.disable_guard_check()
    loaded._artifacts.compiled_fn.finalize_loading(None)
    for rows in (4, 6, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x), x.softmax(0))
    assert conditions()[-1] == {"x[0] == 4": ("ready", 1), "generic": ("ready", 2)}


@pytest.mark.parametrize(
    ("piece", "states"),
    [("variants", ["generic"]), ("all", ["generic"]), ("cudagraphs", ["x[0] == 4", "generic"])],
)
def test_pieces_that_are_turned_off_where_it_is_loaded_are_off(
    piece: str, states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = ahead(sine, dynamic(6), options={"specialize": [{"x[0]": 4}]})
    compiled(torch.randn(4, 8))
    monkeypatch.setenv("MULTIGRAPH_DISABLE", piece)
    loaded = saved(compiled, tmp_path / "f")
    del compiled
    x = torch.randn(4, 8)
    torch.testing.assert_close(loaded(x), x.sin())
    (found,) = conditions()
    assert list(found) == states
    assert found[states[0]] == ("ready", 1)


def test_marks_are_off_with_the_variants_where_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda rows: rows == 4])
    compiled = ahead(sine, x)
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "variants")
    loaded = saved(compiled, tmp_path / "f")
    del compiled
    torch.testing.assert_close(loaded(x[:4]), x[:4].sin())
    assert conditions() == [{"generic": ("ready", 1)}]


def test_a_piece_that_is_none_is_an_error_where_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ahead(sine, dynamic(6))
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "variant")
    with pytest.raises(multigraph_backend.OptionsError, match="unknown piece 'variant'"):
        saved(compiled, tmp_path / "f")


def test_a_loaded_function_is_warmed_up_by_the_names_of_its_arguments(tmp_path: Path) -> None:
    model = Model()
    shift = model.shift.clone()
    compiled = ahead(model.forward, dynamic(6), 3, options={"specialize": [{"x[0]": [4, 5]}]})
    loaded = saved(compiled, tmp_path / "f")
    del compiled
    account = multigraph_backend.warmup(loaded, (model, torch.randn(7, 8), 3))
    assert account.ready
    assert {row.sizes.get("x[0]") for row in account.calls} >= {4, 5}
    torch.testing.assert_close(model.shift, shift)


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * 2


def test_warming_up_puts_back_buffers_of_a_module_that_is_an_argument() -> None:
    model = Counts()
    compiled = ahead(model.forward, dynamic(6), options={"specialize": [{"x[0]": 4}]})
    assert multigraph_backend.warmup(compiled, (model, torch.randn(7, 8))).ready
    assert model.calls.item() == 0


def test_what_is_sealed_says_what_the_call_would_need(tmp_path: Path) -> None:
    """And not what else was used where it was saved, which the first call makes ready otherwise."""
    compiled = ahead(sine, dynamic(6), options={"specialize": [{"x[0]": [2, 4]}]})
    for rows in (2, 4):
        compiled(torch.randn(rows, 8))
    loaded = saved(compiled, tmp_path / "f")
    multigraph_backend.seal("raise")
    try:
        with pytest.raises(multigraph_backend.Sealed, match=r"x\[0\] == 4 is compiled after seal"):
            loaded(torch.randn(4, 8))
    finally:
        multigraph_backend.unseal()
    torch.testing.assert_close(loaded(x := torch.randn(4, 8)), x.sin())


def test_a_tensor_given_twice_and_changed_runs_as_eager_and_says_why(tmp_path: Path) -> None:
    """Dynamo's guards keep it from code that was traced for two; who drops them gets wrong numbers from stock."""

    def adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    options = QUICK | {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    made = torch.compile(adds, fullgraph=True, backend="multigraph", options=options)
    compiled = made.aot_compile(((dynamic(6), dynamic(6)), {}))
    loaded = saved(compiled, tmp_path / "f")
    loaded.disable_guard_check()
    x = torch.randn(5, 8)
    expected = (x + 1) * 2
    torch.testing.assert_close(loaded(x, x), expected)
    (region,) = multigraph_backend.explain().to_dict()["regions"][-1:]
    assert "is given twice" in str(region)
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    expected = a + 1 + b
    torch.testing.assert_close(loaded(a, b), expected)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_without_guards_a_first_call_that_needs_no_gradient_leaves_it_to_others(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    """Code has gradients where the trace has, whatever the call needs that it is compiled in; as stock's."""

    def squared(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.square() * scale

    example = dynamic(6).requires_grad_()
    options = QUICK | {"specialize": [{"x[0]": 4}]}
    compiled = torch.compile(squared, fullgraph=True, backend="multigraph", options=options)
    made: Any = compiled.aot_compile(((example, torch.ones(8)), {}))  # type: ignore[attr-defined]
    made.disable_guard_check()
    for rows in (4, 5):
        with mode():
            x, scale = torch.randn(rows, 8), torch.randn(8)
            torch.testing.assert_close(made(x, scale), squared(x, scale))
        x, scale = torch.randn(rows, 8, requires_grad=True), torch.randn(8)
        made(x, scale).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach() * scale)
    assert multigraph_backend.stats()["failures"] == 0


def test_guards_on_sizes_alone_and_no_recompile_after_the_first_call() -> None:
    """As vLLM with `evaluate_guards`, without `aot_compile`: all that calls need is compiled at the first one."""
    options = {
        "specialize": [{"x[0]": 4}],
        "compile": "eager",
        "guard_filter_fn": lambda guards: [guard.guard_type == "SHAPE_ENV" for guard in guards],
    }
    compiled = torch.compile(sine, fullgraph=True, dynamic=False, backend="multigraph", options=QUICK | options)
    x = dynamic(6)
    torch.testing.assert_close(compiled(x), x.sin())
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 9):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), x.sin())
    assert conditions() == [{"x[0] == 4": ("ready", 1), "generic": ("ready", 2)}]


def test_options_by_the_name_of_the_model_hold_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls the backend after its trace has ended; the function's name is known all the same."""
    options = {"Model": {**QUICK, "specialize": [{"x[0]": 4}]}}
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", json.dumps(options))
    model = Model()
    compiled = torch.compile(model.forward, fullgraph=True, backend="multigraph")
    compiled = compiled.aot_compile(((dynamic(4), 1), {}))
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    assert region["function"] == "Model.forward"
    assert conditions() == [{"x[0] == 4": ("ready", 0), "generic": ("declared", 0)}]


def test_configuration_of_the_first_compile_is_that_of_a_loaded_one(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    def spy(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        functorch = torch._functorch.config
        seen.append((torch._inductor.config.assume_aligned_inputs, functorch.bypass_autograd_cache_key))
        return gm

    torch._dynamo.register_backend(spy, name="spying")
    try:
        with torch._inductor.config.patch(assume_aligned_inputs=True):
            compiled = ahead(sine, dynamic(6), options={"compiler": "spying"})
        loaded = saved(compiled, tmp_path / "f")
        states = [made._artifacts.compiled_fn._region.state.portable() for made in (compiled, loaded)]
        x = torch.randn(5, 8)
        torch.testing.assert_close(loaded(x), x.sin())
    finally:
        from torch._dynamo.backends import registry

        registry._COMPILER_FNS.pop("spying", None)
        registry._BACKENDS.pop("spying", None)
    # torch's own aot_compile goes past AOTAutograd's cache; a compile of multigraph's must not
    assert seen == [(True, False), (True, False)]
    assert states[0] == states[1]  # what torch changes while it loads takes no part: keys of caches are the same


def test_other_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = region_bytes(ahead(sine, dynamic(6)))
    load = SerializableRegion.deserialize_compile_artifacts
    assert load(data)(6, torch.ones(6, 8))[0].shape == (6, 8)
    for wrong, message in (
        (b"", "no region that multigraph has saved"),
        (b"multigraph region 0\n" + data[20:], "of another format"),
        (data[:40], "damaged"),
        (data[:-1], "damaged: its bytes are not those"),
        (data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "damaged: its bytes are not those"),
        (data.replace(torch.__version__.encode(), b"9.9.9", 1), "saved by torch 9.9.9"),
    ):
        with pytest.raises(CannotLoad, match=message):
            load(wrong)
    monkeypatch.setattr("multigraph_backend.process.sources.key", lambda: "other")
    with pytest.raises(CannotLoad, match=r"saved by multigraph \w+, and this is multigraph other; compile and save"):
        load(data)


def test_what_would_be_a_copy_after_loading_is_not_saved() -> None:
    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return gm

    with pytest.raises(CannotSave, match="its compiler is a callable"):
        region_bytes(ahead(sine, dynamic(6), options={"compiler": compiler}))


@pytest.mark.parametrize("what", ["a parameter", "a buffer", "a module with buffers"])
def test_parameters_and_buffers_that_the_graph_holds_are_not_saved(what: str) -> None:
    """Up to torch 2.11 graphs may hold them: there is a switch of Dynamo's for that."""
    compiled = ahead(sine, dynamic(6))
    module = compiled._artifacts.compiled_fn._region.captured.module
    if what == "a parameter":
        module.register_parameter("held", torch.nn.Parameter(torch.ones(8)))
    elif what == "a buffer":
        module.register_buffer("held", torch.ones(8))
        module._param_name_to_source["held"] = None
        (last,) = module.graph.find_nodes(op="output")
        with module.graph.inserting_before(last):
            module.graph.get_attr("held")
    else:
        module.add_module("held", torch.nn.BatchNorm1d(8, affine=False))
    with pytest.raises(CannotSave, match=f"the graph holds {what}"):
        region_bytes(compiled)


def test_what_is_compiled_at_once_runs_and_says_why_it_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_DISABLE", "all")
    compiled = ahead(sine, dynamic(6))
    x = torch.randn(6, 8)
    torch.testing.assert_close(compiled(x), x.sin())
    with pytest.raises(CannotSave, match="MULTIGRAPH_DISABLE=all"):
        region_bytes(compiled)


def test_a_function_that_is_compiled_as_usual_returns_what_it_did() -> None:
    """Outside of `aot_compile` Dynamo's code calls the generated dispatcher itself: a call costs nothing more."""
    x = dynamic(6)
    compiled = torch.compile(torch.sin, backend="multigraph", options=QUICK)
    torch.testing.assert_close(compiled(x), x.sin())
    with torch._functorch.config.patch(bypass_autograd_cache_key=True):  # which aot_compile sets, and others may
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(torch.sin, backend="multigraph", options=QUICK)(x), x.sin())
