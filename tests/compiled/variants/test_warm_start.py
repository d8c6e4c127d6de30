"""What is loaded ahead, beside a program that goes on: nothing is compiled, nothing of it is touched or kept alive.

A second process is stood in for by `torch._dynamo.reset()`: regions are new, and torch's caches are on the disk.
"""

from __future__ import annotations

import contextlib
import gc
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import multigraph_backend
from multigraph_backend.cache import manifest, manifests
from multigraph_backend.lower import lowering, traced_once
from multigraph_backend.region import warm_start

SIZES = {"specialize": [{"x[0]": 8}, {"x[0]": {"multiple_of": 16}}]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_what_is_left()  # into the folder of whoever has noted it
    monkeypatch.setenv(manifests.VARIABLE, str(tmp_path / "manifests"))
    yield tmp_path / "manifests"
    write_what_is_left()


def write_what_is_left() -> None:
    assert warm_start.wait_until_warm()
    warm_start.write_all()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend="multigraph", dynamic=True, options={**SIZES, **options})
    return made


def begin_anew() -> None:
    write_what_is_left()
    torch._dynamo.reset()
    multigraph_backend.reset_stats()
    counters.clear()


def call(function: Callable[..., Any], reference: Callable[..., Any], *sizes: int) -> None:
    for size in sizes:
        x = torch.randn(size, 24)
        torch.testing.assert_close(function(x), reference(x))


def states() -> dict[str, str]:
    (region,) = multigraph_backend.explain().to_dict()["regions"]
    return {entry["condition"]: entry["state"] for entry in (*region["variants"], region["generic"])}


def test_while_code_is_loaded_no_collection_of_all_that_is_alive_stops_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while it is looked for in vain; behind both the collector is on, and a compile in a call leaves it alone."""
    collects: list[bool] = []
    build = lowering.fresh_inputs.build

    def noted(*args: Any, **settings: Any) -> Any:
        collects.append(gc.isenabled())
        return build(*args, **settings)

    monkeypatch.setattr(lowering.fresh_inputs, "build", noted)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 29

    call(compiled(f), f, 5, 8)
    assert collects == [True, True]
    begin_anew()
    collects.clear()
    again = compiled(f)
    call(again, f, 5)
    assert warm_start.wait_until_warm()
    assert multigraph_backend.stats()["loaded_ahead"] == 1
    assert collects == [False, False]
    assert gc.isenabled()
    multigraph_backend.seal("refuse")
    try:
        call(again, f, 48)
    finally:
        multigraph_backend.unseal()
    assert collects == [False, False, False]
    assert multigraph_backend.stats()["loaded_ahead"] == 1
    assert gc.isenabled()


def test_most_used_first_and_right_at_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    call(compiled(f), f, 5, 48, 8, 8, 8)
    begin_anew()
    order: list[str] = []
    load = multigraph_backend.region.region.Region.load_ahead

    def noted(self: Any, condition: str, *rest: Any) -> bool:
        order.append(condition)
        return load(self, condition, *rest)

    monkeypatch.setattr(multigraph_backend.region.region.Region, "load_ahead", noted)
    again = compiled(f)
    call(again, f, 5)
    assert warm_start.wait_until_warm()
    assert order == ["x[0] == 8", "generic", "x[0] % 16 == 0"]
    assert multigraph_backend.stats()["loaded_ahead"] == 2
    assert set(states().values()) == {"ready"}
    call(again, f, 8, 64)
    assert multigraph_backend.stats()["variants_compiled"] == 0
    assert multigraph_backend.stats()["variant_calls"] == 2
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0


def _up() -> nn.Module:
    return nn.Linear(24, 48).requires_grad_(False)


def _down() -> nn.Module:
    return nn.Linear(48, 24).requires_grad_(False)


def of_blocks() -> dict[str, str | None]:
    """What the report says of blocks that come again, by condition."""
    (region,) = multigraph_backend.explain().regions
    return {entry.condition: entry.repeated for entry in (*region.variants, region.generic) if entry.state == "ready"}


def test_no_block_that_comes_again_is_traced_for_code_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ahead nor in the calls; where the caches have lost it, it is traced and compiled as at first."""
    traced: list[int] = []
    trace = traced_once._Tracing.trace

    def noted(self: Any, blocks: Any) -> None:
        traced.append(len(blocks))
        trace(self, blocks)

    monkeypatch.setattr(traced_once._Tracing, "trace", noted)
    torch.manual_seed(0)
    norms, ups, downs = ([make() for _ in range(6)] for make in (lambda: nn.LayerNorm(24), _up, _down))

    def f(x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(norms, ups, downs, strict=True):
            x = x + down(torch.nn.functional.gelu(up(norm(x))).cos() + 0.5).tanh() * 1.5
        return x

    call(compiled(f), f, 5, 8)
    assert len(traced) == 2
    bodies = of_blocks()
    assert all(said is not None and said.startswith("repeated blocks: ") for said in bodies.values()), bodies
    begin_anew()
    traced.clear()
    monkeypatch.setattr(multigraph_backend.region.region.Region, "load_ahead", lambda *args: False)
    again = compiled(f)
    call(again, f, 5, 8)
    assert not traced
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0
    assert multigraph_backend.stats()["loaded_ahead"] == 0
    assert of_blocks() == bodies  # what the code itself does not tell
    begin_anew()
    other = str(uuid.uuid4())
    monkeypatch.setattr(lowering, "_sources_of_bodies", lambda: other)
    call(compiled(f), f, 8)
    assert len(traced) == 1


def test_what_the_caches_lack_is_not_compiled_and_no_generator_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles come to other keys than the manifest's: the load ends before torch traces."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + x.shape[0]

    call(compiled(f), f, 5, 8)
    begin_anew()
    real = torch.random.set_rng_state
    set_back: list[object] = []
    monkeypatch.setattr(torch.random, "set_rng_state", lambda state: (set_back.append(state), real(state)))
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        again = compiled(f)
        call(again, f, 5)
        before = len(set_back)
        assert before  # a compile of a call does it, while the call waits
        assert warm_start.wait_until_warm()
        assert counters["aot_autograd"]["autograd_cache_miss"] == 3  # asked for, compiled; asked for ahead
        assert multigraph_backend.stats()["loaded_ahead"] == 0
        assert states() == {"x[0] == 8": "declared", "x[0] % 16 == 0": "declared", "generic": "ready"}
        assert len(set_back) == before
        call(again, f, 8)
    assert counters["aot_autograd"]["autograd_cache_saved"] == 2


def test_nothing_of_a_call_is_kept_alive_and_a_region_ends_as_before() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = Scaled()
    again = compiled(model)
    x = torch.randn(5, 24)
    again(x).sum().backward()
    gone = [weakref.ref(x), weakref.ref(model.weight)]
    del x, model, again
    torch._dynamo.reset()
    assert warm_start.wait_until_warm()
    gc.collect()
    assert [entry() for entry in gone] == [None, None]


def test_with_a_condition_that_is_new_and_one_that_is_gone() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2

    call(compiled(f), f, 5, 8, 48)
    begin_anew()
    call(compiled(f, specialize=[{"x[0]": 4}, {"x[0]": 8}]), f, 5)
    assert warm_start.wait_until_warm()
    assert states() == {"x[0] == 4": "declared", "x[0] == 8": "ready", "generic": "ready"}


@pytest.mark.parametrize("how", ["option", "variable", "compiler"])
def test_nothing_is_noted_where_it_is_off(how: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 3

    options: dict[str, Any] = {"option": {"warm_start": False}, "compiler": {"compiler": "aot_eager"}}.get(how, {})
    if how == "variable":
        monkeypatch.setenv(manifests.VARIABLE, "")
    call(compiled(f, **options), f, 5, 8)
    assert warm_start.wait_until_warm()
    assert not folder.exists()


def test_views_and_changed_inputs() -> None:
    """A view is like any other input, but where the graph changes its inputs: then nothing is made up for it."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    for taken, loaded in ((lambda size: torch.randn(size, 24), 1), (lambda size: torch.randn(size + 2, 24)[1:-1], 0)):
        again = compiled(f)
        for size in (5, 8):
            x = taken(size)
            expected = f(x.clone())
            torch.testing.assert_close(again(x), expected)
        begin_anew()
        again = compiled(f)
        x = taken(5)
        expected = f(x.clone())
        torch.testing.assert_close(again(x), expected)
        assert warm_start.wait_until_warm()
        assert multigraph_backend.stats()["loaded_ahead"] == loaded
        begin_anew()


def test_a_manifest_that_lies_about_values_gives_no_wrong_number() -> None:
    """Whatever values it names: they choose what is asked for, and calls run what their own guards allow."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(0) + x.shape[0]

    call(compiled(f), f, 5, 8)
    begin_anew()
    (found,) = manifests.find().manifests
    forms = {entry.condition: entry.forms for entry in found.used}
    for value in (-3, 0, 1, 8, 10**12):
        lies = tuple(
            manifest.Used(
                name,
                5,
                tuple(manifest.UsedForm(tuple((key, value) for key, _ in one.values), one.keys) for one in kept),
            )
            for name, kept in forms.items()
        )
        manifests.note(manifest.Manifest(found.graph, used=lies))
    again = compiled(f)
    call(again, f, 5)
    assert warm_start.wait_until_warm()
    call(again, f, 8, 9, 48, 1)


def test_after_seal_what_the_caches_have_is_loaded_and_nothing_else() -> None:
    """Loading is no compile: it is neither refused nor counted, whatever was chosen; what must be compiled is."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sinh() * 3

    call(compiled(f), f, 5, 8)
    begin_anew()
    for then in ("refuse", "raise", "log"):
        again = compiled(f, warm_start=False)  # nothing is loaded before a call asks
        call(again, f, 5)
        multigraph_backend.seal(then)  # type: ignore[arg-type]
        try:
            call(again, f, 8, 8)
            assert multigraph_backend.stats()["after_seal"] == 0
            assert multigraph_backend.stats()["loaded_ahead"] == 1
            assert multigraph_backend.stats()["variant_calls"] == 2
            if then == "refuse":  # 48 is in no cache: generic runs, and torch is asked once
                missed = counters["aot_autograd"]["autograd_cache_miss"]
                call(again, f, 48, 48, 48)
                assert counters["aot_autograd"]["autograd_cache_miss"] == missed + 1
                assert multigraph_backend.stats()["after_seal"] == 3
                assert multigraph_backend.stats()["variants_compiled"] == 0
        finally:
            multigraph_backend.unseal()
        begin_anew()


def test_warm_up_begins_with_what_earlier_processes_used() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.cosh() * 2

    account = multigraph_backend.warmup(compiled(f), torch.randn(5, 24))
    assert account.ready
    assert account.loaded == 0
    assert multigraph_backend.stats()["variants_compiled"] == 2
    begin_anew()
    account = multigraph_backend.warmup(compiled(f), torch.randn(5, 24))
    assert account.ready
    assert account.loaded == 2
    assert "2 loaded from caches" in str(account)
    assert multigraph_backend.stats()["variants_compiled"] == 0
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0


def test_instances_with_names_of_their_own_have_manifests_of_their_own() -> None:
    """One class, one graph, one set of compiled code; each is noted, and loaded, as it was used itself."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.square() + 5

    call(compiled(f, name="draft"), f, 5, 8)
    call(compiled(f, name="target"), f, 5, 48)
    begin_anew()
    found = {entry.names[-1]: {used.condition for used in entry.used} for entry in manifests.find().manifests}
    assert found == {"draft": {"generic", "x[0] == 8"}, "target": {"generic", "x[0] % 16 == 0"}}
    call(compiled(f, name="target"), f, 5)
    assert warm_start.wait_until_warm()
    assert states() == {"x[0] == 8": "declared", "x[0] % 16 == 0": "ready", "generic": "ready"}


@pytest.mark.parametrize("options", [{}, {"compile": "background"}], ids=["", "background"])
def test_a_parameter_can_be_exchanged_after_a_call(options: dict[str, Any]) -> None:
    """torch does that only where nobody refers to it weakly; what is loaded ahead is compiled for its like."""
    linear = torch.nn.Linear(24, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = linear(x)
        return made

    call(compiled(f), f, 5, 8)
    begin_anew()
    again = compiled(f, **options)
    call(again, f, 5)
    torch.utils.swap_tensors(linear.weight, torch.nn.Parameter(torch.randn(3, 24)))
    call(again, f, 5)
    assert warm_start.wait_until_warm()
    call(again, f, 5, 8)
    assert multigraph_backend.stats()["failures"] == 0


# ---------------------------------------------------------------- Python floats


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return (x.softmax(-1) * by + (x * (by + 1)).sin()).cos()


def with_floats(compiled: Callable[..., Any], *calls: tuple[int, float]) -> None:
    for size, by in calls:
        x = torch.randn(size, 24)
        torch.testing.assert_close(compiled(x, by), scaled(x, by), equal_nan=True)


SPECIAL = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("options", [{}, {"repeat": False}], ids=["as it is", "repeat off"])
def test_code_that_computes_with_a_float_is_loaded_for_whatever_value(options: dict[str, Any]) -> None:
    with_floats(compiled(scaled, **options), (5, 2.5), (8, 3.25))
    begin_anew()
    again = compiled(scaled, **options)
    with_floats(again, (5, -7.5))
    assert warm_start.wait_until_warm()
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0
    assert multigraph_backend.stats()["loaded_ahead"] == 1
    multigraph_backend.seal("raise")
    try:
        with_floats(again, (8, 11.0), (6, 2.5), (8, -1.0), (5, 30.0))
    finally:
        multigraph_backend.unseal()
    assert multigraph_backend.stats()["failures"] == multigraph_backend.stats()["eager_calls"] == 0
    assert "Python floats" not in str(multigraph_backend.explain())
    with_floats(again, *((size, value) for size in (5, 8) for value in SPECIAL))


@pytest.mark.parametrize("first", SPECIAL)
def test_a_special_value_is_right_before_and_behind_what_is_loaded(first: float) -> None:
    with_floats(compiled(scaled), (5, first), (5, 2.5), (8, first))
    begin_anew()
    again = compiled(scaled)
    with_floats(again, (5, 3.5), (8, first))
    assert warm_start.wait_until_warm()
    with_floats(again, *((size, value) for size in (5, 8) for value in (*SPECIAL, 0.5)))
    assert multigraph_backend.stats()["failures"] == 0


def test_code_that_relies_on_the_value_of_a_float_leaves_the_caches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_anew()
    noting = lowering._noting_floats

    @contextlib.contextmanager
    def asking(graph: Any, fresh: Any) -> Iterator[set[Any]]:
        with noting(graph, fresh) as found:
            yield found
        found.update(graph.floats)

    with monkeypatch.context() as patched:
        patched.setattr(lowering, "_noting_floats", asking)
        with_floats(compiled(scaled), (5, 2.5))
    assert counters["aot_autograd"]["autograd_cache_saved"] == 1
    assert "torch's caches forget what its code relies on" in str(multigraph_backend.explain())
    write_what_is_left()
    (noted,) = manifests.find().manifests
    (form,) = noted.used[0].forms
    assert (form.key, form.floats) == (None, "")
    begin_anew()
    again = compiled(scaled)
    with_floats(again, (5, 3.5))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0


def test_what_nobody_would_find_is_not_put_into_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would leave one more there."""
    monkeypatch.setenv(manifests.VARIABLE, "")
    begin_anew()
    with_floats(compiled(scaled), (5, 2.5))
    assert counters["aot_autograd"]["autograd_cache_saved"] == 0
    assert multigraph_backend.stats()["failures"] == 0


def test_a_graph_whose_floats_are_constants_has_no_name_of_its_own(folder: Path) -> None:
    with torch._dynamo.config.patch(specialize_float=True):
        with_floats(compiled(scaled), (5, 2.5))
    write_what_is_left()
    (noted,) = manifests.find().manifests
    (form,) = noted.used[0].forms
    assert form.key is not None
    assert form.floats == ""
