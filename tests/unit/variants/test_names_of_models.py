"""Models of one class are told apart by a name: in the options of the environment, in reports and in messages."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import multigraph_backend
from multigraph_backend import _compat
from multigraph_backend.backend import multigraph
from multigraph_backend.capture import user_code
from multigraph_backend.options import OptionsError


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + x.shape[0]


@pytest.fixture(autouse=True)
def one_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Options for three models of one class."""
    torch._dynamo.reset()
    entries = {
        "*": {"compiler": "eager"},
        "Scaled": {"specialize": [{"x[0]": 4}]},
        "draft": {"specialize": [{"x[0]": 5}]},
        "tar*": {"specialize": [{"x[0]": 6}]},
    }
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", json.dumps(entries))
    yield
    torch._dynamo.reset()


def run(model: torch.nn.Module, compiled: Callable[..., Any]) -> None:
    """Right for all sizes that somebody declared."""
    for rows in (3, 4, 5, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


def served(model: object = None) -> dict[str | None, dict[str, int]]:
    """Calls of each variant, by the name of the model."""
    regions = multigraph_backend.explain(model).to_dict()["regions"]
    found = {
        region["name"]: {entry["condition"]: entry["calls"] for entry in (*region["variants"], region["generic"])}
        for region in regions
    }
    assert len(found) == len(regions)
    return found


THREE = {
    None: {"x[0] == 4": 1, "generic": 3},
    "draft": {"x[0] == 5": 1, "generic": 3},
    "target": {"x[0] == 6": 1, "generic": 3},
}


def by_attribute(model: torch.nn.Module, name: str | None, compile: Callable[..., Any]) -> Callable[..., Any]:
    if name is not None:
        model.multigraph_name = name  # type: ignore[assignment]
    return compile(model)


def by_option(model: torch.nn.Module, name: str | None, compile: Callable[..., Any]) -> Callable[..., Any]:
    return compile(model, options=None if name is None else {"name": name})


NAMED = [by_attribute, by_option]


def by_argument(model: torch.nn.Module, name: str | None, compile: Callable[..., Any]) -> Callable[..., Any]:
    return compile(model, name=name)


if torch.__version__ >= "2.15":  # 2.13 takes the argument, and hands it to Inductor alone
    NAMED.append(by_argument)


@pytest.mark.parametrize("named", NAMED)
def test_models_of_one_class_have_options_of_their_own(named: Callable[..., Any]) -> None:
    """By stock guards all three run the code of the first."""
    models = {name: Scaled() for name in (None, "draft", "target")}
    compile = functools.partial(torch.compile, backend=multigraph, dynamic=True)
    compiled = {name: named(model, name, compile) for name, model in models.items()}
    for name, model in models.items():
        run(model, compiled[name])
    assert served() == THREE
    assert served("tar*") == {"target": THREE["target"]}
    assert served("draft") == {"draft": THREE["draft"]}
    assert "Scaled.forward" in str(multigraph_backend.explain("draft"))
    assert ", draft\n" in str(multigraph_backend.explain("draft"))


@pytest.mark.parametrize("order", [(None, "draft"), ("draft", None)], ids=str)
def test_it_does_not_matter_who_is_called_first(order: tuple[str | None, ...]) -> None:
    models = [Scaled() for _ in order]
    for model, name in zip(models, order, strict=True):
        if name is not None:
            model.multigraph_name = name  # type: ignore[assignment]
    compiled = [torch.compile(model, backend=multigraph, dynamic=True) for model in models]
    for _ in range(2):
        for model, one in zip(models, compiled, strict=True):
            run(model, one)
    assert served() == {name: {key: 2 * calls for key, calls in THREE[name].items()} for name in order}
    (named,) = (model for model in models if hasattr(model, "multigraph_name"))
    assert list(served(named)) == ["draft"]


def test_a_name_on_a_class_is_that_of_its_instances() -> None:
    class Draft(Scaled):
        multigraph_name = "draft"

    model = Draft()
    run(model, torch.compile(model, backend=multigraph, dynamic=True))
    assert served() == {"draft": THREE["draft"]}


def wrapped(model: torch.nn.Module) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return inner


def method(model: torch.nn.Module) -> Callable[..., Any]:
    call = model.forward

    @functools.wraps(call)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return inner


@pytest.mark.parametrize("around", [wrapped, method, lambda model: model.forward])
def test_names_are_found_through_what_libraries_put_around_a_model(around: Callable[..., Any]) -> None:
    models = {name: Scaled() for name in ("draft", "target")}
    for name, model in models.items():
        model.multigraph_name = name  # type: ignore[assignment]
        run(model, torch.compile(around(model), backend=multigraph, dynamic=True))
    assert served() == {name: THREE[name] for name in models}


def test_the_name_in_code_wins() -> None:
    model = Scaled()
    model.multigraph_name = "target"  # type: ignore[assignment]
    run(model, torch.compile(model, backend=multigraph, dynamic=True, options={"name": "draft"}))
    assert served() == {"draft": THREE["draft"]}


def test_messages_say_the_name(caplog: pytest.LogCaptureFixture) -> None:
    model = Scaled()
    options = {"name": "draft", "specialize": [{"y[0]": 8}]}
    run(model, torch.compile(model, backend=multigraph, dynamic=True, options=options))
    assert any(", draft: 'y[0]' is no size" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("value", [3, "", " ", "two\nlines", ["draft"]], ids=repr)
def test_what_is_no_name(value: Any) -> None:
    model = Scaled()
    model.multigraph_name = value
    said = "multigraph_name of Scaled: expected a name: text in one line that is not empty, got "
    with pytest.raises(Exception, match=said):
        torch.compile(model, backend=multigraph)(torch.randn(3, 4))
    with pytest.raises(Exception, match="option 'name': expected a name: text in one line"):
        torch.compile(Scaled(), backend=multigraph, options={"name": value})(torch.randn(3, 4))


def test_two_names_in_code_are_an_error() -> None:
    with pytest.raises(OptionsError, match="option 'name': expected 'b', as the argument name says, got 'a'"):
        multigraph_backend.Options.build({"name": "a"}, environ={}, name="b")


def test_without_names_and_without_options_in_the_environment_no_guard_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(_compat, "guard_attribute", lambda *args: asked.append(args))
    monkeypatch.delenv("MULTIGRAPH_OPTIONS")
    model = Scaled()
    torch.compile(model, backend=multigraph, options={"compiler": "eager"})(torch.randn(3, 4))
    assert asked == []
    model.multigraph_name = "draft"  # type: ignore[assignment]
    torch._dynamo.reset()
    torch.compile(model, backend=multigraph, options={"compiler": "eager"})(torch.randn(3, 4))
    assert asked == [("self", (), "multigraph_name", "draft", False)]


def test_where_this_torch_has_no_such_guards_the_name_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code._compat, "missing", lambda feature, *_: ("gone",) if feature == "instances" else ())
    model = Scaled()
    model.multigraph_name = "draft"  # type: ignore[assignment]
    run(model, torch.compile(model, backend=multigraph, dynamic=True))
    assert served() == {"draft": THREE["draft"]}


def test_the_profiler_and_the_log_show_the_name() -> None:
    from torch.profiler import profile

    model = Scaled()
    compiled = torch.compile(model, backend=multigraph, dynamic=True, options={"name": "draft"})
    run(model, compiled)
    with profile() as profiled:
        compiled(torch.randn(5, 4))
    assert "multigraph: Scaled.forward, draft: x[0] == 5" in [event.key for event in profiled.key_averages()]


def test_a_key_without_a_model_is_shown_by_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGRAPH_OPTIONS", '{"*": {"compiler": "eager"}, "Skaled": {}, "Scaled": {}}')
    model = Scaled()
    torch.compile(model, backend=multigraph)(torch.randn(3, 4))
    account = multigraph_backend.explain()
    assert [(entry.key, entry.nearest) for entry in account.unmatched_options] == [("Skaled", "Scaled")]
    assert account.to_dict()["unmatched_options"] == [{"key": "Skaled", "nearest": "Scaled"}]
    assert "no model that was compiled has the name 'Skaled' (did you mean 'Scaled'?)" in str(account)
